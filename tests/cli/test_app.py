"""What a command line loads and starts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggpipe.cli import launching, run
from ggpipe.cli.parsing import parse
from ggpipe.config import EngineConfig
from ggpipe.errors import UsageError
from ggpipe.launch import environment
from ggpipe.launch.job import Job
from ggpipe.options import engine_config
from ggpipe.options.commands import COMMANDS
from ggpipe.options.option import Options
from ggpipe.options.table import OPTIONS


def given(line: str) -> Options:
    return parse(
        next(command for command in COMMANDS if command.name == "generate"), OPTIONS, f"-m m.gguf {line}".split()
    )


def test_ranks_are_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, Path | None]] = []
    hostfile = Path("hosts")
    here, elsewhere = 7, 8

    @contextlib.contextmanager
    def supervised(job: Job, *_: object) -> Iterator[None]:
        started.append((job.n_ranks, job.hostfile))
        yield

    def started_by(config: EngineConfig, hostfile: Path | None) -> int:
        options = given(f"--hostfile {hostfile}" if hostfile else "")
        return launching.run_command(config, options, lambda _: elsewhere)

    monkeypatch.setattr(launching, "supervised", supervised)
    monkeypatch.setattr(launching, "run_this_rank", lambda *_, **__: here)
    monkeypatch.setattr(environment, "is_rank", lambda: False)
    one = engine_config.engine_config(given(""))
    three = engine_config.engine_config(given("--mpi-layer-split 0.5,0.5/1 -md d.gguf"))
    assert started_by(one, None) == here
    with pytest.raises(UsageError, match="`hostfile` needs `shares`"):
        started_by(one, hostfile)
    assert started_by(three, hostfile) == elsewhere
    assert started == [(3, hostfile)]
    monkeypatch.setattr(environment, "is_rank", lambda: True)
    assert started_by(three, None) == here
    assert started_by(one, hostfile) == here


# What is loaded


def loaded_after(arguments: list[str]) -> tuple[set[str], set[str]]:
    """What is loaded when a command line has run: commands, and all modules."""
    script = f"import sys; from ggpipe.cli import run; run({arguments}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    modules = set(done.stderr.split())
    commands = {
        name.removeprefix("ggpipe.cli.commands.") for name in modules if name.startswith("ggpipe.cli.commands.")
    }
    return commands, modules


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["plan", "--help"], ["plan", "--no-such"]])
def test_help_loads_no_command(arguments: list[str]) -> None:
    commands, modules = loaded_after(arguments)
    assert commands == set()
    assert not {"numpy", "msgspec", "mpi4py", "llama_cpp", "matplotlib", "rich.live", "ggpipe.runtime"} & modules


def test_a_command_is_loaded_when_it_is_called() -> None:
    commands, modules = loaded_after(["generate", "-m", "m"])  # a prompt is missing
    assert commands == {"generate"}
    assert not {"numpy", "mpi4py", "llama_cpp", "matplotlib"} & modules


def test_a_bare_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    out, error = capsys.readouterr()
    assert "generate" in out + error
    assert "error" not in error
