"""Settings that make a conversation of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ggpipe.core.prompt import Conversation
from ggpipe.errors import Setting, SettingError, UsageError, Wording
from ggpipe.text.chat.conversation import CHATML
from ggpipe.text.chat.tools.choice import tool_choice


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """How a prompt becomes a conversation with a model that was trained for it."""

    single_turn: bool = False
    """The prompt is a user's message."""
    system: str | None = None
    """The message in front of it, of the system."""
    template: str | None = None
    template_file: Path | None = None
    template_kwargs: dict[str, Any] | None = None
    """Further names for the template."""

    def __post_init__(self) -> None:
        if self.single_turn:
            return
        for name, given in (
            ("system", self.system), ("chat_template", self.template), ("chat_template_file", self.template_file),
            ("chat_template_kwargs", self.template_kwargs),
        ):  # fmt: skip
            if given is not None:
                raise SettingError(name, "is for a user's message", Wording("add ", Setting("single_turn")))

    def conversation(self, prompt: str) -> Conversation | None:
        """What the user says to the model; None: the prompt is a text to continue."""
        if not self.single_turn:
            return None
        texts = [("system", self.system)] if self.system is not None else []
        return self.of_messages([{"role": role, "content": text} for role, text in (*texts, ("user", _utf8(prompt)))])

    def of_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        choice: Any = None,
        parallel: bool | None = None,
    ) -> Conversation:
        """A conversation whose messages and tools are as in OpenAI's API; `choice` and `parallel` are `tool_choice` and
        `parallel_tool_calls` there. Raises SettingError, UsageError."""
        for one in (*messages, *tools):
            if not isinstance(one, Mapping):
                raise UsageError(f"messages and tools must be objects, as in OpenAI's API, got {one!r}")
        checked, wanted = tool_choice(tools, choice, parallel)
        return self.completed(Conversation(messages=tuple(map(dict, messages)), tools=checked, choice=wanted))

    def completed(self, conversation: Conversation) -> Conversation:
        """With the template, and with further names that it does not have itself. Raises SettingError, UsageError."""
        further = {**(self.template_kwargs or {}), **conversation.further}
        return replace(conversation, template=self.source, further=further)

    @property
    def source(self) -> str | None:
        """The template instead of the model's own; None where there is none. Raises SettingError, UsageError."""
        template = self.template
        if self.template_file is not None:
            if template is not None:
                raise UsageError("give one chat template: a text with ", Setting("chat_template"), ", or a file")
            try:
                template = self.template_file.read_text("utf-8")
            except (OSError, UnicodeError) as e:
                why = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
                raise SettingError("chat_template_file", f"{self.template_file}: cannot read it: {why}") from e
        if template == "chatml":
            return CHATML
        if template is not None and "{%" not in template and "{{" not in template:
            raise SettingError("chat_template", "must be chatml or a template in the Jinja language")
        return template


def _utf8(text: str) -> str:
    """A text without the bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def json_object(text: str) -> dict[str, Any]:
    """An object in JSON. Raises ValueError with what to write instead."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError('give an object in JSON, as in {"enable_thinking": false}')
    return value
