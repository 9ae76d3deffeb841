"""A node's cores, and what happens when more threads want them than there are."""

from __future__ import annotations

from collections.abc import Callable

from ggpipe.sim.clock import Clock

NICE_WEIGHT = 110 / 1024
"""What a thread at nice 10 gets of a core for each part that an ordinary one gets (Linux' scheduler)."""

STICKS_S = 4e-3
"""A thread at nice 10 that works so briefly stays on the core where it woke up, although another one may be free more
often: the kernel moves threads to free cores every few milliseconds."""


class Task:
    """Work on one node."""

    __slots__ = ("done", "left_s", "rate", "since", "sticks", "threads", "version", "weight")

    def __init__(
        self, work_s: float, threads: int, weight: float, done: Callable[[], None], sticks: bool = False
    ) -> None:
        """`work_s`: seconds with a core for each thread and nothing beside. `done` is called when it is through.

        `sticks`: once other work takes all cores but a part of one, it gets no more than its weight.
        """
        self.left_s = work_s
        self.sticks = sticks
        self.threads = threads
        self.weight = weight
        self.done = done
        self.rate = 0.0
        self.since = 0.0
        self.version = 0


class Cores:
    """Tasks get cores by their weights, at most one for each thread; all of them progress at the same time.

    `crowd`: how fast a core is while all others are busy, as a share of its speed alone: cores share memory, caches,
    and sometimes the very core.
    """

    def __init__(self, clock: Clock, n: int, crowd: float = 1.0) -> None:
        self._clock = clock
        self._n = n
        self._crowd = crowd
        self._tasks: list[Task] = []
        self._wanted = 0
        self._looking = 0.0
        self._n_stuck = 0

    def start(self, task: Task) -> None:
        """Begin to work on it."""
        task.since = self._clock.now
        self._tasks.append(task)
        self._wanted += task.threads
        self._n_stuck += task.sticks
        if self._are_enough:  # as mostly on clusters: nobody is in the way
            self._set_rate(task, 1.0)
        else:
            self._share(task)

    def look(self, more: float) -> None:
        """From now on, looking for messages takes so much more, or less, of a core."""
        self._looking = max(self._looking + more, 0.0)
        if self._tasks:
            self._share(None)

    def stop(self, task: Task) -> None:
        """Give it up before it is through."""
        task.version += 1
        self._remove(task)

    def _remove(self, task: Task) -> None:
        were_enough = self._are_enough
        self._tasks.remove(task)
        self._wanted -= task.threads
        self._n_stuck -= task.sticks
        if not were_enough:
            self._share(None)

    def _share(self, new: Task | None) -> None:
        """Set all rates anew, and plan the ends of tasks whose rate changed."""
        if self._are_enough:
            for task in self._tasks:
                if task.rate != 1.0:
                    self._set_rate(task, 1.0)
            return
        cores = self._spread()
        busy = sum(cores) + self._taken
        for task, own in zip(self._tasks, cores, strict=True):
            others = self._n - own
            crowding = (busy - own) / others if others > 0 else 0.0
            rate = own / task.threads * (1 - (1 - self._crowd) * min(crowding, 1.0))
            if rate != task.rate or task is new:
                self._set_rate(task, rate)

    @property
    def _are_enough(self) -> bool:
        """Each task has what it wants of the cores."""
        return self._crowd == 1.0 and not self._n_stuck and self._wanted + self._looking <= self._n

    @property
    def _taken(self) -> float:
        return min(self._looking, self._n / 2)

    def _spread(self) -> list[float]:
        """Cores for each task: by weight, none more than its threads can use. Looks are short, so they come first."""
        wanted = [float(task.threads) for task in self._tasks]
        cores, hungry, free = [0.0] * len(wanted), list(range(len(wanted))), self._n - self._taken
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
        if self._n_stuck:
            busy = sum(cores) + self._taken
            for i, task in enumerate(self._tasks):
                if task.sticks and busy - cores[i] > self._n - 1 + 1e-9:
                    cores[i] = min(cores[i], task.weight * wanted[i])
        return cores

    def _set_rate(self, task: Task, rate: float) -> None:
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


class OwnCores(Cores):
    """As Cores, for a node that does one thing at a time: most nodes of a cluster, so it is kept short."""

    def start(self, task: Task) -> None:
        """See Cores."""

        def end() -> None:
            if task.version == 0:
                task.done()

        self._clock.after(task.left_s, end)

    def stop(self, task: Task) -> None:
        """See Cores."""
        task.version = 1
