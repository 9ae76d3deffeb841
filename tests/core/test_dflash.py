"""A DFlash head's drafter: which states its rows read, what it makes of blocks, with messages in any order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.driven_head import HORIZON, MODES, Driven, Target, begun, check_any_order, play_out
from support.examples import n_examples
from support.fake_drafts import FakeDraftModel
from support.fake_model import FakeModel

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import ROOT
from ggpipe.core.drafters.dflash import DFlashHead
from ggpipe.core.events import RunEnded


@pytest.mark.parametrize("speculation", MODES, ids=["best-first", "chains", "speculative", "two branches"])
@settings(max_examples=n_examples(8, 20))
@given(seed=st.integers(0, 10**9), agreement=st.sampled_from([0.0, 0.6, 1.0]), knows_paths=st.booleans())
def test_any_order(speculation: SpeculationConfig, seed: int, agreement: float, knows_paths: bool) -> None:
    check_any_order(DFlashHead, speculation, seed, agreement, knows_paths)


def drafted(driven: Driven) -> list[tuple[int, ...]]:
    """The draft tokens that were sent, as paths below the text that the drafter knows; the longest last."""
    n = len(driven.known[1])
    return sorted((path[n:] for path in driven.numbers.values() if len(path) > n), key=len)


def computing() -> Driven:
    """Its first block is being computed."""
    driven = begun(1, 2, 3, 4, head=DFlashHead)
    driven.hear()
    while driven.target.states:
        driven.arrive(driven.target.states[0])
    driven.pipeline.step(0)
    assert driven.pipeline.stages[0].computing is not None
    return driven


def test_one_run_drafts_a_block() -> None:
    driven = begun(1, 2, 3, 4, head=DFlashHead)
    play_out(driven)
    (last,) = [rows for rows in driven.pipeline.rows_of.values() if rows]
    assert len(last) == 3, "states before the last token"
    assert [len(path) for path in drafted(driven)] == list(range(1, HORIZON + 1))
    assert driven.sent[-1].complete


def test_positions_that_are_not_wanted_are_not_asked_for() -> None:
    driven = begun(1, 2, 3, 4, look_ahead=3, head=DFlashHead)
    driven.hear()
    driven.arrive(driven.target.states[0])
    (run,) = driven.pipeline.in_flight.values()
    assert [logits_request.n_positions for logits_request in run.logits_requests] == [3]


def test_the_rest_of_a_block_is_drafted_on() -> None:
    """A token is accepted while the block is computed."""
    driven = computing()
    token = driven.model.candidates((4,), 1)[0][0]
    driven.target.accept(1, (token,), 20)
    driven.hear()
    driven.pipeline.step(0)
    driven.handle(RunEnded(driven.pipeline.take_result()))
    assert driven.sent[0].epoch == 1
    assert len(drafted(driven)) == HORIZON - 1
    play_out(driven)
    assert len(drafted(driven)) == HORIZON - 1, "no further block is needed yet"
    driven.target.accept(1, drafted(driven)[3], 20)
    play_out(driven)
    assert len(drafted(driven)) == HORIZON, "less than half was left"


def test_a_block_that_the_text_left_is_dropped() -> None:
    driven = computing()
    token = driven.model.candidates((4,), 1)[0][0]
    driven.target.accept(1, (token % 8 + 1,), 20)
    driven.hear()
    play_out(driven)
    assert [batch.epoch for batch in driven.sent if batch.expansions] == [1]
    assert len(drafted(driven)) == HORIZON, "all of the second block"


def branching(knows_paths: bool) -> Driven:
    """It has drafted a tree with branches for a request whose tokens are the most probable ones."""
    driven = Driven(Target(), FakeDraftModel(FakeModel(9, 1), 1.0), DFlashHead, knows_paths)
    speculation = SpeculationConfig(policy="thresholds", n_parallel=4, p_split=0.01, n_draft=16)
    driven.target.begin(6, (1, 2, 3, 4), 0, speculation, 20)
    play_out(driven)
    return driven


def paths_of(driven: Driven) -> dict[tuple[int, ...], tuple[int, ...]]:
    """By the path of each draft token or root: what is sent as candidates after it, best first."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for batch in driven.sent:
        for expansion in batch.expansions:
            path = driven.known[6] if expansion.parent == ROOT else driven.numbers[6, expansion.parent]
            found[path] = tuple(token for token, _ in expansion.candidates)
    return found


def test_branches_have_candidates_of_their_own() -> None:
    driven = branching(knows_paths=True)
    said = paths_of(driven)
    best = {path: tuple(token for token, _ in driven.model.candidates(path[-1:], len(said[path]))) for path in said}
    assert said == best
    assert len({path[:5] for path in said if len(path) > 5}) > 1, "branches went on"
    blind = branching(knows_paths=False)
    assert any(tokens != best.get(path, tokens) for path, tokens in paths_of(blind).items())
