"""Stages that are tensor-parallel groups: what they compute, what they hold in memory, and how they stop."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.groups import Parts
from support.pipeline import Pipeline
from support.reference import Logits, run_of
from support.runs import TREE
from support.zoo import make, pair_script, split

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.errors import ModelError, RunError
from ggpipe.llama.bundled import BUNDLED_PAIR
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group import context_of_group, splits_attention, splits_latent
from ggpipe.llama.model_shape import shape_of

CONTEXT = ContextConfig(n_ctx=256, n_seq=4)
EQUAL = 2e-2
"""In standard deviations of the logits: what libllama's own kernels differ by. Slices in wrong places make it 1."""
QUANTIZED = 0.1
"""The CPU rounds activations to 8 bits before it multiplies them with quantized weights."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("group")


def wide(name: str, folder: Path, weight_type: str | None = None) -> Path:
    """A model of the zoo whose FFN is wide enough for three parts."""
    return make(name, folder / f"{name}-{weight_type}.gguf", n_ff=512, weight_type=weight_type)


def large(folder: Path, weight_type: str) -> Path:
    """A model whose quantized rows can be split everywhere."""
    path = folder / f"large-{weight_type}.gguf"
    if not path.exists():
        shape = pair_script().Shape(n_layer=3, width=512, n_head=8, n_head_kv=4, n_ff=1536, n_vocab=512)
        pair_script().make_pair(path, folder / "draft.gguf", shape, weight_type=weight_type)
    return path


def decoded(pipeline: Pipeline) -> Logits:
    """All that the runs of `TREE` give: branches, rollback, mixed rows, rows of 20 down to one."""
    logits = [pipeline.decode(run) for run in TREE if run.rows or pipeline.outcome(run).rows]
    return np.concatenate([*logits, pipeline.decode(run_of(9, [5], 12, (2,)))])


def whole(path: Path, model: ModelConfig | None = None) -> Logits:
    with Pipeline(path, context=CONTEXT, model=model) as pipeline:
        return decoded(pipeline)


def assert_near(logits: Logits, expected: Logits, limit: float = EQUAL) -> None:
    assert np.abs(logits - expected).max() <= limit * expected.std()


@pytest.mark.parametrize("shares", [(1, 1), (1, 1, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "qwen3moe", "gpt-oss", "phi3", "qwen2-tied"])
def test_attention_and_ffn(name: str, shares: tuple[float, ...], folder: Path) -> None:
    path = wide(name, folder)
    with Pipeline(path, context=CONTEXT, shares=[shares]) as pipeline:
        assert_near(decoded(pipeline), whole(path))


@pytest.mark.parametrize("shares", [(1, 1), (3, 1)], ids=str)
def test_latent_attention(shares: tuple[float, ...], folder: Path) -> None:
    path = wide("deepseek2", folder)
    assert splits_latent(ModelFile.open(path))
    with Pipeline(path, context=CONTEXT, shares=[shares]) as pipeline:
        assert_near(decoded(pipeline), whole(path))


@pytest.mark.parametrize("name", ["bloom", "refact", "mamba2", "falcon", "starcoder"])
def test_ffn_only(name: str, folder: Path) -> None:
    path = wide(name, folder)
    assert not splits_attention(ModelFile.open(path))
    run, more = run_of(1, range(5, 25), 0), run_of(2, [7], 20)
    with Pipeline(path, context=CONTEXT, shares=[(1, 1)]) as pipeline, Pipeline(path, context=CONTEXT) as one:
        for each in (run, more):
            assert_near(pipeline.decode(each), one.decode(each))


@pytest.mark.parametrize(
    ("cuts", "shares"),
    [((1,), [(1, 1), (1,)]), ((1,), [(1,), (1, 1)]), ((1, 2), [(1,), (1, 2), (1,)]), ((2,), [(1, 1, 1), (1, 1)])],
    ids=["first", "last", "middle", "both"],
)
def test_anywhere_in_a_pipeline(cuts: tuple[int, ...], shares: list[tuple[float, ...]], folder: Path) -> None:
    path = wide("llama", folder)
    with Pipeline(path, cuts, CONTEXT, shares=shares) as pipeline:
        assert_near(decoded(pipeline), whole(path))


@pytest.mark.parametrize("n_parts", [3, 5])
def test_more_parts_than_heads(n_parts: int, folder: Path) -> None:
    """Some have no heads: they add zeros."""
    path = wide("phi3", folder)
    with Pipeline(path, context=CONTEXT, shares=[(1,) * n_parts]) as pipeline:
        assert_near(decoded(pipeline), whole(path))


@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("weight_type", ["q4_0", "q4_k"])
def test_quantized(weight_type: str, repack: bool, folder: Path) -> None:
    path = large(folder, weight_type)
    model = ModelConfig(path=path, repack=repack)
    with Pipeline(path, context=CONTEXT, model=model, shares=[(1, 1)]) as pipeline:
        assert_near(decoded(pipeline), whole(path, model), QUANTIZED)


def test_the_same_again(folder: Path) -> None:
    path = wide("llama", folder, "Q4_0")
    runs = []
    for _ in range(2):
        with Pipeline(path, context=CONTEXT, shares=[(1, 1, 1)]) as pipeline:
            runs.append(decoded(pipeline))
    np.testing.assert_array_equal(runs[0], runs[1])


def test_load_modes_and_split_files(folder: Path) -> None:
    """Weights in place, weights that are read, and weights of several files are the same weights."""
    path = wide("llama", folder)
    several = split(path, folder / "several", 3)[0]
    runs = []
    for model in (ModelConfig(path=path), ModelConfig(path=path, load_mode="none"), ModelConfig(path=several)):
        with Pipeline(model.path, context=CONTEXT, model=model, shares=[(1, 1)]) as pipeline:
            runs.append(decoded(pipeline))
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])


@pytest.mark.parametrize("repack", [True, False])
def test_memory(repack: bool, folder: Path) -> None:
    """Each part holds its share of the weights. What is in no part's row of the file is copied."""
    path = large(folder, "q4_0")
    file, model = ModelFile.open(path), ModelConfig(path=path, repack=repack)
    parts = Parts(file, (0, file.n_layer), model, CONTEXT, (1, 1))
    try:
        weights = sum(t.size for name, t in file.tensors.items() if name != "token_embd.weight")
        for stage in parts.stages:
            held = stage._native.slice_bytes + stage._native.mapped_bytes
            assert 0.45 * weights < held < 0.55 * weights
            assert (stage._native.slice_bytes > 0.4 * held) == repack or stage._native.slice_bytes < 0.4 * held
            assert sum(size for _, size in stage._native.mapped_ranges) == stage._native.mapped_bytes
    finally:
        parts.close()


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "phi3", "gpt-oss", "deepseek2", "jamba", "bloom"])
def test_memory_is_as_the_header_says(name: str, folder: Path) -> None:
    """Of all parts together: whose head is the odd one changes from layer to layer."""
    path = wide(name, folder)
    file = ModelFile.open(path)
    shape = shape_of(file).part(1 / 3)
    assert shape.max_parts > 1
    parts = Parts(file, (1, file.n_layer), ModelConfig(path=path), CONTEXT, (1, 1, 1))
    try:
        held = sum(stage._native.slice_bytes + stage._native.mapped_bytes for stage in parts.stages)
    finally:
        parts.close()
    expected = 3 * (sum(shape.layer_bytes[1:]) + shape.output_bytes)
    assert held == pytest.approx(expected, rel=0.05), "biases count as whole, and are large in toys"


