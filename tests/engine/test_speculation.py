"""Speculation changes the speed, never the text: all modes, on any ranks, with real models."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import ROOT, TARGET, wait_for
from support.pairwise import combinations
from support.pipeline import local_session
from support.reference import Reference, run_of
from support.requests import asked
from support.zoo import pair_script

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.batching.payoff import Payoff
from ggpipe.core.drafters.foresight import Foresight
from ggpipe.core.messages import RowLogits
from ggpipe.core.request import Finish
from ggpipe.engine import loading
from ggpipe.engine.session import Session
from ggpipe.llama.libllama import lib
from ggpipe.llama.stage import Stage
from ggpipe.stats.records import RequestStats

pytestmark = pytest.mark.usefixtures("eager_drafts")

DRAFT = TARGET.with_name("tales-draft.gguf")
N_CTX = 768
N_TOKENS = 44
ITERATIVE = SpeculationConfig(mode="iterative")
MODES = {
    "async": SpeculationConfig(),
    "async, thresholds": SpeculationConfig(policy="thresholds"),
    "async, small runs": SpeculationConfig(policy="thresholds", n_draft=2, p_accept=0.3, p_recovery=0.1, p_decay=0.05),
    "async, not cancelled": SpeculationConfig(n_draft=4, cancel=False),
    "async, not continuous": SpeculationConfig(n_draft=4, continuous=False),
    "speculative": SpeculationConfig(mode="speculative", n_draft=4),
    "speculative, p-min": SpeculationConfig(mode="speculative", n_draft=8, p_accept=0.4, n_min=2),
}
SAMPLINGS = {
    "greedy": SamplingConfig(temp=0, ignore_eos=True),
    "top-k 40": SamplingConfig(temp=0.8, top_k=40, seed=1),
    "top-k 0": SamplingConfig(temp=0.8, top_k=0, seed=2, ignore_eos=True),
    "penalties": SamplingConfig(temp=0.8, seed=3, repeat_penalty=1.2, presence_penalty=0.2),
    "min-p": SamplingConfig(temp=1.2, top_k=0, top_p=1.0, min_p=0.05, seed=5, ignore_eos=True),
    "all tokens": SamplingConfig(temp=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=4, ignore_eos=True),
}
NEAR_TIE = 0.1  # of a row's spread: see test_exact.py


def config_of(
    target: Path,
    draft: Path,
    n_draft_ranks: int = 0,
    threads: int = 1,
    exact: bool = True,
    n_seq: int = 1,
    n_ctx: int = N_CTX,
    shares: tuple[float, ...] | None = None,
) -> EngineConfig:
    draft_split = LayerSplit((1 / n_draft_ranks,) * n_draft_ranks) if n_draft_ranks else None
    return EngineConfig(
        ModelConfig(path=target),
        ContextConfig(n_ctx=n_ctx, n_ubatch=32, n_seq=n_seq, exact=exact),
        PipelineConfig(LayerSplit(shares) if shares is not None else None, threads=(threads,)),
        (
            DraftConfig(
                model=ModelConfig(path=draft),
                context=ContextConfig(n_ctx=n_ctx, n_ubatch=32, n_seq=n_seq),
                layer_split=draft_split,
            ),
        ),
    )


def generate(
    session: Session,
    prompt: tuple[int, ...],
    sampling: SamplingConfig,
    speculation: SpeculationConfig,
    n: int = N_TOKENS,
) -> tuple[list[int], RequestStats]:
    stats = RequestStats()
    tokens = [t.id for t in session.stream(asked(prompt, sampling, n, speculation), stats) if t.id >= 0]
    counters = stats.counters
    assert counters.accepted_tokens <= counters.submitted_tokens <= counters.drafted_tokens
    assert sum(stats.drafted) <= counters.accepted_tokens
    return tokens, stats


@cache
def prompt_of(file: str, n: int) -> tuple[int, ...]:
    with Reference(TARGET, 64) as reference:
        return reference.tokenize((ROOT / "prompts" / file).read_text())[:n]


def pair_of(folder: Path, s: float) -> tuple[Path, Path]:
    """A small random pair; its draft is often wrong."""
    module = pair_script()
    shape = module.Shape(n_layer=5, n_layer_draft=2, width=256, n_head=4, n_head_kv=2, n_ff=512, n_vocab=1024)
    target, draft = folder / "target.gguf", folder / "draft.gguf"
    module.make_pair(target, draft, shape, s=s)
    return target, draft


@pytest.fixture(scope="module")
def random_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return pair_of(tmp_path_factory.mktemp("pair"), 0.3)


def compare_modes(
    session: Session,
    prompt: tuple[int, ...],
    expected: dict[str, list[int]],
    cases: Sequence[tuple[str, str]],
    **changes: Any,
) -> None:
    """Each mode, with these changes, writes the expected text of its sampling. Draft tokens are submitted, too.

    An asynchronous draft may be too late for a whole text on a busy machine; before each run, one is waited for.
    """
    n_drafted = 0
    for mode, name in cases:
        tokens, stats = generate(session, prompt, SAMPLINGS[name], replace(MODES[mode], **changes))
        assert tokens == expected[name], (mode, name)
        n_drafted += stats.counters.submitted_tokens
    if not n_drafted:
        _, stats = generate(session, prompt, SAMPLINGS["greedy"], replace(MODES["speculative"], **changes))
        n_drafted = stats.counters.submitted_tokens
    assert n_drafted > 0


@cache
def plain(target: Path, prompt: tuple[int, ...]) -> dict[str, list[int]]:
    """libllama's own texts, with its reference kernels."""
    with Reference(target, N_CTX, exact=True) as reference:
        return {name: reference.generate(prompt, sampling, N_TOKENS, []) for name, sampling in SAMPLINGS.items()}


