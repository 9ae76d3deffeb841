"""What a chat template can take, found by rendering short conversations, and messages in a form that it can.

The adaptations are llama-server's, so that both render the same prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ggpipe.errors import UsageError
from ggpipe.text.chat.transcript import ChatMessage, text_of

_MARK, _THOUGHT = "Where is the castle?", "It was on a hill."
_USER = {"role": "user", "content": _MARK}


class TemplateSupport:
    """What one template can take."""

    def __init__(self, source: str, render: Callable[..., str], names: Mapping[str, object]) -> None:
        """`source`: of the template. `render`: `ChatTemplate.render`. `names`: variables for it."""
        self._source = source
        self._render = functools.partial(self._rendered, render, names)
        self._found: dict[str, bool] = {}

    @functools.cached_property
    def thinks(self) -> bool:
        """The default of `enable_thinking`: whether the template shows reasoning, or lets the model begin with it."""
        on, off = (self._render([_USER], enable_thinking=value) for value in (True, False))
        if on == off or _generation_prompt(on) != _generation_prompt(off):
            return True
        reasoned = {"role": "assistant", "content": "There.", "reasoning_content": _THOUGHT}
        return _THOUGHT in self._render([_USER, reasoned], enable_thinking=True)

    def adapted(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """The messages in a form that the template can take."""
        found = [self._with_reasoning(message) for message in messages]
        if (
            found
            and found[0].get("role") == "system"
            and not self._takes("system", {"role": "system", "content": _MARK})
        ):
            found = _merged(found)
        if any(isinstance(message.get("content"), str) for message in found) and not self._takes("text", _USER):
            parts = {**_USER, "content": _parts(_MARK)}
            if self._takes("parts", parts):
                found = [_in_parts(message) for message in found]
        return found

    def _with_reasoning(self, message: ChatMessage) -> ChatMessage:
        """The message with its reasoning where the template looks for it."""
        reasoning = message.get("reasoning_content")
        if not reasoning:
            return message
        if "[SYSTEM_PROMPT]" in self._source and "[THINK]" in self._source:
            content = [{"type": "thinking", "thinking": reasoning}, *_parts(text_of(message))]
            return {name: item for name, item in message.items() if name != "reasoning_content"} | {"content": content}
        if "message.thinking" not in self._source:
            return message
        hidden = ("content",) if "<|channel|>" in self._source and message.get("tool_calls") else ()  # gpt-oss's
        return {name: item for name, item in message.items() if name not in hidden} | {"thinking": reasoning}

    def _takes(self, what: str, message: ChatMessage) -> bool:
        """Whether the content of a message is in the output. `what`: of the message, for which this is remembered."""
        if what not in self._found:
            question = [] if message["role"] == "user" else [{"role": "user", "content": "?"}]
            self._found[what] = _MARK in self._render([message, *question])
        return self._found[what]

    @staticmethod
    def _rendered(
        render: Callable[..., str], names: Mapping[str, object], messages: Sequence[ChatMessage], **further: object
    ) -> str:
        try:
            return render(messages, **names, **further)
        except UsageError:
            return ""


def _merged(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The system message as the beginning of the message after it."""
    system, *rest = messages
    if not rest:
        return []
    return [{**rest[0], "content": f"{text_of(system)}\n{text_of(rest[0])}"}, *rest[1:]]


def _in_parts(message: ChatMessage) -> ChatMessage:
    content = message.get("content")
    return {**message, "content": _parts(content)} if isinstance(content, str) else message


def _generation_prompt(rendered: str) -> str:
    """What follows the question."""
    return rendered.rpartition(_MARK)[2]


def _parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]
