"""What `/v1/responses` answers: items, and the events of a stream of them, numbered as OpenAI's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from ggpipe.apis.answers import chat_logprobs, finish_reason, timings
from ggpipe.apis.responses import ResponsesBody
from ggpipe.apis.writer import ApiEvent
from ggpipe.core.request import Token
from ggpipe.stats.records import RequestStats


class ResponseWriter:
    """One response. Each method that takes a part of the answer returns the events that it makes, which are to be sent
    (or dropped) before the next call."""

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self._n_events = 0
        self._n_best = body.n_best_probs
        self._output: list[dict[str, Any]] = []
        """The last item is open while `_is_open`."""
        self._is_open = False
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
            "output": self._output,
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

    def begin(self) -> Iterator[ApiEvent]:
        """In front of the answer."""
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def progress(self, prompt_progress: dict[str, Any]) -> Iterator[ApiEvent]:
        """While the prompt is computed, as llama-server has it."""
        yield self._event("response.in_progress", response=self._response, prompt_progress=prompt_progress)

    def reasoning(self, text: str) -> Iterator[ApiEvent]:
        """The model thinks."""
        if not self._is("reasoning"):
            yield from self._close()
            yield from self._open({"type": "reasoning", "id": _id("rs"), "summary": [], "content": []})
            yield from self._open_part({"type": "reasoning_text", "text": ""})
        self._part["text"] += text
        yield self._event("response.reasoning_text.delta", **self._place, content_index=0, delta=text)

    def text(self, text: str, tokens: Sequence[Token] = ()) -> Iterator[ApiEvent]:
        """The model answers. `tokens`: those with log-probabilities that came with the text."""
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

    def begin_call(self, identity: str, name: str) -> Iterator[ApiEvent]:
        """The model calls a function."""
        yield from self._close()
        yield from self._open(
            {"type": "function_call", "id": _id("fc"), "call_id": identity, "name": name, "arguments": ""}
        )

    def arguments(self, text: str) -> Iterator[ApiEvent]:
        """The next part of the call's arguments."""
        self._output[-1]["arguments"] += text
        yield self._event("response.function_call_arguments.delta", **self._place, delta=text)

    def end_call(self) -> Iterator[ApiEvent]:
        """All of them have come."""
        yield from self._close()

    def end(self, stats: RequestStats, n_reasoning: int) -> Iterator[ApiEvent]:
        """The answer has ended. `n_reasoning`: tokens that the model thought."""
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
                "output_tokens_details": {"reasoning_tokens": n_reasoning},
                "total_tokens": stats.n_prompt + stats.n_generated,
            },
        }
        yield self._event(f"response.{status}", response=self._response, timings=timings(stats))

    def fail(self, status: int, message: str, param: str | None) -> Iterator[ApiEvent]:
        """The answer ends with an error. Some clients look at the event of that name, some at the response."""
        yield self._event("error", code=str(status), message=message, param=param)
        for item in self._output[-1:] if self._is_open else ():
            item["status"] = "incomplete"
        self._response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        yield self._event("response.failed", response=self._response)

    @property
    def response(self) -> dict[str, Any]:
        """The answer so far, whole after `end`."""
        return self._response

    def _event(self, kind: str, **further: Any) -> ApiEvent:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **further}

    def _is(self, kind: str) -> bool:
        return self._is_open and bool(self._output[-1]["type"] == kind)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self._output[-1]["content"][0]
        return part

    def _open(self, item: dict[str, Any]) -> Iterator[ApiEvent]:
        self._output.append({**item, "status": "in_progress"})
        self._is_open = True
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=self._output[-1])

    def _open_part(self, part: dict[str, Any]) -> Iterator[ApiEvent]:
        self._output[-1]["content"].append(part)
        yield self._event("response.content_part.added", **self._place, content_index=0, part=part)

    def _close(self, status: str = "completed") -> Iterator[ApiEvent]:
        """The open item is whole, or cut off."""
        if not self._is_open:
            return
        item = self._output[-1]
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
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _close_part(self, kind: str, **further: Any) -> Iterable[ApiEvent]:
        yield self._event(kind, **self._place, content_index=0, **further)
        yield self._event("response.content_part.done", **self._place, content_index=0, part=self._part)


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"
