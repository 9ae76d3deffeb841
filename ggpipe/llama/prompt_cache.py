"""Computed prefixes on disk: what a stage has in its KV cache for the first tokens of a text.

    magic | length of the header | its checksum | header: what the state depends on, and the tokens
    for each state: _STATE | which of its blocks are not zero, a bit each | these blocks

Each rank has a file of its own with its own layers. libllama writes all layers of the model, those of other ranks as
zeros: blocks of zeros are left out. A state has some tokens only, so that no second copy of the whole is in memory. The
states come in the order of their tokens, and so do the tokens in a state: so restored rows lie as computed ones.

The prompt cache is one such file. What is saved while requests are served has names of its own, in one folder.
"""

from __future__ import annotations

import datetime
import io
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.kv.prefix_cache import RESTORED
from ggpipe.core.messages import Restored
from ggpipe.errors import RunError, SettingError
from ggpipe.launch.cache_folder import remove_abandoned, whole_file
from ggpipe.llama import machine
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group import Group
from ggpipe.llama.stage import Stage

_MAGIC = b"ggpipe prompt\n\0\0"
_FORMAT = 1
_HEADER = struct.Struct("<II")
# first token, end, bytes of the state, checksum of these and of the bits, checksum of the blocks
_STATE = struct.Struct("<IIQII")
_BLOCK_BYTES = 4096
_STATE_OFFSET = 8  # bytes that libllama writes before a state
_Bytes = NDArray[np.uint8]


class _Header(msgspec.Struct, frozen=True):
    facts: dict[str, str]
    """What the state depends on, as `_facts`."""
    tokens: tuple[int, ...]


class PrefixFiles:
    """One rank's files in a folder: `NAME.rank0`."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Raises SettingError for what is no folder, or cannot be written to."""
        self._folder = folder
        self._rank = rank
        self._facts: dict[str, str] = {}
        if not folder.is_dir() or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            why = "it cannot be written to: permission denied" if folder.is_dir() else "there is no such folder"
            raise SettingError("slot_save_path", f"{folder}: {why}")

    def describe(self, stage: Stage, file: ModelFile, model: ModelConfig, context: ContextConfig) -> None:
        """What states of this stage depend on. To be called before the others."""
        self._facts = _facts(stage, file, model, context)

    def restore(self, stage: Stage, seq: int, tokens: tuple[int, ...], name: str) -> tuple[str, int]:
        """Put a file's tokens, which must be these, into a sequence that is empty.

        Returns why that was not done, or nothing, and the size of the file in bytes. Where it was not, the sequence may
        have some of the tokens. Clients read why: it does not name the folder.
        """
        path = self._path(name)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                if _read_header(file, self._facts).tokens != tokens:
                    raise RunError("it has other tokens than the other ranks' files")
                if _put_states(file, stage, len(tokens), seq) < len(tokens):
                    raise RunError(f"it has {len(tokens)} tokens, and the context only {stage.n_ctx}")
                return "", os.fstat(file.fileno()).st_size
        except (OSError, RunError) as e:
            return f"{path.name}: {e.strerror or e if isinstance(e, OSError) else e}", 0

    def save(self, stage: Stage, seq: int, tokens: tuple[int, ...], name: str) -> tuple[str, int]:
        """Write a sequence that has exactly these tokens, or more where parts of sequences can be continued. Returns
        why that was not done, or nothing, and the size of the file in bytes."""
        path = self._path(name)
        problem = _write(path, self._facts, stage, seq, tokens)
        return f"{path.name}: {problem}" if problem else "", 0 if problem else path.stat().st_size

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.rank{self._rank}"


