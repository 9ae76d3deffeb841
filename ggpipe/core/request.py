"""A request as it is served, why it ends, and what is counted for it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from ggpipe.config.engine import Saves
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import Adjustments, Drawing
from ggpipe.core.prefixes import ErasePrefix, PrefixOrder
from ggpipe.core.prompt_chunks import chunk_rows
from ggpipe.core.request_spec import RequestSpec
from ggpipe.core.row_work import ONLY_WEIGHTS, RowWork
from ggpipe.errors import PromptTooLong, Setting, UsageError


class Finish(enum.Enum):
    """Why a request ended."""

    END_OF_TEXT = "end of text"
    LENGTH = "length"
    CONTEXT_FULL = "context full"
    STOP_STRING = "stop string"
    STOPPED = "stopped"
    NO_TOKEN = "no token fits the grammar"


@dataclass(frozen=True, slots=True)
class TokenProb:
    """A token, its text (which may be a part of a character), and the logarithm of its probability."""

    id: int
    text: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token and the text that can be shown with it: none inside a character, or while a stop string may
    have begun."""

    id: int
    text: str
    drafters: tuple[str, ...] = ()
    """The drafters that had named it, as in `registry.labels`, if it was in the pipeline before it was sampled."""
    probs: tuple[TokenProb, ...] = ()
    """Its own, then those of the most probable tokens, where `SamplingConfig.n_probs` asks for them."""
    redrawn: bool = False
    """Sampling it took two draws: the first one's token did not fit the grammar."""

    @property
    def drafted(self) -> bool:
        """Whether it was in the pipeline before it was sampled."""
        return bool(self.drafters)


def check_prompt(prompt: Sequence[int], n_ctx: int) -> None:
    """Raises UsageError for a prompt that is empty or that leaves no room for an answer in a context of that size."""
    if not prompt:
        raise UsageError("the prompt is empty: give a text of one token or more")
    if len(prompt) >= n_ctx:
        raise PromptTooLong(len(prompt), n_ctx)


class DraftCheck(Protocol):
    """Says which draft tokens may be sampled, and which must be. Takes microseconds. `path`: draft tokens that follow
    the last accepted token."""

    def fits(self, path: tuple[int, ...], token: int) -> bool:
        """Whether a token may come next."""

    def forced(self, path: tuple[int, ...]) -> Sequence[tuple[int, float]]:
        """The tokens in which there is no choice next, one after the other: each with the probability that the model
        spells their text with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a pipeline can hold."""

    n_ctx: int
    """KV cells, for all requests together."""
    n_batch: int
    n_ubatch: int
    n_in_flight: int
    """Runs in the pipeline at the same time; more only wait in its queues, and delay the next correction."""
    n_seq: int = 1
    """Sequence ids, for all requests and kept prefixes together."""
    n_requests: int = 1
    """Requests that are served at the same time."""
    n_prefixes: int = 0
    """Sequences of ended requests that are kept, at most; each has an id."""
    partial_prefixes: bool = True
    """Any part of a kept sequence, from its first token on, can be continued; else only a whole one."""
    rolls_back: bool = True
    """The end of a sequence can be removed; else draft tokens are taken back by copies of the state."""
    most_taken_back: int | None = None
    """Tokens in flight after the oldest copy of a state, at most; else cells before it may be lost. None: any."""
    drops_rows: bool = True
    """Stages drop dead rows of runs; see `dropped_rows`."""
    n_pauses: int = 0
    """Where each stage can pause runs of prompts for short runs that came later, at least; see `overtaking`."""
    prefill_slowdown: float = 5.0
    """How many times as long others' prompts may make a run while requests are decoding, or a part of one that pauses,
    approximately; three times that where rows are clearly cheaper in long runs."""
    crowding: float = 0.0
    """Threads per core on the machine of the target's median stage: while others compute there, it may take longer. 0:
    each stage has a machine of its own, and so have draft models."""
    drafts_late: bool = False
    """Drafters read a prompt after the target, as they share a machine with stages, and read no states of these."""
    sharing: tuple[int, ...] = ()
    """Ids of drafters that are sent the draft tokens of others: draft models, as far as they read no states."""
    work: RowWork = ONLY_WEIGHTS
    """The work of the model's rows."""

    @property
    def shares_machine(self) -> bool:
        """Some machine holds several stages."""
        return self.crowding > 0

    @property
    def shares_cores(self) -> bool:
        """Its ranks have more threads than it has cores."""
        return self.crowding > 1

    @property
    def n_rows(self) -> int:
        """Rows in a run, at most."""
        return min(self.n_batch, self.n_ubatch)

    @property
    def n_stages(self) -> int:
        """Runs that are computed at the same time, one in each stage."""
        return max(self.n_in_flight - 1, 1)

    def prompt_rows(self, n_tokens: int, n_past: int, n_prompts: int = 1) -> int:
        """Rows in each run of prompts that share runs, with this many tokens to compute, in all, after `n_past` others
        each. Only rows of one sequence share the expansion of its latent vectors."""
        work = self.work if n_prompts == 1 else self.work.never_long()
        return chunk_rows(n_tokens, self.n_stages, self.n_rows, work, n_past)


