"""Separates a model's answer into reasoning, text and tool calls while the model generates it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ggpipe.text.chat.reasoning import ReasoningFormat, ReasoningParser, reasoning_format
from ggpipe.text.chat.tools.events import AnswerEvent, Arguments, CallBegun, Reasoning, Text, joined
from ggpipe.text.chat.tools.forms import CALL_SYNTAXES, Form, form_of
from ggpipe.text.chat.tools.parser import ToolParser

if TYPE_CHECKING:  # --help does not need the modules of a request
    from ggpipe.core.request import Token


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """How a model marks reasoning and tool calls in its answers."""

    reasoning: ReasoningFormat
    form: Form = Form.JSON
    """The format of tool calls."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the model may call, as in OpenAI's API. If there are none, what looks like a call is text."""
    token_texts: Mapping[int, str] = field(default_factory=dict)
    """Text of the special tokens that are part of a mark, by token id. Other special tokens have no text."""

    def text_of(self, token: int, text: str) -> str:
        """The text to parse for a token. `text`: what the decoder returned for it."""
        return text + self.token_texts.get(token, "")


def answer_format(
    template: str,
    generation_prompt: str,
    special_tokens: Mapping[str, int] | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> AnswerFormat:
    """The format in which a model was trained to answer.

    `template`, `generation_prompt`: as for `reasoning_format`. `special_tokens`: ids of the tokens that the decoder
    returns no text for, by name. `tools`: in the format of OpenAI's API.
    """
    reasoning, form = reasoning_format(template, generation_prompt), form_of(template)
    marks = [*reasoning.marks]
    if tools:
        layout = CALL_SYNTAXES[form]
        marks += [layout.mark, layout.before, *layout.further_marks, *layout.starts, *layout.closers, "[CALL_ID]"]
        marks += [layout.after, layout.end]
        marks += [layout.tags.before, layout.tags.after] if layout.tags is not None else []
    texts = {token: text for text, token in (special_tokens or {}).items() if any(text in mark for mark in marks)}
    return AnswerFormat(reasoning=reasoning, form=form, tools=tuple(tools), token_texts=texts)


class AnswerParser:
    """Parses an answer, in pieces of any length, into events. Marks are dropped."""

    def __init__(self, form: AnswerFormat, key: str, splits: bool = True) -> None:
        """`key`: unique to the answer; ids of calls are derived from it. `splits`: separate reasoning from text."""
        self._reasoning = ReasoningParser(form.reasoning) if splits else None
        self._tools = ToolParser(form.form, form.tools, key) if form.tools else None

    def feed(self, text: str) -> list[AnswerEvent]:
        """Parse more of the answer. Returns the events that are certain by now."""
        if self._reasoning is None:
            return self._answer(text)
        events: list[AnswerEvent] = []
        for piece in self._reasoning.feed(text):
            events += [Reasoning(piece.text)] if piece.is_reasoning else self._answer(piece.text)
        return joined(events)

    def finish(self) -> list[AnswerEvent]:
        """Return the remaining events of an answer that has ended."""
        events: list[AnswerEvent] = []
        for piece in self._reasoning.finish() if self._reasoning is not None else ():
            events += [Reasoning(piece.text)] if piece.is_reasoning else self._answer(piece.text)
        if self._tools is not None:
            events += self._tools.finish()
        return joined(events)

    def _answer(self, text: str) -> list[AnswerEvent]:
        return joined([Text(text)]) if self._tools is None else self._tools.feed(text)


@dataclass(kw_only=True)
class ToolCall:
    """A tool that the model calls."""

    id: str
    name: str
    arguments: str
    """In JSON, incomplete if the output was cut off."""

    def to_openai(self) -> dict[str, Any]:
        """The call as an object of OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class WholeAnswer:
    """The parts of an answer, or of its beginning while it is generated."""

    def __init__(self, events: Iterable[AnswerEvent] = ()) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls: list[ToolCall] = []
        self.add(events)

    def add(self, events: Iterable[AnswerEvent]) -> None:
        """Append what the events contain."""
        for event in events:
            match event:
                case Text(text):
                    self.text += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegun(_, identity, name):
                    self.calls.append(ToolCall(id=identity, name=name, arguments=""))
                case Arguments(_, text):
                    self.calls[-1].arguments += text

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of OpenAI's API, with `reasoning_content`."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text or (None if self.calls else "")}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [call.to_openai() for call in self.calls]
        return found


def whole_answer(
    form: AnswerFormat | None, key: str, tokens: Iterable[Token], rest: str = "", splits: bool = True
) -> WholeAnswer:
    """The parts of an output.

    `form`: None if the output is not an answer in a conversation. `key`, `splits`: as for `AnswerParser`. `rest`: text
    after the last token.
    """
    if form is None:
        return WholeAnswer([Text("".join(token.text for token in tokens) + rest)])
    parser = AnswerParser(form, key, splits)
    text = "".join(form.text_of(token.id, token.text) for token in tokens) + rest
    return WholeAnswer([*parser.feed(text), *parser.finish()])
