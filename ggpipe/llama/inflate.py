"""Small Llama models made as costly as large ones, without a change to what they compute.

An inflated model takes as long for a token as any model of its size, and its text, its confidences and its mistakes
are those of the small one. All that is new in it is zero:

| what grows         | why the result stays                                                                        |
|--------------------|---------------------------------------------------------------------------------------------|
| width              | nothing writes to the new channels; RMS norm takes the mean of more channels, so its        |
|                    | weights are divided by sqrt(widen), its epsilon by `widen`                                  |
| feed-forward width | silu(0) * 0 = 0                                                                             |
| layers             | a new layer adds zero to the residual stream                                                |

Attention heads keep their number and their width: many small heads would make long contexts dearer than they are in
models of this size. Blocks of quantized weights are copied as they are, and `widen` is a power of 4, so sqrt(widen) is
a power of 2: no weight is rounded. Zeros are holes in the file where the file system knows holes.

An inflated model can also become a mixture of experts (`Mixture`). All experts of a layer are equal, so the output does
not depend on which ones a token uses (only rounding does, when their outputs are added up), and the router is random,
so each token reads experts of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from numpy.typing import NDArray

from ggpipe.errors import ModelError
from ggpipe.llama.gguf import ModelFile

_WIDTHS = ("embedding_length", "feed_forward_length")
_LAYERS, _EPSILON = "block_count", "attention.layer_norm_rms_epsilon"
_HEAD_WIDTHS = ("attention.key_length", "attention.value_length")  # of a head; default: the width / heads
_NORM, _IN, _OUT, _BOTH = "norm", "columns", "rows", "rows and columns"  # what grows with the width
_VOCABULARY = {"token_embd.weight": _IN, "output_norm.weight": _NORM, "output.weight": _IN}
_LAYER = {
    "attn_norm.weight": _NORM,
    "attn_q.weight": _IN,
    "attn_k.weight": _IN,
    "attn_v.weight": _IN,
    "attn_output.weight": _OUT,
    "ffn_norm.weight": _NORM,
    "ffn_gate.weight": _BOTH,
    "ffn_up.weight": _BOTH,
    "ffn_down.weight": _BOTH,
}


_FEED_FORWARD = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts to make of a dense model; a token's experts are together as wide as its feed-forward."""

    n_expert: int
    """Experts in each layer."""
    n_used: int
    """Experts that a token uses; a power of 2."""

    def __post_init__(self) -> None:
        if not 0 < self.n_used < self.n_expert or self.n_used.bit_count() != 1:
            raise ValueError(f"n_used must be a power of 2 below n_expert ({self.n_expert}), got {self.n_used}")


