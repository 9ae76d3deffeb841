"""Architectures that are allowed in groups; `scripts/bench/check_groups` compares all of them with the whole model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.architectures import ARCHITECTURES, write
from support.commands import ROOT
from support.group_check import compare
from support.zoo import quantize

from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group import SPLIT_ATTENTION, SPLIT_FFN, splits_attention

PAGE = ROOT / "docs" / "groups.md"


@pytest.mark.parametrize("name", ["apertus", "gemma4", "qwen35", "qwen3moe", "mimo2", "step35", "jais"])
def test_a_group_of_three(name: str, tmp_path: Path) -> None:
    """Of K-quants, whose blocks are the longest: the whole model's logits."""
    path = quantize(write(name, tmp_path / "f32.gguf"), tmp_path / "model.gguf", "q4_k_m")
    assert splits_attention(ModelFile.open(path)) == (name in SPLIT_ATTENTION)
    difference = compare(path, 3)
    assert difference.deviation < difference.limit, difference


def test_the_page_shows_the_lists() -> None:
    lists = [set(block.split()) for block in re.findall(r"```\n(.*?)```", PAGE.read_text(), re.S)]
    assert lists == [SPLIT_ATTENTION, SPLIT_FFN]


def test_the_lists_hold_what_is_checked() -> None:
    assert SPLIT_ATTENTION.isdisjoint(SPLIT_FFN)
    assert set(ARCHITECTURES) > SPLIT_ATTENTION | SPLIT_FFN
