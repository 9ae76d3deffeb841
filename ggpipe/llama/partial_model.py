"""A copy of a model with all its headers and the weights of some layers. The other weights are holes in its files.

A machine that gets its weights from another one needs disk space for its own layers only. A list in the same folder
names the weights that the files have, so holes are never taken for weights.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from ggpipe.errors import ModelError, RunError, Setting
from ggpipe.launch.cache_folder import whole_file
from ggpipe.llama.completed import EMBEDDINGS
from ggpipe.llama.gguf import ModelFile

_LAYER = re.compile(r"blk\.(\d+)\.")
_OF_FIRST_STAGE = (EMBEDDINGS, "per_layer_token_embd.weight")
_OF_LAST_STAGE = "output"  # how their names begin
_LIST, _LOCK = "ggpipe-weights.json", "lock"
_SPARE_BYTES = 100 << 20  # of the disk

Layers = tuple[int, int] | None
"""The first one, and one past the last; None: a draft head with all its weights."""

GetWeights = Callable[[ModelFile, Layers, Callable[[int, int], bool]], None]
"""Gets the weights that a stage with these layers reads and this machine lacks. The function gets bytes done and total
bytes, and returns False to stop."""

_sources: dict[Path, GetWeights] = {}
"""Where this process gets weights from, by the first path of a partial model."""


class _List(msgspec.Struct, frozen=True):
    """Names of the weights that the files have."""

    weights: frozenset[str]


def weights_of(file: ModelFile, layers: tuple[int, int]) -> list[str]:
    """Names of the weights that a stage with these layers reads. Layers from `ModelFile.n_layer` on are MTP layers."""
    a, b = layers
    reads_embeddings = a == 0 or a >= file.n_layer
    reads_output = b >= file.n_layer

    def reads(name: str) -> bool:
        if layer := _LAYER.match(name):
            return a <= int(layer[1]) < b
        if name == EMBEDDINGS and file.tied_output and reads_output:
            return True
        if name in _OF_FIRST_STAGE:
            return reads_embeddings
        return reads_output if name.startswith(_OF_LAST_STAGE) else True

    return [name for name in file.tensors if reads(name)]


def get_weights_with(get: GetWeights, model: PartialModel) -> None:
    """From now on, this process gets weights of a partial model with `get`."""
    _sources[model.paths[0]] = get


def complete(file: ModelFile, layers: Layers, progress: Callable[[int, int], bool]) -> None:
    """Before a stage with these layers is loaded: get the weights that it reads, where this machine lacks them.

    Raises what the source of the weights raises.
    """
    for path in file.paths:
        if path in _sources:
            _sources[path](file, layers, progress)


def check(file: ModelFile, names: Collection[str]) -> None:
    """Raises ModelError if one of these weights of a loaded stage is a hole, which it read as zeros."""
    model = PartialModel(file.paths)
    if model.has_headers and (lacking := model.lacking(file, names)):
        raise ModelError(
            f"this '{file.architecture}' model needs {lacking[0]} on this machine, too, which ",
            Setting("send_weights"),
            " does not know: copy the file to the machine",
        )


class PartialModel:
    """The files of one model in a folder of their own. Several processes may use them at the same time.

    All methods raise RunError if a file cannot be written or read.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._folder = self.paths[0].parent

    @property
    def has_headers(self) -> bool:
        """Whether the files can be opened as a `ModelFile`."""
        return (self._folder / _LIST).exists()

    def write_headers(self, headers: Sequence[bytes], sizes: Sequence[int]) -> None:
        """Begin with files of these sizes, in bytes, that have no weights yet."""
        with self._mending():
            self._check_space(sum(map(len, headers)))
            for path, header, size in zip(self.paths, headers, sizes, strict=True):
                with path.open("wb") as file:
                    file.truncate(size)
                    file.write(header)
                    file.flush()
                    os.fsync(file.fileno())
            self._keep(frozenset())

    @contextlib.contextmanager
    def locked(self, wait: Callable[[], None]) -> Iterator[None]:
        """Keep other processes from adding weights. `wait` is called again and again while one of them does."""
        with self._mending():
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / _LOCK).open("wb")
        with lock:
            while not _is_free(lock.fileno()):
                wait()
            yield

    def lacking(self, file: ModelFile, names: Collection[str]) -> list[str]:
        """Those of these weights that the files do not have, in their order there. `file`: as opened here."""
        with self._mending():
            complete = self._names()
        lacking = [name for name in names if name not in complete]
        return sorted(lacking, key=lambda name: (file.tensors[name].file, file.tensors[name].offset))

    @contextlib.contextmanager
    def adding(self, names: Collection[str], n_bytes: int) -> Iterator[Callable[[int, int, bytes], None]]:
        """A function that writes bytes at an offset of a part. After the block, the files have these weights, which are
        `n_bytes` together."""
        self._check_space(n_bytes)
        with contextlib.ExitStack() as opened, self._mending():
            files = [opened.enter_context(path.open("r+b", buffering=0)) for path in self.paths]

            def write(part: int, offset: int, data: bytes) -> None:
                while data:
                    n = os.pwrite(files[part].fileno(), data, offset)
                    data, offset = data[n:], offset + n

            yield write
            for file in files:
                os.fsync(file.fileno())  # before the list: what it names is never a hole
            self._keep(self._names() | frozenset(names))

    def _names(self) -> frozenset[str]:
        return msgspec.json.decode((self._folder / _LIST).read_bytes(), type=_List).weights

    def _keep(self, names: frozenset[str]) -> None:
        with whole_file(self._folder / _LIST) as path:
            path.write_bytes(msgspec.json.encode(_List(names), order="sorted"))

    def _check_space(self, n_bytes: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if n_bytes + _SPARE_BYTES > free:
            raise RunError(
                f"{self._folder} needs {n_bytes / 1e9:.1f} GB for weights, and its disk has {free / 1e9:.1f} GB free: "
                "free some space, or set XDG_CACHE_HOME to a folder on another disk"
            )

    @contextlib.contextmanager
    def _mending(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise RunError(f"cannot keep weights in {self._folder}: {e.strerror or e}") from e
        except (msgspec.DecodeError, msgspec.ValidationError) as e:
            raise RunError(f"{self._folder / _LIST} is damaged: delete {self._folder}") from e


def _is_free(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
