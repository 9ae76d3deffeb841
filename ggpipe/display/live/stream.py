"""Streamed text: its complete lines, and the rows of its unfinished line."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from rich.cells import get_character_cell_size
from rich.segment import Segment
from rich.style import Style

from ggpipe.display.format import harmless

ScreenRow = list[Segment]

_TAB = 8
_KEPT_ROWS = 200
_WIDENS = "\ufe0f"  # makes the character before it two cells wide, but not on all terminals


class TextStream:
    """Any thread may call `feed` and `end`; everything else belongs to the thread that draws."""

    def __init__(self) -> None:
        self._fed: collections.deque[tuple[str, Style | None, bool]] = collections.deque()
        self.complete: list[Segment] = []
        """Complete lines, with their newlines, that were not printed yet. The printer clears the list."""
        self.line: list[Segment] = []
        """The unfinished line after the complete ones."""
        self._wrap = _Wrap(80)
        self._was_plain = False

    def feed(self, text: str, style: Style | None = None, plain: bool = False) -> None:
        """Append text, without waiting. `plain`: separate it from other text, and do not format it."""
        self._fed.append((text, style, plain))

    def end(self) -> None:
        """Complete the text, without waiting."""
        self.feed("\n")

    def take(self) -> None:
        """Divide the text fed so far into complete lines and the unfinished one."""
        while self._fed:
            text, style, is_plain = self._fed.popleft()
            if text.strip():
                text = "\n\n" + text if self._was_plain and not is_plain else text
                self._was_plain = is_plain
            *ended, rest = harmless(text).split("\n")
            for part in ended:
                self.complete += [*self.line, Segment(part, style), Segment("\n")]
                self.line = []
                self._wrap = _Wrap(self._wrap.width)
            if rest:
                self.line.append(Segment(rest, style))
                self._wrap.add(rest, style)

    def rest(self) -> list[Segment]:
        """All text that was not printed yet."""
        return [*self.complete, *self.line]

    def rows(self, width: int, n_rows: int) -> list[ScreenRow]:
        """The unfinished line's last rows, at least one, on a screen that is `width` cells wide."""
        if width != self._wrap.width:
            self._wrap = _Wrap(width)
            for text, style, _ in self.line:
                self._wrap.add(text, style)
        return list(self._wrap.rows)[-max(n_rows, 1) :]


def wrapped(line: ScreenRow, width: int) -> list[ScreenRow]:
    """The last rows of a line, at least one, on a screen that is `width` cells wide."""
    wrap = _Wrap(width)
    for text, style, _ in line:
        wrap.add(text, style)
    return list(wrap.rows)


class _Wrap:
    """One line, wrapped as a terminal does it: at the right edge, after any character.

    If terminals disagree on a width (joined emoji), the larger one counts: a row may end early, but is never too long.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: collections.deque[ScreenRow] = collections.deque([[]], maxlen=_KEPT_ROWS)
        self._column = 0

    def add(self, text: str, style: Style | None) -> None:
        """Append text without newlines. Tabs become spaces, up to the right edge as on a terminal."""
        for i, part in enumerate(text.split("\t")):
            if i:
                spaces = max(min(_TAB - self._column % _TAB, self.width - self._column), 0)
                self._append(" " * spaces, style)
                self._column += spaces
            start = 0
            for end, cells in self._breaks(part):
                self._append(part[start:end], style)
                self._column += cells
                if end < len(part):
                    self._new_row()
                start = end

    def _breaks(self, text: str) -> Iterator[tuple[int, int]]:
        """The ends of rows within the text, and its own end: (index, cells since the end before)."""
        room = max(self.width - self._column, 0)
        if text.isascii():
            end = 0
            while len(text) - end > room:
                end += room
                yield end, room
                room = self.width
            yield len(text), len(text) - end
            return
        used = 0
        for i, character in enumerate(text):
            cells = 1 if character == _WIDENS else get_character_cell_size(character)
            if used + cells > room and (room < self.width or used):
                yield i, used
                room, used = self.width, 0
            used += cells
        yield len(text), used

    def _new_row(self) -> None:
        self.rows.append([])
        self._column = 0

    def _append(self, text: str, style: Style | None) -> None:
        row = self.rows[-1]
        if not text:
            return
        if row and row[-1].style is style:
            row[-1] = Segment(row[-1].text + text, style)
        else:
            row.append(Segment(text, style))
