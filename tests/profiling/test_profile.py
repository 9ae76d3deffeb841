"""Profiles: as data, measured inside one process and over MPI."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import in_process
from support.commands import HANG_S, TARGET, ggpipe, mpirun
from support.profiles import check, config_of, measure, refuse, refused
from support.requests import asked
from support.virtual import measured
from support.zoo import make

from ggpipe.cli import run
from ggpipe.cluster.profile import Kernels, LinkProfile, as_text, read, seconds_at, write
from ggpipe.config.model import ModelConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.engine.head import Head
from ggpipe.engine.session import Session
from ggpipe.engine.worker import Worker
from ggpipe.errors import LaunchError, RunError, UsageError
from ggpipe.launch.hostfile import hosts_of
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_shape import facts_of
from ggpipe.profiling import stage_timing
from ggpipe.profiling.profile import default_layers, pairs_of
from ggpipe.stats.records import RequestStats
from ggpipe.transport.local import LocalWorld

PROFILE = measured()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make("llama", folder / "llama.gguf", n_layer=8)


# Data


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write(path, PROFILE)
    assert read(path) == PROFILE
    assert path.read_text() == as_text(PROFILE)
    without = dataclasses.replace(PROFILE, ranks=(dataclasses.replace(PROFILE.ranks[0], half=None),), links=())
    write(path, without)
    assert read(path) == without
    content = json.loads(path.read_text()) | {"note": "from a later version"}
    path.write_text(json.dumps(content))
    assert read(path) == without


def test_lookups() -> None:
    assert seconds_at(PROFILE.ranks[0].alone, 1) == 0.01
    assert seconds_at(PROFILE.ranks[0].alone, 2) is None
    assert PROFILE.link(1, 0) == LinkProfile(1, 0, 6e-5, 1e9)
    assert PROFILE.link(1, 1) is None


BROKEN: dict[str, tuple[Callable[[Any], object], str]] = {
    "version": (lambda p: p.update(version=99), "format 99"),
    "format": (lambda p: p.update(format="other"), "is not a profile"),
    "missing": (lambda p: p.pop("links"), "links is missing"),
    "ranks": (lambda p: p.update(ranks=[]), "not numbered"),
    "type": (
        lambda p: p["ranks"][1].update(threads="8"),
        r"ranks\[1\]\.threads must be .* got '8'",
    ),
    "negative": (
        lambda p: p["ranks"][0]["alone"][2].update(seconds=-1),
        r"alone\[2\]\.seconds must be .* got -1",
    ),
    "nan": (lambda p: p["ranks"][0]["overheads"].update(run_s=float("nan")), "is not a profile"),
    "list": (lambda p: p["ranks"][0].update(layers=[1]), r"ranks\[0\]\.layers must be a list of 2, got \[1\]"),
    "object": (lambda p: p.update(model=3), "model must be a table, got 3"),
    "layers": (lambda p: p["ranks"][0].update(layers=[3, 5]), "layers that the model does not have"),
    "no single row": (lambda p: p["ranks"][0].update(alone=p["ranks"][0]["alone"][1:2]), "single row"),
    "no time": (
        lambda p: p["ranks"][0]["together"][0].update(seconds=0),
        r"together\[0\]\.seconds must be",
    ),
    "threads": (lambda p: p["ranks"][0].update(threads=0), r"threads must be a whole number of 1 or more"),
    "link": (lambda p: p["links"][0].update(target=2), "names ranks that do not exist"),
    "layer_bytes": (lambda p: p["model"].update(n_layer=5), "layer_bytes"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_profiles(what: str, tmp_path: Path) -> None:
    spoil, why = BROKEN[what]
    content = json.loads(as_text(PROFILE))
    spoil(content)
    refuse(content, why, tmp_path / "profile.json")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'"\xff"', b"GGUF", b'{"version": 1}'])
def test_no_profile_at_all(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"is not a profile; write one with `ggpipe profile"):
        read(path)


def test_files_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the profile .*: No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"cannot write the profile .*: No such file"):
        write(tmp_path / "none" / "profile.json", PROFILE)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3moe"])
def test_facts_of_a_model(name: str, folder: Path) -> None:
    file = ModelFile.open(make(name, folder / f"{name}-facts.gguf"))
    facts = facts_of(file)
    embedding = file.tensors["token_embd.weight"].size
    assert (
        sum(facts.layer_bytes) + facts.input_bytes + facts.output_bytes == file.n_bytes + file.tied_output * embedding
    )
    assert facts.input_bytes >= embedding
    assert facts.weight_bytes((0, 3)) == sum(facts.layer_bytes) + facts.output_bytes
    assert facts.weight_bytes((0, 2)) == sum(facts.layer_bytes[:2])
    assert facts.weight_bytes((3, 3)) == 0
    assert (facts.n_layer, facts.n_expert) == (3, 4 if name == "qwen3moe" else 0)
    assert facts.n_vocab == file.array_lengths["tokenizer.ggml.tokens"]


def test_which_layers() -> None:
    def layers(n_layer: int, layer_bytes: int, alone_s: float, cache_bytes: int = 0) -> tuple[int, int]:
        model = dataclasses.replace(PROFILE.model, n_layer=n_layer, layer_bytes=(layer_bytes,) * n_layer)
        return default_layers(model, alone_s, cache_bytes)

    assert layers(1, 100, 10) == (0, 1)
    assert layers(3, 100, 10) == (1, 2)
    assert layers(32, 100, 10) == (12, 20)
    assert layers(80, 500 << 20, 100) == (39, 41)  # about 1 GB
    assert layers(80, 100 << 20, 1) == (39, 40)
    assert layers(80, 3 << 30, 1) == (39, 40)
    assert layers(80, 20 << 20, 0.1, 64 << 20) == (35, 44)  # a cache must not hold them


def test_which_links() -> None:
    assert pairs_of(1) == []
    assert pairs_of(3) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    many = pairs_of(32)
    assert len(many) == len(set(many)) < 32 * 4
    assert {(i, (i + 1) % 32) for i in range(32)} <= set(many)
    assert {(0, i) for i in range(1, 32)} | {(i, 0) for i in range(1, 32)} <= set(many)


def test_a_line_through_two_points() -> None:
    assert stage_timing.intercept_s((10, 3.0), (20, 5.5)) == pytest.approx(0.5)
    assert stage_timing.intercept_s((10, 3.0), (20, 7.0)) == 0.0
    assert stage_timing.intercept_s((10, 3.0), (20, 2.0)) == 0.75
    assert stage_timing.intercept_s((10, 3.0), (10, 4.0)) == 0.0


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("node1 slots=1\nnode2 slots=3\n", 4),
        ("a:2\nb:4  # two sockets\n\n# c:9\n", 6),
        ("one\ntwo max_slots=9\n", 2),
        ("one slots = 2 max_slots=4\n", 2),
    ],
)
def test_slots_of_a_hostfile(text: str, n: int, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    assert len(hosts_of(path)) == n


def test_hostfiles_that_name_nothing(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    for write_it, why in (
        (lambda: None, "No such file"),
        (lambda: path.write_text("# nobody\n"), "names no machines"),
        (lambda: path.write_bytes(b"\xff\xfe"), "it is not text"),
    ):
        write_it()
        with pytest.raises(LaunchError, match=why):
            hosts_of(path)


# Inside one process


def test_one_rank(model: Path, tmp_path: Path) -> None:
    profile, _ = measure([config_of(model, cache_type_k="q8_0")], budget_s=60)  # as many runs as ever
    assert profile is not None
    check(profile, model, (3, 5))
    (rank,) = profile.ranks
    assert rank.together == tuple(p for p in rank.alone if p.rows <= 8 and p.n_past == 32)
    assert {p.n_past for p in rank.alone} == {32, 512}
    assert {p.rows for p in rank.alone} == {1, 2, 4, 8, 16, 32, 128}
    assert profile.kernels == Kernels(cache_type_k="q8_0")
    write(tmp_path / "profile.json", profile)
    assert read(tmp_path / "profile.json") == profile


def test_two_ranks_then_a_session(model: Path) -> None:
    """The ranks are ready for something else afterwards."""
    config = config_of(model)
    transports = list(LocalWorld(2).transports)
    profile, _ = measure([config, config], (2, 6), transports=list(transports))
    assert profile is not None
    check(profile, model, (2, 6))
    worker = threading.Thread(target=Worker(transports[1], config).serve, daemon=True)
    worker.start()
    with Head(transports[0], config) as head:
        tokens = list(
            Session.load(head).stream(asked((1, 5, 9), SamplingConfig(temp=0, ignore_eos=True), 4), RequestStats())
        )
    assert len(tokens) == 4
    worker.join(HANG_S)
    assert not worker.is_alive()


@pytest.mark.parametrize("layers", [(0, 1), (7, 8), (0, 8)], ids=str)
def test_the_ends(layers: tuple[int, int], model: Path) -> None:
    profile, _ = measure([config_of(model)], layers)
    assert profile is not None
    check(profile, model, layers)


def test_a_small_context(model: Path) -> None:
    profile, _ = measure([config_of(model, n_ctx=64, n_ubatch=16)], budget_s=1.5)
    assert profile is not None
    (rank,) = profile.ranks
    assert {p.rows for p in rank.alone} == {1, 2, 4, 8, 16}
    assert max(p.n_past + p.rows for p in rank.alone) <= 256  # libllama makes it no smaller


@pytest.mark.parametrize("name", ["jamba", "mamba"])
def test_models_that_cannot_take_rows_back(name: str, folder: Path) -> None:
    path = make(name, folder / f"{name}.gguf")
    n_layer = ModelFile.open(path).n_layer
    profile, _ = measure([config_of(path)], (0, n_layer))
    assert profile is not None
    assert (profile.ranks[0].half is None) == (name == "mamba")


def test_errors_end_all_ranks(model: Path, folder: Path) -> None:
    good, missing = config_of(model), config_of(folder / "no.gguf")
    other = config_of(make("llama", folder / "other.gguf", n_layer=4))
    adapter = ModelConfig(path=model, loras=((folder / "no.lora", 1.0),))
    no_lora = dataclasses.replace(good, model=adapter)
    assert "cannot open model file" in refused([missing, good])
    assert refused([good, missing, good]).startswith("rank 1 ")
    assert "another model than rank 0" in refused([good, good, other])
    assert "`loras`" in refused([no_lora, good])
    assert "`loras`" in refused([good, no_lora])
    assert refused([good, good], (7, 9)) == "`layers` 7-8: the model has layers 0 to 7"
    mamba = config_of(make("mamba", folder / "mamba.gguf"))
    assert refused([mamba, mamba]).endswith("'mamba' models cannot be divided: profile all layers, with `layers` 0-2")


def test_the_user_has_enough(model: Path) -> None:
    n = 0

    def attend() -> None:
        nonlocal n
        n += 1
        if n > 50:
            raise RunError("enough")

    profile, raised = measure([config_of(model)] * 2, attend=attend)
    assert profile is None
    assert sorted(map(str, raised)) == ["enough", "the head gave up: another rank failed, or the user stopped it"]


# The command


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--layers", "5-3"), "--layers 5-3: write the first and the last layer"),
        (("--layers", "a"), "--layers a: "),
        (("--layers", "1-"), "--layers 1-: "),
        (("--seconds", "0"), "--seconds"),
        (("--seconds", "nan"), "--seconds"),
        (("-r", "0"), "-r/--ranks must be a number of ranks from 1 to 1024, got 0"),
        (("-r", "9999"), "-r/--ranks must be a number of ranks from 1 to 1024, got 9999"),
        (("-t", "x"), "-t/--threads x: "),
        (("-ctk", "f8"), "-ctk/--cache-type-k must be f32, "),
        (("--hostfile", "/nonexistent"), "--hostfile /nonexistent: "),
        (("--mpi-layer-split", "0.5,0.5"), "no such option"),
    ],
)
def test_bad_command_lines(arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "-m", str(TARGET), *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert error.startswith("ggpipe: error: ")
    assert why in error


def test_one_rank_from_the_command_line(tmp_path: Path) -> None:
    done = in_process.ggpipe("profile", "-m", TARGET, "-t", 1, "--seconds", 0.3, "--layers", "2-3", "-o", "-")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "profile.json"
    path.write_text(done.stdout)
    check(read(path), TARGET, (2, 4))
    assert "measuring layers 2-3 of 0-7" in done.stderr
    assert "32 rows" in done.stderr
    assert "link" not in done.stderr


def test_two_ranks_that_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    done = ggpipe("profile", "-m", TARGET, "-r", 2, "-t", 1, "--seconds", 0.6, "-o", path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    check(read(path), TARGET, (3, 5))
    assert "0 to 1" in done.stderr
    assert "together" in done.stderr


def test_a_file_that_cannot_be_written_under_mpirun(tmp_path: Path) -> None:
    path = tmp_path / "none" / "profile.json"
    done = mpirun(2, "profile", "-m", TARGET, "-t", 1, "--seconds", 0.3, "-o", path)
    assert done.returncode != 0
    assert done.stderr.count("ggpipe: error: ") == 1
    assert f"cannot write to {path}" in done.stderr


def test_turns_are_measured_where_there_is_time(model: Path) -> None:
    config = config_of(model)
    profile, _ = measure([config, config], budget_s=6.0)
    assert profile is not None
    assert all(rank.turns is not None and rank.turns >= 1 for rank in profile.ranks)
    assert profile.ranks[1].guest is None, "of the first rank only"
