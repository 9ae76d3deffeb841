"""The sockets and cores of this machine, and which rank runs on which.

A rank binds its threads to its socket itself, so all MPIs and mpiruns behave the same. Linux places memory close to the
thread that touches it first, so everything that a rank allocates after it was bound is in its socket's memory, as long
as there is room.

Where ranks have more threads than there are cores, Linux often lets two stages take turns on one core while the draft
has the other. Stages that are bound to cores of their own compute at the same time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

SYSFS = Path("/sys")

Cpus = frozenset[int]


def sockets(sysfs: Path) -> tuple[Cpus, ...]:
    """The CPUs of each socket with its own memory, ordered by their first CPU. Sockets that share a memory node, as in
    many virtual machines, count as one. If there is only one, its CPUs may be empty."""
    system, of_package = sysfs / "devices/system", dict[str, Cpus]()
    try:
        for node in _numbers((system / "node/has_memory").read_text()):
            cpus = _numbers((system / f"node/node{node}/cpulist").read_text())
            packages = {(system / f"cpu/cpu{cpu}/topology/physical_package_id").read_text() for cpu in cpus}
            if len(packages) > 1:
                return (frozenset(),)
            for package in packages:
                of_package[package] = of_package.get(package, frozenset()) | cpus
    except (OSError, ValueError):  # the kernel has no NUMA, or hides it from this process
        return (frozenset(),)
    return tuple(sorted(of_package.values(), key=min)) or (frozenset(),)


def free_sockets(allowed: Collection[int], sysfs: Path) -> int:
    """Number of sockets that ranks can be bound to; 1 if this process is already bound. `allowed`: the CPUs that it may
    run on."""
    own = sockets(sysfs)
    return len(own) if all(cpus <= set(allowed) for cpus in own) else 1


def cpus_of(number: int, n_ranks: int, allowed: Collection[int], sysfs: Path) -> Cpus | None:
    """The CPUs for one of the `n_ranks` ranks of this machine, counted from 0; None: do not bind it.

    The same number of ranks run on each socket, the first ones on the first socket. If that is impossible, no rank is
    bound. Neither is a rank that its launcher or the user has already bound, so that `allowed`, the CPUs that it may
    run on, are not all.
    """
    n_sockets = free_sockets(allowed, sysfs)
    if n_sockets == 1 or not 0 <= number < n_ranks or n_ranks % n_sockets:
        return None
    return sockets(sysfs)[number * n_sockets // n_ranks]


def cores(allowed: Collection[int], sysfs: Path) -> tuple[Cpus, ...]:
    """The CPUs of each physical core that this process may run on, ordered by their first CPU."""
    found = set()
    for cpu in allowed:
        try:
            text = (sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
            found.add(_numbers(text) & frozenset(allowed))
        except (OSError, ValueError):
            found.add(frozenset((cpu,)))
    return tuple(sorted(found, key=min))


def cores_of(number: int, threads: Sequence[int], n_others: int, allowed: Collection[int], sysfs: Path) -> Cpus | None:
    """The CPUs of the cores for one of the ranks of this machine that have `threads`, counted from 0; None: do not bind
    it.

    As many cores for each as it has threads, if there are enough for all, but too few for the `n_others` threads of
    further ranks as well. No rank is bound if its launcher or the user has already bound it.
    """
    try:
        online = _numbers((sysfs / "devices/system/cpu/online").read_text())
    except (OSError, ValueError):
        return None
    own = cores(allowed, sysfs)
    if not online <= set(allowed) or not sum(threads) <= len(own) < sum(threads) + n_others:
        return None
    first = sum(threads[:number])
    return frozenset().union(*own[first : first + threads[number]])


def bind(cpus: Cpus) -> None:
    """Restrict all threads of this process, and those that they start, to these CPUs."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has exited
            os.sched_setaffinity(int(thread), cpus)


def sharing(own: Collection[int], all_ranks: Sequence[Collection[int]]) -> float:
    """How many ranks share the CPUs `own`, including their own rank. A rank that may run elsewhere counts partly."""
    return sum(len(set(own) & set(other)) / len(other) for other in all_ranks)


def _numbers(text: str) -> Cpus:
    """Parse a list of the kernel, such as `0-3,8`. Raises ValueError."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(n for first, _, last in ranges for n in range(int(first), int(last or first) + 1))
