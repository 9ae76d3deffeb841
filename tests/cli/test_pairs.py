"""`ggpipe pairs`, with files and with headers from the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import TARGET
from support.hub_server import hub_server
from support.in_process import ggpipe

DRAFT = TARGET.with_name("tales-draft.gguf")
HEAD = TARGET.with_name("tales-eagle3.gguf")


def with_fewer_tokens(folder: Path) -> Path:
    """The draft model with the name of one token changed."""
    path = folder / "other.gguf"
    data = DRAFT.read_bytes()
    word = b"\x04\x00\x00\x00\x00\x00\x00\x00king"
    if word not in data:
        word = b"\x07\x00\x00\x00\x00\x00\x00\x00\xe2\x96\x81king"
    at = data.index(word)
    path.write_bytes(data[: at + len(word) - 4] + b"xing" + data[at + len(word) :])
    return path


def test_files(tmp_path: Path) -> None:
    other = with_fewer_tokens(tmp_path)
    result = ggpipe("pairs", "-m", TARGET, "-md", DRAFT, "-md", HEAD, "-md", other)
    assert result.returncode == 0, result.stderr
    first, *lines = result.stdout.splitlines()
    assert first.startswith("target tales-target.gguf (llama, ")
    assert [line.partition(" (")[0] for line in lines] == [
        "fits: tales-draft.gguf", "fits: tales-eagle3.gguf", "fits by its text: other.gguf",
    ]  # fmt: skip
    assert lines[2].endswith(" in the target and another text in the draft")


def test_none_fits() -> None:
    result = ggpipe("pairs", "-m", DRAFT, "-md", HEAD)
    assert result.returncode == 1
    assert "it is a head for models of width" in result.stdout


def test_headers_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = {"tales-Q4_K_M.gguf": TARGET.read_bytes() + bytes(1 << 24)}
    with hub_server(grimm__tales=target, grimm__draft={"draft-Q8_0.gguf": DRAFT.read_bytes()}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        result = ggpipe("pairs", "-hf", "grimm/tales", "-hfd", "grimm/draft")
        assert result.returncode == 0, result.stderr
        assert "\nfits: draft-Q8_0.gguf" in result.stdout
        assert hub.n_sent < 1 << 22


def test_no_draft_model() -> None:
    result = ggpipe("pairs", "-m", TARGET)
    assert result.returncode == 2
    assert result.stderr == "ggpipe: error: name draft models with -md/--model-draft or -hfd/--hf-repo-draft\n"
