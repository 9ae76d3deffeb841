"""A small Llama model inflated to a hybrid one: its new layers are recurrent.

Like the new layers of `inflate.Inflation`, they add zero to the residual stream, so the output is the small model's.
They are Mamba-2 layers as in Granite 4, with random weights up to the last matrix: a run reads and writes states as in
any hybrid model of this size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import gguf
import numpy as np
from numpy.typing import NDArray

from ggpipe.llama.inflate import InflatedTensor, Inflation

_HEAD, _STATE, _TAPS = 64, 128, 4  # widths of a head and of its state, and of the convolution, as in Granite 4
_DEVIATION = 0.02  # of random weights
_F32, _Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0


class HybridInflation(Inflation):
    """See the module's text."""

    architecture = "granitehybrid"

    def _plan(self) -> Iterator[InflatedTensor]:
        for tensor in super()._plan():
            name, _, part = tensor.name.rpartition("blk.")[2].partition(".")
            if not name.isdigit() or int(name) % self._deepen == 0 or not part.startswith("attn_"):
                yield tensor
            elif part == "attn_norm.weight":
                yield _numbers(tensor.name, np.ones(tensor.shape, np.float32))
            elif part == "attn_q.weight":
                yield from self._recurrent(f"blk.{name}.")

    def _recurrent(self, prefix: str) -> Iterator[InflatedTensor]:
        """The tensors of a layer in place of those of attention."""
        n_heads, n_channels = self._inner // _HEAD, self._inner + 2 * _STATE
        yield InflatedTensor(prefix + "ssm_in.weight", self._in_shape, _Q8_0, self._in_rows)
        yield _numbers(prefix + "ssm_conv1d.weight", np.full((n_channels, _TAPS), 1 / _TAPS, np.float32))
        yield _numbers(prefix + "ssm_conv1d.bias", np.zeros(n_channels, np.float32))
        yield _numbers(prefix + "ssm_dt.bias", np.full(n_heads, -1, np.float32))
        yield _numbers(prefix + "ssm_a", np.full((n_heads, 1), -1, np.float32))
        yield _numbers(prefix + "ssm_d", np.ones((n_heads, 1), np.float32))
        yield _numbers(prefix + "ssm_norm.weight", np.ones((1, self._inner), np.float32))
        yield InflatedTensor(prefix + "ssm_out.weight", (self._inner // 2, self._inner), _Q8_0, None)

    @property
    def _inner(self) -> int:
        """Width inside a recurrent layer, which libllama wants to be twice the model's."""
        return 2 * self._widen * int(self._field("llama.embedding_length"))

    @property
    def _in_shape(self) -> tuple[int, int]:
        return 2 * self._inner + 2 * _STATE + self._inner // _HEAD, self._inner // 2

    @cached_property
    def _in_rows(self) -> NDArray[np.uint8]:
        """The same in all layers."""
        weights = self._random.standard_normal(self._in_shape, np.float32) * np.float32(_DEVIATION)
        return gguf.quants.quantize(weights, _Q8_0)

    def _added(self) -> dict[str, int | list[int]]:
        n_kv = int(self._field("llama.attention.head_count_kv"))
        layers = range(self._file.n_layer * self._deepen)
        return {
            "attention.head_count_kv": [0 if i % self._deepen else n_kv for i in layers],
            "ssm.conv_kernel": _TAPS,
            "ssm.inner_size": self._inner,
            "ssm.state_size": _STATE,
            "ssm.time_step_rank": self._inner // _HEAD,
            "ssm.group_count": 1,
        }


def _numbers(name: str, numbers: NDArray[np.float32]) -> InflatedTensor:
    """A tensor of these numbers; what has one dimension is one row."""
    rows = np.atleast_2d(numbers)
    return InflatedTensor(name, numbers.shape, _F32, rows.view(np.uint8))
