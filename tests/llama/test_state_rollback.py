"""Draft tokens of recurrent and hybrid models are taken back without a trace.

Architectures are checked in a process of their own: what libllama cannot do ends it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.commands import HANG_S, ROOT

from ggpipe.llama.context_ids import TAKES_BACK

NAMES = ("deepseek4", "granitehybrid", "kimi-linear", "lfm2moe", "nemotron_h", "qwen35", "rwkv7")


def test_draft_tokens_leave_no_trace(tmp_path: Path) -> None:
    assert set(NAMES) <= TAKES_BACK
    command = [sys.executable, "-m", "support.state_check", str(tmp_path), *NAMES]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
