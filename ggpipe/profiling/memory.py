"""Measures how fast a machine reads memory."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from ggpipe.llama import machine


def memory_speed(threads: int, budget_s: float) -> float:
    """Bytes per second that `threads` threads together read from memory, measured for about `budget_s` seconds.

    Each thread repeatedly finds the maximum of its own array, which numpy does with vector instructions and without the
    GIL. Together the arrays are four times as large as the caches.
    """
    n_bytes = min(max(4 * machine.cache_bytes(), 64 << 20), 1 << 30, max(machine.available_bytes() // 8, 1 << 20))

    def read(part: NDArray[np.uint8]) -> float:
        start, n = time.perf_counter(), 0
        while n < 3 or time.perf_counter() - start < budget_s:
            part.max()
            n += 1
        return n * part.size / (time.perf_counter() - start)

    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(lambda _: np.ones(n_bytes // threads, np.uint8), range(threads)))
        return sum(pool.map(read, parts))
