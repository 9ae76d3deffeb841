"""Bars of long work."""

from __future__ import annotations

import pytest
from rich.console import Console
from support.screen import Screen

from ggpipe.display.live.terminal import Terminal
from ggpipe.display.progress import FileProgress, SimulationProgress


def on(screen: Screen) -> Terminal:
    console = Console(
        file=screen, force_terminal=True, width=screen.width, height=screen.height, _environ={"TERM": "xterm-256color"}
    )
    return Terminal(console=console, stdout_shared=True)


def test_a_bar_stays_when_files_are_written() -> None:
    screen = Screen(80, 24)
    with FileProgress(on(screen), "making models") as progress:
        progress(1_000_000, 4_000_000)
        progress(4_000_000, 4_000_000)
    assert screen.text.startswith("making models ━━━")
    assert "4.0/4.0 MB" in screen.text
    assert screen.cursor_shown


def test_nothing_is_drawn_when_nothing_is_written() -> None:
    screen = Screen(80, 24)
    with FileProgress(on(screen), "making models"):
        pass
    assert screen.raw == ""


def test_an_error_ends_the_bar() -> None:
    screen = Screen(80, 24)

    def fail() -> None:
        with FileProgress(on(screen), "making models") as progress:
            progress(1_000_000, 4_000_000)
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert "1.0/4.0 MB" in screen.text
    assert screen.cursor_shown


def test_one_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with FileProgress(None, "making models") as progress:
        progress(1_000_000, 4_000_000)
        progress(4_000_000, 4_000_000)
    assert capsys.readouterr().err == "ggpipe: making models (4.0 MB)\n"


@pytest.mark.parametrize(("clock", "lines"), [((0, 5, 9), 0), ((0, 11, 15, 30), 2)])
def test_simulations_without_a_terminal(
    clock: tuple[float, ...], lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Now and then a line, so that a log shows that work goes on."""
    now = clock[0]
    monkeypatch.setattr("ggpipe.display.progress.time.monotonic", lambda: now)
    with SimulationProgress() as progress:
        for done, now in enumerate(clock[1:], 1):  # noqa: B007  # the clock reads it
            progress(done, 100)
    err = capsys.readouterr().err
    assert err.count("of 100 simulations\n") == lines
    assert err.count("\n") == lines
