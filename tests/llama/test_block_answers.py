"""What heads that draft blocks say of a position after other tokens than the most probable one before it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray
from support import dflash
from support.commands import TARGET

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.messages import LogitsKind, LogitsRequest, Row, RowLogits, Run, StateRef
from ggpipe.errors import ModelError
from ggpipe.llama.block_answers import Floats, answers_of
from ggpipe.llama.dflash import BlockStage
from ggpipe.llama.eagle3 import TargetStates
from ggpipe.llama.gguf import ModelFile

N_TEXT, N, CONSIDERED = 5, 4, 256
MARKOV = "markov_w1.weight"
REQUEST = LogitsRequest(LogitsKind.TOP, N)


def block_of(path: Path, request: LogitsRequest) -> tuple[list[RowLogits], list[Floats]]:
    """What a head says of a block after some random states, and the logits of the block's rows."""
    file, states = ModelFile.open(path), TargetStates(dflash.LAYERS)
    context = ContextConfig(n_ctx=64, n_ubatch=32, fast_kernels=False)
    stage = BlockStage(file, ModelConfig(path=path), context, (1, 1), states)
    chances = np.random.default_rng(3)
    states.take(1, {layer: chances.standard_normal((N_TEXT, 256), np.float32) for layer in dflash.LAYERS})
    rows = [
        Row(token=300 + i, pos=i, seqs=(0,), request=0, state=StateRef(1, i, is_target=True)) for i in range(N_TEXT)
    ]
    rows[-1] = structs.replace(rows[-1], logits_request=0)
    outcome = stage.decode(Run(id=1, rows=tuple(rows), logits_requests=(request,)), None)
    (answer,) = outcome.rows
    n_rows = (1 - stage._answers.from_anchor + request.n_positions) * stage._answers.outputs
    logits = [stage._logits(i).copy() for i in range(n_rows)]
    n_cells = stage._memory.end_of(0) + 1
    assert n_cells == N_TEXT, "the block is forgotten"
    stage.close()
    return [answer, *answer.later], logits


def weights_of(path: Path, name: str) -> NDArray[np.float32]:
    (tensor,) = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name]
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("drafts", [None, range(300, 700)], ids=["all tokens", "few tokens"])
def test_dspark(from_anchor: bool, drafts: range | None, tmp_path: Path) -> None:
    """libllama's logits have the biases of the best token before. Others' are compared with them."""
    settings = {"sample_from_anchor": from_anchor}
    path = dflash.write(tmp_path / "head.gguf", TARGET, kind=dflash.DSPARK, settings=settings, drafts=drafts)
    n_drafted = dflash.BLOCK_SIZE - (not from_anchor)
    block, logits = block_of(path, structs.replace(REQUEST, n_positions=n_drafted))
    logits = logits[-n_drafted:]
    assert len(block) == n_drafted
    before, output = weights_of(path, MARKOV), weights_of(path, "markov_w2.weight")
    chosen = 0
    for i, (row, own) in enumerate(zip(block, logits, strict=True)):
        assert row.ids == tuple(np.argsort(-own, kind="stable")[:N])
        named = {token for token, _ in row.after}
        if i:
            before_ids = {*(block[i - 1].ids or ())} - {chosen}
            assert named >= before_ids
            branches = {token for _, after in block[i - 1].after for token in (after.ids or ())[:2]}
            every = (before_ids | branches) - {chosen}
            assert named <= every
            assert len(named) == min(len(every), 16)
        for token, after in row.after:
            biases = np.zeros(len(own), np.float32)
            biases[drafts if drafts is not None else slice(None)] = output @ (before[token] - before[chosen])
            expected = own + biases
            assert after.ids is not None
            assert np.allclose(after.logits, expected[list(after.ids)], atol=0.01)
            considered = np.argsort(-own, kind="stable")[:CONSIDERED]  # the others' biases are not counted
            counted = own.astype(float)
            counted[considered] = expected[considered]
            assert abs(after.log_sum_exp - np.log(np.exp(counted).sum())) < 0.01
        chosen = int(own.argmax())


def test_what_the_head_says_with_temperature(tmp_path: Path) -> None:
    path = dflash.write(tmp_path / "head.gguf", TARGET, kind=dflash.DSPARK)
    plain, _ = block_of(path, structs.replace(REQUEST, n_positions=3))
    hot, _ = block_of(path, structs.replace(REQUEST, n_positions=3, temp=0.5))
    assert [row.ids for row in hot] == [row.ids for row in plain]
    assert all(row.below for row in hot)
    assert [row.after for row in hot] == [row.after for row in plain]


def test_a_type_that_cannot_be_read(tmp_path: Path) -> None:
    file = ModelFile.open(dflash.write(tmp_path / "head.gguf", TARGET, kind=dflash.DSPARK))
    other = {**file.tensors, MARKOV: replace(file.tensors[MARKOV], type="q8_1")}
    with pytest.raises(ModelError, match=f"has {MARKOV} in q8_1, which ggpipe does not read; use f16"):
        answers_of(replace(file, tensors=other), 0, 256)


def test_dflash_2(tmp_path: Path) -> None:
    """Each position has the same candidates, whatever is before."""
    path = dflash.write(tmp_path / "head.gguf", TARGET, kind=dflash.DFLASH_2)
    n = dflash.N_CANDIDATES
    block, _ = block_of(path, structs.replace(REQUEST, n=n, n_positions=dflash.BLOCK_SIZE - 1))
    assert len(block) == dflash.BLOCK_SIZE - 1
    for row, following in itertools.pairwise(block):
        assert row.ids is not None
        assert following.ids is not None
        best = row.ids[0]
        assert {best, *(token for token, _ in following.after)} == set(row.ids)
        for answer in (following, *(after for _, after in following.after)):
            assert answer.ids is not None
            assert set(answer.ids) == set(following.ids)
            assert list(answer.logits) == sorted(answer.logits, reverse=True)
            assert abs(sum(np.exp(np.array(answer.logits) - answer.log_sum_exp)) - 1) < 1e-5
        assert len({answer.logits for _, answer in following.after}) > 1
    banned = block[0].ids[:1] if block[0].ids else ()
    first, *_ = block_of(path, structs.replace(REQUEST, n=n, n_positions=2, banned=banned))[0]
    assert first.ids is not None
    assert not {*banned} & {*first.ids}
