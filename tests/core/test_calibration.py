"""What the head learns of a drafter's probabilities, and of several drafters at once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggpipe.core.draft_messages import ROOT, Expansion, MicroBatch
from ggpipe.core.drafters.calibration import Calibration
from ggpipe.core.drafters.consensus import combined
from ggpipe.core.drafters.request_drafters import RequestDrafters
from ggpipe.core.request import Counters
from ggpipe.core.sequence_ids import SequenceIds
from ggpipe.core.tree import Node, Tree

CONFIDENCES = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 0.98, 0.995)


def test_before_anything_is_judged_the_drafter_is_believed() -> None:
    calibration = Calibration()
    assert [calibration.probability(prob) for prob in (0.0, 0.3, 1.0)] == [0.0, pytest.approx(0.3), pytest.approx(1.0)]


def test_a_drafter_that_is_overconfident() -> None:
    calibration = Calibration()
    for i in range(400):
        calibration.judged(0.9, right=i % 2 == 0)
    assert calibration.probability(0.9) == pytest.approx(0.5, abs=0.03)
    assert calibration.agreement == pytest.approx(0.5, abs=0.05)
    assert calibration.probability(0.0) == 0.0


def test_a_few_draft_tokens_move_all_probabilities_alike() -> None:
    """As long as a bin has seen nothing, the drafter's means over all its draft tokens count there."""
    calibration = Calibration()
    for i in range(8):
        calibration.judged(0.8, right=i % 2 == 0)
    ratio = calibration.probability(0.4) / 0.4
    assert ratio < 1
    assert calibration.probability(0.2) / 0.2 == pytest.approx(ratio)


def test_each_bin_converges_on_its_own_draft_tokens() -> None:
    """One that is right with the square of what it says: hardly wrong where it is sure, far off in the middle."""
    calibration = Calibration()
    for i in range(400):
        for prob in CONFIDENCES:
            calibration.judged(prob, right=(i * prob**2) % 1 < prob**2)
    for prob in CONFIDENCES:
        assert calibration.probability(prob) == pytest.approx(prob**2, abs=0.06)


def test_a_bin_follows_a_text_that_changes() -> None:
    calibration = Calibration()
    for right in (True, False):
        for _ in range(300):
            calibration.judged(0.6, right)
    assert calibration.probability(0.6) < 0.05


def test_never_more_than_certain() -> None:
    calibration = Calibration()
    for _ in range(300):
        calibration.judged(0.3, True)
    assert 0.99 < calibration.probability(0.3) < 1.0
    assert 0.99 < calibration.probability(0.45) < 1.0


class Both:
    """Two drafters of one request."""

    def __init__(self) -> None:
        self.tree = Tree(SequenceIds(4, 1), [], token=3, pos=2)
        self.drafters = RequestDrafters((4, 9), self.tree)
        self.output: list[int] = []
        self.counters = Counters()
        self._numbers = 0

    def name(self, drafter: int, token: int, prob: float) -> Node:
        """A drafter names the token after the root."""
        self._numbers += 1
        expansion = Expansion(ROOT, self._numbers, 1, ((token, prob),))
        batch = MicroBatch(request=1, epoch=len(self.output), expansions=(expansion,), complete=True, drafter=drafter)
        self.drafters.add(batch, self.output, lambda parent, token: True, 0.0)
        return self.tree.root.children[token]

    def add_below(self, drafter: int, parent: Node, token: int, prob: float) -> Node:
        """A drafter names the token after one that it named."""
        self._numbers += 1
        (parent_number,) = (proposal.number for proposal in parent.proposals if proposal.drafter == drafter)
        expansion = Expansion(parent_number, self._numbers, 1, ((token, prob),))
        batch = MicroBatch(request=1, epoch=len(self.output), expansions=(expansion,), complete=False, drafter=drafter)
        self.drafters.add(batch, self.output, lambda parent, token: True, 0.0)
        return parent.children[token]

    def accept(self, token: int) -> None:
        self.output.append(token)
        self.drafters.judge(token, self.counters)
        self.drafters.advanced(self.tree.advance(token), len(self.output))
        self.drafters.validate()

    def probability(self, drafter: int, prob: float) -> float:
        return self.drafters[drafter].calibration.probability(prob)


