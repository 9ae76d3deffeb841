"""The head's scheduler: which run goes into the pipeline next.

    handle(event, now) -> list[Action]

Events say what happened (a request arrived, a run came back, a token was sampled, a drafter sent draft tokens), actions
what is to be done. Nothing in here waits, sends or computes, so the same object runs under MPI, inside one process and
on virtual time. `request_state` has the phases of a request, `frontier` what goes into a run.

A prompt goes in as chunks whose borders follow from the prompt and the batch sizes alone, several in flight so that
chunk i+1 is in the first stage while chunk i is in the second. From then on the root of the request's tree is the last
accepted token. When its logits are back, the next token is sampled. If a draft token holds that token, it becomes the
root, be it in flight, back already, or not submitted yet; else the token goes in as a fresh root. What does not hang on
the new root is dead, and runs with nothing but dead rows are cancelled. No token is evaluated twice.

Between roots, the pipeline is kept full of draft tokens, the most probable path first. They go in when the slowest
stage is about to be free, and not before: until then more of them may come, and a run of several costs less than
several runs. Where that pays, a fresh root waits a moment for draft tokens that go into its run.

What ended requests computed stays in the KV cache for prompts that begin alike, until cells are needed
(`prefix_cache`).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ggpipe.core import frontier
from ggpipe.core.draft_messages import Accepted, Begin, Done, MicroBatch
from ggpipe.core.drafters.calibration import Calibration
from ggpipe.core.events import (
    Action,
    Arrived,
    Drafted,
    Emit,
    Event,
    Finished,
    RunDone,
    RunEnded,
    Sample,
    Sampled,
    Steer,
    Stop,
    Tick,
)
from ggpipe.core.in_flight import InFlight, Part, RunInFlight, cancel_action, records_of
from ggpipe.core.messages import Row, RunResult, Want, WantKind
from ggpipe.core.prefix_cache import PrefixCache
from ggpipe.core.request import Counters, Finish, Limits, Request
from ggpipe.core.request_state import DrafterState, Phase, RequestState, chunk_end
from ggpipe.core.run_cost import RunCost
from ggpipe.core.tree import Node

_WAIT_LIMIT = 2.0  # times the drafter's usual pace: so long a fresh root waits for draft tokens
_EARLY = 0.2  # of a run's time: so long before the slowest stage is free the next draft tokens go in,
_EARLY_S = 1e-3  # and at least this: messages take their time
_CLEARLY_LESS = 0.98  # of a time: below this it is worth splitting a run of several requests in two
_HARDLY_LONGER = 1.1  # times a run with accepted tokens: so long are runs of draft tokens alone beside others, at most
_FIRST_PROMPT_ROWS = 16  # beside others' tokens, before a run has shown what rows of prompts take
_MORE_CELLS = 32  # that a request without a limit is given at a time


@dataclass(slots=True)
class _Take:
    """What one request puts into a run: tokens of its prompt, or up to `most` of these nodes (None: all)."""

    state: RequestState
    nodes: list[Node] = field(default_factory=list)
    n_prompt: int = 0
    most: int | None = None


class Scheduler:
    """See the module's text."""

    def __init__(self, limits: Limits) -> None:
        self.cost = RunCost()
        """What runs of this pipeline take."""
        self._shared_cost = RunCost(is_shared=True)
        """The same, to decide on runs of several requests."""
        self._limits = limits
        self._in_flight: InFlight[RequestState] = InFlight(limits.n_seq, limits.n_requests + limits.n_prefixes)
        self._prefixes = PrefixCache(limits, self._in_flight.ids, self._in_flight.ops)
        self._waiting: collections.deque[Arrived] = collections.deque()
        self._states: dict[int, RequestState] = {}
        self._now = 0.0
        self._free_at = 0.0
        """When the slowest stage is through with all that is submitted."""
        self._next_run_at: float | None = None
        """When the next run of draft tokens may go in."""
        self._steering: list[Steer] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event that happened at `now` (seconds, any clock that does not go back).

        Raises ValueError for a prompt that is empty or fills the context, and for a run that is not in flight.
        """
        actions: list[Action] = []
        self._now = now
        match event:
            case Arrived(request):
                if not 0 < len(request.prompt) < self._limits.n_ctx:
                    raise ValueError(f"a prompt of {len(request.prompt)} tokens in {self._limits.n_ctx} cells")
                self._waiting.append(event)
                self._admit(actions)
            case RunEnded(result):
                self._run_ended(result, actions)
            case Sampled():
                self._sampled(event, actions)
            case Drafted(batch):
                self._drafted(batch)
            case Stop(request_id):
                self._stop(request_id, actions)
            case Tick():
                pass
        self._fill(actions)
        actions += self._steering  # the pipeline first
        self._steering.clear()
        if self._in_flight.ops and not self._states:  # no run is coming that could carry them
            actions.append(self._in_flight.submit_ops(now))
        return actions

    @property
    def wake_at(self) -> float | None:
        """When to send `Tick`, by the clock of `now`; None when only other events matter."""
        times = (self._next_run_at, *(state.root_waits_until for state in self._states.values()))
        return min((time for time in times if time is not None), default=None)

    @property
    def n_in_flight(self) -> int:
        """Runs that are or will be computed; cancelled ones and bare operations only pass through."""
        return self._in_flight.n_computed

    def counters(self, request: int) -> Counters:
        """A request's numbers, kept up to date until it is finished. Raises KeyError when it is not being served."""
        return self._states[request].counters

    def validate(self) -> None:
        """Check what must hold between events. Raises AssertionError."""
        trees = [(state, ids) for state in self._states.values() if (ids := state.validate())]
        self._in_flight.validate(trees)
        n_open = sum(state.is_open for state in self._states.values())
        self._prefixes.validate()
        n_kept = len(self._prefixes)
        assert self._in_flight.ids.reserved == self._limits.n_requests - n_open + self._limits.n_prefixes - n_kept
        taken = sum(len(ids) for _, ids in trees) + n_kept
        assert len(self._in_flight.ids) == self._limits.n_seq - taken, "an id is lost"
        assert self._prefixes.n_cells + self._n_used <= self._limits.n_ctx
        assert self._spare_cells >= 0
        assert len(self._states) <= self._limits.n_requests
        for state in self._states.values():
            assert state.phase is not Phase.ENDED
            assert state.is_open or self._in_flight.of(state), "nothing of an ended request is in flight"
            assert state.root_waits_until is None or state.phase is Phase.DECODING

    # Requests

    def _admit(self, actions: list[Action]) -> None:
        while self._waiting and len(self._states) < self._limits.n_requests:
            arrived = self._waiting[0]
            request = arrived.request
            reserve = self._reserve(request)
            if not self._prefixes.fits(request.prompt, request.cache_prompt, reserve, self._n_promised):
                return
            self._waiting.popleft()
            prefix = self._prefixes.open(request.prompt, request.cache_prompt)
            arrived.counters.cached_tokens = prefix.n_tokens
            state = RequestState(
                request=request,
                want=arrived.want,
                counters=arrived.counters,
                prefix=prefix,
                reserve=reserve,
                n_past=prefix.n_tokens,
            )
            self._states[request.id] = state
            if request.drafts:
                state.drafters = {drafter: DrafterState() for drafter in request.drafters}
                actions.append(Steer(self._begin(state)))

    def _reserve(self, request: Request) -> int:
        """Cells that a request is promised. One without a limit gets its share, and more as long as there are any."""
        n_ctx, n_prompt = self._limits.n_ctx, len(request.prompt)
        if request.n_predict >= 0:
            return min(n_ctx, n_prompt + request.n_predict)
        share = n_ctx // self._limits.n_requests
        return min(n_ctx, max(share, n_prompt + max(share // 2, 1)))

    def _extended(self, state: RequestState) -> int:
        """The cells that it is promised; more than before where it nears them, has no limit, and there are any."""
        if state.request.n_predict < 0 and state.tree.root.pos + _MORE_CELLS > state.reserve:
            state.reserve += min(self._spare_cells + state.n_cells - state.n_reserved, _MORE_CELLS)
        return state.reserve

    def _begin(self, state: RequestState) -> Begin:
        request = state.request
        limit = state.reserve if request.n_predict >= 0 else self._limits.n_ctx
        return Begin(
            request=request.id,
            prompt=request.prompt,
            n_left=limit - len(request.prompt),
            lead=self._lead(state),
            ends=request.ends,
            banned=request.banned,
            speculation=request.speculation,
            cache_prompt=request.cache_prompt,
        )

    def _lead(self, state: RequestState) -> int:
        """How far drafters may be ahead of the root: to fill the pipeline, and one run more, as far as draft tokens may
        be accepted. Where others' tokens fill it, as far as a draft token is worth a row beside them."""
        speculation, calibration = state.request.speculation, _leading(state)
        if speculation.mode != "async":
            return speculation.n_draft
        others = [other for other in self._states.values() if other.is_open and other is not state]
        if others:
            if any(other.phase is Phase.PREFILL for other in others):
                return 0
            n_rounds = self._n_rounds(len(others) + 1)
            if n_rounds >= self._n_stages:
                n_roots = math.ceil((len(others) + 1) / n_rounds)
                usual = frontier.usual_rows_beside_roots(n_roots, speculation.n_draft, self._shared_cost, calibration)
                return math.ceil(usual / n_roots)
        if speculation.continuous:
            cost = self._shared_cost if others else self.cost
            usual = frontier.usual_rows(speculation.n_draft, cost, calibration)
            return min(usual * (self._limits.n_in_flight + 1), calibration.reach)
        return speculation.n_draft

    def _stop(self, request_id: int, actions: list[Action]) -> None:
        state = self._states.get(request_id)
        if state is not None:
            if state.is_open:
                self._end(state, Finish.STOPPED, actions)
            return
        kept = [arrived for arrived in self._waiting if arrived.request.id != request_id]
        if len(kept) < len(self._waiting):
            self._waiting = collections.deque(kept)
            actions.append(Finished(request_id, Finish.STOPPED))

    def _end(self, state: RequestState, reason: Finish, actions: list[Action]) -> None:
        state.enter(Phase.ENDING)
        state.finish = reason
        state.root_waits_until = None
        clean = not self._in_flight.of(state) and not state.tree.n_submitted
        self._prefixes.close(state.prefix, self._computed(state), clean)
        if state.request.drafts:
            actions.append(Steer(Done(state.request.id)))
        self._cancel(self._in_flight.leave(state), actions)
        self._end_if_drained(state, actions)

    def _computed(self, state: RequestState) -> Sequence[int]:
        """Its tokens, as far as they are computed and may go into the prefix cache."""
        if not state.request.cache_prompt:
            return ()
        return (*state.request.prompt, *state.text)[: self._in_flight.computed(state, state.n_in)]

    def _end_if_drained(self, state: RequestState, actions: list[Action]) -> None:
        if state.finish is None or self._in_flight.of(state):
            return
        state.enter(Phase.ENDED)
        del self._states[state.request.id]
        actions.append(Finished(state.request.id, state.finish))
        self._admit(actions)

    # The pipeline

    def _fill(self, actions: list[Action]) -> None:
        """Submit what there is to submit and the pipeline has room for."""
        self._next_run_at = None
        self._make_room()
        if any(state.phase is Phase.SAMPLING for state in self._states.values()):
            return  # it decides which draft tokens live, and others' tokens come out of the same run
        while True:
            states = [state for state in self._states.values() if state.is_open]
            if not states:
                return
            takes = self._next_of_one(states[0]) if len(states) == 1 else self._next_of_many(states)
            if not self._submit(takes, actions):
                return

    def _next_of_one(self, state: RequestState) -> Sequence[_Take]:
        """What goes in next when there is one request only."""
        if state.phase is Phase.PREFILL:
            if self.n_in_flight >= self._limits.n_in_flight:
                return ()
            start, n_prompt = state.counters.cached_tokens, len(state.request.prompt)
            limits = self._limits
            end = start + chunk_end(state.n_past - start, n_prompt - start, limits.n_batch, limits.n_ubatch)
            return (_Take(state, n_prompt=end - state.n_past),)
        root, speculation = state.tree.root, state.request.speculation
        if speculation.mode == "speculative":
            if root.submitted or not state.all_complete:
                return ()
            most = min(self._room(state) + 1, self._limits.n_rows)
            return (_Take(state, nodes=[root, *state.waiting_draft_tokens()], most=most),)
        if not root.submitted:
            return self._root_of_one(state)
        if self.n_in_flight >= self._limits.n_in_flight or not self._may_draft(state):
            return ()
        waiting = self._of_room(state, self._limits.n_rows)
        if not waiting or self._too_early():
            return ()
        n = frontier.best_rows(state.chances(waiting), self.cost)
        return (_Take(state, nodes=state.waiting_draft_tokens(), most=min(n, len(waiting))),)

    def _root_of_one(self, state: RequestState) -> Sequence[_Take]:
        """A fresh root, with the draft tokens that go into its run; nothing while these are waited for.

        It waits for no other reason, and not for a drafter that is late, or has no more.
        """
        n, waiting = 0, state.waiting_draft_tokens()
        speculation = state.request.speculation
        if state.request.drafts and speculation.mode == "async" and speculation.continuous:
            most = max(min(self._room(state), self._limits.n_rows - 1, state.n_depths), 0)
            pace = next(iter(state.drafters.values())).pace
            chances = state.chances(waiting[:most])
            n, wait_s = frontier.rows_beside_root(chances, most, self.cost, _leading(state), pace)
            if n > len(waiting) and not state.all_complete:
                if state.root_waits_until is None:
                    state.root_waits_until = self._now + _WAIT_LIMIT * wait_s
                if self._now < state.root_waits_until:
                    return ()
            n = min(n, len(waiting))
        state.root_waits_until = None
        return (_Take(state, nodes=[state.tree.root, *waiting], most=1 + n),)

    def _next_of_many(self, states: Sequence[RequestState]) -> Sequence[_Take]:
        """What goes in next when several requests share the pipeline: accepted tokens, then prompts, then draft tokens.

        As many runs with accepted tokens or prompts go round as bring most. A token that comes while that many are in
        flight waits, and goes in together with others.
        """
        prompts = [state for state in states if state.phase is Phase.PREFILL]
        decoding = [state for state in states if state.phase is Phase.DECODING]
        for state in decoding:
            state.root_waits_until = None
        ready = [state for state in decoding if self._root_is_ready(state)]
        if not ready and not prompts:
            return self._draft_tokens_of_many(decoding)
        if not ready and self.n_in_flight >= (self._n_stages if decoding else self._limits.n_in_flight):
            return ()
        n_rounds = self._n_stages if prompts else self._n_rounds(len(decoding))
        if ready and len(self._runs_of_text(states)) >= n_rounds:
            return ()
        ready.sort(key=lambda state: state.root_since)
        if not prompts:
            ready = ready[: math.ceil(len(decoding) / n_rounds)]
        takes = [_Take(state, nodes=[state.tree.root]) for state in ready[: self._limits.n_rows]]
        n_rows = len(takes)
        if prompts:
            n_prompt = self._limits.n_rows - n_rows
            if decoding:
                n_prompt = min(n_prompt, self._prompt_rows(n_rows))
            return [*takes, *_shared_out(prompts, n_prompt)]
        for take in takes:
            if take.state.request.speculation.mode == "speculative":
                take.nodes += self._of_room(take.state, self._limits.n_rows - n_rows)
                n_rows += len(take.nodes) - 1
        taken = [take.state for take in takes]
        nodes, chances = self._best_first([s for s in decoding if s.tree.root.submitted or s in taken])
        chances = chances[: self._limits.n_rows - n_rows]
        if not chances:
            return takes
        if n_rounds < self._n_stages:
            n = frontier.rows_beside_early_roots(len(takes), chances, self._shared_cost)
        else:  # runs that are equally long: all behind a longer one would wait for it
            n_roots, calibration = math.ceil(len(decoding) / n_rounds), _leading(nodes[0][0])
            usual = frontier.usual_rows_beside_roots(n_roots, self._limits.n_rows, self._shared_cost, calibration)
            n = max(min(n_roots + usual - n_rows, len(chances)), 0)
        return _with_nodes(takes, nodes[:n])

    def _draft_tokens_of_many(self, decoding: Sequence[RequestState]) -> Sequence[_Take]:
        """A run of draft tokens alone, when the pipeline would else have nothing to do."""
        if self.n_in_flight >= self._n_stages:
            return ()
        nodes, chances = self._best_first([state for state in decoding if self._may_draft(state)])
        if not nodes or self._too_early():
            return ()
        n = min(frontier.best_rows(chances, self._shared_cost), self._limits.n_rows)
        n_roots = math.ceil(len(decoding) / self._n_rounds(len(decoding)))
        most_s = _HARDLY_LONGER * self._shared_cost.time(n_roots)
        while n > 1 and self._shared_cost.time(n) > most_s:
            n -= 1
        return _with_nodes([], nodes[:n])

    def _best_first(self, states: Iterable[RequestState]) -> tuple[list[tuple[RequestState, Node]], list[float]]:
        """Draft tokens of these requests that have room, the most probable path first, with the chance of each path.

        Parents come before their children.
        """
        spare = self._spare_cells
        found: list[tuple[float, int, RequestState, Node]] = []
        for state in states:
            if state.request.speculation.mode != "async":
                continue
            waiting = state.waiting_draft_tokens()[: state.request.speculation.n_draft]
            waiting = waiting[: max(state.n_cells - state.n_used, 0) + spare]
            worst = 1.0
            for node, chance in zip(waiting, state.chances(waiting), strict=True):
                worst = min(worst, chance)
                found.append((worst, len(found), state, node))
        found.sort(key=lambda one: (-one[0], one[1]))
        nodes: list[tuple[RequestState, Node]] = []
        used: dict[RequestState, int] = collections.defaultdict(int)
        for _, _, state, node in found:
            used[state] += 1
            if used[state] > state.n_cells - state.n_used:
                if not spare:
                    break
                spare -= 1
            nodes.append((state, node))
        return nodes, [one[0] for one in found[: len(nodes)]]

    @property
    def _n_stages(self) -> int:
        """Runs that are computed at the same time, one in each stage."""
        return max(self._limits.n_in_flight - 1, 1)

    def _n_rounds(self, n_tokens: int) -> int:
        """In how many runs so many accepted tokens go round, to bring most tokens a second; few where it is equal."""
        best, best_s = 1, math.inf
        for n in range(1, min(self._n_stages, n_tokens) + 1):
            round_s = max(n, self._shared_cost.length) * self._shared_cost.time(math.ceil(n_tokens / n))
            if round_s < best_s * _CLEARLY_LESS:
                best, best_s = n, round_s
        return best

    def _runs_of_text(self, states: Iterable[RequestState]) -> set[int]:
        """Runs in flight with accepted tokens that are not answered yet, or with parts of prompts."""
        runs: set[int] = set()
        for state in states:
            if state.phase is Phase.PREFILL:
                runs.update(part.run for part in self._in_flight.of(state))
            elif state.tree.root.submitted and state.tree.root.answer is None:
                runs.add(state.tree.root.run)
        return runs

    def _root_is_ready(self, state: RequestState) -> bool:
        if state.tree.root.submitted:
            return False
        return state.request.speculation.mode != "speculative" or state.all_complete

    def _may_draft(self, state: RequestState) -> bool:
        """A run of draft tokens alone may go in for this request."""
        return state.request.speculation.continuous or not self._is_drafting(state)

    def _too_early(self) -> bool:
        """The slowest stage is not free soon: until then more draft tokens may come. Notes when it is."""
        free_at = self._free_at - max(self.cost.seconds(1) * _EARLY, _EARLY_S)
        if self._now < free_at:
            self._next_run_at = free_at
        return self._now < free_at

    def _prompt_rows(self, n_tokens: int) -> int:
        """Rows of prompts in a run while others decode, beside `n_tokens` accepted tokens: so many that it takes
        `prefill_slowdown` times as long as without, at least one."""
        row_s = self.cost.text_row_s
        if row_s is None or not self.cost.is_known:
            return _FIRST_PROMPT_ROWS
        more_s = (self._limits.prefill_slowdown - 1) * self.cost.seconds(max(n_tokens, 1))
        return max(int(more_s / row_s), 1) if row_s else self._limits.n_rows

    @property
    def _spare_cells(self) -> int:
        """Cells that no request holds or has reserved."""
        return self._limits.n_ctx - self._prefixes.n_held - self._n_promised

    @property
    def _n_promised(self) -> int:
        """Cells outside the prefix cache that requests hold or have reserved."""
        return sum(state.n_cells for state in self._states.values() if state.is_open)

    @property
    def _n_used(self) -> int:
        """Cells outside the prefix cache that requests hold."""
        return sum(state.n_used for state in self._states.values() if state.is_open)

    def _make_room(self) -> None:
        """Requests take the cells of kept prefixes when they need them."""
        self._prefixes.shrink(self._limits.n_ctx - self._n_used)

    def _room(self, state: RequestState) -> int:
        """Draft tokens of this request that may go into a run now."""
        free = self._spare_cells + state.n_cells - state.n_used
        return max(min(free, state.request.speculation.n_draft, self._limits.n_rows), 0)

    def _of_room(self, state: RequestState, most: int) -> list[Node]:
        """Its draft tokens that may go into a run now, the most probable path first."""
        return state.waiting_draft_tokens()[: max(min(self._room(state), most), 0)]

    def _is_drafting(self, state: RequestState) -> bool:
        """Draft tokens of this request are in flight."""
        parts = (part for part in self._in_flight.of(state) if self._in_flight.is_computed(part.run))
        return any(node is not state.tree.root for part in parts for node in part.nodes)

    def _submit(self, takes: Sequence[_Take], actions: list[Action]) -> bool:
        """A run of these rows. False when there is nothing to submit."""
        wants: dict[Want, int] = {}
        parts = [part for take in takes if (part := self._part(take, wants)) is not None]
        if not parts:
            return False
        self._make_room()
        only_one = len(parts) == len(self._states) == 1
        fresh = only_one and parts[0].owner.tree.root in parts[0].nodes
        n_nodes = sum(len(part.nodes) for part in parts)
        n_text = sum(part.n_text for part in parts)
        before = self._now if fresh else max(self._free_at, self._now)  # runs before a fresh root are dead
        self._free_at = before + self.cost.seconds(max(n_nodes, 1)) + n_text * (self.cost.text_row_s or 0.0)
        actions.append(self._in_flight.submit(parts, tuple(wants), self._now))
        return True

    def _part(self, take: _Take, wants: dict[Want, int]) -> Part[RequestState] | None:
        state, tree, request = take.state, take.state.tree, take.state.request
        end = state.n_past + take.n_prompt
        nodes, most = take.nodes, len(take.nodes) if take.most is None else take.most
        if take.n_prompt and end == len(request.prompt):
            end, nodes, most = end - 1, [tree.root], 1
            state.enter(Phase.DECODING)
        own = (tree.own,)
        rows = [Row(token=request.prompt[i], pos=i, seqs=own, request=request.id) for i in range(state.n_past, end)]
        if state.n_past < end:
            state.n_past = end
        placed = tree.place(nodes, self._in_flight.next_run, most)
        for node in placed:
            want = state.want
            if request.want_grows and want.kind is WantKind.TOP:
                want = replace(want, n=want.n + node.pos - tree.root.pos)
            index = wants.setdefault(want, len(wants))
            seqs = tuple(sorted(node.seqs))
            rows.append(Row(token=node.token, pos=node.pos, seqs=seqs, request=request.id, want=index))
        if not rows:
            return None
        n_draft_tokens = len(placed) - (tree.root in placed)
        state.counters.submitted(node.lead for node in placed if node is not tree.root)
        state.counters.speculative_runs += n_draft_tokens > 0
        return Part(owner=state, request=request.id, rows=rows, nodes=placed, n_draft_tokens=n_draft_tokens)

    def _run_ended(self, result: RunResult, actions: list[Action]) -> None:
        run = self._in_flight.end(result)
        if not run.parts:
            return
        self._learn(run, result)
        actions.append(RunDone(records_of(run, result)))
        for part in run.parts:
            state = part.owner
            if part.n_text and state.is_open and not run.cancelled:
                self._prefixes.grow(state.prefix, self._computed(state))
            if result.rows and not run.cancelled:
                state.counters.verified_runs += part.n_draft_tokens > 0
            if state.is_open:
                self._sample(state, actions)
            else:
                self._end_if_drained(state, actions)

    def _learn(self, run: RunInFlight[RequestState], result: RunResult) -> None:
        n_text = run.n_text
        if run.cancelled or result.cancelled or result.slowest_s <= 0:
            return
        for cost in (self.cost, self._shared_cost):
            if n_text:
                cost.text_ended(len(run.run.rows) - n_text, n_text, result.slowest_s)
            elif result.rows:
                cost.ended(len(run.run.rows), result.slowest_s, result.total_s)

    def _cancel(self, runs: Sequence[int], actions: list[Action]) -> None:
        """Have these runs skipped or stopped, but for those of requests whose runs are not to be cancelled."""
        cancelled = self._in_flight.cancel(runs, lambda state: state.request.speculation.cancel or not state.is_open)
        for run in cancelled:
            for part in run.parts:
                part.owner.counters.cancelled_runs += 1
                part.owner.counters.cancelled_tokens += part.n_draft_tokens
        if cancelled:
            actions.append(cancel_action(cancelled))

    # The tree

    def _sample(self, state: RequestState, actions: list[Action]) -> None:
        """Have the next token sampled as soon as the root's logits are there."""
        root = state.tree.root
        if root.answer is None or state.phase is not Phase.DECODING:
            return
        if state.request.n_predict == 0:
            self._end(state, Finish.LENGTH, actions)
            return
        state.enter(Phase.SAMPLING)
        actions.append(Sample(state.request.id, root.answer))

    def _sampled(self, event: Sampled, actions: list[Action]) -> None:
        state = self._states.get(event.request)
        if state is None or not state.is_open:
            return  # stopped meanwhile
        state.want = event.want
        if event.end:
            self._end(state, Finish.END_OF_TEXT, actions)
            return
        state.enter(Phase.DECODING)
        dead = state.accept(event.token)
        state.root_since = self._now
        root = state.tree.root
        actions.append(Emit(event.request, event.token, root.submitted))
        if state.epoch == state.request.n_predict:
            self._end(state, Finish.LENGTH, actions)
        elif root.pos >= self._extended(state):
            self._end(state, Finish.CONTEXT_FULL, actions)
        else:
            self._cancel(self._in_flight.drop(state, dead), actions)
            self._sample(state, actions)
            if state.phase is Phase.DECODING:
                self._steer(state)
        self._admit(actions)  # rejected draft tokens may have held the cells that the next request needs

    def _steer(self, state: RequestState) -> None:
        if state.request.drafts:
            tokens = tuple(state.text[state.n_sent :])
            state.n_sent = state.epoch
            state.root_sent(self._now)
            self._steering.append(Steer(Accepted(state.request.id, state.epoch, tokens, self._lead(state))))

    def _drafted(self, batch: MicroBatch) -> None:
        state = self._states.get(batch.request)
        if state is not None and state.is_open:
            state.add(batch, self._now)


def _leading(state: RequestState) -> Calibration:
    """Of the drafter that fills the frontier: the first one."""
    return next(iter(state.drafters.values())).calibration


def _shared_out(states: Sequence[RequestState], n_rows: int) -> list[_Take]:
    """The next tokens of these prompts, `n_rows` in all if there are so many, in equal parts where they suffice."""
    takes: list[_Take] = []
    in_order = sorted(states, key=lambda state: len(state.request.prompt) - state.n_past)
    for i, state in enumerate(in_order):
        part = math.ceil(n_rows / (len(in_order) - i))
        n = min(len(state.request.prompt) - state.n_past, part)
        if n:
            takes.append(_Take(state, n_prompt=n))
        n_rows -= n
    return takes


def _with_nodes(takes: list[_Take], nodes: Iterable[tuple[RequestState, Node]]) -> list[_Take]:
    """The same with these draft tokens, parents before their children."""
    by_state = {take.state: take for take in takes}
    for state, node in nodes:
        by_state.setdefault(state, _Take(state)).nodes.append(node)
    return list(by_state.values())