Layout = tuple[int, int, int]
"""Ranks of the target with layers, ranks of the draft, and threads of each."""

LAYOUTS: list[Layout] = [*itertools.product((1, 2, 3, 4), (0, 1, 2), (1,)), (1, 0, 2), (2, 1, 2), (3, 0, 2)]
FEW_LAYOUTS: list[Layout] = [(1, 0, 1), (2, 1, 1), (3, 0, 2), (4, 2, 1)]


def cases_of(
    own: tuple[object, ...], places: Sequence[tuple[object, ...]], full: bool, modes: Iterable[str] = MODES
) -> list[tuple[str, str]]:
    """One place's share of all combinations with a mode and a sampling. `own`: one of `places`."""
    rows = [(*place, mode, name) for place in places for mode, name in itertools.product(modes, SAMPLINGS)]
    return [(str(mode), str(name)) for *place, mode, name in combinations(rows, full) if tuple(place) == own]


def test_a_draft_model_sees_the_latest_tokens() -> None:
    """Of a prompt that is far longer than its window, and of output that also exceeds it."""
    prompt = prompt_of("long.txt", 600)
    config = config_of(TARGET, DRAFT, 1, n_ctx=2048)
    (draft,) = config.drafts
    with Reference(TARGET, 2048, exact=True) as reference:
        expected = reference.generate(prompt, SAMPLINGS["greedy"], 200, [])
    with local_session(replace(config, drafts=(replace(draft, window=64),)), 2) as session:
        for mode in ("async", "speculative"):
            tokens, stats = generate(session, prompt, SAMPLINGS["greedy"], MODES[mode], 200)
            assert tokens == expected
        assert stats.counters.accepted_tokens > 50


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_modes_write_libllamas_text(layout: Layout, full: bool) -> None:
    n_target, n_draft, threads = layout
    prompt = prompt_of("long.txt", 230)  # the text passes 256 cells, where flash attention changes its ways
    with local_session(config_of(TARGET, DRAFT, n_draft, threads), n_target + n_draft) as session:
        compare_modes(session, prompt, plain(TARGET, prompt), cases_of(layout, LAYOUTS, full))


@pytest.mark.parametrize("layout", FEW_LAYOUTS, ids=str)
def test_a_draft_that_is_often_wrong(layout: Layout, random_pair: tuple[Path, Path], full: bool) -> None:
    n_target, n_draft, threads = layout
    prompt = tuple(300 + 7 * i % 700 for i in range(100))
    with local_session(config_of(*random_pair, n_draft, threads), n_target + n_draft) as session:
        compare_modes(session, prompt, plain(random_pair[0], prompt), cases_of(layout, FEW_LAYOUTS, full))


def test_a_head_that_only_coordinates(full: bool) -> None:
    prompt = prompt_of("tale.txt", 60)
    cases = [*itertools.product(MODES, SAMPLINGS)] if full else [*zip(MODES, itertools.cycle(SAMPLINGS), strict=False)]
    with local_session(config_of(TARGET, DRAFT, 1, shares=(0, 0.5, 0.5)), 4) as session:
        compare_modes(session, prompt, plain(TARGET, prompt), cases)


