"""Drafters that draft ahead, or take turns with the target: whichever is faster."""

from __future__ import annotations

import itertools

import pytest

from ggpipe.core.batching.turns import Turns, ahead_token_s, usual_turn
from ggpipe.core.drafters.calibration import Calibration, Pace
from ggpipe.core.run_cost import RunCost

MOST = 8


def cost_of(row_s: float, n_stages: int = 2, slower: float = 1.0) -> RunCost:
    """Runs of one row take 1 s in each stage; each further row takes `row_s` more, and all of it `slower` times as
    long."""
    cost = RunCost()
    for _ in range(30):
        for n in range(1, MOST + 2):
            stage_s = slower * (1 + row_s * (n - 1))
            cost.ended(n, stage_s, n_stages * stage_s)
    return cost


def pace_of(next_s: float) -> Pace:
    pace = Pace()
    pace.noted(True, 2 * next_s)
    pace.noted(False, next_s)
    return pace


def test_draft_tokens_that_a_run_delays_do_not_count_in_turn() -> None:
    pace = pace_of(1.0)
    pace.root_sent(True, 10.0)
    pace.came(1, 12.0)
    pace.root_submitted(12.5)
    pace.came(1, 20.0)
    assert pace.first_s == 2.0
    assert 0.95 < (pace.next_s or 0) < 1.0, "so that a root waits again"
    pace.root_sent(True, 30.0)
    pace.came(1, 32.0)
    pace.root_submitted(34.0)  # which waited for longer than usual, in vain
    assert 1.1 < (found := pace.next_s or 0) < 4.0
    pace.came(1, 50.0)
    assert pace.next_s == found


def test_a_wait_in_vain_makes_the_next_root_wait_for_longer() -> None:
    """Else a draft that is slower than assumed is never timed: the roots' runs delay its draft tokens."""
    pace = Pace()
    for second, expected_s in enumerate((2.0, 1.96, 2.77)):
        start = 100.0 * second
        pace.root_sent(True, start)
        pace.root_submitted(start + (1.0, 0.5, 3.0)[second])
        pace.came(1, start + 50.0)
        assert pace.first_s == pytest.approx(expected_s, rel=0.01)
    assert pace.next_s is None
    assert pace.usual == (pace.first_s, pace.first_s), "as long as nothing better is known"


def test_a_later_request_has_the_paces_of_an_earlier_one() -> None:
    earlier = pace_of(1.0)
    earlier.change_way()
    earlier.noted(True, 4.0)
    later = Pace()
    later.recall(earlier)
    assert (later.first_s, later.next_s) == (4.0, 1.0)
    assert (later.of_other_way.first_s, later.of_other_way.next_s) == (2.0, 1.0)
    later.change_way()
    later.noted(True, 8.0)
    assert earlier.of_other_way.first_s == 2.0, "it has its own"
    later.recall(pace_of(5.0))
    assert later.next_s == 1.0, "it knows better"


def test_a_turn_takes_what_its_rows_and_their_drafting_are_worth() -> None:
    known, fast = Calibration(), pace_of(0.02)
    free, dear = usual_turn(cost_of(0.0), known, fast, MOST), usual_turn(cost_of(0.9), known, fast, MOST)
    assert free.n == MOST
    assert dear.n == 0
    assert dear.token_s == pytest.approx(2.0), "as without drafting"
    assert free.token_s < 1.0
    assert usual_turn(cost_of(0.0), known, pace_of(0.3), MOST).n < MOST, "the drafter is slow"
    assert 0 < free.least_path < usual_turn(cost_of(0.0), known, pace_of(0.3), MOST).least_path


def test_a_path_is_no_less_than_0_where_longer_runs_seem_to_take_less_time() -> None:
    cost = RunCost()
    for n in range(1, MOST + 2):
        cost.ended(n, 1 / n, 2 / n)
    assert usual_turn(cost, Calibration(), pace_of(0.0), MOST).least_path >= 0


