"""Hidden states of a target for draft heads: which stage has them, and which architectures hand them out."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.architectures import ARCHITECTURES as ALL
from support.architectures import SMALL, write
from support.commands import HANG_S, TARGET
from support.reference import run_of

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.layer_inputs import ARCHITECTURES, WITH_OUTPUT, input_of_mtp, own_layers
from ggpipe.llama.stage import Stage

CONTEXT = ContextConfig(n_ctx=64, exact=True)


def stages(path: Path, edges: tuple[int, ...], wanted: tuple[int, ...]) -> list[Stage]:
    file = ModelFile.open(path)
    return [
        Stage(file, layers, ModelConfig(path=path), CONTEXT, (1, 1), wanted_inputs=wanted)
        for layers in itertools.pairwise(edges)
    ]


def inputs(path: Path, edges: tuple[int, ...], wanted: tuple[int, ...]) -> dict[int, bytes]:
    """Of a run of 5 rows: each layer's inputs."""
    run, incoming, found = run_of(1, (5, 30, 31, 32, 33), 0), None, dict[int, bytes]()
    for stage in stages(path, edges, wanted):
        outcome = stage.decode(run, incoming)
        incoming = outcome.outgoing
        for layer, rows in zip(stage.tapped, outcome.layer_inputs, strict=True):
            assert len(rows) == 5
            assert np.ptp(rows) > 0
            assert layer not in found, "two stages have it"
            found[layer] = rows.tobytes()
        stage.close()
    return found


def test_each_layer_belongs_to_one_stage() -> None:
    edges = (0, 3, 6, 8)
    own = [own_layers((*range(8), input_of_mtp(8)), layers, 8) for layers in itertools.pairwise(edges)]
    assert own == [(0, 1, 2, 3), (4, 5, 6), (7, input_of_mtp(8))]


@pytest.mark.parametrize("edges", [(0, 4, 8), (0, 3, 6, 8), (0, 2, 4, 6, 8)])
def test_stages_have_what_the_whole_model_has(edges: tuple[int, ...]) -> None:
    wanted = (0, 2, 4, 6)
    assert inputs(TARGET, edges, wanted) == inputs(TARGET, (0, 8), wanted)


@pytest.mark.parametrize("name", ["lfm2", "nemotron_h", "qwen35"])
def test_stages_of_hybrid_models(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path / "model.gguf", n_layer=4, sizes=SMALL)
    wanted = (0, 1, 2, 3, 4) if name in WITH_OUTPUT else (0, 1, 2, 3)
    assert inputs(path, (0, 2, 4), wanted) == inputs(path, (0, 4), wanted)


@pytest.mark.parametrize("names", [sorted(ARCHITECTURES), ["gemma2"], ["qwen2"]])
def test_who_hands_them_out(names: list[str], tmp_path: Path) -> None:
    """In a process of their own: libllama aborts for others."""
    paths = [write(name, tmp_path / f"{name}.gguf", sizes=SMALL) for name in names]
    environment = os.environ | {"GGML_NO_BACKTRACE": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = (sys.executable, "-m", "support.layer_inputs_check", *map(str, paths))
    done = subprocess.run(command, env=environment, capture_output=True, timeout=HANG_S, check=False)
    assert (done.returncode == 0) == (set(names) <= ARCHITECTURES), done.stderr


def test_the_list_names_what_there_is() -> None:
    assert set(ALL) > ARCHITECTURES