TREE_MODES = ("async", "async, not cancelled", "speculative")
TREE_LAYOUTS = [(1, 0), (3, 1)]


@pytest.mark.parametrize("layout", TREE_LAYOUTS, ids=str)
def test_trees_write_libllamas_text(layout: tuple[int, int], full: bool) -> None:
    """Branches leave holes among the cells, which later tokens take."""
    n_target, n_draft = layout
    prompt = prompt_of("tale.txt", 60)
    cases = cases_of(layout, TREE_LAYOUTS, full, TREE_MODES)
    with local_session(config_of(TARGET, DRAFT, n_draft, n_seq=4), n_target + n_draft) as session:
        compare_modes(session, prompt, plain(TARGET, prompt), cases, n_draft=6, n_parallel=4, p_split=0.05)


NGRAM_MODES = ("async", "async, not continuous", "speculative")
NGRAM_PLACES = [*itertools.product((1, 3), (("ngram",), ("draft", "ngram")))]


@pytest.mark.parametrize("place", NGRAM_PLACES, ids=str)
def test_what_stood_before_is_drafted(place: tuple[int, tuple[str, ...]], full: bool) -> None:
    """Without a draft model, and next to one: both name tokens for the same tree."""
    n_target, drafters = place
    prompt = prompt_of("tale.txt", 60) * 2
    n_draft = int(n_target > 1)
    config = config_of(TARGET, DRAFT, n_draft, n_seq=2)
    if drafters == ("ngram",):
        config, n_draft = replace(config, drafts=()), 0
    cases = cases_of(place, NGRAM_PLACES, full, NGRAM_MODES)
    with local_session(config, n_target + n_draft) as session:
        compare_modes(session, prompt, plain(TARGET, prompt), cases, drafters=drafters)


@pytest.mark.parametrize("cache_prompt", [False, True])
def test_outputs_of_others_are_drafted_only_where_they_are_kept(cache_prompt: bool) -> None:
    """`ggpipe bench` generates the same text in each mode and round: none may learn from the others."""
    prompt, speculation = prompt_of("tale.txt", 60), replace(MODES["speculative"], drafters=("ngram",))
    config = replace(config_of(TARGET, DRAFT), drafts=(), cache_prompt=cache_prompt)
    with local_session(config, 1) as session:
        (_, first), (_, second) = (generate(session, prompt, SAMPLINGS["top-k 40"], speculation) for _ in range(2))
    gained = second.counters.accepted_tokens - first.counters.accepted_tokens
    assert gained > N_TOKENS // 2 if cache_prompt else gained == 0


@pytest.mark.parametrize("n_parallel", [1, 4])
@pytest.mark.parametrize(("n_target", "n_draft"), [(1, 0), (3, 1)])
def test_default_numerics(n_target: int, n_draft: int, n_parallel: int, full: bool) -> None:
    """Chains and real trees: where a greedy text differs from plain decoding, two tokens nearly tie."""
    prompt, greedy, n = prompt_of("tale.txt", 60), SAMPLINGS["greedy"], 200 if full else 120
    config = config_of(TARGET, DRAFT, n_draft, exact=False, n_seq=n_parallel)
    with local_session(config, n_target + n_draft) as session:
        expected, _ = generate(session, prompt, greedy, ITERATIVE, n)
        n_accepted = 0
        for mode in ("async", "async, not cancelled", "speculative"):
            speculation = replace(MODES[mode], n_draft=6, n_parallel=n_parallel, p_split=0.05)
            tokens, stats = generate(session, prompt, greedy, speculation, n)
            n_accepted += stats.counters.accepted_tokens
            at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), None)
            if at is not None:
                with Reference(TARGET, N_CTX) as reference:
                    row = reference.decode(run_of(1, [*prompt, *expected[:at]], 0))[-1]
                assert abs(row[tokens[at]] - row[expected[at]]) < NEAR_TIE * float(np.std(row))
        assert n_accepted > 20


@contextmanager
def spied_stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stage]]:
    stages: list[Stage] = []
    original = Stage.__init__

    def spy(self: Stage, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type]
        stages.append(self)

    monkeypatch.setattr(Stage, "__init__", spy)
    yield stages