def test_each_drafter_is_judged_by_its_own_probabilities() -> None:
    """Both always name the same token. It is right every second time, as only one of them says."""
    it = Both()
    for i in range(400):
        it.name(4, 7, 0.5)
        it.name(9, 7, 0.95)
        it.accept(7 if i % 2 else 8)
    assert it.probability(4, 0.5) == pytest.approx(0.5, abs=0.05)
    assert it.probability(9, 0.95) == pytest.approx(0.5, abs=0.05)
    assert it.probability(4, 0.95) == pytest.approx(0.95, abs=0.1), (
        "it never said so: nothing to learn from the other one"
    )


def test_a_drafter_is_not_judged_by_what_others_name() -> None:
    it = Both()
    for i in range(200):
        it.name(4, 7, 0.9)
        it.name(9, 8, 0.9)
        it.accept(7)
        assert it.drafters[4].calibration.n_judged == it.drafters[9].calibration.n_judged == i + 1
    assert it.probability(4, 0.9) > 0.97
    assert it.probability(9, 0.9) < 0.03
    assert it.drafters.leading is it.drafters[4]


def test_a_drafter_whose_best_token_is_not_worth_sending_agrees_less() -> None:
    it = Both()
    for _ in range(200):
        it.name(9, 7, 0.9)
        nothing = MicroBatch(request=1, epoch=len(it.output), expansions=(), complete=True, drafter=4)
        it.drafters.add(nothing, it.output, lambda parent, token: True, 0.0)
        it.accept(7)
    assert it.drafters[4].calibration.agreement < 0.01
    assert it.probability(4, 0.9) == pytest.approx(0.9), "what it does send is believed as before"


def test_a_token_that_two_drafters_name_is_more_probable_than_either_says() -> None:
    it = Both()
    alone = it.name(4, 6, 0.6)
    below = it.add_below(4, alone, 5, 0.5)
    assert alone.probability == pytest.approx(0.6)
    assert it.name(9, 6, 0.5) is alone
    assert alone.probability == pytest.approx(1 - 0.4 * 0.5)
    assert math.exp(below.log_path) == pytest.approx(0.8 * 0.5)
    assert len(it.tree.best_first()) == 2


def test_drafters_that_disagree_leave_each_other_less() -> None:
    it = Both()
    one, other = it.name(4, 6, 0.6), it.name(9, 5, 0.6)
    assert one.probability == pytest.approx(other.probability) == pytest.approx(0.24 / 0.64)
    it.name(4, 7, 0.1)
    assert one.probability > other.probability, "what one drafter leaves open is less now"


def test_a_drafter_that_has_been_wrong_adds_and_takes_little() -> None:
    """It is its calibrated probability that counts."""
    it = Both()
    for _ in range(200):
        it.name(4, 7, 0.9)
        it.name(9, 8, 0.9)
        it.accept(7)
    right = it.name(4, 6, 0.9)
    it.name(9, 6, 0.9)
    assert right.probability == pytest.approx(it.probability(4, 0.9), abs=0.01)
    second = it.name(9, 5, 0.9)
    assert second.probability < 0.05
    assert right.probability > 0.95


@pytest.mark.parametrize("agree", [True, False])
def test_what_two_drafters_that_make_the_same_mistakes_say_is_worth_what_it_was(agree: bool) -> None:
    """They name the same token and are right in six of ten cases; or different ones, and are never both wrong."""
    it = Both()
    for i in range(600):
        it.name(4, 7, 0.6)
        it.name(9, 7 if agree else 8, 0.6)
        if agree:
            it.accept(7 if i * 3 % 10 < 6 else 5)
        else:
            it.accept(7 + i % 2)
    one = it.name(4, 7, 0.6)
    other = it.name(9, 7 if agree else 8, 0.6)
    assert one.probability == pytest.approx(0.6 if agree else 0.5, abs=0.1)
    assert other.probability == pytest.approx(0.6 if agree else 0.5, abs=0.1)
    expected = 0.6 if agree else 0.5
    assert it.probability(4, 0.6) == pytest.approx(expected, abs=0.1), "each one still learns by its own"


