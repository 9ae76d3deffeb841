"""Settings that turn a prompt into a conversation."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ggpipe.core.prompt import Conversation
from ggpipe.errors import Setting, SettingError, UsageError, Wording
from ggpipe.options.text_file import read_text
from ggpipe.text.chat.built_in import BUILT_IN_TEMPLATES
from ggpipe.text.chat.conversation import CHATML
from ggpipe.text.chat.tools.choice import tool_choice

ReasoningSwitch = Literal["on", "off", "auto"]


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """How to turn a prompt into a conversation."""

    single_turn: bool = False
    """The prompt is a user message."""
    system: str | None = None
    """The system message before the user's."""
    template: str | None = None
    template_file: Path | None = None
    template_kwargs: dict[str, Any] | None = None
    """Additional variables for the template."""
    reasoning: ReasoningSwitch = "auto"
    """Whether the model reasons before it answers: what templates call `enable_thinking`."""

    def __post_init__(self) -> None:
        if self.single_turn:
            return
        for name, given in (
            ("system", self.system), ("chat_template", self.template), ("chat_template_file", self.template_file),
            ("chat_template_kwargs", self.template_kwargs),
            ("reasoning", None if self.reasoning == "auto" else self.reasoning),
        ):  # fmt: skip
            if given is not None:
                raise SettingError(name, "needs a user message as the prompt", Wording("add ", Setting("single_turn")))

    def conversation(self, prompt: str) -> Conversation | None:
        """The conversation that the prompt starts, or None if the model is to continue the prompt."""
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
        """A conversation of messages and tools in the form of OpenAI's API. `choice` and `parallel` are its
        `tool_choice` and `parallel_tool_calls`. Raises SettingError, UsageError."""
        for one in (*messages, *tools):
            if not isinstance(one, Mapping):
                raise UsageError(f"messages and tools must be objects, as in OpenAI's API, got {one!r}")
        checked, wanted = tool_choice(tools, choice, parallel)
        return self.completed(Conversation(messages=tuple(map(dict, messages)), tools=checked, choice=wanted))

    def completed(self, conversation: Conversation) -> Conversation:
        """The conversation with the template, and with additional variables that it does not set itself. Raises
        SettingError, UsageError."""
        usual = {} if self.reasoning == "auto" else {"enable_thinking": self.reasoning == "on"}
        further = {**usual, **(self.template_kwargs or {}), **conversation.further}
        return replace(conversation, template=self.source, further=further)

    def check_template(self) -> None:
        """Check the template before a model is loaded. Raises SettingError, UsageError."""
        source = self.source
        if source is not None and source not in BUILT_IN_TEMPLATES:
            from ggpipe.text.chat.template_process import check_template  # only needed with a template

            check_template(source)

    @property
    def source(self) -> str | None:
        """The template to use, or None for the model's own. Raises SettingError, UsageError."""
        template = self.template
        if self.template_file is not None:
            if template is not None:
                raise UsageError(
                    "give either ", Setting("chat_template"), " or ", Setting("chat_template_file"), ", not both"
                )
            template = read_text("chat_template_file", self.template_file)
        if template == "chatml":
            return CHATML
        if template is None or template in BUILT_IN_TEMPLATES or "{%" in template or "{{" in template:
            return template
        similar = difflib.get_close_matches(template, BUILT_IN_TEMPLATES, 3) or ["chatml", "llama3"]
        raise SettingError(
            "chat_template", f"must be in Jinja, or a name that llama.cpp knows, such as {' or '.join(similar)}"
        )


def _utf8(text: str) -> str:
    """The text with replacement characters for bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError that says what to write instead."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError('write a JSON object, such as {"enable_thinking": false}')
    return value
