"""Help pages, the version, and completion."""

from __future__ import annotations

import re
import shutil
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
    result = ggpipe("--install-completion", XDG_DATA_HOME=str(tmp_path), SHELL="/bin/sh")
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


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_of_other_shells(shell: str, tmp_path: Path) -> None:
    own = str(tmp_path)
    result = ggpipe("--install-completion", XDG_DATA_HOME=own, XDG_CONFIG_HOME=own, SHELL=f"/usr/bin/{shell}")
    path = Path(result.stdout.removeprefix("wrote ").partition(": ")[0])
    again = ggpipe("--install-completion", shell, XDG_DATA_HOME=own, XDG_CONFIG_HOME=own, SHELL="/bin/bash")
    assert again.stdout == result.stdout
    script = path.read_text()
    for command in SHOWN:
        assert command.name in script
    assert "acceptance" in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n", path], check=True)
    if shell == "fish" and program:
        asked = [program, "--no-config", "-c", f"source {path}; complete -C 'ggpipe plan --acc'"]
        assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.startswith("--acceptance\t")


def test_completion_of_an_unknown_shell() -> None:
    result = ggpipe("--install-completion", "csh")
    assert (result.returncode, result.stderr) == (
        2, "ggpipe: error: no completion for csh: choose bash, zsh, fish\n"
    )  # fmt: skip


def test_the_manual_page_has_every_command_and_flag(tmp_path: Path) -> None:
    page = ggpipe("--man").stdout
    plain = re.sub(r"\\f[BIR]", "", page).replace("\\-", "-")
    for command in SHOWN:
        assert f".B ggpipe {command.name}\n" in page
        for row in command.options(OPTIONS):
            assert all(flag.strip() in plain for text in row.flags for flag in text.split("/"))
    if program := shutil.which("man"):
        (tmp_path / "ggpipe.1").write_text(page)
        shown = subprocess.run([program, "--warnings", "-l", tmp_path / "ggpipe.1"], capture_output=True, text=True)
        assert (shown.returncode, shown.stderr) == (0, "")
