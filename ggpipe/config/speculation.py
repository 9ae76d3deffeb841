"""Settings of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from ggpipe.config.checks import MAX_TOKENS, check_choice, check_range
from ggpipe.config.context import MAX_SEQUENCES
from ggpipe.errors import Setting, SettingError, Wording

Mode = Literal["iterative", "speculative", "async"]
Policy = Literal["best-first", "thresholds"]
THRESHOLDS = frozenset({"p_split", "p_recovery", "p_decay", "n_parallel"})
"""Settings of `SpeculationConfig` that only the policy `thresholds` uses. A user who sets one of them selects it."""
_MOST_BRANCHES = 128
"""Maximum number of sequence ids for branches of best-first trees, for all requests of a pipeline together."""
_MOST_ROWS, _MOST_DRAFT_ROWS = 64, 16
"""Maximum number of rows of best-first trees in a run of the target, and of the draft model."""


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How drafters work. Names and meanings are PipeInfer's and llama.cpp's.

    Raises SettingError for an invalid setting.
    """

    mode: Mode = "async"
    """`iterative`: no draft tokens. `speculative`: draft, verify, repeat. `async`: drafting and verifying overlap."""
    policy: Policy = "best-first"
    """How trees grow in `async` mode. `best-first`: by the probability of each path, and wider if rows are cheap.
    `thresholds`: as in PipeInfer, with the settings below. All other modes use `thresholds`."""
    n_draft: int | None = None
    """Maximum number of draft tokens in a micro-batch and in a run; `async` puts fewer into a run if that is faster.
    None: 64 for `best-first`, 8 for `thresholds`."""
    n_min: int = 0
    """Micro-batches with fewer draft tokens are not sent."""
    p_accept: float = 0.0
    """A branch ends where the draft's best candidate is less likely than this."""
    p_split: float = 0.1
    """A branch splits where another candidate is at least this likely."""
    p_recovery: float = 0.0
    """`p_accept` and `p_split` rise by this with each micro-batch since the last accepted token."""
    p_decay: float = 0.0
    """`p_accept` and `p_split` fall by this with each attempt since the last accepted token that drafted nothing."""
    n_parallel: int = 1
    """Number of branches drafted in parallel; 1 drafts chains."""
    n_draft_rows: int | None = None
    """Maximum number of rows in a run of the draft model; None: the number of branches."""
    n_seq: int | None = None
    """Number of sequence ids: one per branch in flight, including the accepted tokens. None: the number of branches."""
    cancel: bool = True
    """Cancel runs in flight whose draft tokens were all rejected."""
    continuous: bool = True
    """Continue to draft while earlier draft tokens are verified. Otherwise one micro-batch follows each accepted token.
    """
    drafters: tuple[str, ...] | None = None
    """Kinds of drafters, as in `core.drafters.registry`. None: all of them if there is a draft model, otherwise none.
    """

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, get_args(Mode))
        check_choice("policy", self.policy, get_args(Policy))
        if self.n_draft is not None:
            check_range("n_draft", self.n_draft, 1, MAX_TOKENS)
        check_range("n_parallel", self.n_parallel, 1, MAX_SEQUENCES)
        if self.n_draft_rows is not None:
            check_range("n_draft_rows", self.n_draft_rows, 1, MAX_TOKENS)
        if self.n_seq is not None:
            check_range("n_seq", self.n_seq, 1, MAX_SEQUENCES)
        if not 0 <= self.n_min <= self.most_drafted:
            most = f" ({self.most_drafted}), got {self.n_min}"
            raise SettingError("n_min", Wording("must be a number from 0 to ", Setting("n_draft"), most))
        for name in ("p_accept", "p_split", "p_recovery", "p_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingError(name, f"must be a probability from 0 to 1, got {getattr(self, name):g}")

    @property
    def is_best_first(self) -> bool:
        """Whether trees grow best-first: only in `async` mode with `continuous` drafting."""
        return self.policy == "best-first" and self.mode == "async" and self.continuous

    @property
    def most_drafted(self) -> int:
        """Maximum number of draft tokens in a micro-batch, and in a run."""
        if self.n_draft is not None:
            return self.n_draft
        return _MOST_ROWS if self.is_best_first else 8

    @property
    def draft_rows(self) -> int:
        """Maximum number of rows in a run of the draft model."""
        return self.n_draft_rows or (_MOST_DRAFT_ROWS if self.is_best_first else self.n_parallel)

    @property
    def branches(self) -> int:
        """Maximum number of sequence ids for branches, in addition to one per request and drafter. A model may have
        room for fewer."""
        return (self.n_seq or _MOST_BRANCHES + 1) - 1 if self.is_best_first else 0

    @property
    def sequences(self) -> int:
        """Number of sequence ids reserved for each request."""
        return 1 if self.is_best_first else self.n_seq or self.n_parallel

    @property
    def as_chain(self) -> SpeculationConfig:
        """The same settings, but drafting chains instead of trees."""
        return replace(self, policy="thresholds", n_parallel=1, n_seq=None)
