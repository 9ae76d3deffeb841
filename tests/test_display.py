"""What the terminal holds in the end is the exact text; without a terminal there is no control code at all."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import subprocess
import sys
import termios
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import get_character_cell_size
from rich.console import Console

from ggpipe.display import live, summary
from ggpipe.display.live import LiveDisplay
from ggpipe.display.occupancy import Occupancy
from ggpipe.display.panel import Space, generating_panel, loading_panel
from ggpipe.display.stream import Row, TextStream
from ggpipe.display.terminal import Terminal, launcher_environment, open_terminal
from ggpipe.display.wording import harmless, human_bytes, human_rate, human_seconds, layer_range
from ggpipe.errors import UsageError
from ggpipe.runtime.stats import RankStats, RequestStats

TRICKY = "[bold]x[/bold] [/] :smile: \\[esc] https://x.y/ 1234 'quoted' None 漢字 👍🏽 👨‍👩‍👧 ❤️ e\u0301\n\n"


class Screen(io.StringIO):
    """A terminal with all its scrollback: understands what Rich sends, and nothing else."""

    _TOKEN = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|(.)", re.DOTALL)

    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        self.width, self.height = width, height
        self.lines: list[list[str]] = [[]]  # a row's cells; "" is the second cell of a wide character
        self.wrapped: list[bool] = [False]  # the row goes on in the next
        self.y = self.x = 0
        self.mark = ""  # has no width and no character before it
        self.cursor_shown = True
        self.raw = ""

    def write(self, text: str) -> int:
        self.raw += text
        for private, number, letter, character in self._TOKEN.findall(text):
            if letter:
                self._control(private, int(number or 1) if number.isdigit() or not number else 0, letter)
            else:
                self._character(character)
        return len(text)

    def _control(self, private: str, number: int, letter: str) -> None:
        if private:
            assert letter in "hl"
            assert number in (25, 2026)
            if number == 25:
                self.cursor_shown = letter == "h"
        elif letter == "A":
            self.y = max(self.y - number, len(self.lines) - self.height, 0)
        elif letter == "K":
            self.lines[self.y], self.wrapped[self.y] = [], False
        else:
            assert letter == "m"

    def _character(self, character: str) -> None:
        assert character in "\n\r" or ord(character) >= 0x20
        assert not 0x7F <= ord(character) < 0xA0
        if character == "\r":
            self.x, self.mark = 0, ""
        elif character == "\n":
            self.lines[self.y] += [self.mark] if self.mark else []
            self._down()
        else:
            cells = get_character_cell_size(character)
            if self.x + cells > self.width:
                self.wrapped[self.y] = True
                self._down()
            row = self.lines[self.y]
            row += [" "] * (self.x - len(row))
            if cells:
                row[self.x : self.x + cells] = [self.mark + character, *[""] * (cells - 1)]
                self.mark = ""
            elif self.x:
                row[self.x - 1] += character
            else:
                self.mark += character
            self.x += cells

    def _down(self) -> None:
        self.x, self.y, self.mark = 0, self.y + 1, ""
        if self.y == len(self.lines):
            self.lines.append([])
            self.wrapped.append(False)

    def resize(self, width: int, height: int) -> None:
        """Wrap rows anew, as most terminals do."""
        assert self.x > 0
        logical = list(self._logical())
        self.width, self.height = width, height
        self.lines, self.wrapped, self.x, self.y = [[]], [False], 0, 0
        for i, line in enumerate(logical):
            if i:
                self._down()
            for character in line:
                self._character(character)

    def _logical(self) -> Iterator[str]:
        assert not any(self.lines[self.y + 1 :]), "nothing is left below the cursor"
        line = ""
        for row, wrapped in zip(self.lines[: self.y + 1], self.wrapped, strict=False):
            line += "".join(row)
            if not wrapped:
                yield line
                line = ""

    @property
    def text(self) -> str:
        """All that was ever shown and is still there, in logical lines."""
        return "\n".join(self._logical())

    @property
    def shown(self) -> list[str]:
        """The rows on the screen."""
        return ["".join(row) for row in self.lines[-self.height :]]


@dataclass
class Rig:
    """A display without its thread: `frame` draws one, a tenth of a second later."""

    width: int = 80
    height: int = 24
    ranks: list[RankStats] = field(default_factory=lambda: two_ranks())
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.screen = Screen(self.width, self.height)
        self.console = Console(
            file=self.screen,
            force_terminal=True,
            force_interactive=True,
            color_system="256",
            width=self.width,
            height=self.height,
            _environ={"TERM": "xterm-256color"},
        )
        self.display = LiveDisplay(Terminal(self.console, True), self.ranks, clock=lambda: self.now)

    def frame(self) -> list[str]:
        self.now += 0.1
        self.display._guarded(self.display._frame)
        return self.screen.shown

    def resize(self, width: int, height: int) -> None:
        self.screen.resize(width, height)
        self.console.size = (width, height)


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoThread:
        def __init__(self, **_: object) -> None:
            pass

        def start(self) -> None:
            pass

        join = start

    monkeypatch.setattr(live.threading, "Thread", NoThread)


def two_ranks() -> list[RankStats]:
    first = RankStats(0, "node-a.example.org", (0, 8), (8, 16), load_bytes=4 * 10**9, resident_bytes=42 * 10**8)
    second = RankStats(1, "10.0.0.23", (8, 16), (4, 4), load_bytes=5 * 10**9, resident_bytes=52 * 10**8)
    return [first, second]


def finished_request() -> RequestStats:
    """100 prompt tokens in 2 s, then 5 tokens 0.25 s apart; both ranks worked for half of the 3 s."""
    stats = RequestStats(n_prompt=100, arrived=10.0, ended=13.0, finish="end of text", seed=42)
    stats.token_times = [12.0, 12.25, 12.5, 12.75, 13.0]
    for rank in (0, 1):
        stats.ranks.append(RankStats(rank, runs=6, compute_s=1.25, busy_s=1.5, sent_bytes=6 * 16400))
    return stats


# The text


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize(("width", "height"), [(100, 30), (60, 15), (20, 8), (20, 3), (7, 2)])
def test_screen_holds_exactly_prompt_and_text(width: int, height: int) -> None:
    rig = Rig(width, height)
    prompt, text = "Say [b]hi[/b] :wave:\nnow: ", (TRICKY + "long " * 100 + "\n") * 3 + "end"
    rig.display.request(RequestStats(n_prompt=3, arrived=rig.now))
    rig.display.prompt(prompt)
    for i in range(0, len(text), 7):
        rig.display.text(text[i : i + 7], "green" if i % 2 else None)
        rig.frame()
    rig.display.stop()
    assert rig.screen.text == prompt + text + "\n"
    assert rig.screen.cursor_shown
    assert rig.display.error is None


PIECES = st.lists(
    st.text(
        st.sampled_from("ab[]/:\\ \n\n漢👍é\u0301\u200d\ufe0f") | st.characters(exclude_categories=["C", "Z", "M"])
    ),
    max_size=30,
)


@pytest.mark.usefixtures("no_thread")
@given(PIECES, st.lists(st.booleans(), min_size=30, max_size=30), st.integers(2, 60), st.integers(2, 20))
@settings(deadline=None, max_examples=150)
def test_any_text_in_any_pieces_survives(pieces: list[str], frames: list[bool], width: int, height: int) -> None:
    rig = Rig(width, height)
    rig.display.request(RequestStats())
    for piece, frame in zip(pieces, frames, strict=False):
        rig.display.text(piece)
        if frame:
            rig.frame()
    rig.display.stop()
    assert rig.screen.text == ("".join(pieces) + "\n" if pieces else "")


def test_any_text_survives_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_FRAME_S", 0.0005)
    rig = Rig()
    text = (TRICKY + "word " * 30) * 40
    with rig.display as display:
        display.loading()
        display.request(RequestStats())
        for i in range(0, len(text), 5):
            display.text(text[i : i + 5])
    assert rig.screen.text == text + "\n"


@pytest.mark.usefixtures("no_thread")
def test_requests_follow_each_other() -> None:
    rig = Rig()
    for text in ("one", "two\n", ""):
        rig.display.request(RequestStats())
        rig.frame()
        rig.display.text(text)
        rig.frame()
        rig.display.stop()
        rig.display.stop()
    assert rig.screen.text == "one\ntwo\n\n\n"


@pytest.mark.usefixtures("no_thread")
def test_control_characters_are_harmless() -> None:
    rig = Rig()
    rig.display.request(RequestStats())
    rig.display.text("a\x1b[31mb\x1b]0;title\x07c\rd\x9b2Je\x00\x7f\ud800\tf")
    rig.frame()
    before = rig.screen.raw
    rig.display.stop()
    shown = "a␛[31mb␛]0;title␇c␍d�2Je␀␡�"
    assert shown in before
    assert f"{shown}\tf\n" in rig.screen.raw[len(before) :].replace("\t", "\t")


def test_tabs_keep_their_place() -> None:
    stream = TextStream()
    stream.feed("a\tb\n\tc\td")
    stream.take()
    assert "".join(s.text for s in stream.complete) == "a\tb\n"
    assert texts(stream.rows(20, 5)) == [" " * 8 + "c" + " " * 7 + "d"]
    assert texts(stream.rows(12, 5)) == [" " * 8 + "c   ", "d"]


def test_rows_break_at_the_edge_and_keep_the_tail() -> None:
    stream = TextStream()
    stream.feed("abcdefgh漢字ij")
    stream.take()
    assert texts(stream.rows(4, 9)) == ["abcd", "efgh", "漢字", "ij"]
    assert texts(stream.rows(5, 9)) == ["abcde", "fgh漢", "字ij"]
    assert texts(stream.rows(5, 1)) == ["字ij"]
    stream.feed("k\n")
    stream.take()
    assert texts(stream.rows(5, 9)) == [""]


@pytest.mark.usefixtures("no_thread")
def test_narrowing_leaves_nothing_behind() -> None:
    rig = Rig(100, 30)
    rig.display.request(RequestStats(n_prompt=5, arrived=rig.now))
    text = "x" * 250
    rig.display.text("first line\n" + text)
    rig.frame()
    for width, height in [(70, 30), (41, 25), (100, 30), (40, 20)]:
        rig.resize(width, height)
        rig.frame()
        assert rig.screen.text.count("rank 1") == 1
        assert rig.screen.text.count("x") == 250
    rig.display.stop()
    assert rig.screen.text == f"first line\n{text}\n"


@pytest.mark.usefixtures("no_thread")
def test_failing_to_draw_does_not_stop_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.display.request(RequestStats())
    rig.display.text("some [text]\nand ")
    rig.frame()
    monkeypatch.setattr(live, "generating_panel", lambda *_: 1 / 0)
    rig.display.text("more")
    rig.frame()
    rig.display.text(", still")
    rig.frame()
    rig.display.stop()
    assert isinstance(rig.display.error, ZeroDivisionError)
    assert rig.screen.text == "some [text]\nand more, still\n"
    assert rig.screen.cursor_shown


# The panel


def texts(rows: list[Row]) -> list[str]:
    return ["".join(segment.text for segment in row) for row in rows]


@pytest.mark.usefixtures("no_thread")
def test_loading_then_generating() -> None:
    rig = Rig(100, 30)
    rig.display.loading()
    rig.ranks[0].loaded_bytes, rig.ranks[1].loaded_bytes = 10**9, 5 * 10**9
    assert not any(rig.frame()), "a short load does not flash"
    rig.now += 1
    rows = rig.frame()
    assert rows[0] == "loading  6.0 GB of 9.0 GB"
    assert re.fullmatch(r"rank 0  node-a     layers  0-7  ━+╾?─+   1.0 GB /  4.0 GB   25 %", rows[1])
    assert re.fullmatch(r"rank 1  10.0.0.23  layers 8-15  ━+   5.0 GB /  5.0 GB  100 %", rows[2])
    stats = RequestStats(n_prompt=12, arrived=rig.now)
    rig.display.request(stats)
    rig.display.prompt("Once ")
    rig.frame()
    rig.ranks[0].busy_s += 0.05
    rows = rig.frame()
    assert rows[:2] == ["Once ", ""]
    assert re.fullmatch(r"rank 0  node-a     layers  0-7  ━+─+   50 %", rows[2])
    assert re.fullmatch(r"rank 1  10.0.0.23  layers 8-15  ─+    0 %", rows[3])
    assert rows[4] == "prompt    12 tokens  200 ms"
    stats.token_times = [rig.now + i / 4 for i in range(9)]
    rows = rig.frame()
    assert rows[4] == "generating     9 tokens  4.00 t/s  TTFT 200 ms  ITL 250 ms"
    rig.display.stop()
    assert rig.screen.text == "Once \n"


@pytest.mark.parametrize("n_ranks", [0, 1, 4, 60])
@pytest.mark.parametrize(("width", "height"), [(200, 50), (100, 30), (60, 15), (20, 5), (20, 2), (3, 1), (1, 0)])
def test_panels_fit(n_ranks: int, width: int, height: int) -> None:
    ranks = [RankStats(i, "host" * 9, (i, i + 1), load_bytes=10**12, loaded_bytes=10**11) for i in range(n_ranks)]
    stats = RequestStats(n_prompt=10**6, arrived=0.0)
    for ascii_only in (False, True):
        space = Space(width, height, ascii_only)
        loading = loading_panel(ranks, space)
        prompt = generating_panel(ranks, [0.5] * n_ranks, stats, 5000.0, space)
        stats.token_times = [float(i) for i in range(99)]
        generating = generating_panel(ranks, [0.5] * n_ranks, stats, 5000.0, space)
        for rows in map(texts, (loading, prompt, generating)):
            assert len(rows) <= height
            if width >= 20:
                assert all(len(row) < width for row in rows)
            assert not ascii_only or all(row.isascii() for row in rows)
    if n_ranks == 4 and height >= 15:
        assert sum("rank" in row for row in texts(generating)) == 4


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize(("width", "height"), [(80, 24), (20, 6), (20, 1), (3, 3)])
def test_region_stays_below_the_screens_height(width: int, height: int) -> None:
    rig = Rig(width, height, ranks=[RankStats(i) for i in range(9)])
    rig.display.loading()
    rig.now += 1
    rig.frame()
    assert len(rig.display._region.rows) < max(height, 2)
    rig.display.request(RequestStats())
    rig.display.text("x" * 5000)
    rig.frame()
    assert len(rig.display._region.rows) < max(height, 2)
    rig.display.stop()
    assert rig.screen.text == "x" * 5000 + "\n"


def test_occupancy_is_of_the_last_second() -> None:
    occupancy, rank = Occupancy(), RankStats(0)
    assert occupancy.sample([rank], 0.0) == [0.0]
    for i in range(1, 51):  # 5 s at a quarter
        rank.busy_s, rank.runs = rank.busy_s + 0.025, rank.runs + 1
        (share,) = occupancy.sample([rank], i / 10)
    assert share == pytest.approx(0.25)
    for i in range(51, 62):  # 1 s at full
        rank.busy_s, rank.runs = rank.busy_s + 0.1, rank.runs + 1
        (share,) = occupancy.sample([rank], i / 10)
    assert share == pytest.approx(1.0)


def test_occupancy_waits_for_long_runs() -> None:
    occupancy, rank = Occupancy(), RankStats(0)
    shares = []
    for i in range(100):  # a run of 1 s ends every 2 s
        if i % 20 == 0:
            rank.busy_s, rank.runs = rank.busy_s + 1, rank.runs + 1
        shares += occupancy.sample([rank], i / 10)
    assert all(0.3 <= share <= 0.8 for share in shares[70:])
    rank.busy_s = 0.0
    assert occupancy.sample([rank], 20.0) == [0.0]


# The terminal

SHOW = """
    import os, sys
    from ggpipe.display.terminal import open_terminal
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
    kept = {k: v for k, v in os.environ.items() if not re.match("GGPIPE_|OMPI_|PMI|NO_COLOR|TERM|TMUX|COL|LINES", k)}
    streams = {"tty": slave, "pipe": subprocess.PIPE, "null": subprocess.DEVNULL}
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=streams[stdout],
        stderr=streams[stderr],
        env={**kept, "TERM": "xterm-256color", **environment(os.ttyname(slave))},
        start_new_session=True,
        pass_fds=[write],
        timeout=60,
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


