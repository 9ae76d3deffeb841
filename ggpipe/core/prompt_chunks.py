"""How a prompt is cut into chunks, so that all stages of a pipeline work on it at the same time.

A prompt in one chunk keeps one stage busy at a time. In chunks of `c` rows, the last of `n / c` chunks leaves the last
of `s` stages after `n / c + s - 1` runs. Short chunks fill the pipeline sooner; long ones share what each run costs
besides its rows, and the weights that it reads. `chunk_rows` weighs one against the other with a nominal machine, which
is counted in the time that a stage takes for one more row of a long run:

    a run of n rows takes         _RUN_ROWS + (n ** _OVERLAP + read ** _OVERLAP) ** (1 / _OVERLAP)
    read, of a dense model:       0, as _RUN_ROWS holds the weights that every run reads
    read, of a mixture:           _READ_ROWS * (sparsity * (1 - (1 - 1 / sparsity) ** n) - 1), as each row has experts
                                  of its own

and its attention (`row_work`), which takes longer, the more tokens come before: the last chunks are the dearest. Only
long chunks can share the expansion of latent vectors.

It takes the chunk length whose makespan is shortest. That depends on the lengths of the prompt and of what is kept of
it, the number of stages and the model alone, and on nothing that is measured: the same settings give the same chunks in
each run. The optimum is flat: powers of two come within 1 % of it. They are few, so groups use their kept graphs again,
and they are whole tiles of the matrix kernels. A single stage gains nothing from shorter runs, and gets the longest
ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ggpipe.core.row_work import LONG_ROWS, ONLY_WEIGHTS, RowWork

TILE = 4
"""Rows that llama.cpp's matrix kernels take together: 7 rows take longer than 8."""
_RUN_ROWS = 2.0
"""What a run costs besides its rows: messages, waking up, operators that wait for all threads, the weights that it
reads in any case. On two cores of an AMD EPYC, one thread a stage, a run of n rows of a dense model of 0.4 B parameters
took as long as 3 to 6 + n rows of a run of 256."""
_READ_ROWS = 2.0
"""Rows that a node computes in the time in which it reads their weights. A compromise: with the 8 of the core that
`_OVERLAP` was measured on, chunks are too long for nodes that read while they compute."""
_OVERLAP = 1.5
"""How much reading weights and computing overlap: not at all at 1, entirely at infinity. On a core that computes 8 rows
while it reads their weights, runs of 8 to 512 rows of a mixture that uses 2 of 16 experts took within 6 % of the
formula; those of 32 rows took 2.2 times as long as if both overlapped entirely."""


@functools.lru_cache(1024)
def chunk_rows(n_tokens: int, n_stages: int, most: int, work: RowWork = ONLY_WEIGHTS, n_past: int = 0) -> int:
    """How many of a prompt's `n_tokens` tokens go into each run of a pipeline: a power of two from one tile on, or
    `most`, the rows of the longest run possible. `n_past`: tokens of its sequence that are kept from before."""
    if n_stages == 1:
        return most
    return min(_lengths(n_tokens, most), key=lambda length: _makespan(n_tokens, n_stages, length, work, n_past))


def chunk_end(at: int, n_tokens: int, n_batch: int, n_rows: int) -> int:
    """Where the chunk ends that begins at `at` in a prompt of `n_tokens`, as libllama cuts it: batches of `n_batch`
    tokens, each in pieces of `n_rows`."""
    start = at - at % n_batch
    return min(start + ((at - start) // n_rows + 1) * n_rows, start + n_batch, n_tokens)


def _lengths(n_tokens: int, most: int) -> Iterator[int]:
    """Chunk lengths to choose from, the longest first."""
    yield most
    length = TILE
    shorter = []
    while length < min(n_tokens, most):
        shorter.append(length)
        length *= 2
    yield from reversed(shorter)


def _makespan(n_tokens: int, n_stages: int, length: int, work: RowWork, n_past: int) -> float:
    """When the last of equal stages is through with a prompt in chunks of this length."""

    def chunk(start: int) -> float:
        n = min(length, n_tokens - start)
        return _run(n, work.sparsity) + sum(part.of_run(n, n_past + start) for part in work.attention)

    if length >= LONG_ROWS:
        times = [chunk(start) for start in range(0, n_tokens, length)]
        return sum(times) + (n_stages - 1) * max(times, default=0.0)
    n_whole, n_rest = divmod(n_tokens, length)
    weights = n_whole * _run(length, work.sparsity) + (_run(n_rest, work.sparsity) if n_rest else 0.0)
    attention = sum(part.in_short_runs(n_tokens, n_past) for part in work.attention)
    last = n_whole * length
    dearest = max(chunk(last - length) if n_whole else 0.0, chunk(last) if n_rest else 0.0)
    return weights + attention + (n_stages - 1) * dearest


def _run(n_rows: int, sparsity: float) -> float:
    read = _READ_ROWS * max(sparsity * (1 - (1 - 1 / sparsity) ** n_rows) - 1, 0.0)
    both: float = (n_rows**_OVERLAP + read**_OVERLAP) ** (1 / _OVERLAP)
    return _RUN_ROWS + both
