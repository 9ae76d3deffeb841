"""What this machine has and what this process takes of it."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import llama_cpp

from ggpipe.engine.libllama import native

_NICE = 10


def cpu_features() -> tuple[str, ...]:
    """Instruction sets that the loaded ggml uses."""
    return tuple(native.cpu_features())


def libllama_version() -> str:
    """The version of the llama-cpp-python that holds libllama."""
    return str(llama_cpp.__version__)


def resident_bytes() -> int:
    """This process's memory in RAM, its share of pages that it shares with other processes (PSS)."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def cores() -> int:
    """Physical cores that this process may run on; two hardware threads of a core count once."""
    allowed = os.sched_getaffinity(0)
    seen = set()
    for cpu in allowed:
        try:
            seen.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            return len(allowed)
    return len(seen)


def yield_to_others() -> None:
    """Let this thread, and those it starts, run on what others leave of the cores (Linux: nice 10)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def sharpen_timers() -> None:
    """Let this process's short waits end when they are due: Linux otherwise adds 50 µs of slack to each."""
    native.set_timer_slack(1)
