"""What Anthropic's `/v1/messages` answers: blocks of content, and the events of a stream of them."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ggpipe.apis.answers import finish_reason, timings
from ggpipe.apis.writer import Event, Failure, Writer
from ggpipe.core.request import Finish, Token
from ggpipe.stats.records import RequestStats

_BEGUN: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


class MessageWriter(Writer):
    """A message, whose items are its content blocks."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._json = ""
        """Arguments of the call that is open."""
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._items,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, stats: RequestStats) -> Iterator[Event]:
        yield {"type": "message_start", "message": {**self._message, "usage": _usage(stats)}}

    def progress(self, prompt_progress: dict[str, Any]) -> Iterable[Event]:
        return ()

    def _reasoning(self, text: str) -> Iterator[Event]:
        yield from self._open_if_needed("thinking")
        self._items[-1]["thinking"] += text
        yield self._delta(type="thinking_delta", thinking=text)

    def _text(self, text: str, tokens: Sequence[Token]) -> Iterator[Event]:
        yield from self._open_if_needed("text")
        self._items[-1]["text"] += text
        yield self._delta(type="text_delta", text=text)

    def _begin_call(self, identity: str, name: str) -> Iterator[Event]:
        self._json = ""
        yield from self._open({"type": "tool_use", "id": identity, "name": name})

    def _arguments(self, text: str) -> Iterator[Event]:
        self._json += text
        yield self._delta(type="input_json_delta", partial_json=text)

    def end(self, stats: RequestStats, stop_string: str = "") -> Iterator[Event]:
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

    def fail(self, error: Failure) -> Iterable[Event]:
        return (error.anthropic_body,)

    @property
    def whole(self) -> dict[str, Any]:
        return self._message

    def _delta(self, **delta: Any) -> Event:
        return {"type": "content_block_delta", "index": len(self._items) - 1, "delta": delta}

    def _open_if_needed(self, kind: str) -> Iterator[Event]:
        if not self._is(kind):
            yield from self._close()
            yield from self._open({"type": kind})

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        self._items.append({**block, **_BEGUN[block["type"]]})
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._items) - 1, "content_block": self._items[-1]}

    def _close(self) -> Iterator[Event]:
        if not self._is_open:
            return
        block = self._items[-1]
        if block["type"] == "tool_use":
            with contextlib.suppress(ValueError, RecursionError):  # cut off, or nested too deeply
                block["input"] = json.loads(self._json)
        elif block["type"] == "thinking":  # clients wait for one
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
