"""Plausible input for a stage that is timed without the stages before it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ggpipe.core.messages import Run
from ggpipe.llama.row_filter import FRAME, padded

_N_NOISES = 256


class Noise:
    """Values that differ from row to row, so that rows use different experts."""

    def __init__(self, n_embd: int, wanted: Mapping[str, int]) -> None:
        """`n_embd`: numbers in a layer's output for each row. `wanted`: see `BoundaryTensors`."""
        self._noises = np.random.default_rng(0).standard_normal((_N_NOISES, n_embd), np.float32)
        self._wanted = wanted

    def of_run(self, run: Run) -> bytes:
        """The input of a run: as large as a layer's output for each row. Where something else crosses the border, it is
        taken for zeros."""
        data = self._noises[(run.id * 37 + np.arange(len(run.rows))) % _N_NOISES].tobytes()
        parts = []
        for name, count in self._wanted.items():
            encoded = name.encode()
            whole = [part + bytes(padded(len(part)) - len(part)) for part in (encoded, data)]
            parts += [FRAME.pack(len(encoded), len(data)), *whole] * count
        return b"".join(parts)
