"""What is in the pipeline, what still goes into it, and how long runs take: all that a choice of rows looks at."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ggpipe.core.admission import Admission
from ggpipe.core.batching.rows import Rounds
from ggpipe.core.batching.turns import Turns
from ggpipe.core.in_flight import InFlight, RunInFlight, RunPart
from ggpipe.core.messages import RunResult
from ggpipe.core.request import Limits
from ggpipe.core.request_state import Phase, RequestState, SequenceState
from ggpipe.core.run_cost import RunCost
from ggpipe.core.tree import Node

_EARLY = 0.2
"""How long before the slowest stage is free the next draft tokens go in, as a share of a one-row run's time."""
_EARLY_S = 1e-3
"""The least such time, since messages take some. Seconds."""
_LONG = 2.0
"""Times a run of one row: a run of prompts that takes longer pauses for others. With 0, 4 users with prompts of 16
tokens lose 6 % on eight dense stages; with 5, answers beside prompts of 1,000 tokens are complete up to 12 % later
(simulated)."""
_LEARN = 0.2
"""Weight of the latest run in the means of stages' times."""


@dataclass(slots=True)
class ScheduledRows:
    """What one request puts into a run: tokens of its prompt, or the first `most` of these nodes that get an id."""

    state: SequenceState
    nodes: Iterable[Node] = ()
    n_prompt: int = 0
    most: int = 0


def fitting(states: Iterable[RequestState], n_rows: int) -> list[RequestState]:
    """The first of these requests, as many as have their accepted tokens in a run of `n_rows` rows."""
    fit: list[RequestState] = []
    for state in states:
        n_rows -= state.n_root_rows
        if n_rows < 0:
            break
        fit.append(state)
    return fit


def rows_of(states: Iterable[RequestState]) -> int:
    """Rows of a run with the accepted tokens of these requests."""
    return sum(state.n_root_rows for state in states)


