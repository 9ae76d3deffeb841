"""Calls in an answer, told apart from its text while both are written."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ggpipe.text.chat.reasoning import begun
from ggpipe.text.chat.tools.events import AnswerEvent, Arguments, CallBegun, CallEnded, Text, joined
from ggpipe.text.chat.tools.forms import CALL_SYNTAXES, Form, call_id
from ggpipe.text.chat.tools.reading import NotACall, Reads, read_calls

_NAME = re.compile(r"[\w.:/-]{1,256}")


class _At(enum.Enum):
    """Where the text is."""

    START = "where the answer begins"
    TEXT = "in the text"
    CALL = "in a call"
    BEHIND = "behind a call"


class ToolParser:
    """Takes an answer bit by bit, wherever it is cut. What does not parse stays text; blanks around calls are left
    out."""

    def __init__(self, form: Form, tools: Sequence[Mapping[str, Any]], key: str) -> None:
        """`tools`: OpenAI's. `key`: ids are made of it, and no other answer's is the same."""
        layout = CALL_SYNTAXES[form]
        self._marks = (*filter(None, (layout.mark,)), *layout.further_marks, *layout.starts)
        self._starts = layout.starts
        self._is_marked = bool(layout.mark)
        self._closers = layout.closers
        self._calls = _Calls(form, tools, key, self._is_marked)
        self._at = _At.START
        self._held = ""
        """Not looked at yet, or the beginning of a mark, or the blanks before one."""
        self._reader: Reads[None] | None = None
        self._raw = ""
        """Of what is being read: since the last call in it ended, with its mark and the blanks before that."""
        self._n_given_up = 0
        """Of `_raw`, what is text for certain if it is no call."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """What is known now of all text so far and was not returned before."""
        return self._parse(text, is_end=False)

    def finish(self) -> list[AnswerEvent]:
        """The rest; nothing follows."""
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
        """Where a call may stand without a mark. Returns whether the text can be looked at further."""
        text = self._held.lstrip()
        is_behind = self._at is _At.BEHIND
        if is_behind:
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
        """Read a call behind blanks and a mark."""
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
            self._leave(held[at + 1 :], _At.BEHIND)
        except (NotACall, ValueError):
            self._give_up(events, held[begun:], at - begun)
        else:
            self._raw, self._held = self._raw + ("" if self._calls.is_open else held[begun:]), ""
            if is_end:
                self._give_up(events, "", 0)
        events += self._calls.take()
        return self._at is not _At.CALL

    def _give_up(self, events: list[AnswerEvent], held: str, n_read: int) -> None:
        """It is no call, or it is cut off or broken in its arguments."""
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


class _Calls:
    """Calls that were read, as events."""

    def __init__(self, form: Form, tools: Sequence[Mapping[str, Any]], key: str, is_marked: bool) -> None:
        self._form, self._key, self._is_marked = form, key, is_marked
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._events: list[AnswerEvent] = []
        self._n_begun = 0
        self._has_ended = False
        self.is_open = False
        """A call has begun and has not ended."""

    def check(self, name: str) -> None:
        if name not in self._tools and not (self._is_marked and _NAME.fullmatch(name)):
            raise NotACall

    def begin(self, name: str) -> None:
        self.check(name)
        self._events.append(CallBegun(self._n_begun, call_id(self._form, self._key, self._n_begun), name))
        self._n_begun += 1
        self.is_open = True

    def write(self, text: str) -> None:
        self._events.append(Arguments(self._n_begun - 1, text))

    def end(self) -> None:
        self._events.append(CallEnded(self._n_begun - 1))
        self.is_open, self._has_ended = False, True

    def ends(self) -> bool:
        """Whether a call has ended since the last time."""
        has_ended, self._has_ended = self._has_ended, False
        return has_ended

    def without_arguments(self) -> str:
        if not self._is_marked:
            raise NotACall  # JSON that has a name in it
        return "{}"

    def properties(self, name: str) -> Mapping[str, Any]:
        found = (self._tools.get(name, {}).get("parameters") or {}).get("properties")
        return found if isinstance(found, Mapping) else {}

    def take(self) -> list[AnswerEvent]:
        """All since the last time."""
        events, self._events = self._events, []
        return joined(events)
