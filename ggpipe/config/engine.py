"""Settings of an engine: its models, their contexts, and the ranks that hold them."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ggpipe.config.checks import check_range
from ggpipe.config.context import MAX_PREFIXES, MAX_SEQUENCES, ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.model import FIRST_DRAFT, TARGET, ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.errors import LaunchError, Setting, SettingError, Wording

Saves = Literal["nothing", "prompt", "text"]


@dataclass(frozen=True)
class PromptCacheConfig:
    """A file that keeps the KV cache of a prompt. Each rank has its own file, with its own layers."""

    path: Path
    """The first rank's file. `.rank1`, `.rank2`, … are appended for the other ranks."""
    saves: Saves = "prompt"
    """What a request saves: its prompt as soon as that is computed, or its prompt and output when it ends."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything that an engine is loaded with. Raises SettingError for an invalid setting."""

    model: ModelConfig
    context: ContextConfig = field(default_factory=ContextConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    drafts: tuple[DraftConfig, ...] = ()
    """Draft models, those with ranks of their own first."""
    n_requests: int = 1
    """Maximum number of requests served at a time; others wait. Each takes a sequence id in every context."""
    n_queued: int = 1000
    """Maximum number of waiting requests; others are refused."""
    prefill_slowdown: float = 5.0
    """Prompts may make each decoding step of other requests about this many times slower, and up to three times that
    where long runs are clearly cheaper for each row, as those of mixtures are. A larger value processes prompts faster;
    a smaller one keeps other outputs fluent."""
    cache_prompt: bool = True
    """Keep the KV cells of ended requests, until they are needed, for prompts that begin with the same tokens."""
    prompt_cache: PromptCacheConfig | None = None
    """Restore the first request's prompt from this file, as far as they agree."""
    slot_save_path: Path | None = None
    """A folder, on each rank's machine, in which prefixes are saved while requests are served."""
    warmup: bool = False
    """Allocate the memory of all KV cells while loading, if there is enough; otherwise when they are first used."""

    def __post_init__(self) -> None:
        contexts = [self.context, *(draft.context for draft in self.drafts)]
        check_range("n_requests", self.n_requests, 1, min(context.n_seq for context in contexts))
        if self.n_queued < 0:
            raise SettingError("n_queued", f"must be 0 or more, got {self.n_queued}")
        if not 1 < self.prefill_slowdown < math.inf:
            raise SettingError("prefill_slowdown", f"must be above 1, got {self.prefill_slowdown:g}")
        has_ranks = [draft.layer_split is not None for draft in self.drafts]
        if has_ranks != sorted(has_ranks, reverse=True):
            raise SettingError(
                "draft.model",
                "with ranks of its own comes after one without",
                "name draft models with ranks of their own first",
            )
        if self.pipeline.auto and any(draft.is_mtp for draft in self.drafts):
            raise SettingError("layer_split", "auto does not plan for MTP layers", "give shares, or use other drafters")
        if self.pipeline.auto and len(self.drafts) > 1:
            raise SettingError(
                "layer_split", "auto plans for one draft model at most", "give shares, or fewer draft models"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        splits = [self.pipeline.layer_split, *(draft.layer_split for draft in self.drafts)]
        sizes = {size for split in splits if split is not None for size in split.sizes} - {1}
        n = len(self.pipeline.tensor_split)
        if n and n not in sizes:
            raise SettingError(
                "tensor_split",
                Wording(f"has {n} numbers, but ", Setting("layer_split"), f" has no group of {n} ranks"),
                "give one number per rank of a group",
            )
        if not sizes:
            return
        if self.context.exact:
            raise SettingError("exact", "does not work with groups: sums depend on the number of ranks; leave it out")
        if self.context.flash_attn == "off":
            raise SettingError("flash_attn", "off does not work with groups", "set it to on")
        if self.model.loras:
            raise SettingError("loras", "cannot be used with groups", "leave them out, or give each rank its own share")

    def n_prefixes(self, context: ContextConfig) -> int:
        """Maximum number of ended requests whose cells this context keeps. Each takes a sequence id.

        It is 0 without flash attention, which other sequences' cells make slow, and 1 with a prompt cache file.
        """
        if self.prompt_cache is not None:
            return 1
        if not self.cache_prompt or self.context.flash_attn == "off":
            return 0
        n_ids = min(MAX_SEQUENCES, context.n_ctx or MAX_SEQUENCES)
        return min(MAX_PREFIXES, n_ids - context.n_seq)

    @property
    def may_stream(self) -> bool:
        """Whether weights that do not fit into memory may be streamed unasked: not if `exact` asks for the bits of
        repacked ones."""
        return self.model.load_mode == "auto" and not (self.context.exact and self.model.repack)

    @property
    def n_draft_ranks(self) -> int:
        """Number of ranks that hold only a draft model: the last ones."""
        return sum(draft.n_ranks for draft in self.drafts)

    def draft_heads(self, n_ranks: int) -> tuple[int, ...]:
        """The first rank of each draft model that has ranks. `n_ranks`: of all models."""
        ends = itertools.accumulate((draft.n_ranks for draft in self.drafts), initial=n_ranks - self.n_draft_ranks)
        return tuple(head for head, draft in zip(ends, self.drafts, strict=False) if draft.n_ranks)

    def model_of(self, rank: int, n_ranks: int) -> int:
        """Id of the model whose layers a rank holds: `TARGET`, or a draft model's. `n_ranks`: of all models."""
        return TARGET + bisect.bisect_right(self.draft_heads(n_ranks), rank)

    def part_of(self, model: int) -> EngineConfig | DraftConfig:
        """The settings with the model and the context of this id."""
        return self if model == TARGET else self.drafts[model - FIRST_DRAFT]

    def is_mtp(self, model: int) -> bool:
        """Whether the model of this id is the target's MTP layers."""
        part = self.part_of(model)
        return isinstance(part, DraftConfig) and part.is_mtp

    def check_ranks(self, n_ranks: int) -> None:
        """Check settings that name ranks against the number of ranks.

        Raises SettingError for the wrong number of threads, and LaunchError for a split with another number of ranks.
        """
        pipeline, n_draft = self.pipeline, self.n_draft_ranks
        for name, values in (("threads", pipeline.threads), ("threads_batch", pipeline.threads_batch)):
            if len(values) not in (1, n_ranks):
                ranks = "1 rank" if n_ranks == 1 else f"{n_ranks} ranks"
                raise SettingError(name, f"has {len(values)} values for {ranks}", "give one for all, or one per rank")
        if pipeline.n_ranks is not None and pipeline.n_ranks + n_draft != n_ranks:
            n = pipeline.n_ranks + n_draft
            raise LaunchError(
                Setting("layer_split"),
                f" names {n} ranks, but {n_ranks} were started: use mpirun -n {n}, or give {n_ranks} shares",
            )