def by_launcher(tty: str) -> dict[str, str]:
    return {"GGPIPE_TTY": tty, "GGPIPE_STDOUT_TTY": "1", "GGPIPE_COLOR": "256", "OMPI_COMM_WORLD_RANK": "0"}


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
    found = run_show(tmp_path, stderr=stderr, environment=lambda _: {"GGPIPE_TTY": "/dev/nowhere"})
    assert found == Found(None, "", b"")


def test_terminal_of_our_launcher(tmp_path: Path) -> None:
    found = run_show(tmp_path, environment=by_launcher)
    assert found.terminal == [True, 77, 33, False, False]
    assert "\x1b[31m[x]" in found.drawn
    found = run_show(tmp_path, environment=lambda tty: {"GGPIPE_TTY": tty, "GGPIPE_COLOR": "none"})
    assert found.terminal == [False, 77, 33, True, False]
    elsewhere = run_show(tmp_path, environment=lambda tty: {**by_launcher(tty), "GGPIPE_TTY_HOST": "elsewhere"})
    assert elsewhere == Found(None, "", b"")


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
    found = run_show(tmp_path, color="on", environment=lambda _: {"GGPIPE_TTY": "", "NO_COLOR": "1"})
    assert found.terminal == [False, 80, 24, False, True]
    assert b"\x1b[31m[x]" in found.error


