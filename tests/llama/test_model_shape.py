"""Model shapes from headers: weights where their tensors' names say, KV caches as large as libllama makes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.architectures import SMALL, write
from support.commands import TARGET
from support.reference import Reference, run_of
from support.zoo import ZOO, make, pair_script, split

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.config.context import MAX_PREFIXES, ContextConfig, KvType
from ggpipe.config.model import ModelConfig
from ggpipe.core.row_work import Attention
from ggpipe.llama import libllama
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.libllama import lib
from ggpipe.llama.model_header import ModelHeader
from ggpipe.llama.model_shape import shape_of
from ggpipe.llama.stage import Stage
from scripts.models.quantize import quantize

MB = 2**20
_PARTIAL_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: states without KV cells
NAMES = ("llama", "llama-tied", "mistral", "falcon", "qwen3moe", "gemma2", "deepseek2", "gpt-oss", "mamba", "jamba")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("zoo")
    return {name: make(name, folder / f"{name}.gguf") for name in NAMES}


def shape(path: Path) -> ModelShape:
    return shape_of(ModelFile.open(path))


def kv_bytes(path: Path, context: ContextConfig, capsys: pytest.CaptureFixture[str]) -> float:
    """What libllama says that it takes for the KV cache, to 0.01 MB."""
    return buffer_bytes("KV", path, (0, ModelFile.open(path).n_layer), context, capsys)


def buffer_bytes(
    kind: str, path: Path, layers: tuple[int, int], context: ContextConfig, capsys: pytest.CaptureFixture[str]
) -> float:
    """What libllama says that a stage takes for KV cells (KV) or recurrent states (RS), to 0.01 MB."""
    libllama.set_log_level(2)
    capsys.readouterr()
    try:
        Stage(ModelFile.open(path), layers, ModelConfig(path=path), context, (1, 1), n_prefixes=MAX_PREFIXES).close()
    finally:
        libllama.set_log_level(5)
    sizes = re.findall(rf"LOCAL {kind} buffer size = *([\d.]+) MiB", capsys.readouterr().err)
    return sum(map(float, sizes)) * MB


@pytest.mark.parametrize("name", NAMES)
def test_weights(name: str, models: Mapping[str, Path]) -> None:
    reader = gguf.GGUFReader(models[name])
    got = shape(models[name])
    sizes = {str(tensor.name): int(tensor.n_bytes) for tensor in reader.tensors}
    assert got.n_layer == ModelFile.open(models[name]).n_layer
    for layer, n_bytes in enumerate(got.layer_bytes):
        assert n_bytes == sum(size for name, size in sizes.items() if name.startswith(f"blk.{layer}."))
    tied = sizes["token_embd.weight"] if "output.weight" not in sizes else 0
    assert got.output_bytes == tied + sum(size for name, size in sizes.items() if name.startswith("output"))
    assert got.weight_bytes == sum(sizes.values()) + tied
    assert (got.n_embd, got.n_vocab) == (64 if name != "llama" else 256, 384 if ZOO[name].tokenizer == "spm" else 128)


def test_experts(models: Mapping[str, Path]) -> None:
    """The first of deepseek2's layers has none."""
    got = shape(models["deepseek2"])
    assert (got.n_expert, got.n_expert_used) == (4, 2)
    assert got.layer_expert_bytes[0] == 0 < got.layer_expert_bytes[1] == got.layer_expert_bytes[2]
    assert got.expert_bytes((0, 3)) == sum(got.layer_expert_bytes)
    assert got.read_bytes((0, 1)) == got.layer_bytes[0]
    assert got.read_bytes((1, 2)) == got.layer_bytes[1] - got.layer_expert_bytes[1] / 2
    dense = shape(models["llama"])
    assert (dense.layer_expert_bytes, dense.n_expert, dense.expert_bytes((0, 2))) == ((), 0, 0)
    assert dense.read_bytes((0, 3)) == dense.weight_bytes - dense.input_bytes


