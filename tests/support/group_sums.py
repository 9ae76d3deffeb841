"""Parts of a group as processes, and what their sums are to be."""

from __future__ import annotations

import functools
import multiprocessing
import os
import zlib
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from ggpipe.llama.libllama import native

Floats = npt.NDArray[np.float32]
Work = Callable[[native.GroupSum, int], object]
"""What a part does, given its number; what it returns can be pickled."""

SIZES = (1, 2, 15, 17, 2048, 8192, 12289, 32768, 32769, 65536, 100_001, 1_000_000)
"""Floats: below and above those at which parts share the work, and at which sums go in pieces."""


class Part:
    """A part in a process of its own."""

    def __init__(self, work: Work, memory: int, part: int, n_parts: int) -> None:
        self._results, child = multiprocessing.Pipe(duplex=False)
        self.process = multiprocessing.get_context("fork").Process(
            target=_run, args=(work, memory, part, n_parts, child), daemon=True
        )
        self.process.start()
        child.close()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> object:
        """The next thing that it sent, or what its work returned. Raises EOFError when it died."""
        assert self._results.poll(300), "a part hangs"
        return self._results.recv()

    def end(self) -> None:
        """Kill it, if it is there."""
        self.process.kill()
        self.process.join()


class Group:
    """Parts that share memory; as a context manager it ends them."""

    def __init__(self, n_parts: int, work: Work) -> None:
        memory = os.memfd_create("test")
        self.parts = [Part(work, memory, part, n_parts) for part in range(n_parts)]
        os.close(memory)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            part.end()

    def results(self) -> list[object]:
        """What the works of all parts returned."""
        return [part.wait() for part in self.parts]


def _run(work: Work, memory: int, part: int, n_parts: int, results: Connection) -> None:
    results.send(work(native.shared_sum(memory, part, n_parts), part))


def add(sums: native.GroupSum, data: Floats, stop: bool = False) -> bool:
    """Add up an array over all parts, in place."""
    return sums.sum(data.ctypes.data, data.size, stop)


def values_of(part: int, n: int) -> Floats:
    """A part's values: of different magnitudes, so that the order of adding them matters."""
    rng = np.random.default_rng([part, n])
    return (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(np.float32)


def total_of(values: Sequence[Floats]) -> Floats:
    """Added up in order."""
    return functools.reduce(np.add, values)


def crc(data: Floats) -> int:
    """Of all its bits."""
    return zlib.crc32(data.tobytes())
