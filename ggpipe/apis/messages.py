"""Bodies of Anthropic's `/v1/messages`: blocks of content, which become a conversation as OpenAI's API has it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ggpipe.apis.bodies import ChatBody, GenerationBody, text_of
from ggpipe.config.checks import MAX_TOKENS
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prompt import Conversation
from ggpipe.errors import BodyError

_USUAL_TOKENS = 4096
_BILLING = re.compile(r"^(x-anthropic-billing-header:[^\n]*\bcch=)[0-9a-f]+(?=;)")
"""Some clients begin the system's text with a number that changes with each request. No prefix would be found in the
cache."""


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model is to think before it answers."""

    type: str
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """What the text must be."""

    format: dict[str, Any] | None = None


class CountBody(GenerationBody, kw_only=True):
    """`/v1/messages/count_tokens`."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def prompts(self) -> Sequence[Conversation]:
        if not self.messages:
            raise BodyError("`messages` is empty: give a message or more", "messages")
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            system = _BILLING.sub(r"\g<1>0", _text(self.system, "system"))
            messages.append({"role": "system", "content": system})
        for i, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{i}]")
        further = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            further.setdefault("enable_thinking", self.thinking.type != "disabled")
        tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ()) if "input_schema" in tool]
        single = (self.tool_choice or {}).get("disable_parallel_tool_use") is True
        return ChatBody(
            messages=messages, tools=tools, tool_choice=_choice(self.tool_choice), parallel_tool_calls=not single,
            chat_template_kwargs=further,
        ).prompts  # fmt: skip


class MessagesBody(CountBody, kw_only=True):
    """`/v1/messages`."""

    stop_sequences: list[str] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """Its older name for `output_config.format`."""

    def __post_init__(self) -> None:
        if self.stop is None:
            self.stop = self.stop_sequences

    def most_tokens(self, usual: int) -> int:
        """As without Anthropic's rule that `max_tokens` must be there: a body without it has the bound of the server,
        or llama-server's for such bodies."""
        return super().most_tokens(usual if usual >= 0 else _USUAL_TOKENS)

    def sampling(self, usual: SamplingConfig) -> SamplingConfig:
        """As without `thinking`; with its budget."""
        drawn, thinking = super().sampling(usual), self.thinking
        if thinking is None or thinking.type != "enabled" or thinking.budget_tokens is None:
            return drawn
        if not 0 <= thinking.budget_tokens <= MAX_TOKENS:
            raise BodyError("`thinking.budget_tokens` must be a number of tokens", "thinking.budget_tokens")
        return replace(drawn, reasoning_budget=thinking.budget_tokens)

    def check(self) -> None:
        """Raises BodyError for what no request can have."""
        super().check()
        if self.n_choices != 1:
            raise BodyError("`n` must be 1 here", "n")

    @property
    def schema_field(self) -> str:
        return super().schema_field if self._form is None else "output_config.format"

    def schema(self) -> Any:
        match self._form:
            case None:
                return super().schema()
            case {"type": "json_schema", "schema": dict() as schema}:
                return schema
        raise BodyError("`output_config.format` must have the type json_schema, and a schema", "output_config.format")

    @property
    def _form(self) -> dict[str, Any] | None:
        return self.output_format if self.output_config is None else self.output_config.format


def _messages(message: dict[str, Any], at: str) -> Iterator[dict[str, Any]]:
    """A message, or what its blocks become: results of tools are messages of their own, in front of what the user says
    to them. Raises BodyError."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise BodyError(f"`{at}.role` must be user or assistant", f"{at}.role")
    if not isinstance(content, list):
        yield {"role": role, "content": _text(content, f"{at}.content")}
        return
    texts, thoughts = [], []
    own: dict[str, Any] = {"role": role}
    for i, block in enumerate(content):
        here = f"{at}.content[{i}]"
        match block:
            case {"type": "text", "text": str() as text}:
                texts.append(text)
            case {"type": "thinking", "thinking": str() as text}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": str() as identity, "name": str() as name, "input": dict() as given}:
                call = {"id": identity, "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
                own.setdefault("tool_calls", []).append(call)
            case {"type": "tool_result", "tool_use_id": str() as identity}:
                result = _text(block.get("content") or "", f"{here}.content")
                yield {"role": "tool", "tool_call_id": identity, "content": result}
            case _:
                raise BodyError(
                    f"`{here}` must be text, thinking, tool_use with an input, or tool_result: the model reads nothing "
                    "else", here,
                )  # fmt: skip
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    if texts or len(own) > 1:
        yield {**own, "content": "\n".join(texts)}


def _text(content: Any, at: str) -> str:
    return text_of(content, at, ("text",), "blocks")


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    """A tool as OpenAI's API has it. (Those without a schema are Anthropic's own.)"""
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if not isinstance(function["name"], str) or not isinstance(function["parameters"], dict):
        raise BodyError(f"`{at}` must have a name and an input_schema", at)
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any] | None) -> Any:
    """`tool_choice` as OpenAI's API has it."""
    match choice:
        case None | {"type": "auto"}:
            return None
        case {"type": "none"}:
            return "none"
        case {"type": "any"}:
            return "required"
        case {"type": "tool", "name": str() as name}:
            return {"type": "function", "function": {"name": name}}
    raise BodyError("`tool_choice` must have the type auto, any, none, or tool with a name", "tool_choice")
