"""A tensor-parallel group: several ranks that compute one stage together, each with a part of every weight.

Most architectures are split in attention and FFN, by libllama's rules or by our own (group_cuts.py). Where attention
cannot be split, or would be wrong, all parts compute the whole of it, and only FFN and output are split. Those listed
here were compared with the whole model by scripts/bench/check_groups; docs/groups.md shows them.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from ggpipe.config.context import ContextConfig
from ggpipe.config.layer_split import MAX_PARTS
from ggpipe.config.model import ModelConfig
from ggpipe.core.dropped_rows import MOST_ROWS_IN_GROUP
from ggpipe.core.messages import LogitsKind, LogitsRequest, RowLogits
from ggpipe.errors import ModelError, RunError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group_cuts import cuts, most_parts_by_heads
from ggpipe.llama.libllama import last_error, lib, logged_errors, native
from ggpipe.llama.model_header import ModelHeader, n_numbers
from ggpipe.llama.params import model_params

_SPLIT_FUNCTION = "_Z33llama_meta_device_get_split_statePK11ggml_tensorPv"
_NO_TOKEN = -1
_LOST = "another rank of this group is lost"
_SHIFTS = (30, 20, 10, 0)

SPLIT_ATTENTION = frozenset(
    """
    afmoe apertus arcee arctic bailingmoe bailingmoe2 chatglm codeshell cogvlm cohere2 cohere2moe command-r dbrx
    deci deepseek deepseek2-ocr dots1 ernie4_5 ernie4_5-moe exaone exaone-moe exaone4 falcon gemma gemma2 gemma3
    gemma4 glm4 glm4moe gpt-oss gpt2 gptneox granite granite_swa granitemoe grovemoe hunyuan-dense hunyuan-moe
    hunyuan_vl hy_v3 internlm2 jais2 laguna lfm2 lfm2moe llama llama4 maincoder maple mellum mimo2 minicpm mistral3
    muse-glimmer nanbeige nemotron olmo openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo3
    pockettts qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe qwen3vl qwen3vlmoe seed_oss smallthinker
    smollm3 spark2_5 starcoder starcoder2 step35 xverse
    """.split()  # noqa: SIM905
)
"""Architectures whose attention, FFN and output are split."""

SPLIT_LATENT = frozenset(
    """
    bailingmoe3 deepseek2 deepseek32 deepseek4 dots3note glm-dsa hy_v4 kimi-linear mistral4
    """.split()  # noqa: SIM905
)
"""Those whose attention is latent: its heads are split, by our own rule, and its KV cells are not."""

SPLIT_HYBRID = frozenset(["falcon-h1", "granitehybrid", "jamba", "nemotron_h", "nemotron_h_moe", "qwen3next"])
"""Hybrid models whose attention is split by our own rule, and of whose recurrent layers only gated delta nets are."""

SPLIT_FFN = frozenset(
    """
    baichuan bloom grok jais mamba mamba2 minimax-01 minimax-m2 minimax-m3 olmo2 olmoe plamo2 qwen3tts refact
    stablelm talkie
    """.split()  # noqa: SIM905
)
"""Those of which only FFN and output are: libllama does not split their attention, or ALiBi's slopes would be wrong."""


