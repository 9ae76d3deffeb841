"""Streams of a server, as clients read them: token by token, with pings, and left midway."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 240.0


@dataclass
class Stream:
    """A stream of `/completion`, as far as it was read."""

    status: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    pings_s: list[float] = field(default_factory=list)
    """When each came, as `time.monotonic`."""
    events_s: list[float] = field(default_factory=list)
    """When each event came, as `time.monotonic`."""
    is_whole: bool = False
    error: str = ""


def read_stream(
    port: int,
    body: dict[str, Any],
    leaves_after: int | None = None,
    on_token: Callable[[], object] = lambda: None,
    source: str = "127.0.0.1",
) -> Stream:
    """Ask for a stream and read it, or leave after so many tokens. `source`: the client's address."""
    found = Stream()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S, source_address=(source, 0))
    with contextlib.closing(connection):
        try:
            connection.request("POST", "/completion", json.dumps({**body, "stream": True}).encode())
            answer = connection.getresponse()
            found.status = answer.status
            if answer.status != 200:
                found.error = answer.read().decode()
                return found
            for line in answer:
                if line.startswith(b":"):
                    found.pings_s.append(time.monotonic())
                elif line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    found.events_s.append(time.monotonic())
                    if "error" in event:
                        found.error = str(event["error"])
                        continue
                    found.tokens += event["tokens"] if not event["stop"] else ()
                    found.text += event["content"]
                    found.is_whole = event["stop"]
                    on_token()
                    if leaves_after is not None and len(found.tokens) >= leaves_after:
                        answer.close()
                        return found
        except (OSError, http.client.HTTPException) as e:
            found.error = found.error or repr(e)
    return found


def read_streams(
    port: int, bodies: Sequence[dict[str, Any]], on_token: Callable[[], object] = lambda: None
) -> list[Stream]:
    """Several at the same time."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: read_stream(port, body, on_token=on_token), bodies))
