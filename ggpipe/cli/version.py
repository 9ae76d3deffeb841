"""What `ggpipe --version` prints: what a bug report needs to say about this installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ggpipe._version import __version__

_LIMIT_S = 20.0


def version_lines() -> Iterator[str]:
    """The versions of ggpipe and of what it uses. Libraries are loaded in another process, which may crash."""
    own = commit()
    yield f"ggpipe {__version__}" + (f" (commit {own})" if own else "")
    facts = _facts()
    if not facts:
        yield "libllama or the extension cannot be loaded: `ggpipe doctor` says why"
        return
    yield f"llama.cpp of llama-cpp-python {facts['libllama']}"
    yield f"MPI: {facts['mpi'] or 'no library found'}; mpirun: {facts['mpirun'] or 'none'}"
    yield f"CPU: {facts['cpu'] or 'unknown'}, {facts['cores']} cores, {' '.join(facts['cpu_features'])}"
    yield f"Python {facts['python']}, {facts['system']}"


def commit() -> str:
    """The commit of the sources, if they are a git checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _facts() -> dict[str, Any]:
    from ggpipe.engine.doctor.facts import MARK, Questions

    variable, _, value = Questions().environment.partition("=")
    command = [sys.executable, "-P", "-m", "ggpipe", "facts"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, env={**os.environ, variable: value}
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), "")
    return json.loads(line.removeprefix(MARK)) if line else {}
