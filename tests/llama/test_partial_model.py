"""Copies of models that have some layers only: what they have, and that holes are never taken for weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.architectures import SMALL, write
from support.pipeline import Pipeline
from support.reference import run_of
from support.zoo import split

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.errors import ModelError, RunError
from ggpipe.llama import partial_model
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.partial_model import PartialModel, check, get_weights_with, weights_of
from ggpipe.llama.stage import Stage


def begun(whole: ModelFile, folder: Path) -> PartialModel:
    """A copy with the headers only."""
    folder.mkdir(exist_ok=True)
    model = PartialModel([folder / path.name for path in whole.paths])
    headers = [path.read_bytes()[:n] for path, n in zip(whole.paths, whole.header_bytes, strict=True)]
    model.write_headers(headers, [path.stat().st_size for path in whole.paths])
    return model


def add(model: PartialModel, whole: ModelFile, names: list[str]) -> None:
    """Copy some weights."""
    with model.adding(names, 0) as write_bytes:
        for name in names:
            tensor = whole.tensors[name]
            data = whole.paths[tensor.file].read_bytes()
            write_bytes(tensor.file, tensor.offset, data[tensor.offset : tensor.offset + tensor.size])


@pytest.fixture
def whole(tmp_path: Path) -> ModelFile:
    """In three parts."""
    path = write("qwen3moe", tmp_path / "model.gguf", sizes=SMALL)
    return ModelFile.open(split(path, tmp_path / "part", 3)[0])


@pytest.fixture(autouse=True)
def no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten."""
    monkeypatch.setattr(partial_model, "_sources", {})


def test_a_copy_opens_as_the_model_and_takes_the_space_of_its_weights(whole: ModelFile, tmp_path: Path) -> None:
    model = begun(whole, tmp_path / "copy")
    copy = ModelFile.open(model.paths[0])
    assert copy.fingerprint == whole.fingerprint
    names = weights_of(whole, (1, 2))
    assert sorted(model.lacking(copy, names)) == sorted(names)
    add(model, whole, names)
    assert model.lacking(copy, names) == []
    assert PartialModel(model.paths).lacking(copy, whole.tensors)  # another process
    used = sum(path.stat().st_blocks * 512 for path in model.paths)
    assert used < 0.8 * whole.n_bytes


def test_a_stage_gets_what_it_reads(whole: ModelFile, tmp_path: Path) -> None:
    model = begun(whole, tmp_path / "copy")
    asked = []

    def get(file: ModelFile, layers: partial_model.Layers, progress: object) -> None:
        assert layers is not None
        asked.append(layers)
        add(model, whole, model.lacking(file, weights_of(file, layers)))

    get_weights_with(get, model)
    context = ContextConfig(n_ctx=64)
    rows = []
    for path in (whole.paths[0], model.paths[0]):
        with Pipeline(path, (1,), context) as pipeline:
            rows.append(pipeline.decode(run_of(1, [5, 6, 7], 0)))
    np.testing.assert_array_equal(rows[1], rows[0])
    assert asked == [(0, 1), (1, whole.n_layer)]


def test_holes_are_not_weights(whole: ModelFile, tmp_path: Path) -> None:
    model = begun(whole, tmp_path / "copy")
    copy = ModelFile.open(model.paths[0])
    add(model, whole, [name for name in weights_of(whole, (1, 2)) if "ffn_norm" not in name])
    with pytest.raises(ModelError, match=r"needs blk\.1\.ffn_norm\.weight on this machine"):
        Stage(copy, (1, 2), ModelConfig(path=model.paths[0]), ContextConfig(n_ctx=64), (1, 1))
    check(whole, list(whole.tensors))  # a whole model has all


def test_an_interruption_adds_nothing(whole: ModelFile, tmp_path: Path) -> None:
    model = begun(whole, tmp_path / "copy")
    with pytest.raises(KeyboardInterrupt), model.adding(list(whole.tensors), 0):
        raise KeyboardInterrupt
    assert len(model.lacking(ModelFile.open(model.paths[0]), whole.tensors)) == len(whole.tensors)


def test_one_process_adds_at_a_time(whole: ModelFile, tmp_path: Path) -> None:
    model = begun(whole, tmp_path / "copy")

    def give_up() -> None:
        raise TimeoutError

    with model.locked(give_up), pytest.raises(TimeoutError), PartialModel(model.paths).locked(give_up):
        pass
    with PartialModel(model.paths).locked(give_up):
        pass


def test_a_full_disk(whole: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = begun(whole, tmp_path / "copy")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3e9))
    with pytest.raises(RunError, match=r"needs 9\.8 GB for weights, and its disk has 3\.0 GB free"):
        model.adding([], 9_800_000_000).__enter__()


def test_a_damaged_list_and_a_folder_that_cannot_be_written(whole: ModelFile, tmp_path: Path) -> None:
    model = begun(whole, tmp_path / "copy")
    (tmp_path / "copy" / "ggpipe-weights.json").write_bytes(b"{")
    with pytest.raises(RunError, match=r"ggpipe-weights\.json is damaged: delete "):
        model.lacking(whole, whole.tensors)
    shutil.rmtree(tmp_path / "copy")
    (tmp_path / "copy").write_bytes(b"")
    with pytest.raises(RunError, match="cannot keep weights in"), model.locked(lambda: None):
        pass
