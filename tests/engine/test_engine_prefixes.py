"""The prefix cache on real models: what was computed once is not computed again, and texts stay the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.commands import TARGET
from support.long_text import SAMPLING, Tokens, alone, words
from support.pipeline import local_ranks
from support.requests import asked

from ggpipe.channel.events import TokenReady
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.core.request import Finish
from ggpipe.engine.session import Session
from ggpipe.stats.records import RequestStats

PROMPTS = Path(__file__).parents[2] / "prompts"
N_CTX = 1024


@contextmanager
def loaded(n_ranks: int, n_draft_ranks: int = 0, n_ctx: int = N_CTX, cache_prompt: bool = True) -> Iterator[Session]:
    config = EngineConfig(
        model=ModelConfig(path=TARGET),
        context=ContextConfig(n_ctx=n_ctx, n_ubatch=64, n_seq=4, exact=True),
        pipeline=PipelineConfig(threads=(1,)),
        drafts=(
            DraftConfig(
                model=ModelConfig(path=TARGET.with_name("tales-draft.gguf")),
                context=ContextConfig(n_ctx=n_ctx, n_ubatch=512, n_seq=4),
                layer_split=LayerSplit((1.0,) * n_draft_ranks) if n_draft_ranks else None,
            ),
        ),
        n_requests=2,
        cache_prompt=cache_prompt,
    )
    with local_ranks(config, n_ranks + n_draft_ranks) as head:
        yield Session.load(head)


def serve(
    engine: Session, prompt: Tokens, n: int, mode: Mode, cache_prompt: bool = True
) -> tuple[RequestStats, Tokens]:
    """Serve one request. Its text must be libllama's."""
    speculation = SpeculationConfig(mode=mode)
    request = engine.submit(asked(prompt, SAMPLING, n, speculation, cache_prompt=cache_prompt))
    text: list[int] = []
    while request.is_active:
        text += [event.token.id for event in engine.step() if isinstance(event, TokenReady)]
    assert text == alone(prompt, n)
    return request.stats, tuple(text)


def rows(stats: RequestStats) -> int:
    """Rows of the target that were no draft tokens."""
    return sum(run.n_rows - run.n_draft_tokens for run in stats.runs)


@pytest.mark.parametrize("mode", ["iterative", "async"])
@pytest.mark.parametrize(("n_ranks", "n_draft_ranks"), [(1, 1), (2, 0), (2, 1)])
def test_the_next_question_computes_only_what_is_new(n_ranks: int, n_draft_ranks: int, mode: Mode) -> None:
    first, question, other = words()[:150], words()[200:220], words()[300:310]
    with loaded(n_ranks, n_draft_ranks) as engine:
        stats, text = serve(engine, first, 30, mode)
        assert stats.counters.cached_tokens == 0
        stats, _ = serve(engine, (*first, *text, *question), 20, mode)
        known = len(first) + len(text) - 1  # the last token of a text is not computed
        assert known <= stats.counters.cached_tokens <= known + 1
        n_new = len(first) + len(text) + len(question) - stats.counters.cached_tokens
        assert sum(run.n_rows for run in stats.runs if not run.n_draft_tokens) >= n_new
        assert rows(stats) <= n_new + 20
        assert all(run.n_rows < 100 for run in stats.draft_runs), "the draft knows the text as well"
        stats, _ = serve(engine, (*first[:100], *other), 20, mode)
        assert stats.counters.cached_tokens == 100
        stats, _ = serve(engine, (*first[:100], *other), 20, mode, cache_prompt=False)
        assert stats.counters.cached_tokens == 0


def test_what_a_stopped_request_computed_is_kept() -> None:
    with loaded(2) as engine:
        prompt = words()[:200]
        request = engine.submit(asked(prompt, SAMPLING, 200, SpeculationConfig(mode="iterative")))
        text: list[int] = []
        while len(text) < 5:
            text += [event.token.id for event in engine.step() if isinstance(event, TokenReady)]
        engine.cancel(request)
        while request.is_active:
            engine.step()
        assert request.stats.finish is Finish.STOPPED
        stats, _ = serve(engine, (*prompt, *text[:3], *words()[300:320]), 10, "async")
        assert stats.counters.cached_tokens >= 203


def test_requests_copy_from_one_that_is_served() -> None:
    prompt = words()[:200]
    prompts = (*prompt, 300), (*prompt[:150], 301)
    with loaded(2) as engine:
        first = engine.submit(asked(prompts[0], SAMPLING, 20, SpeculationConfig(mode="iterative")))
        texts: dict[int, list[int]] = {first.id: []}
        second = None
        while first.is_active or second is None or second.is_active:
            for event in engine.step():
                if isinstance(event, TokenReady):
                    texts[event.request].append(event.token.id)
                    if second is None:
                        second = engine.submit(asked(prompts[1], SAMPLING, 20, SpeculationConfig(mode="iterative")))
                        texts[second.id] = []
        assert second.stats.counters.cached_tokens == 150
        assert list(texts.values()) == [alone(prompt, 20) for prompt in prompts]


def test_kept_cells_make_room_for_requests() -> None:
    with loaded(2, n_ctx=512) as engine:
        for start in (0, 150, 300, 0):
            serve(engine, words()[start : start + 250], 20, "async")


def test_nothing_is_kept_without_the_cache() -> None:
    with loaded(1, cache_prompt=False) as engine:
        for _ in range(2):
            stats, _ = serve(engine, words()[:100], 5, "iterative")
            assert stats.counters.cached_tokens == 0
