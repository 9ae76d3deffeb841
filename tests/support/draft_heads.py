"""What tests of draft heads and of MTP layers do alike."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ggpipe.channel.events import TokenReady
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import ROOT, MicroBatch
from ggpipe.core.request_spec import RequestSpec
from ggpipe.core.request_state import RequestState
from ggpipe.engine.session import Session


def modes_of(kind: str) -> dict[str, SpeculationConfig]:
    """Ways to draft, by name. `kind`: the drafter that drafts alone."""
    return {
        "async": SpeculationConfig(drafters=(kind,)),
        "chains": SpeculationConfig(policy="thresholds", n_draft=3, drafters=(kind,)),
        "speculative": SpeculationConfig(mode="speculative", n_draft=3, drafters=(kind,)),
        "with n-grams": SpeculationConfig(),
    }


def all_at_once(session: Session, asked: Sequence[RequestSpec]) -> tuple[list[list[int]], list[int]]:
    """Serve requests together: the tokens of each, and how many draft tokens each was sent."""
    requests = [session.submit(spec) for spec in asked]
    found: dict[int, list[int]] = {request.id: [] for request in requests}
    while any(request.is_active for request in requests):
        for event in session.step():
            if isinstance(event, TokenReady):
                found[event.request].append(event.token.id)
    return list(found.values()), [request.stats.counters.drafted_tokens for request in requests]


def chains_sent(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """The draft tokens that a request is sent from now on, best ones only, by the number of accepted tokens."""
    sent: dict[int, list[int]] = {}
    add = RequestState.add

    def seen(state: RequestState, micro_batch: MicroBatch, now: float) -> None:
        for expansion in micro_batch.expansions:
            if not expansion.n:
                continue
            if expansion.parent == ROOT:
                sent[micro_batch.epoch] = []
            if micro_batch.epoch in sent:  # else some of it was sent for an earlier root
                sent[micro_batch.epoch].append(expansion.candidates[0][0])
        add(state, micro_batch, now)

    monkeypatch.setattr(RequestState, "add", seen)
    return sent
