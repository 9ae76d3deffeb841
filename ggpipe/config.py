"""Settings, frozen and checked once. Names and defaults are llama.cpp's; the CLI takes its defaults from here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ggpipe.errors import UsageError

LoadMode = Literal["mmap", "none", "mlock", "mmap+mlock", "dio"]
Numa = Literal["distribute", "isolate", "numactl"]
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
ROPE_SCALINGS = ("none", "linear", "yarn")


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how its weights get into memory."""

    path: Path
    load_mode: LoadMode = "mmap"
    repack: bool = True
    numa: Numa | None = None
    override_kv: tuple[str, ...] = ()
    """`KEY=TYPE:VALUE` with TYPE int, float, bool or str, as llama.cpp's --override-kv."""
    loras: tuple[tuple[Path, float], ...] = ()


@dataclass(frozen=True)
class ContextConfig:
    """The context: its size in tokens, how it is computed, how positions are encoded."""

    n_ctx: int = 0
    """Tokens; 0 takes the model's training length."""
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq: int = 1
    """Sequence ids in use at the same time."""
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: Literal["on", "off", "auto"] = "on"
    exact: bool = False
    """Reference kernels: the same bits for every split, mode and thread count."""
    rope_scaling: str | None = None
    rope_scale: float = 0.0
    """Context is stretched by this factor; 0 takes the model's."""
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_fast: float = -1.0
    yarn_beta_slow: float = -1.0

    def __post_init__(self) -> None:
        if self.n_ctx < 0:
            raise UsageError(f"-c is a number of tokens, or 0 for the model's own; {self.n_ctx} is neither")
        if self.n_batch < 1 or self.n_ubatch < 1:
            raise UsageError("-b and -ub are numbers of tokens: 1 or more")
        for flag, kind in (("-ctk", self.cache_type_k), ("-ctv", self.cache_type_v)):
            if kind not in KV_TYPES:
                raise UsageError(f"{flag} {kind}: known types are {', '.join(KV_TYPES)}")
        if self.flash_attn == "off" and self.cache_type_v not in ("f32", "f16", "bf16"):
            raise UsageError(f"-ctv {self.cache_type_v} needs flash attention: leave out -fa off")
        if self.rope_scaling is not None and self.rope_scaling not in ROPE_SCALINGS:
            raise UsageError(f"--rope-scaling {self.rope_scaling}: known kinds are {', '.join(ROPE_SCALINGS)}")


