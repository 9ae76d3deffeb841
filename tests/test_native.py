"""The extension's stub says what the extension is."""

from __future__ import annotations

from pathlib import Path

import pytest

import ggpipe
from ggpipe.engine import libllama
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


def test_numa_is_initialised_although_headers_were_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(libllama.lib, "llama_numa_init", asked.append)
    monkeypatch.setattr(libllama, "_numa_started", False)
    libllama.start()
    libllama.start("isolate")
    libllama.start("isolate")
    assert asked == [2]
