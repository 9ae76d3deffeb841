"""The drafter of a draft head, and of MTP layers: which states its rows read, and what it sends, in any order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.driven_head import HORIZON, MODES, begun, check_any_order, play_out
from support.examples import n_examples

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.drafters.eagle import EagleHead
from ggpipe.core.drafters.mtp import MtpLayers


@pytest.mark.parametrize("head", [EagleHead, MtpLayers])
@pytest.mark.parametrize("speculation", MODES, ids=["best-first", "chains", "speculative", "two branches"])
@settings(max_examples=n_examples(8, 20))
@given(seed=st.integers(0, 10**9), agreement=st.sampled_from([0.0, 0.6, 1.0]))
def test_any_order(head: type[EagleHead], speculation: SpeculationConfig, seed: int, agreement: float) -> None:
    check_any_order(head, speculation, seed, agreement)


def test_it_drafts_no_further_than_its_horizon() -> None:
    driven = begun(1, 2, 3, 4)
    play_out(driven)
    assert max(map(len, driven.numbers.values())) == 4 + HORIZON
    assert driven.sent[-1].complete, "nothing more comes before the next token"


def test_what_was_sent_before_is_not_sent_again() -> None:
    """Its model thinks the same with every state, so that one accepted token lets it draft one further."""
    driven = begun(1, 2, 3, 4)
    play_out(driven)
    n = len(driven.numbers)
    driven.target.accept(1, driven.numbers[1, 1][4:], 20)
    play_out(driven)
    assert len(driven.numbers) == n + 1
    (expansion,) = driven.sent[-1].expansions or driven.sent[-2].expansions
    assert expansion.parent == 8


def test_tokens_wait_while_nothing_is_drafted() -> None:
    driven = begun(1, 2, look_ahead=0)
    for i in range(40):
        driven.target.accept(1, (1 + i % 5,), 0)
        play_out(driven)
    runs = [rows for rows in driven.pipeline.rows_of.values() if rows]
    assert [len(rows) for rows in runs] == [6, 6], "as many as fill a run, from 32 on"
    assert len(driven.arrived) < 40
