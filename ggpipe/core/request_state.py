"""What the scheduler knows of a request.

phase       leaves when                                                to
PREFILL     the prompt's last chunk is submitted                       DECODING
            its prompt is to be restored from disk                     RESTORING
RESTORING   all stages have done so                                    ENDING
DECODING    the logits of the last accepted token are back             SAMPLING
SAMPLING    the next token is sampled                                  DECODING
any above   the text ends, is long enough, fills the context,          ENDING
            or the user stops it
ENDING      its last run came back                                     ENDED

A request that waits to be admitted has no state yet: the scheduler holds it in a queue.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ggpipe.core.draft_messages import ROOT, Begin, MicroBatch
from ggpipe.core.drafters.calibration import Calibration, Pace
from ggpipe.core.messages import Want, WantKind
from ggpipe.core.radix_tree import Prefix
from ggpipe.core.request import Counters, DraftCheck, Finish, Request
from ggpipe.core.tree import Node, Tree

_MOST_WHOLE_ROWS = 64  # in a run, of a prompt: libllama has room for all tokens' logits of each


class Phase(enum.Enum):
    """Where a request is, see the module's text."""

    PREFILL = enum.auto()
    RESTORING = enum.auto()
    DECODING = enum.auto()
    SAMPLING = enum.auto()
    ENDING = enum.auto()
    ENDED = enum.auto()


_NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.PREFILL: frozenset({Phase.RESTORING, Phase.DECODING, Phase.ENDING}),
    Phase.RESTORING: frozenset({Phase.ENDING}),
    Phase.DECODING: frozenset({Phase.SAMPLING, Phase.ENDING}),
    Phase.SAMPLING: frozenset({Phase.DECODING, Phase.ENDING}),
    Phase.ENDING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


