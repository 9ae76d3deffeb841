"""What this machine has and what this process takes of it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import threading
from pathlib import Path

from ggpipe.llama.libllama import lib

_NICE = 5
_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_TIMERSLACK = 29
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4


def cpu_features() -> tuple[str, ...]:
    """Instruction sets that the loaded ggml uses."""
    # Not as llama_cpp calls it: libllama writes the text into one place for all threads, so this keeps the GIL.
    text: bytes = ctypes.PYFUNCTYPE(ctypes.c_char_p)(("llama_print_system_info", lib._lib))()
    features = (part.split(" : ")[-1].split(" = ") for part in text.decode().split(" | ") if part)
    return tuple(name if value == "1" else f"{name}={value}" for name, value in features)


def cpu_name() -> str:
    """What the processor calls itself; "" where it does not say."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def libllama_version() -> str:
    """The version of the llama-cpp-python that holds libllama."""
    text = Path(lib.__file__).with_name("__init__.py").read_text()  # importing it takes longer than all of libllama
    found = re.search(r'__version__ = "(.+)"', text)
    return found[1] if found is not None else "unknown"


def resident_bytes() -> int:
    """This process's memory in RAM, its share of pages that it shares with other processes (PSS)."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def available_bytes() -> int:
    """RAM that this process could take: free, or holding what can be read again; at most what its cgroup leaves."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, _left_of_limit())
    return _left_of_limit()


def _left_of_limit() -> int:
    """Of the limits of this process's cgroups (version 2, and 1); files that are held in memory can be dropped."""
    left = 2**62
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        limit, used = ("memory.max", "anon") if controllers == "" else ("memory.limit_in_bytes", "total_rss")
        root = Path("/sys/fs/cgroup", controllers)
        inner = Path(path.lstrip("/"))
        for folder in (root / part for part in (inner, *inner.parents)):
            with contextlib.suppress(OSError, ValueError, KeyError):  # no limit, or none shown to this process
                usage = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                left = min(left, int((folder / limit).read_text()) - int(usage[used]))
    return max(left, 0)


def cache_bytes() -> int:
    """All last-level caches of this machine; 0 where it does not say."""
    caches = set()
    for folder in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        with contextlib.suppress(OSError, ValueError):
            size = int((folder / "size").read_text().strip().removesuffix("K")) * 1024
            caches.add(((folder / "shared_cpu_list").read_text(), size))
    return sum(size for _, size in caches)


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
    """Let this thread, and those it starts, run on what others leave of the cores (Linux: nice 5)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def sharpen_timers() -> None:
    """Let this process's short waits end when they are due: Linux otherwise adds 50 µs of slack to each."""
    _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3)


def advise(address: int, size: int, advice: int) -> int:
    """Tell the kernel how these bytes will be used (madvise). Returns the error's number, or 0."""
    return ctypes.get_errno() if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice) else 0


def lock_memory() -> str | None:
    """Keep in RAM whatever this process touches. Returns why that is not possible, or None."""
    return os.strerror(ctypes.get_errno()) if _libc.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT) else None


def collect_new_objects() -> None:
    """Exclude all current objects from Python's garbage collection, and examine all later ones each time.

    Those are few, and some refer to themselves: trees of draft tokens, pointers of ctypes. With the usual thresholds
    these would stay for thousands of requests, and scatter over memory what stays longer.
    """
    gc.freeze()
    gc.set_threshold(300, 1, 1)
    gc.collect()  # a whole collection follows when there are a quarter more objects than after the last one
