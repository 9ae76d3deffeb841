"""A draft model as a drafter: which tokens it decodes next, and which draft tokens it sends to the head.

It keeps a tree for each request. The root is the last token known to be accepted, and nodes that were decoded have
cells in the draft model's KV cache. One run decodes the tips of the most probable branches. Each result has candidates,
some of which become children (`draft_state`): these are the draft tokens, which are sent to the head at once. The depth
below the root is limited, so drafting stops on its own and continues when a token is accepted. The tree then moves like
the target's: the branch with the token is kept, including its KV cells. A token that was not drafted is decoded anew.

The cells of ended requests are kept for prompts that begin in the same way (`prefix_cache`).

With a window, the draft model sees only the latest tokens of a long text. Otherwise each token would take longer, the
longer the text, although the next tokens rarely depend on distant ones. It reads the end of the prompt, and positions
count from there. The place where it begins moves in steps, so that the next message of a conversation usually finds it
in the prefix cache. Output that no longer fits is hidden, the oldest first: its cells are freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import structs

from ggpipe.core.draft_messages import Accepted, BeginDrafting, EndDrafting, Expansion, MicroBatch, Shared
from ggpipe.core.drafters.adjusted_rows import N_MORE
from ggpipe.core.drafters.base import DraftAction, DraftEvent, DraftPipeline, ToHead
from ggpipe.core.drafters.draft_runs import n_best_first, rows_beside
from ggpipe.core.drafters.draft_state import DraftState
from ggpipe.core.drafters.foresight import N_CANDIDATES, Foresight, Mixture
from ggpipe.core.events import RunDone, RunEnded, SubmitRun, Tick
from ggpipe.core.in_flight import InFlight, RunPart, cancel_action, records_of
from ggpipe.core.kv.prefix_cache import PrefixCache
from ggpipe.core.messages import LogitsKind, LogitsRequest, Row, RunResult, Save
from ggpipe.core.prompt_chunks import chunk_end
from ggpipe.core.run_cost import RunCost
from ggpipe.core.tree import Node

_STEPS = 4
"""Parts of a window: a draft model reads more than one and at most two of a long prompt."""
_SHORTEST_ATTEMPT_S = 1e-3  # before any run of draft tokens has shown how long one takes
_MIN_CANDIDATES = 4  # of each answer; some more than become draft tokens, for whoever records what the draft proposed
_BEST_FIRST_CANDIDATES = 8  # of each answer, for trees that grow best-first


class DraftModel:
    """The drafter (see the module's docstring), for any number of requests. One run of draft tokens is in flight at a
    time."""

    def __init__(self, drafter: int, pipeline: DraftPipeline) -> None:
        """`drafter`: id of this drafter. `pipeline`: the draft model's pipeline."""
        limits = self._limits = pipeline.limits
        self._vocabularies = pipeline.vocabularies
        self._drafter = drafter
        self._window = pipeline.window if limits.rolls_back else 0
        self._in_flight: InFlight[DraftState] = InFlight(limits.n_seq, limits.n_requests + limits.n_prefixes)
        self._prefixes = PrefixCache(limits, self._in_flight.ids, self._in_flight.ops, pipeline.restored)
        self._requests: dict[int, DraftState] = {}
        self._cost = RunCost()
        """Times of runs of draft tokens."""
        self._mixtures = {is_sorted: Mixture() for is_sorted in (False, True)}
        """For foresight, by whether the samplers sort the candidates."""
        self._attempt_s = 0.0
        """Time of the latest run of draft tokens, in seconds."""

    def handle(self, event: DraftEvent, now: float) -> list[DraftAction]:
        """Take in one event that happened at `now` (seconds, any clock that does not go back).

        Raises ValueError for a run that is not in flight.
        """
        actions: list[DraftAction] = []
        match event:
            case BeginDrafting():
                self._begin(event)
            case Accepted():
                self._accepted(event, actions)
            case Shared(request, epoch, tokens):
                state = self._requests.get(request)
                if state is not None and state.epoch == epoch and self._limits.rolls_back:
                    state.share(tokens)
            case EndDrafting(request):
                self._done(request, now, actions)
            case RunEnded(result):
                self._run_ended(result, now, actions)
            case Tick():
                for state in self._requests.values():
                    if state.retry_at is not None and now >= state.retry_at:
                        state.retry_at = None
        for state in self._requests.values():
            for micro_batch in state.grow():
                self._send(state, micro_batch, False, actions)
        self._decode(now, actions)
        for state in self._requests.values():
            self._settle(state, now, actions)
        if self._in_flight.ops and not self._requests:  # no run is coming that could carry them
            actions.append(self._in_flight.submit_ops(now))
        return actions

    @property
    def wake_at(self) -> float | None:
        """When to send `Tick`, by the clock of `now`; None when only other events matter."""
        return min((g.retry_at for g in self._requests.values() if g.retry_at is not None), default=None)

    def validate(self) -> None:
        """Check what must hold between events. Raises AssertionError."""
        trees = [(state, state.tree.validate()) for state in self._requests.values()]
        self._in_flight.validate(trees)
        self._prefixes.validate()
        taken = sum(len(ids) for _, ids in trees) + len(self._prefixes)
        assert len(self._in_flight.ids) == self._limits.n_seq - taken, "an id is lost"
        assert self._prefixes.n_cells + self._n_used <= self._limits.n_ctx
        for state in self._requests.values():
            assert state.tokens[-1] == state.tree.root.token
            assert state.tree.root.pos == len(state.tokens) - 1
            assert all(best and not state.has_drafted_after(node) for node, best in state.open.items())

    # The text

    def first_read(self, begin: BeginDrafting) -> int:
        """The first token of a prompt that the draft model reads."""
        n_prompt, step = len(begin.prompt), max(self._window // _STEPS, 1)
        if not self._window or n_prompt + begin.n_left <= self._window:
            return 0
        return max(-(-(n_prompt - self._window // 2) // step), 0) * step

    def _begin(self, begin: BeginDrafting) -> None:
        begin = structs.replace(begin, prompt=begin.prompt[self.first_read(begin) :])
        prefix = self._prefixes.open(begin.prompt, begin.cache_prompt)
        self._requests[begin.request] = DraftState.of(begin, prefix, self._foresight(begin))

    def _foresight(self, begin: BeginDrafting) -> Foresight | None:
        if begin.drawing is None or not begin.speculation.is_best_first:
            return None
        return Foresight(begin.drawing, self._mixtures[begin.drawing.is_sorted])

    def _accepted(self, message: Accepted, actions: list[DraftAction]) -> None:
        state = self._requests.get(message.request)
        if state is None:
            return
        state.look_ahead, state.least_path = message.look_ahead, message.least_path
        if state.held:  # they are numbered from this epoch's root
            self._send_held(state, False, actions)
        state.take_numbers(message)
        dead = state.accept(message.tokens, message.epoch)
        if self._window and state.n_decoded - state.n_hidden > self._window:
            state.hide()
        self._cancel(self._in_flight.drop(state, dead), actions)

    def _done(self, request: int, now: float, actions: list[DraftAction]) -> None:
        state = self._requests.pop(request, None)
        if state is not None:
            clean = not self._in_flight.of(state) and not state.tree.n_submitted and not state.n_hidden
            computed = tuple(self._computed(state))
            is_kept = self._prefixes.close(state.prefix, computed, clean)
            if state.begin.saves != "nothing" and not state.is_saved:
                is_wanted = state.saves_prompt or state.begin.saves == "text"
                is_new = is_wanted and is_kept and len(computed) > state.n_cached
                self._save(state, computed if is_new else (), now, actions)
            self._cancel(self._in_flight.leave(state), actions)

    def _cancel(self, runs: Sequence[int], actions: list[DraftAction]) -> None:
        if runs:
            actions.append(cancel_action(self._in_flight.cancel(runs)))

    # Draft tokens

    def _run_ended(self, result: RunResult, now: float, actions: list[DraftAction]) -> None:
        run = self._in_flight.end(result)
        if not run.parts:
            return
        actions.append(RunDone(records_of(run, result)))
        if run.cancelled:
            return
        if not run.n_prompt_rows:
            self._attempt_s = now - run.submitted_at
        if result.slowest_s > 0:
            n_nodes = len(run.run.rows) - run.n_prompt_rows
            if run.n_prompt_rows:
                self._cost.prompt_ended(n_nodes, run.n_prompt_rows, result.slowest_s)
            else:
                self._cost.ended(n_nodes, result.slowest_s, result.total_s)
        for part in run.parts:
            part.owner.add_candidates(part.nodes)
            if part.n_prompt_rows and part.request in self._requests:
                computed = self._computed(part.owner)
                # Cells of output that others share could not be freed.
                shared = computed[: len(part.owner.begin.prompt)] if self._window else computed
                self._prefixes.grow(part.owner.prefix, shared)

    def _settle(self, state: DraftState, now: float, actions: list[DraftAction]) -> None:
        """Send the draft tokens. If no more can follow without a message from the head, say so, or try again soon with
        lower thresholds."""
        waits = self._more_comes(state)
        may_retry = state.may_retry and state.retry_at is None
        if not waits and may_retry and any(state.may_grow(node) for node in state.open):
            state.thresholds.n_failed += 1
            state.retry_at = now + max(self._attempt_s, _SHORTEST_ATTEMPT_S)
        enough = state.n_drafted >= state.begin.speculation.n_min
        complete = not waits and self._is_stuck(state) and not state.complete
        if enough and (complete or state.held):
            self._send_held(state, complete, actions)
        elif complete:
            self._send(state, (), True, actions)

    def _is_stuck(self, state: DraftState) -> bool:
        """Whether no draft tokens can follow until another token is accepted, given that none are on their way."""
        in_turn = not state.overlaps or state.least_path > 0
        return in_turn or (not state.has_drafted_after(state.tree.root) and state.retry_at is None)

    def _more_comes(self, state: DraftState) -> bool:
        """Whether draft tokens may follow without another message."""
        # With nothing in flight at all, nothing could be submitted just now.
        return self._in_flight.n_computed > 0 and (
            any(self._in_flight.is_computed(part.run) for part in self._in_flight.of(state))
            or self._tokens_wait(state)
            or any(True for _ in state.tips())
        )

    def _send_held(self, state: DraftState, complete: bool, actions: list[DraftAction]) -> None:
        self._send(state, tuple(state.held), complete, actions)
        state.held = []

    def _send(
        self, state: DraftState, expansions: tuple[Expansion, ...], complete: bool, actions: list[DraftAction]
    ) -> None:
        state.complete = state.complete or complete
        micro_batch = MicroBatch(
            request=state.begin.request,
            epoch=state.epoch,
            expansions=expansions,
            complete=complete,
            drafter=self._drafter,
            block=state.block_of,
        )
        actions.append(ToHead(micro_batch))

    # The pipeline

    def _computed(self, state: DraftState) -> Sequence[int]:
        """The text, as far as it is computed and may go into the prefix cache."""
        if not state.begin.cache_prompt:
            return ()
        n = self._in_flight.computed(state, state.n_decoded)
        return state.tokens[: min(n, len(state.begin.prompt)) if state.n_hidden else n]

    def _decode(self, now: float, actions: list[DraftAction]) -> None:
        """Submit text first, in chunks; then the tips of all requests in one run, with the next tokens of a prompt that
        is read while other requests draft."""
        reads_in_parts = self._reads_in_parts()
        for state in self._requests.values():
            if reads_in_parts and self._is_reading(state):
                continue
            while self._in_flight.n_computed < self._limits.n_in_flight and self._tokens_wait(state):
                logits_requests: dict[LogitsRequest, int] = {}
                part = self._text_part(state, self._chunk_end(state) - state.n_decoded, logits_requests, now, actions)
                actions.append(self._submit([part], logits_requests, now))
        if self._in_flight.n_computed:
            return
        parts: list[RunPart[DraftState]] = []
        logits_requests, limit = {}, self._limits.n_rows
        n_best = n_best_first(self._requests.values(), self._cost, limit)
        others = list(self._requests.values())
        for reading in [state for state in others if reads_in_parts and self._is_reading(state)][:1]:
            most = min(rows_beside(n_best.total(), self._cost, limit), self._chunk_end(reading) - reading.n_decoded)
            parts.append(self._text_part(reading, most, logits_requests, now, actions))
            limit -= len(parts[0].rows)
            others.remove(reading)
        for state in others:
            n_own = n_best[state] if state.is_best_first else state.begin.speculation.draft_rows
            if nodes := state.tree.place(state.tips(), self._in_flight.next_run, min(n_own, limit, self._free_cells)):
                parts.append(self._part(state, nodes, (), 0, logits_requests))
                limit -= len(nodes)
                self._requests[state.begin.request] = self._requests.pop(state.begin.request)  # others come first next
        if parts:
            actions.append(self._submit(parts, logits_requests, now))

    def _is_reading(self, state: DraftState) -> bool:
        """Whether the next tokens of a request's text that are to be decoded are those of its prompt."""
        return state.n_decoded < len(state.begin.prompt) and self._tokens_wait(state)

    def _reads_in_parts(self) -> bool:
        """Whether prompts are read in runs that are so short that other requests draft meanwhile."""
        if self._limits.n_stages > 1 or not any(state.is_drafting for state in self._requests.values()):
            return False
        return any(self._is_reading(state) for state in self._requests.values())

    def _text_part(
        self,
        state: DraftState,
        most: int,
        logits_requests: dict[LogitsRequest, int],
        now: float,
        actions: list[DraftAction],
    ) -> RunPart[DraftState]:
        """The next tokens of a request's text, at most `most`."""
        at, most = state.n_decoded, min(most, self._free_cells)
        if self._window and at >= len(state.begin.prompt):
            most = min(most, max(self._window // _STEPS, 1))
            if at - state.n_hidden + most > self._window:
                state.hide()
        if state.saves_prompt:
            n_saved = len(state.begin.prompt) - 1
            if at == n_saved:
                self._save(state, state.begin.prompt[:-1], now, actions)
            else:
                most = min(most, n_saved - at)
        chunk = state.tokens[at : at + most]
        state.n_decoded += len(chunk)
        last = state.n_decoded == len(state.tokens)
        nodes = state.tree.place([state.tree.root], self._in_flight.next_run, 1) if last else []
        return self._part(state, nodes, chunk[: len(chunk) - last], at, logits_requests)

    def _chunk_end(self, state: DraftState) -> int:
        """Where the run ends that computes the next tokens of a text, where cells suffice. What follows the prompt is
        short: tokens that were not drafted."""
        start, n_prompt = state.n_cached, len(state.begin.prompt)
        if state.n_decoded >= n_prompt:
            return state.n_decoded + self._limits.n_rows
        n_tokens = len(state.tokens) - start
        n_rows = self._limits.prompt_rows(n_prompt - start, start)
        return start + chunk_end(state.n_decoded - start, n_tokens, n_rows, n_rows)

    def _save(self, state: DraftState, tokens: tuple[int, ...], now: float, actions: list[DraftAction]) -> None:
        state.is_saved = True
        save = Save(state.begin.request, state.tree.seq, tokens)
        actions.append(self._in_flight.submit_save(state, save, now))

    def _submit(
        self, parts: Sequence[RunPart[DraftState]], logits_requests: Iterable[LogitsRequest], now: float
    ) -> SubmitRun:
        self._prefixes.shrink(self._limits.n_ctx - self._n_used)
        return self._in_flight.submit(parts, tuple(logits_requests), now)

    def _tokens_wait(self, state: DraftState) -> bool:
        wanted = state.n_decoded < len(state.tokens) and state.deepest > state.tree.root.pos
        return wanted and self._free_cells > 0

    @property
    def _free_cells(self) -> int:
        return max(self._limits.n_ctx - self._prefixes.n_held - self._n_used, 0)

    @property
    def _n_used(self) -> int:
        """Cells of all requests outside the prefix cache."""
        return sum(state.n_used for state in self._requests.values())

    def _part(
        self,
        state: DraftState,
        nodes: list[Node],
        tokens: Sequence[int],
        at: int,
        logits_requests: dict[LogitsRequest, int],
    ) -> RunPart[DraftState]:
        """One request's rows of a run: `tokens` from position `at` on, then nodes."""
        request, own_seqs = state.begin.request, (state.tree.seq,)
        rows = [
            Row(token=self._readable(token), pos=at + i, seqs=own_seqs, request=request)
            for i, token in enumerate(tokens)
        ]
        if nodes:
            logits_request = logits_requests.setdefault(self._logits_request(state), len(logits_requests))
        for node in nodes:
            seqs = node.sorted_seqs
            rows.append(
                Row(
                    token=self._readable(node.token),
                    pos=node.pos,
                    seqs=seqs,
                    request=request,
                    logits_request=logits_request,
                )
            )
        return RunPart(owner=state, request=request, rows=rows, nodes=nodes, n_draft_tokens=len(nodes))

    def _logits_request(self, state: DraftState) -> LogitsRequest:
        only_draft = self._vocabularies.only_draft if self._vocabularies is not None else ()
        n = _BEST_FIRST_CANDIDATES if state.is_best_first else _MIN_CANDIDATES
        n, temp = max(n, state.begin.speculation.n_parallel), 0.0
        if state.foresight is not None and state.begin.drawing is not None:
            n = max(n, N_CANDIDATES)
            temp = state.begin.drawing.whole_temp
        also: tuple[int, ...] = ()
        if state.begin.adjustments is not None:
            n += N_MORE
            if not temp:  # else shares of the probability are wanted, which come for the best tokens only
                also = tuple(t for t in state.begin.adjustments.raised if self._readable(t) == t)
        return LogitsRequest(LogitsKind.TOP, n, (*state.begin.banned, *only_draft), also=also, temp=temp)

    def _readable(self, token: int) -> int:
        """A token of the text as the draft model can read it. The tree keeps the target's."""
        return token if self._vocabularies is None else self._vocabularies.for_draft(token)
