"""What sampling needs of a group's logits, put together from what each part has."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import structs
from support.pipeline import Pipeline
from support.reference import run_of
from support.zoo import make

from ggpipe.config.context import ContextConfig
from ggpipe.core.messages import LogitsKind, LogitsRequest, Row, RowLogits, Run
from ggpipe.llama.group import Group, together
from ggpipe.llama.libllama import native
from ggpipe.llama.params import row_of

N_VOCAB = 64
WANTS = (
    LogitsRequest(LogitsKind.TOP),
    LogitsRequest(LogitsKind.TOP, 5),
    LogitsRequest(LogitsKind.TOP, 40, banned=(0, 7, 8, 63)),
    LogitsRequest(LogitsKind.FULL, banned=(3,)),
    LogitsRequest(LogitsKind.TOP, N_VOCAB, banned=tuple(range(1, N_VOCAB))),
    LogitsRequest(LogitsKind.TOP, 3, banned=tuple(range(20))),
    LogitsRequest(LogitsKind.TOP, 5, temp=0.7),
    LogitsRequest(LogitsKind.TOP, 50, banned=(0, 7, 8, 63), temp=1.3),
)


def best(logits: Sequence[float], want: LogitsRequest, first: int = 0, end: int = N_VOCAB) -> RowLogits:
    """What a want is of tokens [first, end)."""
    known = {id: logits[id] for id in range(first, end) if id not in want.banned}
    if want.kind is LogitsKind.FULL:
        return RowLogits(7, None, np.array([known.get(id, -np.inf) for id in range(first, end)], np.float32), 0.0)
    ids = sorted(known, key=lambda id: (-known[id], id))[: want.n]
    shares = {id: math.exp(x / (want.temp or 1)) for id, x in known.items()}
    total = sum(shares.values())
    log_sum_exp = math.log(total) if want.n > 1 and known else math.nan
    below = tuple(sum(share for other, share in shares.items() if other < id) / total for id in ids)
    logits = tuple(known[id] for id in ids)
    return RowLogits(7, tuple(ids), logits, log_sum_exp, below=below if want.temp else ())


@pytest.mark.parametrize("columns", [(32, 32), (40, 0, 24), (1, 2, 61), (64, 0)], ids=str)
def test_logits_of_all_parts_with_ties(columns: tuple[int, ...]) -> None:
    rng = np.random.default_rng(sum(columns[:-1]))
    rows = [rng.integers(-3, 4, N_VOCAB).astype(float).tolist() for _ in WANTS]
    memory = os.memfd_create("test")
    sums = [native.shared_sum(memory, part, len(columns)) for part in range(len(columns))]
    os.close(memory)

    def part_of(part: int) -> list[RowLogits]:
        first = sum(columns[:part])
        own = [best(logits, want, first, first + columns[part]) for logits, want in zip(rows, WANTS, strict=True)]
        group = Group(part=part, n_parts=len(columns), shares=(1,) * len(columns), sum=sums[part])
        return together(group, columns, WANTS, own)

    with ThreadPoolExecutor(len(columns)) as threads:
        found, *others = threads.map(part_of, range(len(columns)))
    assert not any(others)
    for row, logits, want in zip(found, rows, WANTS, strict=True):
        expected = best(logits, want)
        assert (row.row, row.ids) == (7, expected.ids)
        assert list(row.logits) == list(expected.logits)
        assert row.log_sum_exp == pytest.approx(expected.log_sum_exp, rel=1e-12, nan_ok=True)
        assert row.below == pytest.approx(expected.below, abs=1e-6)


def test_the_best_of_a_models_logits(tmp_path: Path) -> None:
    """As many as are wanted, and whole rows: the same logits."""
    path = make("llama", tmp_path / "llama.gguf", n_ff=512)
    prompt = run_of(1, range(5, 25), 0)
    wants = (
        LogitsRequest(LogitsKind.FULL),
        LogitsRequest(LogitsKind.TOP),
        LogitsRequest(LogitsKind.TOP, 40),
        LogitsRequest(LogitsKind.TOP, 9, banned=(3, 300)),
        LogitsRequest(LogitsKind.TOP, 5, sums=False, also=(0, 200, 383)),
        LogitsRequest(LogitsKind.LIKELY, banned=(3, 300), min_p=0.3),
        LogitsRequest(LogitsKind.DRAWN, banned=(3, 300), temp=0.7, number=0.4),
    )
    with Pipeline(path, context=ContextConfig(n_ctx=256, n_seq=4), shares=[(2, 1, 1)]) as pipeline:
        rows = tuple(
            msgspec.structs.replace(row, logits_request=i % len(wants) if i >= 12 else -1)
            for i, row in enumerate(prompt.rows)
        )
        first = pipeline.outcome(structs.replace(prompt, rows=rows, logits_requests=wants))
        again = pipeline.outcome(
            Run(
                id=2,
                rows=tuple(Row(token=r.token, pos=r.pos, seqs=(1,), request=1, logits_request=0) for r in prompt.rows),
                logits_requests=wants,
            )
        )
    whole = {row.row: row.logits for row in again.rows}
    assert [row.row for row in first.rows] == list(range(12, 20))
    for row in first.rows:
        want = wants[row.row % len(wants)]
        if row.ids is None:
            np.testing.assert_array_equal(row.logits, whole[row.row])
            continue
        if want.kind is not LogitsKind.TOP:
            expected = row_of(row.row, whole[row.row], want)
            assert (row.ids, row.logits) == (expected.ids, expected.logits)
            continue
        logits = whole[row.row].copy()
        logits[list(want.banned)] = -np.inf
        order = np.lexsort((np.arange(len(logits)), -logits))
        order = order[(np.arange(len(order)) < want.n) | np.isin(order, want.also)]
        assert row.ids is not None
        assert row.ids[: want.n] == tuple(order[: want.n].tolist())
        assert set(row.ids) == set(order.tolist())
        order = np.array(row.ids)
        assert row.logits == tuple(logits[order].tolist())
        if want.n > 1 and want.sums:
            assert row.log_sum_exp == pytest.approx(float(np.log(np.exp(logits.astype(float)).sum())), abs=1e-4)
