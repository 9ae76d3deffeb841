"""The rule that cuts prompts: whole tiles, within bounds, and close to the shortest time for any machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggpipe.core.prompt_chunks import chunk_end, chunk_rows
from ggpipe.core.row_work import Attention, RowWork

TILE = 4
N_TOKENS = st.integers(1, 20_000)
N_STAGES = st.integers(2, 64)
SPARSITY = st.floats(1, 40)


def lengths_of(n_tokens: int, n_rows: int) -> list[int]:
    found, at = [], 0
    while at < n_tokens:
        end = chunk_end(at, n_tokens, 2048, n_rows)
        found.append(end - at)
        at = end
    return found


def lengths_of_any(n_tokens: int, n_rows: int) -> list[int]:
    return [min(n_rows, n_tokens - at) for at in range(0, n_tokens, n_rows)]


@given(N_TOKENS, st.integers(1, 4096), SPARSITY)
def test_one_stage_gets_the_longest_runs(n_tokens: int, most: int, sparsity: float) -> None:
    assert chunk_rows(n_tokens, 1, most, RowWork(sparsity=sparsity)) == most


@given(N_TOKENS, N_STAGES, st.integers(1, 2048), SPARSITY)
def test_runs_have_whole_tiles_or_are_as_long_as_possible(
    n_tokens: int, n_stages: int, most: int, sparsity: float
) -> None:
    n_rows = chunk_rows(n_tokens, n_stages, most, RowWork(sparsity=sparsity))
    assert 1 <= n_rows <= most
    assert n_rows == most or (n_rows % TILE == 0 and n_rows & (n_rows - 1) == 0)


@given(N_TOKENS, N_STAGES, SPARSITY)
def test_chunks_cover_the_prompt(n_tokens: int, n_stages: int, sparsity: float) -> None:
    lengths = lengths_of(n_tokens, n_rows := chunk_rows(n_tokens, n_stages, 512, RowWork(sparsity=sparsity)))
    assert sum(lengths) == n_tokens
    assert all(length == n_rows for length in lengths[:-1])


@given(N_TOKENS, N_STAGES, st.integers(1, 2048), SPARSITY)
def test_the_same_settings_give_the_same_chunks(n_tokens: int, n_stages: int, most: int, sparsity: float) -> None:
    before = chunk_rows(n_tokens, n_stages, most, RowWork(sparsity=sparsity))
    chunk_rows.cache_clear()
    assert chunk_rows(n_tokens, n_stages, most, RowWork(sparsity=sparsity)) == before


@given(st.integers(1, 10_000), st.integers(2, 31))
def test_longer_prompts_and_fewer_stages_get_longer_runs(n_tokens: int, n_stages: int) -> None:
    n_rows = min(chunk_rows(n_tokens, n_stages, 512), n_tokens)
    assert n_rows <= 2 * min(chunk_rows(2 * n_tokens, n_stages, 512), 2 * n_tokens)
    assert 2 * n_rows >= min(chunk_rows(n_tokens, 2 * n_stages, 512), n_tokens)


@pytest.mark.parametrize(
    ("n_tokens", "n_stages", "expected"),
    [(32, 8, 4), (128, 8, 8), (480, 8, 16), (2000, 8, 32), (8000, 8, 64), (480, 2, 32), (2000, 2, 64), (128, 16, 4)],
)
def test_dense_models(n_tokens: int, n_stages: int, expected: int) -> None:
    assert chunk_rows(n_tokens, n_stages, 512) == expected


@pytest.mark.parametrize(("n_tokens", "n_stages", "expected"), [(128, 2, 32), (480, 8, 32), (2000, 8, 64)])
def test_mixtures_get_runs_that_share_their_experts(n_tokens: int, n_stages: int, expected: int) -> None:
    """As of 128 experts of which a token uses 8."""
    assert chunk_rows(n_tokens, n_stages, 512, RowWork(sparsity=10.9)) == expected


LATENT = RowWork(sparsity=18, attention=(Attention(cell=8e-4, long_cell=2.4e-4, expansion=0.1),))
"""Nearly as of DeepSeek-V3."""


@pytest.mark.parametrize(
    ("n_tokens", "n_past", "n_stages", "expected"),
    [(500, 0, 4, 64), (2000, 0, 4, 64), (4000, 0, 4, 512), (2000, 8000, 4, 512), (8000, 0, 8, 512), (100, 8000, 4, 4)],
)
def test_long_prompts_share_the_expansion_of_latent_vectors(
    n_tokens: int, n_past: int, n_stages: int, expected: int
) -> None:
    assert chunk_rows(n_tokens, n_stages, 512, LATENT, n_past) == expected


def test_runs_that_expand_nothing_stay_short() -> None:
    assert chunk_rows(8000, 8, 512, LATENT.never_long()) == 64


def test_a_long_context_shortens_the_dearest_run() -> None:
    dense = RowWork(attention=(Attention(cell=1e-3),))
    assert chunk_rows(2000, 8, 512, dense, 100_000) < chunk_rows(2000, 8, 512, dense)


@given(
    st.integers(1, 3000), st.integers(0, 20_000), st.integers(2, 16), st.floats(0, 1e-2), st.floats(0, 1),
    st.floats(0, 1), st.integers(0, 500),
)  # fmt: skip
def test_the_shortest_makespan_is_found(
    n_tokens: int, n_past: int, n_stages: int, cell: float, long: float, expansion: float, window: int
) -> None:
    """Against the sum over all runs, each for itself."""
    attention = Attention(cell=cell, most_cells=window, long_cell=long * cell, expansion=expansion)
    work = RowWork(attention=(attention,))

    def makespan(n_rows: int) -> float:
        times, at = list[float](), n_past
        for length in lengths_of_any(n_tokens, n_rows):
            times.append(2 + length + attention.of_run(length, at))
            at += length
        return sum(times) + (n_stages - 1) * max(times)

    found = makespan(chunk_rows(n_tokens, n_stages, 512, work, n_past))
    assert found <= 1.001 * min(makespan(n_rows) for n_rows in (4, 8, 16, 32, 64, 128, 256, 512))


@pytest.mark.parametrize("n_stages", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("n_tokens", [16, 32, 57, 128, 480, 1000, 2000, 8000])
@pytest.mark.parametrize(
    ("fixed", "read", "most"),
    [(6.0, 0.0, 1.25), (3.0, 0.0, 1.1), (1.0, 0.0, 1.2), (0.3, 3.4, 1.25), (0.3, 5.0, 1.25), (0.3, 7.0, 1.55)],
)
def test_other_machines_lose_little(n_tokens: int, n_stages: int, fixed: float, read: float, most: float) -> None:
    """Machines whose runs of n rows take fixed + max(n, read): against the best chunk length for each."""

    def makespan(n_rows: int) -> float:
        lengths = lengths_of(n_tokens, n_rows)
        times = [fixed + max(length, read) for length in lengths]
        return sum(times) + (n_stages - 1) * max(times)

    best = min(makespan(n_rows) for n_rows in (*range(TILE, 257, TILE), 512))
    assert makespan(chunk_rows(n_tokens, n_stages, 512)) <= most * best


@pytest.mark.parametrize(("n_tokens", "n_stages"), [(450, 2), (719, 2), (480, 4), (2000, 4), (2000, 8)])
@pytest.mark.parametrize(("read", "overlap", "most"), [(8.0, 1.5, 1.4), (3.4, 1.5, 1.15), (3.4, 16.0, 1.25)])
def test_other_machines_lose_little_with_mixtures(
    n_tokens: int, n_stages: int, read: float, overlap: float, most: float
) -> None:
    """2 of 16 experts; the first machine is a core that was measured, the last one reads while it computes."""

    def makespan(n_rows: int) -> float:
        times = list[float]()
        for length in lengths_of(n_tokens, n_rows):
            weights = read * 8 * (1 - (7 / 8) ** length)
            times.append((length**overlap + weights**overlap) ** (1 / overlap))
        return sum(times) + (n_stages - 1) * max(times)

    best = min(makespan(n_rows) for n_rows in (*range(TILE, 257, TILE), 512))
    assert makespan(chunk_rows(n_tokens, n_stages, 512, RowWork(sparsity=8.0))) <= most * best
