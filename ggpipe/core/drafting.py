"""The draft's state machine: what the draft model decodes next, and which guesses go to the head.

    handle(event, now) -> list[Action]

It has a tree of its own for each request, with the draft's KV cache behind it, and the last token it knows accepted as
its root. It decodes the tips of the most probable branches, all in one run; each answer gives candidates, of which the
policy takes some as children: the guesses, which are streamed to the head at once. How far it runs ahead is bounded
from the root, so it stops by itself and goes on when a token is accepted. Then its tree moves as the target's does: the
branch that holds the token stays, cells and all; a token that it did not guess is decoded afresh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ggpipe.core.events import Cancel, Limits, RunEnded, Submit, Tick
from ggpipe.core.messages import (
    ROOT,
    Accepted,
    Begin,
    Done,
    Expansion,
    KvOp,
    MicroBatch,
    Row,
    RowLogits,
    Run,
    Steering,
    Want,
    WantKind,
)
from ggpipe.core.policy import PipeInferPolicy
from ggpipe.core.tree import Node, SequenceIds, Tree

_SHORTEST_ATTEMPT_S = 1e-3  # before any run of guesses has told how long one takes
_MIN_CANDIDATES = 4  # of each answer; some more than are guessed, for whoever records what the draft thought


@dataclass(frozen=True, slots=True)
class Send:
    """Guesses for the head."""

    batch: MicroBatch


DraftEvent = Steering | RunEnded | Tick
DraftAction = Submit | Cancel | Send


@dataclass(slots=True)
class _Draft:
    """A request that is guessed for."""

    begin: Begin
    tree: Tree
    want: Want
    policy: PipeInferPolicy
    text: list[int]
    """Prompt and accepted tokens; the root is the last."""
    lead: int
    """How much deeper than the root the deepest guess may be."""
    n_decoded: int = 0
    """Of these, the ones that are submitted."""
    epoch: int = 0
    open: list[Node] = field(default_factory=list)
    """Answered, and without children so far."""
    next_guess: int = ROOT + 1
    n_batch: int = 0
    """Guesses in this micro-batch so far."""
    held: list[Expansion] = field(default_factory=list)
    """Not sent yet."""
    complete: bool = False
    """The head knows that nothing more is coming at this epoch."""
    retry_at: float | None = None

    @property
    def overlaps(self) -> bool:
        """Guesses go on while guesses are verified; else a micro-batch for each epoch, and no more."""
        return self.begin.speculation.mode == "async" and self.begin.speculation.continuous

    @property
    def batch_is_full(self) -> bool:
        return self.n_batch >= self.begin.speculation.n_draft

    @property
    def deepest(self) -> int:
        """Position of the last guess that is of use now."""
        return self.tree.root.pos + min(self.lead, self.begin.n_left - self.epoch - 1)

    @property
    def reserve(self) -> int:
        """Cells that the text may take up."""
        return len(self.begin.prompt) + self.begin.n_left

    @property
    def n_used(self) -> int:
        """Cells in use."""
        return self.n_decoded + self.tree.n_submitted

    def may_grow(self, node: Node) -> bool:
        """Children of this node would be of use now."""
        return node.pos < self.deepest and (self.overlaps or not self.batch_is_full)


@dataclass(slots=True)
class _Flight:
    draft: _Draft | None
    nodes: list[Node]
    n_text: int
    n_live: int
    submitted_at: float
    cancelled: bool = False


class Drafter:
    """See the module's text. It serves several requests; one run of guesses is in flight at a time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._ids = SequenceIds(limits.n_seq)
        self._ids.kept = limits.n_requests
        self._ops: list[KvOp] = []
        self._next_run = 1
        self._drafts: dict[int, _Draft] = {}
        self._flights: dict[int, _Flight] = {}
        self._attempt_s = 0.0

    def handle(self, event: DraftEvent, now: float) -> list[DraftAction]:
        """Take in one event that happened at `now` (seconds, any clock that does not go back)."""
        actions: list[DraftAction] = []
        match event:
            case Begin():
                self._begin(event)
            case Accepted(request, epoch, tokens, lead):
                if (draft := self._drafts.get(request)) is not None:
                    draft.lead = lead
                    self._accepted(draft, epoch, tokens, actions)
            case Done(request):
                self._done(request, actions)
            case RunEnded(run, rows):
                self._run_ended(run, rows, now)
            case Tick():
                for draft in self._drafts.values():
                    if draft.retry_at is not None and now >= draft.retry_at:
                        draft.retry_at = None
        for draft in self._drafts.values():
            self._grow(draft, actions)
        self._decode(now, actions)
        for draft in self._drafts.values():
            self._settle(draft, now, actions)
        if self._ops and not self._drafts:  # no run is coming that could carry them
            self._put(None, [], (), now, actions)
        return actions

    @property
    def wake_at(self) -> float | None:
        """When to say `Tick`, by the clock of `now`; None when only other events matter."""
        return min((d.retry_at for d in self._drafts.values() if d.retry_at is not None), default=None)

    # The text

    def _begin(self, begin: Begin) -> None:
        n = max(_MIN_CANDIDATES, begin.speculation.n_parallel)
        tree = Tree(self._ids, self._ops, begin.prompt[-1], len(begin.prompt) - 1)
        want = Want(WantKind.TOP, n, begin.banned)
        policy = PipeInferPolicy(begin.speculation)
        self._drafts[begin.request] = _Draft(begin, tree, want, policy, list(begin.prompt), begin.lead)

    def _accepted(self, draft: _Draft, epoch: int, tokens: tuple[int, ...], actions: list[DraftAction]) -> None:
        if draft.held:  # they are numbered from this epoch's root
            self._send(draft, False, True, actions)
        hopeless = []
        for token in tokens:
            for node in draft.tree.advance(token):
                flight = self._flights.get(node.run)
                if flight is not None:
                    flight.n_live -= 1
                    if flight.n_live == 0 and not flight.cancelled:
                        flight.cancelled = True
                        hopeless.append(node.run)
            draft.text.append(token)
            if draft.tree.root.submitted:
                draft.n_decoded = len(draft.text)
        if hopeless:
            actions.append(Cancel(tuple(hopeless)))
        root = draft.tree.root
        draft.open = [node for node in draft.open if node.within(root)]
        draft.epoch, draft.complete, draft.retry_at = epoch, False, None
        draft.n_batch = 0 if draft.overlaps else sum(1 for _ in root.below())
        draft.policy.accepted()

    def _done(self, request: int, actions: list[DraftAction]) -> None:
        draft = self._drafts.pop(request, None)
        if draft is None:
            return
        draft.tree.close()
        runs = tuple(run for run, flight in self._flights.items() if flight.draft is draft and not flight.cancelled)
        for run in runs:
            self._flights[run].cancelled = True
        if runs:
            actions.append(Cancel(runs))

    # Guesses

    def _run_ended(self, run: int, rows: tuple[RowLogits, ...], now: float) -> None:
        flight = self._flights.pop(run, None)
        if flight is None:
            raise ValueError(f"run {run} is not in flight")
        draft = flight.draft
        if draft is None or flight.cancelled:
            return
        if not flight.n_text:
            self._attempt_s = now - flight.submitted_at
        for row in rows:
            node = flight.nodes[row.row - flight.n_text]
            node.answer = candidates(row)
            if node.within(draft.tree.root):
                draft.open.append(node)

    def _grow(self, draft: _Draft, actions: list[DraftAction]) -> None:
        """Turn answers into guesses, as far as the policy and the lead allow."""
        if not draft.open:
            return
        root = draft.tree.root
        n_tips = sum(not node.children for node in (root, *root.below()))
        policy, speculation = draft.policy, draft.begin.speculation
        draft.open.sort(key=lambda node: -node.log_path)
        waiting, draft.open = draft.open, []
        for node in waiting:
            best = node.answer[0]
            if not draft.may_grow(node) or best[1] < policy.cutoff:
                draft.open.append(node)
                continue
            if best[0] in draft.begin.ends:
                continue
            n, room = 1, speculation.n_draft - draft.n_batch
            while (
                n < min(len(node.answer), room)
                and n_tips < speculation.n_parallel
                and node.answer[n][1] >= policy.split
                and node.answer[n][0] not in draft.begin.ends
            ):
                n += 1
                n_tips += 1
            for i, (token, prob) in enumerate(node.answer[:n]):
                draft.tree.add(node, token, prob, draft.next_guess + i)
            parent = ROOT if node is root else node.guess
            draft.held.append(Expansion(parent, draft.next_guess, n, node.answer))
            draft.next_guess += n
            draft.n_batch += n
            if draft.overlaps and draft.batch_is_full:
                self._send(draft, False, True, actions)
                draft.n_batch = 0
                policy.n_batches += 1

    def _settle(self, draft: _Draft, now: float, actions: list[DraftAction]) -> None:
        """Send what was guessed. When nothing more comes by itself: say so, or try again soon with a lower cutoff."""
        live = [flight for flight in self._flights.values() if not flight.cancelled]
        # With nothing in flight at all, nothing could be submitted just now.
        waits = bool(live) and (any(flight.draft is draft for flight in live) or self._has_work(draft))
        may_retry = draft.overlaps and draft.retry_at is None and draft.policy.relents
        if not waits and may_retry and any(draft.may_grow(node) for node in draft.open):
            draft.policy.n_rejected += 1
            draft.retry_at = now + max(self._attempt_s, _SHORTEST_ATTEMPT_S)
        enough = draft.n_batch >= draft.begin.speculation.n_min
        stuck = not draft.overlaps or (not draft.tree.root.children and draft.retry_at is None)
        complete = not waits and stuck and not draft.complete
        if complete or (enough and draft.held):
            self._send(draft, complete, enough, actions)

    def _send(self, draft: _Draft, complete: bool, guesses: bool, actions: list[DraftAction]) -> None:
        expansions = tuple(draft.held) if guesses else ()
        draft.complete = draft.complete or complete
        actions.append(Send(MicroBatch(draft.begin.request, draft.epoch, expansions, complete)))
        if guesses:
            draft.held = []

    # The pipeline

    def _decode(self, now: float, actions: list[DraftAction]) -> None:
        """Text first, in chunks; then the tips of one request."""
        n_live = sum(not flight.cancelled for flight in self._flights.values())
        for draft in self._drafts.values():
            while n_live < self._limits.n_in_flight and self._text_waits(draft):
                at = draft.n_decoded
                chunk = draft.text[at : at + min(self._limits.n_rows, self._free_cells(draft))]
                draft.n_decoded += len(chunk)
                last = draft.n_decoded == len(draft.text)
                nodes = draft.tree.place([draft.tree.root], self._next_run, 1) if last else []
                self._put(draft, nodes, chunk[: len(chunk) - last], now, actions, at)
                n_live += 1
        if n_live:
            return
        for draft in list(self._drafts.values()):
            most = min(draft.begin.speculation.n_parallel, self._limits.n_rows, self._free_cells(draft))
            if nodes := draft.tree.place(self._tips(draft), self._next_run, most):
                self._put(draft, nodes, [], now, actions)
                self._drafts[draft.begin.request] = self._drafts.pop(draft.begin.request)  # the others are next
                return

    def _has_work(self, draft: _Draft) -> bool:
        return self._text_waits(draft) or bool(self._tips(draft))

    def _text_waits(self, draft: _Draft) -> bool:
        wanted = draft.n_decoded < len(draft.text) and draft.deepest > draft.tree.root.pos
        return wanted and self._free_cells(draft) > 0

    def _tips(self, draft: _Draft) -> list[Node]:
        """Guesses to decode, the most probable path first."""
        return [node for node in draft.tree.waiting if draft.may_grow(node)]

    def _free_cells(self, draft: _Draft) -> int:
        others = (max(other.reserve, other.n_used) for other in self._drafts.values() if other is not draft)
        return max(self._limits.n_ctx - sum(others) - draft.n_used, 0)

    def _put(
        self,
        draft: _Draft | None,
        nodes: list[Node],
        text: Sequence[int],
        now: float,
        actions: list[DraftAction],
        at: int = 0,
    ) -> None:
        """Put a run into the pipeline: `text` from position `at` on, then nodes."""
        rows: list[Row] = []
        wants: tuple[Want, ...] = ()
        if draft is not None:
            request = draft.begin.request
            rows = [Row(token, at + i, (draft.tree.own,), request) for i, token in enumerate(text)]
            rows += [Row(node.token, node.pos, tuple(sorted(node.seqs)), request, 0) for node in nodes]
            wants = (draft.want,) if nodes else ()
        run = Run(self._next_run, draft.epoch if draft else 0, tuple(rows), tuple(self._ops), wants)
        self._next_run += 1
        self._ops.clear()
        self._flights[run.id] = _Flight(draft, nodes, len(text), len(nodes), now)
        actions.append(Submit(run, len(nodes)))


def candidates(row: RowLogits) -> tuple[tuple[int, float], ...]:
    """A row's best tokens with their probabilities, best first."""
    assert row.ids is not None
    return tuple((token, math.exp(x - row.log_sum_exp)) for token, x in zip(row.ids, row.logits, strict=True))
