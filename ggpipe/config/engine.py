"""Settings: frozen records that check themselves. Names and defaults are llama.cpp's.

Options are made of these fields (`options/table.py`). A field's type, default and bounds are here only.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from ggpipe.config.checks import MAX_TOKENS, check_choice, check_finite, check_range
from ggpipe.config.layer_split import MAX_PARTS, LayerSplit
from ggpipe.errors import LaunchError, Setting, SettingError, Wording

LoadMode = Literal["mmap", "none", "mlock", "mmap+mlock", "dio"]
Numa = Literal["distribute", "isolate", "numactl"]
KvType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
FlashAttention = Literal["on", "off", "auto"]
RopeScaling = Literal["none", "linear", "yarn"]
Mode = Literal["iterative", "speculative", "async"]
Policy = Literal["best-first", "thresholds"]
THRESHOLDS = frozenset({"p_split", "p_recovery", "p_decay", "n_parallel"})
"""Settings of `SpeculationConfig` that only the policy `thresholds` has a use for. Users choose it by giving one."""
TensorWire = Literal["f32", "f16"]
Saves = Literal["nothing", "prompt", "text"]
Pooling = Literal["none", "mean", "cls", "last"]
"""What an embedding is of the hidden states of a text's tokens: all, the mean, the first one, the last one."""
MOST_NORM = 1024
"""By which embeddings are normalized."""

