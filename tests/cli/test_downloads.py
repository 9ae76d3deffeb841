"""Command lines that name models on the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import TARGET
from support.hub_server import HubServer, hub_server
from support.in_process import ggpipe, ggpipe_on_threads
from support.planning import boxes

from ggpipe.cli.downloads import tell_others

DRAFT = TARGET.with_name("tales-draft.gguf")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = {"tales-Q4_K_M.gguf": TARGET.read_bytes()}
    with hub_server(grimm__tales=files, grimm__draft={"draft-Q8_0.gguf": DRAFT.read_bytes()}) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def test_generate(server: HubServer) -> None:
    words = ("generate", "-hf", "grimm/tales", "-hfd", "grimm/draft:Q8_0", "-p", "Once", "-n", 4, "--temp", 0, "-t", 1)
    result = ggpipe_on_threads(*words, "--mpi-layer-split", "0.5,0.5")
    assert result.returncode == 0, result.stderr
    downloads = re.findall(r"^ggpipe: Downloading (\S+)", result.stderr, re.MULTILINE)
    assert downloads == ["draft-Q8_0.gguf", "tales-Q4_K_M.gguf"]
    again = ggpipe_on_threads(*words, "--mpi-layer-split", "0.5,0.5", "--offline")
    assert (again.returncode, again.stdout) == (0, result.stdout)
    assert "Downloading" not in again.stderr


def test_plan_reads_headers_only(server: HubServer, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(boxes(2))
    server.repos["grimm/tales"] = {"tales-Q4_K_M.gguf": TARGET.read_bytes() + bytes(1 << 25)}
    result = ggpipe("plan", cluster, "-hf", "grimm/tales:Q4_K_M", "-hfd", "grimm/draft", "-c", 1024)
    assert result.returncode == 0, result.stderr
    assert "ggpipe generate -hf grimm/tales:Q4_K_M" in result.stdout
    assert server.n_sent < 1 << 23
    assert not list((tmp_path / "hub").rglob("*.gguf"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-hf grimm/none", "http://.* has no repository grimm/none: check its name; .*"),
        ("-hf tales", "-hf/--hf-repo must be user/repo or user/repo:quant, got tales"),
        ("-hf a/b:", "-hf/--hf-repo must be user/repo or user/repo:quant, got a/b:"),
        ("-m m.gguf -hfd a/b/c", "-hfd/--hf-repo-draft must be user/repo or user/repo:quant, got a/b/c"),
        ("-m m.gguf -hf a/b", "-hf/--hf-repo a/b names a second target model: omit it, or omit -m"),
        ("-m m.gguf -hff m.gguf", "-hff/--hf-file needs a repository: name it with -hf/--hf-repo"),
        ("-hf grimm/tales --offline", "grimm/tales is not in .*: download it once without --offline .*"),
    ],
)
def test_mistakes(server: HubServer, words: str, message: str) -> None:
    result = ggpipe("generate", *words.split(), "-p", "Once")
    assert result.returncode == 2
    assert re.fullmatch(f"ggpipe: error: {message}\n", result.stderr), result.stderr


def test_other_machines_are_told_how_to_get_models(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [Path("/c/models--a--b/snapshots/0/m-00001-of-00002.gguf"), Path("/c/models--a--b/snapshots/0/n.gguf")]
    tell_others([paths], ["localhost"])
    assert capsys.readouterr().err == ""
    tell_others([paths], ["localhost", "node2", "node2", "node3"])
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert f"for host in node2 node3; do rsync -L --mkpath {paths[0]} {paths[1]} $host:{paths[0].parent}/; done" in line
