"""The sockets of this machine, each with memory of its own, and which rank runs on which.

A rank takes its socket itself, by its threads' affinity, so every MPI and every mpirun gives the same. Linux puts
memory where the thread runs that touches it first. So all that a rank reads or allocates after it has taken its socket
is there, as long as there is room.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

SYSFS = Path("/sys")

Cpus = frozenset[int]


def sockets(sysfs: Path) -> tuple[Cpus, ...]:
    """The CPUs of each socket that has memory of its own, by their first CPU. A single one, which may be empty, where
    the kernel names no second: sockets whose memory is one node, as in many virtual machines, count as one."""
    system, of_package = sysfs / "devices/system", dict[str, Cpus]()
    try:
        for node in _numbers((system / "node/has_memory").read_text()):
            cpus = _numbers((system / f"node/node{node}/cpulist").read_text())
            packages = {(system / f"cpu/cpu{cpu}/topology/physical_package_id").read_text() for cpu in cpus}
            if len(packages) > 1:
                return (frozenset(),)
            for package in packages:
                of_package[package] = of_package.get(package, frozenset()) | cpus
    except (OSError, ValueError):  # no NUMA in this kernel, or not shown to this process
        return (frozenset(),)
    return tuple(sorted(of_package.values(), key=min)) or (frozenset(),)


def free_sockets(allowed: Collection[int], sysfs: Path) -> int:
    """How many sockets ranks can have each to themselves; 1 where this process was bound already. `allowed`: the CPUs
    that it may run on."""
    own = sockets(sysfs)
    return len(own) if all(cpus <= set(allowed) for cpus in own) else 1


def cpus_of(number: int, n_ranks: int, allowed: Collection[int], sysfs: Path) -> Cpus | None:
    """The CPUs for one of `n_ranks` ranks of this machine, counted from 0; None: those that it has.

    Ranks divide the sockets evenly, the first ones on the first socket; where they cannot, no rank is bound. Nor is one
    that its launcher or the user has bound already: `allowed`, the CPUs that it may run on, are fewer than there are.
    """
    n_sockets = free_sockets(allowed, sysfs)
    if n_sockets == 1 or not 0 <= number < n_ranks or n_ranks % n_sockets:
        return None
    return sockets(sysfs)[number * n_sockets // n_ranks]


def bind(cpus: Cpus) -> None:
    """Let all threads of this process, and those that they start, run on these CPUs alone."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), cpus)


def sharing(own: Collection[int], all_ranks: Sequence[Collection[int]]) -> float:
    """How many ranks share the CPUs `own`, that rank included. A rank that may also run elsewhere counts in part."""
    return sum(len(set(own) & set(other)) / len(other) for other in all_ranks)


def _numbers(text: str) -> Cpus:
    """`0-3,8` as the kernel writes it. Raises ValueError."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(n for first, _, last in ranges for n in range(int(first), int(last or first) + 1))
