"""From the parts of an answer to the objects of an API whose answers are lists: of items, or of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from ggpipe.core.request import Token
from ggpipe.text.chat.tools import events

ApiEvent = dict[str, Any]
"""Of the API's stream."""


class Writer(Protocol):
    """Makes an API's objects of an answer's parts."""

    def reasoning(self, text: str) -> Iterable[ApiEvent]:
        """The model thinks."""

    def text(self, text: str, tokens: Sequence[Token] = ()) -> Iterable[ApiEvent]:
        """The model answers."""

    def begin_call(self, identity: str, name: str) -> Iterable[ApiEvent]:
        """The model calls a tool."""

    def arguments(self, text: str) -> Iterable[ApiEvent]:
        """The next part of the call's arguments."""

    def end_call(self) -> Iterable[ApiEvent]:
        """All of them have come."""


class Writing:
    """An answer on its way to a writer."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._n_tokens = 0
        self._has_answer = False
        self.n_reasoning = 0
        """Tokens that were written before the answer began, where the model thought."""

    def add(self, parts: Sequence[events.AnswerEvent], tokens: Sequence[Token]) -> Iterator[ApiEvent]:
        """What the writer makes of the next parts, which came with these tokens."""
        self._n_tokens += len(tokens)
        self._has_answer = self._has_answer or any(isinstance(part, events.Text | events.CallBegun) for part in parts)
        if not self._has_answer and any(isinstance(part, events.Reasoning) for part in parts):
            self.n_reasoning = self._n_tokens
        for part in parts:
            match part:
                case events.Text(text):
                    yield from self._writer.text(text, tokens)
                    tokens = ()
                case events.Reasoning(text):
                    yield from self._writer.reasoning(text)
                case events.CallBegun(_, identity, name):
                    yield from self._writer.begin_call(identity, name)
                case events.Arguments(_, text):
                    yield from self._writer.arguments(text)
                case events.CallEnded():
                    yield from self._writer.end_call()