def test_ahead_is_never_slower_than_in_turn_where_nothing_slows_ranks_down() -> None:
    for row_s in (0.0, 0.1, 0.3, 0.9):
        for n_stages in (2, 4, 8):
            cost, known, pace = cost_of(row_s, n_stages), Calibration(), pace_of(0.02)
            assert ahead_token_s(cost, known, pace, MOST) <= usual_turn(cost, known, pace, MOST).token_s


class Served:
    """A request that is served for some rounds, where a token takes that long in each way."""

    def __init__(self, turns: Turns, ahead: RunCost, in_turn: RunCost) -> None:
        self.turns = turns
        self._ahead, self._in_turn = ahead, in_turn
        self._known, self._pace = Calibration(), pace_of(0.02)

    def ways(self, ahead_s: float, turn_s: float, n_rounds: int = 400) -> list[bool]:
        """Whether target and drafters took turns, round by round."""
        found = []
        for _ in range(n_rounds):
            found.append(self.turns.in_turn)
            seconds = 2.5 * turn_s if self.turns.in_turn else 2 * ahead_s
            costs = self._ahead, self._in_turn
            self.turns.accepted(*costs, self._known, self._pace, MOST, n=2, expected=2.5, seconds=seconds)
        return found


def chosen(ahead_s: float, turn_s: float) -> list[bool]:
    return Served(Turns(crowding=1.5), cost_of(0.0), cost_of(0.0)).ways(ahead_s, turn_s, n_rounds=600)


def test_the_faster_way_is_found_and_the_other_one_tried_now_and_then() -> None:
    in_turn, ahead = chosen(ahead_s=1.2, turn_s=0.8), chosen(ahead_s=0.5, turn_s=0.8)
    assert sum(in_turn[-200:]) > 180
    assert not all(in_turn), "ahead was tried"
    assert sum(ahead[-200:]) < 20


def test_run_costs_show_the_faster_way_within_a_few_tokens() -> None:
    served = Served(Turns(crowding=1.5), cost_of(0.0, slower=1.5), cost_of(0.0))
    found = served.ways(ahead_s=1.1, turn_s=0.8)
    n_ahead = found.count(False)
    assert 0 < n_ahead < 30
    later = Served(served.turns, cost_of(0.0, slower=1.5), cost_of(0.0)).ways(ahead_s=1.1, turn_s=0.8)
    assert later.count(False) <= n_ahead, "what an earlier request showed is still known"


def test_each_trial_that_fails_puts_off_the_next_one() -> None:
    found = Served(Turns(crowding=1.5), cost_of(0.0), cost_of(0.0)).ways(ahead_s=0.9, turn_s=0.8, n_rounds=4000)
    ends = [i for i, (before, after) in enumerate(itertools.pairwise(found)) if after and not before]
    waits = [after - before for before, after in itertools.pairwise(ends)]
    assert len(waits) > 3
    assert waits[-1] > 2 * waits[0]
    assert sum(found[-2000:]) > 1900


def test_turns_in_which_no_draft_token_pays_are_not_taken() -> None:
    served = Served(Turns(crowding=1.5), cost_of(0.9, slower=1.5), cost_of(0.9))
    assert sum(served.ways(ahead_s=2.5, turn_s=2.0)) < 10


@pytest.mark.parametrize(
    ("crowding", "sparsity", "in_turn"), [(0.0, 1.0, False), (1.0, 1.0, False), (1.5, 1.0, True), (1.5, 4.0, False)]
)
def test_requests_begin_in_turn_where_threads_exceed_cores_and_rows_are_cheap(
    crowding: float, sparsity: float, in_turn: bool
) -> None:
    assert Turns(crowding, sparsity).in_turn is in_turn


def test_nothing_is_decided_before_a_drafter_has_drafted() -> None:
    turns = Turns(crowding=1.5)
    turns.accepted(cost_of(0.0), cost_of(0.0), Calibration(), Pace(), MOST, n=1, expected=1.0, seconds=100.0)
    assert turns == Turns(crowding=1.5)
