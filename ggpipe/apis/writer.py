"""From parts of outputs to the objects of a reply: one writer per reply, whatever its API."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

from ggpipe.core.request import Token
from ggpipe.core.request_spec import RequestSpec
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.answer import AnswerFormat, AnswerParser
from ggpipe.text.chat.tools.events import (
    AnswerEvent,
    Arguments,
    CallBegun,
    CallEnded,
    Reasoning,
    Text,
    joined,
)

ApiEvent = dict[str, Any]
"""One event of an API's stream."""


class Failure(Protocol):
    """Why a request failed."""

    status: int
    message: str
    param: str | None

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's API."""

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The error in Anthropic's API."""


class WrittenOutput(Protocol):
    """An output, whole or as far as it has come."""

    @property
    def prompt(self) -> int:
        """Index of its prompt in the request."""

    @property
    def stats(self) -> RequestStats:
        """What was measured."""

    @property
    def tokens(self) -> Sequence[Token]:
        """Its tokens."""

    @property
    def rest(self) -> str:
        """Text after the last token's."""

    @property
    def marks(self) -> AnswerFormat | None:
        """How reasoning and tool calls are marked; None unless the output answers a conversation."""

    @property
    def key(self) -> str:
        """Prefix of the ids of tool calls."""


class Output(WrittenOutput, Protocol):
    """An output of the server."""

    @property
    def index(self) -> int:
        """Index of the completion in the HTTP request."""

    @property
    def spec(self) -> RequestSpec:
        """The request to the engine."""


class OutputParser:
    """Separates reasoning, text and tool calls while the tokens of an output arrive."""

    def __init__(self, output: WrittenOutput, splits: bool) -> None:
        """`splits`: reasoning is separated from the text."""
        self._marks = output.marks
        self._parser = AnswerParser(output.marks, output.key, splits) if output.marks is not None else None

    def feed(self, tokens: Sequence[Token]) -> list[AnswerEvent]:
        """The next parts."""
        if self._marks is None or self._parser is None:
            return joined([Text("".join(token.text for token in tokens))])
        return self._parser.feed("".join(self._marks.text_of(token.id, token.text) for token in tokens))

    def finish(self, rest: str) -> list[AnswerEvent]:
        """The last parts. `rest`: text after the last token's."""
        return joined([Text(rest)] if self._parser is None else [*self._parser.feed(rest), *self._parser.finish()])


class Writer(abc.ABC):
    """Makes the objects of one reply, whole or streamed.

    Methods that take a part of an output return the events of the stream. Consume them before the next call: events
    share objects that later parts change.
    """

    has_event_names: ClassVar[bool] = False
    """Each event of the stream is named after its `type`."""
    ends_with_done: ClassVar[bool] = False
    """The last line of the stream is `[DONE]`."""
    names_stop_string: ClassVar[bool] = True
    """`end` uses the stop string."""
    by_token = True
    """Each part has one token, even if several arrive together."""

    def __init__(self, splits: bool) -> None:
        """`splits`: reasoning is separated from the text."""
        self.splits = splits

    def begin(self, output: Output) -> Iterable[ApiEvent]:
        """The first events of an output."""
        return ()

    def progress(self, output: Output, prompt_progress: dict[str, Any]) -> Iterable[ApiEvent]:
        """While the prompt is processed. `prompt_progress`: as in llama-server."""
        return ()

    @abc.abstractmethod
    def add(self, output: Output, parts: Sequence[AnswerEvent], tokens: Sequence[Token]) -> Iterable[ApiEvent]:
        """The next parts of an output, and the tokens that they arrived with."""

    @abc.abstractmethod
    def end(self, output: Output, stop_string: str = "") -> Iterable[ApiEvent]:
        """An output has ended. `stop_string`: the one that ended it; empty if none did."""

    def finish(self, outputs: Sequence[Output]) -> Iterable[ApiEvent]:
        """All outputs have ended."""
        return ()

    def fail(self, error: Failure) -> Iterable[ApiEvent]:
        """The reply ends with an error."""
        return (error.body,)

    @abc.abstractmethod
    def whole(self, outputs: Sequence[Output], stop_strings: Sequence[str]) -> dict[str, Any] | list[dict[str, Any]]:
        """The reply, once all outputs have ended. `stop_strings`: one per output, as for `end`."""


class ItemWriter(Writer):
    """A reply with one output, which becomes a list of items or content blocks."""

    has_event_names = True

    def __init__(self, splits: bool) -> None:
        super().__init__(splits)
        self._items: list[dict[str, Any]] = []
        """The last one is open while `_is_open`."""
        self._is_open = False
        self._n_tokens = 0
        self._has_answer = False
        self._n_reasoning = 0
        """Tokens generated before the answer began, if the model reasoned."""

    def add(self, output: WrittenOutput, parts: Sequence[AnswerEvent], tokens: Sequence[Token]) -> Iterator[ApiEvent]:
        self._n_tokens += len(tokens)
        self._has_answer = self._has_answer or any(isinstance(part, Text | CallBegun) for part in parts)
        if not self._has_answer and any(isinstance(part, Reasoning) for part in parts):
            self._n_reasoning = self._n_tokens
        for part in parts:
            match part:
                case Text(text):
                    yield from self._text(text, tokens)
                    tokens = ()
                case Reasoning(text):
                    yield from self._reasoning(text)
                case CallBegun(_, identity, name):
                    yield from self._close()
                    yield from self._begin_call(identity, name)
                case Arguments(_, text):
                    yield from self._arguments(text)
                case CallEnded():
                    yield from self._close()

    @abc.abstractmethod
    def end(self, output: WrittenOutput, stop_string: str = "") -> Iterable[ApiEvent]: ...

    def whole(self, outputs: Sequence[WrittenOutput], stop_strings: Sequence[str] = ("",)) -> dict[str, Any]:
        (output,), (stop_string,) = outputs, stop_strings
        parser = OutputParser(output, self.splits)
        for token in output.tokens:
            list(self.add(output, parser.feed([token]), [token]))
        list(self.add(output, parser.finish(output.rest), ()))
        list(self.end(output, stop_string))
        return self.reply

    @property
    @abc.abstractmethod
    def reply(self) -> dict[str, Any]:
        """The reply so far; complete after `end`."""

    def _is(self, kind: str) -> bool:
        """Whether an item of this kind is open."""
        return self._is_open and bool(self._items[-1]["type"] == kind)

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
