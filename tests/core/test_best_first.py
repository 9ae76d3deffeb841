"""Trees that grow best-first: what becomes a draft token, in which order, and what is learned for it."""

from __future__ import annotations

from typing import Any

import pytest
from support.draft_steps import END, Draft

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import ROOT
from ggpipe.core.drafters.calibration import Calibration


def best_first(**settings: Any) -> Draft:
    draft = Draft()
    draft.begin(policy="best-first", **settings)
    return draft


def test_candidates_of_probable_paths_are_branches() -> None:
    draft = best_first()
    draft.answer({5: 0.6, 6: 0.3, 8: 0.001})
    assert draft.take_draft_tokens() == [(ROOT, 1, 5), (ROOT, 2, 6)], "right once in 1,000 times is too seldom"
    assert draft.decoding() == [[(5, 3), (6, 3)]], "rows are thought to be cheap until they were timed"
    draft.answer({10: 0.9, 11: 0.05}, {20: 0.5, 21: 0.4})
    assert draft.take_draft_tokens() == [(1, 3, 10), (1, 4, 11), (2, 5, 20), (2, 6, 21)]
    assert draft.decoding() == [[(10, 4), (20, 4), (21, 4)]], "the most probable paths first, as many as pay"


def test_what_is_improbable_becomes_a_draft_token_when_the_root_has_moved_on() -> None:
    draft = best_first(n_draft_rows=1)
    draft.answer({5: 0.02})
    draft.answer({6: 0.05})
    assert draft.take_draft_tokens() == [(ROOT, 1, 5)], "both together are too improbable"
    draft.accept(1, 5)
    assert draft.take_draft_tokens() == [(ROOT, 2, 6)]


def test_nothing_is_drafted_below_p_accept_or_at_the_end() -> None:
    draft = best_first(p_accept=0.2)
    draft.answer({5: 0.6, 6: 0.1})
    assert draft.take_draft_tokens() == [(ROOT, 1, 5)]
    draft.answer({END: 0.9})
    assert draft.take_draft_tokens() == []
    assert draft.drafter.wake_at is None


def test_the_draft_learns_how_much_its_candidates_are_worth() -> None:
    draft = Draft()
    draft.begin(policy="best-first", look_ahead=1)
    draft.answer({5: 0.99, 6: 0.001})
    assert [token for *_, token in draft.take_draft_tokens()] == [5]
    for epoch in range(1, 10):  # over-confident: the second candidate is right each time
        draft.accept(epoch, 6)
        draft.take_draft_tokens()
        draft.answer({5: 0.99, 6: 0.001})
    assert [token for *_, token in draft.take_draft_tokens()] == [5, 6]


def test_only_the_best_candidate_counts_for_the_agreement() -> None:
    calibration = Calibration()
    for _ in range(100):
        calibration.judged(0.8, True)
        calibration.judged(0.15, False, is_best=False)
    assert calibration.agreement > 0.95
    assert calibration.probability(0.15) < 0.05
    assert calibration.n_judged == 100


def test_micro_batches_have_a_limit() -> None:
    draft = best_first(n_draft=3)
    draft.answer({token: 0.19 for token in range(10, 15)})
    assert [sum(e.n for e in batch.expansions) for batch in draft.sent] == [3]


@pytest.mark.parametrize(
    ("settings", "is_best_first"),
    [({}, True), ({"mode": "speculative"}, False), ({"continuous": False}, False), ({"policy": "thresholds"}, False)],
)
def test_when_trees_grow_best_first(settings: dict[str, Any], is_best_first: bool) -> None:
    config = SpeculationConfig(**settings)
    assert config.is_best_first == is_best_first
    assert config.most_drafted == (64 if is_best_first else 8)
    assert config.draft_rows == (16 if is_best_first else 1)
    assert (config.sequences, config.branches) == ((1, 128) if is_best_first else (1, 0))
    assert not config.as_chain.is_best_first
