"""The client of `scripts/bench/serving --http`: it reads all streams of a server with plain sockets."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import selectors
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_SILENT_S = 120.0


@dataclass
class Streams:
    """When tokens came, of each stream."""

    began: float
    times: list[list[float]]

    @property
    def itl_s(self) -> float:
        """The median."""
        return statistics.median(b - a for times in self.times for a, b in itertools.pairwise(times))

    def tps(self, n_tokens: int) -> float:
        """Tokens per second of all streams together. `n`: tokens of each."""
        return len(self.times) * n_tokens / (max(times[-1] for times in self.times) - self.began)


@dataclass
class _Stream:
    connection: socket.socket
    times: list[float] = field(default_factory=list)
    rest: bytes = b""


def stream(port: int, texts: Sequence[Sequence[int]], n: int) -> Streams:
    """Have all prompts continued by `n` tokens, at a time. Raises RuntimeError where a server does not."""
    selector = selectors.EpollSelector()
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in texts:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            streams.append(_Stream(connection))
            selector.register(connection, selectors.EVENT_READ, streams[-1])
        began = time.monotonic()
        for own, text in zip(streams, texts, strict=True):
            own.connection.sendall(_request(text, n))
        n_open = len(streams)
        while n_open:
            ready = selector.select(_SILENT_S)
            if not ready:
                raise RuntimeError(f"the server sent nothing for {_SILENT_S:g} s")
            now = time.monotonic()
            for key, _ in ready:
                if _read(key.data, now, n):
                    selector.unregister(key.fileobj)  # the last chunk's end may still come
                    n_open -= 1
    return Streams(began, [own.times for own in streams])


def _request(text: Sequence[int], n: int) -> bytes:
    asked = {
        "prompt": list(text), "max_tokens": n, "stream": True, "temperature": 0, "ignore_eos": True,
        "cache_prompt": False,
    }  # fmt: skip
    body = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _read(own: _Stream, now: float, n: int) -> bool:
    """Whether the stream is whole."""
    data = own.connection.recv(1 << 16)
    own.rest = own.rest[-4096:] + data
    if b"[DONE]" in own.rest:
        found = re.findall(rb'"predicted_n": ?(\d+)', own.rest)
        if found[-1:] != [b"%d" % n]:
            raise RuntimeError(f"a server wrote {found[-1:]} tokens instead of {n}")
        if b'"predicted_n"' not in data:  # else the end came with the last token
            return True
    elif not data:
        raise RuntimeError(f"a server answered {own.rest[:500]!r}")
    own.times += [now] * len(re.findall(rb'"text": ?"', data))
    return b"[DONE]" in own.rest
