"""The README's commands run as they stand, with the bundled model and this machine put in."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from commands import ROOT, TARGET, ggpipe

from ggpipe.runtime import launch

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
LINES = [line.partition(" #")[0].strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS = [line for line in LINES if re.match(r"(\.venv/bin/)?ggpipe generate ", line)]
OTHERS = [line for line in LINES if re.match(r"ggpipe (?!generate )[a-z]+ ", line)]


def test_the_readme_shows_commands() -> None:
    assert len(COMMANDS) == 5, "four to start from, and the one that plan finds"
    for script in ("./scripts/demo", "./scripts/test"):
        assert script in LINES
        assert (ROOT / script).stat().st_mode & 0o111


def hosts_for_three(folder: Path) -> Path:
    """A hostfile, as the mpirun that is here reads it."""
    is_hydra = "--map-by" not in launch.mpirun_command(launch.find_mpirun(), 1, None, ())
    (folder / "hosts").write_text("localhost:3\n" if is_hydra else "localhost slots=3\n")
    return folder / "hosts"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command: str, tmp_path: Path) -> None:
    hosts = hosts_for_three(tmp_path)
    words = shlex.split(command)[1:]
    places = {
        "-m": TARGET,
        "-md": TARGET.with_name("tales-draft.gguf"),
        "-f": ROOT / "prompts" / "tale.txt",
        "--hostfile": hosts,
    }
    words = [str(places.get(before, word)) for before, word in zip(["", *words], words, strict=False)]
    result = ggpipe(*words, "-n", 8, "-t", 1)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 10
    assert "decode" in result.stderr


def test_measuring_and_planning(tmp_path: Path) -> None:
    """In the README's order: what one command writes, another reads."""
    assert {line.split()[1] for line in OTHERS} == {"plan", "simulate", "profile", "record", "bench"}
    hosts = hosts_for_three(tmp_path)
    places = {"-m": TARGET, "-md": TARGET.with_name("tales-draft.gguf"), "--hostfile": hosts}
    written = {"-o", "--csv", "--plot", "--recording"}
    shorter = {
        "bench": ("-n", 4, "--rounds", 1, "--modes", "iterative,async", "-t", 1),
        "profile": ("--seconds", 1, "-t", 1),
        "record": ("-n", 8, "-t", 1),
        "simulate": (),
        "plan": (),
    }
    order = sorted(OTHERS, key=lambda line: "profile.json -m" in line)  # the profile comes before who reads it
    for command in order:
        words = shlex.split(command)[1:]
        words = [str(places.get(before, word)) for before, word in zip(["", *words], words, strict=False)]
        files = {w for before, w in zip(["", *words], words, strict=False) if before in written} | {"profile.json"}
        words = [str(tmp_path / word) if word in files else word for word in words]
        result = ggpipe(*words, *shorter[words[0]])
        assert result.returncode == 0, (command, result.stderr)


def test_options_that_the_readme_names_exist() -> None:
    table = README.partition("## Guessing ahead")[2].partition("## Exactness")[0]
    commands = {"generate", *(line.split()[1] for line in OTHERS)}
    help_text = "".join(ggpipe(command, "--help", COLUMNS="200").stdout for command in sorted(commands))
    for option in re.findall(r"`(-{1,2}[a-z][a-z-]*)", table):
        assert option.rstrip("-") in help_text, option
