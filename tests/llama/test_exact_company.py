"""--exact: a sequence's logits have the same bits beside other sequences, wherever its KV cells are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import numpy as np
import pytest
from support.commands import TARGET
from support.pipeline import Pipeline, even_cuts
from support.reference import Logits, run_of
from support.zoo import ZOO, Metadata, make

from ggpipe.config.context import ContextConfig, KvType
from ggpipe.config.model import ModelConfig
from ggpipe.core.messages import KvKind, KvOp, LogitsKind, LogitsRequest, Row, Run

DRAFT = TARGET.with_name("tales-draft.gguf")
N_SEQ = 4
WHOLE = ("mamba", "mamba2", "rwkv6", "rwkv7", "hrm_text")  # models that cannot be cut
_INDEXER: Metadata = {
    "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 32,
    "attention.indexer.top_k": 8,
    "attention.indexer.block_size": 4,
    "attention.indexer.local_blocks": 1,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "leading_dense_block_count": 1,
}
_SPARSE = replace(ZOO["qwen3moe"], arch="minimax-m3", n_head=2, drop=ZOO["deepseek2"].drop)
"""A model that attends to chosen cells only."""
RM, CP = KvKind.RM, KvKind.CP
FULL = (LogitsRequest(LogitsKind.FULL),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("company")


class Company:
    """Sequences that grow, fork, are cut back and end on one pipeline; keeps the logits of every row by its text."""

    def __init__(self, pipeline: Pipeline, n_vocab: int) -> None:
        self._pipeline, self._n_vocab = pipeline, n_vocab
        self._texts: list[list[int]] = [[] for _ in range(N_SEQ)]
        self._ops: list[KvOp] = []
        self._n_runs = 0
        self.found: dict[tuple[int, ...], Logits] = {}

    def length(self, seq: int) -> int:
        return len(self._texts[seq])

    def cut(self, seq: int, keep: int = 0) -> None:
        self._ops.append(KvOp(RM, seq, p0=keep))
        del self._texts[seq][keep:]

    def fork(self, seq: int, to: int, keep: int) -> None:
        self._ops += [KvOp(RM, to), KvOp(CP, seq, to, 0, keep)]
        self._texts[to] = self._texts[seq][:keep]

    def grow(self, seqs: Sequence[int], rng: np.random.Generator) -> None:
        """One run with a row for each of these sequences, in this order; a sequence may come several times."""
        rows, texts = [], []
        for seq in seqs:
            text, token = self._texts[seq], int(rng.integers(3, self._n_vocab))
            rows.append(Row(token=token, pos=len(text), seqs=(seq,), request=0, logits_request=0))
            text.append(token)
            texts.append(tuple(text))
        self._n_runs += 1
        run = Run(id=self._n_runs, rows=tuple(rows), ops=tuple(self._ops), logits_requests=FULL)
        self._ops.clear()
        self.found.update(zip(texts, self._pipeline.decode(run), strict=True))


def alone(pipeline: Pipeline, texts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Logits]:
    """Logits of each text's tokens, one text after the other in an empty cache."""
    found: dict[tuple[int, ...], Logits] = {}
    for i, text in enumerate(sorted(texts, key=len, reverse=True)):
        if text not in found:
            rows = pipeline.decode(run_of(i + 1, text, 0, ops=(KvOp(RM, 0),)))
            found.update((text[: n + 1], row) for n, row in enumerate(rows))
    return found


def check(path: Path, cuts: Sequence[int], cells: KvType, n_vocab: int, seed: int, fast: bool | None = None) -> None:
    context = ContextConfig(
        n_ctx=512, n_seq=N_SEQ, exact=True, fast_kernels=fast, flash_attn="on", cache_type_k=cells, cache_type_v=cells
    )
    rng = np.random.default_rng(seed)
    with Pipeline(path, cuts, context, ModelConfig(path=path), threads=2) as pipeline:
        assert all(stage.exact_in_company for stage in pipeline.stages)
        company = Company(pipeline, n_vocab)
        for _ in range(30):
            seq, other = map(int, rng.permutation(N_SEQ)[:2])
            n = company.length(seq)
            if n > 60 or rng.random() < 0.1:
                company.cut(seq)
            elif n and pipeline.stages[0].rolls_back:
                keep = int(rng.integers(n))
                if rng.random() < 0.5:
                    company.cut(seq, keep)
                else:
                    company.fork(seq, other, keep)
            company.grow(rng.choice(N_SEQ, rng.integers(1, 12), p=rng.dirichlet([0.5] * N_SEQ)).tolist(), rng)
    with Pipeline(path, (), context, ModelConfig(path=path)) as pipeline:
        expected = alone(pipeline, list(company.found))
    differ = [len(text) for text, row in company.found.items() if not np.array_equal(row, expected[text])]
    assert not differ, f"{len(differ)} of {len(company.found)} rows differ"


@pytest.mark.each_value
@pytest.mark.parametrize("fast", [False, True], ids=["ggml", "fast"])
@pytest.mark.parametrize("name", ZOO)
def test_architectures(name: str, fast: bool, folder: Path) -> None:
    path, model = make(name, folder / f"{name}.gguf"), ZOO[name]
    cuts = () if name in WHOLE else even_cuts(model.n_layer, 2)
    check(path, cuts, "f16", 384 if model.tokenizer == "spm" else 128, 1, fast)


def test_sparse_attention(folder: Path) -> None:
    with patch.dict(ZOO, {"sparse": replace(_SPARSE, metadata={**_SPARSE.metadata, **_INDEXER})}):
        path = make("sparse", folder / "sparse.gguf")
    check(path, (1,), "f16", 128, 1)


@pytest.mark.parametrize("cells", get_args(KvType))
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_types_of_cells(name: str, cells: KvType, folder: Path) -> None:
    path = make(name, folder / f"{name}.gguf")
    check(path, (1,), cells, 128, 2)


@pytest.mark.parametrize("fast", [False, True], ids=["ggml", "fast"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", [TARGET, DRAFT], ids=lambda path: path.stem)
def test_bundled_pair(model: Path, seed: int, fast: bool) -> None:
    check(model, (1,), "f16", 2048, seed, fast)
