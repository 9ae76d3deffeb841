"""`ggpipe.download`, with a local endpoint in place of the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import TARGET
from support.hub_server import HubServer, hub_server

import ggpipe


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))
    with hub_server(grimm__tales={"tales-Q4_K_M.gguf": TARGET.read_bytes()}) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def test_a_model_is_downloaded_once(server: HubServer) -> None:
    seen: list[tuple[str, int, int]] = []
    path = ggpipe.download("grimm/tales:Q4_K_M", progress=lambda *figures: seen.append(figures))
    assert path.read_bytes() == TARGET.read_bytes()
    assert seen[-1][1:] == (TARGET.stat().st_size,) * 2
    assert ggpipe.download("grimm/tales", file="tales-Q4_K_M.gguf", offline=True) == path


def test_mistakes_name_the_argument(server: HubServer) -> None:
    with pytest.raises(ggpipe.SettingError, match="model` must be user/repo or user/repo:quant, got tales"):
        ggpipe.download("tales")
    with pytest.raises(ggpipe.ModelError, match="grimm/other"):
        ggpipe.download("grimm/other")
    with pytest.raises(ggpipe.ModelError, match="without `offline` and"):
        ggpipe.download("grimm/other", offline=True)
