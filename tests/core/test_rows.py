"""What rows are worth and cost: rounds of accepted tokens, runs of draft tokens, draft tokens beside accepted ones."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence

import pytest

from ggpipe.core.batching.rows import (
    Coming,
    DraftWithRoot,
    Rounds,
    SteadyRuns,
    draft_with_root,
    steady_runs,
    usual_chain,
)
from ggpipe.core.drafters.calibration import Calibration, Pace
from ggpipe.core.run_cost import RunCost, most_per_second

CHAIN = [0.7**i for i in range(1, 9)]


class Known:
    """What is learned of a pipeline and of a drafter."""

    def __init__(self) -> None:
        self.cost, self.calibration, self.pace = RunCost(), Calibration(), Pace()

    def best(self, chances: Iterable[float]) -> int:
        return most_per_second(chances, self.cost)

    def usual(self, limit: int) -> int:
        return most_per_second(usual_chain(self.calibration, limit), self.cost)

    def beside_root(self, ready: Sequence[float], most: int) -> DraftWithRoot:
        return draft_with_root(ready, most, self.cost, 1, self.calibration, self.coming(ready))

    def coming(self, ready: Sequence[float], after: float | None = None) -> Coming:
        """The chain that goes on after the token with the probability `after`, by default the last one of `ready`."""
        first_s, next_s = self.pace.first_s or math.inf, self.pace.next_s or math.inf
        after = after if after is not None else min(ready, default=1.0)
        return Coming(after, self.calibration.agreement, next_s if ready else first_s, next_s)


def learned(times: dict[int, float], rounds: int = 30) -> Known:
    known = Known()
    for _ in range(rounds):
        for n, seconds in times.items():
            known.cost.ended(n, seconds)
    return known


def test_where_arithmetic_is_the_limit_runs_are_short() -> None:
    known = learned({n: 0.02 * n for n in range(1, 9)})
    assert known.best(CHAIN) == 1
    assert known.usual(8) == 1


def test_where_memory_is_the_limit_runs_are_long() -> None:
    known = learned({n: 0.02 * (1 + 0.05 * (n - 1)) for n in range(1, 9)})
    assert known.best(CHAIN) >= 5
    assert known.usual(8) >= 5


def lengths_tried(seconds: Callable[[int], float]) -> tuple[set[int], Known]:
    """The run lengths that draft tokens which are nearly sure get, one run after the other."""
    known, tried = Known(), set()
    for _ in range(60):
        known.cost.ended(1, seconds(1))  # a root
        n = known.best([0.99**i for i in range(1, 9)])
        tried.add(n)
        known.cost.ended(n, seconds(n))
    return tried, known


def test_cheap_rows_are_found_and_used() -> None:
    tried, known = lengths_tried(lambda n: 0.02 + 0.0001 * n)
    assert 8 in tried
    assert known.best(CHAIN) >= 6


def test_dear_rows_are_not_tried_again_and_again() -> None:
    tried, known = lengths_tried(lambda n: 0.02 * n)
    assert len(tried - {1}) <= 2, "few longer runs show what rows take"
    assert known.best(CHAIN) == 1


def test_cheap_rows_are_expected_to_stay_cheap() -> None:
    """A run of two rows that took hardly longer than one row predicts longer runs; a dear one predicts dear ones."""
    cheap, dear = learned({1: 0.02, 2: 0.0204}, 1), learned({1: 0.02, 2: 0.04}, 1)
    assert cheap.best(CHAIN) == 4, "twice as many rows as were tried"
    assert learned({1: 0.02, 2: 0.0204, 4: 0.0212}, 1).best(CHAIN) >= 6
    assert dear.best(CHAIN) == 1
    assert dear.cost.time(4) == pytest.approx(0.08)


def test_a_length_is_as_fast_as_its_first_runs_at_best() -> None:
    """The first one with a number of rows may be slow for other reasons: caches, a new graph."""
    cost = RunCost()
    cost.ended(1, 0.02, 0.02)
    cost.ended(4, 0.09, 0.09)
    cost.ended(4, 0.03, 0.03)
    assert cost.time(4) == pytest.approx(0.03, rel=0.01)
    cost.ended(4, 0.09, 0.09)
    assert 0.03 < cost.time(4) < 0.08


def test_an_outlier_is_forgotten() -> None:
    known = learned({1: 0.02, 2: 0.06})
    assert known.best([0.9, 0.81]) == 1
    for _ in range(1000):
        known.cost.ended(1, 0.02)
    assert known.best([0.9, 0.81]) == 2


def test_nothing_to_choose_from() -> None:
    assert Known().best([]) == 1
    assert most_per_second([], RunCost(), n_roots=2) == 0


def timed(row_s: float, n_stages: int = 2, first_s: float = 0.04, next_s: float = 0.04) -> Known:
    """A run takes a second in each stage, and `row_s` more for each row; half of all draft tokens are right."""
    known = Known()
    for n in range(1, 5):
        for _ in range(50):
            known.cost.ended(n, 1 + row_s * (n - 1), (1 + row_s * (n - 1)) * n_stages)
    for i in range(400):
        known.calibration.judged(0.5, i % 2 == 0)
    known.pace.noted(True, first_s)
    known.pace.noted(False, next_s)
    return known


def test_a_row_more_is_dearer_where_a_run_passes_many_stages() -> None:
    few, many = timed(0.2, 1), timed(0.2, 32)
    assert few.usual(4) > many.usual(4) == 1


def test_draft_tokens_go_with_a_root_where_rows_and_waiting_are_cheap() -> None:
    assert timed(0.01).beside_root((), 3).n == 3
    assert timed(0.01, n_stages=32).beside_root((), 3).n < 3, "each row makes 32 stages slower"
    assert timed(0.9).beside_root((), 3) == DraftWithRoot(), "a row costs nearly a run"
    assert timed(0.01, first_s=2.0).beside_root((), 3) == DraftWithRoot(), "the draft is slow"


def test_a_root_waits_only_for_draft_tokens_that_are_still_to_come() -> None:
    known = timed(0.01)
    all_to_come = known.beside_root((), 3)
    assert all_to_come.n == 3
    assert all_to_come.wait_s == pytest.approx(0.12)
    one_to_come = known.beside_root((0.5, 0.25), 3)
    assert one_to_come.n == 3
    assert one_to_come.wait_s == pytest.approx(0.04)
    assert known.beside_root((0.5, 0.25), 2) == DraftWithRoot(2)
    assert timed(0.01, next_s=9.0, first_s=9.0).beside_root((0.5,), 3) == DraftWithRoot(1)


def test_a_root_waits_for_the_chain_rather_than_take_improbable_branches() -> None:
    known, branches = timed(0.01), (0.7, 0.1, 0.05)
    in_turn = draft_with_root(branches, 3, known.cost, 1, known.calibration, known.coming(branches, 0.7), token_s=1.0)
    assert in_turn.n == 3
    assert in_turn.wait_s == pytest.approx(0.08), "two more of the chain are worth more than the branches"
    sooner = draft_with_root(branches, 3, known.cost, 1, known.calibration, known.coming(branches, 0.7), token_s=0.01)
    assert sooner.wait_s == 0, "they save less than the wait takes"


def test_an_improbable_draft_token_does_not_go_with_the_root() -> None:
    assert timed(0.1).beside_root((0.01,), 1) == DraftWithRoot()


def test_the_root_goes_alone_before_the_draft_was_timed() -> None:
    known = Known()
    assert known.beside_root((0.9,), 4) == DraftWithRoot()
    assert known.cost.seconds(3) == 0


def test_the_reach_follows_the_agreement() -> None:
    def reach(agreement: float) -> int:
        calibration = Calibration()
        for i in range(2000):
            calibration.judged(0.5, (i * agreement) % 1 < agreement)
        return calibration.reach

    reaches = [reach(agreement) for agreement in (0.0, 0.3, 0.7, 0.95, 1.0)]
    assert reaches[0] == 2
    assert reaches == sorted(reaches)
    assert 10 < reaches[2] < 30, "0.7 to the power of 17 is 1 / 500"
    assert reaches[-1] > 500


@pytest.mark.parametrize("agreement", [0.0, 0.5, 1.0])
def test_a_limit_out_of_reach_costs_nothing(agreement: float) -> None:
    """`n_draft` may be any number: counting up to it would take hours."""
    known = timed(0.0)
    for i in range(2000):
        known.calibration.judged(0.5, (i * agreement) % 1 < agreement)
    reach = known.calibration.reach
    assert known.usual(2**31) == known.usual(reach)
    assert known.beside_root((0.9,) * 3, 2**31) == known.beside_root((0.9,) * 3, max(reach, 3))


def test_draft_tokens_that_are_there_may_go_with_the_root_beyond_the_reach() -> None:
    """Branches side by side are more than a chain is deep."""
    known = timed(0.0)
    for _ in range(200):
        known.calibration.judged(0.5, False)
    assert known.calibration.reach == 2
    assert known.beside_root((0.3,) * 6, 8).n == 6


# Runs of several requests


def shared(seconds: dict[int, float], length: float = 1.0) -> RunCost:
    cost = RunCost()
    for n_rows, run_s in seconds.items():
        for _ in range(20):
            cost.ended(n_rows, run_s, length * run_s)
    return cost


def test_a_shorter_run_than_any_that_was_tried_is_expected_to_be_shorter() -> None:
    cost = shared({4: 0.28})
    assert 0.1 < cost.time(1) <= cost.time(2) < 0.28
    cost = shared({4: 0.28, 5: 0.28})
    assert cost.time(8) == pytest.approx(0.28, rel=0.02), "rows beyond the shortest run were free"


def test_a_length_is_tried_again_rarely() -> None:
    cost = shared({2: 0.19, 1: 0.1})
    for _ in range(100):
        cost.ended(1, 0.1)
    assert cost.time(2) > 0.16


def test_draft_tokens_beside_roots_must_bring_clearly_more() -> None:
    probabilities = [0.7, 0.7]
    assert most_per_second(probabilities, shared({1: 0.1, 2: 0.1, 3: 0.1, 4: 0.1}), n_roots=2) == 2
    assert most_per_second(probabilities, shared({1: 0.1, 2: 0.19, 3: 0.235, 4: 0.28}), n_roots=2) == 0


def beside_early_roots(ready: Sequence[float], cost: RunCost, n_roots: int = 1) -> int:
    return draft_with_root(ready, len(ready), cost, n_roots, Calibration()).n


def test_draft_tokens_delay_early_roots_in_every_stage() -> None:
    cheap, dear = {1: 0.1, 2: 0.101, 3: 0.102}, {1: 0.1, 2: 0.12, 3: 0.14}
    assert beside_early_roots([0.7, 0.4], shared(cheap, 8)) == 2
    assert beside_early_roots([0.7, 0.4], shared(dear, 8)) == 0
    middle = {n: 0.1 + 0.004 * n for n in range(1, 6)}
    assert beside_early_roots([0.7], shared(middle, 8)) == 1
    assert beside_early_roots([0.7], shared(middle, 8), n_roots=3) == 0, "each of three roots is late"
    assert beside_early_roots([0.7], RunCost()) == 0


def test_accepted_tokens_go_round_in_as_many_runs_as_bring_most() -> None:
    dear, free = {n: 0.1 * n for n in range(1, 9)}, dict.fromkeys(range(1, 9), 0.1)
    assert (Rounds(shared(dear, 2), 4).best, Rounds(shared(dear, 2), 4).size) == (2, 2)
    assert Rounds(shared(free, 2), 8).best == 1
    assert Rounds(shared(free, 2), 8).loss(4) == pytest.approx(0.0, abs=0.02), "two runs share two stages"
    assert Rounds(shared(free, 2), 8).loss(2) == pytest.approx(1.0, abs=0.02)
    assert Rounds(RunCost(), 1).size == 1


def chain(*probabilities: float) -> list[float]:
    """Path probabilities of draft tokens that are each that probable after the one before."""
    return list(itertools.accumulate(probabilities, operator.mul))


CHEAP_ROWS = {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4, 16: 4.0}


def test_nearly_certain_paths_go_in_long_runs() -> None:
    cost = shared(CHEAP_ROWS, length=8.0)
    assert most_per_second(chain(*[0.6] * 15), cost) == 1, "each row delays the next correction"
    assert 2 <= most_per_second(chain(*[0.97] * 15), cost) <= 8
    assert most_per_second(chain(*[0.999] * 15), cost) > 8


def test_doubts_about_earlier_runs_shorten_no_run() -> None:
    """If a draft token that is in flight is wrong, this run is cancelled, however long it is."""
    cost, after = shared(CHEAP_ROWS, length=8.0), 0.3
    copied = [after * path for path in chain(*[0.999] * 15)]
    assert most_per_second(copied, cost, after=after) == most_per_second(chain(*[0.999] * 15), cost)
    assert most_per_second(copied, cost) < most_per_second(copied, cost, after=after)


def test_doubts_about_what_follows_shorten_a_run() -> None:
    """The next correction is then to be expected from a run that has to wait for this one."""
    cost = shared(CHEAP_ROWS, length=8.0)
    certain, doubtful = chain(*[0.999] * 15), chain(*[0.999] * 8, *[0.5] * 7)
    assert most_per_second(doubtful, cost) < 8 < most_per_second(certain, cost)
    assert most_per_second([0.0, 0.0], cost) == 1, "nothing is expected at all"


# Targets that cannot roll back


def without_rollback(seconds: dict[int, float], length: float = 1.0) -> RunCost:
    cost = RunCost(rolls_back=False)
    for n_rows, run_s in seconds.items():
        for _ in range(20):
            cost.ended(n_rows, run_s, length * run_s)
    return cost


def test_tokens_that_would_be_decoded_again_make_runs_shorter() -> None:
    seconds, chain = {n: 0.9 + 0.1 * n for n in range(1, 9)}, [0.8**depth for depth in range(1, 8)]
    for length in (1.0, 2.0):
        again, kept = without_rollback(seconds, length), shared(seconds, length)
        assert most_per_second(chain, again) < most_per_second(chain, kept)
    jump = {1: 1.0, 2: 1.9, 3: 2.0, 4: 2.1}
    assert beside_early_roots([0.6, 0.4, 0.3], shared(jump)) == 3
    assert beside_early_roots([0.6, 0.4, 0.3], without_rollback(jump)) == 0


def test_what_is_sure_to_be_accepted_is_not_decoded_again() -> None:
    seconds = {n: 1 + 0.04 * n for n in range(1, 9)}
    assert most_per_second([1.0] * 7, without_rollback(seconds)) == 7
    assert without_rollback(seconds).again_s(0.0, 3) == shared(seconds).again_s(0.5, 3) == 0.0
    assert without_rollback(seconds, 4.0).again_s(0.5, 3) == pytest.approx(0.5 * 4 * 3 * 0.04, rel=0.1)


def test_a_single_row_is_tried_when_only_longer_runs_were_timed() -> None:
    cost = shared({4: 0.28})
    assert cost.tries_one(0, 1.0)
    assert not cost.tries_one(2, 1.0), "two are on their way"
    cost.ended(1, 0.1)
    cost.ended(1, 0.1)
    assert not cost.tries_one(0, 1.0)
    for _ in range(200):
        cost.ended(4, 0.28)
    assert cost.tries_one(0, 0.1)
    assert not cost.tries_one(0, 1.0), "what costs more is tried less often"


def of_eight_stages(row_s: Callable[[int], float], longest: int = 16) -> RunCost:
    """What runs cost in eight equal stages; runs of up to `longest` rows were tried."""
    cost = RunCost()
    for n in 3 * tuple(range(1, longest + 1)):
        cost.ended(n, row_s(n), 8 * row_s(n))
    return cost


@pytest.mark.parametrize(
    ("n_requests", "agreement", "row_s", "n_rows"),
    [
        (2, 0.7, lambda n: max(1.0, n / 3), 3),  # as many as are free
        (8, 0.7, lambda n: max(1.0, n / 3), 3),
        (2, 0.7, lambda n: 1 + 0.6 * (n - 1), 1),  # dear ones: the draft tokens fill runs of their own
        (4, 0.7, lambda n: 1 + 0.6 * (n - 1), 1),
        (8, 0.9, lambda n: 1 + 0.4 * (n - 1), 3),  # accepted tokens fill all stages: draft tokens go in with them
        (16, 0.7, lambda n: 1 + 0.6 * (n - 1), 2),  # two accepted tokens
    ],
)
def test_rows_of_steady_runs(n_requests: int, agreement: float, row_s: Callable[[int], float], n_rows: int) -> None:
    assert steady_runs(of_eight_stages(row_s), n_requests, agreement).n_rows == n_rows


@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.9, 1.0])
def test_speed_of_steady_runs(agreement: float) -> None:
    """One request: the chain's bound where rows are free. Many: a token a row."""
    cost = of_eight_stages(lambda n: 1.0)
    one, many = steady_runs(cost, 1, agreement), steady_runs(of_eight_stages(float), 64, agreement)
    chain = math.inf if agreement == 1 else 1 / (1 - agreement)
    assert min(chain, 8 * one.n_rows) / 8 * 0.9 < one.speed <= chain / 8
    assert many.speed == pytest.approx(1.0, rel=0.01)
    assert many.n_each < 1


def test_draft_tokens_of_steady_runs_are_worth_their_rows() -> None:
    steady = SteadyRuns(n_rows=4, n_each=2.0, speed=0.9)
    dear, free = of_eight_stages(lambda n: 1 + 0.5 * (n - 1)), of_eight_stages(lambda n: 1.0)
    chances = [0.8, 0.7, 0.2, 0.1]
    assert steady.n_drafted(chances, dear, 1) == 2
    assert steady.n_drafted(chances, free, 1) == 3
    assert steady.n_drafted(chances, free, 5) == 0
    assert steady.n_drafted(chances[:1], free, 0) == 1
    assert steady.n_drafted(chances[2:], dear, 0) == 1, "a run has a row"
