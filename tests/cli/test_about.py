"""Help pages, the version, and completion."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.in_process import ggpipe

from ggpipe.options.commands import COMMANDS
from ggpipe.options.option import Command
from ggpipe.options.table import OPTIONS

SHOWN = [command for command in COMMANDS if not command.hidden]


def flags_on(page: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page))


def test_help_is_short_and_says_where_the_rest_is() -> None:
    short = ggpipe("generate", "--help", COLUMNS="80").stdout
    full = ggpipe("generate", "--help-all", COLUMNS="80").stdout
    assert "`ggpipe generate --help-all` lists all" in " ".join(re.sub("[│╭╮╰╯─]", " ", short).split())
    assert {"--model", "--mpi-layer-split", "--temp"} <= flags_on(short)
    assert "--mirostat-lr" not in short
    assert "--mirostat-lr" in full
    assert short.count("\n") < full.count("\n") / 3


def test_help_as_a_command() -> None:
    for words in (["chat"], []):
        assert ggpipe("help", *words).stdout == ggpipe(*words, "--help").stdout != ""


@pytest.mark.parametrize("command", SHOWN, ids=lambda command: command.name)
def test_required_options_are_on_the_short_page(command: Command) -> None:
    page = ggpipe(command.name, "--help", COLUMNS="200").stdout
    for row in command.options(OPTIONS):
        if row.name in command.required:
            assert (row.flags[0] if row.flags else row.metavar or "") in page


def test_version() -> None:
    first, *others = ggpipe("--version").stdout.splitlines()
    assert re.fullmatch(r"ggpipe \d+\.\d+\.\d+( \(commit [0-9a-f]+\))?", first)
    assert [line.split()[0].rstrip(":") for line in others] == ["llama.cpp", "MPI", "CPU", "Python"]


def test_completion(tmp_path: Path) -> None:
    result = ggpipe("--install-completion", XDG_DATA_HOME=str(tmp_path))
    path = tmp_path / "bash-completion" / "completions" / "ggpipe"
    assert result.stdout.startswith(f"wrote {path}: ")

    def completed(*words: str) -> set[str]:
        line = " ".join(map(repr, words))
        script = f"source {path}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _ggpipe; echo ${{COMPREPLY[@]}}"
        return set(subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split())

    assert completed("ggpipe", "ge") == {"generate"}
    assert {command.name for command in SHOWN} <= completed("ggpipe", "")
    assert completed("ggpipe", "plan", "--acc") == {"--acceptance"}
    assert completed("ggpipe", "generate", "mod") == set()