_FFN = r"ffn_(up|gate|gate_up|down)(_exps)?\.weight"
_ATTENTION = r"(attn_(q|k|v|qkv|output|gate)|ssm_(out|alpha|beta|ba|conv1d))\.weight"
_OUTPUT = r"(output|token_embd)\.weight"
_IN_LAYER = re.compile(r"blk\.\d+\.")


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
    n_heads = header.per_layer("attention.head_count_kv", header.number("attention.head_count"))
    borrows = header.number("attention.shared_kv_layers") > 0  # layers read others' cells, which may be cut otherwise
    head = header.number("attention.key_length", header.width // max(header.number("attention.head_count"), 1))
    norms = [layer["attn_q_norm.weight"] for layer in header.layers if "attn_q_norm.weight" in layer]
    own_norms = any(n_numbers(norm) > head for norm in norms)  # of each head: libllama can cut them at other heads
    return file.architecture in SPLIT_ATTENTION and 1 not in n_heads and not borrows and not own_norms


def splits_latent(file: ModelFile) -> bool:
    """The parts share the heads of latent attention, and each has all of its KV cells."""
    return file.architecture in SPLIT_LATENT and most_parts_by_heads(file) > 1


def splits_hybrid(file: ModelFile) -> bool:
    """The parts share the attention heads of a hybrid model, with their KV cells."""
    return file.architecture in SPLIT_HYBRID and most_parts_by_heads(file) > 1


def splits_by_heads(file: ModelFile) -> bool:
    """The parts share attention heads by our own cuts."""
    return splits_latent(file) or splits_hybrid(file)


def most_parts(file: ModelFile) -> int:
    """Parts of a group that all have attention heads to compute; 1: the model is not known to work in groups."""
    if file.architecture not in SPLIT_ATTENTION | SPLIT_LATENT | SPLIT_HYBRID | SPLIT_FFN:
        return 1
    if splits_by_heads(file):
        return min(MAX_PARTS, most_parts_by_heads(file))
    if not splits_attention(file):
        return MAX_PARTS
    header = ModelHeader(file)
    n_heads = header.per_layer("attention.head_count_kv", header.number("attention.head_count"))
    return min(MAX_PARTS, *(n for n in n_heads if n))


def divided_weights(file: ModelFile) -> frozenset[str]:
    """Names of the tensors that the parts of a group divide; of others each holds all.

    As our own cuts and libllama's function say (`llama_meta_device_get_split_state`), but for small ones, which count
    as whole.
    """
    patterns = [_FFN, *[_OUTPUT] * (file.architecture != "deepseek4"), *[_ATTENTION] * splits_attention(file)]
    by_libllama = re.compile("|".join(patterns))
    names = (name for name in file.tensors if by_libllama.fullmatch(_IN_LAYER.sub("", name)))
    return frozenset(names) | cuts(file, (1, 1), splits_by_heads(file)).keys()


def context_of_group(file: ModelFile, context: ContextConfig) -> ContextConfig:
    """The settings of a context, as a group needs them; EngineConfig has checked these. Raises ModelError for models
    that are not known to work in groups."""
    if file.architecture not in SPLIT_ATTENTION | SPLIT_LATENT | SPLIT_HYBRID | SPLIT_FFN:
        raise ModelError(f"'{file.architecture}' models are not known to work in groups: give each rank its own layers")
    if not splits_attention(file) and not splits_by_heads(file):
        return context
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
            part=group.part,
            n_parts=group.n_parts,
            sum=group.sum,
            ask=ctypes.cast(ask, ctypes.c_void_p).value or 0,
            model=ctypes.cast(shape, ctypes.c_void_p).value or 0,
            split_attention=splits_attention(file),
            cuts={name: astuple(cut) for name, cut in cuts(file, group.shares, splits_by_heads(file)).items()},
        )
        yield
        stage.leave_model()
    finally:
        lib.llama_model_free(shape)


def together(
    group: Group, columns: Sequence[int], logits_requests: Sequence[LogitsRequest], own: Sequence[RowLogits]
) -> list[RowLogits]:
    """The rows' logits on part 0, assembled from those of all parts; nothing on other parts.

    All parts call it. `columns`: how many tokens each part has, in their order. `logits_requests`: of each row. `own`:
    what this part has of the rows: of its own tokens only, with their ids.
    """
    if group.part > 0:
        n = columns[group.part]
        message = b"".join(
            _packed(row, logits_request, n) for row, logits_request in zip(own, logits_requests, strict=True)
        )
        group.sum.send(_address(message), len(message))
        return []
    rows = [[row] for row in own]
    for part, n in enumerate(columns[1:], 1):
        received = bytearray(sum(_form(logits_request, n).size for logits_request in logits_requests))
        group.sum.receive(part, _address(received), len(received))
        at = 0
        for row, logits_request in zip(rows, logits_requests, strict=True):
            row.append(_unpacked(row[0].row, received, at, logits_request, n))
            at += _form(logits_request, n).size
    return [_merged(row, logits_request) for row, logits_request in zip(rows, logits_requests, strict=True)]


def _form(logits_request: LogitsRequest, n_tokens: int) -> struct.Struct:
    """The layout of a part's message about a row: logits; or ids, logits, where they are wanted the shares of smaller
    ids, and the log-sum-exp."""
    n = min(logits_request.n, n_tokens)
    n_below = n if logits_request.temp > 0 else 0
    return struct.Struct(f"={n_tokens}f" if logits_request.kind is LogitsKind.FULL else f"={n}i{n}f{n_below}fd")


def _packed(row: RowLogits, logits_request: LogitsRequest, n_tokens: int) -> bytes:
    if row.ids is None:
        return bytes(row.logits.tobytes())
    missing = min(logits_request.n, n_tokens) - len(row.ids)  # banned
    nothing = (0.0,) * missing
    below = (*row.below, *nothing) if logits_request.temp > 0 else ()
    return _form(logits_request, n_tokens).pack(
        *row.ids, *(_NO_TOKEN,) * missing, *row.logits, *nothing, *below, row.log_sum_exp
    )


