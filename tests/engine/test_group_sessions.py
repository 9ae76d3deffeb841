"""Groups with real models: whole sessions whose ranks are threads, in all modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from support.commands import ROOT, TARGET
from support.near_ties import differ_at_near_ties_only
from support.pipeline import local_session
from support.reference import Reference
from support.requests import asked
from support.zoo import make

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig, PromptCacheConfig
from ggpipe.config.layer_split import parse_layer_split
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.engine.session import Session
from ggpipe.stats.records import RequestStats

DRAFT = TARGET.with_name("tales-draft.gguf")
N_CTX = 512
GREEDY = SamplingConfig(temp=0, ignore_eos=True)
MODES = {mode: SpeculationConfig(mode=mode, n_draft=4, n_parallel=2) for mode in ("iterative", "speculative", "async")}


@cache
def prompt() -> tuple[int, ...]:
    with Reference(TARGET, N_CTX) as reference:
        return reference.tokenize((ROOT / "prompts" / "tale.txt").read_text())[:60]


def config_of(split: str, tensor_split: tuple[float, ...] = (), cache: Path | None = None) -> EngineConfig:
    target, draft = (*parse_layer_split(split), None)[:2]
    context, model = ContextConfig(n_ctx=N_CTX, n_ubatch=32, n_seq=4), ModelConfig(path=DRAFT)
    return EngineConfig(
        ModelConfig(path=TARGET),
        context,
        PipelineConfig(target, threads=(1,), tensor_split=tensor_split),
        (DraftConfig(model=model, context=context, layer_split=draft),),
        n_requests=2,
        prompt_cache=PromptCacheConfig(cache, "text") if cache is not None else None,
    )


@contextmanager
def session_of(config: EngineConfig) -> Iterator[Session]:
    assert config.pipeline.n_ranks is not None
    with local_session(config, config.pipeline.n_ranks + config.n_draft_ranks) as session:
        yield session


def generate(session: Session, mode: str = "iterative", n: int = 60) -> tuple[list[int], RequestStats]:
    request = session.submit(asked(prompt(), GREEDY, n, MODES[mode]))
    while request.is_active:
        session.step()
    return list(request.token_ids), request.stats


@cache
def whole_text() -> list[int]:
    with Reference(TARGET, N_CTX) as reference:
        return reference.generate(prompt(), GREEDY, 60)


@pytest.mark.parametrize(
    ("split", "tensor_split"),
    [
        ("1.0*2", ()),  # the draft inside the head
        ("0.5*2,0.5/1.0", (3, 1)),
        ("0.3,0.4*2,0.3/1.0*2", ()),
        ("0,1.0*3/1.0", ()),
    ],
)
def test_a_group_writes_the_text_in_all_modes(split: str, tensor_split: tuple[float, ...]) -> None:
    with session_of(config_of(split, tensor_split)) as session:
        for mode in MODES:
            tokens, stats = generate(session, mode)
            assert len(tokens) == 60
            differ_at_near_ties_only(tokens, whole_text(), TARGET, prompt())
            if mode == "speculative":
                assert stats.counters.accepted_tokens > 0
            at_work = [rank for rank in stats.ranks if rank.layers[1] > 0 and (mode == "speculative" or not rank.draft)]
            assert all(rank.runs > 0 for rank in at_work)


def test_requests_share_a_group() -> None:
    """Each text is that of the request alone, but for near-ties; what is cancelled does not hold the others up."""
    with session_of(config_of("0.5*2,0.5*2/1.0")) as session:
        for mode in MODES:
            first, dropped, second = (session.submit(asked(prompt(), GREEDY, 60, MODES[mode])) for _ in range(3))
            while first.is_active or second.is_active:
                session.step()
                if len(first.token_ids) > 10:
                    session.cancel(dropped)
            assert [len(request.token_ids) for request in (first, second)] == [60, 60]
            for request in (first, second):
                differ_at_near_ties_only(request.token_ids, whole_text(), TARGET, prompt())
            while dropped.is_active:
                session.step()


@pytest.mark.parametrize("name", ["deepseek2", "qwen3moe"])
def test_mixtures_of_experts_share_a_group(name: str, tmp_path: Path) -> None:
    """Two requests at a time in each mode, with latent attention and without; the model is its own draft."""
    path = make(name, tmp_path / f"{name}.gguf", n_ff=512, tokenizer="spm")
    context, own = ContextConfig(n_ctx=N_CTX, n_ubatch=32, n_seq=4), ModelConfig(path=path)
    split = parse_layer_split("0.5,0.5*2/1.0")
    config = EngineConfig(
        own,
        context,
        PipelineConfig(split[0], threads=(1,)),
        (DraftConfig(model=own, context=context, layer_split=split[1]),),
        n_requests=2,
    )
    text = tuple(range(5, 25))
    with Reference(path, N_CTX) as reference:
        expected = reference.generate(text, GREEDY, 40)
    with session_of(config) as session:
        for mode in MODES:
            requests = [session.submit(asked(text, GREEDY, 40, MODES[mode])) for _ in range(2)]
            while any(request.is_active for request in requests):
                session.step()
            for request in requests:
                assert len(request.token_ids) == 40
                differ_at_near_ties_only(request.token_ids, expected, path, text)
        alone = session.submit(asked(text, GREEDY, 40, MODES["speculative"]))  # whose runs always wait for the draft
        while alone.is_active:
            session.step()
        assert alone.stats.counters.accepted_tokens > 0


def test_a_text_repeats_itself_and_needs_no_certain_stages() -> None:
    texts = []
    for split in ("1.0*2", "1.0*2", "0.5*2,0.5*2"):
        with session_of(config_of(split)) as session:
            texts.append(generate(session)[0])
    assert texts[0] == texts[1] == texts[2]


def test_each_part_keeps_its_prompt_cache(tmp_path: Path) -> None:
    config = config_of("0.5,0.5*2/1.0", cache=tmp_path / "cache")
    with session_of(config) as session:
        expected, stats = generate(session, "speculative")
        assert stats.counters.cached_tokens == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cache", "cache.rank1", "cache.rank2", "cache.rank3",
    ]  # fmt: skip
    with session_of(config) as session:
        assert session.warnings == ()
        tokens, stats = generate(session, "speculative")
        assert stats.counters.cached_tokens > 50
        differ_at_near_ties_only(tokens, expected, TARGET, prompt())
    with session_of(config_of("0.5,0.5*2/1.0", (3, 1), tmp_path / "cache")) as session:
        assert "it was written with layers" in str(session.warnings[0])
        assert "part 0 of 0.5, 0.5" in str(session.warnings[0])
