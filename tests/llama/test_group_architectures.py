"""Architectures that are allowed in groups; `scripts/bench/check_groups` compares all of them with the whole model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.architectures import ARCHITECTURES, write
from support.commands import ROOT
from support.group_check import compare

from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group import (
    SPLIT_ATTENTION,
    SPLIT_FFN,
    SPLIT_HYBRID,
    SPLIT_LATENT,
    splits_attention,
    splits_hybrid,
    splits_latent,
)
from scripts.models.quantize import quantize

CONVENTIONAL = ("apertus", "gemma4", "qwen35", "qwen3moe", "mimo2", "step35", "jais")
LISTS = (SPLIT_ATTENTION, SPLIT_LATENT, SPLIT_HYBRID, SPLIT_FFN)
PAGE = ROOT / "docs" / "groups.md"


@pytest.mark.parametrize(
    "name",
    ["deepseek2", "deepseek4", "glm-dsa", "kimi-linear", "hy_v4", "qwen3next", "falcon-h1", "jamba", *CONVENTIONAL],
)
def test_a_group_of_three(name: str, tmp_path: Path, full: bool) -> None:
    """Of K-quants, whose blocks are the longest: the whole model's logits. Without `full`, of the one that is
    written fastest."""
    path = quantize(write(name, tmp_path / "f32.gguf"), tmp_path / "model.gguf", "q4_k_m" if full else "q6_k")
    assert splits_attention(ModelFile.open(path)) == (name in SPLIT_ATTENTION)
    assert splits_latent(ModelFile.open(path)) == (name in SPLIT_LATENT)
    assert splits_hybrid(ModelFile.open(path)) == (name in SPLIT_HYBRID)
    difference = compare(path, 3)
    assert difference.deviation < difference.limit, difference


@pytest.mark.each_value
@pytest.mark.parametrize("weight_type", ["f32", "q4_0", "q4_k_m"])
@pytest.mark.parametrize(
    "name", ["deepseek2", "deepseek32", "deepseek4", "hy_v4", "qwen2moe", "qwen3next", "granitehybrid", "nemotron_h"]
)
def test_a_group_of_four(name: str, weight_type: str, tmp_path: Path) -> None:
    """Some parts have a single head, or no columns of some experts while others have none of others."""
    path = write(name, tmp_path / "f32.gguf")
    if weight_type != "f32":
        path = quantize(path, tmp_path / "model.gguf", weight_type)
    difference = compare(path, 4)
    assert difference.deviation < difference.limit, difference


def test_the_page_shows_the_lists() -> None:
    lists = [set(block.split()) for block in re.findall(r"```\n(.*?)```", PAGE.read_text(), re.S)]
    assert lists == list(LISTS)


def test_the_lists_hold_what_is_checked() -> None:
    names = frozenset().union(*LISTS)
    assert len(names) == sum(map(len, LISTS))
    assert set(ARCHITECTURES) > names
