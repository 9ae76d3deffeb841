"""How busy the processors of this machine are."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle and iowait, of the columns in /proc/stat
_COLUMNS = 8  # the others are parts of these


def busy_share(seconds: float, stat: Path = _STAT) -> float:
    """Share of the time of this process's processors that anybody uses in the next `seconds` seconds, 0 to 1; 0 if the
    kernel does not say. What other virtual machines take away counts as well."""
    cpus = os.sched_getaffinity(0)
    before = _times(stat, cpus)
    time.sleep(seconds)
    busy, total = (after - earlier for after, earlier in zip(_times(stat, cpus), before, strict=True))
    return min(max(busy / total, 0.0), 1.0) if total > 0 else 0.0


def _times(stat: Path, cpus: Collection[int]) -> tuple[int, int]:
    """(busy, total) time of these processors since the machine's start, in clock ticks."""
    busy = total = 0
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0, 0
    for line in lines:
        name, *numbers = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cpus:
            ticks = [int(number) for number in numbers[:_COLUMNS]]
            total += sum(ticks)
            busy += sum(n for column, n in enumerate(ticks) if column not in _IDLE)
    return busy, total
