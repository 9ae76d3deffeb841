"""What a model is asked, before it is made into tokens: text, tokens, or a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ggpipe.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """What is wanted of a model that has tools."""

    must_call: bool = False
    name: str | None = None
    """The only tool that it may call; None: any."""
    parallel: bool = True
    """Whether the model may call several tools in one answer."""

    def to_openai(self) -> Any:
        """`tool_choice` in OpenAI's API."""
        if self.name is not None:
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.must_call else "auto"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, the last of which is to be answered. All values are JSON's."""

    messages: tuple[dict[str, Any], ...]
    """As in OpenAI's API: `role`, `content`, and what else the template knows."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the model may call, as in OpenAI's API."""
    choice: ToolChoice = field(default_factory=ToolChoice)
    """Whether it must."""
    template: str | None = None
    """In the Jinja language; None: the model's own, or ChatML where it has none."""
    further: Mapping[str, Any] = field(default_factory=dict)
    """Further names for the template, such as `enable_thinking`."""
    add_generation_prompt: bool = True
    """Whether what prompts the model to answer comes after the messages."""

    def check(self) -> None:
        """Raises UsageError for messages that no template can read."""
        for i, message in enumerate(self.messages):
            calls = message.get("tool_calls") or ()
            if not (isinstance(calls, list | tuple) and all(map(_is_call, calls))):
                why = "must be a list of calls, each with a `function` that has a `name`"
                raise UsageError(f"`messages[{i}].tool_calls` {why}, and an id that is a text")
            for name in ("role", "tool_call_id", "name", "reasoning_content"):
                if not isinstance(message.get(name), str | None):
                    raise UsageError(f"`messages[{i}].{name}` must be a text")
            if not isinstance(message.get("content") or "", str | list | tuple):
                raise UsageError(f"`messages[{i}].content` must be a text, or a list of parts")
        if self.begun is not None and not isinstance(self.begun.get("content") or "", str):
            raise UsageError("an answer that is to be gone on with must be a text")

    @property
    def begun(self) -> dict[str, Any] | None:
        """The last message, where it is the model's own: an answer to be gone on with. None: it is to be answered."""
        last = self.messages[-1] if len(self.messages) > 1 else {}
        return last if last.get("role") == "assistant" and not last.get("tool_calls") else None


RequestPrompt = bytes | tuple[int | bytes, ...] | Conversation
"""A string in UTF-8 (or the bytes that the user gave); tokens, mixed with strings; or a conversation."""


def as_prompt(given: str | Iterable[int | str] | Conversation) -> RequestPrompt:
    """A prompt as users of Python give it. Bytes that are not UTF-8 are surrogates in strings. Raises UsageError for
    other surrogates."""
    match given:
        case str():
            return _as_bytes(given)
        case Conversation():
            return given
    return tuple(_as_bytes(part) if isinstance(part, str) else part for part in given)


def _as_bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeError as e:
        raise UsageError(f"the request cannot be passed on to the model: {e}") from e


def _is_call(call: object) -> bool:
    """A call of a tool, as in OpenAI's API."""
    if not isinstance(call, Mapping) or not isinstance(call.get("id"), str | None):
        return False
    function = call.get("function")
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)
