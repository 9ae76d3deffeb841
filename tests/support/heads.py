"""A scheduler with all that is around a head: fake pipelines and drafts, and what must hold between them."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ggpipe.core.events import (
    Arrived,
    CancelRuns,
    Drafted,
    Embed,
    Emit,
    Fetch,
    Finished,
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
    SubmitRun,
    Tick,
    ToDrafter,
)
from ggpipe.core.messages import LogitsRequest, Restore, Row, RowLogits, Run, RunRecord
from ggpipe.core.prefixes import ErasePrefix, PrefixDone, PrefixOrder
from ggpipe.core.request import DraftCheck, Finish, Limits, Request
from ggpipe.core.request_state import RequestState
from ggpipe.core.scheduler import Scheduler
from support.fake_drafts import Adversary, AnyDraft, RealDraft, TextDraft
from support.fake_model import END, FakeModel, Tokens, chance, is_below
from support.fake_pipeline import NO_FILES, Dropping, FakePipeline, Move, Restored, cut_as_libllama, restorable
from support.own_calibrations import OwnCalibrations
from support.seen import WHOLE, Seen, SeenOrder


class Head:
    """A scheduler, a pipeline, drafts, and all that must hold between them. Nothing moves by itself."""

    def __init__(
        self,
        limits: Limits,
        n_stages: int,
        model: FakeModel,
        drafts: Sequence[AnyDraft],
        restored: Restored = NO_FILES,
        hybrid: bool = False,
        drops: Sequence[Dropping] = (),
    ) -> None:
        """`hybrid`: the model has recurrent layers. `drops`: of each stage."""
        self.limits, self.model = limits, model
        self.drafts = {draft.id: draft for draft in drafts}
        text_drafters = {draft.id: draft for draft in drafts if isinstance(draft, TextDraft)}
        self.scheduler = Scheduler(limits, restored.tokens, text_drafters)
        n_rows = min(limits.n_batch, limits.n_ubatch)
        self.pipeline = FakePipeline(n_stages, limits, n_rows, self._answer, hybrid, drops)
        if restored.tokens is not None:
            self.pipeline.restore(restored.tokens, restored.more)
        self.seen: dict[int, Seen] = {}
        self.draft_check: DraftCheck | None = None
        self.to_sample: collections.deque[Sample] = collections.deque()
        self.to_fetch: collections.deque[Fetch] = collections.deque()
        self.orders: dict[int, SeenOrder] = {}
        self.transfers: list[Run] = []
        """Those that save or restore prefixes."""
        self.calibrations = OwnCalibrations()
        for text_draft in text_drafters.values():
            text_draft.answered = self.calibrations.note
        self.fetched: set[tuple[int, int]] = set()
        """Requests, and how many tokens were sampled when a whole row came."""
        self.kept_from = 0  # as of the last run
        self.fetches = False
        """Half of the requests need whole rows now and then."""
        self.now = 0.0

    def _answer(self, i: int, row: Row, want: LogitsRequest, history: Tokens) -> RowLogits:
        ids = self.model.ranking(history, want.n)
        return RowLogits(i, ids, want.n, want.number)

    # What the outside does

    def order(self, order: PrefixOrder) -> None:
        self.orders[order.id] = SeenOrder(order)
        self.handle(order)

    def arrive(self, request: Request) -> None:
        seen = self.seen[request.id] = Seen(request, n_sampled=request.n_resumed)
        self.handle(Arrived(request, self._want(seen), seen.counters, self.draft_check))

    def resume(self, lost: Head, n_tokens: Callable[[int], int]) -> None:
        """All that another head did not finish goes on here. `n_tokens`: how many of its tokens are known, of all."""
        for seen in lost.seen.values():
            if seen.finish is None:
                self.arrive(seen.request.after(seen.text[: n_tokens(len(seen.text))]))
                if seen.stopped:
                    self.stop(seen.request.id)
        for number, seen_order in lost.orders.items():
            if seen_order.done is None:
                self.order(seen_order.order)
                if seen_order.stopped:
                    self.stop(number)

    def stop(self, request: int) -> None:
        seen = self.seen.get(request)
        if seen is not None and seen.finish is None and (not self._is_over(seen) or seen.request.n_predict == 0):
            seen.stopped = True
        if request in self.orders:
            self.orders[request].stopped = True
        self.handle(StopRequest(request))

    def moves(self) -> list[Move]:
        """All that could happen next."""
        moves: list[Move] = []
        if self.scheduler.wake_at is not None:
            moves.append(("tick", self._tick))
        moves += self.pipeline.moves("target", self._hear_result)
        if self.to_sample:
            moves.append(("sample", self._sample))
        if self._transferred():
            moves.append(("transferred", self._transfer_done))
        if self.to_fetch:
            moves.append(("fetch", self._fetch))
        for draft in self.drafts.values():
            moves += draft.moves()
            if draft.batches:
                moves.append(("draft tokens", functools.partial(self._take_micro_batch, draft)))
        return moves

    def _transferred(self) -> list[Run]:
        """Those that are through all stages. Their results, and those of runs before them, may be on their way yet."""
        return [run for run in self.transfers if all(run.id in stage.past for stage in self.pipeline.stages)]

    def _transfer_done(self) -> None:
        run = self._transferred()[0]
        self.transfers.remove(run)
        assert run.save is not None
        is_whole = not isinstance(run.save, Restore) or restorable(run.save) == run.save.tokens
        self.handle(PrefixDone(run.save.request, 5, () if is_whole else ("damaged",)))

    def drain(self) -> None:
        """Let everything end, the youngest thing first."""
        while moves := self.moves():
            moves[-1][1]()

    def _hear_result(self) -> None:
        run, _ = self.pipeline.results[0]
        seconds = 0.01 * (1 + run.id * 7919 % 13)  # times that say anything of run lengths
        self.handle(RunEnded(self.pipeline.take_result(seconds, seconds * (1 + run.id % 4))))

    def _tick(self) -> None:
        assert self.scheduler.wake_at is not None
        self.now = max(self.now, self.scheduler.wake_at)
        self.handle(Tick())

    def _take_micro_batch(self, draft: AnyDraft) -> None:
        batch = draft.batches.popleft()
        assert batch.drafter == draft.id
        self.handle(Drafted(batch))
        if self.draft_check or not self._is_open(batch.request) or not isinstance(draft, RealDraft):
            return
        state = self.state(batch.request)
        tokens = self.seen[batch.request].tokens
        for expansion in batch.expansions:
            for draft_token in range(expansion.first, expansion.first + expansion.n):
                if is_below(path := draft.paths[batch.request, draft_token], tokens):
                    node = state.tree.root
                    for token in path[len(tokens) :]:
                        node = node.children[token]

    def _sample(self) -> None:
        sample = self.to_sample.popleft()
        seen = self.seen[sample.request]
        if seen.is_stale(sample.row) or self._needs_row(seen):
            self.handle(RowNeeded(sample.request))
            return
        assert seen.n_replayed == len(seen.request.wanted)
        assert sample.row.ids is not None
        assert sample.row.logits >= self._want(seen).n, "fewer logits than sampling takes"
        token = sample.row.ids[self.model.rank(sample.request, seen.n_sampled)]
        n_draws = seen.sampled(sample.row)
        seen.ended = seen.ended or (token == END and not seen.stopped)
        if token != END and self._is_open(sample.request):
            self.calibrations.judge(sample.request, self.state(sample.request), token)
        end = Finish.END_OF_TEXT if token == END else None
        self.handle(Sampled(sample.request, token, self._want(seen), end, n_draws))

    def _needs_row(self, seen: Seen) -> bool:
        """Some requests need whole rows for some of their tokens."""
        now = (seen.request.id, seen.n_sampled)
        return self._want(seen).keeps and chance(3, *now) % 3 == 0 and now not in self.fetched

    def _fetch(self) -> None:
        fetch = self.to_fetch.popleft()
        seen = self.seen[fetch.request]
        self.fetched.add((fetch.request, seen.n_sampled))
        assert self.kept_from <= fetch.run or not self._is_open(fetch.request), "the row is not kept any more"
        history = self.pipeline.rows_of[fetch.run][fetch.row][1]
        want = self._want(seen)
        self.handle(RowFetched(fetch.request, RowLogits(fetch.row, self.model.ranking(history, want.n), want.n, WHOLE)))

    def _want(self, seen: Seen) -> LogitsRequest:
        return seen.want(keeps=self.fetches and seen.request.id % 2 == 1)

    # What must hold

    def handle(self, event: SchedulerEvent) -> None:
        self.now += 0.001
        for action in self.scheduler.handle(event, self.now):
            self._act(action)
        if isinstance(event, Drafted):
            self.calibrations.note(event.micro_batch, self.scheduler._states.get(event.micro_batch.request))
        self.scheduler.validate()
        for seen in self.seen.values():
            self._check_request(seen)
        self._check_runs()

    def _act(self, action: SchedulerAction) -> None:
        match action:
            case SubmitRun(run):
                self._submitted(run)
            case Sample(request):
                assert not self._is_over(self.seen[request]) or self.seen[request].request.n_predict == 0
                assert all(sample.request != request for sample in self.to_sample)
                self.to_sample.append(action)
            case Fetch(request):
                assert all(fetch.request != request for fetch in self.to_fetch)
                self.to_fetch.append(action)
            case Replay(request, rows) | Embed(request, rows):
                seen = self.seen[request]
                for row in rows:
                    place = [*seen.request.wanted, len(seen.request.prompt) - 1][seen.n_replayed]
                    assert row.ids == self.model.ranking(seen.request.prompt[: place + 1], len(row.ids or ()))
                    seen.n_replayed += 1
            case Emit(request, token, drafters):
                seen = self.seen[request]
                assert not self._is_over(seen)
                seen.text.append(token)
                assert bool(drafters) == ((request, seen.tokens) in self.pipeline.run_of)
                assert set(drafters) <= set(seen.request.drafters)
                seen.n_drafted += bool(drafters)
            case CancelRuns(runs, dead_rows):
                self.pipeline.cancel(action)
                for run_id, number in dead_rows:
                    request, history = self.pipeline.rows_of[run_id][number]
                    assert self.limits.drops_rows
                    assert self._of(request).may_cancel
                    assert not self._of(request).lives(history), "a row that lives is dropped"
                for run_id in runs:
                    assert self._is_dead(run_id)
                    for request in {row.request for row in self.pipeline.in_flight[run_id].rows}:
                        assert self._of(request).may_cancel or not self._is_open(request)
            case ToDrafter(drafter, message):
                self.drafts[drafter].steering.append(message)
            case RunDone(records):
                for record in records:
                    self._run_done(record, record.request)
            case Finished(request, reason):
                self._finished(self.seen[request], reason)
            case PrefixDone(request):
                self._order_done(self.orders[request], action)

    def _submitted(self, run: Run) -> None:
        self.pipeline.submit(run)
        assert run.kept_from <= run.id
        self.kept_from = max(self.kept_from, run.kept_from)
        if run.save is not None and run.save.request in self.orders:
            self.transfers.append(run)
        if not run.rows:
            done = [seen.finish for seen in self.seen.values()] + [seen.done for seen in self.orders.values()]
            assert run.save or self.limits.n_pauses or None not in done
            return
        fresh = False
        for request in {row.request for row in run.rows}:
            if request in self.orders:
                self.orders[request].computed(run)
                continue
            seen = self.seen[request]
            assert not self._is_over(seen) or not seen.text
            histories = [history for of, history in self.pipeline.rows_of[run.id] if of == request]
            seen.submitted(run, histories)
            fresh = fresh or (bool(seen.text) and seen.tokens in histories)
        assert fresh or len(self.pipeline.beside(run)) <= self.limits.n_in_flight * (2 - self.limits.rolls_back)

    def _order_done(self, seen: SeenOrder, done: PrefixDone) -> None:
        assert seen.done is None
        assert seen.n_done == seen.n_runs
        seen.done = done
        flying = [row for run in self.pipeline.in_flight.values() for row in run.rows]
        assert all(row.request != seen.order.id for row in flying)
        is_erased = isinstance(seen.order, ErasePrefix)
        if is_erased:
            assert seen.order.tokens not in self.scheduler._prefixes.kept.values()
        assert done.n_bytes == 5 or is_erased or seen.stopped
        assert seen.n_positions in (0, len(seen.order.tokens)) or seen.stopped

    def _run_done(self, record: RunRecord, request: int) -> None:
        if request in self.orders:
            self.orders[request].n_done += 1
            return
        self.seen[request].run_done(record)

    def _is_over(self, seen: Seen) -> bool:
        full = len(seen.tokens) > self.limits.n_ctx
        return seen.stopped or seen.ended or full or len(seen.text) == seen.request.n_predict

    def state(self, request: int) -> RequestState:
        """Of a request that is being served."""
        state = self.scheduler._states[request]
        assert isinstance(state, RequestState)
        return state

    def _of(self, number: int) -> Seen | SeenOrder:
        return self.orders[number] if number in self.orders else self.seen[number]

    def _is_open(self, request: int) -> bool:
        state = self.scheduler._states.get(request)
        return state is not None and state.is_open

    def _is_dead(self, run: int) -> bool:
        rows = self.pipeline.rows_of[run]
        return not any(self._is_open(request) and self._of(request).lives(history) for request, history in rows)

    def _check_request(self, seen: Seen) -> None:
        if seen.finish is not None or seen.request.id not in self.scheduler._states:
            return
        seen.check_counters(self.scheduler.counters(seen.request.id))
        self.calibrations.check(seen.request.id, self.state(seen.request.id))

    def _check_runs(self) -> None:
        kept: list[int] = []
        for run in reversed(self.pipeline.live):
            may_cancel = all(self._of(row.request).may_cancel or not self._is_open(row.request) for row in run.rows)
            needed = any(self.pipeline.depends(other, [run.id]) for other in kept)
            assert needed or not may_cancel or not self._is_dead(run.id), "a run that nobody needs goes on"
            for row, (request, history) in enumerate(self.pipeline.rows_of[run.id]):
                dies = self.limits.drops_rows and self._is_open(request) and self._of(request).may_cancel
                is_told = (run.id, row) in self.pipeline.dead_rows
                assert not dies or is_told != self._of(request).lives(history), "a dead row is computed"
            kept.append(run.id)

    def _finished(self, seen: Seen, reason: Finish) -> None:
        assert seen.finish is None
        assert seen.n_done == len(seen.runs)
        seen.finish = reason
        flying = [row for run in self.pipeline.in_flight.values() for row in run.rows]
        assert all(row.request != seen.request.id for row in flying)
        request, n_resumed = seen.request, seen.request.n_resumed
        prompt = request.prompt[: len(request.prompt) - n_resumed]
        n_predict = request.n_predict + n_resumed if request.n_predict >= 0 else -1
        whole, why = self.model.text(request.id, prompt, n_predict, self.limits.n_ctx)
        text = whole[n_resumed:]
        assert request.prompt == (*prompt, *whole[:n_resumed])
        in_company = len(self.seen) + len(self.orders) > 1
        if reason is Finish.STOPPED:
            assert seen.stopped
            assert seen.text == text[: len(seen.text)]
        elif in_company and reason is Finish.CONTEXT_FULL and request.n_predict < 0:  # others have a part of the cells
            assert len(seen.tokens) > self.limits.n_ctx // self.limits.n_requests
            assert seen.text == text[: len(seen.text)]
        else:
            assert not seen.stopped or request.n_predict == 0
            assert (seen.text, reason) == (text, why)
            assert seen.n_sampled == len(whole) + (why is Finish.END_OF_TEXT)
            if n_resumed and not text and why is not Finish.END_OF_TEXT:
                assert not seen.runs, "it was over before it was resumed"
                return
        if request.embeds and reason is not Finish.STOPPED:
            assert seen.n_replayed == len(request.wanted) + 1
        n_prompt, lengths = len(request.prompt), seen.chunks
        if in_company or seen.counters.cached_tokens or not self.limits.partial_prefixes:
            assert sum(lengths) == n_prompt - seen.counters.cached_tokens or seen.stopped
        else:
            expected = cut_as_libllama(n_prompt, self.limits.n_batch, self.limits.prompt_rows(n_prompt, 0))
            if request.saves == "prompt" and expected[-1] > 1:  # the last token comes behind what is saved
                expected[-1:] = [expected[-1] - 1, 1]
            assert lengths == (expected[: len(lengths)] if seen.stopped else expected)

    def check_end(self) -> None:
        """Nothing can happen any more."""
        assert all(seen.finish is not None for seen in self.seen.values()), "a request is stuck"
        assert all(seen.done is not None for seen in self.orders.values()), "an order is stuck"
        assert not self.to_sample
        if self.scheduler._prefixes._restored is None:  # else it stays where it is until the first request
            self.pipeline.check_empty(self.scheduler._prefixes.kept)
        self.scheduler.validate()
        for draft in self.drafts.values():
            draft.check_empty()


def opened(**limits: int) -> Head:
    """A head with one stage whose draft says what the test wants it to say."""
    known: dict[str, Any] = {"n_ctx": 64, "n_batch": 8, "n_ubatch": 4, "n_in_flight": 2, "n_seq": 4} | limits
    return Head(Limits(**known), 1, FakeModel(1000), [Adversary(FakeModel(1000), 1.0, 0)])