@pytest.mark.parametrize("asking", [0, 1])
def test_a_cancel_on_one_part_stops_all(asking: int, folder: Path) -> None:
    path = wide("llama", folder)
    context = replace(CONTEXT, n_ctx=2048)
    with Pipeline(path, context=context, shares=[(1, 1)]) as pipeline, Pipeline(path, context=context) as one:
        group = pipeline.groups[0]
        assert group
        pipeline.decode(run_of(1, range(5, 25), 0))
        done = threading.Event()

        def cancel() -> None:
            while not done.wait(1e-4):
                group.stages[asking].cancel(2)

        thread = threading.Thread(target=cancel)
        thread.start()
        outcome = pipeline.outcome(run_of(2, [*range(5, 105)] * 5, 20))
        done.set()
        thread.join()
        assert outcome.cancelled
        one.decode(run_of(1, range(5, 25), 0))
        after = run_of(3, [7, 8], 20)
        assert_near(pipeline.decode(after), one.decode(after))


def test_saved_states(folder: Path) -> None:
    """Each part saves and restores its own KV cells."""
    path = wide("qwen3", folder)
    after = run_of(2, [7, 8], 20)
    with Pipeline(path, context=CONTEXT, shares=[(1, 1)], saves_states=True) as pipeline:
        pipeline.decode(run_of(1, range(5, 25), 0))
        (group,) = pipeline.groups
        assert group
        states = [stage.states.read(0, 0, 20) for stage in group.stages]
        expected = pipeline.decode(after)
    with Pipeline(path, context=CONTEXT, shares=[(1, 1)], saves_states=True) as pipeline:
        (group,) = pipeline.groups
        assert group
        for stage, state in zip(group.stages, states, strict=True):
            stage.states.append(state, 0)
        np.testing.assert_array_equal(pipeline.decode(after), expected)


def test_a_lost_part(folder: Path) -> None:
    with Pipeline(wide("llama", folder), shares=[(1, 1)]) as pipeline:
        (group,) = pipeline.groups
        assert group
        group.sums[0].abandon()
        with pytest.raises(RunError, match="lost"):
            group.stages[0].decode(run_of(1, [5], 0), None)


def test_the_demo_model() -> None:
    """Real weights: the same text but at near-ties."""
    path = BUNDLED_PAIR.target
    with Pipeline(path, context=CONTEXT, shares=[(1, 1)]) as pipeline, Pipeline(path, context=CONTEXT) as one:
        tokens = list(range(300, 320))
        for at in range(200):
            run = run_of(at + 1, tokens if at == 0 else tokens[-1:], len(tokens) - (20 if at == 0 else 1))
            logits, expected = pipeline.decode(run)[-1], one.decode(run)[-1]
            assert_near(logits, expected, QUANTIZED)
            best, second = np.sort(expected)[[-1, -2]]
            assert logits.argmax() == expected.argmax() or best - second < QUANTIZED * expected.std()
            tokens.append(int(expected.argmax()))


def test_what_cannot_be_a_group(folder: Path) -> None:
    assert context_of_group(ModelFile.open(wide("llama", folder)), CONTEXT).flash_attn == "on"
    with pytest.raises(ModelError, match="'mpt' models"):
        context_of_group(ModelFile.open(wide("mpt", folder)), CONTEXT)
    without_attention = ModelFile.open(wide("bloom", folder))
    assert context_of_group(without_attention, CONTEXT).flash_attn == CONTEXT.flash_attn


def test_rows_of_one_block(folder: Path) -> None:
    """ggml's meta device cannot cut tensors whose rows are one block each, here of 256 numbers."""
    path = wide("llama", folder, "Q4_K_M")
    with pytest.raises(ModelError, match=r"attn_output.weight cannot be divided .* rows are one block of q4_K each"):
        Pipeline(path, context=CONTEXT, shares=[(1, 1)])
