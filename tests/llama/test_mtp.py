"""MTP layers: which architectures' libllama drafts with, and how they are told from a model's other layers."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.architectures import write
from support.commands import HANG_S

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.errors import ModelError
from ggpipe.llama import mtp
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_shape import shape_of
from ggpipe.llama.stage import Stage

_SEVERAL = {"hy_v3": 2, "step35": 3}
_MORE = {"nemotron_h_moe": "+experts"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("glm4moe", tmp_path_factory.mktemp("models") / "model.gguf", n_mtp=1)


def test_they_draft_as_llama_cpp(tmp_path: Path) -> None:
    """In a process of their own: libllama aborts for others."""
    models = [f"{name}{_MORE.get(name, '')}:{_SEVERAL.get(name, 1)}" for name in sorted(mtp.ARCHITECTURES)]
    environment = os.environ | {"GGML_NO_BACKTRACE": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = (sys.executable, "-m", "support.mtp_check", str(tmp_path), *models)
    done = subprocess.run(command, env=environment, capture_output=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_they_are_no_layers_of_the_target(path: Path) -> None:
    file = ModelFile.open(path)
    assert (file.n_layer, file.n_mtp, file.n_blocks) == (2, 1, 3)
    shape = shape_of(file)
    own = [tensor.size for name, tensor in file.tensors.items() if name.startswith("blk.2.")]
    assert shape.weight_bytes == file.n_bytes - sum(own)
    layers = mtp.shape_of_mtp(file, shape, "f16", "f16")
    assert layers.layer_bytes == (sum(own),)
    assert layers.drafter == "mtp"
    assert (layers.input_bytes, layers.output_bytes) == (shape.input_bytes, shape.output_bytes)
    assert 0 < layers.layer_cell_bytes[0] == shape.layer_cell_bytes[1]
    assert 0 < layers.layer_expert_bytes[0] < layers.layer_bytes[0]


def test_a_cut_before_them_is_none(path: Path) -> None:
    """The last stage ends with the target's last layer, and computes its output."""
    file = ModelFile.open(path)
    stage = Stage(file, (1, file.n_layer), ModelConfig(path=path), ContextConfig(n_ctx=64), (1, 1))
    assert stage.is_last
    assert stage.cut.wanted
    assert not stage.cut.produced
    stage.close()


def test_who_is_refused(path: Path) -> None:
    file = ModelFile.open(path)

    def refused(reason: str, changed: ModelFile) -> None:
        with pytest.raises(ModelError, match=f"`spec_type` mtp does not fit `model`: {reason}"):
            mtp.check(changed)

    def with_metadata(**values: int | tuple[int, ...]) -> ModelFile:
        changed = {f"glm4moe.{key}": value for key, value in values.items()}
        return replace(file, metadata={**file.metadata, **changed})

    mtp.check(file)
    refused("it has no MTP layers", with_metadata(nextn_predict_layers=0))
    bare = {name: tensor for name, tensor in file.tensors.items() if not name.startswith("blk.2.")}
    refused("its file lacks the weights of its MTP layers; convert it", replace(file, tensors=bare))
    images = with_metadata(**{"rope.dimension_sections": (8, 12, 12, 0)})
    refused("libllama does not draft with the MTP layers of models that read images", images)
    others = {key.replace("glm4moe", "mimo2"): value for key, value in file.metadata.items()}
    others["general.architecture"] = "mimo2"
    refused("libllama does not draft with the MTP layers of 'mimo2' models", replace(file, metadata=others))
    several = with_metadata(nextn_predict_layers=2, block_count=4)
    refused("it has 2 MTP layers, and of 'glm4moe' models libllama supports one", several)


def test_a_file_of_mtp_layers_alone(path: Path, tmp_path: Path) -> None:
    """As llama.cpp's converter writes it: all blocks are MTP layers."""
    data, key = path.read_bytes(), b"glm4moe.nextn_predict_layers"
    at = data.index(key) + len(key) + 4  # after the type
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(data[:at] + (3).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ModelError, match="has no layers but those for multi-token prediction: give the whole model"):
        ModelFile.open(alone)