@dataclass(frozen=True)
class InflatedTensor:
    """A tensor to write: zero but for the first rows of each matrix, and in these but for their first bytes."""

    name: str
    shape: tuple[int, ...]
    """Elements: (rows, columns), or (matrices, rows, columns) where a tensor holds a matrix per expert."""
    type: gguf.GGMLQuantizationType
    rows: NDArray[np.uint8] | None
    """The bytes that are not zero, row by row, the same in each matrix; None: there are none."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, zeros included; a norm is one row."""
        *_, n_bytes = gguf.quant_shape_to_byte_shape(self.shape, self.type)
        return int(n_bytes)

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows, zeros included."""
        return self.row_bytes * math.prod(self.shape[:-1])

    @property
    def n_matrices(self) -> int:
        """Matrices that the tensor holds."""
        return self.shape[0] if len(self.shape) > 2 else 1


class Inflation:
    """What becomes of one model: to be looked at (`n_bytes`), then written."""

    architecture = "llama"
    """The inflated model's."""

    def __init__(self, source: Path, widen: int = 1, deepen: int = 1, mixture: Mixture | None = None) -> None:
        """All widths grow to `widen` times their size, the number of layers to `deepen` times. `mixture`: the experts
        that replace the feed-forward layers; None: these stay dense.

        Raises ModelError when the file is damaged, or no plain Llama model.
        """
        if widen < 1 or math.isqrt(widen) ** 2 != widen or widen.bit_count() != 1:
            raise ValueError(f"widen must be a power of 4, got {widen}")
        if deepen < 1:
            raise ValueError(f"deepen must be 1 or more, got {deepen}")
        if mixture is not None and mixture.n_used > widen:
            raise ValueError(
                f"an expert must hold the source's feed-forward: use at most {widen}, got {mixture.n_used}"
            )
        self._file = ModelFile.open(source)  # before gguf-py reads it, which expects whole files
        self._reader = gguf.GGUFReader(source)
        self._source, self._widen, self._deepen, self._mixture = source, widen, deepen, mixture
        self._random = np.random.default_rng(0)
        self._tensors = list(self._plan())

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors to write, zeros included."""
        return sum(tensor.n_bytes for tensor in self._tensors)

    def write(self, path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Write the inflated model; `on_bytes` is called with the bytes of each tensor that is written.

        Takes memory for one tensor's rows that are not zero. Raises OSError.
        """
        writer = self._header(path)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()
        with path.open("rb+") as file:
            at = file.seek(0, 2)
            for tensor in self._tensors:
                at = _aligned(at)
                file.seek(at)
                _write_rows(file, tensor)
                at += tensor.n_bytes
                on_bytes(tensor.n_bytes)
            file.truncate(_aligned(at))

    def _plan(self) -> Iterator[InflatedTensor]:
        left = {tensor.name: tensor for tensor in self._reader.tensors}
        if self._file.architecture != "llama":
            raise ModelError(f"{self._source} cannot be inflated: its architecture is {self._file.architecture!r}")
        n_layer = self._file.n_layer
        known = [*_VOCABULARY, *(f"blk.{i}.{part}" for i in range(n_layer) for part in _LAYER)]
        for name in known:
            if name not in left:
                raise ModelError(f"{self._source} cannot be inflated: it has no tensor {name}")
        old = {name: left.pop(name) for name in known}
        if left:
            raise ModelError(f"{self._source} cannot be inflated: a plain Llama model has no tensor {min(left)}")
        for name, grows in _VOCABULARY.items():
            yield self._grown(old[name], name, grows)
        for i in range(n_layer * self._deepen):
            for part, grows in _LAYER.items():
                tensor = self._grown(old[f"blk.{i // self._deepen}.{part}"], f"blk.{i}.{part}", grows)
                is_new = i % self._deepen > 0
                if self._mixture is not None:
                    if part == "ffn_norm.weight":
                        yield self._router(tensor.name.replace("norm", "gate_inp"), self._mixture.n_expert)
                        is_new = False  # a new layer's router chooses as well
                    elif part in _FEED_FORWARD:
                        tensor = self._experts(tensor, self._mixture)
                yield replace(tensor, rows=None) if is_new else tensor

    def _router(self, name: str, n_expert: int) -> InflatedTensor:
        n_columns = self._field(f"llama.{_WIDTHS[0]}") * self._widen
        weights = self._random.standard_normal((n_expert, n_columns), np.float32)
        return InflatedTensor(name, weights.shape, gguf.GGMLQuantizationType.F32, weights.view(np.uint8))

    def _experts(self, tensor: InflatedTensor, mixture: Mixture) -> InflatedTensor:
        """The tensor of all experts: each is the dense one, but narrower."""
        n_rows, n_columns = tensor.shape
        if "down" in tensor.name:
            n_columns //= mixture.n_used
        else:
            n_rows //= mixture.n_used
        name = tensor.name.replace(".weight", "_exps.weight")
        return replace(tensor, name=name, shape=(mixture.n_expert, n_rows, n_columns))

    def _grown(self, tensor: gguf.ReaderTensor, name: str, grows: str) -> InflatedTensor:
        if grows == _NORM:
            weights = np.asarray(tensor.data, np.float32) / np.float32(math.sqrt(self._widen))
            shape: tuple[int, ...] = (tensor.data.size * self._widen,)
            return InflatedTensor(name, shape, gguf.GGMLQuantizationType.F32, weights.view(np.uint8).reshape(1, -1))
        n_columns, n_rows = (int(n) for n in tensor.shape)
        shape = (
            n_rows * (self._widen if grows in (_OUT, _BOTH) else 1),
            n_columns * (self._widen if grows in (_IN, _BOTH) else 1),
        )
        return InflatedTensor(name, shape, tensor.tensor_type, np.ascontiguousarray(tensor.data).view(np.uint8))

    def _header(self, path: Path) -> gguf.GGUFWriter:
        """A writer that knows all but the tensors' bytes."""
        writer = gguf.GGUFWriter(path, self.architecture)
        changed: dict[str, Any] = {f"llama.{key}": self._field(f"llama.{key}") * self._widen for key in _WIDTHS}
        if self._mixture is not None:
            changed[f"llama.{_WIDTHS[1]}"] //= self._mixture.n_used
            writer.add_expert_count(self._mixture.n_expert)
            writer.add_expert_used_count(self._mixture.n_used)
        changed[f"llama.{_LAYERS}"] = self._file.n_layer * self._deepen
        changed[f"llama.{_EPSILON}"] = self._field(f"llama.{_EPSILON}") / self._widen
        head_width = self._field("llama.embedding_length") // self._field("llama.attention.head_count")
        for key in _HEAD_WIDTHS:
            if f"llama.{key}" not in self._reader.fields:
                writer.add_uint32(f"{self.architecture}.{key}", head_width)
        changed["general.name"] = f"{self._source.stem}, {self._widen} x as wide, {self._deepen} x as deep"
        added = self._added()
        for key, number in added.items():
            if isinstance(number, int):
                writer.add_uint32(f"{self.architecture}.{key}", number)
            else:
                writer.add_array(f"{self.architecture}.{key}", number)
        for key, field in self._reader.fields.items():
            own = key.removeprefix("llama.")
            if key.startswith("GGUF.") or key == "general.architecture" or own in added:  # the writer's own
                continue
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            name = key if own == key else f"{self.architecture}.{own}"
            writer.add_key_value(name, changed.get(key, field.contents()), field.types[0], inner)
        for tensor in self._tensors:
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, tensor.type)
        return writer

    def _added(self) -> dict[str, int | list[int]]:
        """Header fields of the inflated model's architecture, in addition to the source's or in their place."""
        return {}

    def _field(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            raise ModelError(f"{self._source} cannot be inflated: its header does not say {key}")
        return field.contents()


def _aligned(position: int) -> int:
    return -(-position // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT


def _write_rows(file: BinaryIO, tensor: InflatedTensor) -> None:
    if tensor.rows is None:
        return
    n_rows, n_bytes = tensor.rows.shape
    rows = np.zeros((n_rows, tensor.row_bytes), np.uint8)
    rows[:, :n_bytes] = tensor.rows
    start, matrix_bytes = file.tell(), tensor.n_bytes // tensor.n_matrices
    for matrix in range(tensor.n_matrices):
        file.seek(start + matrix * matrix_bytes)
        file.write(rows.tobytes())