BELIEFS = st.lists(st.dictionaries(st.integers(0, 4), st.floats(0, 1), min_size=1), min_size=1, max_size=4)


@given(BELIEFS)
def test_combined_probabilities_are_probabilities(beliefs: list[dict[int, float]]) -> None:
    probabilities = combined(beliefs)
    assert probabilities.keys() == {token for belief in beliefs for token in belief}
    assert all(prob >= 0 for prob in probabilities.values())
    assert sum(probabilities.values()) <= 1 + 1e-9
    assert combined(beliefs[::-1]) == pytest.approx(probabilities, abs=1e-6), "in whatever order they came"


@given(st.floats(0, 0.99), st.floats(0, 0.99))
def test_who_agrees_takes_nothing_away(one: float, other: float) -> None:
    (probability,) = combined([{1: one}, {1: other}]).values()
    assert probability == pytest.approx(1 - (1 - one) * (1 - other))


def test_numbers_are_each_drafters_own() -> None:
    it = Both()
    node = it.name(4, 7, 0.5)
    it.name(9, 7, 0.6)
    (number_4,) = it.drafters[4].nodes
    (number_9,) = it.drafters[9].nodes
    assert it.drafters[4].nodes[number_4] is it.drafters[9].nodes[number_9] is node
    it.accept(7)
    assert it.drafters[4].accepted == {number_4: 1}
    assert it.drafters[9].accepted == {number_9: 1}
    assert not it.drafters[4].nodes
    assert not it.drafters[9].nodes


def test_it_is_complete_when_no_drafter_may_send_more() -> None:
    it = Both()
    assert it.drafters.all_complete, "none may be ahead of the root"
    it.drafters[4].look_ahead = it.drafters[9].look_ahead = 3
    assert not it.drafters.all_complete
    it.name(4, 7, 0.5)
    assert not it.drafters.all_complete
    assert it.drafters.leading is it.drafters[9], "the other one has no more"
    it.name(9, 7, 0.5)
    assert it.drafters.all_complete
    it.accept(7)
    assert not it.drafters.all_complete


def test_several_drafters_are_reckoned_by_what_they_reach_together() -> None:
    """Each knows every other token, and says so."""
    it = Both()
    for i in range(200):
        it.name(4, 7, 0.9 if i % 2 else 0.3)
        it.name(9, 8, 0.3 if i % 2 else 0.9)
        it.accept(7 if i % 2 else 8)
    assert it.drafters.calibration.agreement > 0.9
    assert it.drafters[4].calibration.agreement < 0.7
    assert it.drafters[9].calibration.agreement < 0.7


def test_only_draft_tokens_that_are_to_come_are_waited_for() -> None:
    """n-grams have sent theirs: what is to come is as good as the draft model alone."""
    it = Both()
    it.drafters = RequestDrafters((4, 9), it.tree, at_once=(9,))
    it.drafters[4].look_ahead = it.drafters[9].look_ahead = 3
    assert it.drafters.coming is it.drafters[4].calibration
    it.drafters = RequestDrafters((4, 9), it.tree)
    it.drafters[4].look_ahead = it.drafters[9].look_ahead = 3
    assert it.drafters.coming is it.drafters.calibration
    alone = RequestDrafters((4,), it.tree)
    assert alone.coming is alone.calibration is alone[4].calibration


def test_tokens_beside_each_other_do_not_shorten_the_pace() -> None:
    it = Both()
    it.drafters.root_sent(10.0)
    expansions = (
        Expansion(ROOT, 1, 3, ((5, 0.6), (6, 0.2), (7, 0.1))),
        Expansion(2, 4, 1, ((8, 0.9),)),
        Expansion(1, 5, 2, ((5, 0.5), (6, 0.3))),
        Expansion(5, 7, 1, ((8, 0.9),)),
    )
    batch = MicroBatch(request=1, epoch=0, expansions=expansions, complete=False, drafter=4)
    it.drafters.add(batch, it.output, lambda parent, token: True, 16.0)
    assert it.drafters[4].pace.first_s == pytest.approx(2.0), "three tokens one after the other"