def test_launcher_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert launcher_environment()["GGPIPE_TTY"] == ""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (33, 77))
    monkeypatch.setenv("TERM", "xterm-256color")
    with os.fdopen(slave, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        environment = launcher_environment()
        assert environment["GGPIPE_TTY"] == os.ttyname(slave)
        assert (environment["GGPIPE_COLUMNS"], environment["GGPIPE_LINES"]) == ("77", "33")
        assert environment["GGPIPE_COLOR"] == "256"
        monkeypatch.setenv("NO_COLOR", "1")
        assert launcher_environment()["GGPIPE_COLOR"] == "none"
        monkeypatch.setattr(sys, "stdout", stderr)
        assert launcher_environment()["GGPIPE_STDOUT_TTY"] == "1"
    os.close(master)


def test_a_terminal_that_goes_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    monkeypatch.setenv("GGPIPE_TTY", os.ttyname(slave))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("GGPIPE_TTY_HOST", raising=False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    terminal = open_terminal()
    assert terminal is not None
    with LiveDisplay(terminal, two_ranks()) as display:
        display.request(RequestStats())
        display.text("text\n")
        os.close(slave)
        os.close(master)
        display.text("more\n")
        display.stop()
        assert display.error is None
    terminal.close()


# The summary


def test_summary_has_the_numbers() -> None:
    ranks = two_ranks()
    ranks[0].load_s, ranks[1].load_s = 1.5, 3.125
    out = io.StringIO()
    Console(file=out, width=120).print(summary.summary_table(finished_request(), ranks, 99.0, 120))
    rows = [re.split(r" {2,}", row.strip()) for row in out.getvalue().splitlines() if row.strip()]
    assert rows[0] == ["prompt", "100 tokens", "prefill", "50.0 t/s", "TTFT", "2.00 s", "load", "3.12 s"]
    assert rows[1] == ["answer", "5 tokens", "decode", "4.00 t/s", "ITL p50", "250 ms", "ITL p99", "250 ms"]
    assert rows[2] == ["ended", "end of text", "seed", "42"]
    assert rows[3] == ["rank", "host", "layers", "threads", "compute", "waiting", "busy", "sent/run", "sent", "memory"]
    work = ["1.25 s", "1.50 s", "50 %", "16.4 kB", "98.4 kB"]
    assert rows[4] == ["0", "node-a.example.org", "0-7", "8/16", *work, "4.2 GB"]
    assert rows[5] == ["1", "10.0.0.23", "8-15", "4", *work, "5.2 GB"]


def test_summary_of_nothing() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(summary.summary_table(RequestStats(arrived=5.0), two_ranks(), 5.0))
    Console(file=out, width=100).print(summary.summary_table(RequestStats(), [], 5.0))
    assert "ITL p50   -" in out.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_summary_fits(width: int) -> None:
    out = io.StringIO()
    table = summary.summary_table(finished_request(), two_ranks(), 99.0, width)
    Console(file=out, width=width).print(table)
    assert "…" not in out.getvalue()
    assert "50 %" in out.getvalue()
    assert all(len(row) <= width for row in out.getvalue().splitlines())


def test_summary_without_a_terminal_is_plain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    summary.print_summary(None, finished_request(), two_ranks(), 99.0)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.isascii()
    assert "\x1b" not in err
    assert "decode    4.00 t/s" in err
    assert all(row == row.rstrip() and len(row) <= 100 for row in err.splitlines())


def test_summary_on_the_terminal() -> None:
    rig = Rig(100, 30)
    summary.print_summary(Terminal(rig.console, True), finished_request(), two_ranks(), 99.0)
    assert "\x1b[" in rig.screen.raw
    assert "node-a.example.org" in rig.screen.text


def test_csv_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    summary.append_csv(path, finished_request())
    summary.append_csv(path, RequestStats())
    first, second = ([float(x) for x in line.split(",")] for line in path.read_text().splitlines())
    assert first == [50.0, 4.0, 0.25, 2.0]
    assert len(second) == 4
    assert all(math.isnan(x) for x in second)


def test_json_has_everything(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    ranks = two_ranks()
    ranks[1].load_s = 3.0
    summary.write_json(path, finished_request(), ranks, {"model": Path("m.gguf"), "seed": "ours wins"})
    read = json.loads(path.read_text())
    assert read["model"] == "m.gguf"
    assert (read["seed"], read["finish"], read["n_prompt_tokens"], read["n_generated_tokens"]) == (
        42,
        "end of text",
        100,
        5,
    )
    assert read["token_times_s"] == [2.0, 2.25, 2.5, 2.75, 3.0]
    assert (read["ttft_s"], read["itl_p50_s"], read["itl_mean_s"], read["decode_s"]) == (2.0, 0.25, 0.25, 1.0)
    assert (read["prefill_tokens_per_s"], read["decode_tokens_per_s"], read["load_s"]) == (50.0, 4.0, 3.0)
    assert read["elapsed_s"] == 3.0
    assert read["ranks"][1] == {
        "rank": 1,
        "host": "10.0.0.23",
        "layers": [8, 16],
        "threads": [4, 4],
        "load_bytes": 5 * 10**9,
        "load_s": 3.0,
        "resident_bytes": 52 * 10**8,
        "runs": 6,
        "compute_s": 1.25,
        "busy_s": 1.5,
        "sent_bytes": 98400,
    }
    summary.write_json(path, RequestStats(), [], None)
    assert json.loads(path.read_text())["ttft_s"] is None


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    summary.check_writable(tmp_path / "new.csv")
    summary.check_writable(Path(os.devnull))
    missing = tmp_path / "no" / "such.csv"
    for path in (missing, tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match="cannot write to"):
            summary.check_writable(path)
    assert not (tmp_path / "new.csv").exists()
    with pytest.raises(UsageError, match="No such file"):
        summary.append_csv(missing, finished_request())
    with pytest.raises(UsageError, match="No such file"):
        summary.write_json(missing, finished_request(), [], {})


# Words


def test_words() -> None:
    assert [human_bytes(n) for n in (0, 999, 1000, 16400, 99949, 99950, 999499, 999500, 38.2e9, 5e15)] == (
        ["0 B", "999 B", "1.0 kB", "16.4 kB", "99.9 kB", "100 kB", "999 kB", "1.0 MB", "38.2 GB", "5000 TB"]
    )
    assert [human_seconds(s) for s in (None, 0, 0.0043, 0.231, 0.9996, 3.2, 31.25, 312)] == (
        ["-", "0 ms", "4.3 ms", "231 ms", "1.00 s", "3.20 s", "31.2 s", "312 s"]
    )
    assert [human_rate(r) for r in (None, 4.312, 43.12, 431.2)] == ["-", "4.31 t/s", "43.1 t/s", "431 t/s"]
    assert [layer_range(r) for r in ((0, 0), (3, 4), (0, 8))] == ["-", "3", "0-7"]
    assert harmless("a\tb\n\x1bc\u2028d") == "a\tb\n␛c\u2028d"