def _unpacked(number: int, message: bytearray, at: int, logits_request: LogitsRequest, n_tokens: int) -> RowLogits:
    form = _form(logits_request, n_tokens)
    if logits_request.kind is LogitsKind.FULL:
        return RowLogits(number, None, np.frombuffer(message, np.float32, n_tokens, at), 0.0)
    *values, log_sum_exp = form.unpack_from(message, at)
    n = min(logits_request.n, n_tokens)
    ids = tuple(id for id in values[:n] if id != _NO_TOKEN)
    logits, below = tuple(values[n : n + len(ids)]), tuple(values[2 * n : 2 * n + len(ids)])
    return RowLogits(number, ids, logits, log_sum_exp, below=below)


def _merged(parts: Sequence[RowLogits], logits_request: LogitsRequest) -> RowLogits:
    """As one part would have it, but for rounding in the log-sum-exp."""
    if logits_request.kind is LogitsKind.FULL:
        return RowLogits(parts[0].row, None, np.concatenate([part.logits for part in parts]), 0.0)
    all_of_them = [pair for part in parts for pair in zip(part.ids or (), part.logits, strict=True)]
    best = sorted(all_of_them, key=lambda pair: (-pair[1], pair[0]))[: logits_request.n]
    ids, logits = tuple(id for id, _ in best), tuple(logit for _, logit in best)
    if not (logits_request.sums and logits_request.n > 1 and best):
        return RowLogits(parts[0].row, ids, logits, math.nan)
    with_tokens = [part for part in parts if part.ids]
    greatest = max(part.log_sum_exp for part in with_tokens)
    log_sum_exp = greatest + math.log(sum(math.exp(part.log_sum_exp - greatest) for part in with_tokens))
    found, before = dict[int, float](), 0.0
    for part in with_tokens if logits_request.temp > 0 else ():
        share = math.exp(part.log_sum_exp - log_sum_exp)
        found |= {id: before + share * below for id, below in zip(part.ids or (), part.below, strict=True)}
        before += share
    return RowLogits(parts[0].row, ids, logits, log_sum_exp, below=tuple(found[id] for id in ids) if found else ())


def _address(message: bytes | bytearray) -> int:
    return np.frombuffer(message, np.uint8).ctypes.data if message else 0


class Membership:
    """This rank's membership of a group: it joins when its stage loads, and leaves when the stage is closed.

    All methods but `leave` belong to the stage's thread.
    """

    def __init__(self, part: int, shares: tuple[float, ...], connect: Callable[[], native.GroupSum]) -> None:
        """`shares`: see `Group`. All parts call `connect` at the same time, and it waits for all of them."""
        self.part = part
        self.is_joining = False
        """It waits for the other parts."""
        self._shares = shares
        self._connect = connect
        self._sum: native.GroupSum | None = None
        self._has_left = False

    @property
    def is_lost(self) -> bool:
        """Another part is gone, or this rank has left."""
        return self._sum is not None and self._sum.lost

    def join(self) -> Group:
        """Wait for the other parts."""
        self.is_joining = True
        self._sum = self._connect()
        self.is_joining = False
        if self._has_left:
            self._sum.abandon()
        return Group(part=self.part, n_parts=len(self._shares), shares=self._shares, sum=self._sum)

    def agree(self, stop: bool, dead: Collection[int] = (), n_rows: int = 0) -> tuple[bool, frozenset[int]]:
        """Whether any part wants to stop, and the rows that any part knows to be dead, of a run of `n_rows` rows. All
        parts ask at the same places, and get the same answer. Of long runs, no rows are dead.

        Raises RunError when a part is lost.
        """
        assert self._sum is not None
        n = n_rows if n_rows <= MOST_ROWS_IN_GROUP else 0
        numbers = (ctypes.c_float * max(n, 1))(*(float(row in dead) for row in range(n)))
        stop = self._sum.sum(ctypes.addressof(numbers), len(numbers), stop)
        if self.is_lost:
            raise RunError(_LOST)
        return stop, frozenset(row for row in range(n) if numbers[row] > 0)

    def told(self, number: int) -> int:
        """The number below 2^40 that part 0 gives; it does not matter what other parts give. All parts call this at the
        same places.

        Raises RunError when a part is lost.
        """
        assert self._sum is not None
        own = number if self.part == 0 else 0
        digits = (ctypes.c_float * 4)(*(float(own >> shift & 1023) for shift in _SHIFTS))  # 16 bits hold each
        self._sum.sum(ctypes.addressof(digits), len(digits), False)
        if self.is_lost:
            raise RunError(_LOST)
        return sum(int(digit) << shift for digit, shift in zip(digits, _SHIFTS, strict=True))

    def take_times(self) -> tuple[float, ...]:
        """Seconds of each sum inside decodes since the last call. The first call starts the measurement."""
        assert self._sum is not None
        return tuple(seconds for n, seconds in self._sum.take_times() if n > 1)  # `agree` sums one number

    def leave(self) -> None:
        """Wait for no other part any more: sums end at once. From any thread."""
        self._has_left = True
        if self._sum is not None:
            self._sum.abandon()
