"""Measures how fast a machine reads a model's file past the page cache, as a rank does that streams its weights."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ggpipe.llama.layers import READERS

_PIECE = 4 << 20  # a multiple of any block size, and about as much as a matrix
_HUGE_PAGE = 2 << 20
_LEAST_PIECES = 2  # that each reader reads


def disk_speed(paths: Sequence[Path], budget_s: float) -> float:
    """Bytes per second that readers together read from these files, measured for about `budget_s` seconds; 0 where
    they cannot be read.

    Each of them reads pieces of the largest file, in order, from a place of its own.
    """
    path = max(paths, key=lambda own: own.stat().st_size)
    n_pieces = max(path.stat().st_size // _PIECE, 1)

    def read(number: int) -> int:
        with contextlib.closing(_Reader(path)) as reader:
            piece, n, n_bytes = number * n_pieces // READERS, 0, 0
            while n < _LEAST_PIECES or time.perf_counter() < until:
                n_bytes += reader.read((piece + n) % n_pieces * _PIECE)
                n += 1
            return n_bytes

    start = time.perf_counter()
    until = start + budget_s
    try:
        with ThreadPoolExecutor(READERS) as pool:
            n_bytes = sum(pool.map(read, range(READERS)))
    except OSError:
        return 0.0
    return n_bytes / (time.perf_counter() - start)


class _Reader:
    """A file that is read past the page cache where its filesystem can do that."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            self._file = os.open(path, os.O_RDONLY)
        # in huge pages, as streamed weights: many disks are slow if a request is scattered over small ones
        self._memory = mmap.mmap(-1, _PIECE + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) % _HUGE_PAGE
        self._buffer = memoryview(self._memory)[start : start + _PIECE]

    def read(self, offset: int) -> int:
        """Read a piece; returns its bytes. Raises OSError."""
        return os.preadv(self._file, [self._buffer], offset)

    def close(self) -> None:
        """Close the file."""
        self._buffer.release()
        self._memory.close()
        os.close(self._file)
