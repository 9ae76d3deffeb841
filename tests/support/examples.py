"""How many examples hypothesis tries: fewer than with `scripts/test --full`."""

from __future__ import annotations

import os

full = False
"""Whether `--full` was given; the root's conftest.py sets this before it collects tests."""


def n_examples(few: int, many: int) -> int:
    """`many` with `--full`, else `few`. The environment variable GGPIPE_EXAMPLES replaces either."""
    return int(os.environ.get("GGPIPE_EXAMPLES") or (many if full else few))
