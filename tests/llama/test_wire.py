"""What one stage sends to the next."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from support.architectures import write
from support.pipeline import Pipeline
from support.reference import Reference, run_of

from ggpipe.errors import RunError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_shape import shape_of
from ggpipe.llama.row_filter import FRAME, SAME, RowFilter, padded

HYPER = ("deepseek4", "glm5-next", "qwen4exp")
"""With hyper-connections: the next layer reads all residual streams, and normalizes all of them together."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wire")


def frame(name: bytes, size: int, data: bytes = b"") -> bytes:
    return FRAME.pack(len(name), size) + name.ljust(padded(len(name)), b"\0") + data.ljust(padded(len(data)), b"\0")


@pytest.mark.parametrize("name", ["llama", "gpt-oss", *HYPER])
def test_only_a_layers_output_crosses_a_cut(name: str, folder: Path) -> None:
    """And nothing of it twice, where the next layer reads it in two shapes."""
    path = write(name, folder / f"{name}.gguf")
    with Pipeline(path, (1,)) as pipeline:
        first = pipeline.stages[0]
        one, five = (first.decode(run_of(1 + n, [7] * n, pos), None).outgoing for n, pos in ((1, 0), (5, 1)))
    assert (len(five) - len(one)) / 4 == shape_of(ModelFile.open(path)).border_bytes


@pytest.mark.parametrize("name", HYPER)
def test_each_layer_in_a_stage(name: str, folder: Path) -> None:
    path = write(name, folder / f"{name}.gguf")
    cuts = tuple(range(1, ModelFile.open(path).n_layer))
    with Pipeline(path, cuts) as pipeline, Reference(path, 64) as reference:
        for number, tokens, pos in ((1, [5, 6, 7], 0), (2, [8], 3), (3, [9, 10], 4)):
            run = run_of(number, tokens, pos)
            np.testing.assert_array_equal(pipeline.decode(run), reference.decode(run))


def test_a_wrong_number_is_refused(folder: Path) -> None:
    with Pipeline(write(HYPER[0], folder / f"{HYPER[0]}.gguf"), (1,)) as pipeline:
        first, last = pipeline.stages
        run = run_of(1, [7, 8], 0)
        message = bytes(first.decode(run, None).outgoing)
        number = struct.pack("<Q", SAME)
        assert message.count(number) == 1
        with pytest.raises(RunError, match="came without"):
            last.decode(run, message.replace(number, struct.pack("<Q", SAME | 5)))


def test_dropped_rows_of_data_that_are_sent_once() -> None:
    message = frame(b"l_out-3", 24, bytes(range(24))) + frame(b"l_out-3 (reshaped)", SAME)
    run = run_of(1, [5, 6, 7], 0)
    rows = RowFilter({"l_out-3": 8, "l_out-3 (reshaped)": 8}, None)
    expected = frame(b"l_out-3", 16, bytes((*range(8), *range(16, 24)))) + frame(b"l_out-3 (reshaped)", SAME)
    assert rows.incoming(memoryview(message), run, {1}) == expected
    assert RowFilter({"l_out-3": 8, "l_out-3 (reshaped)": 4}, None).incoming(memoryview(message), run, {1}) is None
    wrong = frame(b"l_out-3", SAME | 5)
    assert RowFilter({"l_out-3": 8}, None).incoming(memoryview(wrong), run, {1}) is None
