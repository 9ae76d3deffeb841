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
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import replace

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
from ggpipe.core.in_flight import InFlight, RunInFlight, cancel_action, record_of
from ggpipe.core.messages import Row, RunResult, Want, WantKind
from ggpipe.core.request import Counters, Finish, Limits
from ggpipe.core.request_state import DrafterState, Phase, RequestState, cut_prompt
from ggpipe.core.run_cost import RunCost
from ggpipe.core.tree import Node, Tree

_WAIT_LIMIT = 2.0  # times the drafter's usual pace: so long a fresh root waits for draft tokens
_EARLY = 0.2  # of a run's time: so long before the slowest stage is free the next draft tokens go in,
_EARLY_S = 1e-3  # and at least this: messages take their time


class Scheduler:
    """See the module's text."""

    def __init__(self, limits: Limits) -> None:
        self.cost = RunCost()
        """What runs of this pipeline take."""
        self._limits = limits
        self._in_flight: InFlight[RequestState] = InFlight(limits.n_seq, limits.n_requests)
        self._waiting: collections.deque[Arrived] = collections.deque()
        self._states: dict[int, RequestState] = {}
        self._now = 0.0
        self._free_at = 0.0
        """When the slowest stage is through with all that is submitted."""

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
                self._drafted(batch, actions)
            case Stop(request_id):
                self._stop(request_id, actions)
            case Tick():
                for state in self._states.values():
                    self._fill(state, actions)
        if self._in_flight.ops and not self._states:  # no run is coming that could carry them
            actions.append(self._in_flight.submit_ops(now))
        return actions

    @property
    def wake_at(self) -> float | None:
        """When to send `Tick`, by the clock of `now`; None when only other events matter."""
        times = (time for state in self._states.values() for time in (state.root_waits_until, state.next_run_at))
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
        trees = [(state, state.validate()) for state in self._states.values()]
        self._in_flight.validate(trees)
        n_open = sum(state.is_open for state in self._states.values())
        assert self._in_flight.ids.kept == self._limits.n_requests - n_open
        taken = sum(len(ids) for _, ids in trees)
        assert len(self._in_flight.ids) == self._limits.n_seq - taken, "an id is lost"
        assert sum(state.n_used for state in self._states.values() if state.is_open) <= self._limits.n_ctx
        assert len(self._states) <= self._limits.n_requests
        for state in self._states.values():
            assert state.phase is not Phase.ENDED
            assert state.is_open or self._in_flight.of(state), "nothing of an ended request is in flight"
            waits = state.root_waits_until is not None or state.next_run_at is not None
            assert not waits or state.phase is Phase.DECODING

    # Requests

    def _admit(self, actions: list[Action]) -> None:
        while self._waiting and len(self._states) < self._limits.n_requests:
            arrived = self._waiting[0]
            request = arrived.request
            reserve = self._limits.n_ctx
            if request.n_predict >= 0:
                reserve = min(reserve, len(request.prompt) + request.n_predict)
            if reserve > self._limits.n_ctx - self._cells_of_others(None):
                return
            self._waiting.popleft()
            tree = Tree(self._in_flight.ids, self._in_flight.ops, request.prompt[-1], len(request.prompt) - 1)
            chunks = collections.deque(cut_prompt(request.prompt, self._limits.n_batch, self._limits.n_ubatch))
            state = RequestState(
                request=request,
                want=arrived.want,
                counters=arrived.counters,
                tree=tree,
                chunks=chunks,
                reserve=reserve,
            )
            self._states[request.id] = state
            if request.drafts:
                state.drafters = {drafter: DrafterState() for drafter in request.drafters}
                actions.append(Steer(self._begin(state)))
            self._fill(state, actions)

    def _begin(self, state: RequestState) -> Begin:
        request = state.request
        return Begin(
            request=request.id,
            prompt=request.prompt,
            n_left=state.reserve - len(request.prompt),
            lead=self._lead(state),
            ends=request.ends,
            banned=request.banned,
            speculation=request.speculation,
        )

    def _lead(self, state: RequestState) -> int:
        """How far drafters may be ahead of the root: to fill the pipeline, and one run more, as far as draft tokens may
        be accepted."""
        speculation, calibration = state.request.speculation, _leading(state)
        if speculation.mode == "async" and speculation.continuous:
            usual = frontier.usual_rows(speculation.n_draft, self.cost, calibration)
            return min(usual * (self._limits.n_in_flight + 1), calibration.reach)
        return speculation.n_draft

    def _cells_of_others(self, own: RequestState | None) -> int:
        return sum(state.n_cells for state in self._states.values() if state is not own)

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
        state.root_waits_until = state.next_run_at = None
        state.tree.close()
        if state.request.drafts:
            actions.append(Steer(Done(state.request.id)))
        self._cancel(state, [run.run.id for run in self._in_flight.of(state) if not run.cancelled], actions)
        self._end_if_drained(state, actions)

    def _end_if_drained(self, state: RequestState, actions: list[Action]) -> None:
        if state.finish is None or self._in_flight.of(state):
            return
        state.enter(Phase.ENDED)
        del self._states[state.request.id]
        actions.append(Finished(state.request.id, state.finish))
        self._admit(actions)

    # The pipeline

    def _fill(self, state: RequestState, actions: list[Action]) -> None:
        """Submit what this request has to submit and the pipeline has room for."""
        state.next_run_at = None
        while state.phase is Phase.PREFILL and self.n_in_flight < self._limits.n_in_flight:
            chunk = state.chunks.popleft()
            if state.chunks:
                self._submit(state, chunk, (), 0, actions)
            else:
                self._submit(state, chunk[:-1], (state.tree.root,), 1, actions)
                state.enter(Phase.DECODING)
        if state.phase is not Phase.DECODING:  # while a token is sampled: it decides which draft tokens live
            return
        root, speculation = state.tree.root, state.request.speculation
        if speculation.mode == "speculative":
            if not root.submitted and state.all_complete:
                most = min(self._room(state) + 1, self._limits.n_rows)
                self._submit(state, (), [root, *state.waiting_draft_tokens()], most, actions)
            return
        if not root.submitted and not self._submit_root(state, actions):
            return
        while self.n_in_flight < self._limits.n_in_flight and (speculation.continuous or not self._is_drafting(state)):
            waiting = state.waiting_draft_tokens()
            early_s = max(self.cost.seconds(1) * _EARLY, _EARLY_S)
            if waiting and self._now < self._free_at - early_s:  # until then more of them may come
                state.next_run_at = self._free_at - early_s
                return
            most = self._room(state)
            n = min(frontier.best_rows(state.chances(waiting[:most]), self.cost), most)
            if not self._submit(state, (), waiting, n, actions):
                return

    def _submit_root(self, state: RequestState, actions: list[Action]) -> bool:
        """Put a fresh root in, with the draft tokens that go into its run; False while these are waited for.

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
                    return False
            n = min(n, len(waiting))
        state.root_waits_until = None
        self._submit(state, (), (state.tree.root, *waiting), 1 + n, actions)
        return True

    def _room(self, state: RequestState) -> int:
        """Draft tokens that may go into a run now."""
        free = self._limits.n_ctx - self._cells_of_others(state) - state.n_used
        return max(min(free, state.request.speculation.n_draft, self._limits.n_rows), 0)

    def _is_drafting(self, state: RequestState) -> bool:
        """Draft tokens of this request are in flight."""
        runs = (run for run in self._in_flight.of(state) if not run.cancelled)
        return any(node is not state.tree.root for run in runs for node in run.nodes)

    def _submit(
        self, state: RequestState, prompt: tuple[int, ...], nodes: Sequence[Node], most: int, actions: list[Action]
    ) -> bool:
        """A run of prompt tokens and of up to `most` nodes. False when there is nothing to submit."""
        tree, request = state.tree, state.request
        placed = tree.place(nodes, self._in_flight.next_run, most)
        if not prompt and not placed:
            return False
        own = (tree.own,)
        rows = [Row(token=token, pos=state.n_past + i, seqs=own, request=request.id) for i, token in enumerate(prompt)]
        state.n_past += len(prompt)
        wants: dict[Want, int] = {}
        for node in placed:
            want = state.want
            if request.want_grows and want.kind is WantKind.TOP:
                want = replace(want, n=want.n + node.pos - tree.root.pos)
            index = wants.setdefault(want, len(wants))
            seqs = tuple(sorted(node.seqs))
            rows.append(Row(token=node.token, pos=node.pos, seqs=seqs, request=request.id, want=index))
        n_draft_tokens = len(placed) - (tree.root in placed)
        state.counters.submitted(node.lead for node in placed if node is not tree.root)
        state.counters.speculative_runs += n_draft_tokens > 0
        actions.append(self._in_flight.submit(state, rows, tuple(wants), placed, n_draft_tokens, self._now))
        before = (
            self._now if tree.root in placed else max(self._free_at, self._now)
        )  # runs before a fresh root are dead
        self._free_at = before + self.cost.seconds(len(rows))
        return True

    def _run_ended(self, result: RunResult, actions: list[Action]) -> None:
        run = self._in_flight.end(result)
        state = run.owner
        if state is not None:
            self._learn(run, result)
            actions.append(RunDone(record_of(run, result)))
            if result.rows and not run.cancelled:
                state.counters.verified_runs += run.n_draft_tokens > 0
            if state.is_open:
                self._sample(state, actions)
            else:
                self._end_if_drained(state, actions)
        for other in sorted(self._states.values(), key=lambda other: len(self._in_flight.of(other))):
            self._fill(other, actions)

    def _learn(self, run: RunInFlight[RequestState], result: RunResult) -> None:
        if result.rows and run.n_text == 0 and result.slowest_s > 0:
            self.cost.ended(len(run.nodes), result.slowest_s, result.total_s)

    def _cancel(self, state: RequestState, runs: Sequence[int], actions: list[Action]) -> None:
        if runs:
            cancelled = self._in_flight.cancel(runs)
            state.counters.cancelled_runs += len(cancelled)
            state.counters.cancelled_tokens += sum(run.n_draft_tokens for run in cancelled)
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
        state.next_run_at = None
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
        root = state.tree.root
        actions.append(Emit(event.request, event.token, root.submitted))
        if state.epoch == state.request.n_predict:
            self._end(state, Finish.LENGTH, actions)
        elif root.pos >= state.reserve:
            self._end(state, Finish.CONTEXT_FULL, actions)
        else:
            unneeded = self._in_flight.drop(state, dead)
            if state.request.speculation.cancel:
                self._cancel(state, unneeded, actions)
            self._sample(state, actions)
            if state.phase is Phase.DECODING:
                self._fill(state, actions)
                self._steer(state, actions)
        self._admit(actions)  # rejected draft tokens may have held the cells that the next request needs

    def _steer(self, state: RequestState, actions: list[Action]) -> None:
        if state.request.drafts:
            tokens = tuple(state.text[state.n_sent :])
            state.n_sent = state.epoch
            state.root_sent(self._now)
            actions.append(Steer(Accepted(state.request.id, state.epoch, tokens, self._lead(state))))

    def _drafted(self, batch: MicroBatch, actions: list[Action]) -> None:
        state = self._states.get(batch.request)
        if state is not None and state.is_open:
            state.add(batch, self._now)
            self._fill(state, actions)


def _leading(state: RequestState) -> Calibration:
    """Of the drafter that fills the frontier: the first one."""
    return next(iter(state.drafters.values())).calibration