def check_order(order: PrefixOrder, limits: Limits, has_folder: bool) -> None:
    """Raises UsageError for what cannot be done in a pipeline of these limits. `has_folder`: for saved prefixes."""
    check_prompt(order.tokens, limits.n_ctx)
    if not limits.n_prefixes:
        raise UsageError(
            "nothing is kept of ended requests: ",
            Setting("exact"),
            " needs ",
            Setting("flash_attn"),
            " for it, and a model that can",
        )
    if not isinstance(order, ErasePrefix) and not has_folder:
        raise UsageError("there is no folder for prefixes: name one with ", Setting("slot_save_path"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as the scheduler serves it: what its front end stated, and what the head derived from that."""

    id: int
    spec: RequestSpec
    prompt: tuple[int, ...]
    """Tokens of the prompt, and after them those of `spec.resumed`."""
    drafters: tuple[int, ...] = (0,)
    """Ids of the drafters that draft for it, unless its mode is iterative."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the output: nothing is drafted after them."""
    banned: tuple[int, ...] = ()
    """Tokens that are never sampled."""
    logits_request_grows: bool = False
    """Sampling takes one more of the best logits for each further token in the text (penalties look back on it)."""
    is_stopped: bool = False
    """There is a stop string in the text that other ranks generated: nothing is left to do."""
    saves: Saves = "nothing"
    """What is written to disk: the prompt but its last token when that is computed, or at the end all that is."""
    drawing: Drawing | None = None
    """How its tokens are drawn; None: not with a single random number each, or with none."""
    adjustments: Adjustments | None = None
    """How its logits are adjusted before a token is chosen; None: not at all."""

    @property
    def n_resumed(self) -> int:
        """The last tokens of `prompt` are output that other ranks generated before this request was resumed."""
        return len(self.spec.resumed)

    @property
    def n_predict(self) -> int:
        """Tokens that are left to generate at most; -1: until the text ends or the context is full."""
        n = self.spec.n_predict
        return max(n - self.n_resumed, 0) if n >= 0 else n

    @property
    def speculation(self) -> SpeculationConfig:
        """How draft tokens are drafted for it."""
        return self.spec.speculation

    @property
    def remembers_rows(self) -> bool:
        """Its sampler needs the rows that its output was drawn from. When it is resumed, they come back once more."""
        return self.spec.sampling.remembers_rows

    @property
    def drafts(self) -> bool:
        """Drafters work for it."""
        return self.speculation.mode != "iterative" and bool(self.drafters)

    @property
    def embeds(self) -> bool:
        """Whether the request is for an embedding of its prompt."""
        return self.spec.pooling is not None

    @property
    def wanted(self) -> range:
        """Positions of the rows of its prompt that are to come back, besides the last one: those that its resumed text
        was drawn from, or that its embedding is made of."""
        end = len(self.prompt) - 1
        match self.spec.pooling:
            case "last":
                return range(end, end)
            case "cls":
                return range(min(end, 1))
            case "mean" | "none":
                return range(end)
        return range(end - self.n_resumed, end) if self.n_resumed and self.remembers_rows else range(end, end)

    def is_over(self, n_ctx: int) -> Finish | None:
        """Why there is nothing left to do for a resumed request in a context of that size; None where there is."""
        if self.is_stopped:
            return Finish.STOP_STRING
        if self.n_predict == 0:
            return Finish.LENGTH
        return Finish.CONTEXT_FULL if len(self.prompt) > n_ctx else None

    def after(self, tokens: Sequence[int]) -> Request:
        """The rest of the request after these tokens of its output, which become a part of its prompt."""
        spec = msgspec.structs.replace(self.spec, resumed=(*self.spec.resumed, *tokens))
        return replace(self, prompt=(*self.prompt, *tokens), spec=spec)


@dataclass(slots=True)
class Counters:
    """What was computed for a request so far, and what speculation did."""

    drafted_tokens: int = 0
    """Draft tokens that came from the drafters."""
    submitted_tokens: int = 0
    """Draft tokens that went into the pipeline."""
    accepted_tokens: int = 0
    """Submitted draft tokens that the target confirmed."""
    cancelled_tokens: int = 0
    """Draft tokens in runs that were cancelled."""
    speculative_runs: int = 0
    """Runs with draft tokens."""
    verified_runs: int = 0
    """Runs with draft tokens that came back with logits."""
    cancelled_runs: int = 0
    rejected_rows: dict[int, int] = field(default_factory=dict)
    """By run: rows whose draft token was rejected."""
    by_lead: dict[int, list[int]] = field(default_factory=dict)
    """[submitted, accepted] draft tokens, by their depth below the last accepted token when they were submitted."""
    by_drafter: dict[int, list[int]] = field(default_factory=dict)
    """[judged, right] tokens that a drafter named to follow the text, by the drafter's id."""
    paused_tokens: dict[int, int] = field(default_factory=dict)
    """By drafter: accepted tokens while it paused."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had: they were not computed."""

    def submitted(self, depths: Iterable[int]) -> None:
        """A run went into the pipeline with one draft token at each of these depths."""
        for depth in depths:
            self.submitted_tokens += 1
            self.by_lead.setdefault(depth, [0, 0])[0] += 1

    def accepted(self, depth: int) -> None:
        """The target confirmed a draft token that was submitted at this depth."""
        self.accepted_tokens += 1
        self.by_lead[depth][1] += 1

    def judged(self, drafter: int, is_right: bool) -> None:
        """A drafter named a token to follow the text, and the target's token is known."""
        counts = self.by_drafter.setdefault(drafter, [0, 0])
        counts[0] += 1
        counts[1] += is_right

    def paused(self, drafter: int) -> None:
        """A drafter paused after an accepted token, because it does not pay."""
        self.paused_tokens[drafter] = self.paused_tokens.get(drafter, 0) + 1

    def cancelled(self, n_draft_tokens: int) -> None:
        """A run with this number of draft tokens was cancelled."""
        self.cancelled_runs += 1
        self.cancelled_tokens += n_draft_tokens

    def rejected(self, runs: Iterable[int]) -> None:
        """Count one rejected row for each of these runs. A run may occur several times."""
        for run in runs:
            self.rejected_rows[run] = self.rejected_rows.get(run, 0) + 1

    @property
    def acceptance(self) -> float | None:
        """Acceptance rate: accepted / submitted draft tokens, 0 to 1; None before the first."""
        return self.accepted_tokens / self.submitted_tokens if self.submitted_tokens else None

    @property
    def accepted_per_run(self) -> float | None:
        """Accepted draft tokens for each verified run."""
        return self.accepted_tokens / self.verified_runs if self.verified_runs else None
