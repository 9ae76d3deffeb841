"""ggpipe's own flash attention against ggml's, over many shapes: `scripts/bench/stage --attention`.

A stage uses its own for every shape and every type of KV cells (native/attention.cpp), so that a row has the same bits
in any run. The exit code is 1 if it is slower than ggml's for one of them.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gguf import GGMLQuantizationType

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


def measure(shape: Shape, cells: GGMLQuantizationType) -> Sequence[tuple[float, float]]:
    """Seconds of each round with ggml's kernel and with ours, in turn."""

    def rounds(n: int) -> Sequence[tuple[float, float]]:
        return native.time_attention(
            width=shape.width, n_heads=shape.n_heads, n_rows=shape.n_rows, n_cells=shape.n_cells,
            type=cells.value, n_threads=shape.n_threads, n_rounds=n,
        )  # fmt: skip

    (first,) = rounds(1)
    return rounds(min(max(int(_LIMIT_S / sum(first)), _FEWEST), _MOST))


def bench_attention(cells: GGMLQuantizationType, n: int = N_SHAPES) -> int:
    """Print a line per shape. Returns the exit code."""
    print(f"attention, {cells.name} cells: microseconds, medians; {n} shapes")
    print("ratio: ours / ggml's, with the quartiles of the rounds")
    print("width  heads  rows  cells  threads     ggml     ours  ratio")
    all_ratios = []
    for shape in shapes(n):
        seconds = measure(shape, cells)
        ratios = sorted(own / ggml for ggml, own in seconds)
        low, ratio, high = statistics.quantiles(ratios, n=4)
        all_ratios.append(ratio)
        ggml, own = (statistics.median(column) * 1e6 for column in zip(*seconds, strict=True))
        mark = "  SLOWER" if ratio > TOLERANCE else ""
        print(f"{shape} {ggml:8.0f} {own:8.0f}  {ratio:.2f} [{low:.2f}-{high:.2f}]{mark}", flush=True)
    n_slower = sum(ratio > TOLERANCE for ratio in all_ratios)
    low, ratio, high = min(all_ratios), statistics.median(all_ratios), max(all_ratios)
    print(f"ours is slower for {n_slower} shapes; ratios from {low:.2f} to {high:.2f}, median {ratio:.2f}")
    return 1 if n_slower else 0