TARGET, FIRST_DRAFT = 0, 1
"""Ids of models: the target, and the first draft model; further ones follow."""
MAX_SEQUENCES = 256
"""Sequence ids that libllama has."""
MAX_PREFIXES = 16
"""Ended requests whose KV cells are kept."""
_MOST_BRANCHES = 128
"""Sequence ids for branches of best-first trees, shared by all requests of a pipeline."""
_MOST_ROWS, _MOST_DRAFT_ROWS = 64, 16
"""Rows of best-first trees in a run of the target and of the draft model, at most."""
MAX_THREADS = 512
"""Threads that ggml has room for."""
_MOST_TIMEOUT_S = 86400
_QUANTIZED = set(get_args(KvType)) - {"f32", "f16", "bf16"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model file, and how its weights are loaded into memory."""

    path: Path
    """The GGUF file; the first part of a split one."""
    load_mode: LoadMode = "mmap"
    repack: bool = True
    """ggml may store weights again in the layout that is fastest on this CPU."""
    numa: Numa | None = None
    override_kv: tuple[str, ...] = ()
    """`KEY=TYPE:VALUE` with TYPE int, float, bool or str, as llama.cpp's --override-kv."""
    loras: tuple[tuple[Path, float], ...] = ()
    """LoRA adapters and their scales."""

    def __post_init__(self) -> None:
        check_choice("load_mode", self.load_mode, get_args(LoadMode))
        if self.numa is not None:
            check_choice("numa", self.numa, get_args(Numa))


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """The context: its size in tokens, how it is computed, how positions are encoded."""

    n_ctx: int = 0
    """Tokens that the context holds; 0 takes the model's training length."""
    n_batch: int = 2048
    """Prompt tokens in a batch, at most."""
    n_ubatch: int = 512
    """Rows in a run, at most."""
    n_seq: int = 1
    """Sequence ids in use at the same time, at least."""
    n_branches: int = 0
    """Further sequence ids for branches of draft tokens, at most: as many as the context and the model have room
    for."""
    cache_type_k: KvType = "f16"
    cache_type_v: KvType = "f16"
    flash_attn: FlashAttention = "on"
    exact: bool = False
    """Reference kernels: the same bits for every split, mode and thread count."""
    fast_attention: bool = True
    """Flash attention of ggpipe's own, equal to ggml's but for rounding. Where it cannot, and with `exact`: ggml's."""
    rope_scaling: RopeScaling | None = None
    """None takes the model's."""
    rope_scale: float = 0.0
    """Factor by which the context is stretched; 0 takes the model's."""
    rope_freq_base: float = 0.0
    """0 takes the model's."""
    rope_freq_scale: float = 0.0
    """0 takes the model's."""
    yarn_orig_ctx: int = 0
    """Tokens of the context that the model was trained with; 0 takes the model's."""
    yarn_ext_factor: float = -1.0
    """-1 takes the model's."""
    yarn_attn_factor: float = -1.0
    """-1 takes the model's."""
    yarn_beta_fast: float = -1.0
    """-1 takes the model's."""
    yarn_beta_slow: float = -1.0
    """-1 takes the model's."""

    def __post_init__(self) -> None:
        check_range("n_ctx", self.n_ctx, 1, MAX_TOKENS, "a number of tokens", special="0 (the model's own)")
        check_range("n_batch", self.n_batch, 1, MAX_TOKENS, "a number of tokens")
        check_range("n_ubatch", self.n_ubatch, 1, MAX_TOKENS, "a number of tokens")
        check_range("n_seq", self.n_seq, 1, MAX_SEQUENCES, "a number of sequences")
        if 0 < self.n_ctx < self.n_seq:
            raise SettingError(
                "n_ctx",
                f"must be at least {self.n_seq}, a token for each sequence, got {self.n_ctx}",
                Wording("raise it, or lower ", Setting("n_parallel"), " or ", Setting("n_seq")),
            )
        check_range(
            "yarn_orig_ctx", self.yarn_orig_ctx, 1, MAX_TOKENS, "a number of tokens", special="0 (the model's own)"
        )
        check_choice("cache_type_k", self.cache_type_k, get_args(KvType))
        check_choice("cache_type_v", self.cache_type_v, get_args(KvType))
        check_choice("flash_attn", self.flash_attn, get_args(FlashAttention))
        if self.rope_scaling is not None:
            check_choice("rope_scaling", self.rope_scaling, get_args(RopeScaling))
        for name in ("rope_scale", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor",
                     "yarn_beta_fast", "yarn_beta_slow"):  # fmt: skip
            check_finite(name, getattr(self, name))
        if self.flash_attn == "off" and self.cache_type_v in _QUANTIZED:
            raise SettingError(
                "cache_type_v",
                f"{self.cache_type_v} needs flash attention",
                Wording("set ", Setting("flash_attn"), " to on"),
            )


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


@dataclass(frozen=True)
class PipelineConfig:
    """How the work is spread over ranks."""

    layer_split: LayerSplit | None = None
    """How the layers are divided, head first; None spreads them evenly over all ranks."""
    threads: tuple[int, ...] = (-1,)
    """One value for all ranks, or one for each; -1 is this rank's part of its machine's cores."""
    threads_batch: tuple[int, ...] = (-1,)
    """Threads for runs of more than one token, as `threads`; -1 takes the value of `threads`."""
    auto: bool = False
    """The split, and whether the last rank drafts, are measured and planned when the ranks have started."""
    rank_timeout_s: float = 30.0
    """A rank that sends nothing for so many seconds ends the job; 0: never."""
    check_memory: bool = False
    """Nothing is loaded when a machine's available memory is less than its ranks need."""
    tensor_split: tuple[float, ...] = ()
    """In which proportions the ranks of a group divide each tensor, in every group of as many ranks; others divide
    evenly. Groups of the draft count as well."""
    tensor_wire: TensorWire = "f32"
    """What a group's machines send each other of their sums: f16 takes half the bytes, and rounds."""

    def __post_init__(self) -> None:
        if self.rank_timeout_s != 0 and not 1 <= self.rank_timeout_s <= _MOST_TIMEOUT_S:
            raise SettingError(
                "rank_timeout_s",
                f"must be 0 (never) or a number of seconds from 1 to {_MOST_TIMEOUT_S}, got {self.rank_timeout_s:g}",
            )
        for value in self.threads:
            _check_threads("threads", value, Wording("the machine's cores"))
        for value in self.threads_batch:
            _check_threads("threads_batch", value, Wording("as ", Setting("threads")))
        check_choice("tensor_wire", self.tensor_wire, get_args(TensorWire))
        _check_groups(self.layer_split)
        for weight in self.tensor_split:
            if not 0 < weight < math.inf:
                raise SettingError("tensor_split", f"must be numbers above 0, as in 3,1, got {weight:g}")

    @property
    def n_ranks(self) -> int | None:
        """Ranks that the split is for; None: as many as there are."""
        return self.layer_split.n_ranks if self.layer_split is not None else None

    def threads_of(self, rank: int, own_cores: int) -> tuple[int, int]:
        """Threads of a rank for single tokens and for batches; `own_cores` stands in for -1."""
        single = self.threads[rank if len(self.threads) > 1 else 0]
        batch = self.threads_batch[rank if len(self.threads_batch) > 1 else 0]
        single = own_cores if single == -1 else single
        return single, single if batch == -1 else batch


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A draft model, and where it runs."""

    model: ModelConfig
    context: ContextConfig = field(default_factory=ContextConfig)
    layer_split: LayerSplit | None = None
    """How its layers are divided among its ranks, which follow the target's and those of earlier draft models. None:
    the head runs it."""
    threads: int = -1
    """-1 takes the number of threads that the rank has for the target."""
    threads_batch: int = -1
    """Threads for runs of more than one token; -1 takes the value of `threads`."""

    def __post_init__(self) -> None:
        _check_threads("draft.threads", self.threads, Wording("as ", Setting("threads")))
        _check_threads("draft.threads_batch", self.threads_batch, Wording("as ", Setting("draft.threads")))
        _check_groups(self.layer_split)

    @property
    def n_ranks(self) -> int:
        """Ranks that hold nothing but this model."""
        return self.layer_split.n_ranks if self.layer_split is not None else 0


@dataclass(frozen=True)
class PromptCacheConfig:
    """A file that keeps what was computed of a prompt. Each rank has its own, with its own layers."""

    path: Path
    """The first rank's; the others' have `.rank1`, `.rank2`, ... behind the name."""
    saves: Saves = "prompt"
    """What a request writes: its prompt as soon as it is computed, or its prompt and text when it ends."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything that an engine is loaded with."""

    model: ModelConfig
    context: ContextConfig = field(default_factory=ContextConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    drafts: tuple[DraftConfig, ...] = ()
    """Draft models; those with ranks of their own come first."""
    n_requests: int = 1
    """Requests that are served at the same time; further ones wait. Each takes a sequence id of every context."""
    n_queued: int = 1000
    """Requests that wait, at most; further ones are refused."""
    prefill_slowdown: float = 5.0
    """While some requests decode, a run takes about so many times as long because of others' prompts: more serves
    prompts faster, less keeps the other texts flowing."""
    cache_prompt: bool = True
    """What ended requests computed is kept in the KV cache, until cells are needed, for prompts that begin alike."""
    prompt_cache: PromptCacheConfig | None = None
    """What a file has of the first request's prompt is not computed."""
    slot_save_path: Path | None = None
    """A folder, on the machine of each rank, in which prefixes are saved while requests are served."""
    warmup: bool = False
    """All KV cells get their memory while loading, where there is enough; else when they are used first."""

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
                "has ranks of its own after one without",
                "name those with ranks of their own before the others",
            )
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
                "give a number for each rank of a group",
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
        """Ended requests whose cells are kept in this context, at most: each takes a sequence id more.

        None without flash attention, which is slow beside other sequences' cells. With a prompt cache the one that it
        has, or writes.
        """
        if self.prompt_cache is not None:
            return 1
        if not self.cache_prompt or self.context.flash_attn == "off":
            return 0
        n_ids = min(MAX_SEQUENCES, context.n_ctx or MAX_SEQUENCES)
        return min(MAX_PREFIXES, n_ids - context.n_seq)

    @property
    def n_draft_ranks(self) -> int:
        """Ranks that hold nothing but a draft model: the last ones."""
        return sum(draft.n_ranks for draft in self.drafts)

    def draft_heads(self, n_ranks: int) -> tuple[int, ...]:
        """Of all ranks, the first one of each draft model that has ranks."""
        ends = itertools.accumulate((draft.n_ranks for draft in self.drafts), initial=n_ranks - self.n_draft_ranks)
        return tuple(head for head, draft in zip(ends, self.drafts, strict=False) if draft.n_ranks)

    def model_of(self, rank: int, n_ranks: int) -> int:
        """Id of the model whose layers a rank holds, of all ranks: `TARGET`, or that of a draft model."""
        return TARGET + bisect.bisect_right(self.draft_heads(n_ranks), rank)

    def part_of(self, model: int) -> EngineConfig | DraftConfig:
        """The model of this id, and its context."""
        return self if model == TARGET else self.drafts[model - FIRST_DRAFT]

    def check_ranks(self, n_ranks: int) -> None:
        """Compare settings that name ranks with the number of ranks. Raises SettingError and LaunchError."""
        pipeline, n_draft = self.pipeline, self.n_draft_ranks
        for name, values in (("threads", pipeline.threads), ("threads_batch", pipeline.threads_batch)):
            if len(values) not in (1, n_ranks):
                raise SettingError(
                    name, f"has {len(values)} values for {n_ranks} ranks", "give one for all, or one for each rank"
                )
        if pipeline.n_ranks is not None and pipeline.n_ranks + n_draft != n_ranks:
            n = pipeline.n_ranks + n_draft
            raise LaunchError(
                Setting("layer_split"),
                f" names {n} ranks, but {n_ranks} were started: use mpirun -n {n}, or give {n_ranks} shares",
            )


def _check_groups(split: LayerSplit | None) -> None:
    if split is None:
        return
    n_sizes, n_shares = len(split.group_sizes), len(split.shares)
    if n_sizes not in (0, n_shares):
        raise SettingError("group_sizes", f"has {n_sizes} numbers for {n_shares} shares", "give one for each")
    for size in split.group_sizes:
        check_range("group_sizes", size, 1, MAX_PARTS, "a number of ranks")


def _check_threads(name: str, value: int, meaning: Wording) -> None:
    check_range(name, value, 1, MAX_THREADS, special=Wording("-1 (", meaning, ")"))
