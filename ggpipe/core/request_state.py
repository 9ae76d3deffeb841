"""What the scheduler knows of the sequences that it serves: of requests, and of prefixes between cache and disk.

phase       leaves when                                                to
PREFILL     the prompt's last chunk is submitted                       DECODING
            a prefix is to be written to disk, or read from there      TRANSFER
TRANSFER    all ranks have done so                                     ENDING
DECODING    the logits of the last accepted token are back             SAMPLING
SAMPLING    the next token is sampled                                  DECODING
            sampling takes the whole row                               FETCHING
FETCHING    the whole row is back                                      SAMPLING
any above   the text ends, is long enough, fills the context,          ENDING
but         or the user stops it
TRANSFER
ENDING      its last run came back                                     ENDED

What waits to be admitted has no state yet: it is in a queue (`admission`).
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from ggpipe.core.draft_messages import BeginDrafting, BlockOf, MicroBatch
from ggpipe.core.drafters.request_drafters import RequestDrafters
from ggpipe.core.events import Finished
from ggpipe.core.kv.radix_tree import Prefix
from ggpipe.core.messages import LogitsKind, LogitsRequest, Restore, Save
from ggpipe.core.prefixes import PrefixDone, RestorePrefix, SavePrefix
from ggpipe.core.random_numbers import RandomNumbers
from ggpipe.core.request import Counters, DraftCheck, Finish, Request
from ggpipe.core.tree import Node, Tree

_MOST_WHOLE_ROWS = 64  # in a run, of a prompt: libllama has room for all tokens' logits of each


class Phase(enum.Enum):
    """Where a sequence is, see the module's text."""

    PREFILL = enum.auto()
    TRANSFER = enum.auto()
    DECODING = enum.auto()
    SAMPLING = enum.auto()
    FETCHING = enum.auto()
    ENDING = enum.auto()
    ENDED = enum.auto()


_NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.PREFILL: frozenset({Phase.TRANSFER, Phase.DECODING, Phase.ENDING}),
    Phase.TRANSFER: frozenset({Phase.ENDING}),
    Phase.DECODING: frozenset({Phase.SAMPLING, Phase.ENDING}),
    Phase.SAMPLING: frozenset({Phase.DECODING, Phase.FETCHING, Phase.ENDING}),
    Phase.FETCHING: frozenset({Phase.SAMPLING, Phase.ENDING}),
    Phase.ENDING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceState(abc.ABC):
    """A sequence that is being served: it has a prompt that is to be computed, and a share of the cells."""

    id: int
    """Id of the request or order."""
    user: str
    """Whom it is for."""
    prompt: tuple[int, ...]
    prefix: Prefix
    """What the prefix cache had of its prompt, and its tree."""
    reserve: int
    """Cells that it may take up, those of its prefix included."""
    phase: Phase = Phase.PREFILL
    is_open: bool = True
    """Whether it has not ended."""
    has_rows: bool = True
    """Rows of it may go into the pipeline."""
    n_past: int = 0
    """Prompt tokens that are submitted, or were in the prefix cache."""
    counters: Counters = field(default_factory=Counters)
    admitted_at: float = 0.0
    """When it was admitted."""
    keeps: bool = False
    """Some of its rows are kept (`LogitsRequest.keeps`): what it wants may have changed since they were submitted."""
    is_saved: bool = False
    """All that is to be saved of its prompt is."""
    tree: Tree = field(init=False)
    """Its draft tokens."""

    def __post_init__(self) -> None:
        self.tree = self.prefix.tree

    def enter(self, phase: Phase) -> None:
        """Enter another phase."""
        assert phase in _NEXT[self.phase], f"from {self.phase} to {phase}"
        self.phase = phase
        self.is_open = phase not in (Phase.ENDING, Phase.ENDED)
        self.has_rows = self.is_open and phase is not Phase.TRANSFER

    @property
    @abc.abstractmethod
    def over(self) -> Finished | PrefixDone:
        """What is said when it has ended."""

    @property
    def saves_prompt(self) -> bool:
        """Its prompt is saved as soon as all but its last token is in the pipeline."""
        return False

    @property
    def embeds(self) -> bool:
        """Whether its rows are those of an embedding."""
        return False

    @property
    def may_cancel(self) -> bool:
        """Runs are cancelled when it needs nothing of them."""
        return True

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that may go into the prefix cache."""
        return self.prompt

    @property
    def n_in(self) -> int:
        """Tokens that are in the pipeline, or were."""
        return self.n_past

    @property
    def again(self) -> Sequence[int]:
        """Tokens right before the root that are decoded again with it, since their state was taken back."""
        return ()

    @property
    def waits_for_run(self) -> bool:
        """Rows of it wait to go into a run."""
        return self.phase is Phase.PREFILL

    @property
    def n_root_rows(self) -> int:
        """Rows of the run that its root goes into, of this sequence, without draft tokens."""
        return 1 + self.tree.n_again

    def cut(self, end: int) -> int:
        """Where a run's part of the prompt ends that would reach up to `end`: at the next checkpoint at the latest."""
        borders = (checkpoint.position for checkpoint in self.prefix.checkpoints)
        return min((end, *(border for border in borders if border > self.n_past)))

    def prompt_end(self, n_most: int) -> int:
        """Where the next run may end in the prompt, with at most this many rows of it."""
        return self.n_past + n_most

    def logits_request_at(self, position: int) -> LogitsRequest | None:
        """What is wanted back of its row at this position; None: nothing is."""
        return None

    @property
    def oldest_run(self) -> int | None:
        """The first of the runs that carry its root and what hangs on it; None: none does."""
        root = self.tree.root  # what hangs on it is never submitted before it
        return root.run if root.submitted else None

    @property
    def n_used(self) -> int:
        """Cells in use outside the prefix cache."""
        return self.tree.root.pos + 1 + self.tree.n_submitted - self.prefix.n_tokens

    @property
    def n_reserved(self) -> int:
        """Cells outside the prefix cache that it may take up."""
        return self.reserve - self.prefix.n_tokens

    @property
    def n_cells(self) -> int:
        """Cells outside the prefix cache that others may not take."""
        return max(self.n_reserved, self.n_used)

    def validate(self) -> frozenset[int]:
        """Check what must hold between events; returns the ids of its tree. Raises AssertionError."""
        if not self.is_open:
            return frozenset()
        if self.phase is Phase.PREFILL:
            assert self.n_past < len(self.prompt)
            assert not self.tree.root.submitted
        return self.tree.validate()


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixState(SequenceState):
    """A prefix that is being saved or restored."""

    order: SavePrefix | RestorePrefix
    done: PrefixDone
    """What came of it so far."""

    @property
    def over(self) -> PrefixDone:
        return self.done

    @property
    def is_ready(self) -> bool:
        """All stages can write it to disk, or read it from there."""
        return isinstance(self.order, RestorePrefix) or self.n_past == len(self.prompt)

    @property
    def transfer(self) -> Save | Restore:
        """What stages are sent when it is ready."""
        kind = Save if isinstance(self.order, SavePrefix) else Restore
        return kind(self.id, self.tree.seq, self.prompt, self.order.file)

    def transferred(self, done: PrefixDone) -> None:
        """All ranks have done so."""
        self.done = done
        if isinstance(self.order, RestorePrefix) and not done.problems:
            self.n_past = len(self.prompt)


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState(SequenceState):
    """A request that is being served."""

    request: Request
    logits_request: LogitsRequest
    """What sampling the next token takes."""
    finish: Finish | None = None
    """Why it ends; None before `Phase.ENDING`."""
    has_begun: bool = False
    """Its drafters were told of it."""
    output: list[int] = field(default_factory=list)
    """Accepted tokens; their number is the epoch."""
    sampled_from: list[tuple[int, int]] = field(default_factory=list)
    """The run and row from whose logits each accepted token was sampled."""
    n_drawn: int = 0
    """Random numbers that were taken for it so far, where tokens are drawn with them."""
    numbers: RandomNumbers | None = None
    """Those that follow from its seed; None: as with `Request.drawing`."""
    n_weighed: int = 0
    """Accepted tokens from whose pace it was learned which draft models pay."""
    drafters: RequestDrafters
    root_since: float = 0.0
    """When the root was accepted."""
    drafted_at: float = 0.0
    """When drafters sent draft tokens last."""
    is_copying: bool = False
    """Drafters without a model have drafted enough for all runs in flight: those with one would only take cores."""
    draft_check: DraftCheck | None = None
    n_predict: int = field(init=False)
    """Tokens to generate at most; -1: until the text ends or the context is full."""
    is_async: bool = field(init=False)
    """Whether the request drafts while earlier draft tokens are verified."""

    def __post_init__(self) -> None:
        SequenceState.__post_init__(self)
        self.n_predict = self.request.n_predict
        self.is_async = self.request.speculation.mode == "async"
        if (drawing := self.request.drawing) is not None:
            self.n_drawn, self.numbers = drawing.n_drawn, RandomNumbers(drawing.seed)

    @property
    def over(self) -> Finished:
        assert self.finish is not None
        return Finished(self.id, self.finish)

    @property
    def embeds(self) -> bool:
        return self.request.embeds

    @property
    def may_cancel(self) -> bool:
        return self.request.speculation.cancel or not self.is_open

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output) if self.request.spec.cache_prompt else ()

    @property
    def decodes(self) -> bool:
        """Whether its prompt is submitted and its output continues."""
        return self.phase in (Phase.DECODING, Phase.FETCHING) and self.n_predict != 0

    @property
    def waits_for_run(self) -> bool:
        return self.phase is Phase.PREFILL or not self.tree.root.submitted or self.tree.has_waiting

    @property
    def overlaps(self) -> bool:
        """Whether its drafters keep drafting while earlier draft tokens are verified."""
        return self.is_async and self.request.speculation.continuous

    @property
    def epoch(self) -> int:
        """Accepted tokens."""
        return len(self.output)

    @property
    def n_in(self) -> int:
        root = self.tree.root
        return root.pos + root.submitted - self.tree.n_again if self.output or root.submitted else self.n_past

    @property
    def again(self) -> Sequence[int]:
        return self.output[-1 - self.tree.n_again : -1]

    @property
    def saves_prompt(self) -> bool:
        new = len(self.request.prompt) - 1 > self.counters.cached_tokens
        return self.request.saves == "prompt" and new and not self.is_saved

    def prompt_end(self, n_most: int) -> int:
        end, wanted = self.n_past + n_most, self.request.wanted
        if self.saves_prompt:
            end = min(end, len(self.request.prompt) - 1)
        if self.n_past < wanted.stop and self.logits_request.kind is not LogitsKind.TOP:
            end = min(end, max(wanted.start, self.n_past) + _MOST_WHOLE_ROWS)
        return end

    def logits_request_at(self, position: int) -> LogitsRequest | None:
        depth = position - self.tree.root.pos
        if depth < 0:
            return self.logits_request if position in self.request.wanted else None
        if self.request.logits_request_grows and self.logits_request.kind is LogitsKind.TOP:
            return structs.replace(self.logits_request, n=self.logits_request.n + depth)
        if self.logits_request.kind is LogitsKind.DRAWN and self.numbers is not None:
            return structs.replace(self.logits_request, number=self.numbers[self.n_drawn + depth])
        return self.logits_request

    def begin(self, n_ctx: int, look_ahead: int) -> BeginDrafting:
        """What a drafter is sent of it, in a context of that size. `look_ahead`: how far it may be ahead of the
        root."""
        request = self.request
        return BeginDrafting(
            request=request.id,
            prompt=request.prompt,
            n_left=(self.reserve if self.n_predict >= 0 else n_ctx) - len(request.prompt),
            look_ahead=look_ahead,
            ends=request.ends,
            banned=request.banned,
            speculation=request.speculation,
            cache_prompt=request.spec.cache_prompt,
            saves=request.saves,
            drawing=request.drawing,
            adjustments=request.adjustments,
        )

    @property
    def deepest(self) -> int:
        """Position of the deepest useful draft token."""
        deepest = self.reserve - 1
        if self.n_predict >= 0:  # the last token of the text is sampled from the row before it
            deepest = min(deepest, len(self.prompt) + self.n_predict - 2)
        return deepest

    def draft_tokens(self) -> Iterator[Node]:
        """Draft tokens that are worth a row, the most probable path first, so parents before their children."""
        deepest = self.deepest
        return (node for node in self.tree.best_first() if node.pos <= deepest)

    def accept(self, token: int, n_draws: int = 1) -> list[Node]:
        """The target's next token is known: it becomes the root. `n_draws`: random numbers that it took. Returns the
        nodes that died of it."""
        self.output.append(token)
        self.n_drawn += n_draws
        if (logits := self.tree.root.logits) is not None:
            self.sampled_from.append((self.tree.root.run, logits.row))
        self.drafters.judge(token, self.counters)
        dead = self.tree.advance(token)
        self.drafters.advanced(dead, self.epoch)
        root = self.tree.root
        if root.submitted:
            self.counters.accepted(root.depth)
        self.counters.rejected(node.run for node in dead if node.submitted)
        return dead

    def add(self, micro_batch: MicroBatch, now: float) -> list[Node]:
        """A drafter sent draft tokens: add those to the tree that may still be accepted, and return them."""
        if micro_batch.drafter not in self.drafters:
            return []
        self.drafted_at = self.drafted_at if micro_batch.block is BlockOf.EARLIER_ROOT else now
        self.counters.drafted_tokens += sum(expansion.n for expansion in micro_batch.expansions)
        return self.drafters.add(micro_batch, self.output, self._may_follow, now)

    def _may_follow(self, parent: Node, token: int) -> bool:
        """Whether a draft token may follow: none after the end of the output, and none that cannot be sampled."""
        if token in self.request.ends:
            return False
        return self.draft_check is None or self.draft_check.fits(parent.path, token)

    def validate(self) -> frozenset[int]:
        assert (self.finish is None) == self.is_open
        assert self.phase not in (Phase.SAMPLING, Phase.FETCHING) or self.tree.root.logits is not None
        assert 0 <= self.n_weighed <= self.epoch
        assert all(0 <= known.n_told <= self.epoch for _, known in self.drafters)
        if self.is_open:
            self.drafters.validate()
        return SequenceState.validate(self)
