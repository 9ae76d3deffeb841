"""Prompts: the scheduler's chunks are libllama's."""

from __future__ import annotations

import ctypes
import itertools
import os
from pathlib import Path

import llama_cpp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.examples import n_examples
from support.fake_pipeline import cut_as_libllama
from support.heads import opened
from support.requests import core_request
from support.zoo import ggml_base, make

from ggpipe.core.messages import Row
from ggpipe.core.prompt_chunks import chunk_end, chunk_rows


def chunk_lengths(n_tokens: int, n_batch: int, n_ubatch: int) -> list[int]:
    ends = [0]
    while ends[-1] < n_tokens:
        ends.append(chunk_end(ends[-1], n_tokens, n_batch, n_ubatch))
    return [end - at for at, end in itertools.pairwise(ends)]


@settings(max_examples=n_examples(100, 300))
@given(st.integers(0, 300), st.integers(1, 100), st.integers(1, 100))
@example(0, 1, 1)
@example(2049, 2048, 512)
def test_chunk_borders_are_libllamas(n_tokens: int, n_batch: int, n_ubatch: int) -> None:
    assert chunk_lengths(n_tokens, n_batch, n_ubatch) == cut_as_libllama(n_tokens, n_batch, n_ubatch)


@pytest.mark.parametrize(("n_tokens", "n_batch", "n_ubatch"), [(70, 32, 12), (70, 64, 64), (33, 512, 16), (20, 8, 16)])
def test_libllama_cuts_there_itself(n_tokens: int, n_batch: int, n_ubatch: int, tmp_path: Path) -> None:
    """Seen from inside: how many rows enter the first layer, each time."""
    path = make("llama-tied", tmp_path / "model.gguf")
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
    assert model is not None
    seen: list[int] = []

    @llama_cpp.ggml_backend_sched_eval_callback  # type: ignore[untyped-decorator]
    def watch(tensor: int, ask: bool, _data: object) -> bool:
        if ask and ggml_base().ggml_get_name(tensor) == b"attn_norm-0":
            seen.append(ggml_base().ggml_nrows(tensor))
        return not ask

    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 256, n_batch, n_ubatch
    params.n_threads = params.n_threads_batch = 1
    params.kv_unified = True
    params.cb_eval = watch
    context = llama_cpp.llama_init_from_model(model, params)
    assert context is not None
    seen.clear()  # the context was warmed up
    for start in range(0, n_tokens, n_batch):
        tokens = range(5 + start, 5 + min(start + n_batch, n_tokens))
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) == 0
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    assert seen == chunk_lengths(n_tokens, n_batch, n_ubatch)


@settings(max_examples=n_examples(40, 100), deadline=None)
@given(st.integers(1, 39), st.integers(1, 12), st.integers(1, 12))
def test_one_stage_gets_the_same_chunks_whatever_is_in_flight(n: int, n_batch: int, n_ubatch: int) -> None:
    def rows(n_in_flight: int) -> list[tuple[Row, ...]]:
        head = opened(n_batch=n_batch, n_ubatch=n_ubatch, n_in_flight=n_in_flight)
        head.arrive(core_request(id=1, prompt=tuple(range(1, n + 1)), n_predict=3))
        head.drain()
        head.check_end()
        return [run.rows for run in head.seen[1].runs]

    assert rows(1) == rows(2)
    lengths = [sum(row.pos < n for row in run) for run in rows(1)]
    assert [length for length in lengths if length] == cut_as_libllama(n, n_batch, n_ubatch)


@settings(max_examples=n_examples(40, 100), deadline=None)
@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 64), st.integers(2, 9))
def test_several_stages_get_shorter_chunks(n: int, n_batch: int, n_ubatch: int, n_stages: int) -> None:
    head = opened(n_ctx=256, n_batch=n_batch, n_ubatch=n_ubatch, n_in_flight=n_stages + 1)
    head.arrive(core_request(id=1, prompt=tuple(range(1, n + 1)), n_predict=1))
    head.drain()
    head.check_end()
    lengths = [sum(row.pos < n for row in run.rows) for run in head.seen[1].runs]
    assert lengths == cut_as_libllama(n, n_batch, chunk_rows(n, n_stages, min(n_batch, n_ubatch)))
