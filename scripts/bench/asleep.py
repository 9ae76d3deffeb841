"""Stages that sleep instead of computing, for `scripts/bench/speculation --asleep`."""

from __future__ import annotations

import collections
import random
import time
from typing import Any

from ggpipe.core.messages import Row, RowLogits, Run
from ggpipe.engine import wiring
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.stage import BoundaryTensors, Outcome

N_CTX = 512


class SleepingStage:
    """A stage that takes time without using a core. Its next token follows from the last token and its position;
    the draft gives the same token at a share `agreement` of the positions."""

    def __init__(self, n_layer: int, layers: tuple[int, int], token_s: float, agreement: float) -> None:
        self.is_first, self.is_last = layers[0] == 0, layers[1] == n_layer
        self.cut = BoundaryTensors(collections.Counter(), collections.Counter())
        self.n_ctx = N_CTX
        self._run_s = token_s * (layers[1] - layers[0]) / n_layer
        self._agreement = agreement
        self._cancelled: set[int] = set()

    def decode(self, run: Run, _incoming: object, headroom: int) -> Outcome:
        """Each further row takes a tenth of the first row's time, as where memory bandwidth is the limit."""
        if run.cancelled or not run.rows:
            return Outcome(bytearray(headroom), (), 0.0, run.cancelled)
        start = time.monotonic()
        end = start + self._run_s * (1 + 0.1 * (len(run.rows) - 1))
        while (left := end - time.monotonic()) > 0 and run.id not in self._cancelled:
            time.sleep(min(left, 1e-3))
        if run.id in self._cancelled:
            return Outcome(bytearray(headroom), (), time.monotonic() - start, True)
        rows = tuple(
            self._answer(i, row, run.logits_requests[row.logits_request].n)
            for i, row in enumerate(run.rows)
            if row.logits_request >= 0
        )
        return Outcome(bytearray(headroom + 8192), rows if self.is_last else (), time.monotonic() - start, False)

    def _answer(self, i: int, row: Row, n: int) -> RowLogits:
        agrees = random.Random(row.pos).random() < self._agreement
        token = 300 + (31 * row.token + 7 * row.pos + (not agrees)) % 1000
        return RowLogits(i, tuple(token + k for k in range(n)), (-0.1, *[-5.0 - k for k in range(n - 1)]), 0.0)

    def cancel(self, run_id: int) -> None:
        """As a stage's."""
        self._cancelled.add(run_id)

    def close(self) -> None:
        """As a stage's."""


def sleep_instead(agreement: float) -> None:
    """From now on this rank's stages sleep: 80 ms a token all together, the draft 8 ms."""

    def loader(_config: object, _transport: object, file: ModelFile, layers: tuple[int, int], draft: bool) -> Any:
        seconds, agrees = (0.008, agreement) if draft else (0.08, 1.0)
        return lambda _progress: SleepingStage(file.n_layer, layers, seconds, agrees)

    wiring.stage_loader = loader  # type: ignore[assignment]
