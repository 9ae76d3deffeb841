"""Measures how much of a core a draft gets next to busy ranks: its thread runs at nice 5, for short times."""

from __future__ import annotations

import statistics
import threading
import time
from types import TracebackType

import numpy as np

from ggpipe.llama import machine

_RESTS = 5  # as long as the work: a draft waits for its target most of the time
_ALONE, _ALONE_S = 15, 0.5
_LEAST_BYTES = 1 << 16


class Guest:
    """A thread at nice 5 that alternates between a few milliseconds of work and a rest, inside a `with` block."""

    def __init__(self, work_s: float, bytes_per_s: float) -> None:
        """Measure how long the work takes while nothing else runs. The work is reading memory for about `work_s`
        seconds, at `bytes_per_s`."""
        self._data = np.ones(max(int(work_s * bytes_per_s), _LEAST_BYTES), np.uint8)
        self._rest_s = _RESTS * work_s
        self._took_s: list[float] = []
        self._ends = threading.Event()
        until = time.monotonic() + _ALONE_S
        with self:
            while len(self._took_s) < _ALONE and (not self._took_s or time.monotonic() < until):
                time.sleep(max(work_s, 1e-3))
        self._alone_s = statistics.median(self._took_s)

    def __enter__(self) -> Guest:
        self._took_s = []
        self._ends.clear()
        self._thread = threading.Thread(target=self._work, name="guest", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()

    @property
    def share(self) -> float | None:
        """Speed in the last `with` block relative to the speed alone, up to 1; None if no work was completed."""
        return min(self._alone_s / statistics.fmean(self._took_s), 1.0) if self._took_s else None

    def _work(self) -> None:
        machine.yield_to_others()
        while not self._ends.wait(self._rest_s):
            start = time.perf_counter()
            self._data.max()
            self._took_s.append(time.perf_counter() - start)
