"""Where the display is drawn; without a terminal there is no control code at all."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.commands import HANG_S
from support.screen import two_ranks

from ggpipe.display.live.live import LiveDisplay
from ggpipe.display.live.terminal import open_terminal
from ggpipe.stats.records import RequestStats

SHOW = """
    import os, sys
    from ggpipe.display.live.terminal import open_terminal
    terminal = open_terminal(sys.argv[1])
    found = None
    if terminal:
        console = terminal.console
        found = [terminal.stdout_shared, console.width, console.height, console.no_color, terminal.own_stderr]
        console.print("[x]", style="red")
    os.write(int(sys.argv[2]), repr(found).encode())
"""


@dataclass
class Found:
    terminal: object
    """[stdout shared, columns, lines, no colour, own stderr], or None."""
    drawn: str
    """What reached the terminal."""
    error: bytes
    """What reached stderr when that was a pipe."""


def run_show(
    tmp_path: Path,
    color: str = "auto",
    stdout: str = "pipe",
    stderr: str = "pipe",
    environment: Callable[[str], dict[str, str]] = lambda tty: {},
    under: str | None = None,
) -> Found:
    """`open_terminal` in a child in a session of its own, with its outputs on a terminal, a pipe or a file.

    `under`: by a program of this name, which keeps the outputs and gives the child pipes.
    """
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (33, 77))
    read, write = os.pipe()
    command = [sys.executable, "-c", textwrap.dedent(SHOW), color, str(write)]
    if under:
        launcher = tmp_path / under
        launcher.write_text(
            f"#!{sys.executable}\nimport subprocess, sys\n"
            f"out = subprocess.run({command!r}, capture_output=True, pass_fds=[{write}])\n"
            "sys.exit(out.returncode)\n"
        )
        launcher.chmod(0o755)
        command = [str(launcher)]
    kept = {k: v for k, v in os.environ.items() if not re.match("OMPI_|PMI|NO_COLOR|TERM|TMUX|COL|LINES", k)}
    streams = {"tty": slave, "pipe": subprocess.PIPE, "null": subprocess.DEVNULL}
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=streams[stdout],
        stderr=streams[stderr],
        env={**kept, "TERM": "xterm-256color", **environment(os.ttyname(slave))},
        start_new_session=True,
        pass_fds=[write],
        timeout=HANG_S,
        check=False,
    )
    os.close(write)
    with os.fdopen(read) as file:
        found = file.read()
    assert done.returncode == 0, done.stderr
    os.set_blocking(master, False)
    try:
        drawn = os.read(master, 10000).decode()
    except BlockingIOError:
        drawn = ""
    os.close(slave)
    os.close(master)
    return Found(eval(found), drawn, done.stderr or b"")


def test_stderr_that_is_a_terminal(tmp_path: Path) -> None:
    found = run_show(tmp_path, stdout="tty", stderr="tty")
    assert found.terminal == [True, 77, 33, False, True]
    assert "\x1b[31m[x]" in found.drawn
    assert run_show(tmp_path, stderr="tty").terminal == [False, 77, 33, False, True]
    found = run_show(tmp_path, color="off", stderr="tty")
    assert found.terminal == [False, 77, 33, True, True]
    assert "[x]" in found.drawn
    assert "[31m" not in found.drawn
    assert run_show(tmp_path, stderr="tty", environment=lambda _: {"TERM": "dumb"}).terminal is None


def test_no_color_is_honoured(tmp_path: Path) -> None:
    found = run_show(tmp_path, stderr="tty", environment=lambda _: {"NO_COLOR": "1"})
    assert found.terminal == [False, 77, 33, True, True]
    assert "[31m" not in found.drawn


@pytest.mark.parametrize("stderr", ["pipe", "null"])
def test_no_terminal(tmp_path: Path, stderr: str) -> None:
    found = run_show(tmp_path, stdout="tty", stderr=stderr)
    assert found == Found(None, "", b"")


def test_terminal_of_a_users_mpirun(tmp_path: Path) -> None:
    def rank(_: str) -> dict[str, str]:
        return {"OMPI_COMM_WORLD_RANK": "0"}

    found = run_show(tmp_path, stdout="tty", stderr="tty", environment=rank, under="prterun")
    assert found.terminal == [True, 77, 33, False, False]
    assert "\x1b[31m[x]" in found.drawn
    found = run_show(tmp_path, stdout="pipe", stderr="tty", environment=rank, under="mpirun")
    assert found.terminal == [False, 77, 33, False, False]
    assert run_show(tmp_path, stdout="tty", environment=rank, under="mpirun").terminal is None
    assert run_show(tmp_path, stdout="tty", stderr="tty", environment=rank, under="other").terminal is None


def test_forced_on(tmp_path: Path) -> None:
    found = run_show(tmp_path, color="on", environment=lambda _: {"NO_COLOR": "1"})
    assert found.terminal == [False, 80, 24, False, True]
    assert b"\x1b[31m[x]" in found.error


def test_a_terminal_that_goes_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    stderr = os.fdopen(slave, "w")
    monkeypatch.setattr(sys, "stderr", stderr)
    terminal = open_terminal()
    assert terminal is not None
    with LiveDisplay(terminal, two_ranks()) as display:
        display.request(RequestStats())
        display.text("text\n")
        os.close(master)
        display.text("more\n")
        display.stop()
        assert display.error is None
