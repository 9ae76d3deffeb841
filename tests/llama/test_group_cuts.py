"""Our own rules for dividing weights among the parts of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.architectures import N_FF, N_HEAD, write

from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group import divided_weights, most_parts
from ggpipe.llama.group_cuts import Cut, cuts
from scripts.models.quantize import quantize


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("deepseek2", tmp_path_factory.mktemp("cuts") / "deepseek2.gguf")


def with_experts(path: Path, columns: int) -> ModelFile:
    """The file's header, as if its routed experts had this many columns."""
    file = ModelFile.open(path)
    key = f"{file.architecture}.expert_feed_forward_length"
    experts = {name: tensor for name, tensor in file.tensors.items() if "_exps" in name}
    experts = {name: replace(tensor, size=tensor.size // N_FF * columns) for name, tensor in experts.items()}
    return replace(file, metadata={**file.metadata, key: columns}, tensors={**file.tensors, **experts})


@pytest.mark.parametrize(
    ("shares", "pieces"),
    [((1, 1), (3, 3)), ((1, 1, 1), (2, 2, 2)), ((1, 1, 1, 1), (1, 2, 1, 2)), ((2, 1), (4, 2)), ((5, 1), (5, 1))],
    ids=str,
)
def test_heads(shares: Sequence[float], pieces: tuple[int, ...], latent: Path) -> None:
    """All weights of a layer's heads are cut at the same ones, and what has no heads is not."""
    found = cuts(ModelFile.open(latent), shares, True)
    axes = {"attn_q_b": 1, "attn_k_b": 2, "attn_v_b": 2, "attn_output": 0}
    assert {name: found[f"blk.0.{name}.weight"] for name in axes} == {name: Cut(i, pieces) for name, i in axes.items()}
    assert not any("_a" in name.removeprefix("blk.0.attn") for name in found)


def test_each_layer_begins_with_another_part(latent: Path) -> None:
    found = cuts(ModelFile.open(latent), (1, 1, 1, 1), True)
    assert found["blk.1.attn_output.weight"].pieces == (2, 1, 2, 1)


def test_blocks_stay_whole(latent: Path, tmp_path: Path) -> None:
    """A block of a K-quant has the columns of two heads, or a third of these experts' columns."""
    file = ModelFile.open(quantize(latent, tmp_path / "k.gguf", "q4_k_m"))
    found = cuts(file, (1, 1, 1, 1), True)
    assert found["blk.0.attn_q_b.weight"].pieces == (0, 2, 2, 2)
    assert found["blk.1.ffn_down_shexp.weight"].pieces == (256, 0, 256, 256)
    assert most_parts(file) == N_HEAD // 2


@pytest.mark.parametrize(("columns", "pieces"), [(768, (256, 256, 256)), (512, (192, 160, 160)), (64, (32, 0, 32))])
def test_small_experts(columns: int, pieces: tuple[int, ...], latent: Path) -> None:
    """Where cuts after multiples of 128 columns, as libllama makes them, are as even, they stay. Gate and up are in one
    tensor, which libllama itself does not cut in all models."""
    found = cuts(with_experts(latent, columns), (1, 1, 1), False)
    names = ("blk.1.ffn_down_exps.weight", "blk.1.ffn_gate_up_exps.weight")
    assert [found[name] for name in names] == [Cut(0, pieces), Cut(1, pieces, ((1, 2),))]


def test_heads_with_one_output_projection_stay_together(tmp_path: Path) -> None:
    """Those of DeepSeek-V4, here four times two."""
    more = {"attention.output_group_count": 4}
    path = write("deepseek4", tmp_path / "deepseek4.gguf", more=more)
    file = ModelFile.open(path)
    found = cuts(file, (1, 3), True)
    axes = {"attn_q_b": 1, "attn_sinks": 0, "attn_output_a": 2, "attn_output_b": 0}
    assert {name: found[f"blk.0.{name}.weight"] for name in axes} == {name: Cut(i, (1, 3)) for name, i in axes.items()}
    assert divided_weights(file).isdisjoint({"blk.2.attn_kv.weight", "blk.2.attn_compressor_kv.weight"})
    assert most_parts(file) == 4


def test_what_is_divided(latent: Path) -> None:
    divided = divided_weights(ModelFile.open(latent))
    assert {"blk.0.attn_q_b.weight", "blk.1.ffn_up_shexp.weight", "output.weight"} <= divided
    assert divided.isdisjoint({"blk.0.attn_q_a.weight", "blk.0.attn_kv_a_mqa.weight", "blk.0.attn_norm.weight"})
