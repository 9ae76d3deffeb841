"""What Anthropic's `/v1/messages` answers: blocks of content, and the events of a stream of them."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from ggpipe.apis.answers import finish_reason, timings
from ggpipe.apis.writer import ApiEvent
from ggpipe.core.request import Finish, Token
from ggpipe.stats.records import RequestStats

_BEGUN: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


class MessageWriter:
    """One message. Each method that takes a part of the answer returns the events that it makes, which are to be sent
    (or dropped) before the next call."""

    def __init__(self, model: str) -> None:
        self._content: list[dict[str, Any]] = []
        """The last block is open while `_is_open`."""
        self._is_open = False
        self._arguments = ""
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, stats: RequestStats) -> Iterator[ApiEvent]:
        """In front of the answer."""
        yield {"type": "message_start", "message": {**self._message, "usage": _usage(stats)}}

    def reasoning(self, text: str) -> Iterator[ApiEvent]:
        """The model thinks."""
        yield from self._open_if_needed("thinking")
        self._content[-1]["thinking"] += text
        yield self._delta(type="thinking_delta", thinking=text)

    def text(self, text: str, tokens: Sequence[Token] = ()) -> Iterator[ApiEvent]:
        """The model answers."""
        yield from self._open_if_needed("text")
        self._content[-1]["text"] += text
        yield self._delta(type="text_delta", text=text)

    def begin_call(self, identity: str, name: str) -> Iterator[ApiEvent]:
        """The model calls a tool."""
        self._arguments = ""
        yield from self._open({"type": "tool_use", "id": identity, "name": name})

    def arguments(self, text: str) -> Iterator[ApiEvent]:
        """The next part of the call's arguments."""
        self._arguments += text
        yield self._delta(type="input_json_delta", partial_json=text)

    def end_call(self) -> Iterator[ApiEvent]:
        """All of them have come."""
        yield from self._close()

    def end(self, stats: RequestStats, stop_sequence: str | None) -> Iterator[ApiEvent]:
        """The answer has ended. `stop_sequence`: the one that ended it."""
        yield from self._close()
        calls = any(block["type"] == "tool_use" for block in self._content)
        if stats.finish is Finish.CONTEXT_FULL:
            reason = "model_context_window_exceeded"
        elif finish_reason(stats) == "length":
            reason = "max_tokens"
        elif calls:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if stats.finish is Finish.STOP_STRING else "end_turn"
        ending = {"stop_reason": reason, "stop_sequence": stop_sequence if reason == "stop_sequence" else None}
        self._message |= {**ending, "usage": _usage(stats)}
        yield {"type": "message_delta", "delta": ending, "usage": _usage(stats), "timings": timings(stats)}
        yield {"type": "message_stop"}

    @property
    def message(self) -> dict[str, Any]:
        """The answer so far, whole after `end`."""
        return self._message

    def _delta(self, **delta: Any) -> ApiEvent:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _open_if_needed(self, kind: str) -> Iterator[ApiEvent]:
        if not self._is_open or self._content[-1]["type"] != kind:
            yield from self._open({"type": kind})

    def _open(self, block: dict[str, Any]) -> Iterator[ApiEvent]:
        yield from self._close()
        self._content.append({**block, **_BEGUN[block["type"]]})
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": self._content[-1]}

    def _close(self) -> Iterator[ApiEvent]:
        """The open block is whole, or cut off."""
        if not self._is_open:
            return
        block = self._content[-1]
        if block["type"] == "tool_use":
            with contextlib.suppress(ValueError, RecursionError):  # cut off, or nested too deeply
                block["input"] = json.loads(self._arguments)
        elif block["type"] == "thinking":  # clients wait for one
            yield self._delta(type="signature_delta", signature="")
        self._is_open = False
        yield {"type": "content_block_stop", "index": len(self._content) - 1}


def _usage(stats: RequestStats) -> dict[str, Any]:
    n_cached = stats.counters.cached_tokens
    return {
        "input_tokens": stats.n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": stats.n_generated,
    }