class PipelineState:
    """See the module's text. The scheduler keeps it up to date."""

    def __init__(self, limits: Limits, in_flight: InFlight[SequenceState], admission: Admission) -> None:
        self.limits = limits
        self.n_stages = limits.n_stages
        """Runs that are computed at the same time, one in each stage."""
        self.ahead_cost = RunCost(limits.rolls_back)
        """What runs take, usually while others are computed."""
        self.turn_cost = RunCost(limits.rolls_back)
        """What runs take where target and drafters take turns."""
        self.turns = Turns(limits.crowding, limits.work.sparsity)
        """For a single request, where ranks share a machine."""
        self.in_turn = False
        """Target and drafters take turns now."""
        self._turn_run = -1
        """The latest run that was alone in the pipeline since target and drafters take turns."""
        self.expected_tokens = 1.0
        """Expected number of accepted tokens of the latest run with the root of an only request."""
        self.now = 0.0
        self.had_prompts = False
        """The latest run had tokens of prompts."""
        self.roots_at = -1.0
        """When accepted tokens went in last."""
        self.had_embedding = False
        """The latest run was an embedding's."""
        self._in_flight = in_flight
        self._admission = admission
        self._free_at = 0.0
        """When the slowest stage is through with all that is submitted."""
        self._stage_times: list[float] = []
        """Time of each stage relative to the slowest one, in runs of which all stages computed all rows."""
        self._n_in_flight: collections.Counter[int] = collections.Counter()
        """Runs without parts of prompts, by their rows."""

    @property
    def n_in_flight(self) -> int:
        """Runs that are or will be computed, without those that pause; cancelled ones and bare operations only pass
        through."""
        return self._in_flight.n_computed - self._in_flight.n_pausing

    @property
    def n_pausing(self) -> int:
        """Runs that are or will be computed, and pause for others."""
        return self._in_flight.n_pausing

    @property
    def one_sequence(self) -> bool:
        """Runs are to have a single sequence, or they could not overtake those that pause; see `overtaking`."""
        return not self.limits.rolls_back and self.n_pausing > 0

    def is_paused(self, state: RequestState) -> bool:
        """Its latest accepted token is in a run that pauses for others: what hangs on it would wait there with them."""
        return self._in_flight.pauses(state.tree.root.run)

    @property
    def cost(self) -> RunCost:
        """What runs of this pipeline take now, as far as that is known."""
        own, other = self.ahead_cost, self.turn_cost
        if self.in_turn:
            own, other = other, own
        return own if own.is_known or not other.is_known else other

    @property
    def one_at_a_time(self) -> bool:
        """Draft tokens of an only request are verified with its root and by no later runs: there is a single stage, or
        target and drafters take turns."""
        return self.in_turn or self.n_stages == 1

    @property
    def spare_cells(self) -> int:
        """Cells that no request holds or has reserved."""
        return self._admission.spare_cells

    @property
    def has_prompts(self) -> bool:
        """A run with parts of prompts is or will be computed."""
        return self._in_flight.has_prompt_rows

    @property
    def slot_at(self) -> float:
        """When the next run of draft tokens may go in: the slowest stage is nearly free."""
        return self._free_at - max(self.cost.seconds(1) * _EARLY, _EARLY_S)

    def n_awaited_runs(self, states: Iterable[SequenceState]) -> int:
        """Runs in flight with accepted tokens whose logits are not back yet, or with parts of prompts."""
        runs: set[int] = set()
        for state in states:
            if state.phase is Phase.PREFILL:
                runs.update(part.run for part in self._in_flight.of(state))
            elif state.tree.root.submitted and state.tree.root.logits is None:
                runs.add(state.tree.root.run)
        return len(runs)

    def rows_for_prompts(self, n_prompts: int, n_ready: int) -> int:
        """Rows of the next run that this many prompts have, where the accepted tokens that are ready would fill it: a
        part in proportion."""
        return max(self.limits.n_rows * n_prompts // (n_prompts + n_ready), 1)

    def to_try(self, rounds: Rounds, most: int) -> int | None:
        """A number of accepted tokens of which a run should go in to learn what it takes."""
        return self.cost.to_try(min(most, self.limits.n_rows), self._n_in_flight, rounds.loss)

    def tries_draft_token(self, probability: float) -> bool:
        """A draft token with this path probability should go in with an only root, although it does not seem to pay, to
        learn what its row takes. False where runs of draft tokens alone show that, or where rejected ones have others
        decoded again."""
        if not self.one_at_a_time or not self.limits.rolls_back:
            return False
        loss = self.cost.time(2) / self.cost.time(1) / (1 + probability) - 1
        return self.cost.to_try(2, self._n_in_flight, lambda n_rows: loss) == 2

    def tries_one(self, worth: float, left_out: float) -> bool:
        """A row that is worth this many accepted tokens should go in alone, to learn what that takes, although others
        that are worth `left_out` could go with it."""
        return self.cost.tries_one(self._n_in_flight[1], left_out / worth)

    def set_turns(self, state: RequestState, is_only: bool) -> None:
        """Have target and drafters take turns or not, since tokens of this request were accepted, or it begins."""
        drafts = state.overlaps and not state.is_copying and not state.drafters.leading.answers_at_once
        self.in_turn = is_only and drafts and self.turns.in_turn

    def may_draft(self, state: RequestState) -> bool:
        """A run of draft tokens alone may go in for this request."""
        return state.request.speculation.continuous or not self._is_drafting(state)

    def _is_drafting(self, state: RequestState) -> bool:
        """Draft tokens of this request are in flight."""
        parts = (part for part in self._in_flight.of(state) if self._in_flight.is_computed(part.run))
        return any(node is not state.tree.root for part in parts for node in part.nodes)

    def pauses(self, schedule: Sequence[ScheduledRows]) -> bool:
        """Whether a run of these tokens of prompts pauses for others: if it takes much longer than theirs."""
        n_rows = sum(scheduled.n_prompt for scheduled in schedule)
        if not self.limits.n_pauses or n_rows <= 1:
            return False
        return not self.cost.is_known or self.cost.prompt_s(0, n_rows) > _LONG * self.cost.seconds(1)

    def submitted(self, parts: Sequence[RunPart[SequenceState]], only_one: bool, pauses: bool) -> None:
        """A run of these parts goes in; `only_one`: there is one request, and nothing of any other is in flight.
        `pauses`: see `Run`."""
        root = parts[0].owner.tree.root
        fresh = only_one and root in parts[0].nodes
        if fresh:
            self.expected_tokens = sum([math.exp(node.log_path - root.log_path) for node in parts[0].nodes])
            if self.in_turn and isinstance(state := parts[0].owner, RequestState):
                for _, drafter in state.drafters:
                    drafter.pace.root_submitted(self.now)
                if not self._in_flight.of(state):
                    self._turn_run = root.run
        n_prompt_rows = sum([part.n_prompt_rows for part in parts])
        n_nodes = sum([len(part.rows) for part in parts]) - n_prompt_rows
        n_drafted = sum([part.n_draft_tokens for part in parts]) if n_prompt_rows else 0
        before = self.now if fresh else max(self._free_at, self.now)  # runs before a fresh root are dead
        if not pauses:
            self._free_at = before + self.cost.prompt_s(n_nodes - n_drafted, n_prompt_rows + n_drafted)
        if n_nodes > sum([part.n_draft_tokens for part in parts]):
            self.roots_at = self.now
        self.had_prompts, self.had_embedding = n_prompt_rows > 0, parts[0].owner.embeds
        if not n_prompt_rows:
            self._n_in_flight[n_nodes] += 1

    def learn(self, run: RunInFlight[SequenceState], result: RunResult) -> None:
        """A run came back: how long it took."""
        n_prompt_rows, n_rows = run.n_prompt_rows, len(run.run.rows)
        if not n_prompt_rows:
            self._n_in_flight[n_rows] -= 1
        if run.cancelled or result.cancelled or result.slowest_s <= 0:
            return
        if n_prompt_rows:
            slowest = max(result.spans, key=lambda span: span.compute_s)
            n_drafted = sum([part.n_draft_tokens for part in run.parts])
            n_first = max(slowest.n_rows - n_prompt_rows - n_drafted, 0)
            self.ahead_cost.prompt_ended(n_first, slowest.n_rows - n_first, slowest.compute_s)
        elif result.rows:
            self._learn_rows(self.turn_cost if result.run == self._turn_run else self.ahead_cost, result, n_rows)

    def _learn_rows(self, cost: RunCost, result: RunResult, n_rows: int) -> None:
        """Learn from a run without prompts. Of one with dropped rows, from the stages that computed all of its rows, by
        how much time they take relative to the slowest stage."""
        whole = [i for i, span in enumerate(result.spans) if span.n_rows == n_rows]
        if len(whole) == len(result.spans):
            slowest_s = result.slowest_s  # a property that looks at all spans
            now = [span.compute_s / slowest_s for span in result.spans]
            before = self._stage_times or now
            self._stage_times = [old + _LEARN * (new - old) for old, new in zip(before, now, strict=True)]
            cost.ended(n_rows, slowest_s, result.total_s)
        elif self._stage_times and (share := sum([self._stage_times[i] for i in whole])) > 0:
            slowest_s = sum([result.spans[i].compute_s for i in whole]) / share
            cost.ended(n_rows, slowest_s, cost.length * slowest_s)