class DrafterState:
    """What the head knows of one drafter's work for a request."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.pace = Pace()
        self.nodes: dict[int, Node] = {}
        """Live draft tokens by their numbers."""
        self.accepted: dict[int, int] = {}
        """Draft tokens that became text: number -> tokens accepted with it."""
        self.complete = False
        """It sends no more draft tokens below this root."""


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState:
    """A request that is being served."""

    request: Request
    want: Want
    """What sampling the next token takes."""
    prefix: Prefix
    """What the prefix cache had of its prompt, and its tree."""
    reserve: int
    """Cells that its text may take up, those of its prefix included."""
    keeps: bool
    """Some of its rows are kept (`Want.keeps`): what it wants may have changed since they were submitted."""
    phase: Phase = Phase.PREFILL
    finish: Finish | None = None
    """Why it ends; None before `Phase.ENDING`."""
    n_past: int = 0
    """Prompt tokens that are submitted, or were in the prefix cache."""
    text: list[int] = field(default_factory=list)
    """Accepted tokens; their number is the epoch."""
    n_sent: int = 0
    """Accepted tokens that the drafters were sent."""
    drafters: dict[int, DrafterState] = field(default_factory=dict)
    lead: int = 0
    """How far the drafters may be ahead of the root, as they were sent last."""
    counters: Counters = field(default_factory=Counters)
    root_waits_until: float | None = None
    """A fresh root waits so long for draft tokens that go into its run."""
    root_since: float = 0.0
    """When the root was accepted."""
    draft_check: DraftCheck | None = None
    is_fetching: bool = False
    """The root's whole row is on its way."""
    is_saved: bool = False
    """All that is to be saved of its prompt is."""

    def enter(self, phase: Phase) -> None:
        """Go on to another phase."""
        assert phase in _NEXT[self.phase], f"from {self.phase} to {phase}"
        self.phase = phase

    @property
    def tree(self) -> Tree:
        """Its draft tokens."""
        return self.prefix.tree

    @property
    def is_open(self) -> bool:
        """It goes on."""
        return self.finish is None

    @property
    def epoch(self) -> int:
        """Accepted tokens."""
        return len(self.text)

    def cut(self, end: int) -> int:
        """Where a run's part of the prompt ends that would reach up to `end`: at the next checkpoint at the latest."""
        borders = (checkpoint.position for checkpoint in self.prefix.checkpoints)
        return min((end, *(border for border in borders if border > self.n_past)))

    @property
    def n_used(self) -> int:
        """Cells in use outside the prefix cache."""
        return self.tree.root.pos + 1 + self.tree.n_submitted - self.prefix.n_tokens

    @property
    def n_reserved(self) -> int:
        """Cells outside the prefix cache that its text may take up."""
        return self.reserve - self.prefix.n_tokens

    @property
    def n_cells(self) -> int:
        """Cells outside the prefix cache that others may not take."""
        return max(self.n_reserved, self.n_used)

    @property
    def n_in(self) -> int:
        """Tokens of prompt and text that are in the pipeline, or were."""
        root = self.tree.root
        return root.pos + root.submitted if self.text or root.submitted else self.n_past

    @property
    def saves_prompt(self) -> bool:
        """Its prompt is saved as soon as all but its last token is in the pipeline."""
        new = len(self.request.prompt) - 1 > self.counters.cached_tokens
        return self.request.saves == "prompt" and (new or self.request.task is not None) and not self.is_saved

    def prompt_end(self, n_most: int) -> int:
        """Where the next run may end in its prompt, with so many rows of it at most."""
        end, wanted = self.n_past + n_most, self.request.wanted
        if self.saves_prompt:
            end = min(end, len(self.request.prompt) - 1)
        if self.n_past < wanted.stop and self.want.kind is not WantKind.TOP:
            end = min(end, max(wanted.start, self.n_past) + _MOST_WHOLE_ROWS)
        return end

    def begin(self, n_ctx: int) -> Begin:
        """What drafters are sent of it, in a context of that size."""
        request = self.request
        return Begin(
            request=request.id,
            prompt=request.prompt,
            n_left=(self.reserve if request.n_predict >= 0 else n_ctx) - len(request.prompt),
            lead=self.lead,
            ends=request.ends,
            banned=request.banned,
            speculation=request.speculation,
            cache_prompt=request.cache_prompt,
            saves=request.saves,
        )

    @property
    def n_depths(self) -> int:
        """How far below the root a draft token is of use."""
        depths = self.reserve - 1 - self.tree.root.pos
        if self.request.n_predict >= 0:  # the last token of the text is sampled from the row before it
            depths = min(depths, self.request.n_predict - self.epoch - 1)
        return depths

    @property
    def calibration(self) -> Calibration:
        """Of the drafter that fills the frontier: the first one."""
        return next(iter(self.drafters.values())).calibration

    @property
    def all_complete(self) -> bool:
        """No drafter sends more draft tokens below this root."""
        return all(drafter.complete for drafter in self.drafters.values())

    def waiting_draft_tokens(self) -> list[Node]:
        """Draft tokens that are worth a row, the most probable path first, so parents before their children."""
        last = self.tree.root.pos + self.n_depths
        return [node for node in self.tree.waiting if node.pos <= last]

    def chances(self, nodes: Sequence[Node]) -> list[float]:
        """How probable each of these draft tokens is, from the first parent on that is in the pipeline."""
        chances: dict[Node, float] = {}
        for node in nodes:
            before = chances.get(node.parent, 1.0) if node.parent is not None else 1.0
            drafter, _ = node.names[0]
            chances[node] = before * self.drafters[drafter].calibration.chance(node.prob)
        return list(chances.values())

    def root_sent(self, now: float) -> None:
        """The drafters are sent the root."""
        named_by = {drafter for drafter, _ in self.tree.root.names}
        for number, drafter in self.drafters.items():
            drafter.pace.root_sent(number not in named_by, now)

    def accept(self, token: int) -> list[Node]:
        """The target's next token is known: it becomes the root. Returns the nodes that died of it."""
        self.text.append(token)
        for node in self.tree.root.children.values():
            for drafter, _ in node.names:
                self.drafters[drafter].calibration.judged(node.prob, node.token == token)
        dead = self.tree.advance(token)
        root = self.tree.root
        self.root_waits_until = None
        for drafter, number in root.names:
            self.drafters[drafter].accepted[number] = self.epoch
        for node in (root, *dead):
            for drafter, number in node.names:
                self.drafters[drafter].nodes.pop(number, None)
        for state in self.drafters.values():
            state.complete = False
        if root.submitted:
            self.counters.accepted(root.lead)
        self.counters.rejected(node.run for node in dead if node.submitted)
        return dead

    def add(self, batch: MicroBatch, now: float) -> None:
        """A drafter sent draft tokens: add those to the tree that may still be accepted."""
        drafter = self.drafters.get(batch.drafter)
        if drafter is None:
            return
        if batch.epoch == self.epoch:
            drafter.pace.came(len(batch.expansions), now)
            drafter.complete = drafter.complete or batch.complete
        for expansion in batch.expansions:
            self.counters.drafted_tokens += expansion.n
            at = batch.epoch if expansion.parent == ROOT else drafter.accepted.get(expansion.parent)
            parent = drafter.nodes.get(expansion.parent)
            for i, (token, prob) in enumerate(expansion.candidates[: expansion.n]):
                self._add(batch.drafter, at, parent, expansion.first + i, token, prob)

    def _add(self, drafter: int, at: int | None, parent: Node | None, number: int, token: int, prob: float) -> None:
        """Add a draft token below `parent`, or behind `at` accepted tokens (which the drafter knew as the last)."""
        if at is not None:
            if at < self.epoch:  # the text went on: whether it is accepted is known already
                if self.text[at] == token:
                    self.drafters[drafter].accepted[number] = at + 1
                return
            parent = self.tree.root
        if parent is not None and parent.within(self.tree.root) and self._may_follow(parent, token):
            self.drafters[drafter].nodes[number] = self.tree.add(parent, token, prob, number, drafter)

    def _may_follow(self, parent: Node, token: int) -> bool:
        """Nothing is drafted behind the end of a text, and nothing that cannot be sampled."""
        if token in self.request.ends:
            return False
        return self.draft_check is None or self.draft_check.fits(parent.path, token)

    @property
    def oldest_run(self) -> int | None:
        """The first of the runs that carry its root and what hangs on it; None: none does."""
        nodes = (self.tree.root, *self.tree.root.below())
        return min((node.run for node in nodes if node.submitted), default=None)

    def validate(self) -> frozenset[int]:
        """Check what must hold between events; returns the ids of its tree. Raises AssertionError."""
        assert (self.finish is not None) == (self.phase in (Phase.ENDING, Phase.ENDED))
        if not self.is_open:
            return frozenset()
        if self.phase is Phase.PREFILL:
            assert self.n_past < len(self.request.prompt)
            assert not self.tree.root.submitted
        assert self.phase is not Phase.SAMPLING or self.tree.root.answer is not None
        assert not self.is_fetching or (self.phase is Phase.DECODING and self.tree.root.answer is not None)
        assert 0 <= self.n_sent <= self.epoch
        for number, drafter in self.drafters.items():
            for node in drafter.nodes.values():
                assert node.within(self.tree.root), f"drafter {number} has a dead node"
        return self.tree.validate()


def chunk_end(at: int, n_prompt: int, n_batch: int, n_ubatch: int) -> int:
    """Where a prompt's chunk ends that begins at `at`, as libllama cuts it: batches of `n_batch` tokens, each in pieces
    of `n_ubatch`."""
    start = at - at % n_batch
    return min(start + ((at - start) // n_ubatch + 1) * n_ubatch, start + n_batch, n_prompt)
