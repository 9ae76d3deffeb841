"""What is said to a model, before its template makes a text of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ggpipe.chat.answer import AnswerFormat
from ggpipe.chat.tools.choice import ToolChoice
from ggpipe.errors import BodyError, UsageError
from ggpipe.sampling import ReasoningMarks, SamplingConfig

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For models whose file has no template."""


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


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as a model reads it."""

    tokens: tuple[int, ...]
    """Up to where the model's answer begins."""
    answer: AnswerFormat
    """How the model marks reasoning in its answer, and calls tools."""
    text: str = ""
    """What the template wrote."""
    grammar: str = ""
    """What holds the model to calls that can be read, in GBNF; empty: nothing."""
    must_call: bool = False
    """The answer must be a call."""

    def grammar_beside(self, own: str) -> str:
        """The grammar for the answer. `own`: the user's, which comes first. Raises BodyError where it forbids what
        `tool_choice` demands."""
        if own and self.must_call:
            why = "demands a call, which `grammar` or a JSON schema forbids: give one of them"
            raise BodyError(f"`tool_choice` {why}", "tool_choice")
        return own or self.grammar

    def held(self, sampling: SamplingConfig) -> SamplingConfig:
        """Settings with the grammar for the answer, and the marks that a budget needs. Raises as `grammar_beside`."""
        grammar = self.grammar_beside(sampling.grammar)
        if sampling.reasoning_budget >= 0:
            marks = self.answer.reasoning
            own = ReasoningMarks(begins=marks.begins, ends=marks.ends, is_open=marks.is_open)
            sampling = replace(sampling, reasoning_marks=own)
        return sampling if grammar == sampling.grammar else replace(sampling, grammar=grammar)


def _is_call(call: object) -> bool:
    """A call of a tool, as in OpenAI's API."""
    if not isinstance(call, Mapping) or not isinstance(call.get("id"), str | None):
        return False
    function = call.get("function")
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)
