"""Four streams at a time through one engine client, as a program: the front end of its ranks, and each of them.

python -P streams.py generate OPTIONS

The options are those of `ggpipe generate`. What comes of the streams goes as lines of JSON into the file that
GGPIPE_STREAMS names: `{"stream": 0, "tokens": [5, 6]}`, and at its end `{"stream": 0, "finish": "length"}`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from ggpipe.channel.client import StartedRanks
from ggpipe.channel.events import RequestEnded, TokenReady
from ggpipe.cli.command_line import parse
from ggpipe.cli.launching import run_command
from ggpipe.cli.messages import report
from ggpipe.config.context import ContextConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.request_spec import RequestSpec
from ggpipe.errors import GgpipeError
from ggpipe.launch.environment import leave_status
from ggpipe.options.commands import COMMANDS
from ggpipe.options.engine_config import engine_config, speculation_config
from ggpipe.options.settings import PromptSettings
from ggpipe.options.table import OPTIONS

PROMPTS = Path(__file__).parents[2] / "prompts"
STREAMS = (
    ("tale.txt", 120, SamplingConfig(temp=0, ignore_eos=True)),
    ("program.txt", 20, SamplingConfig(temp=0.8, seed=1, ignore_eos=True)),
    ("long.txt", 300, SamplingConfig(temp=0.8, seed=2, repeat_penalty=1.2, ignore_eos=True)),
    ("long.txt", 45, SamplingConfig(temp=1.2, top_k=0, seed=3, frequency_penalty=0.1, ignore_eos=True)),
)
"""A file, the number of its first tokens that are the prompt, and how to sample."""
N_SEQ = 16


def main() -> int:
    """Run all streams, or be one of the ranks. Returns the exit code; errors are reported."""
    (generate,) = (command for command in COMMANDS if command.name == "generate")
    try:
        options = parse(generate, OPTIONS, sys.argv[2:])
        config = engine_config(options)
        drafts = tuple(replace(draft, context=_wide(draft.context)) for draft in config.drafts)
        config = replace(config, context=_wide(config.context), drafts=drafts, n_requests=len(STREAMS))
        speculation, n_predict = speculation_config(options), options[PromptSettings].n_predict

        def front_end(ranks: StartedRanks) -> int:
            engine = ranks.load()
            requests = {}
            for number, (name, n_prompt, sampling) in enumerate(STREAMS):
                prompt = engine.tokenize((PROMPTS / name).read_text())[:n_prompt]
                spec = RequestSpec(prompt=prompt, sampling=sampling, n_predict=n_predict, speculation=speculation)
                requests[engine.submit(spec).id] = number
            with Path(os.environ["GGPIPE_STREAMS"]).open("w", buffering=1) as file:
                while requests:
                    for event in engine.step():
                        match event:
                            case TokenReady(request, token):
                                file.write(json.dumps({"stream": requests[request], "tokens": [token.id]}) + "\n")
                            case RequestEnded(request=request, finish=finish):
                                number = requests.pop(request)
                                file.write(json.dumps({"stream": number, "finish": finish.value}) + "\n")
            return 0

        return leave_status(run_command(config, options, front_end))
    except GgpipeError as e:
        report(e)
        return leave_status(e.exit_code)


def _wide(context: ContextConfig) -> ContextConfig:
    return replace(context, n_seq=N_SEQ)


if __name__ == "__main__":
    sys.exit(main())
