"""A node's cores, and how threads share them when there are more threads than cores."""

from __future__ import annotations

from collections.abc import Callable

from ggpipe.sim.clock import VirtualClock

NICE_WEIGHT = 335 / 1024
"""A thread's share of a core at nice 5, relative to an ordinary thread's (Linux' scheduler)."""

_MOST_SHARE = 0.95


class CpuTask:
    """Work on one node."""

    __slots__ = ("done", "left_s", "rate", "since", "team", "threads", "version", "weight")

    def __init__(self, work_s: float, threads: int, weight: float, done: Callable[[], None], team: int = 1) -> None:
        """`work_s`: seconds with a core for each thread and no other work. `done` is called at its end.

        `team`: tasks of the node that wait for each other all the time, as a group's parts do at each sum.
        """
        self.left_s = work_s
        self.threads = threads
        self.weight = weight
        self.team = team
        self.done = done
        self.rate = 0.0
        self.since = 0.0
        self.version = 0


class Cores:
    """Tasks get cores by their weights, at most one per thread; all of them progress at the same time.

    `crowd`: how fast a core is while all others are busy, as a share of its speed alone: cores share memory, caches,
    and sometimes the core itself. A team progresses while other tasks leave all of its tasks their cores. Polls
    take a part of a core and delay no other task: that is included in the measured `NodeSpec.turns`.
    """

    def __init__(self, clock: VirtualClock, n: int, crowd: float = 1.0) -> None:
        self._clock = clock
        self._n = n
        self._crowd = crowd
        self._tasks: list[CpuTask] = []
        self._wanted = 0
        self._polling = 0.0

    def start(self, task: CpuTask) -> None:
        """Begin to work on a task."""
        task.since = self._clock.now
        self._tasks.append(task)
        self._wanted += task.threads
        if self._are_enough:  # the usual case on clusters
            self._set_rate(task, 1.0)
        else:
            self._share(task)

    def poll(self, more: float) -> None:
        """Change the share of a core that polling takes, by `more`."""
        self._polling = max(self._polling + more, 0.0)
        if self._tasks:
            self._share(None)

    def stop(self, task: CpuTask) -> None:
        """Stop a task before its end."""
        task.version += 1
        self._remove(task)

    def _remove(self, task: CpuTask) -> None:
        were_enough = self._are_enough
        self._tasks.remove(task)
        self._wanted -= task.threads
        if not were_enough:
            self._share(None)

    def _share(self, new: CpuTask | None) -> None:
        """Update all rates, and plan the ends of tasks whose rate changed."""
        if self._are_enough:
            for task in self._tasks:
                if task.rate != 1.0:
                    self._set_rate(task, 1.0)
            return
        free = self._n - min(self._polling, self._n / 2)  # polls are short, so they come first
        cores = self._spread(free)
        busy = sum(cores)
        for task, own in zip(self._tasks, cores, strict=True):
            rate = share = own / task.threads
            if task.team > 1:
                rate *= (share / min(free / (task.team * task.threads), 1.0)) ** (task.team - 1)
            if busy > own:
                others = self._n - own
                crowding = (busy - own) / others if others > 0 else 0.0
                rate *= 1 - (1 - self._crowd) * min(crowding, 1.0)
            if rate != task.rate or task is new:
                self._set_rate(task, rate)

    @property
    def _are_enough(self) -> bool:
        """Each thread has a core of its own."""
        return self._crowd == 1.0 and self._wanted + self._polling <= self._n

    def _spread(self, free: float) -> list[float]:
        """Cores for each task, of those that polls leave: by weight, none more than its threads can use."""
        wanted = [float(task.threads) for task in self._tasks]
        if len(wanted) == 1 or self._wanted <= free:
            return [min(own, free) for own in wanted]
        cores, hungry = [0.0] * len(wanted), list(range(len(wanted)))
        while hungry and free > 1e-12:
            weights = {i: self._tasks[i].weight * wanted[i] for i in hungry}
            unit = free / sum(weights.values())
            full = [i for i in hungry if unit * weights[i] >= wanted[i]]
            for i in full or hungry:
                cores[i] = wanted[i] if full else unit * weights[i]
            if not full:
                break
            free -= sum(wanted[i] for i in full)
            hungry = [i for i in hungry if i not in full]
        return cores

    def _set_rate(self, task: CpuTask, rate: float) -> None:
        now = self._clock.now
        task.left_s -= (now - task.since) * task.rate
        task.since, task.rate = now, rate
        task.version += 1
        version = task.version

        def end() -> None:
            if task.version == version:
                task.version += 1
                self._remove(task)
                task.done()

        if rate > 0:
            self._clock.after(max(task.left_s, 0.0) / rate, end)


def weight_of(guest: float, n_cores: int, crowd: float) -> float:
    """The weight of a thread that has `guest` of its speed alone while `n_cores` ordinary threads compute."""
    share = min(guest / crowd, _MOST_SHARE)
    return share * n_cores / (n_cores - share)


class OwnCores(Cores):
    """As Cores, for a node that runs one task at a time, as most nodes of a cluster do: a fast path."""

    def start(self, task: CpuTask) -> None:
        """See Cores."""

        def end() -> None:
            if task.version == 0:
                task.done()

        self._clock.after(task.left_s, end)

    def stop(self, task: CpuTask) -> None:
        """See Cores."""
        task.version = 1
