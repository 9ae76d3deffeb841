"""--exact: one text, whatever the split, the thread count and the chunks.

What it is compared with is libllama alone, with its CPU backend switched to reference kernels by the test (see
`reference.py`), on prompts and sampled texts of the demo target. libllama without that switch computes a row in
different ways for different thread counts, chunk lengths and cache fills, so its texts are not the same as one
another; the tests at the end hold how far they are from ours.
"""

import itertools
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.pairwise import combinations
from support.pipeline import Pipeline, local_session
from support.reference import Logits, Reference, run_of
from support.requests import asked

from ggpipe.config.context import ContextConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prompt_chunks import chunk_rows

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "ggpipe" / "models" / "tales-target.gguf"
N_CTX = 1024
N_TOKENS = 660  # flash attention changes its ways at 64 rows, and over 256 and 512 cells
GREEDY = SamplingConfig(temp=0, ignore_eos=True)
TOP_40 = SamplingConfig(temp=0.8, top_k=40, seed=1, ignore_eos=True)
TOP_ALL = SamplingConfig(temp=0.8, top_k=0, seed=2, ignore_eos=True)
NEAR_TIE = 0.1
"""Of a row's spread (its standard deviation), or of probability: more than batch sizes alone change (measured:
0.09 and 0.04), less than a wrong key or position does."""


@dataclass(frozen=True)
class Case:
    """`n` tokens behind the first `n_prompt` tokens of prompts/`file`."""

    file: str
    n_prompt: int | None
    sampling: SamplingConfig
    n: int

    @property
    def prompt(self) -> tuple[int, ...]:
        return tokens_of_file(self.file)[: self.n_prompt]


SHORT = {
    "greedy past 600": Case("long.txt", 560, GREEDY, 50),
    "top-k 40": Case("tale.txt", None, TOP_40, 40),
    "top-k 0 over 256": Case("long.txt", 230, TOP_ALL, 40),
    "to the end of the text": Case("chat.txt", None, SamplingConfig(temp=0.3, top_k=0, seed=4), 60),
    "penalties": Case("program.txt", None, replace(TOP_40, repeat_penalty=1.2, presence_penalty=0.3), 40),
    "greedy, penalties": Case("program.txt", None, replace(GREEDY, repeat_penalty=1.2, frequency_penalty=0.1), 40),
    "raising penalties": Case("tale.txt", None, replace(TOP_40, repeat_penalty=0.9), 40),
}
LONG = {
    "greedy": Case("tale.txt", None, GREEDY, 570),
    "top-k 40": Case("tale.txt", 40, TOP_40, 590),
    "top-k 0": Case("tale.txt", None, TOP_ALL, 570),
}


@cache
def tokens_of_file(name: str) -> tuple[int, ...]:
    with Reference(TARGET, 64) as reference:
        return reference.tokenize((ROOT / "prompts" / name).read_text().removesuffix("\n"))


@cache
def by_libllama(case: Case, threads: int, exact: bool, n_stages: int = 1) -> tuple[list[int], list[Logits]]:
    """libllama's tokens, alone, and the rows of logits that they were drawn from. The prompt goes in as the batches
    that this many stages compute."""
    seen: list[Logits] = []
    n_rows = chunk_rows(len(case.prompt), n_stages, 512)
    with Reference(TARGET, N_CTX, threads, exact) as reference:
        return reference.generate(case.prompt, case.sampling, case.n, seen, n_rows), seen


def random_runs(seed: int) -> list[int]:
    """Rows of each run, together N_TOKENS."""
    rng = np.random.default_rng(seed)
    runs = rng.choice([1, 1, 1, 2, 3, 5, 17, 64, 130], N_TOKENS).tolist()
    n = int(np.searchsorted(np.cumsum(runs), N_TOKENS))
    return [*runs[:n], N_TOKENS - sum(runs[:n])]


def logits(decoder: Pipeline | Reference, runs: Sequence[int]) -> Logits:
    """Logits of the same N_TOKENS random tokens, decoded in runs of these lengths."""
    tokens = np.random.default_rng(0).integers(1, 2048, N_TOKENS).tolist()
    pos, rows = 0, []
    with decoder:
        for i, n in enumerate(runs):
            rows.append(decoder.decode(run_of(i + 1, tokens[pos : pos + n], pos)))
            pos += n
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def one_by_one() -> Logits:
    return logits(Reference(TARGET, N_CTX, 1, exact=True), [1] * N_TOKENS)


@pytest.mark.each_value
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cuts", [(), (4,), (2, 5), (1, 3, 6)], ids=str)
def test_logits(cuts: tuple[int, ...], threads: int, one_by_one: Logits) -> None:
    context = ContextConfig(n_ctx=N_CTX, exact=True)
    runs = random_runs(10 * threads + len(cuts))
    np.testing.assert_array_equal(logits(Pipeline(TARGET, cuts, context, threads=threads), runs), one_by_one)


