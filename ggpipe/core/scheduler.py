"""The head's scheduler: which run goes into the pipeline next.

    handle(event, now) -> list[Action]

Events say what happened (a request arrived, a run came back, a token was sampled, a drafter sent draft tokens), actions
what is to be done. Nothing in here waits, sends or computes, so the same object runs under MPI, inside one process and
on virtual time. `request_state` has the phases of a request, `batching` what goes into a run.

A prompt goes in as chunks whose borders follow from the prompt and the pipeline's limits alone, several in flight so
that chunk i+1 is in the first stage while chunk i is in the second. From then on the root of the request's tree is the
last accepted token. When its logits are back, the next token is sampled. If a draft token holds that token, it becomes
the root, be it in flight, back already, or not submitted yet; else the token goes in as a fresh root. What does not
hang on the new root is dead, and runs with nothing but dead rows are cancelled. Of other runs, stages drop the dead
rows (`dropped_rows`). No token is evaluated twice, but for those whose recurrent state had to be taken back
(`state_rollback`).

Between roots, the pipeline is kept full of draft tokens, the most probable path first. They go in when the slowest
stage is about to be free, and not before: until then more of them may come, and a run of several costs less than
several runs. Where that pays, a fresh root waits a moment for draft tokens that go into its run.

What ended requests computed stays in the KV cache for prompts that begin alike, until cells are needed
(`prefix_cache`). Where cells are to be written to disk, or read from there, a run without rows has the stages do so
between two others: so each stage saves the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ggpipe.core.admission import Admission
from ggpipe.core.batching import frontier
from ggpipe.core.batching.pipeline_state import PipelineState
from ggpipe.core.batching.run_parts import part_of
from ggpipe.core.batching.steering import Steering
from ggpipe.core.draft_messages import MicroBatch
from ggpipe.core.drafters.base import TextDrafter
from ggpipe.core.dropped_rows import DeadRow
from ggpipe.core.events import (
    Arrived,
    Drafted,
    Embed,
    Emit,
    Fetch,
    Finished,
    NoToken,
    Replay,
    RowFetched,
    RowNeeded,
    RunDone,
    RunEnded,
    Sample,
    Sampled,
    SchedulerAction,
    SchedulerEvent,
    StopRequest,
    Tick,
    ToDrafter,
)
from ggpipe.core.in_flight import InFlight, cancel_action, records_of
from ggpipe.core.kv.prefix_cache import PrefixCache
from ggpipe.core.messages import LogitsRequest, RowLogits, RunResult, Save
from ggpipe.core.prefixes import ErasePrefix, PrefixDone, RestorePrefix, SavePrefix
from ggpipe.core.request import Counters, Finish, Limits, Request
from ggpipe.core.request_state import Phase, PrefixState, RequestState, SequenceState
from ggpipe.core.run_cost import RunCost
from ggpipe.core.tree import Node


class Scheduler:
    """See the module's text."""

    def __init__(
        self,
        limits: Limits,
        restored: tuple[int, ...] | None = None,
        text_drafters: Mapping[int, TextDrafter] | None = None,
    ) -> None:
        """`restored`: see `PrefixCache`. `text_drafters`: see `Steering`."""
        self._limits = limits
        self._in_flight: InFlight[SequenceState] = InFlight(limits.n_seq, limits.n_requests + limits.n_prefixes)
        self._prefixes = PrefixCache(limits, self._in_flight.ids, self._in_flight.ops, restored)
        self._admission = Admission(limits, self._prefixes, text_drafters or {})
        self._states = self._admission.states
        self._pipeline = PipelineState(limits, self._in_flight, self._admission)
        self._steering = Steering(self._pipeline, text_drafters or {})
        self._now = 0.0
        self._wake_at: float | None = None
        self._to_drafters: list[ToDrafter] = []

    def handle(self, event: SchedulerEvent, now: float) -> list[SchedulerAction]:
        """Take in one event that happened at `now` (seconds, any clock that does not go back).

        Raises ValueError for a prompt that is empty or fills the context, and for a run that is not in flight.
        """
        actions: list[SchedulerAction] = []
        self._now = self._pipeline.now = now
        match event:  # the most frequent first
            case RunEnded(result):
                self._run_ended(result, actions)
            case Tick():
                pass
            case Drafted(micro_batch):
                self._drafted(micro_batch)
            case Sampled():
                self._sampled(event, actions)
            case Arrived(request):
                self._arrived(event, request, actions)
            case RowNeeded(request_id):
                self._row_needed(request_id, actions)
            case RowFetched(request_id, row):
                self._row_fetched(request_id, row, actions)
            case NoToken(request_id):
                if (state := self._open(request_id)) is not None:
                    self._end(state, Finish.NO_TOKEN, actions)
            case SavePrefix() | RestorePrefix():
                self._admission.wait(event)
                self._admit(actions)
            case ErasePrefix(order_id, tokens):
                self._prefixes.erase(tokens)
                actions.append(PrefixDone(order_id))
            case PrefixDone(request_id):
                prefix = self._states[request_id]
                assert isinstance(prefix, PrefixState)
                prefix.transferred(event)
                self._close(prefix, actions)
            case StopRequest(request_id):
                self._stop(request_id, actions)
        self._fill(actions)
        actions += self._to_drafters  # the pipeline first
        self._to_drafters.clear()
        if self._in_flight.ops and not self._states:  # no run is coming that could carry them
            actions.append(self._in_flight.submit_ops(now))
        return actions

    @property
    def wake_at(self) -> float | None:
        """When to send `Tick`, by the clock of `now`; None when only other events matter."""
        return self._wake_at

    @property
    def cost(self) -> RunCost:
        """What runs of this pipeline take."""
        return self._pipeline.cost

    @property
    def n_in_flight(self) -> int:
        """Runs that are or will be computed; cancelled ones and bare operations only pass through."""
        return self._in_flight.n_computed

    @property
    def n_cells(self) -> int:
        """KV cells in use: of requests, kept prefixes and draft tokens."""
        return self._admission.n_cells

    def counters(self, request: int) -> Counters:
        """A request's numbers, kept up to date until it is finished. Raises KeyError when it is not being served."""
        return self._states[request].counters

    def validate(self) -> None:
        """Check what must hold between events. Raises AssertionError."""
        trees = [(state, ids) for state in self._states.values() if (ids := state.validate())]
        self._in_flight.validate(trees)
        self._prefixes.validate()
        n_open, n_kept = sum(state.is_open for state in self._states.values()), len(self._prefixes)
        assert self._in_flight.ids.reserved == self._limits.n_requests - n_open + self._limits.n_prefixes - n_kept
        taken = sum(len(ids) for _, ids in trees) + n_kept
        assert len(self._in_flight.ids) == self._limits.n_seq - taken, "an id is lost"
        self._admission.validate()
        for state in self._states.values():
            assert state.phase is not Phase.ENDED
            assert state.is_open or self._in_flight.of(state), "nothing of an ended request is in flight"

    # Requests

    def _arrived(self, arrived: Arrived, request: Request, actions: list[SchedulerAction]) -> None:
        n_ctx, n_prompt = self._limits.n_ctx, len(request.prompt)
        if request.n_resumed and (reason := request.is_over(n_ctx)):  # the ranks died before they said so
            actions.append(Finished(request.id, reason))
            return
        if not 0 < n_prompt - request.n_resumed < n_ctx:
            raise ValueError(f"a prompt of {n_prompt - request.n_resumed} tokens in {n_ctx} cells")
        self._admission.wait(arrived)
        self._admit(actions)

    def _open(self, request_id: int) -> RequestState | None:
        """The state of a request that goes on; None: it waits, or was stopped meanwhile."""
        state = self._states.get(request_id)
        return state if isinstance(state, RequestState) and state.is_open else None

    def _open_states(self) -> list[SequenceState]:
        return [state for state in self._states.values() if state.is_open]

    def _admit(self, actions: list[SchedulerAction]) -> None:
        for state in self._admission.admit():
            state.admitted_at = self._now
            if isinstance(state, PrefixState):
                self._transfer(state, actions)
            else:
                actions += self._steering.begin(state, self._limits.n_ctx, self._open_states())

    def _transfer(self, state: PrefixState, actions: list[SchedulerAction]) -> None:
        """Have all stages write a prefix to disk, or read it from there, if that is possible now."""
        if state.is_ready:
            state.enter(Phase.TRANSFER)
            self._admission.make_room()
            actions.append(self._in_flight.submit_save(state, state.transfer, self._now))

    def _stop(self, number: int, actions: list[SchedulerAction]) -> None:
        match self._states.get(number):
            case RequestState(is_open=True) as state:
                self._end(state, Finish.STOPPED, actions)
            case PrefixState(phase=Phase.PREFILL) as state:  # else it ends in a moment
                self._close(state, actions)
            case None if (withdrawn := self._admission.withdraw(number)) is not None:
                is_request = isinstance(withdrawn, Arrived)
                actions.append(Finished(number, Finish.STOPPED) if is_request else PrefixDone(number))
                self._admit(actions)  # those behind it may need fewer cells

    def _end(self, state: RequestState, reason: Finish, actions: list[SchedulerAction]) -> None:
        state.finish = reason
        self._close(state, actions)

    def _close(self, state: SequenceState, actions: list[SchedulerAction]) -> None:
        """It is over when nothing of it is in flight any more. What is computed of it may be kept."""
        state.enter(Phase.ENDING)
        clean = not self._in_flight.of(state) and not state.tree.n_submitted
        computed = tuple(self._computed(state))
        if not clean and computed and isinstance(state, RequestState):
            n = state.tree.settle(len(computed))
            computed, clean = computed[:n], n is not None
        is_kept = self._prefixes.close(state.prefix, computed, clean)
        if isinstance(state, RequestState):
            if state.request.saves == "text" and is_kept and len(computed) > state.counters.cached_tokens:
                self._save(state, computed, actions)
            actions += self._steering.end(state)
        self._cancel(self._in_flight.leave(state), actions)
        self._end_if_drained(state, actions)

    def _computed(self, state: SequenceState) -> Sequence[int]:
        """Its tokens, as far as they are computed and may go into the prefix cache."""
        return state.tokens[: self._in_flight.computed(state, state.n_in)]

    def _end_if_drained(self, state: SequenceState, actions: list[SchedulerAction]) -> None:
        if state.is_open or self._in_flight.of(state):
            return
        state.enter(Phase.ENDED)
        del self._states[state.id]
        actions.append(state.over)
        self._admit(actions)

    # The pipeline

    def _fill(self, actions: list[SchedulerAction]) -> None:
        """Submit what there is to submit and the pipeline has room for."""
        self._wake_at = None
        self._admission.make_room()
        if any([state.phase is Phase.SAMPLING for state in self._states.values()]):
            return  # it decides which draft tokens live, and others' tokens come out of the same run
        while True:
            states = [state for state in self._states.values() if state.has_rows]
            if not any([state.waits_for_run for state in states]):
                return
            choice = frontier.choose(self._pipeline, states)
            self._wake_at = choice.wake_at
            if not (choice.schedule and self._submit(choice, actions)):
                return

    def _save(self, state: SequenceState, tokens: tuple[int, ...], actions: list[SchedulerAction]) -> None:
        actions.append(self._in_flight.submit_save(state, Save(state.id, state.tree.seq, tokens), self._now))

    def _submit(self, choice: frontier.Choice, actions: list[SchedulerAction]) -> bool:
        """A run of these rows. False when there is nothing to submit."""
        prompts = [scheduled.state for scheduled in choice.schedule if scheduled.n_prompt]
        for state in prompts:
            if state.saves_prompt and state.n_past == len(state.prompt) - 1:
                state.is_saved = True
                self._save(state, state.prompt[:-1], actions)
            self._prefixes.checkpoint(state.prefix, state.n_past)
        if choice.pauses:
            self._admission.make_room()
            actions += self._in_flight.submit_foreign_ops({state.tree.seq for state in prompts}, self._now)
        logits_requests: dict[LogitsRequest, int] = {}
        found = [part_of(scheduled, self._in_flight.next_run, logits_requests) for scheduled in choice.schedule]
        parts = [part for part in found if part is not None]
        if not parts:
            return False
        self._admission.make_room()
        self._pipeline.submitted(parts, len(parts) == len(self._states) == 1, choice.pauses)
        kept = [run for state in self._open_states() if state.keeps and (run := state.oldest_run) is not None]
        kept_from = min(kept, default=None)
        actions.append(self._in_flight.submit(parts, tuple(logits_requests), self._now, kept_from, choice.pauses))
        for part in parts:
            if isinstance(part.owner, PrefixState):
                self._transfer(part.owner, actions)
            elif part.owner.tree.root in part.nodes:
                self._to_drafters += self._steering.begin(part.owner, self._limits.n_ctx, self._open_states())
        return True

    def _run_ended(self, result: RunResult, actions: list[SchedulerAction]) -> None:
        run = self._in_flight.end(result)
        if not run.parts:
            return
        self._pipeline.learn(run, result)
        actions.append(RunDone(records_of(run, result)))
        for part in run.parts:
            state = part.owner
            if part.n_prompt_rows and state.is_open and not run.cancelled:
                self._prefixes.grow(state.prefix, self._computed(state))
            if result.rows and not run.cancelled:
                state.counters.verified_runs += part.n_draft_tokens > 0
            elif result.cancelled and not run.cancelled:  # all of its rows were dropped
                state.counters.cancelled(part.n_draft_tokens)
            if not state.is_open:
                self._end_if_drained(state, actions)
            elif isinstance(state, RequestState):
                if part.prompt_logits:
                    rows = tuple(part.prompt_logits)
                    actions.append(Embed(part.request, rows) if state.embeds else Replay(part.request, rows))
                self._sample(state, actions)

    def _cancel(
        self,
        runs: Sequence[int],
        actions: list[SchedulerAction],
        state: SequenceState | None = None,
        dead: Collection[Node] = (),
    ) -> None:
        """Have these runs skipped or stopped, but for those of requests whose runs are not to be cancelled, and drop
        the rows of these dead nodes of `state`."""
        cancelled = self._in_flight.cancel(runs, lambda state: state.may_cancel)
        for run in cancelled:
            for part in run.parts:
                part.owner.counters.cancelled(part.n_draft_tokens)
        rows: tuple[DeadRow, ...] = ()
        if state is not None and state.may_cancel and self._limits.drops_rows:
            rows = self._in_flight.dead_rows(state, dead)
        if cancelled or rows:
            actions.append(cancel_action(cancelled, rows))

    # The tree

    def _sample(self, state: RequestState, actions: list[SchedulerAction]) -> None:
        """Have the next token sampled as soon as the root's logits are there."""
        root = state.tree.root
        if root.logits is None or state.phase is not Phase.DECODING:
            return
        if state.embeds:
            actions.append(Embed(state.id, (root.logits,)))
        if state.n_predict == 0:
            self._end(state, Finish.LENGTH, actions)
            return
        state.enter(Phase.SAMPLING)
        actions.append(Sample(state.id, root.logits))

    def _row_needed(self, request_id: int, actions: list[SchedulerAction]) -> None:
        if (state := self._open(request_id)) is None:
            return  # stopped meanwhile
        state.enter(Phase.FETCHING)
        root = state.tree.root
        assert root.logits is not None
        actions.append(Fetch(request_id, root.run, root.logits.row))

    def _row_fetched(self, request_id: int, row: RowLogits, actions: list[SchedulerAction]) -> None:
        if (state := self._open(request_id)) is None:
            return
        state.tree.root.logits = row
        state.enter(Phase.SAMPLING)
        actions.append(Sample(request_id, row))

    def _sampled(self, event: Sampled, actions: list[SchedulerAction]) -> None:
        if (state := self._open(event.request)) is None:
            return  # stopped meanwhile
        state.logits_request, state.keeps = event.logits_request, state.keeps or event.logits_request.keeps
        if event.finish is Finish.END_OF_TEXT:
            self._end(state, event.finish, actions)
            return
        state.enter(Phase.DECODING)
        dead = state.accept(event.token, event.n_draws)
        state.root_since = self._now
        root = state.tree.root
        drafters = sorted({proposal.drafter for proposal in root.proposals}) if root.submitted else ()
        actions.append(Emit(event.request, event.token, tuple(drafters)))
        if event.finish is not None:
            self._end(state, event.finish, actions)
        elif state.epoch == state.n_predict:
            self._end(state, Finish.LENGTH, actions)
        elif root.pos >= self._admission.extended(state):
            self._end(state, Finish.CONTEXT_FULL, actions)
        else:
            self._cancel(self._in_flight.drop(state, dead), actions, state, dead)
            self._sample(state, actions)
            if state.phase is Phase.DECODING and state.request.drafts:
                self._to_drafters += self._steering.accepted(state, self._open_states())
        self._admit(actions)  # rejected draft tokens may have held the cells that the next request needs

    def _drafted(self, micro_batch: MicroBatch) -> None:
        if (state := self._open(micro_batch.request)) is not None:
            nodes = state.add(micro_batch, self._now)
            if micro_batch.expansions:
                self._to_drafters += self._steering.drafted(micro_batch.drafter, state, self._open_states(), nodes)
