"""Separates tool calls from the text of an answer while the model generates both."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from ggpipe.text.chat.reasoning import begun
from ggpipe.text.chat.tools.calls import Calls, NotACall
from ggpipe.text.chat.tools.characters import Reads
from ggpipe.text.chat.tools.events import AnswerEvent, Text, joined
from ggpipe.text.chat.tools.forms import CALL_SYNTAXES, Form
from ggpipe.text.chat.tools.reading import read_calls


class _At(enum.Enum):
    """What the parser has reached."""

    START = "the beginning of the answer"
    TEXT = "text"
    CALL = "a call"
    AFTER = "the end of a call"


class ToolParser:
    """Parses an answer in pieces of any length. What does not parse stays text; whitespace around calls is dropped."""

    def __init__(self, form: Form, tools: Sequence[Mapping[str, Any]], key: str) -> None:
        """`tools`: in the format of OpenAI's API. `key`: unique to the answer; ids of calls are derived from it."""
        layout = CALL_SYNTAXES[form]
        self._marks = (*filter(None, (layout.mark,)), *layout.further_marks, *layout.starts)
        self._starts = layout.starts
        self._is_marked = bool(layout.mark)
        self._closers = layout.closers
        self._calls = Calls(form, tools, key, self._is_marked)
        self._at = _At.START
        self._held = ""
        """Text not examined yet, a possible beginning of a mark, or whitespace before one."""
        self._reader: Reads[None] | None = None
        self._raw = ""
        """What was read since the last call ended, including the mark and the whitespace before the mark."""
        self._n_given_up = 0
        """How many characters of `_raw` are certainly text if it turns out not to be a call."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """Parse more of the answer. Returns the events that are certain by now."""
        return self._parse(text, is_end=False)

    def finish(self) -> list[AnswerEvent]:
        """Return the remaining events of an answer that has ended."""
        return self._parse("", is_end=True)

    def _parse(self, text: str, is_end: bool) -> list[AnswerEvent]:
        self._held += text
        events: list[AnswerEvent] = []
        is_going_on = True
        while is_going_on:
            match self._at:
                case _At.CALL:
                    is_going_on = self._call(events, is_end)
                case _At.TEXT:
                    is_going_on = self._text(events, is_end)
                case _:
                    is_going_on = self._gap(events, is_end)
        return joined(events)

    def _gap(self, events: list[AnswerEvent], is_end: bool) -> bool:
        """Parse where a call may begin without a mark. Returns whether parsing can continue."""
        text = self._held.lstrip()
        if self._at is _At.AFTER:
            self._held = text
            closer = next((closer for closer in self._closers if text.startswith(closer)), None)
            if closer is not None:
                self._held = text[len(closer) :]
                return True
            if text and not is_end and any(closer.startswith(text) for closer in self._closers):
                return False
        if not text and not is_end:
            return False
        if text[:1] in ("{", "[") and not self._is_marked:
            self._begin(len(self._held) - len(text), 0, 1)
        else:
            self._at = _At.TEXT
        return True

    def _text(self, events: list[AnswerEvent], is_end: bool) -> bool:
        found = [(at, mark) for mark in self._marks if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            text = self._held[:at].rstrip()
            events.append(Text(text))
            self._held = self._held[len(text) :]
            self._begin(at - len(text), 0 if mark in self._starts else len(mark), len(mark))
            return True
        n = 0 if is_end else max((begun(mark, self._held) for mark in self._marks), default=0)
        known = self._held[: len(self._held) - n]
        known = known if is_end else known.rstrip()
        events.append(Text(known))
        self._held = self._held[len(known) :]
        return False

    def _begin(self, n_blank: int, n_mark: int, n_given_up: int) -> None:
        """Begin to read a call, after whitespace and its mark."""
        self._at, self._reader = _At.CALL, read_calls(self._calls)
        next(self._reader)
        self._raw, self._held = self._held[: n_blank + n_mark], self._held[n_blank + n_mark :]
        self._n_given_up = n_blank + n_given_up

    def _call(self, events: list[AnswerEvent], is_end: bool) -> bool:
        assert self._reader is not None
        held, begun, at = self._held, 0, 0  # `begun`: since the last call ended
        try:
            for at, character in enumerate(held):
                self._reader.send(character)
                if self._calls.ends():
                    self._raw, self._n_given_up, begun = "", 0, at + 1
        except StopIteration:
            self._calls.ends()
            self._leave(held[at + 1 :], _At.AFTER)
        except (NotACall, ValueError):
            self._give_up(events, held[begun:], at - begun)
        else:
            self._raw, self._held = self._raw + ("" if self._calls.is_open else held[begun:]), ""
            if is_end:
                self._give_up(events, "", 0)
        events += self._calls.take()
        return self._at is not _At.CALL

    def _give_up(self, events: list[AnswerEvent], held: str, n_read: int) -> None:
        """Leave what is not a call, or a call whose arguments are cut off or malformed."""
        events += self._calls.take()
        if self._calls.is_open:
            self._calls.end()
            self._calls.ends()
            self._leave(held[n_read:], _At.TEXT)
        else:
            raw, n = self._raw + held, self._n_given_up
            events.append(Text(raw[:n]))
            self._leave(raw[n:], _At.TEXT)

    def _leave(self, rest: str, at: _At) -> None:
        self._held, self._at, self._reader, self._raw = rest, at, None, ""