@dataclass(frozen=True)
class SamplingConfig:
    """llama.cpp's sampler chain: penalties, top-k, top-p, min-p, temperature, draw."""

    temp: float = 0.8
    """At or below 0: greedy."""
    top_k: int = 40
    """At or below 0: all tokens."""
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_last_n: int = 64
    """Tokens that penalties look back on; 0 turns them off, -1 is the whole context."""
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = -1
    """-1 draws a fresh one."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        numbers = (
            self.temp,
            self.top_p,
            self.min_p,
            self.repeat_penalty,
            self.presence_penalty,
            self.frequency_penalty,
        )
        if not all(math.isfinite(x) for x in numbers):
            raise UsageError("sampling settings must be finite numbers")
        if self.repeat_penalty <= 0:
            raise UsageError(f"--repeat-penalty must be above 0, not {self.repeat_penalty}")
        if self.repeat_last_n < -1:
            raise UsageError(f"--repeat-last-n is a number of tokens, or -1 for all; {self.repeat_last_n} is neither")
        if not -1 <= self.seed < 2**32 - 1:  # libllama takes the last one for "random"
            raise UsageError(f"-s is between 0 and 4294967294, or -1 for a random seed; {self.seed} is neither")

    @property
    def greedy(self) -> bool:
        """The most probable token is always taken."""
        return self.temp <= 0

    @property
    def penalizes(self) -> bool:
        """Past tokens change the logits."""
        on = self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return on and self.repeat_last_n != 0

    @property
    def only_lowers(self) -> bool:
        """No penalty can raise a token, so the best tokens after penalties are among the best before them."""
        return self.repeat_penalty >= 1 and self.presence_penalty >= 0 and self.frequency_penalty >= 0


Mode = Literal["iterative", "speculative", "async"]


@dataclass(frozen=True)
class SpeculationConfig:
    """How a draft model guesses ahead. Names and meanings are PipeInfer's and llama.cpp's."""

    mode: Mode = "async"
    """`iterative`: no guesses. `speculative`: draft, verify, repeat. `async`: drafting and verifying overlap."""
    n_draft: int = 8
    """Guesses in a micro-batch, at most; also in a run, where `async` takes fewer when that pays."""
    n_min: int = 0
    """Micro-batches with fewer guesses are not sent."""
    p_accept: float = 0.0
    """A branch ends where the draft's best candidate is less probable than this."""
    p_split: float = 0.1
    """A branch splits where a further candidate is at least this probable."""
    p_recovery: float = 0.0
    """Both thresholds rise by this with each micro-batch since the last accepted token,"""
    p_decay: float = 0.0
    """and fall by this with each attempt since then that found nothing probable enough."""
    n_parallel: int = 1
    """Branches that are drafted side by side; 1 makes chains."""
    cancel: bool = True
    """Stop runs that turned out wrong while they are in flight."""
    continuous: bool = True
    """Guess on while guesses are in flight; else one micro-batch for each accepted token."""

    def __post_init__(self) -> None:
        if self.n_draft < 1 or self.n_parallel < 1 or not 0 <= self.n_min <= self.n_draft:
            raise UsageError("--draft and -np are 1 or more, --draft-min is between 0 and --draft")
        chances = (("-pa", self.p_accept), ("-ps", self.p_split), ("-pr", self.p_recovery), ("-pd", self.p_decay))
        for flag, value in chances:
            if not 0 <= value <= 1:
                raise UsageError(f"{flag} is between 0 and 1; {value} is not")


@dataclass(frozen=True)
class PipelineConfig:
    """How the work is spread over ranks."""

    shares: tuple[float, ...] | None = None
    """Share of the layers for each rank, head first; None spreads them evenly over all ranks."""
    threads: tuple[int, ...] = (-1,)
    """One value for all ranks, or one for each; -1 is this rank's part of its machine's cores."""
    threads_batch: tuple[int, ...] = (-1,)
    """As `threads`, for runs of more than one token; -1 is as `threads`."""
    auto: bool = False
    """Shares, and whether the last rank drafts, are found out when the ranks are there."""

    def __post_init__(self) -> None:
        for value in (*self.threads, *self.threads_batch):
            if value == 0 or value < -1:
                raise UsageError(f"a number of threads is 1 or more, or -1 for the machine's cores; {value} is neither")

    def threads_of(self, rank: int, own_cores: int) -> tuple[int, int]:
        """Threads of a rank for single tokens and for batches; `own_cores` stands in for -1."""
        single = self.threads[rank if len(self.threads) > 1 else 0]
        batch = self.threads_batch[rank if len(self.threads_batch) > 1 else 0]
        single = own_cores if single == -1 else single
        return single, single if batch == -1 else batch


@dataclass(frozen=True)
class DraftConfig:
    """The draft model, and where it runs."""

    model: ModelConfig
    context: ContextConfig = field(default_factory=ContextConfig)
    shares: tuple[float, ...] = ()
    """Share of its layers for each draft rank; these follow the target's ranks. None: it runs inside the head."""
    threads: int = -1
    """-1 is as the rank's threads for the target would be."""
    threads_batch: int = -1
    """As `threads`, for runs of more than one token; -1 is as `threads`."""

    def __post_init__(self) -> None:
        if any(value == 0 or value < -1 for value in (self.threads, self.threads_batch)):
            raise UsageError("-td and -tbd are 1 or more, or -1 for the same as -t")


@dataclass(frozen=True)
class EngineConfig:
    """All that a session is opened with."""

    model: ModelConfig
    context: ContextConfig = field(default_factory=ContextConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    draft: DraftConfig | None = None

    @property
    def n_draft_ranks(self) -> int:
        """Ranks that hold nothing but the draft model: the last ones."""
        return len(self.draft.shares) if self.draft else 0