@pytest.mark.parametrize(
    ("sampling", "n_resumed"),
    [
        (SamplingConfig(seed=1, ignore_eos=True), 0),
        (SAMPLINGS["all tokens"], 20),
        (SamplingConfig(seed=2, ignore_eos=True, grammar='root ::= ([a-z ]{8} ".")+'), 0),
    ],
    ids=["default", "all tokens, resumed", "grammar"],
)
def test_a_draft_model_knows_which_random_number_selects_a_token(
    sampling: SamplingConfig, n_resumed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one selects the first token. A token that does not fit a grammar takes a second one."""
    monkeypatch.setattr(Payoff, "is_paused", lambda *_: False)
    learned: list[tuple[int, int]] = []
    learn = Foresight.learn

    def spy(self: Foresight, row: RowLogits, place: int, token: int) -> None:
        learned.append((place, token))
        learn(self, row, place, token)

    monkeypatch.setattr(Foresight, "learn", spy)
    prompt = prompt_of("tale.txt", 60)
    with local_session(config_of(TARGET, DRAFT, 1, exact=False), 2) as session:
        tokens = list(session.stream(asked(prompt, sampling, 60)))
        if n_resumed:
            learned.clear()
            resumed = tuple(token.id for token in tokens[:n_resumed])
            assert [t.id for t in session.stream(asked(prompt, sampling, 60, resumed=resumed))] == [
                token.id for token in tokens[n_resumed:]
            ]
    places = itertools.accumulate(1 + token.redrawn for token in tokens)
    drawn = {place - 1: token.id for place, token in zip(places, tokens, strict=True)}
    assert any(token.redrawn for token in tokens) == bool(sampling.grammar)
    assert learned
    assert min(place for place, _ in learned) >= n_resumed
    assert all(drawn[place] == token for place, token in learned)


def test_a_draft_model_knows_penalties() -> None:
    """The target itself, as the draft model, is always right."""
    sampling = SamplingConfig(
        temp=0, ignore_eos=True, presence_penalty=1.5, dry_multiplier=0.8, logit_bias=((100, 5.0), (200, -5.0))
    )
    with local_session(config_of(TARGET, TARGET, 1), 2) as session:
        tokens, stats = generate(session, prompt_of("tale.txt", 60), sampling, MODES["speculative"])
    assert stats.counters.submitted_tokens > len(tokens) / 2
    assert stats.counters.accepted_tokens > 0.9 * stats.counters.submitted_tokens


def test_nothing_is_left_in_any_cache(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """After a long asynchronous run with branches all ids are empty, and a prompt that fills all cells fits. The draft
    model drafts ahead throughout, whether or not that pays here and now."""
    monkeypatch.setattr(Payoff, "is_paused", lambda *_: False)
    monkeypatch.setattr(loading, "crowding", lambda *_: 0.0)
    n_tokens = 4000 if full else 600
    config = replace(config_of(TARGET, DRAFT, 1, exact=False, n_seq=4, n_ctx=n_tokens + 256), cache_prompt=False)
    with spied_stages(monkeypatch) as stages, local_session(config, 3) as session:
        prompt = prompt_of("tale.txt", 60)
        speculation = SpeculationConfig(n_draft=3, n_parallel=4, p_split=0.05)
        tokens, stats = generate(session, prompt, SAMPLINGS["greedy"], speculation, n_tokens)
        assert len(tokens) == n_tokens
        assert stats.counters.submitted_tokens > 100
        assert len(stages) == 3

        def are_empty() -> bool:
            session.idle(0.05)  # the operations that clear the caches go round
            memories = [lib.llama_get_memory(stage._context) for stage in stages]
            return all(lib.llama_memory_seq_pos_max(memory, seq) == -1 for memory in memories for seq in range(4))

        wait_for(are_empty)
        filling = tuple(tokens[i % n_tokens] for i in range(session.n_ctx - 1))
        tokens, stats = generate(session, filling, SAMPLINGS["greedy"], speculation, -1)
        assert (len(tokens), stats.finish) == (2, Finish.CONTEXT_FULL)


def test_a_stop_and_an_abandoned_request() -> None:
    prompt = prompt_of("tale.txt", 60)
    with local_session(config_of(TARGET, DRAFT, 1), 3) as session:
        expected, _ = generate(session, prompt, SAMPLINGS["greedy"], ITERATIVE)
        tokens = session.stream(asked(prompt, SAMPLINGS["greedy"], 500, MODES["async"]))
        for _ in range(5):
            next(tokens)
        assert isinstance(tokens, Generator)
        tokens.close()
        for i, token in enumerate(session.stream(asked(prompt, SAMPLINGS["greedy"], 500, MODES["async"]))):
            assert token.id == expected[i] if i < N_TOKENS else True
            if i == 20:
                session.stop()
        assert generate(session, prompt, SAMPLINGS["greedy"], MODES["async"])[0] == expected
