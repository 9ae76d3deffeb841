"""Settings of a model's context: its size, batches, KV cache, attention and positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ggpipe.config.checks import MAX_TOKENS, check_choice, check_finite, check_range
from ggpipe.errors import Setting, SettingError, Wording

KvType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
FlashAttention = Literal["on", "off", "auto"]
RopeScaling = Literal["none", "linear", "yarn"]
MAX_SEQUENCES = 256
"""Maximum number of sequence ids, which is libllama's."""
MAX_PREFIXES = 16
"""Maximum number of ended requests whose KV cells are kept."""
MAX_STATES = 8
"""Maximum number of states that draft tokens are taken back to: one for each run in flight that has draft tokens."""
_QUANTIZED = set(get_args(KvType)) - {"f32", "f16", "bf16"}


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """A model's context. Raises SettingError for an invalid setting."""

    n_ctx: int = 0
    """Size in tokens; 0: the length that the model was trained with."""
    n_batch: int = 2048
    """Maximum number of prompt tokens in a batch."""
    n_ubatch: int = 512
    """Maximum number of rows in a run."""
    n_seq: int = 1
    """Minimum number of sequence ids."""
    n_branches: int = 0
    """Maximum number of additional sequence ids, for branches of draft tokens. The context and the model may have room
    for fewer."""
    n_states: int = 0
    """Maximum number of additional sequence ids, for the states to which recurrent and hybrid models take draft tokens
    back."""
    cache_type_k: KvType = "f16"
    cache_type_v: KvType = "f16"
    flash_attn: FlashAttention = "on"
    exact: bool = False
    """The same bits for every split, mode and thread count, whatever other requests are running."""
    fast_kernels: bool | None = None
    """Use ggpipe's own flash attention and products of weights, which equal ggml's except for rounding. ggml's are used
    where ours are not supported or not faster. None: where not `exact`, which then means ggml's reference kernels."""
    rope_scaling: RopeScaling | None = None
    """None: the model's."""
    rope_scale: float = 0.0
    """Factor by which the context is extended; 0: the model's."""
    rope_freq_base: float = 0.0
    """0: the model's."""
    rope_freq_scale: float = 0.0
    """0: the model's."""
    yarn_orig_ctx: int = 0
    """Tokens of the context that the model was trained with; 0: the model's."""
    yarn_ext_factor: float = -1.0
    """-1: the model's."""
    yarn_attn_factor: float = -1.0
    """-1: the model's."""
    yarn_beta_fast: float = -1.0
    """-1: the model's."""
    yarn_beta_slow: float = -1.0
    """-1: the model's."""

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

    @property
    def uses_fast_kernels(self) -> bool:
        """ggpipe's own kernels are used where they are supported."""
        return not self.exact if self.fast_kernels is None else self.fast_kernels