@pytest.mark.parametrize("name", NAMES)
def test_kv_cache_is_as_large_as_libllama_makes_it(
    name: str, models: Mapping[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    got = shape(models[name])
    made = kv_bytes(models[name], ContextConfig(n_ctx=1024), capsys)
    assert got.cell_bytes((0, got.n_layer)) * 1024 == pytest.approx(made, abs=0.006 * MB)
    if name == "jamba":
        assert [cell > 0 for cell in got.layer_cell_bytes] == [False, True, False, True]


@pytest.mark.parametrize("name", ["mamba", "mamba2", "rwkv6", "rwkv7", "jamba"])
def test_states_are_as_large_as_libllama_makes_them(name: str, tmp_path: Path) -> None:
    path = make(name, tmp_path / f"{name}.gguf")
    with Reference(path, 256) as reference:
        reference.decode(run_of(1, [3, 4, 5], 0))
        with_header = lib.llama_state_seq_get_size_ext(reference._context, 0, _PARTIAL_ONLY)
    header = ModelHeader(ModelFile.open(path))
    assert 0 < with_header - sum(map(header.state_bytes, range(header.n_layer))) < 200


STATES = [("mamba", (0, 3)), ("rwkv7", (0, 3)), ("jamba", (0, 1)), ("jamba", (1, 4))]


@pytest.mark.parametrize(("name", "layers"), STATES, ids=str)
def test_states_of_a_stage_are_as_large_as_libllama_makes_them(
    name: str, layers: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of all sequences, of kept prefixes and of draft tokens too. libllama rounds to 0.01 MB."""
    path = make(name, tmp_path / f"{name}.gguf")
    made = buffer_bytes("RS", path, layers, ContextConfig(n_ctx=512, n_seq=60, n_states=8), capsys)
    got = shape_of(ModelFile.open(path), n_seq=60, n_prefixes=MAX_PREFIXES, n_states=8).state_bytes(layers)
    assert made > 0.2 * MB
    assert got == pytest.approx(made, abs=0.006 * MB)


@pytest.mark.parametrize("types", [("q8_0", "q5_1"), ("f32", "bf16"), ("iq4_nl", "q4_0")])
def test_kv_cache_of_other_types(
    types: tuple[KvType, KvType], models: Mapping[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    got = shape_of(ModelFile.open(models["llama"]), *types)
    made = kv_bytes(models["llama"], ContextConfig(n_ctx=1024, cache_type_k=types[0], cache_type_v=types[1]), capsys)
    assert got.cell_bytes((0, got.n_layer)) * 1024 == pytest.approx(made, abs=0.006 * MB)


def test_cells_are_counted_layer_by_layer(tmp_path: Path) -> None:
    """Heads for each layer, sizes of its own where a window slides, last layers that use the cache of earlier ones."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma4")
    writer.add_uint32("gemma4.block_count", 4)
    writer.add_uint32("gemma4.embedding_length", 64)
    writer.add_array("gemma4.attention.head_count_kv", [2, 1, 2, 2])
    for key, value in {"head_count": 4, "key_length": 32, "value_length": 32, "shared_kv_layers": 1}.items():
        writer.add_uint32(f"gemma4.attention.{key}", value)
    writer.add_uint32("gemma4.attention.key_length_swa", 16)
    writer.add_array("gemma4.attention.sliding_window_pattern", [True, False, False, True])
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = ModelFile.open(tmp_path / "model.gguf")
    assert shape_of(file).layer_cell_bytes == (2 * 2 * (16 + 32), 2 * 1 * 64, 2 * 2 * 64, 0)


def test_attention_layer_by_layer(models: Mapping[str, Path]) -> None:
    def of(name: str) -> tuple[Attention, ...]:
        return shape(models[name]).layer_attention

    assert of("llama") == (Attention(cell=2 * 4 * (64 + 64)),) * shape(models["llama"]).n_layer
    for name in ("gemma2", "gpt-oss"):
        assert [layer.most_cells for layer in of(name)[:4]] == [32, 0, 32, 0]
        assert len({layer.cell for layer in of(name)}) == 1
    assert {layer.cell for layer in of("mamba")} == {0}
    assert len({layer.cell for layer in of("jamba")}) == 2, "of some layers 0"
    header = ModelHeader(ModelFile.open(models["deepseek2"]))
    latent, n_head = of("deepseek2")[0], header.number("attention.head_count")
    k, v, rope = (
        header.number(key) for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
    )
    own_k, own_v = (header.number(f"attention.{kind}_length_mla") for kind in ("key", "value"))
    assert latent.cell == 2 * n_head * (k + v) > latent.long_cell == 2 * n_head * (own_k + own_v)
    assert latent.expansion == 2 * n_head * v * (own_k - rope + own_v)


def test_attention_that_selects_cells(tmp_path: Path) -> None:
    path = write("deepseek32", tmp_path / "model.gguf", sizes=SMALL, more={"attention.indexer.top_k": 512})
    header, attention = ModelHeader(ModelFile.open(path)), shape(path).layer_attention[0]
    assert attention.most_cells == 512 * header.number("attention.indexer.block_size")
    assert attention.index == 2 * 4 * 128


def test_attention_to_cells_of_several_tokens(tmp_path: Path) -> None:
    """DeepSeek-V4's: a window, and cells of 4 or 128 tokens, of which layers with an indexer select some."""
    path = write("deepseek4", tmp_path / "model.gguf")
    header, attention = ModelHeader(ModelFile.open(path)), shape(path).layer_attention
    whole, n_near = 2 * 8 * (64 + 64), header.number("attention.sliding_window")
    window = Attention(cell=whole, most_cells=n_near)
    n_selected, n_index = (header.number(f"attention.indexer.{key}") for key in ("top_k", "head_count"))
    index = 2 * n_index * 128
    few = Attention(cell=whole / 4, most_cells=4 * n_selected, index=index / 4, near_cell=whole, n_near=n_near)
    many = Attention(cell=whole / 128, near_cell=whole, n_near=n_near)
    assert attention == (window, window, few, many)


@pytest.mark.parametrize(
    ("architecture", "pattern", "expected"),
    [
        ("gemma3", None, [1, 1, 1, 1, 1, 0, 1]),
        ("gemma3", 2, [1, 0, 1, 0, 1, 0, 1]),
        ("smallthinker", None, [0, 1, 1, 1, 0, 1, 1]),
        ("qwen3", None, [0] * 7),
        ("step35", [True, False, False, True, True, True, False], [1, 0, 0, 1, 1, 1, 0]),
    ],
)
def test_layers_with_sliding_windows(
    architecture: str, pattern: int | list[bool] | None, expected: list[int], tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    for key, value in {"block_count": 7, "embedding_length": 64, "attention.head_count": 4}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_uint32(f"{architecture}.attention.sliding_window", 512)
    if isinstance(pattern, int):
        writer.add_uint32(f"{architecture}.attention.sliding_window_pattern", pattern)
    elif pattern is not None:
        writer.add_array(f"{architecture}.attention.sliding_window_pattern", pattern)
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    attention = shape(tmp_path / "model.gguf").layer_attention
    assert [layer.most_cells for layer in attention] == [512 * slides for slides in expected]


def test_parameters_of_a_byte(models: Mapping[str, Path], tmp_path: Path) -> None:
    assert shape(models["llama"]).parameters_per_byte == 1 / 4
    quantized = shape(quantize(models["llama"], tmp_path / "q4.gguf", "Q4_0"))
    assert 1.4 < quantized.parameters_per_byte < 32 / 18  # norms stay float, the output layer is finer


def test_the_demo_pair() -> None:
    target, draft = shape(TARGET), shape(TARGET.with_name("tales-draft.gguf"))
    assert (target.name, target.n_layer, target.n_embd, target.n_vocab) == ("tales-target", 8, 256, 2048)
    assert target.layer_cell_bytes == (2 * 2 * 4 * 32,) * 8
    assert draft.weight_bytes < target.weight_bytes / 2


def test_parts_of_a_model_are_one(models: Mapping[str, Path], tmp_path: Path) -> None:
    parts = split(models["llama"], tmp_path / "llama", 3)
    assert shape(parts[0]) == shape(models["llama"])


def test_large_vocabulary(tmp_path: Path) -> None:
    of_pair = pair_script().Shape(n_layer=2, width=64, n_head=2, n_head_kv=1, n_ff=96, n_vocab=50_000)
    pair_script().make_pair(tmp_path / "t.gguf", tmp_path / "d.gguf", of_pair)
    assert shape(tmp_path / "t.gguf").n_vocab == 50_000
