"""Streamed Markdown. Each block is formatted as soon as it is complete, and never changes afterwards.

Later text cannot change a complete block, so the terminal's scrollback has the formatted text. The lines of an
incomplete block are shown as they come.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown
from rich.segment import Segment

from ggpipe.display.format import harmless
from ggpipe.display.live.stream import ScreenRow, TextStream, wrapped

_MOST_COLUMNS = 100
"""Maximum width of formatted text: longer lines are hard to read."""


class MarkdownStream(TextStream):
    """A `TextStream` that formats Markdown. `plain` text is not formatted, and forms separate paragraphs."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._parser = MarkdownIt().enable("strikethrough").enable("table")  # as in rich.markdown
        self._lines: list[ScreenRow] = [[]]
        """Lines of the incomplete block, or the unfinished line of plain text."""
        self._n_parsed = 0
        """How many complete lines of them were parsed."""
        self._is_plain = False
        self._is_any_printed = False
        self._is_ended = False

    def end(self) -> None:
        self._is_ended = True

    def take(self) -> None:
        while self._fed:
            text, style, is_plain = self._fed.popleft()
            if is_plain != self._is_plain:
                self._close()
                self._is_plain = is_plain
            first, *others = harmless(text).split("\n")
            self._lines[-1].append(Segment(first, style))
            self._lines += [[Segment(other, style)] for other in others]
            if self._is_plain:
                self._print_plain(len(self._lines) - 1)
        if not self._is_plain and len(self._lines) - 1 > self._n_parsed:
            self._print_blocks()
        if self._is_ended:
            self._close()

    def rest(self) -> list[Segment]:
        return [*self.complete, *_joined(self._lines)]

    def rows(self, width: int, n_rows: int) -> list[ScreenRow]:
        n_rows = max(n_rows, 1)
        rows: collections.deque[ScreenRow] = collections.deque()
        for line in reversed(self._lines):
            rows.extendleft(reversed(wrapped(line, width)))
            if len(rows) >= n_rows:
                break
        else:
            if self._is_any_printed and not self._is_plain and any(_text(line) for line in self._lines):
                rows.appendleft([])
        return list(rows)[-n_rows:]

    def _print_plain(self, n_lines: int) -> None:
        """Print the first lines, unformatted."""
        done, self._lines = self._lines[:n_lines], self._lines[n_lines:]
        for line in done:
            self.complete += [*line, Segment("\n")]
            self._is_any_printed = self._is_any_printed or bool(_text(line))

    def _print_blocks(self) -> None:
        """Print all blocks except the last, which may continue."""
        whole = [_text(line) for line in self._lines[:-1]]
        *_, last = self._lay_out(whole)
        self._lines, self._n_parsed = self._lines[last:], len(whole) - last

    def _close(self) -> None:
        """Print the remaining text. Nothing may be added after that."""
        if self._is_plain:
            self._print_plain(len(self._lines) if _text(self._lines[-1]) else 0)
        else:
            self._lay_out([*map(_text, self._lines)], all_blocks=True)
        self._lines, self._n_parsed = [[]], 0

    def _lay_out(self, lines: list[str], all_blocks: bool = False) -> list[int]:
        """Format and print all blocks, or all except the last. Returns the first line of each, at least [0]."""
        tokens = self._parser.parse("\n".join(lines))
        begins = [token.map[0] for token in tokens if token.level == 0 and token.nesting >= 0 and token.map]
        ends = [*begins[1:], len(lines)] if all_blocks else begins[1:]
        for begin, end in zip(begins, ends, strict=False):
            if self._is_any_printed:
                self.complete.append(Segment("\n"))
            for row in self._laid_out("\n".join(lines[begin:end])):
                self.complete += [*row, Segment("\n")]
            self._is_any_printed = True
        return begins or [0]

    def _laid_out(self, text: str) -> list[ScreenRow]:
        """A block's rows, without empty ones at the start and the end."""
        options = self._console.options.update(width=min(self._console.width, _MOST_COLUMNS))
        shown = _Markdown(text)
        rows = [_trimmed(row) for row in self._console.render_lines(shown, options, pad=False)]
        full = [i for i, row in enumerate(rows) if row] or [0]
        return rows[full[0] : full[-1] + 1]


class _Heading(Heading):
    """A heading that is not centred."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text.copy()
        text.justify = "left"
        yield text


class _Markdown(Markdown):
    elements: ClassVar = {**Markdown.elements, "heading_open": _Heading}

    def __init__(self, text: str) -> None:
        super().__init__(text, code_theme="ansi_dark", hyperlinks=False)
        for token in self.parsed:
            for inner in token.children or ():
                if inner.type == "softbreak":  # models mean their line breaks
                    inner.type = "hardbreak"


def _trimmed(row: ScreenRow) -> ScreenRow:
    """The row without trailing spaces, which would be copied with the text."""
    row = [*row]
    while row:
        text, style, _ = row.pop()
        if text.rstrip():
            return [*row, Segment(text.rstrip(), style)]
    return row


def _joined(lines: Iterable[ScreenRow]) -> list[Segment]:
    joined: list[Segment] = []
    for line in lines:
        joined += [*line, Segment("\n")]
    return joined[:-1]


def _text(line: ScreenRow) -> str:
    return "".join(segment.text for segment in line)
