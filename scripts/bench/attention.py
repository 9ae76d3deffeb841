"""ggpipe's own flash attention against ggml's, over many shapes: `scripts/bench/stage --attention`.

A stage uses its own where `attention_is_faster` in native/attention.cpp says so. A shape for which that is slower than
ggml's kernel is a mistake, and the exit code is 1.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ggpipe.llama.libllama import native

N_SHAPES = 60
WIDTHS, GROUPS, ROWS, CELLS, THREADS = (
    (64, 96, 128, 256),
    (1, 2, 4, 8, 16),
    (1, 2, 4, 8, 16, 64),
    (512, 2048, 16384),
    (1, 2),
)
TOLERANCE = 1.03
"""A ratio of times that noise explains."""
_LIMIT_S, _FEWEST, _MOST = 1.5, 5, 41


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention: what it computes, and with how many threads."""

    width: int
    group: int
    """Query heads that share a head of keys and values."""
    n_rows: int
    n_cells: int
    n_threads: int

    @property
    def n_heads(self) -> tuple[int, int]:
        """Heads of queries, and of keys and values: as many as models of a few billion parameters have."""
        n = 16 if self.width > 128 else 32
        return n, n // self.group

    def __str__(self) -> str:
        heads = "/".join(map(str, self.n_heads))
        return f"{self.width:5d} {heads:>6} {self.n_rows:5d} {self.n_cells:6d} {self.n_threads:8d}"


def all_shapes() -> list[Shape]:
    """All that may be measured."""
    return [
        Shape(width=width, group=group, n_rows=n_rows, n_cells=n_cells, n_threads=n_threads)
        for width, group, n_rows, n_cells, n_threads in itertools.product(WIDTHS, GROUPS, ROWS, CELLS, THREADS)
    ]


def shapes(n: int = N_SHAPES) -> Iterator[Shape]:
    """Some of them, always the same ones: half have one or two rows, which are the hardest to share."""
    few = [shape for shape in all_shapes() if shape.n_rows <= 2]
    more = [shape for shape in all_shapes() if shape.n_rows > 2]
    for own in (few, more):
        yield from sorted(random.Random(1).sample(own, n // 2), key=own.index)


def measure(shape: Shape) -> tuple[Sequence[tuple[float, float]], bool]:
    """Seconds of each round with ggml's kernel and with ours, in turn, and whether a stage uses ours."""

    def rounds(n: int) -> tuple[Sequence[tuple[float, float]], bool]:
        return native.time_attention(
            width=shape.width, n_heads=shape.n_heads, n_rows=shape.n_rows, n_cells=shape.n_cells,
            n_threads=shape.n_threads, n_rounds=n,
        )  # fmt: skip

    (first,), _ = rounds(1)
    return rounds(min(max(int(_LIMIT_S / sum(first)), _FEWEST), _MOST))


def bench_attention(n: int = N_SHAPES) -> int:
    """Print a line per shape. Returns the exit code."""
    print(f"attention: microseconds, medians; {n} shapes; ours / ggml's with the quartiles of the rounds' ratios")
    print("width  heads  rows  cells  threads     ggml     ours  ratio               used")
    n_slower = n_missed = 0
    for shape in shapes(n):
        seconds, uses_own = measure(shape)
        ratios = sorted(own / ggml for ggml, own in seconds)
        low, ratio, high = statistics.quantiles(ratios, n=4)
        is_slower = uses_own and ratio > TOLERANCE
        n_slower += is_slower
        n_missed += not uses_own and ratio < 1 / TOLERANCE
        ggml, own = (statistics.median(column) * 1e6 for column in zip(*seconds, strict=True))
        used = "ours: SLOWER" if is_slower else "ours" if uses_own else "ggml's"
        print(f"{shape} {ggml:8.0f} {own:8.0f}  {ratio:.2f} [{low:.2f}-{high:.2f}]    {used}", flush=True)
    print(f"ours is used and slower for {n_slower} shapes; ggml's is used and slower for {n_missed}")
    return 1 if n_slower else 0
