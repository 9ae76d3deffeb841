"""A tensor-parallel group: several ranks that compute one stage together, each with a part of every weight.

Most architectures are split in attention and FFN. Where libllama does not split attention, or is wrong when it does,
all parts compute the whole attention, and only FFN and output are split.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ggpipe.config import ContextConfig, ModelConfig
from ggpipe.errors import ModelError, SettingError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.libllama import last_error, lib, logged_errors, native
from ggpipe.llama.model_header import ModelHeader
from ggpipe.llama.params import model_params

MAX_PARTS = 16
"""ggml's limit of a meta device."""

_SPLIT_FUNCTION = "_Z33llama_meta_device_get_split_statePK11ggml_tensorPv"

_WHOLE_ATTENTION = frozenset(
    (
        # libllama's own list, llm_arch_supports_sm_tensor
        "bailingmoe3", "bitnet", "deepseek2", "deepseek32", "dots3note", "falcon-h1", "gemma3n", "glm-dsa", "glm5-next",
        "granitehybrid", "grok", "hy_v4", "jamba", "kimi-k3", "kimi-linear", "mamba", "mamba2", "minicpm3",
        "minimax-01", "minimax-m2", "minimax-m3", "mistral4", "mpt", "nemotron_h", "nemotron_h_moe", "olmo2", "olmoe",
        "plamo2", "qwen4exp",
        # ALiBi: a part would take the slopes of its first heads
        "baichuan", "bloom", "jais", "refact",
    )
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Group:
    """This rank's place in its group. All parts decode the same runs with the same bytes from the stage before.

    What the parts give back is the same on all of them, but the logits: only part 0 has them.
    """

    part: int
    """From 0; part 0 speaks for the group."""
    n_parts: int
    shares: tuple[float, ...]
    """Each part's share of the weights, at any scale."""
    sum: native.GroupSum
    """Adds up the parts' results."""


def splits_attention(file: ModelFile) -> bool:
    """The parts share the attention heads; else each computes all of them."""
    header = ModelHeader(file)
    n_heads = header.number("attention.head_count_kv", header.number("attention.head_count"))
    return file.architecture not in _WHOLE_ATTENTION and n_heads > 1


def context_of_group(file: ModelFile, n_parts: int, model: ModelConfig, context: ContextConfig) -> ContextConfig:
    """The settings of a context, as a group of so many parts needs them.

    Raises SettingError or ModelError, with what to do, where there can be no such group.
    """
    if n_parts > MAX_PARTS:
        raise SettingError(f"a group has at most {MAX_PARTS} ranks, got {n_parts}: make several stages of them")
    if context.exact:
        raise SettingError(
            "`exact` does not hold for groups, whose sums depend on their size: leave it out, or the groups"
        )
    if model.loras:
        raise SettingError("`loras` cannot be used in a group: merge them into the model, or leave out the groups")
    if not splits_attention(file):
        return context
    if context.flash_attn == "off":
        raise SettingError(f"'{file.architecture}' models in a group need flash attention: leave `flash_attn` at auto")
    return replace(context, flash_attn="on")


@contextlib.contextmanager
def joined(stage: native.Stage, group: Group, file: ModelFile, model: ModelConfig) -> Iterator[None]:
    """Make a stage part of a group; inside, its layers are loaded and its context is made.

    libllama says which part has what of a tensor. For that it wants a model, which it reads here, without weights.
    """
    if not hasattr(lib._lib, _SPLIT_FUNCTION):
        raise ModelError("this libllama does not split weights: reinstall llama-cpp-python as ggpipe needs it")
    ask = getattr(lib._lib, _SPLIT_FUNCTION)
    keep: list[object] = []
    params = model_params(model, keep)
    params.no_alloc = True
    devices = (ctypes.c_void_p * 1)(None)
    shares = (ctypes.c_float * lib.llama_max_devices())(*group.shares)
    params.devices, params.tensor_split = ctypes.cast(devices, ctypes.c_void_p), shares
    logged_errors()
    shape = lib.llama_model_load_from_file(os.fsencode(file.paths[0]), params)
    if not shape:
        raise ModelError(f"cannot load {file.paths[0]}: {last_error()}")
    try:
        stage.join(
            file=native.MappedModel([os.fsencode(path) for path in file.paths]),
            part=group.part,
            n_parts=group.n_parts,
            sum=group.sum,
            ask=ctypes.cast(ask, ctypes.c_void_p).value or 0,
            model=ctypes.cast(shape, ctypes.c_void_p).value or 0,
            split_attention=splits_attention(file),
        )
        yield
        stage.leave_model()
    finally:
        lib.llama_model_free(shape)
