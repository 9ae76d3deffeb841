"""What a command line loads and starts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_lines import options
from support.commands import HANG_S

from ggpipe.cli import launching, run
from ggpipe.config.engine import EngineConfig
from ggpipe.errors import UsageError
from ggpipe.launch import environment
from ggpipe.launch.job import Job
from ggpipe.options import engine_config
from ggpipe.options.option import Options


def given(line: str) -> Options:
    return options(f"-m m.gguf {line}".split())


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
    with pytest.raises(UsageError, match="`hostfile` needs `layer_split`"):
        started_by(one, hostfile)
    assert started_by(three, hostfile) == elsewhere
    assert started == [(3, hostfile)]
    monkeypatch.setattr(environment, "is_rank", lambda: True)
    assert started_by(three, None) == here
    assert started_by(one, hostfile) == here


# What is loaded


HELP = (["--help"], ["generate", "--help"], ["plan", "--help"], ["plan", "--no-such"])


def loaded_after(*lines: list[str]) -> list[set[str]]:
    """All modules of a process after each of several command lines."""
    script = "import sys; from ggpipe.cli import run\n"
    script += f"for line in {lines}: run(line); print('modules', *sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=True)
    return [set(line.split()[1:]) for line in done.stderr.splitlines() if line.startswith("modules ")]


def commands_in(modules: set[str]) -> set[str]:
    prefix = "ggpipe.cli.commands."
    return {module.removeprefix(prefix) for module in modules if module.startswith(prefix)}


def test_commands_are_loaded_when_they_are_called() -> None:
    *after_help, after_generate = loaded_after(*HELP, ["generate", "-m", "m"])  # a prompt is missing
    heavy = {"numpy", "msgspec", "mpi4py", "llama_cpp", "matplotlib", "rich.live", "ggpipe.engine"}
    for line, modules in zip(HELP, after_help, strict=True):
        assert commands_in(modules) == set(), line
        assert not heavy & modules, line
    assert commands_in(after_generate) == {"generate"}
    assert not {"numpy", "mpi4py", "llama_cpp", "matplotlib"} & after_generate


def test_a_bare_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    out, error = capsys.readouterr()
    assert "generate" in out + error
    assert "error" not in error
