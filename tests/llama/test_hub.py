"""Models on the Hub: which file is chosen, and how it gets into the cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import TARGET
from support.hub_server import COMMIT, HubServer, hub_server

from ggpipe.errors import GgpipeError, ModelError, UsageError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.hub import Hub
from ggpipe.llama.hub_files import HubFile, choose
from ggpipe.llama.hub_header import header_of

MODEL = TARGET.read_bytes()
FILES = {"README.md": b"tales", "tales-Q4_K_M.gguf": MODEL, "tales-Q8_0.gguf": MODEL[:5000]}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with hub_server(grimm__tales=FILES) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def hub(token: str | None = None, is_offline: bool = False, warnings: list[str] | None = None) -> Hub:
    return Hub(token, is_offline, (warnings if warnings is not None else []).append)


def download(name: str = "grimm/tales", **settings: object) -> Path:
    own = hub(**settings)  # type: ignore[arg-type]
    return own.download(own.find(name))[0]


def refused(name: str = "grimm/tales", **settings: object) -> str:
    with pytest.raises(GgpipeError) as caught:
        download(name, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Which file


def chosen(names: str, quant: str = "", file: str | None = None, is_draft: bool = False) -> list[str]:
    files = [HubFile(path=name, n_bytes=1, sha256="") for name in names.split()]
    return [own.path for own in choose("a/b", files, quant, file, is_draft)]


@pytest.mark.parametrize(
    ("names", "quant", "expected"),
    [
        ("m-Q8_0.gguf m-Q4_K_M.gguf m-F16.gguf", "", "m-Q4_K_M.gguf"),
        ("m-Q8_0.gguf m-F16.gguf", "", "m-Q8_0.gguf"),
        ("m-Q6_K.gguf m-F16.gguf", "", "m-F16.gguf"),
        ("m-Q8_0.gguf m-Q4_K_M.gguf", "q8_0", "m-Q8_0.gguf"),
        ("m-UD-Q4_K_XL.gguf m-Q4_K_M.gguf", "Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("m.Q4_K_M.gguf", "", "m.Q4_K_M.gguf"),
        ("Q8_0/m-Q8_0-00001-of-00002.gguf Q8_0/m-Q8_0-00002-of-00002.gguf m-Q2_K.gguf", "Q8_0",
         "Q8_0/m-Q8_0-00001-of-00002.gguf Q8_0/m-Q8_0-00002-of-00002.gguf"),
        ("mmproj-Q4_K_M.gguf imatrix-Q4_K_M.gguf eagle3-m-Q4_K_M.gguf m-Q4_K_M.gguf", "", "m-Q4_K_M.gguf"),
    ],
)  # fmt: skip
def test_the_quantization_chooses_the_file(names: str, quant: str, expected: str) -> None:
    assert chosen(names, quant) == expected.split()


def test_a_head_is_only_a_draft() -> None:
    assert chosen("eagle3-m.gguf README.md", is_draft=True) == ["eagle3-m.gguf"]
    with pytest.raises(ModelError, match=r"^a/b has no GGUF model; it has eagle3-m\.gguf$"):
        chosen("eagle3-m.gguf README.md")


def test_no_such_file() -> None:
    names = "m-Q8_0.gguf m-Q4_K_M-00001-of-00002.gguf"
    for quant, file, message in (
        ("Q2_K", None, "a/b has no model with Q2_K in its name; it has m-Q4_K_M-00001-of-00002.gguf, m-Q8_0.gguf"),
        ("", "n.gguf", "a/b has no n.gguf; it has m-Q4_K_M-00001-of-00002.gguf, m-Q8_0.gguf"),
        ("Q4_K_M", None, "a/b lacks m-Q4_K_M-00002-of-00002.gguf, one of 2 parts of the model"),
    ):
        with pytest.raises(ModelError) as caught:
            chosen(names, quant, file)
        assert str(caught.value) == message
    with pytest.raises(ModelError, match=r"a/b has no GGUF model$"):
        chosen("README.md")
    with pytest.raises(ModelError, match=r"and 8 more$"):
        chosen(" ".join(f"m{i}.gguf" for i in range(20)), "Q4_0")


# Downloads


def test_a_model_is_downloaded_once(server: HubServer, tmp_path: Path) -> None:
    path = download()
    assert path == tmp_path / "hub" / "models--grimm--tales" / "snapshots" / COMMIT / "tales-Q4_K_M.gguf"
    assert path.read_bytes() == MODEL
    assert path.is_symlink()  # to its blob, as llama.cpp and huggingface_hub have it
    n_sent = server.n_sent
    assert n_sent >= len(MODEL)
    assert download() == path
    assert download("grimm/tales:Q4_K_M", is_offline=True) == path
    assert server.n_sent - n_sent < 10_000  # descriptions of the repository alone
    assert download("grimm/tales:q8_0").read_bytes() == MODEL[:5000]


def test_parts_and_small_files(server: HubServer) -> None:
    parts = {f"m-0000{i}-of-00003.gguf": bytes([i]) * (2000 if i < 3 else 10) for i in (1, 2, 3)}
    server.repos["grimm/large"] = parts
    own = hub()
    paths = own.download(own.find("grimm/large"))
    assert {path.name: path.read_bytes() for path in paths} == parts
    assert hub().find("grimm/large").is_cached
    paths[2].unlink()
    assert not hub().find("grimm/large").is_cached
    assert "is not in" in refused("grimm/large", is_offline=True)


def test_an_interrupted_download_continues(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    shown: list[tuple[str, int, int]] = []
    half = 3 << 20

    def progress(what: str, done: int, total: int) -> None:
        shown.append((what, done, total))
        if done > half and len(shown) < 100:
            raise KeyboardInterrupt

    own = Hub(None, False, print, progress)
    model = own.find("grimm/tales")
    with pytest.raises(KeyboardInterrupt):
        own.download(model)
    unfinished = list(Path(os.environ["LLAMA_CACHE"]).rglob("*.incomplete"))
    assert [path.stat().st_size for path in unfinished] == [half]
    server.asked.clear()
    shown[:] = [("", 0, 0)] * 100
    (path,) = own.download(model)
    assert path.read_bytes() == MODEL
    assert [line.split()[2:] for line in server.asked if line.startswith("GET") and "gguf" in line] == [
        [f"bytes={half}-"]
    ]
    assert shown[100] == ("Downloading tales-Q4_K_M.gguf", half, len(MODEL))
    assert shown[-1] == ("Checking tales-Q4_K_M.gguf", len(MODEL), len(MODEL))


def test_a_connection_that_breaks(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    server.break_after_bytes = 3 << 20
    assert download().read_bytes() == MODEL


def test_damaged_files_are_not_kept(server: HubServer) -> None:
    server.spoiled.add("tales-Q4_K_M.gguf")
    assert "tales-Q4_K_M.gguf was damaged on its way" in refused()
    assert not list(Path(os.environ["LLAMA_CACHE"]).rglob("*.gguf"))
    server.spoiled.clear()
    assert download().read_bytes() == MODEL


def test_a_private_repository(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.token = "hf_secret"
    assert refused() == f"{server.url} refuses access to grimm/tales: set HF_TOKEN, or log in with `hf auth login`"
    assert download(token="hf_secret").read_bytes() == MODEL
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert download("grimm/tales:Q8_0").read_bytes() == MODEL[:5000]


def test_names_that_the_hub_does_not_have(server: HubServer) -> None:
    assert refused("grimm/none").startswith(f"{server.url} has no repository grimm/none: check its name")
    assert refused("grimm/-x-").startswith("grimm/-x- is not the name of a repository")
    assert refused("grimm/tales:Q2_K") == (
        "grimm/tales has no model with Q2_K in its name; it has tales-Q4_K_M.gguf, tales-Q8_0.gguf"
    )


def test_without_a_network_the_cache_serves(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = download()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    warnings: list[str] = []
    assert download(warnings=warnings) == path
    (warning,) = warnings
    assert warning.startswith("http://127.0.0.1:9 cannot be reached (")
    assert warning.endswith("); using the copy in the cache")
    assert refused("grimm/tales:Q8_0").startswith("http://127.0.0.1:9 cannot be reached (")


def test_paths_outside_of_the_repository(server: HubServer) -> None:
    server.repos["grimm/evil"] = {"../../m.gguf": MODEL, "/m.gguf": MODEL}
    assert refused("grimm/evil") == "grimm/evil has no GGUF model"


def test_a_full_disk(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(UsageError, match=r"grimm/tales needs .* GB more, .* set LLAMA_CACHE to another folder"):
        download()


# Headers


def test_a_header_without_the_weights(server: HubServer) -> None:
    server.repos["grimm/padded"] = {"m.gguf": MODEL + bytes(1 << 24)}
    own = hub()
    model = own.find("grimm/padded")
    path = header_of(own, model)
    assert server.n_sent < 1 << 22
    remote, local = ModelFile.open(path), ModelFile.open(TARGET)
    assert (remote.metadata, remote.tensors) == (local.metadata, local.tensors)
    assert path.stat().st_size == len(MODEL) + (1 << 24)
    assert path.stat().st_blocks * 512 < 1 << 23  # a hole
    n_sent = server.n_sent
    assert header_of(own, model) == path
    assert server.n_sent == n_sent
    cached = own.download(model)
    assert header_of(own, own.find("grimm/padded")) == cached[0]


def test_a_header_in_several_ranges(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from ggpipe.llama import hub_header

    monkeypatch.setattr(hub_header, "_FIRST_BYTES", 1000)
    own = hub()
    path = header_of(own, own.find("grimm/tales"))
    assert ModelFile.open(path).tensors == ModelFile.open(TARGET).tensors
    ranges = [line.rpartition("=")[2] for line in server.asked if "bytes=" in line]
    assert ranges[:2] == ["0-999", "1000-3999"]


def test_a_file_that_is_not_gguf(server: HubServer) -> None:
    server.repos["grimm/bad"] = {"m.gguf": bytes(5000), "n.gguf": b"GGUF" + bytes(5000)}
    own = hub()
    for file, message in (("m.gguf", "is not a GGUF file"), ("n.gguf", "has no GGUF header that libllama can read")):
        with pytest.raises(ModelError, match=f"{file} of grimm/bad {message}"):
            header_of(own, own.find("grimm/bad", file))
