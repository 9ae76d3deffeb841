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
"""Settings of `SpeculationConfig` that only the policy `thresholds` has a use for. Users choose it by giving one."""
_MOST_BRANCHES = 128
"""Sequence ids for branches of best-first trees, shared by all requests of a pipeline."""
_MOST_ROWS, _MOST_DRAFT_ROWS = 64, 16
"""Rows of best-first trees in a run of the target and of the draft model, at most."""


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How drafters draft. Names and meanings are PipeInfer's and llama.cpp's."""

    mode: Mode = "async"
    """`iterative`: no draft tokens. `speculative`: draft, verify, repeat. `async`: drafting and verifying overlap."""
    policy: Policy = "best-first"
    """How trees grow in `async` mode. `best-first`: by the probability of each path, as wide as rows are cheap.
    `thresholds`: PipeInfer's, by the settings below, which all other modes use too."""
    n_draft: int | None = None
    """Draft tokens in a micro-batch, at most; also in a run, where `async` takes fewer when that is faster. None: 64
    for `best-first`, 8 for `thresholds`."""
    n_min: int = 0
    """Micro-batches with fewer draft tokens are not sent."""
    p_accept: float = 0.0
    """A branch ends where the draft's best candidate is less probable than this."""
    p_split: float = 0.1
    """A branch splits where a further candidate is at least this probable."""
    p_recovery: float = 0.0
    """`p_accept` and `p_split` rise by this with each micro-batch since the last accepted token."""
    p_decay: float = 0.0
    """`p_accept` and `p_split` fall by this with each attempt since the last accepted token that drafted nothing."""
    n_parallel: int = 1
    """Branches that are drafted side by side; 1 drafts chains."""
    n_draft_rows: int | None = None
    """Rows in a run of the draft model, at most; None: as many as branches."""
    n_seq: int | None = None
    """Sequence ids, one for each branch in flight, the text's included; None: as many as branches."""
    cancel: bool = True
    """Runs whose draft tokens were all rejected are stopped while they are in flight."""
    continuous: bool = True
    """Drafting goes on while earlier draft tokens are verified; else one micro-batch follows each accepted token."""
    drafters: tuple[str, ...] | None = None
    """Kinds of drafters, as in `core.drafters.registry`; None: all of them where there is a draft model, else none."""

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
        """Trees grow best-first: in `async` mode, while drafting and verifying overlap."""
        return self.policy == "best-first" and self.mode == "async" and self.continuous

    @property
    def most_drafted(self) -> int:
        """Draft tokens in a micro-batch, and in a run, at most."""
        if self.n_draft is not None:
            return self.n_draft
        return _MOST_ROWS if self.is_best_first else 8

    @property
    def draft_rows(self) -> int:
        """Rows in a run of the draft model, at most."""
        return self.n_draft_rows or (_MOST_DRAFT_ROWS if self.is_best_first else self.n_parallel)

    @property
    def branches(self) -> int:
        """Sequence ids beyond one for each request and drafter that branches may take, at most; a model may have room
        for fewer."""
        return (self.n_seq or _MOST_BRANCHES + 1) - 1 if self.is_best_first else 0

    @property
    def sequences(self) -> int:
        """Sequence ids that each request has for itself."""
        return 1 if self.is_best_first else self.n_seq or self.n_parallel

    @property
    def as_chain(self) -> SpeculationConfig:
        """The same without branches."""
        return replace(self, policy="thresholds", n_parallel=1, n_seq=None)
