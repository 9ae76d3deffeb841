"""A terminal to draw on, and numbers to show there."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import structs
from rich.cells import get_character_cell_size
from rich.console import Console

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.messages import RunRecord, Span
from ggpipe.core.request import Counters, Finish
from ggpipe.display.live.live import LiveDisplay
from ggpipe.display.live.stream import ScreenRow
from ggpipe.display.live.terminal import Terminal
from ggpipe.stats.records import RankStats, RequestStats


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
    is_loading: bool = False

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
        self.display = LiveDisplay(
            Terminal(console=self.console, stdout_shared=True),
            self.ranks,
            is_loading=lambda: self.is_loading,
            clock=lambda: self.now,
        )

    def frame(self) -> list[str]:
        self.now += 0.1
        self.display._guarded(self.display._frame)
        return self.screen.shown

    def resize(self, width: int, height: int) -> None:
        self.screen.resize(width, height)
        self.console.size = (width, height)


def two_ranks() -> list[RankStats]:
    first = RankStats(
        rank=0,
        model=0,
        host="node-a.example.org",
        layers=(0, 8),
        threads=(8, 16),
        load_bytes=4 * 10**9,
        resident_bytes=42 * 10**8,
    )
    second = RankStats(
        rank=1,
        model=0,
        host="10.0.0.23",
        layers=(8, 16),
        threads=(4, 4),
        load_bytes=5 * 10**9,
        resident_bytes=52 * 10**8,
    )
    return [first, second]


def finished_request() -> RequestStats:
    """100 prompt tokens in 2 s, then 5 tokens 0.25 s apart; both ranks worked for half of the 3 s."""
    stats = RequestStats(n_prompt=100, arrived=10.0, ended=13.0, finish=Finish.END_OF_TEXT, seed=42)
    stats.token_times = [12.0, 12.25, 12.5, 12.75, 13.0]
    for rank in (0, 1):
        stats.ranks.append(RankStats(rank=rank, runs=6, compute_s=1.25, busy_s=1.5, sent_bytes=6 * 16400))
    return stats


def speculating_ranks() -> list[RankStats]:
    """The two, the second's clock 100 s behind, and a draft in the head's process."""
    first, second = two_ranks()
    second.clock_offset_s = 100.0
    return [first, second, RankStats(rank=0, model=1, host="node-a.example.org", layers=(0, 4), threads=(8, 8))]


def speculated_request() -> RequestStats:
    """A second of speculation: a prompt, a run with a rejected draft token, a cancelled run, a lone token."""
    counters = Counters(6, 5, 2, 2, speculative_runs=2, verified_runs=1, cancelled_runs=1, rejected_rows={2: 1})
    runs = [
        _record(1, 100, 0, (10.1, 0.08, 0.1, 1000), (-89.78, 0.1, 0.12, 0)),
        _record(2, 4, 3, (10.2, 0.08, 0.1, 40), (-89.65, 0.1, 0.1, 0)),
        _record(3, 2, 2, (10.3, 0.05, 0.1, 20), (-89.55, 0.0, 0.001, 0), cancelled=True),
        _record(4, 1, 0, (10.5, 0.1, 0.1, 10), (-89.38, 0.1, 0.1, 0)),
    ]
    draft_runs = [
        _record(1, 100, 0, (10.05, 0.04, 0.05, 0)),
        _record(2, 2, 2, (10.2, 0.02, 0.02, 0), cancelled=True),
    ]
    stats = RequestStats(
        n_prompt=100,
        arrived=10.0,
        token_times=[10.35, 10.46, 10.47, 10.75],
        ended=11.0,
        finish=Finish.LENGTH,
        ranks=[RankStats(rank=0), RankStats(rank=1), RankStats(rank=0, model=1)],
        runs=runs,
        draft_runs=[structs.replace(run, model=1) for run in draft_runs],
        drafted_by=[(), ("draft",), ("draft",), ()],
        speculation=SpeculationConfig(n_draft=3),
        counters=counters,
    )
    for run in runs:
        for span in run.spans:
            stats.ranks[span.rank].add(span)
    for run in stats.draft_runs:
        stats.ranks[2].add(run.spans[0])
    return stats


def _record(
    run: int, n_rows: int, n_draft_tokens: int, *spans: tuple[float, float, float, int], cancelled: bool = False
) -> RunRecord:
    """A run of one request. Of each rank in turn: when it began, seconds of computing and of all work, bytes sent."""
    return RunRecord(
        request=1,
        id=run,
        n_rows=n_rows,
        n_run_rows=n_rows,
        n_draft_tokens=n_draft_tokens,
        cancelled=cancelled,
        spans=tuple(
            Span(
                rank=rank,
                start_s=start_s,
                compute_s=compute_s,
                busy_s=busy_s,
                sent_bytes=sent_bytes,
                n_rows=0 if cancelled else n_rows,
            )
            for rank, (start_s, compute_s, busy_s, sent_bytes) in enumerate(spans)
        ),
    )


def texts(rows: list[ScreenRow]) -> list[str]:
    return ["".join(segment.text for segment in row) for row in rows]
