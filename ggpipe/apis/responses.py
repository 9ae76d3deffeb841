"""Bodies of `/v1/responses`: items and instructions, which become a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ggpipe.apis.bodies import ChatBody, GenerationBody, text_of
from ggpipe.config.checks import MAX_TOKENS
from ggpipe.core.prompt import Conversation
from ggpipe.errors import BodyError

RESPONSES = "/v1/responses"
_WITH_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text", "refusal")


class TextOptions(msgspec.Struct, kw_only=True):
    """What the text must be."""

    format: dict[str, Any] | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How much a model is to think."""

    effort: str | None = None


class ResponsesBody(GenerationBody, kw_only=True):
    """`/v1/responses`."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None

    def check(self) -> None:
        """Raises BodyError for what no request can have, and for what is not done here."""
        super().check()
        if self.n_choices != 1:
            raise BodyError("`n` must be 1 here", "n")
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name):
                raise BodyError(f"`{name}` is not supported: no responses are kept; send the whole conversation", name)
        if self.background:
            raise BodyError("`background` is not supported: leave it out", "background")

    def most_tokens(self, usual: int) -> int:
        if self.max_output_tokens is None:
            return super().most_tokens(usual)
        if self.max_output_tokens < 1:
            raise BodyError(
                f"`max_output_tokens` must be a number of tokens, got {self.max_output_tokens}", "max_output_tokens"
            )
        return min(self.max_output_tokens, MAX_TOKENS)

    def most_probs(self) -> int | None:
        if _WITH_LOGPROBS not in (self.include or ()):
            return None
        return max(0 if self.top_logprobs is None else self.number_of_probs("top_logprobs"), 1)

    @property
    def n_best_probs(self) -> int | None:
        return self.top_logprobs or 0

    @property
    def schema_field(self) -> str:
        return super().schema_field if self.text is None or self.text.format is None else "text.format"

    def schema(self) -> Any:
        form = None if self.text is None else self.text.format
        match form:
            case None | {"type": "text"}:
                return super().schema()
            case {"type": "json_object"}:
                return {}
            case {"type": "json_schema", "schema": dict() as schema}:
                return schema
        raise BodyError(
            "`text.format` must have the type text, json_object, or json_schema with a schema", "text.format"
        )

    @property
    def prompts(self) -> Sequence[Conversation]:
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += messages_of(self.input)
        if not self.input:
            raise BodyError("`input` is empty: give a text or items", "input")
        tools = [
            _tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ()) if tool.get("type") == "function"
        ]
        return ChatBody(
            messages=messages, tools=tools, tool_choice=self.tool_choice, parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        ).prompts  # fmt: skip


def messages_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as a conversation's messages: what the model thought, said and called before the user's next message is one
    message. Raises BodyError."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        at = f"input[{i}]"
        kind = item.get("type", "message")
        if kind == "message":
            role, content = item.get("role"), text_of(item.get("content"), f"{at}.content", _TEXTS)
            if role not in ("user", "system", "developer", "assistant"):
                raise BodyError(f"`{at}.role` must be user, assistant, system or developer", f"{at}.role")
            if role == "assistant":
                own = _of_model(messages)
                own["content"] = "\n".join(filter(None, (own["content"], content)))
            else:
                messages.append({"role": role, "content": content})
        elif kind == "function_call":
            name, arguments, identity = (_given(item, name, at) for name in ("name", "arguments", "call_id"))
            call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
            _of_model(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = text_of(item.get("output"), f"{at}.output", _TEXTS)
            messages.append({"role": "tool", "tool_call_id": _given(item, "call_id", at), "content": output})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            if parts:
                _of_model(messages)["reasoning_content"] = text_of(parts, f"{at}.content", ())
        else:
            raise BodyError(
                f"`{at}.type` must be message, function_call, function_call_output or reasoning, got {kind!r}",
                f"{at}.type",
            )
    return messages


def _of_model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's message at the end."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _given(item: dict[str, Any], name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BodyError(f"`{at}.{name}` must be a text", f"{at}.{name}")
    return value


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    """A function as chats have it."""
    _given(tool, "name", at)
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
