"""--exact with several requests at a time: each text is libllama's alone, with and without drafts, on 1 to 3 ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from support.commands import TARGET
from support.pipeline import local_ranks
from support.reference import Reference
from support.requests import asked

from ggpipe.channel.client import ClientRequest
from ggpipe.channel.events import TokenReady
from ggpipe.config.context import ContextConfig, FlashAttention
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.engine.engine import EngineCore
from ggpipe.engine.head import LoadedHead
from ggpipe.engine.loading import load_all
from ggpipe.engine.session import Session

PROMPTS = Path(__file__).parents[2] / "prompts"
N_CTX = 1024
CASES = (
    ("tale.txt", 120, SamplingConfig(temp=0, ignore_eos=True), 70),
    ("long.txt", 300, SamplingConfig(temp=0.8, top_k=40, seed=1, ignore_eos=True), 30),
    ("program.txt", 20, SamplingConfig(temp=1, top_k=0, seed=2, ignore_eos=True), 90),
    ("long.txt", 45, SamplingConfig(temp=0.6, seed=3, repeat_penalty=1.1, ignore_eos=True), 50),
)
"""The first tokens of a file, how to sample, and how many tokens."""

DRAFTS = {
    "none": SpeculationConfig(mode="iterative"),
    "chains": SpeculationConfig(),
    "trees": SpeculationConfig(n_draft=6, n_parallel=4, p_split=0.05),
}


@cache
def texts() -> tuple[tuple[tuple[int, ...], list[int]], ...]:
    """Of each case the prompt and the text, by libllama alone."""
    with Reference(TARGET, N_CTX, exact=True) as reference:
        prompts = [reference.tokenize((PROMPTS / name).read_text())[:n] for name, n, _, _ in CASES]
        texts = [reference.generate(prompt, *case[2:]) for prompt, case in zip(prompts, CASES, strict=True)]
        return tuple(zip(prompts, texts, strict=True))


@contextmanager
def loaded(
    n_ranks: int, n_draft_ranks: int, flash_attn: FlashAttention, fast: bool | None = None
) -> Iterator[tuple[LoadedHead, Session]]:
    config = EngineConfig(
        model=ModelConfig(path=TARGET),
        context=ContextConfig(n_ctx=N_CTX, n_ubatch=64, n_seq=16, exact=True, fast_kernels=fast, flash_attn=flash_attn),
        pipeline=PipelineConfig(threads=(1,)),
        drafts=(
            DraftConfig(
                model=ModelConfig(path=TARGET.with_name("tales-draft.gguf")),
                context=ContextConfig(n_ctx=N_CTX, n_seq=16),
                layer_split=LayerSplit((1.0,) * n_draft_ranks) if n_draft_ranks else None,
            ),
        ),
        n_requests=4,
    )
    with local_ranks(config, n_ranks + n_draft_ranks) as head:
        ready = load_all(head, lambda: None)
        engine = EngineCore(ready)
        head.at_close(engine.close)
        yield ready, Session(head, engine)


def serve(engine: Session, speculation: SpeculationConfig, cases: Sequence[int]) -> list[list[int]]:
    """The texts of these cases; the last request joins when the first one has ten tokens."""
    requests: list[ClientRequest] = []

    def submit(case: int) -> None:
        _, _, sampling, n = CASES[case]
        requests.append(engine.submit(asked(texts()[case][0], sampling, n, speculation)))

    for case in cases[:-1] or cases:
        submit(case)
    found: dict[int, list[int]] = {}
    while any(request.is_active for request in requests):
        for event in engine.step():
            if isinstance(event, TokenReady):
                found.setdefault(event.request, []).append(event.token.id)
        if len(requests) < len(cases) and len(found.get(requests[0].id, ())) >= 10:
            submit(cases[-1])
    return [found[request.id] for request in requests]


@pytest.mark.each_value
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize(("n_ranks", "n_draft_ranks"), [(1, 0), (2, 1), (3, 1)])
def test_texts_beside_others(n_ranks: int, n_draft_ranks: int, drafts: str) -> None:
    with loaded(n_ranks, n_draft_ranks, "auto") as (head, engine):
        assert head.limits.n_requests == 4
        assert not head.warnings
        for order in ((0, 1, 2, 3), (2, 0, 3, 1)):  # the second time among cells that the first has left behind
            assert serve(engine, DRAFTS[drafts], order) == [texts()[case][1] for case in order]


def test_fast_kernels() -> None:
    """Outputs with ggpipe's own kernels do not depend on ranks, draft tokens or company either."""
    with loaded(1, 0, "on", fast=True) as (_, engine):
        alone = [serve(engine, DRAFTS["none"], (case,))[0] for case in range(len(CASES))]
    with loaded(3, 1, "on", fast=True) as (_, engine):
        for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
            assert serve(engine, DRAFTS["trees"], order) == [alone[case] for case in order]


def test_without_flash_attention_requests_take_turns() -> None:
    with loaded(2, 0, "off") as (head, engine):
        assert head.limits.n_requests == 1
        assert tuple(map(str, head.warnings)) == (
            "`exact` without flash attention takes requests in turn; see `flash_attn`",
        )
        alone = [serve(engine, DRAFTS["trees"], (case,))[0] for case in range(len(CASES))]
        assert serve(engine, DRAFTS["trees"], range(len(CASES))) == alone
