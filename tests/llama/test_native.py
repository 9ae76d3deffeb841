"""The extension's stub says what the extension is."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.zoo import ggml_base

import ggpipe
from ggpipe.llama import libllama, machine
from ggpipe.llama.libllama import native


def test_the_stub_is_up_to_date() -> None:
    """`python -m nanobind.stubgen` cannot import the extension alone: it needs llama_cpp first."""
    from nanobind.stubgen import StubGen

    generator = StubGen(native)
    generator.put(native)
    assert generator.get().strip() == Path(ggpipe.__file__).with_name("_native.pyi").read_text().strip()


def test_versions_and_features() -> None:
    assert native.ggml_version() == "0.25.3"
    assert machine.cpu_features()


def test_numa_is_initialised_although_headers_were_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(libllama.lib, "llama_numa_init", asked.append)
    monkeypatch.setattr(libllama, "_numa_started", False)
    libllama.start()
    libllama.start("isolate")
    libllama.start("isolate")
    assert asked == [2]


@pytest.fixture
def locked_memory() -> Iterator[None]:
    """As with --mlock."""
    if error := machine.lock_memory():
        pytest.skip(f"cannot lock memory: {error}")
    yield
    ctypes.CDLL(None).munlockall()


@pytest.mark.usefixtures("locked_memory")
def test_locked_memory_is_cleared() -> None:
    """KV cells and recurrent states are cleared for the next text."""
    stage = native.Stage(first=True, repack=False, exact=False, fast_kernels=False)
    _, local, _ = stage.devices()
    base, pointer, size = ggml_base(), ctypes.c_void_p, ctypes.c_size_t
    for name, result, *arguments in (
        ("ggml_backend_dev_buffer_type", pointer, pointer),
        ("ggml_backend_buft_alloc_buffer", pointer, pointer, size),
        ("ggml_backend_buffer_get_base", pointer, pointer),
        ("ggml_backend_buffer_clear", None, pointer, ctypes.c_uint8),
        ("ggml_backend_buffer_free", None, pointer),
    ):
        function = getattr(base, name)
        function.restype, function.argtypes = result, arguments
    buffer = base.ggml_backend_buft_alloc_buffer(base.ggml_backend_dev_buffer_type(local), 10000)
    content = (ctypes.c_uint8 * 10000).from_address(base.ggml_backend_buffer_get_base(buffer))
    base.ggml_backend_buffer_clear(buffer, 7)
    assert bytes(content) == bytes([7]) * 10000
    base.ggml_backend_buffer_clear(buffer, 0)
    assert bytes(content) == bytes(10000)
    base.ggml_backend_buffer_free(buffer)