def test_logits_of_whole_chunks_and_single_tokens(one_by_one: Logits) -> None:
    context = ContextConfig(n_ctx=N_CTX, exact=True)
    for threads, runs in ((2, [512, N_TOKENS - 512]), (1, [300, *[1] * (N_TOKENS - 300)])):
        np.testing.assert_array_equal(logits(Pipeline(TARGET, (3,), context, threads=threads), runs), one_by_one)


def test_default_numerics_are_not_that_exact(one_by_one: Logits) -> None:
    """Or the tests above say nothing."""
    context = ContextConfig(n_ctx=N_CTX)
    for threads, runs in ((1, [512, N_TOKENS - 512]), (2, [1] * 100)):
        rows = logits(Pipeline(TARGET, (4,), context, threads=threads), runs)
        assert (rows != one_by_one[: len(rows)]).any()


FEW = ("greedy past 600", "top-k 0 over 256", "penalties")
"""Cases with prompts above and below 256 tokens, greedy and drawn, with penalties and without."""


def compared(threads: int, full: bool) -> list[Case]:
    """Cases that libllama alone computes on this many threads; two threads take all only if `full`."""
    return [*SHORT.values(), *LONG.values()] if full or threads == 1 else [*map(SHORT.__getitem__, FEW)]


def test_reference_texts_do_not_depend_on_threads(full: bool) -> None:
    for case in compared(2, full):
        (one, one_seen), (two, two_seen) = by_libllama(case, 1, True), by_libllama(case, 2, True)
        assert one == two, case
        np.testing.assert_array_equal(one_seen, two_seen)
    ended = SHORT["to the end of the text"]
    assert len(by_libllama(ended, 1, True)[0]) < ended.n


def session_equals(cases: Mapping[str, Case], ranks: int, threads: int, exact: bool) -> None:
    """A session generates libllama's tokens, one request after the other."""
    config = EngineConfig(
        ModelConfig(path=TARGET),
        ContextConfig(n_ctx=N_CTX, exact=exact, fast_kernels=False),
        PipelineConfig(threads=(threads,)),
        cache_prompt=exact,  # what is left of a prompt is cut elsewhere: last bits may differ, but for `exact`
    )
    with local_session(config, ranks) as session:
        for name, case in cases.items():
            tokens = session.stream(asked(case.prompt, case.sampling, case.n))
            expected, _ = by_libllama(case, 1, True) if exact else by_libllama(case, threads, False, ranks)
            assert [token.id for token in tokens if token.id >= 0] == expected, name


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_session(ranks: int, threads: int, full: bool) -> None:
    rows = combinations(itertools.product((1, 2, 3, 4), (1, 2), SHORT), full)
    session_equals({row[2]: SHORT[row[2]] for row in rows if row[:2] == (ranks, threads)}, ranks, threads, exact=True)


@pytest.mark.parametrize(("ranks", "threads", "names"), [(2, 2, ("top-k 0",)), (3, 1, ("greedy", "top-k 40"))])
def test_long_texts(ranks: int, threads: int, names: tuple[str, ...], full: bool) -> None:
    session_equals({name: LONG[name] for name in (LONG if full else names)}, ranks, threads, exact=True)


@pytest.mark.parametrize(("ranks", "threads"), [(1, 2), (2, 1), (3, 1)])
def test_default_session_is_plain_libllama(ranks: int, threads: int, full: bool) -> None:
    """Runs have the rows that libllama's own programs decode, with `-ub` as long as the chunks for so many stages: so
    with its attention even the default agrees."""
    names = SHORT if full else FEW
    session_equals({name: SHORT[name] for name in names}, ranks, threads, exact=False)


def probabilities(row: Logits) -> Logits:
    """As drawn from at temperature 0.8, before anything is cut off."""
    e: Logits = np.exp((row - row.max()) / np.float32(0.8))
    e /= e.sum()
    return e


@pytest.mark.parametrize("threads", [1, 2])
def test_plain_libllama_differs_at_near_ties_only(threads: int, full: bool) -> None:
    """The first different token of a greedy text nearly ties with ours; of a sampled one, the distributions agree."""
    for case in compared(threads, full):
        (ours, rows), (theirs, their_rows) = by_libllama(case, 1, True), by_libllama(case, threads, False)
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if at is None:
            assert ours == theirs
            continue
        mine, other = rows[at], their_rows[at]
        assert np.abs(probabilities(mine) - probabilities(other)).sum() / 2 < NEAR_TIE, case
        if case.sampling.greedy and not case.sampling.penalizes:
            assert 0 < other[theirs[at]] - other[ours[at]] < NEAR_TIE * other.std(), case


@pytest.mark.skipif(platform.machine() != "x86_64", reason="measured on x86-64 alone")
def test_plain_libllama_on_one_thread_from_a_short_prompt() -> None:
    """Prompts below 64 tokens, one thread: here libllama computes as its reference kernels do. No switch at all."""
    for case in LONG.values():
        (exact, exact_rows), (plain, plain_rows) = by_libllama(case, 1, True), by_libllama(case, 1, False)
        assert plain == exact
        np.testing.assert_array_equal(plain_rows, exact_rows)
