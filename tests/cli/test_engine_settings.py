"""The engine's settings, as a command line gives them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.command_lines import given

from ggpipe.cli.messages import in_flags
from ggpipe.config.context import ContextConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.errors import UsageError
from ggpipe.options import engine_config


def test_sequences_are_those_of_the_branches() -> None:
    assert engine_config.engine_config(given("-np 4")).context.n_seq == 1
    config = engine_config.engine_config(given("-np 4 -md d.gguf"))
    assert (config.context.n_seq, config.drafts[0].context.n_seq) == (5, 4), "n-grams may name another token"
    exact = given("-np 4 -md d.gguf --exact -fa off")
    config = engine_config.engine_config(exact)
    assert (config.context.n_seq, config.drafts[0].context.n_seq) == (2, 1)
    assert engine_config.speculation_config(exact).n_parallel == 1
    assert [in_flags(w) for w in engine_config.warnings_of(exact)] == [
        "--exact without flash attention drafts only chains: using -np/--parallel 1"
    ]
    assert engine_config.warnings_of(given("-np 4 --exact -fa off")) == []
    assert engine_config.warnings_of(given("-md d.gguf --exact -fa off")) == []
    assert engine_config.warnings_of(given("-np 4 -md d.gguf --exact")) == []
    assert engine_config.speculation_config(given("-np 4 -md d.gguf --exact")).n_parallel == 4


def test_the_draft_is_loaded_as_the_target_and_keeps_its_own_positions() -> None:
    line = (
        "-c 99 -ctk q8_0 --exact --rope-scale 2 -t 1,2/3 --mlock -nr --numa isolate --lora a -md d.gguf -td 5 "
        "--mpi-layer-split 0.5,0.5/1.0 --override-kv a=int:1"
    )
    config = engine_config.engine_config(given(line))
    (draft,) = config.drafts
    for weights in (config.model, draft.model):
        assert (weights.load_mode, weights.repack, weights.numa) == ("mmap+mlock", False, "isolate")
    assert config.model.loras == ((Path("a"), 1.0),)
    assert (draft.model.loras, draft.model.override_kv) == ((), ())
    assert (config.context.exact, config.context.rope_scale) == (True, 2.0)
    assert draft.context == ContextConfig(n_ctx=99, cache_type_k="q8_0", n_branches=128)
    assert config.pipeline == PipelineConfig(LayerSplit((0.5, 0.5)), (1, 2, 3))
    assert (draft.layer_split, draft.threads, draft.threads_batch) == (LayerSplit((1.0,)), 5, -1)


def test_mtp_layers_are_a_part_of_the_target() -> None:
    line = "--spec-type draft-mtp --exact -ctk f32 --lora a --rope-freq-base 5 --mpi-layer-split 0.5,0.5/1.0 -td 3"
    config = engine_config.engine_config(given(line))
    (own,) = config.drafts
    assert own.is_mtp
    assert own.layer_split == LayerSplit((1.0,))
    assert own.model == dataclasses.replace(config.model, loras=())
    assert (own.context.rope_freq_base, own.context.cache_type_k, own.context.exact, own.threads) == (
        5,
        "f32",
        False,
        3,
    )
    assert config.is_mtp(1)
    assert not config.is_mtp(0)
    several = engine_config.engine_config(given("-md d --spec-type draft,mtp,ngram --mpi-layer-split 1/0.5,0.5/1"))
    assert [(draft.is_mtp, draft.n_ranks) for draft in several.drafts] == [(False, 2), (True, 1)]
    (inside,) = engine_config.engine_config(given("--spec-type mtp")).drafts
    assert inside.layer_split is None


def test_draft_models_with_ranks_come_first() -> None:
    config = engine_config.engine_config(given("-md a.gguf -md b.gguf -md c.gguf --mpi-layer-split 0.5,0.5//1*2"))
    assert [draft.model.path.name for draft in config.drafts] == ["b.gguf", "a.gguf", "c.gguf"]
    assert [draft.n_ranks for draft in config.drafts] == [2, 0, 0]
    assert (config.n_draft_ranks, config.draft_heads(4)) == (2, (2,))
    assert [config.model_of(rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert config.context.n_seq == 4, "each draft model may name another token, and n-grams"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--mpi-layer-split 0.5,0.5/1", "a split with ranks after the / needs a draft model: .*"),
        (
            "-md a.gguf --mpi-layer-split 1/1/1",
            "`layer_split` has ranks for 2 draft models, but `draft.model` names 1: .*",
        ),
        ("-md a.gguf -md b.gguf --mpi-layer-split auto", "`layer_split` auto plans for one draft model at most: .*"),
    ],
)
def test_draft_models_without_ranks_and_ranks_without_draft_models(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine_config.engine_config(given(line))


def test_a_split_may_be_planned() -> None:
    pipeline = engine_config.engine_config(given("--mpi-layer-split auto")).pipeline
    assert (pipeline.layer_split, pipeline.auto) == (None, True)


@pytest.mark.parametrize(
    ("line", "mode"),
    [
        ("", "auto"),
        ("--no-mmap", "none"),
        ("--no-mmap --mlock", "mlock"),
        ("-lm dio --mlock", "dio"),
        ("-lm mmap --no-mmap", "mmap"),
        ("-lm none --mlock", "mlock"),
        ("-lm auto --no-mmap", "none"),
        ("-lm stream --mlock", "stream"),
    ],
)
def test_ways_to_load(line: str, mode: str) -> None:
    assert engine_config.model_config(given(line)).load_mode == mode


def test_only_the_target_is_streamed() -> None:
    config = engine_config.engine_config(given("-lm stream --stream-memory 1.5 -md d.gguf"))
    assert (config.model.load_mode, config.model.stream_memory_gb) == ("stream", 1.5)
    assert (config.drafts[0].model.load_mode, config.drafts[0].model.stream_memory_gb) == ("auto", None)
