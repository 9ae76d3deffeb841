"""Anthropic's `/v1/messages`: the body, which becomes a conversation in OpenAI's form, and the content blocks of the
reply."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from ggpipe.apis.bodies import GenerationBody, ResponseFormat, text_of
from ggpipe.apis.chat import ChatBody
from ggpipe.apis.replies import finish_reason, timings
from ggpipe.apis.writer import ApiEvent, Failure, ItemWriter, WrittenOutput
from ggpipe.config.checks import MAX_TOKENS
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prompt import Conversation
from ggpipe.core.request import Finish, Token
from ggpipe.errors import BodyError
from ggpipe.stats.records import RequestStats

_USUAL_TOKENS = 4096
_BILLING = re.compile(r"^(x-anthropic-billing-header:[^\n]*\bcch=)[0-9a-f]+(?=;)")
"""Some clients begin the system prompt with a number that changes with each request, which would defeat the prefix
cache."""
_BEGUN: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


class Thinking(msgspec.Struct, kw_only=True):
    """Whether and for how long the model reasons before it answers."""

    type: str
    budget_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """`output_config`."""

    format: ResponseFormat | None = None


class CountBody(GenerationBody, kw_only=True):
    """Body of `/v1/messages/count_tokens`."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def prompts(self) -> Sequence[Conversation]:
        if not self.messages:
            raise BodyError("`messages` is empty: give at least one message", "messages")
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
    """Body of `/v1/messages`."""

    stop_sequences: list[str] | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None
    """Anthropic's older name for `output_config.format`."""
    n: Literal[1] | None = None
    n_cmpl: Literal[1] | None = None

    def __post_init__(self) -> None:
        if self.stop is None:
            self.stop = self.stop_sequences

    def most_tokens(self, usual: int) -> int:
        """Tokens to generate at most. `max_tokens` may be omitted: then the server's limit applies, or else
        llama-server's for this API."""
        return super().most_tokens(usual if usual >= 0 else _USUAL_TOKENS)

    def sampling(self, usual: SamplingConfig) -> SamplingConfig:
        """The body's settings, with the budget of `thinking`."""
        drawn, thinking = super().sampling(usual), self.thinking
        if thinking is None or thinking.type != "enabled" or thinking.budget_tokens is None:
            return drawn
        return replace(drawn, reasoning_budget=thinking.budget_tokens)

    def _format(self) -> tuple[str, ResponseFormat | None]:
        form = self.output_format if self.output_config is None else self.output_config.format
        return super()._format() if form is None else ("output_config.format", form)


def _messages(message: dict[str, Any], at: str) -> Iterator[dict[str, Any]]:
    """A message in OpenAI's form. Tool results become separate messages before the user's text. Raises BodyError."""
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
                    f"`{here}` must be text, thinking, tool_use with an input, or tool_result: the model reads only "
                    "text", here,
                )  # fmt: skip
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    if texts or len(own) > 1:
        yield {**own, "content": "\n".join(texts)}


def _text(content: Any, at: str) -> str:
    return text_of(content, at, ("text",), "blocks")


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    """A tool in OpenAI's form. (Tools without a schema are Anthropic's own.)"""
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if not isinstance(function["name"], str) or not isinstance(function["parameters"], dict):
        raise BodyError(f"`{at}` must have a name and an input_schema", at)
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any] | None) -> Any:
    """`tool_choice` in OpenAI's form."""
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


class MessageWriter(ItemWriter):
    """A message, whose items are its content blocks."""

    def __init__(self, model: str, splits: bool) -> None:
        super().__init__(splits)
        self._json = ""
        """Arguments of the open call."""
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._items,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, output: WrittenOutput) -> Iterator[ApiEvent]:
        yield {"type": "message_start", "message": {**self._message, "usage": _usage(output.stats)}}

    def _reasoning(self, text: str) -> Iterator[ApiEvent]:
        yield from self._open_if_needed("thinking")
        self._items[-1]["thinking"] += text
        yield self._delta(type="thinking_delta", thinking=text)

    def _text(self, text: str, tokens: Sequence[Token]) -> Iterator[ApiEvent]:
        yield from self._open_if_needed("text")
        self._items[-1]["text"] += text
        yield self._delta(type="text_delta", text=text)

    def _begin_call(self, identity: str, name: str) -> Iterator[ApiEvent]:
        self._json = ""
        yield from self._open({"type": "tool_use", "id": identity, "name": name})

    def _arguments(self, text: str) -> Iterator[ApiEvent]:
        self._json += text
        yield self._delta(type="input_json_delta", partial_json=text)

    def end(self, output: WrittenOutput, stop_string: str = "") -> Iterator[ApiEvent]:
        stats = output.stats
        yield from self._close()
        calls = any(block["type"] == "tool_use" for block in self._items)
        if stats.finish is Finish.CONTEXT_FULL:
            reason = "model_context_window_exceeded"
        elif finish_reason(stats) == "length":
            reason = "max_tokens"
        elif calls:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if stats.finish is Finish.STOP_STRING else "end_turn"
        ending = {"stop_reason": reason, "stop_sequence": (reason == "stop_sequence" and stop_string) or None}
        self._message |= {**ending, "usage": _usage(stats)}
        yield {"type": "message_delta", "delta": ending, "usage": _usage(stats), "timings": timings(stats)}
        yield {"type": "message_stop"}

    def fail(self, error: Failure) -> Iterable[ApiEvent]:
        return (error.anthropic_body,)

    @property
    def reply(self) -> dict[str, Any]:
        return self._message

    def _delta(self, **delta: Any) -> ApiEvent:
        return {"type": "content_block_delta", "index": len(self._items) - 1, "delta": delta}

    def _open_if_needed(self, kind: str) -> Iterator[ApiEvent]:
        if not self._is(kind):
            yield from self._close()
            yield from self._open({"type": kind})

    def _open(self, block: dict[str, Any]) -> Iterator[ApiEvent]:
        self._items.append({**block, **_BEGUN[block["type"]]})
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._items) - 1, "content_block": self._items[-1]}

    def _close(self) -> Iterator[ApiEvent]:
        if not self._is_open:
            return
        block = self._items[-1]
        if block["type"] == "tool_use":
            with contextlib.suppress(ValueError, RecursionError):  # cut off, or nested too deep
                block["input"] = json.loads(self._json)
        elif block["type"] == "thinking":  # clients expect a signature
            yield self._delta(type="signature_delta", signature="")
        self._is_open = False
        yield {"type": "content_block_stop", "index": len(self._items) - 1}


def _usage(stats: RequestStats) -> dict[str, Any]:
    n_cached = stats.counters.cached_tokens
    return {
        "input_tokens": stats.n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": stats.n_generated,
    }
