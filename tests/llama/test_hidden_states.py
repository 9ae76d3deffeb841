"""The last hidden state of rows: libllama's, however the model is cut, beside rows whose logits are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from support.pipeline import Pipeline, even_cuts
from support.reference import Reference, run_of
from support.zoo import ZOO, make

from ggpipe.config.context import ContextConfig
from ggpipe.core.messages import LogitsKind, LogitsRequest, Row, Run

RECURRENT = ("jamba", "mamba2")
HIDDEN, FULL = LogitsRequest(LogitsKind.HIDDEN), LogitsRequest(LogitsKind.FULL)


def both(id: int, tokens: Sequence[int], pos: int) -> Run:
    """A run of two sequences, whose tokens take turns: the first one has more, and wants its hidden states."""
    first = [Row(token=token, pos=pos + i, seqs=(0,), request=0, logits_request=0) for i, token in enumerate(tokens)]
    second = [
        Row(token=token + 1, pos=i, seqs=(1,), request=1, logits_request=1) for i, token in enumerate(tokens[::2])
    ]
    pairs = zip(first, [*second, *[None] * len(first)], strict=False)
    return Run(
        id=id, rows=tuple(row for pair in pairs for row in pair if row is not None), logits_requests=(HIDDEN, FULL)
    )


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2", "qwen3moe", "gpt2", "deepseek2", *RECURRENT])
def test_hidden_states_are_libllamas(name: str, tmp_path: Path) -> None:
    """Alone, and beside another request's logits, but for models with recurrent layers, whose rows the scheduler keeps
    apart."""
    path, context = make(name, tmp_path / "model.gguf"), ContextConfig(n_ctx=256, n_seq=2, fast_kernels=False)
    cuts = () if name == "mamba2" else even_cuts(ZOO[name].n_layer, 2)
    fields = {"n_seq_max": 2, "kv_unified": True, "swa_full": True}
    with Pipeline(path, cuts, context) as pipeline, Reference(path, 256, context=fields) as reference:
        alone = structs.replace(run_of(1, range(5, 38), 0), logits_requests=(HIDDEN,))
        np.testing.assert_array_equal(pipeline.decode(alone), reference.hidden(alone))
        shared = run_of(2, range(40, 49), 33) if name in RECURRENT else both(2, range(40, 49), 33)
        shared = structs.replace(shared, logits_requests=(HIDDEN, FULL))
        rows = pipeline.outcome(shared).rows
        states = iter(reference.hidden(shared))
        for row in rows:
            expected = next(states)
            if shared.rows[row.row].logits_request == 0:
                np.testing.assert_array_equal(row.logits, expected)
        logits = run_of(3, (7, 8, 9), 42)  # those of runs behind are as before
        np.testing.assert_array_equal(pipeline.decode(logits), reference.decode(logits))


def test_rows_that_want_nothing_are_not_given_out(tmp_path: Path) -> None:
    """One of a prompt, and one beside another request's logits: with `exact` the same bits for each cut."""
    path, context = make("llama", tmp_path / "model.gguf"), ContextConfig(n_ctx=256, n_seq=2, exact=True)
    prompt = run_of(1, range(5, 38), 0)
    with Reference(path, 256, exact=True) as reference:
        libllamas = reference.hidden(prompt)[-1]
        logits = reference.decode(run_of(2, (9,), 33))[0]
    prompt = structs.replace(
        prompt,
        rows=tuple(structs.replace(row, logits_request=-1) for row in prompt.rows[:-1]) + prompt.rows[-1:],
    )
    states = []
    for cuts, shares in (((), ()), ((1,), ()), ((), [(0.5, 0.5)])):
        with Pipeline(path, cuts, replace(context, exact=not shares), shares=shares) as pipeline:
            (row,) = pipeline.outcome(structs.replace(prompt, logits_requests=(HIDDEN,))).rows
            assert row.row == 32
            states.append(row.logits)
            other = Row(token=9, pos=33, seqs=(0,), request=1, logits_request=1)
            hidden = Row(token=9, pos=34, seqs=(0,), request=0, logits_request=0)
            mixed = pipeline.outcome(Run(id=2, rows=(other, hidden), logits_requests=(HIDDEN, FULL))).rows
            assert [len(row.logits) for row in mixed] == [len(logits), len(libllamas)]
            np.testing.assert_allclose(mixed[0].logits, logits, atol=0.1)
    np.testing.assert_array_equal(states[0], states[1])
    for state in states:
        np.testing.assert_allclose(state, libllamas, atol=0.05)
