"""The extension's stub says what the extension is."""

from __future__ import annotations

from pathlib import Path

import ggpipe
from ggpipe.engine.libllama import native


def test_the_stub_is_up_to_date() -> None:
    """`python -m nanobind.stubgen` cannot import the extension alone: it needs llama_cpp first."""
    from nanobind.stubgen import StubGen

    generator = StubGen(native)
    generator.put(native)
    assert generator.get().strip() == Path(ggpipe.__file__).with_name("_native.pyi").read_text().strip()


def test_versions_and_features() -> None:
    assert native.ggml_version() == "0.25.3"
    assert native.cpu_features()