class PromptCache:
    """One rank's file."""

    def __init__(self, path: Path, rank: int, *, read_only: bool = False) -> None:
        """`path`: as the user gave it, which is the first rank's file.

        Raises SettingError for a path that cannot be read, or written unless `read_only`.
        """
        self.path = path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")
        self._facts: dict[str, str] = {}
        problem = ""
        try:
            if self.path.exists() and not self.path.is_file():
                problem = "it is no regular file"
            elif not self.path.parent.is_dir():
                problem = f"there is no directory {self.path.parent}"
            elif self.path.exists() and not os.access(self.path, os.R_OK):
                problem = "it cannot be read: permission denied"
            elif not read_only and not os.access(self.path.parent, os.W_OK | os.X_OK):
                problem = f"{self.path.parent} cannot be written to: permission denied"
            elif not read_only and _is_foreign(self.path):
                problem = "it is no prompt cache of ggpipe, and would be overwritten; name another file"
        except OSError as e:
            problem = e.strerror or str(e)
        if problem:
            raise SettingError("prompt_cache", f"{self.path}: {problem}")

    def describe(self, stage: Stage, file: ModelFile, model: ModelConfig, context: ContextConfig) -> None:
        """What states of this stage depend on. To be called before `restore` and `save`."""
        self._facts = _facts(stage, file, model, context)

    def restore(self, stage: Stage) -> Restored:
        """Put what the file has into an empty cache, as far as it fits, as the sequence `RESTORED`."""
        try:
            with self.path.open("rb") as file:
                header = _read_header(file, self._facts)
                n = _put_states(file, stage, len(header.tokens), RESTORED)
                return Restored(header.tokens[:n])
        except FileNotFoundError:
            return Restored()
        except (OSError, RunError) as e:
            stage.forget_all()
            reason = e.strerror or str(e) if isinstance(e, OSError) else str(e)
            return Restored(problem=f"prompt cache {self.path}: {reason}; the prompt is computed anew")

    def save(self, stage: Stage, seq: int, tokens: tuple[int, ...]) -> str:
        """Write a sequence that has exactly these tokens. The file is whole, or as it was; returns why that is, or
        nothing."""
        problem = _write(self.path, self._facts, stage, seq, tokens)
        return f"cannot write the prompt cache {self.path}: {problem}" if problem else ""


def _write(file_path: Path, facts: dict[str, str], stage: Stage, seq: int, tokens: tuple[int, ...]) -> str:
    """Write a file whole, or leave it as it was; returns why that is, or nothing."""
    header = msgspec.msgpack.encode(_Header(facts, tokens))
    try:
        if _is_foreign(file_path):
            return "it is no prompt cache of ggpipe"
        remove_abandoned(file_path)
        with whole_file(file_path) as path, path.open("wb") as file:
            file.write(_MAGIC + _HEADER.pack(len(header), zlib.crc32(header)) + header)
            for first, end, state in _states(stage, seq, len(tokens)):
                _write_state(file, first, end, state)
    except OSError as e:
        return e.strerror or str(e)
    except RunError as e:
        return str(e)
    return ""


def _is_foreign(path: Path) -> bool:
    """Whether a file has contents that begin otherwise than a prompt cache. Raises OSError if it cannot be read."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return not _MAGIC.startswith(file.read(len(_MAGIC)))


def _read_header(file: io.BufferedIOBase, facts: dict[str, str]) -> _Header:
    """Raises RunError for what no stage of these facts has written."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise RunError("it is no prompt cache of ggpipe")
    length, checksum = _HEADER.unpack(_read(file, _HEADER.size))
    if length > os.fstat(file.fileno()).st_size:
        raise RunError("it is cut off")
    data = _read(file, length)
    if zlib.crc32(data) != checksum:
        raise RunError("it is damaged")
    try:
        header = msgspec.msgpack.decode(data, type=_Header)
    except msgspec.MsgspecError as e:
        raise RunError("another version of ggpipe wrote it") from e
    for name, ours in facts.items():
        theirs = header.facts.get(name, "another")
        if theirs != ours:
            raise RunError(f"it was written with {name} {theirs}, not {ours}")
    return header


