"""Draft heads whose files lack the token embeddings or the output layer, completed with those of their target.

Most published heads are such, and llama.cpp takes these weights from the target's context. A head's rank need not hold
the target's first or last layers, so it reads the weights from the target's file, quantized as they are there, and
libllama gets one file in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ggpipe.errors import ModelError, RunError, Setting, Wording
from ggpipe.llama import gguf
from ggpipe.llama.gguf import ModelFile, TensorInfo
from ggpipe.llama.libllama import ggml
from ggpipe.llama.model_header import ModelHeader, n_numbers

EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"
_WITH_OUTPUT = ("output.scale", "output.input_scale")
_WITH_SCALES = "nvfp4"
"""The type of output layers that have these scales."""
_WHAT = {EMBEDDINGS: ("token embeddings", "those of the model have"), OUTPUT: ("output layer", "that of the model has")}
_ID_BYTES = 8
_OWN_EMBEDDINGS_ARE_OUTPUT = "dflash"


def lacking(head: ModelFile) -> tuple[str, ...]:
    """Names of the weights that a draft head reads and does not have."""
    lacks_output = OUTPUT not in head.tensors
    if head.architecture == _OWN_EMBEDDINGS_ARE_OUTPUT and EMBEDDINGS in head.tensors:
        lacks_output = False
    return (EMBEDDINGS,) * (EMBEDDINGS not in head.tensors) + (OUTPUT,) * lacks_output


def misfit(head: ModelFile, target: ModelFile) -> str:
    """Why a draft head cannot take what it lacks from this target; empty if it can, or lacks nothing."""
    width, n_tokens = ModelHeader(head).width, head.array_lengths.get("tokenizer.ggml.tokens", 0)
    drafted = head.tensors.get("d2t")
    for name in lacking(head):
        what, its = _WHAT[name]
        lacks = f"it has no {what} of its own, and"
        source, target_width = target.tensors.get(_source(name, target)), ModelHeader(target).width
        if source is None:
            return f"{lacks} the model has none either: take a head with its own"
        if width != target_width:
            return f"{lacks} {its} {target_width} numbers per token instead of {width}: take a head made for this model"
        n_rows = n_numbers(source) // target_width
        n_wanted = drafted.size // _ID_BYTES if drafted is not None and name == OUTPUT else n_tokens
        if n_rows != n_wanted:
            return f"{lacks} {its} {n_rows:,} rows instead of {n_wanted:,}: take a head with its own"
    return ""


def complete(head: ModelFile, open_target: Callable[[], ModelFile]) -> ModelFile:
    """The head with what it lacks, which stays in the target's files. A head that lacks nothing comes back as it is.

    Raises ModelError if the target cannot be read, or does not fit.
    """
    names, name = lacking(head), head.paths[0].name
    if not names:
        return head
    try:
        target = open_target()
    except ModelError as e:
        what = " and ".join(_WHAT[name][0] for name in names)
        raise ModelError(Setting("draft.model"), f" {name} takes its {what} from ", Setting("model"), ": ", e) from e
    if problem := misfit(head, target):
        raise does_not_fit(name, problem)
    borrowed = {name: _source(name, target) for name in names}
    if OUTPUT in names and target.tensors[borrowed[OUTPUT]].type == _WITH_SCALES:
        borrowed |= {name: name for name in _WITH_OUTPUT if name in target.tensors}
    tensors = dict(head.tensors)
    for name, source in borrowed.items():
        tensor = target.tensors[source]
        tensors[name] = replace(tensor, file=len(head.paths) + tensor.file)
    return replace(
        head,
        paths=head.paths + target.paths,
        header_bytes=head.header_bytes + target.header_bytes,
        tensors=tensors,
        borrowed=borrowed,
    )


def does_not_fit(name: str, problem: str | Wording) -> ModelError:
    """The draft head in the file `name` and the target do not fit."""
    return ModelError(Setting("draft.model"), f" {name} does not fit ", Setting("model"), ": ", problem)


def _source(name: str, target: ModelFile) -> str:
    return EMBEDDINGS if name == OUTPUT and target.tied_output else name


@contextlib.contextmanager
def as_one_file(file: ModelFile, is_read: Callable[[str], bool]) -> Iterator[Path]:
    """A path at which libllama finds the whole model: the model's own or, for a completed head, that of a file in
    memory, until the context ends.

    `is_read`: whether a tensor's bytes are read from there. Others are holes, which take no memory.
    Raises RunError if there is not enough memory.
    """
    if not file.borrowed:
        yield file.paths[0]
        return
    memory = os.memfd_create("completed-head")
    try:
        path = Path(f"/proc/self/fd/{memory}")
        places, n_bytes = _write_header(file, path)
        try:
            os.ftruncate(memory, n_bytes)
            for name, offset in places.items():
                if is_read(name):
                    _copy(file, file.tensors[name], memory, offset)
        except OSError as e:
            raise RunError(f"cannot put {file.paths[0]} and the target's weights together: {e.strerror}") from e
        yield path
    finally:
        os.close(memory)


def _write_header(file: ModelFile, path: Path) -> tuple[dict[str, int], int]:
    """Write the header of the whole head. Returns where each tensor is to be, and the size of the file, in bytes."""
    own = {name: name for name in file.tensors if name not in file.borrowed}
    with contextlib.ExitStack() as opened:
        whole, _ = opened.enter_context(_opened(file.paths[0]))
        _remove_key(whole, b"split.count")
        for number, part in enumerate(file.paths[1:], 1):
            _, tensors = opened.enter_context(_opened(part))
            for name, source in (own | dict(file.borrowed)).items():
                if file.tensors[name].file == number:
                    tensor = _get_tensor(tensors, source.encode())
                    _set_name(tensor, name.encode())
                    _add_tensor(whole, tensor)
                    _set_name(tensor, source.encode())  # it may be wanted by two names
        if not _write_to_file(whole, os.fsencode(path), True):
            raise RunError(f"cannot put {file.paths[0]} and the target's weights together: no memory")
        first = int(_meta_size(whole))
        places = {
            gguf.tensor_name(whole, i).decode(): first + int(gguf.tensor_offset(whole, i))
            for i in range(gguf.n_tensors(whole))
        }
    return places, max(offset + file.tensors[name].size for name, offset in places.items())


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """The header of a file, and its tensors without their bytes: ggml's gguf_context and ggml_context."""
    tensors = ctypes.c_void_p()
    header = gguf.init_from_file(os.fsencode(path), gguf.InitParams(True, ctypes.addressof(tensors)))
    if not header:
        raise ModelError(f"cannot read {path} again: copy it again")
    try:
        yield header, tensors.value or 0
    finally:
        gguf.free(header)
        _free_tensors(tensors)


def _copy(file: ModelFile, tensor: TensorInfo, memory: int, offset: int) -> None:
    with file.paths[tensor.file].open("rb") as source:
        os.lseek(memory, offset, os.SEEK_SET)
        at, end = tensor.offset, tensor.offset + tensor.size
        while at < end:
            if (n := os.sendfile(memory, source.fileno(), at, end - at)) == 0:
                raise ModelError(f"{file.paths[tensor.file]} was cut off while it was read: copy it again")
            at += n


_pointer = ctypes.c_void_p
_get_tensor = ggml("ggml_get_tensor", _pointer, _pointer, ctypes.c_char_p)
_set_name = ggml("ggml_set_name", _pointer, _pointer, ctypes.c_char_p)
_free_tensors = ggml("ggml_free", None, _pointer)
_add_tensor = ggml("gguf_add_tensor", None, _pointer, _pointer)
_remove_key = ggml("gguf_remove_key", ctypes.c_int64, _pointer, ctypes.c_char_p)
_write_to_file = ggml("gguf_write_to_file", ctypes.c_bool, _pointer, ctypes.c_char_p, ctypes.c_bool)
_meta_size = ggml("gguf_get_meta_size", ctypes.c_size_t, _pointer)
