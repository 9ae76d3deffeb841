"""Outputs in the default numerics: another order of sums may decide between two tokens that nearly tie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from support.reference import Logits, Reference, run_of

_NEAR_TIE = 0.1  # standard deviations of a row


def differ_at_near_ties_only(tokens: Sequence[int], expected: Sequence[int], path: Path, prompt: Sequence[int]) -> None:
    """The first tokens that differ nearly tie, by the whole model's logits. `path`: of the model."""
    at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), None)
    if at is not None:
        with Reference(path, len(prompt) + len(expected)) as reference:
            row: Logits = reference.decode(run_of(1, [*prompt, *expected[:at]], 0))[-1]
        assert abs(row[tokens[at]] - row[expected[at]]) < _NEAR_TIE * float(np.std(row)), at
