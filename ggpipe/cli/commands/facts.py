"""`ggpipe facts`: what this machine has, for `ggpipe doctor` on another one."""

from __future__ import annotations

import msgspec

from ggpipe.engine.doctor.facts import MARK, facts_of_this_machine, questions_from_environment
from ggpipe.options.option import Options


def run(_: Options) -> int:
    """Print the facts as a line of JSON. Returns the exit code."""
    questions = questions_from_environment()
    print(f"{MARK}{msgspec.json.encode(facts_of_this_machine(questions)).decode()}", flush=True)
    return 0
