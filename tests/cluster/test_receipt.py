"""Receipts as files: those in docs/receipts are valid, and what is wrong with others is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.commands import ROOT

from ggpipe.cluster import receipt as receipts
from ggpipe.cluster.receipt import Receipt
from ggpipe.config.layer_split import parse_layer_split
from ggpipe.config.model import TARGET
from ggpipe.core.layout import lay_out
from ggpipe.errors import UsageError

COLLECTED = sorted((ROOT / "docs" / "receipts").glob("*.json"))
FIRST = ROOT / "docs" / "receipts" / "2026-11-25-bundled-pair.json"


@pytest.mark.parametrize("path", COLLECTED, ids=lambda path: path.stem)
def test_collected_receipts(path: Path) -> None:
    """They can be read, say what was measured, and name nobody's machines or folders."""
    own, text = receipts.read(path), path.read_text()
    assert path.stem.startswith(own.day)
    assert own.command.startswith("ggpipe bench ")
    assert '"/' not in text, "a folder"
    assert not any(word.startswith("/") for word in own.command.split())
    assert [node.name for node in own.nodes] == [f"node{number}" for number in range(1, len(own.nodes) + 1)]
    assert {rank.host for rank in own.profile.ranks} == {node.name for node in own.nodes}
    split, shape = parse_layer_split(own.settings.layer_split)[0], own.models[TARGET].shape
    assert split is not None
    assert own.layout_of(TARGET) == lay_out(shape.n_layer, split.n_ranks, split)
    assert max(map(len, text.splitlines())) < 1000, "people can read it"


def test_there_is_a_receipt() -> None:
    assert FIRST in COLLECTED


def content() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(FIRST.read_text())
    return read


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another file": (lambda r: r.update(format="ggpipe profile"), "is not a receipt; write one with"),
    "another version": (lambda r: r.update(version=99), "a receipt in format 99, but this ggpipe reads 1"),
    "no profile": (lambda r: r.pop("profile"), "profile is missing"),
    "no runs": (lambda r: r.update(runs=[]), "runs must be a list"),
    "unknown mode": (lambda r: r["runs"][0].update(mode="psychic"), r"runs\[0\]\.mode must be .*got 'psychic'"),
    "no speed": (lambda r: r["runs"][0].update(tokens_per_s=0), r"runs\[0\]\.tokens_per_s must be a number above 0"),
    "day": (lambda r: r.update(day="yesterday"), "day"),
    "unknown node": (lambda r: r["ranks"][0].update(node="node9"), "ranks are on node9"),
    "too few ranks": (lambda r: r["ranks"].pop(), "the bench had 2"),
    "layers": (lambda r: r["ranks"][1].update(layers=[5, 8]), "do not hold its layers in order"),
    "half a model": (lambda r: r["ranks"][1].update(layers=[4, 6]), "hold 6 of its 8 layers"),
    "unknown model": (lambda r: r["models"].pop(), "not one of the models"),
    "single": (lambda r: r["settings"].update(single_threads=None), "single_threads is missing"),
    "setting": (lambda r: r["settings"]["speculation"].update(p_accept=2), "p_accept"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_receipts(what: str, tmp_path: Path) -> None:
    spoil, why = BROKEN[what]
    spoiled = content()
    spoil(spoiled)
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(spoiled))
    with pytest.raises(UsageError, match=why) as caught:
        receipts.read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_are_no_receipts(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("{")
    with pytest.raises(UsageError, match="is not a receipt"):
        receipts.read(tmp_path / "text")
    with pytest.raises(UsageError, match=r"cannot read the receipt .*: No such file"):
        receipts.read(tmp_path / "nothing")


def test_numbers_keep_six_digits() -> None:
    own = receipts.read(FIRST)
    other = msgspec.structs.replace(
        own, note="x" * 200, settings=msgspec.structs.replace(own.settings, temp=0.123456789)
    )
    text = receipts.as_text(other)
    assert json.loads(text)["settings"]["temp"] == 0.123457
    assert max(len(line) for line in text.splitlines() if "note" not in line and "command" not in line) <= 120
    read = msgspec.convert({k: v for k, v in json.loads(text).items() if k not in ("format", "version")}, Receipt)
    assert read.runs == own.runs
