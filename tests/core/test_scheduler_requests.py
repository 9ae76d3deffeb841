"""The scheduler against fake pipelines and drafts whose messages take as long as hypothesis likes."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.examples import n_examples
from support.fake_model import FakeModel
from support.requests import changed, core_request
from support.scenarios import Scenario, conversations, play, recurrent, scenarios, thickets

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.batching.payoff import Payoff
from ggpipe.core.prefixes import SavePrefix
from ggpipe.core.request import Limits, Request

N_EXAMPLES = n_examples(40, 200)
NARROW = Scenario(
    Limits(
        n_ctx=50, n_batch=12, n_ubatch=2, n_in_flight=1, n_seq=5, n_requests=3, n_prefixes=1, partial_prefixes=False,
        rolls_back=False, drops_rows=False,
    ),
    Limits(n_ctx=50, n_batch=12, n_ubatch=2, n_in_flight=2, n_seq=4, n_requests=3, n_prefixes=1),
    n_stages=1,
    n_draft_stages=1,
    model=FakeModel(1000),
    agreement=0.5,
    drafts=("model", "model"),
    requests=[
        core_request(id=1, prompt=(100,), n_predict=10, speculation=SpeculationConfig(mode="speculative", n_draft=1)),
        SavePrefix(2, (200,), "whole"),
        *(core_request(id=i, prompt=(100 * i,), n_predict=0) for i in range(3, 9)),
    ],
    stops={},
    pace={"target stage": 50, "target result": 5, "sample": 5, "draft": 50, "draft tokens": 1, "steering": 50},
    seed=0,
    alike=0.5,
    hybrid=True,
)  # fmt: skip
"""An accepted token that is decoded again with the one before needs whole runs, and prompts wait."""


@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_any_interleaving_gives_the_targets_own_text(scenario: Scenario) -> None:
    play(scenario).check_end()


@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(thickets())
def test_branches_in_any_interleaving_give_the_targets_own_text(scenario: Scenario) -> None:
    play(scenario).check_end()


@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversations())
def test_what_is_kept_of_earlier_texts_changes_no_text(scenario: Scenario) -> None:
    play(scenario).check_end()


@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(recurrent())
@example(NARROW)
def test_states_that_are_kept_on_the_way_change_no_text(scenario: Scenario) -> None:
    play(scenario).check_end()


@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios() | thickets() | conversations() | recurrent(), st.lists(st.integers(1, 150), min_size=1, max_size=3))
def test_requests_go_on_when_all_ranks_are_lost(scenario: Scenario, lives: list[int]) -> None:
    play(scenario, lives).check_end()


@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios() | thickets(), st.randoms(use_true_random=False))
def test_drafters_that_pause_at_any_time_change_no_text(scenario: Scenario, rng: random.Random) -> None:
    with mock.patch.object(Payoff, "is_paused", side_effect=lambda *_: rng.random() < 0.5):
        play(scenario).check_end()


@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios(), st.integers(1, 30))
def test_a_chain_that_is_always_right_moves_no_cells(scenario: Scenario, n_predict: int) -> None:
    first, limits = scenario.requests[0], replace(scenario.limits, n_ctx=60, partial_prefixes=True)
    assert isinstance(first, Request)
    request = changed(replace(first, adjustments=None), n_predict=n_predict, speculation=first.speculation.as_chain)
    head = play(
        replace(
            scenario,
            limits=limits,
            model=replace(scenario.model, draws=False),
            agreement=1.0,
            drafts=("model",),
            requests=[request],
            stops={},
        )
    )
    assert all(run.ops == () for run in head.seen[1].runs)
