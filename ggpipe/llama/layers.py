"""A stage's layers as libllama's model: loaded from a file, and adapted by LoRAs."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ggpipe.config.model import ModelConfig
from ggpipe.core.drafters.registry import HEADS
from ggpipe.errors import MemoryNeededError, ModelError, RunError, Setting, SettingError
from ggpipe.llama import partial_model
from ggpipe.llama.completed import as_one_file
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.libllama import last_error, lib, logged_errors, native
from ggpipe.llama.machine import advise, available_bytes, lock_memory
from ggpipe.llama.model_header import ModelHeader
from ggpipe.llama.params import model_params, place_layers

OnProgress = Callable[[int, int], bool]
"""Called while loading with bytes done and total bytes; False stops the loading."""

_STEP = 16 << 20
READERS = 4  # a disk is fastest with several requests at a time
_STREAM_SHARE = 0.8  # of the memory that is available: KV cells and compute buffers come later


class _MappedFiles:
    """A model's files, mapped read-only. Addresses in bytes."""

    def __init__(self, file: ModelFile) -> None:
        """Raises ModelError when a file cannot be mapped."""
        self._file = file
        try:
            self._maps = [np.memmap(path, np.uint8, "r") for path in file.paths]
        except (OSError, ValueError) as e:
            raise ModelError(f"cannot map {file.paths[0]} into memory: {e}") from e
        self.places = {
            name: (self._maps[tensor.file].ctypes.data + tensor.offset, tensor.size)
            for name, tensor in file.tensors.items()
        }
        """Address and size in bytes of each tensor."""

    def populate(self, ranges: Sequence[tuple[int, int]], tell: Callable[[int], bool]) -> bool:
        """Read these ranges (address, bytes) into memory. False when `tell`, which gets bytes done, stopped it.

        Raises ModelError when they cannot be read.
        """
        done = 0
        for address, size in ranges:
            for start in range(address, address + size, _STEP):
                end = min(start + _STEP, address + size)
                if error := native.read_pages(start, end - start):
                    raise ModelError(
                        f"cannot read {self._file.paths[0]} into memory: {os.strerror(error)}; copy it again"
                    )
                done += end - start
                if not tell(done):
                    return False
        return True

    def keep_only(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Give back the memory of what is in none of these ranges: the kernel maps whole folios."""
        for file in self._maps:
            at, end = file.ctypes.data, file.ctypes.data + file.size
            for address, size in sorted(ranges):
                if at <= address < end:
                    _give_back(at, address)
                    at = address + size
            _give_back(at, end)


def _give_back(first: int, end: int) -> None:
    """The whole pages between two addresses."""
    first, end = first + -first % mmap.PAGESIZE, end - end % mmap.PAGESIZE
    if first < end:
        advise(first, end - first, mmap.MADV_DONTNEED)


def load_layers(
    stage: native.Stage,
    file: ModelFile,
    layers: tuple[int, int],
    config: ModelConfig,
    keep: list[object],
    progress: OnProgress | None,
    in_group: bool,
    is_head: bool = False,
) -> Any:
    """A `llama_model` with layers [first, last) on the stage's devices; hold `keep` as long. Layers from
    `ModelFile.n_layer` on are MTP layers.

    `in_group`: other ranks compute them together with this one. `is_head`: it may be a draft head, which reads states
    of its target.
    Raises ModelError when libllama cannot load the model, or it does not generate text token by token, RunError when
    `progress` stopped it, SettingError when memory cannot be locked.
    """
    if not is_head and not ModelHeader(file).is_causal:
        raise ModelError(
            f"{file.paths[0]}: this '{file.architecture}' model attends to later tokens as well, so it cannot "
            "generate text, and its embeddings are not supported; use a model with causal attention"
        )
    a, b = layers
    # The output layer counts as one more layer, after MTP layers, whose weights are only loaded where they draft.
    n_all = file.n_blocks + 1
    end = n_all if b >= file.n_layer else b
    params = model_params(config, keep)
    params.load_mtp = a >= file.n_layer
    up, local, down = stage.devices()
    counts = [(up, a), (local, end - a), (down, n_all - end)]
    place_layers(params, counts, keep)
    mapped = config.maps
    partial_model.complete(file, None if file.architecture in HEADS else layers, progress or _go_on)
    mapping = _MappedFiles(file) if mapped or in_group else None
    keep.append(mapping)
    total = file.n_bytes

    wanted = True

    def tell(done: int) -> bool:
        nonlocal wanted
        if progress is not None:
            all_bytes = max(total - stage.hidden_bytes + stage.slice_bytes + stage.mapped_bytes, 1)
            wanted = wanted and progress(done, all_bytes)
        return wanted

    def on_progress(share: float, _data: object) -> bool:  # libllama counts hidden tensors into the whole
        return tell(int(share * total))

    callback = lib.llama_progress_callback(on_progress)
    params.progress_callback = callback
    logged_errors()
    with as_one_file(file, lambda _: not mapped) as path:
        if config.streams:
            _stream(stage, file, config)
        stage.begin_load(mapping.places if mapping else {}, use_in_place=mapped)
        model = None
        try:
            model = lib.llama_model_load_from_file(os.fsencode(path), params)
        finally:
            stage.end_load(loaded=bool(model))
    if not model:
        if not wanted:
            raise RunError("loading was stopped")
        raise ModelError(f"cannot load {file.paths[0]}: {last_error()}")
    try:
        partial_model.check(file, stage.weights)
        if file.architecture in HEADS and not is_head:
            raise ModelError(
                f"{file.paths[0]} is {HEADS[file.architecture]}, which only drafts for its target: name it with ",
                Setting("draft.model"),
                ", and give shares with ",
                Setting("layer_split"),
                "; it is not profiled or recorded",
            )
        if (lib.llama_model_has_encoder(model) and not is_head) or not lib.llama_model_has_decoder(model):
            raise ModelError(f"'{file.architecture}' models do not continue text; give a decoder-only model")
        if lib.llama_model_is_diffusion(model):
            raise ModelError(f"'{file.architecture}' is a diffusion model; it does not write token by token")
        if stage.undividable:
            raise ModelError(
                f"{stage.undividable} cannot be divided between the ranks of a group, since its rows are one block of "
                f"{file.tensors[stage.undividable].type} each: use a type of smaller blocks, such as q8_0, or give "
                "each rank its own layers"
            )
        done = total - stage.hidden_bytes
        for begins in (False, True) if config.streams else (False,):
            if begins:
                _begin_streaming(stage)
            while tell(done) and (n := _load_next(stage)) is not None:
                done += n
        if wanted and mapping and mapped and config.numa is None:  # with NUMA, pages settle where they are first used
            ranges = stage.mapped_ranges
            if mapping.populate(ranges, lambda n: tell(done + n)) and in_group:
                mapping.keep_only(ranges)
        if config.load_mode in ("mlock", "mmap+mlock") and (error := lock_memory()):
            raise SettingError(
                "load_mode",
                f"{config.load_mode}: cannot lock memory ({error}); raise the limit with `ulimit -l unlimited`",
            )
        if not tell(total):  # also where it was stopped before
            raise RunError("loading was stopped")
    except BaseException:
        lib.llama_model_free(model)
        raise
    return model


def _go_on(_done: int, _total: int) -> bool:
    return True


def _stream(stage: native.Stage, file: ModelFile, config: ModelConfig) -> None:
    """Have the stage read weights that do not fit into memory as they are used."""
    asked = config.stream_memory_gb
    memory = int(asked * 1e9 if asked is not None else available_bytes() * _STREAM_SHARE)
    places = {name: (tensor.file, tensor.offset, tensor.size) for name, tensor in file.tensors.items()}
    stage.stream(paths=[str(path) for path in file.paths], places=places, memory=memory, n_readers=READERS)


def _load_next(stage: native.Stage) -> int | None:
    """The bytes of further weights; None at the end. Raises ModelError where they cannot be read."""
    try:
        return stage.load_next()
    except RuntimeError as e:
        raise ModelError(str(e)) from e


def _begin_streaming(stage: native.Stage) -> None:
    """Raises MemoryNeededError where there is too little memory for it."""
    needed, available = stage.begin_streaming()
    if needed > available:
        raise MemoryNeededError(
            f"a rank has {available / 1e9:.3g} GB of memory for weights and needs at least {needed / 1e9:.3g} GB even "
            "to stream them: add machines or memory, or raise ",
            Setting("stream_memory_gb"),
        )


class Loras:
    """LoRA adapters of a model. They are freed with it."""

    def __init__(self, model: Any, config: ModelConfig) -> None:
        """Raises ModelError if libllama cannot read one."""
        self._adapters: list[Any] = []
        self._scales = [scale for _, scale in config.loras]
        for path, _ in config.loras:
            adapter = lib.llama_adapter_lora_init(model, os.fsencode(path)) if path.is_file() else None
            if not adapter:
                why = last_error() if path.is_file() else "no such file"
                raise ModelError(Setting("loras"), f" {path}: {why}")
            self._adapters.append(adapter)

    def apply(self, context: Any) -> None:
        """Add them to a context of the model. Raises ModelError if libllama cannot do so."""
        n = len(self._adapters)
        if not n:
            return
        pointers = (lib.llama_adapter_lora_p_ctypes * n)(*self._adapters)
        factors = (ctypes.c_float * n)(*self._scales)
        if lib.llama_set_adapters_lora(context, pointers, n, factors) != 0:
            raise ModelError(Setting("loras"), f": these adapters cannot be applied together: {last_error()}")
