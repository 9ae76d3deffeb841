"""From the parts of an output to the objects of an API that answers with lists: of items, or of content blocks."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from ggpipe.core.request import Token
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.tools import events

ApiEvent = dict[str, Any]
"""Of the API's stream."""


class Failure(Protocol):
    """Why a request failed."""

    status: int
    message: str
    param: str | None

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The error in Anthropic's API."""


class Writer(abc.ABC):
    """One response. Each method that takes a part of the output returns the events that it makes. They must be consumed
    before the next call."""

    def __init__(self) -> None:
        self._items: list[dict[str, Any]] = []
        """The last one is open while `_is_open`."""
        self._is_open = False
        self._n_tokens = 0
        self._has_answer = False
        self._n_reasoning = 0
        """Tokens generated before the answer began, if the model reasoned."""

    def add(self, parts: Sequence[events.AnswerEvent], tokens: Sequence[Token]) -> Iterator[ApiEvent]:
        """The next parts, which came with these tokens."""
        self._n_tokens += len(tokens)
        self._has_answer = self._has_answer or any(isinstance(part, events.Text | events.CallBegun) for part in parts)
        if not self._has_answer and any(isinstance(part, events.Reasoning) for part in parts):
            self._n_reasoning = self._n_tokens
        for part in parts:
            match part:
                case events.Text(text):
                    yield from self._text(text, tokens)
                    tokens = ()
                case events.Reasoning(text):
                    yield from self._reasoning(text)
                case events.CallBegun(_, identity, name):
                    yield from self._close()
                    yield from self._begin_call(identity, name)
                case events.Arguments(_, text):
                    yield from self._arguments(text)
                case events.CallEnded():
                    yield from self._close()

    def _is(self, kind: str) -> bool:
        """The open item is of this kind."""
        return self._is_open and bool(self._items[-1]["type"] == kind)

    @property
    @abc.abstractmethod
    def whole(self) -> dict[str, Any]:
        """The response so far; complete after `end`."""

    @abc.abstractmethod
    def begin(self, stats: RequestStats) -> Iterable[ApiEvent]:
        """Before the output."""

    @abc.abstractmethod
    def progress(self, prompt_progress: dict[str, Any]) -> Iterable[ApiEvent]:
        """While the prompt is processed. `prompt_progress`: as in llama-server."""

    @abc.abstractmethod
    def end(self, stats: RequestStats, stop_string: str = "") -> Iterable[ApiEvent]:
        """The output has ended. `stop_string`: the one that ended it, if one has."""

    @abc.abstractmethod
    def fail(self, error: Failure) -> Iterable[ApiEvent]:
        """The output ends with an error."""

    @abc.abstractmethod
    def _text(self, text: str, tokens: Sequence[Token]) -> Iterable[ApiEvent]:
        """Text of the answer."""

    @abc.abstractmethod
    def _reasoning(self, text: str) -> Iterable[ApiEvent]:
        """Text of the reasoning."""

    @abc.abstractmethod
    def _begin_call(self, identity: str, name: str) -> Iterable[ApiEvent]:
        """The model calls a tool."""

    @abc.abstractmethod
    def _arguments(self, text: str) -> Iterable[ApiEvent]:
        """The next part of the call's arguments."""

    @abc.abstractmethod
    def _close(self) -> Iterable[ApiEvent]:
        """The open item, if there is one, is complete or cut off."""
