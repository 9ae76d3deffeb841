"""OpenAI's `/v1/responses`: the body, which becomes a conversation, and the items and numbered events of the reply."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from ggpipe.apis.bodies import GenerationBody, ResponseFormat, text_of
from ggpipe.apis.chat import ChatBody
from ggpipe.apis.replies import chat_logprobs, finish_reason, progress_timings, timings
from ggpipe.apis.writer import ApiEvent, Failure, ItemWriter, WrittenOutput
from ggpipe.config.checks import MAX_TOKENS
from ggpipe.core.prompt import Conversation
from ggpipe.core.request import Token
from ggpipe.errors import BodyError
from ggpipe.text.chat.tools.events import AnswerEvent

RESPONSES = "/v1/responses"
_WITH_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text", "refusal")


class TextOptions(msgspec.Struct, kw_only=True):
    """`text`."""

    format: ResponseFormat | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """`reasoning`."""

    effort: str | None = None


class ResponsesBody(GenerationBody, kw_only=True):
    """Body of `/v1/responses`."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
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
    n: Literal[1] | None = None
    n_cmpl: Literal[1] | None = None

    def __post_init__(self) -> None:
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name):
                raise BodyError(
                    f"`{name}` is not supported: responses are not stored; send the whole conversation", name
                )
        if self.background:
            raise BodyError("`background` is not supported: leave it out", "background")

    def most_tokens(self, usual: int) -> int:
        own = self.max_output_tokens
        return super().most_tokens(usual) if own is None else min(own, MAX_TOKENS)

    def most_probs(self) -> int | None:
        if _WITH_LOGPROBS not in (self.include or ()):
            return None
        return self.top_logprobs or 1

    @property
    def n_best_probs(self) -> int | None:
        return self.top_logprobs or 0

    def _format(self) -> tuple[str, ResponseFormat | None]:
        form = None if self.text is None else self.text.format
        return super()._format() if form is None else ("text.format", form)

    @property
    def prompts(self) -> Sequence[Conversation]:
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += messages_of(self.input)
        if not self.input:
            raise BodyError("`input` is empty: give a string or items", "input")
        tools = [
            _tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ()) if tool.get("type") == "function"
        ]
        return ChatBody(
            messages=messages, tools=tools, tool_choice=self.tool_choice, parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
        ).prompts  # fmt: skip


def messages_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as messages of a conversation. The model's reasoning, text and calls before the next message of the user
    become one message. Raises BodyError."""
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
    """The last message, which is the model's; added if it is missing."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _given(item: dict[str, Any], name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BodyError(f"`{at}.{name}` must be a string", f"{at}.{name}")
    return value


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    """A function in the form of chat completions."""
    _given(tool, "name", at)
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


