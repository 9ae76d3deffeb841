"""The README's commands run as they stand, with the bundled model and this machine put in."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from commands import ROOT, TARGET, ggpipe

from ggpipe.runtime import launch

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
LINES = [line.partition(" #")[0].strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS = [line for line in LINES if re.match(r"(\.venv/bin/)?ggpipe generate ", line)]


def test_the_readme_shows_commands() -> None:
    assert len(COMMANDS) == 4
    for script in ("./scripts/demo", "./scripts/test"):
        assert script in LINES
        assert (ROOT / script).stat().st_mode & 0o111


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    is_hydra = "--map-by" not in launch.mpirun_command(launch.find_mpirun(), 1, None, ())
    hosts.write_text("localhost:3\n" if is_hydra else "localhost slots=3\n")
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


def test_options_that_the_readme_names_exist() -> None:
    table = README.partition("## Guessing ahead")[2].partition("## Exactness")[0]
    help_text = ggpipe("generate", "--help", COLUMNS="200").stdout
    for option in re.findall(r"`(-{1,2}[a-z][a-z-]*)", table):
        assert option.rstrip("-") in help_text, option
