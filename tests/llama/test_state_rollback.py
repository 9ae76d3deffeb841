"""Draft tokens of recurrent and hybrid models are taken back without a trace.

Each architecture is checked in a process of its own: what libllama cannot do ends it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import HANG_S, ROOT

from ggpipe.llama.context_ids import TAKES_BACK


@pytest.mark.parametrize("name", ["granitehybrid", "kimi-linear", "lfm2moe", "nemotron_h", "qwen35", "rwkv7"])
def test_draft_tokens_leave_no_trace(name: str, tmp_path: Path) -> None:
    assert name in TAKES_BACK
    command = [sys.executable, "-m", "support.state_check", name, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