class ResponseWriter(ItemWriter):
    """A response, whose items are its output."""

    def __init__(self, body: ResponsesBody, model: str, splits: bool) -> None:
        super().__init__(splits)
        self._n_events = 0
        self._n_best = body.n_best_probs
        self._has_timings = bool(body.timings_per_token)
        text = {"format": {"type": "text"}} if body.text is None else msgspec.to_builtins(body.text)
        self._response: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": text,
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def begin(self, output: WrittenOutput) -> Iterator[ApiEvent]:
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def add(self, output: WrittenOutput, parts: Sequence[AnswerEvent], tokens: Sequence[Token]) -> Iterator[ApiEvent]:
        for event in super().add(output, parts, tokens):
            if self._has_timings and event["type"].endswith(".delta"):
                event["timings"] = timings(output.stats)
            yield event

    def progress(self, output: WrittenOutput, prompt_progress: dict[str, Any]) -> Iterator[ApiEvent]:
        further = {"timings": progress_timings(prompt_progress)} if self._has_timings else {}
        yield self._event("response.in_progress", response=self._response, prompt_progress=prompt_progress, **further)

    def _reasoning(self, text: str) -> Iterator[ApiEvent]:
        if not self._is("reasoning"):
            yield from self._close()
            yield from self._open({"type": "reasoning", "id": _id("rs"), "summary": [], "content": []})
            yield from self._open_part({"type": "reasoning_text", "text": ""})
        self._part["text"] += text
        yield self._event("response.reasoning_text.delta", **self._place, content_index=0, delta=text)

    def _text(self, text: str, tokens: Sequence[Token]) -> Iterator[ApiEvent]:
        if not self._is("message"):
            yield from self._close()
            yield from self._open({"type": "message", "id": _id("msg"), "role": "assistant", "content": []})
            yield from self._open_part({"type": "output_text", "annotations": [], "logprobs": [], "text": ""})
        found = chat_logprobs(tokens, self._n_best)
        probs = [] if found is None else list(found["content"])
        self._part["text"] += text
        self._part["logprobs"] += probs
        yield self._event(
            "response.output_text.delta", **self._place, content_index=0, delta=text, logprobs=probs
        )  # fmt: skip

    def _begin_call(self, identity: str, name: str) -> Iterator[ApiEvent]:
        yield from self._open(
            {"type": "function_call", "id": _id("fc"), "call_id": identity, "name": name, "arguments": ""}
        )

    def _arguments(self, text: str) -> Iterator[ApiEvent]:
        self._items[-1]["arguments"] += text
        yield self._event("response.function_call_arguments.delta", **self._place, delta=text)

    def end(self, output: WrittenOutput, stop_string: str = "") -> Iterator[ApiEvent]:
        stats = output.stats
        is_cut = finish_reason(stats) == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self._close(status)
        self._response |= {
            "status": status,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": stats.n_prompt,
                "input_tokens_details": {"cached_tokens": stats.counters.cached_tokens},
                "output_tokens": stats.n_generated,
                "output_tokens_details": {"reasoning_tokens": self._n_reasoning},
                "total_tokens": stats.n_prompt + stats.n_generated,
            },
        }
        yield self._event(f"response.{status}", response=self._response, timings=timings(stats))

    def fail(self, error: Failure) -> Iterator[ApiEvent]:
        # Some clients look for the event, others at the response.
        yield self._event("error", code=str(error.status), message=error.message, param=error.param)
        for item in self._items[-1:] if self._is_open else ():
            item["status"] = "incomplete"
        self._response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        yield self._event("response.failed", response=self._response)

    @property
    def reply(self) -> dict[str, Any]:
        return self._response

    def _event(self, kind: str, **further: Any) -> ApiEvent:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **further}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self._items[-1]["content"][0]
        return part

    def _open(self, item: dict[str, Any]) -> Iterator[ApiEvent]:
        self._items.append({**item, "status": "in_progress"})
        self._is_open = True
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _open_part(self, part: dict[str, Any]) -> Iterator[ApiEvent]:
        self._items[-1]["content"].append(part)
        yield self._event("response.content_part.added", **self._place, content_index=0, part=part)

    def _close(self, status: str = "completed") -> Iterator[ApiEvent]:
        if not self._is_open:
            return
        item = self._items[-1]
        match item["type"]:
            case "function_call":
                yield self._event(
                    "response.function_call_arguments.done", **self._place, name=item["name"],
                    arguments=item["arguments"],
                )  # fmt: skip
            case "reasoning":
                yield from self._close_part("response.reasoning_text.done", text=self._part["text"])
            case _:
                part = self._part
                yield from self._close_part(
                    "response.output_text.done", text=part["text"], logprobs=part["logprobs"]
                )  # fmt: skip
        item["status"] = status
        self._is_open = False
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _close_part(self, kind: str, **further: Any) -> Iterable[ApiEvent]:
        yield self._event(kind, **self._place, content_index=0, **further)
        yield self._event("response.content_part.done", **self._place, content_index=0, part=self._part)


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"
