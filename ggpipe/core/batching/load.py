"""What is in the pipeline, what still goes into it, and how long runs take: all that a choice of rows looks at."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ggpipe.core.in_flight import InFlight, Part, RunInFlight
from ggpipe.core.messages import RunResult
from ggpipe.core.request import Limits
from ggpipe.core.request_state import Phase, RequestState
from ggpipe.core.run_cost import RunCost
from ggpipe.core.tree import Node

_EARLY = 0.2  # of a run's time: so long before the slowest stage is free the next draft tokens go in,
_EARLY_S = 1e-3  # and at least this: messages take their time
_GATHER = 0.02  # of its run's time: so long a first prompt waits for others that come with it, again after each,
_GATHER_S = 1e-2  # and at most this


@dataclass(slots=True)
class Take:
    """What one request puts into a run: tokens of its prompt, or up to `most` of these nodes (None: all)."""

    state: RequestState
    nodes: list[Node] = field(default_factory=list)
    n_prompt: int = 0
    most: int | None = None


class Load:
    """See the module's text. The scheduler keeps it up to date; the choice of rows notes `next_run_at` in it."""

    def __init__(self, limits: Limits, in_flight: InFlight[RequestState]) -> None:
        self.limits = limits
        self.cost = RunCost()
        """What runs of this pipeline take."""
        self.shared_cost = RunCost(is_shared=True)
        """The same, to decide on runs of several requests."""
        self.now = 0.0
        self.spare_cells = 0
        """Cells that no request holds or has reserved."""
        self.next_run_at: float | None = None
        """When the next run of draft tokens may go in."""
        self.embeds_next = False
        """An embedding was left out of the last run for others' rows."""
        self._prompts_next = False
        """Prompts had no row of the last run, because it has only one."""
        self._in_flight = in_flight
        self._free_at = 0.0
        """When the slowest stage is through with all that is submitted."""
        self._gathered: tuple[float, int, float] | None = None
        """When the first prompt came that waits for others, how many there are, and until when they wait."""
        self._n_in_flight: collections.Counter[int] = collections.Counter()
        """Runs without parts of prompts, by their rows."""

    @property
    def n_stages(self) -> int:
        """Runs that are computed at the same time, one in each stage."""
        return self.limits.n_stages

    @property
    def n_in_flight(self) -> int:
        """Runs that are or will be computed; cancelled ones and bare operations only pass through."""
        return self._in_flight.n_computed

    @property
    def has_prompts(self) -> bool:
        """A run with parts of prompts is or will be computed."""
        return self._in_flight.has_text

    @property
    def is_full(self) -> bool:
        """Further runs would only wait."""
        return self.n_in_flight >= self.limits.n_in_flight

    def runs_of_text(self, states: Iterable[RequestState]) -> set[int]:
        """Runs in flight with accepted tokens that are not answered yet, or with parts of prompts."""
        runs: set[int] = set()
        for state in states:
            if state.phase is Phase.PREFILL:
                runs.update(part.run for part in self._in_flight.of(state))
            elif state.tree.root.submitted and state.tree.root.answer is None:
                runs.add(state.tree.root.run)
        return runs

    def rows_for_prompts(self, n_prompts: int, n_ready: int) -> int:
        """Rows of the next run that so many prompts have, where the accepted tokens that are ready would fill it: a
        part in proportion. A run of one row is for one and the other in turns."""
        if self.limits.n_rows == 1:
            self._prompts_next = not self._prompts_next
            return 0 if self._prompts_next else 1
        return max(self.limits.n_rows * n_prompts // (n_prompts + n_ready), 1)

    def room(self, state: RequestState) -> int:
        """Draft tokens of this request that may go into a run now."""
        free = self.spare_cells + state.n_cells - state.n_used
        return max(min(free, state.request.speculation.n_draft, self.limits.n_rows), 0)

    def of_room(self, state: RequestState, most: int) -> list[Node]:
        """Its draft tokens that may go into a run now, the most probable path first."""
        return state.waiting_draft_tokens()[: max(min(self.room(state), most), 0)]

    def to_try(self, losses: Mapping[int, float]) -> int | None:
        """A number of rows of which a run should go in to learn what it takes. `losses`: as of `RunCost.to_try`."""
        return self.shared_cost.to_try(min(max(losses, default=0), self.limits.n_rows), self._n_in_flight, losses)

    def may_draft(self, state: RequestState) -> bool:
        """A run of draft tokens alone may go in for this request."""
        return state.request.speculation.continuous or not self._is_drafting(state)

    def _is_drafting(self, state: RequestState) -> bool:
        """Draft tokens of this request are in flight."""
        parts = (part for part in self._in_flight.of(state) if self._in_flight.is_computed(part.run))
        return any(node is not state.tree.root for part in parts for node in part.nodes)

    def too_early(self) -> bool:
        """The slowest stage is not free soon: until then more draft tokens may come. Notes when it is."""
        free_at = self._free_at - max(self.cost.seconds(1) * _EARLY, _EARLY_S)
        if self.now < free_at:
            self.next_run_at = free_at
        return self.now < free_at

    def gathers(self, states: Sequence[RequestState]) -> bool:
        """Whether these requests wait a little: all are prompts, nothing is in flight, and others may come at the same
        time, which take less time in one run than one behind the other. Notes when the wait ends. With several stages
        nobody waits: there short runs keep all of them busy."""
        limits = self.limits
        if self.n_stages > 1 or limits.n_requests == 1 or not limits.partial_prefixes or self.n_in_flight:
            return False
        if len(states) == limits.n_requests or any(state.phase is not Phase.PREFILL for state in states):
            return False
        since, n, until = self._gathered or (self.now, 0, 0.0)
        if len(states) != n:
            n_left = sum(len(state.request.prompt) - state.n_past for state in states)
            until = min(self.now + _GATHER * self.cost.text_s(0, n_left), since + _GATHER_S)
            self._gathered = since, len(states), until
        if self.now < until:
            self.next_run_at = until
        return self.now < until

    def submitted(self, parts: Sequence[Part[RequestState]], only_one: bool) -> None:
        """A run of these parts goes in; `only_one`: there is one request, and nothing of any other is in flight."""
        self._gathered = None
        fresh = only_one and parts[0].owner.tree.root in parts[0].nodes
        n_nodes = sum(len(part.nodes) for part in parts)
        n_text = sum(part.n_text for part in parts)
        before = self.now if fresh else max(self._free_at, self.now)  # runs before a fresh root are dead
        self._free_at = before + self.cost.text_s(n_nodes, n_text)
        if not n_text:
            self._n_in_flight[n_nodes] += 1

    def learn(self, run: RunInFlight[RequestState], result: RunResult) -> None:
        """A run came back: how long it took."""
        n_text, n_rows = run.n_text, len(run.run.rows)
        if not n_text:
            self._n_in_flight[n_rows] -= 1
        if run.cancelled or result.cancelled or result.slowest_s <= 0:
            return
        for cost in (self.cost, self.shared_cost):
            if n_text:
                cost.text_ended(n_rows - n_text, n_text, result.slowest_s)
            elif result.rows:
                cost.ended(n_rows, result.slowest_s, result.total_s)
