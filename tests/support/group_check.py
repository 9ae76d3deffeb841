"""A group's logits beside the whole model's, over runs of several kinds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ggpipe.config.context import ContextConfig
from ggpipe.core.messages import KvKind, KvOp, Run
from ggpipe.llama.gguf import ModelFile
from support.commands import ROOT
from support.pipeline import Pipeline
from support.reference import run_of
from support.runs import FULL, rows_of

LIMIT, LIMIT_F32 = 0.2, 5e-3
"""In standard deviations of the whole model's logits. A slice in a wrong place makes it about 1. With quantized weights
the CPU rounds activations to 8 bits, and a last bit's difference can round them otherwise; with f32 it does not."""
_CONTEXT = ContextConfig(n_ctx=256, n_seq=4)
_N_SINGLE = 12


@dataclass(frozen=True)
class Difference:
    """Of all logits."""

    deviation: float
    """The largest, in standard deviations of the whole model's logits."""
    limit: float
    """What the deviation is to be below."""
    tokens: str
    """Whether all rows have the same best token."""


def _runs(n_vocab: int, rolls_back: bool) -> list[Run]:
    """A text's beginning in two runs, single tokens, several rows, branches."""
    text = [byte % n_vocab for byte in (ROOT / "prompts" / "tale.txt").read_bytes()[:96]]
    runs = [run_of(1, text[:33], 0), run_of(2, text[33:47], 33)]
    runs += [run_of(3 + i, [text[47 + i]], 47 + i) for i in range(_N_SINGLE)]
    end = 47 + _N_SINGLE
    runs.append(run_of(20, text[end : end + 5], end))
    if not rolls_back:
        return runs
    at = end + 5
    branches = rows_of((7, at, (0,)), (8, at, (1,)), (9, at + 1, (0,)), (10, at + 1, (1,)))
    runs.append(Run(id=21, rows=branches, ops=(KvOp(KvKind.CP, 0, 1, 0, at),), logits_requests=FULL))
    back = (KvOp(KvKind.RM, 1), KvOp(KvKind.RM, 0, -1, at - 3, -1))
    return [*runs, Run(id=22, rows=rows_of((12, at - 3, (0,)), (13, at - 2, (0,))), ops=back, logits_requests=FULL)]


def compare(path: Path, n_parts: int) -> Difference:
    """A group of even parts beside the whole model."""
    file = ModelFile.open(path)
    n_vocab = file.array_lengths["tokenizer.ggml.tokens"]
    with Pipeline(path, context=_CONTEXT) as whole:
        runs = _runs(n_vocab, whole.stages[0].rolls_back)
        expected = np.concatenate([whole.decode(run) for run in runs])
    with Pipeline(path, context=_CONTEXT, shares=[(1,) * n_parts]) as group:
        logits = np.concatenate([group.decode(run) for run in runs])
    deviation = float(np.abs(logits - expected).max() / expected.std())
    is_f32 = "q" not in {tensor.type[0] for tensor in file.tensors.values()}
    return Difference(deviation, LIMIT_F32 if is_f32 else LIMIT, _tokens(logits, expected))


def _tokens(logits: np.ndarray, expected: np.ndarray) -> str:
    best, right = logits.argmax(axis=1), expected.argmax(axis=1)
    (differing,) = np.nonzero(best != right)
    if differing.size == 0:
        return f"{len(right)} tokens the same"
    at = int(differing[0])
    gap = (expected[at, right[at]] - expected[at, best[at]]) / expected.std()
    return f"token {at} of {len(right)} differs at a gap of {gap:.1e}"
