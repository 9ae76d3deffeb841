"""Real models whose runs lose rows on their way: outputs stay those of plain decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.commands import TARGET
from support.near_ties import differ_at_near_ties_only
from support.pipeline import local_session
from support.reference import Reference
from support.requests import asked
from support.tale import GREEDY, prompt

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import parse_layer_split
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.engine.session import Session
from ggpipe.llama.stage import Outcome, Stage
from ggpipe.stats.records import RequestStats

pytestmark = pytest.mark.usefixtures("eager_drafts")

N_CTX, N_TOKENS, N_REQUESTS = 1024, 60, 3
MOST_ROUNDS = 20
BEST_FIRST = SpeculationConfig(drafters=("draft",))
TREES = SpeculationConfig(drafters=("draft",), policy="thresholds", n_parallel=3, p_split=0.05, n_draft=4)
PAUSE_S = 4e-3


@pytest.fixture(autouse=True)
def slow_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's stages take long enough for drafting to pay; the draft model is not cut into stages."""
    original = Stage._decode

    def decode(self: Stage, *args: Any) -> Outcome:
        pause_s = 0.0 if self.is_first and self.is_last else PAUSE_S
        time.sleep(pause_s)
        outcome = original(self, *args)
        return replace(outcome, compute_s=outcome.compute_s + pause_s)

    monkeypatch.setattr(Stage, "_decode", decode)


def config_of(split: str, exact: bool) -> EngineConfig:
    target, draft = parse_layer_split(split)
    context = ContextConfig(n_ctx=N_CTX, n_ubatch=32, n_seq=3 * N_REQUESTS, exact=exact)
    model = ModelConfig(path=TARGET.with_name("tales-draft.gguf"))
    return EngineConfig(
        ModelConfig(path=TARGET),
        context,
        PipelineConfig(target, threads=(1,)),
        (DraftConfig(model=model, context=context, layer_split=draft),),
        n_requests=N_REQUESTS,
    )


def generate(session: Session, speculation: SpeculationConfig) -> list[tuple[Sequence[int], RequestStats]]:
    """As many requests at a time as are served, whose prompts differ in length."""
    n_prompt = len(prompt())
    requests = [
        session.submit(asked(prompt()[: n_prompt - i], GREEDY, N_TOKENS, speculation)) for i in range(N_REQUESTS)
    ]
    while any(request.is_active for request in requests):
        session.step()
    return [(request.token_ids, request.stats) for request in requests]


def n_dropped(stats: RequestStats) -> int:
    """Rows that stages dropped, in all of them."""
    return sum(run.n_run_rows - span.n_rows for run in stats.runs if not run.cancelled for span in run.spans)


@pytest.mark.parametrize("split", ["0.5,0.5/1.0", "0.3,0.4,0.3/1.0", "0.3,0.4*2,0.3/1.0"])
def test_outputs_stay_those_of_plain_decoding(split: str) -> None:
    config, total, expected = config_of(split, exact=False), 0, []
    assert config.pipeline.n_ranks is not None
    with Reference(TARGET, N_CTX) as reference:
        for i in range(N_REQUESTS):
            expected.append(reference.generate(prompt()[: len(prompt()) - i], GREEDY, N_TOKENS))
    with local_session(config, config.pipeline.n_ranks + config.n_draft_ranks) as session:
        for i in range(MOST_ROUNDS):  # until a draft token was rejected at the right time, with trees and without
            found = generate(session, (TREES, BEST_FIRST)[i % 2])
            for number, (tokens, stats) in enumerate(found):
                own = prompt()[: len(prompt()) - number]
                differ_at_near_ties_only(tokens, expected[number], TARGET, own)
                total += n_dropped(stats)
            if total and i:
                break
    assert total > 0


def test_exact_ranks_drop_nothing() -> None:
    with local_session(config_of("0.3,0.4,0.3/1.0", exact=True), 4) as session:
        found = generate(session, TREES)
    assert all(n_dropped(stats) == 0 for _, stats in found)
