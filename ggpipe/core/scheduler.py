"""The head's scheduler: which run goes into the pipeline next.

    handle(event, now) -> list[Action]

Events say what happened (a request arrived, a run came back, a token was sampled, the draft guessed), actions what is
to be done. Nothing in here waits, sends or computes, so the same object runs under MPI, inside one process and on
virtual time.

A prompt goes in as chunks whose borders follow from the prompt and the batch sizes alone, several in flight so that
chunk i+1 is in the first stage while chunk i is in the second. From then on the root of the request's tree is the last
accepted token. When its logits are back, the next token is sampled. If a guess holds that token, the guess becomes the
root, be it in flight, back already, or not submitted yet; else the token goes in as a fresh root. What does not hang on
the new root is dead, and runs with nothing but dead rows are cancelled. No token is evaluated twice.

Between roots, the pipeline is kept full of guesses, the most probable path first. They go in when the slowest stage is
about to be free, and not before: until then more of them may come, and a run of several costs less than several runs.
Where that pays, a fresh root waits a moment for the guesses that are to ride with it (`policy.RunWidth`).
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import replace

from ggpipe.config import SpeculationConfig
from ggpipe.core.events import (
    Action,
    Arrived,
    Cancel,
    Counters,
    Emit,
    Event,
    Finish,
    Finished,
    Guessed,
    Limits,
    Request,
    RunEnded,
    Sample,
    Sampled,
    Steer,
    Stop,
    Submit,
    Tick,
)
from ggpipe.core.messages import Accepted, Begin, Done, KvOp, MicroBatch, Row, Run, Want, WantKind
from ggpipe.core.policy import RunWidth
from ggpipe.core.serving import Active, Flight, cut_prompt
from ggpipe.core.tree import Node, SequenceIds, Tree

_PATIENCE = 2.0  # times the draft's usual pace: so long a fresh root waits for guesses
_EARLY = 0.2  # of a run's time: so long before the slowest stage is free the next guesses go in,
_EARLY_S = 1e-3  # and at least so many seconds: messages take their time


class Scheduler:
    """See the module's text."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._next_run = 1
        self._ids = SequenceIds(limits.n_seq)
        self._ids.kept = limits.n_requests
        self._ops: list[KvOp] = []
        """To ride in front of the next run, whosoever it is."""
        self._waiting: collections.deque[tuple[Request, Want]] = collections.deque()
        self._active: dict[int, Active] = {}
        self._flights: dict[int, Flight] = {}
        self._now = 0.0
        self._free_at = 0.0
        """When the slowest stage is through with all that is submitted."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event that happened at `now` (seconds, any clock that does not go back)."""
        actions: list[Action] = []
        self._now = now
        match event:
            case Arrived(request, want):
                if not 0 < len(request.prompt) < self._limits.n_ctx:
                    raise ValueError(f"a prompt of {len(request.prompt)} tokens in {self._limits.n_ctx} cells")
                self._waiting.append((request, want))
                self._admit(actions)
            case RunEnded():
                self._run_ended(event, actions)
            case Sampled(request_id, token, end, want):
                self._sampled(request_id, token, end, want, actions)
            case Guessed(batch):
                self._guessed(batch, actions)
            case Stop(request_id):
                self._stop(request_id, actions)
            case Tick():
                for active in self._active.values():
                    self._push(active, actions)
        if self._ops and not self._active:  # no run is coming that could carry them
            self._put(None, [], (), (), actions)
        return actions

    @property
    def wake_at(self) -> float | None:
        """When to say `Tick`, by the clock of `now`; None when only other events matter."""
        times = (time for active in self._active.values() for time in (active.held_until, active.gate_at))
        return min((time for time in times if time is not None), default=None)

    def counters(self, request: int) -> Counters:
        """A request's numbers, kept up to date until it is finished. Raises KeyError when it is not being served."""
        return self._active[request].counters

    # Requests

    def _admit(self, actions: list[Action]) -> None:
        while self._waiting and len(self._active) < self._limits.n_requests:
            request, want = self._waiting[0]
            reserve = self._limits.n_ctx
            if request.n_predict >= 0:
                reserve = min(reserve, len(request.prompt) + request.n_predict)
            if reserve > self._limits.n_ctx - self._cells_of_others(None):
                return
            self._waiting.popleft()
            tree = Tree(self._ids, self._ops, request.prompt[-1], len(request.prompt) - 1)
            chunks = collections.deque(cut_prompt(request.prompt, self._limits.n_batch, self._limits.n_ubatch))
            active = self._active[request.id] = Active(request, want, tree, chunks, reserve)
            if request.speculation.mode != "iterative":
                actions.append(Steer(self._begin(request, reserve)))
            self._push(active, actions)

    def _begin(self, request: Request, reserve: int) -> Begin:
        lead = self._lead(request.speculation, RunWidth())
        n_left = reserve - len(request.prompt)
        return Begin(request.id, request.prompt, n_left, lead, request.ends, request.banned, request.speculation)

    def _lead(self, speculation: SpeculationConfig, width: RunWidth) -> int:
        """How far the draft may run ahead: to fill the pipeline, and one run more, as far as guesses may be right."""
        if speculation.mode == "async" and speculation.continuous:
            return min(width.usual(speculation.n_draft) * (self._limits.n_in_flight + 1), width.reach)
        return speculation.n_draft

    def _cells_of_others(self, own: Active | None) -> int:
        return sum(max(active.reserve, active.n_used) for active in self._active.values() if active is not own)

    def _stop(self, request_id: int, actions: list[Action]) -> None:
        active = self._active.get(request_id)
        if active is not None:
            if active.ending is None:
                self._end(active, Finish.STOPPED, actions)
            return
        kept = [(r, w) for r, w in self._waiting if r.id != request_id]
        if len(kept) < len(self._waiting):
            self._waiting = collections.deque(kept)
            actions.append(Finished(request_id, Finish.STOPPED))

    def _end(self, active: Active, reason: Finish, actions: list[Action]) -> None:
        active.ending = reason
        active.held_until = active.gate_at = None
        active.tree.close()
        if active.request.speculation.mode != "iterative":
            actions.append(Steer(Done(active.request.id)))
        self._cancel([run for run in active.flights if not self._flights[run].cancelled], actions)
        self._end_if_drained(active, actions)

    def _end_if_drained(self, active: Active, actions: list[Action]) -> None:
        if active.flights or active.ending is None:
            return
        del self._active[active.request.id]
        actions.append(Finished(active.request.id, active.ending))
        self._admit(actions)

    # The pipeline

    def _push(self, active: Active, actions: list[Action]) -> None:
        """Submit what this request has to submit and the pipeline has room for."""
        if active.ending is not None or active.sampling:  # the token that is being drawn says which guesses live
            return
        active.gate_at = None
        root, speculation = active.tree.root, active.request.speculation
        while active.chunks and self.n_in_flight < self._limits.n_in_flight:
            chunk = active.chunks.popleft()
            if active.chunks:
                self._submit(active, chunk, (), 0, actions)
            else:
                self._submit(active, chunk[:-1], (root,), 1, actions)
        if active.chunks:
            return
        if speculation.mode == "speculative":
            if not root.submitted and active.ready:
                most = min(self._most(active) + 1, self._limits.n_rows)
                self._submit(active, (), [root, *active.best_guesses()], most, actions)
            return
        if not root.submitted and not self._launch(active, actions):
            return
        while self.n_in_flight < self._limits.n_in_flight and (speculation.continuous or not self._guessing(active)):
            guesses = active.best_guesses()
            early_s = max(active.width.seconds(1) * _EARLY, _EARLY_S)
            if guesses and self._now < self._free_at - early_s:  # until then more of them may come
                active.gate_at = self._free_at - early_s
                return
            if not self._submit(active, (), guesses, self._worth(active, guesses), actions):
                return

    def _launch(self, active: Active, actions: list[Action]) -> bool:
        """Put a fresh root in, with the guesses that are to ride along; False while these are waited for.

        It waits for no other reason, and not for a draft that is late, or has no more.
        """
        n, guesses = 0, active.best_guesses()
        speculation = active.request.speculation
        if speculation.mode == "async" and speculation.continuous:
            most = max(min(self._most(active), self._limits.n_rows - 1, active.n_depths), 0)
            chances = active.chances(guesses[:most])
            n, wait_s = active.width.riders(chances, most)
            if n > len(guesses) and not active.ready:
                if active.held_until is None:
                    active.held_until = self._now + _PATIENCE * wait_s
                if self._now < active.held_until:
                    return False
            n = min(n, len(guesses))
        active.held_until = None
        self._submit(active, (), (active.tree.root, *guesses), 1 + n, actions)
        return True

    def _most(self, active: Active) -> int:
        """Guesses that may go into a run now."""
        free = self._limits.n_ctx - self._cells_of_others(active) - active.n_used
        return max(min(free, active.request.speculation.n_draft, self._limits.n_rows), 0)

    def _worth(self, active: Active, guesses: Sequence[Node]) -> int:
        """How many of these to put into one run."""
        most = self._most(active)
        return min(active.width.best(active.chances(guesses[:most])), most)

    @property
    def n_in_flight(self) -> int:
        """Runs that are or will be computed; cancelled ones and bare operations only pass through."""
        return sum(flight.active is not None and not flight.cancelled for flight in self._flights.values())

    def _guessing(self, active: Active) -> bool:
        """Guesses are in flight."""
        flights = (self._flights[run] for run in active.flights)
        return any(node is not active.tree.root for flight in flights if not flight.cancelled for node in flight.nodes)

    def _submit(
        self, active: Active, prompt: tuple[int, ...], nodes: Sequence[Node], most: int, actions: list[Action]
    ) -> bool:
        """A run of prompt tokens and of up to `most` nodes. False when there is nothing to submit."""
        tree, request, counters = active.tree, active.request, active.counters
        placed = tree.place(nodes, self._next_run, most)
        if not prompt and not placed:
            return False
        rows = [Row(token, active.n_past + i, (tree.own,), request.id) for i, token in enumerate(prompt)]
        active.n_past += len(prompt)
        wants: dict[Want, int] = {}
        for node in placed:
            want = active.want
            if request.want_grows and want.kind is WantKind.TOP:
                want = replace(want, n=want.n + node.pos - tree.root.pos)
            place = wants.setdefault(want, len(wants))
            rows.append(Row(node.token, node.pos, tuple(sorted(node.seqs)), request.id, place))
        guesses = len(placed) - (tree.root in placed)
        counters.submitted(node.lead for node in placed if node is not tree.root)
        counters.speculative_runs += guesses > 0
        run = self._put(active, placed, rows, tuple(wants), actions, guesses)
        active.flights.add(run)
        before = self._now if tree.root in placed else max(self._free_at, self._now)  # what a fresh root meets is dead
        self._free_at = before + active.width.seconds(len(rows))
        return True

    def _put(
        self, active: Active | None, nodes: list[Node], rows: Sequence[Row], wants: tuple[Want, ...],
        actions: list[Action], n_guesses: int = 0,
    ) -> int:  # fmt: skip
        run = Run(self._next_run, active.epoch if active else 0, tuple(rows), tuple(self._ops), wants)
        self._next_run += 1
        self._ops.clear()
        self._flights[run.id] = Flight(active, nodes, len(rows) - len(nodes), n_guesses, len(rows))
        actions.append(Submit(run, n_guesses))
        return run.id

    def _run_ended(self, event: RunEnded, actions: list[Action]) -> None:
        run, rows = event.run, event.rows
        flight = self._flights.pop(run, None)
        if flight is None:
            raise ValueError(f"run {run} is not in flight")
        active = flight.active
        if active is not None:
            active.flights.remove(run)
            for row in rows:
                flight.nodes[row.row - flight.n_prompt].answer = row
            if rows and flight.n_prompt == 0 and event.compute_s > 0:
                active.width.ended(len(flight.nodes), event.compute_s, event.all_s)
            if rows and not flight.cancelled:
                active.counters.verified_runs += flight.n_guesses > 0
            if active.ending is not None:
                self._end_if_drained(active, actions)
            else:
                self._ask(active, actions)
        for other in sorted(self._active.values(), key=lambda a: len(a.flights)):
            self._push(other, actions)

    def _cancel(self, runs: list[int], actions: list[Action]) -> None:
        if not runs:
            return
        for run in runs:
            flight = self._flights[run]
            flight.cancelled = True
            assert flight.active is not None
            flight.active.counters.cancelled_runs += 1
            flight.active.counters.cancelled_tokens += flight.n_guesses
        actions.append(Cancel(tuple(runs)))

    # The tree

    def _ask(self, active: Active, actions: list[Action]) -> None:
        """Sample the next token as soon as the root's logits are there."""
        root = active.tree.root
        if root.answer is None or active.sampling:
            return
        if active.request.n_predict == 0:
            self._end(active, Finish.LENGTH, actions)
            return
        active.sampling = True
        actions.append(Sample(active.request.id, root.answer))

    def _sampled(self, request_id: int, token: int, end: bool, want: Want, actions: list[Action]) -> None:
        active = self._active.get(request_id)
        if active is None or active.ending is not None:
            return  # stopped meanwhile
        active.sampling = False
        active.want = want
        if end:
            self._end(active, Finish.END_OF_TEXT, actions)
            return
        active.text.append(token)
        for guess in active.tree.root.children.values():
            active.width.judged(guess.prob, guess.token == token)
        dead = active.tree.advance(token)
        root, active.held_until, active.gate_at = active.tree.root, None, None
        if root.guess >= 0:
            active.passed[root.guess] = active.epoch
            active.guesses.pop(root.guess, None)
        if root.submitted:
            active.counters.accepted(root.lead)
        active.counters.found_wrong(node.run for node in dead if node.submitted)
        actions.append(Emit(request_id, token, root.submitted))
        if active.epoch == active.request.n_predict:
            self._end(active, Finish.LENGTH, actions)
        elif root.pos >= active.reserve:
            self._end(active, Finish.CONTEXT_FULL, actions)
        else:
            self._bury(active, dead, actions)
            self._ask(active, actions)
            if not active.sampling:
                active.ready = False
                self._push(active, actions)
                self._steer(active, actions)
        self._admit(actions)  # wrong guesses may have held the cells that the next request needs

    def _bury(self, active: Active, dead: list[Node], actions: list[Action]) -> None:
        """Forget guesses that turned out wrong, and cancel the runs that have no others."""
        hopeless = False
        for node in dead:
            active.guesses.pop(node.guess, None)
            if (flight := self._flights.get(node.run)) is not None:
                flight.n_live -= 1
                hopeless = hopeless or flight.n_live == 0
        if hopeless and active.request.speculation.cancel:
            self._cancel(self._hopeless(active), actions)

    def _hopeless(self, active: Active) -> list[int]:
        """Runs without a live row. Not those that a run which goes on needs: its dead rows must find their parents."""
        hopeless: list[int] = []
        needed: set[int] = set()
        for run in sorted(active.flights, reverse=True):
            flight = self._flights[run]
            if flight.n_live or run in needed:
                needed.update(node.parent.run for node in flight.nodes if node.parent is not None)
            elif not flight.cancelled:
                hopeless.append(run)
        return hopeless[::-1]

    def _steer(self, active: Active, actions: list[Action]) -> None:
        if active.request.speculation.mode != "iterative":
            tokens = tuple(active.text[active.n_told :])
            active.n_told = active.epoch
            lead = self._lead(active.request.speculation, active.width)
            active.told(self._now)
            actions.append(Steer(Accepted(active.request.id, active.epoch, tokens, lead)))

    def _guessed(self, batch: MicroBatch, actions: list[Action]) -> None:
        active = self._active.get(batch.request)
        if active is None or active.ending is not None:
            return
        active.take(batch, self._now)
        if batch.complete and batch.epoch == active.epoch:
            active.ready = True
        self._push(active, actions)
