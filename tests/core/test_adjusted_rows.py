"""Draft models' logits are adjusted as the target's are."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.draft_steps import Draft

from ggpipe.core.draft_messages import Adjustments, Dry, Penalties
from ggpipe.core.drafters.adjusted_rows import AdjustedRows
from ggpipe.core.messages import RowLogits

LIKELY = {5: 0.5, 9: 0.3, 7: 0.2}
PRESENCE = Adjustments(penalties=Penalties(n_last=2, repeat=1.0, frequency=0.0, presence=3.0))
TOKENS = st.lists(st.integers(0, 5), max_size=12).map(tuple)
ADJUSTMENTS = st.builds(
    Adjustments,
    biases=st.lists(st.tuples(st.integers(0, 7), st.sampled_from([-1e9, -2.0, 0.5, 1e9])), max_size=2).map(tuple),
    penalties=st.none()
    | st.builds(
        Penalties,
        n_last=st.integers(1, 9),
        repeat=st.sampled_from([0.5, 1.0, 1.5]),
        frequency=st.sampled_from([-1.0, 0.0, 0.5]),
        presence=st.sampled_from([0.0, 2.0]),
    ),
    dry=st.none()
    | st.builds(
        Dry,
        n_last=st.integers(1, 9),
        multiplier=st.sampled_from([-1.0, 0.8]),
        base=st.sampled_from([1.0, 1.75, 1e9]),
        allowed_length=st.integers(0, 3),
        breakers=st.sampled_from([(), (3,), (0, 1)]),
    ),
)


def row_of(logits: list[float]) -> RowLogits:
    ids = sorted(range(len(logits)), key=lambda id: -logits[id])
    best = max(logits)
    log_sum_exp = best + math.log(sum(math.exp(logit - best) for logit in logits))
    return RowLogits(3, tuple(ids), tuple(logits[id] for id in ids), log_sum_exp)


@given(ADJUSTMENTS, TOKENS, TOKENS, TOKENS, st.lists(st.floats(-50, 50), min_size=8, max_size=8))
def test_draft_tokens_count_as_the_text_does(
    adjustments: Adjustments, prompt: tuple[int, ...], text: tuple[int, ...], path: tuple[int, ...], logits: list[float]
) -> None:
    own = AdjustedRows(adjustments, prompt)
    for token in text:
        own.accept(token)
    found = own.adjusted(row_of(logits), path)
    assert found == AdjustedRows(adjustments, (*prompt, *text, *path)).adjusted(row_of(logits), ())
    assert list(found.logits) == sorted(found.logits, reverse=True)
    # A token that is lowered may have had nearly all of the probability, whose rounding is then part of what remains.
    rounding = 5e-14 * math.exp(row_of(logits).log_sum_exp - found.log_sum_exp)
    sum_of_all = sum(math.exp(logit - found.log_sum_exp) for logit in found.logits)
    assert sum_of_all == pytest.approx(1, abs=1e-6 + rounding) or rounding > 1e-3


def begun(adjustments: Adjustments, prompt: tuple[int, ...], **settings: Any) -> Draft:
    draft = Draft()
    draft.begin(prompt=prompt, adjustments=adjustments, **settings)
    return draft


@pytest.mark.parametrize("policy", ["best-first", "thresholds"])
def test_penalized_tokens_are_drafted_less(policy: str) -> None:
    draft = begun(PRESENCE, (8, 5), policy=policy, n_draft_rows=1)
    for _ in range(3):
        draft.answer(LIKELY)
    best = {parent: token for parent, _, token in reversed(draft.take_draft_tokens())}
    assert list(dict(sorted(best.items())).values()) == [9, 7, 5], "two tokens later, it is no longer penalized"


def test_accepted_tokens_are_penalized() -> None:
    draft = begun(PRESENCE, (8, 8), policy="best-first", n_draft_rows=1)
    draft.answer(LIKELY)
    draft.take_draft_tokens()
    draft.accept(1, 9)  # 5 was the best
    draft.answer(LIKELY)
    draft.take_draft_tokens()
    draft.answer(LIKELY)
    assert draft.take_draft_tokens()[0][2] == 5


def test_raised_tokens_come_though_they_are_not_among_the_best() -> None:
    draft = begun(Adjustments(biases=((4, 2.0), (6, -1.0))), (8,))
    (wanted,) = draft.runs[0].logits_requests
    assert wanted.also == (4,)
    assert wanted.n > 8


def test_what_is_not_a_number_of_candidates() -> None:
    """Logits of any size."""
    biased = Adjustments(biases=((0, 1e9),), penalties=Penalties(n_last=4, repeat=1.5, frequency=1.0, presence=1e30))
    for logits in ((900.0, 0.0, -900.0), (0.0, -math.inf), (1e30, 1e30), (5.0,)):
        row = RowLogits(0, tuple(range(len(logits))), logits, max(logits) + 1e-9)
        found = AdjustedRows(biased, (0, 1)).adjusted(row, ())
        assert not math.isnan(found.log_sum_exp)
        assert all(logit - found.log_sum_exp < 1e-6 for logit in found.logits)
