"""Draft models know the random numbers with which tokens are drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from support.draft_steps import Draft

from ggpipe.core.draft_messages import Drawing
from ggpipe.core.drafters.foresight import Foresight, Mixture
from ggpipe.core.messages import RowLogits
from ggpipe.core.random_numbers import RandomNumbers

SORTED = (("top_k", 40.0), ("temperature", 1.0))
BY_ID = (("min_p", 0.01), ("temperature", 1.0))
LIKELY = {5: 0.5, 9: 0.3, 7: 0.2}
FIRST, SECOND, THIRD = (0.0, 0.4), (0.55, 0.75), (0.85, 1.0)
"""Numbers that select 5, 9 and 7, if candidates are sorted."""


def seed_of(*wanted: tuple[float, float]) -> int:
    """A seed whose first numbers lie in these ranges."""

    def fits(seed: int) -> bool:
        numbers = RandomNumbers(seed)
        return all(least < numbers[place] < most for place, (least, most) in enumerate(wanted))

    return next(filter(fits, itertools.count()))


def drawn(draft: Draft) -> list[int]:
    """The most probable token of each parent that was sent."""
    return [
        token
        for _, token in sorted({parent: token for parent, _, token in reversed(draft.take_draft_tokens())}.items())
    ]


def begun(
    numbers: Sequence[tuple[float, float]], samplers: tuple[tuple[str, float], ...] = SORTED, n_drawn: int = 0
) -> Draft:
    draft = Draft()
    drawing = Drawing(seed=seed_of(*numbers), samplers=samplers, n_drawn=n_drawn)
    draft.begin(policy="best-first", n_draft_rows=1, drawing=drawing)
    return draft


@pytest.mark.parametrize(("number", "token"), [(FIRST, 5), (SECOND, 9), (THIRD, 7)])
def test_the_number_says_which_of_probable_tokens_is_drawn(number: tuple[float, float], token: int) -> None:
    draft = begun([number])
    draft.answer(LIKELY)
    assert drawn(draft) == [token]


def test_candidates_are_added_up_by_their_ids_if_no_sampler_sorts_them() -> None:
    draft = begun([(0.55, 0.65)], BY_ID)
    draft.answer(LIKELY)
    assert drawn(draft) == [7], "between 5 and 9"


def test_each_position_has_its_number() -> None:
    draft = begun([SECOND, FIRST, THIRD])
    for _ in range(3):
        draft.answer(LIKELY)
    assert drawn(draft) == [9, 5, 7]
    draft.accept(1, 9)
    draft.accept(2, 8)  # it was not drafted
    draft.answer(LIKELY)  # after the third draft token, which is dead now
    draft.take_draft_tokens()
    draft.answer(LIKELY)
    assert drawn(draft) == [7]


def test_a_resumed_output_took_numbers() -> None:
    draft = begun([FIRST, FIRST, THIRD], n_drawn=2)
    draft.answer(LIKELY)
    assert drawn(draft) == [7]


def test_a_second_draw_moves_the_numbers_on() -> None:
    draft = begun([FIRST, FIRST, THIRD])
    draft.answer(LIKELY)
    assert drawn(draft) == [5]
    draft.accept(1, 9, n_drawn=2)
    draft.answer(LIKELY)
    draft.take_draft_tokens()
    draft.answer(LIKELY)
    assert drawn(draft) == [7]


@pytest.mark.parametrize("settings", [{"policy": "thresholds"}, {"mode": "speculative"}])
def test_where_trees_grow_by_thresholds_numbers_are_not_used(settings: dict[str, Any]) -> None:
    draft = Draft()
    draft.begin(drawing=Drawing(seed=seed_of(THIRD), samplers=SORTED), **settings)
    draft.answer(LIKELY)
    assert [token for *_, token in draft.take_draft_tokens()][:1] == [5]


def test_logits_of_any_size() -> None:
    for logits in ((900.0, 0.0, -900.0), (0.0, -math.inf), (1e30, 1e30), (5.0,)):
        for temp in (1e-3, 0.5, 2.0, 1e3):
            drawing = Drawing(seed=1, samplers=(("top_k", 40.0), ("temperature", temp)))
            row = RowLogits(0, tuple(range(len(logits))), logits, max(logits) + 1e-9)
            found = Foresight(drawing, Mixture()).candidates(row, 0)
            assert len(found) == len(logits)
            assert all(0 <= prob <= 1 for _, prob in found)


def test_what_samplers_remove_may_still_be_drawn() -> None:
    """The target's probabilities are not the draft model's."""
    draft = begun([FIRST], (("top_k", 1.0), ("temperature", 1.0)))
    draft.answer(LIKELY)
    assert {token for *_, token in draft.take_draft_tokens()} == set(LIKELY)


def test_what_explains_more_counts_more() -> None:
    mixture = Mixture()
    for _ in range(100):
        mixture.learn((0.2, 0.9, 0.5))
    none, narrow, wide = mixture.shares
    assert narrow > 0.6 > wide > none
    for _ in range(400):
        mixture.learn((0.2, 0.0, 0.1))
    assert mixture.shares[0] > 0.8, "what was learned first is forgotten"
