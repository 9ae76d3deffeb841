"""Checks the MTP layers of architectures: `python -m support.mtp_check FOLDER NAME:NUMBER...`.

NAME: of `support.architectures`, whose model, with this number of MTP layers, is written into FOLDER. What is checked:
a target gives the same logits whether or not its last states are kept, on one rank and on two, and the same states; the
MTP layers draft what llama.cpp's own order of calls drafts on the same file.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.messages import LogitsKind, LogitsRequest, Row, Run, StateRef
from ggpipe.llama import mtp
from ggpipe.llama.eagle3 import States, TargetStates
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.stage import Stage
from support import deepseek4
from support.architectures import SMALL, write
from support.mtp import PlainMtp
from support.reference import Logits

_TOKENS = tuple((5 + 37 * i + i * i) % 110 + 3 for i in range(30))
_RUNS = ((0, 20), (20, 1), (21, 3), (24, 6))
_EPOCHS, _N_PROMPT, _N_DRAFT, _TARGET_RUN = (1, 2, 5, 11), 10, 4, 7
_BEST = (LogitsRequest(LogitsKind.TOP, 2),)


def _computed(file: ModelFile, edges: tuple[int, ...], wanted: tuple[int, ...], exact: bool) -> tuple[Logits, States]:
    """Logits of each run's last row, and the last states of all rows."""
    config, context = ModelConfig(path=file.paths[0]), ContextConfig(n_ctx=64, exact=exact)
    stages = [Stage(file, own, config, context, (1, 1), wanted_inputs=wanted) for own in itertools.pairwise(edges)]
    logits: list[Logits] = []
    states: list[States] = []
    for number, (at, n) in enumerate(_RUNS, 1):
        rows = tuple(
            Row(token=token, pos=at + i, seqs=(0,), request=0, logits_request=-1 if i < n - 1 else 0)
            for i, token in enumerate(_TOKENS[at : at + n])
        )
        run, incoming = Run(id=number, rows=rows, ops=(), logits_requests=(LogitsRequest(LogitsKind.FULL),)), None
        for stage in stages:
            outcome = stage.decode(run, incoming)
            incoming = outcome.outgoing
        logits.append(outcome.rows[0].logits)
        states += outcome.layer_inputs
    for stage in stages:
        stage.close()
    return np.array(logits), np.concatenate(states) if states else np.empty(0, np.float32)


def _drafts(stage: mtp.MtpStage, last: int) -> list[int]:
    """What is drafted after the text's token `last`."""
    stage.forget_all()
    text = tuple(
        Row(token=token, pos=i, seqs=(0,), request=0, state=StateRef(_TARGET_RUN, i - 1, is_target=True) if i else None)
        for i, token in enumerate(_TOKENS[:last])
    )
    stage.decode(Run(id=1, rows=text, ops=(), logits_requests=()), None)
    token, state, drafted = _TOKENS[last], StateRef(_TARGET_RUN, last - 1, is_target=True), list[int]()
    for run in range(2, 2 + _N_DRAFT):
        row = Row(token=token, pos=last + run - 2, seqs=(0,), request=0, logits_request=0, state=state)
        (found,) = stage.decode(Run(id=run, rows=(row,), ops=(), logits_requests=_BEST), None).rows
        assert found.ids is not None
        token, state = found.ids[0], StateRef(run, 0)
        drafted.append(token)
    return drafted


def check(name: str, path: Path, n_mtp: int) -> None:
    """Raises AssertionError."""
    if name == "deepseek4":
        deepseek4.write_with_mtp(path, write(name, path.with_suffix(".plain"), sizes=SMALL))
    file = ModelFile.open(write(name, path, n_mtp=n_mtp, sizes=SMALL))
    mtp.check(file)
    wanted = mtp.needs_of(file).layers
    for exact in (True, False):
        plain, _ = _computed(file, (0, file.n_layer), (), exact)
        whole, states = _computed(file, (0, file.n_layer), wanted, exact)
        np.testing.assert_allclose(whole, plain, rtol=0, atol=0 if exact else 1e-4 * plain.std())
        sliced = _computed(file, (0, 1, file.n_layer), wanted, exact)
        np.testing.assert_array_equal(sliced[0], whole)
        np.testing.assert_array_equal(sliced[1], states)
        assert states.std() > 0.1
    context, arrived = ContextConfig(n_ctx=64, fast_kernels=False), TargetStates(wanted)
    stage = mtp.MtpStage(file, ModelConfig(path=path), context, (1, 1), arrived)
    reference = PlainMtp(path)
    arrived.take(_TARGET_RUN, {wanted[0]: reference.target_states(_TOKENS)})
    expected = reference.drafts(_TOKENS[:_N_PROMPT], _TOKENS[_N_PROMPT:], _EPOCHS, _N_DRAFT)
    assert {epoch: _drafts(stage, _N_PROMPT + epoch - 1) for epoch in _EPOCHS} == expected


if __name__ == "__main__":
    for each in sys.argv[2:]:
        name, n_mtp = each.split(":")
        print(name, file=sys.stderr)
        check(name, Path(sys.argv[1], f"{name}.gguf"), int(n_mtp))