def _facts(stage: Stage, file: ModelFile, model: ModelConfig, context: ContextConfig) -> dict[str, str]:
    first, end = stage.layers
    changed_s = max(path.stat().st_mtime for path in file.paths)
    loras = [f"{path.name}:{scale:g}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path, scale in model.loras]
    rope = {name: value for name, value in asdict(context).items() if name.startswith(("rope", "yarn"))}
    return {
        "format": str(_FORMAT),
        "libllama": machine.libllama_version(),
        "model": file.fingerprint,
        "a model file of": datetime.datetime.fromtimestamp(changed_s, datetime.UTC).isoformat(" "),
        "LoRA adapters": ", ".join(loras) or "none",
        "metadata": ", ".join(model.override_kv) or "the model's own",
        "layers": f"{first + 1}-{end} of {file.n_layer}{_part_text(stage.group)}",
        "KV types": f"{context.cache_type_k} and {context.cache_type_v}",
        "flash attention": context.flash_attn,
        "exact numerics": _exactness(context),
        "RoPE settings": ", ".join(f"{name} {value}" for name, value in rope.items()),
    }  # fmt: skip


def _exactness(context: ContextConfig) -> str:
    if not context.exact:
        return "off"
    return "with ggpipe's kernels" if context.uses_fast_kernels else "on"


def _part_text(group: Group | None) -> str:
    if group is None:
        return ""
    return f" (part {group.part} of {', '.join(f'{share:g}' for share in group.shares)})"


def _states(stage: Stage, seq: int, n: int) -> Iterator[tuple[int, int, _Bytes]]:
    """A sequence's states, with the tokens [first, end) that each has."""
    most = stage.states.most_tokens or n
    rest = [(first, min(first + most, n)) for first in range(0, n, most)]
    rest.reverse()
    while rest:
        first, end = rest.pop()
        state = stage.states.read(seq, first, end)
        if stage.states.most_tokens is None or _in_order(state, end - first):
            yield first, end, state
        else:
            middle = (first + end) // 2
            rest += [(middle, end), (first, middle)]


def _in_order(state: _Bytes, n: int) -> bool:
    """Whether the tokens of a state come in the order of their positions, where that can be seen.

    libllama begins with the number of streams, which is 1, and of cells; then, for each cell, its position, a number of
    sequences, which is 1, further numbers for some models, and the sequence.
    """
    words = state[_STATE_OFFSET : _STATE_OFFSET + 8 + 24 * n].copy()
    words = words[: words.size // 4 * 4].view("<i4")
    if n == 1 or len(words) < 2 + 6 * n or tuple(words[:2]) != (1, n):
        return True
    for n_words in (3, 6):
        cells = words[2 : 2 + n_words * n].reshape(n, n_words)
        if (cells[:, 1] == 1).all() and (cells[:, -1] == cells[0, -1]).all():
            return bool((np.diff(cells[:, 0]) > 0).all())
    return True


def _blocks_of(state: _Bytes) -> _Bytes:
    """The whole blocks of a state, as rows; the rest is less than a block."""
    n = state.size // _BLOCK_BYTES
    return state[: n * _BLOCK_BYTES].reshape(n, _BLOCK_BYTES)


def _spans(used: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The ranges [first, end) of a row of bits in which all are set."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], used, [False])))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _write_state(file: io.BufferedIOBase, first: int, end: int, state: _Bytes) -> None:
    blocks = _blocks_of(state)
    used: NDArray[np.bool_] = np.any(blocks.view(np.uint64), axis=1)
    bits = np.packbits(used).tobytes()
    parts = [blocks[a:b].data for a, b in _spans(used)]
    parts.append(state[blocks.size :].data)
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    sizes = struct.pack("<IIQ", first, end, state.size)
    file.write(_STATE.pack(first, end, state.size, zlib.crc32(bits, zlib.crc32(sizes)), checksum) + bits)
    for part in parts:
        file.write(part)


def _read_state(file: io.BufferedIOBase) -> tuple[int, int, _Bytes]:
    """Raises RunError for a file that is cut off or damaged."""
    first, end, size, checksum, state_checksum = _STATE.unpack(_read(file, _STATE.size))
    n_blocks = size // _BLOCK_BYTES
    if n_blocks // 8 > os.fstat(file.fileno()).st_size:
        raise RunError("it is damaged")
    bits = _read(file, -(-n_blocks // 8))
    if zlib.crc32(bits, zlib.crc32(struct.pack("<IIQ", first, end, size))) != checksum:
        raise RunError("it is damaged")
    state = np.zeros(size, np.uint8)
    blocks = _blocks_of(state)
    used = np.unpackbits(np.frombuffer(bits, np.uint8), count=n_blocks).astype(bool)
    checksum = 0
    for part in (*(blocks[a:b].data.cast("B") for a, b in _spans(used)), state[blocks.size :].data):
        if file.readinto(part) != part.nbytes:
            raise RunError("it is cut off")
        checksum = zlib.crc32(part, checksum)
    if checksum != state_checksum:
        raise RunError("it is damaged")
    return first, end, state


def _put_states(file: io.BufferedIOBase, stage: Stage, n: int, seq: int) -> int:
    """Put states into a sequence, up to `n` tokens, as far as there is room. Returns the number of tokens."""
    at = 0
    while at < n:
        first, end, state = _read_state(file)
        if not at == first < end <= n:
            raise RunError("it is damaged")
        if end >= stage.n_ctx:
            if stage.states.most_tokens is None:
                raise RunError(f"it has {end} tokens, and the context only {stage.n_ctx}")
            break
        stage.states.append(state, seq)
        at = end
    return at


def _read(file: io.BufferedIOBase, n: int) -> bytes:
    data = file.read(n)
    if len(data) < n:
        raise RunError("it is cut off")
    return data
