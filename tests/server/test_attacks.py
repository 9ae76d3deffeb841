"""Malicious and slow clients, against a server with short limits."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import MagicMock

import pytest
from starlette.routing import Route
from support.http_streams import Stream, read_stream
from support.mutations import LIMIT_S, answer_to, mutation
from support.servers import Serving, server

from ggpipe.options.server import ServerConfig
from ggpipe.server.app import application

N_MUTATIONS, TIMEOUT_S = 300, 3
NO_HTTP = b"Invalid HTTP request received."
PROMPT = {"prompt": "Once upon a time", "max_tokens": 2}


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with server(
        "-c", "4096", "-n", "4", "-np", "4", "--max-waiting", "4", "--max-body", "1", "--timeout", str(TIMEOUT_S),
        "--metrics",
    ) as own:  # fmt: skip
        own.wait_until_ready()
        yield own
        assert not [line for line in own.lines if "a bug" in line or "Traceback" in line or "broke" in line]


@pytest.fixture(autouse=True)
def nothing_is_stuck(serving: Serving) -> Iterator[None]:
    yield
    serving.wait_for(lambda: "llamacpp:requests_processing 0.0" in serving.ask("GET", "/metrics")[1])
    assert serving.ask("POST", "/v1/completions", PROMPT)[0] == 200


def connect(serving: Serving, data: bytes = b"", small: bool = False) -> socket.socket:
    found = socket.socket()
    if small:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.settimeout(LIMIT_S)
    found.connect(("127.0.0.1", serving.port))
    found.sendall(data)
    return found


def received(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    found = bytearray()
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return bytes(found)


def test_mutated_requests_are_the_clients_mistakes(serving: Serving) -> None:
    routes = [route for route in application(MagicMock(config=ServerConfig()), ()).routes if isinstance(route, Route)]
    gets = sorted(route.path for route in routes if "GET" in (route.methods or ()))
    posts = sorted(route.path for route in routes if "POST" in (route.methods or ()))
    mutations = [mutation(number, gets, posts) for number in range(N_MUTATIONS)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda one: answer_to(serving.port, one), mutations))
    for one, (status, body) in zip(mutations, answers, strict=True):
        assert status < 500 or status == 501, (one.how, body)
        assert status or not one.is_whole, one.how
        if status >= 400 and not one.how.startswith("HEAD"):
            assert NO_HTTP in body or json.loads(body)["error"]["message"], one.how


def test_slow_clients_are_closed_and_hold_nobody_up(serving: Serving) -> None:
    body = connect(serving, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
    stream = json.dumps({"prompt": "The", "stream": True, "n": 4, "max_tokens": 400, "logprobs": 20, "temperature": 2})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Request-Id: unread\r\nContent-Length: {len(stream)}\r\n\r\n"
    unread = connect(serving, f"{head}{stream}".encode(), small=True)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(received, body)
        deadline = time.monotonic() + LIMIT_S
        while not answer.done() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                body.sendall(b" ")
            assert serving.ask("GET", "/health")[0] == 200
            time.sleep(0.2)
    assert answer.result().split()[1] == b"408"
    serving.wait_for(lambda: any("unread POST /v1/completions 200" in line for line in serving.lines))
    assert b"[DONE]" not in received(unread)
    for connection in (body, unread):
        connection.close()


def test_idle_connections_keep_nobody_out(serving: Serving) -> None:
    idle = [connect(serving) for _ in range(200)]
    assert serving.ask("POST", "/v1/completions", PROMPT)[0] == 200
    with connect(serving, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n") as kept:
        assert received(kept).startswith(b"HTTP/1.1 200")  # and closed when no further request comes
    for connection in idle:
        connection.close()


def test_a_request_does_not_wait_behind_all_of_another_client(serving: Serving) -> None:
    n_tokens = {0: 700, 1: 800, 2: 800, 3: 800}
    first_tokens: dict[int, float] = {}

    def read(number: int) -> Stream:
        body = {"prompt": "The king", "n_predict": n_tokens.get(number, 90), "ignore_eos": True}
        return read_stream(serving.port, body, on_token=lambda: first_tokens.setdefault(number, time.monotonic()))

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(read, number) for number in range(4)]
        serving.wait_for(lambda: len(first_tokens) == 4)
        streams += [pool.submit(read, number) for number in range(4, 8)]
        serving.wait_for(lambda: "llamacpp:requests_deferred 4.0" in serving.ask("GET", "/metrics")[1])
        assert serving.ask("POST", "/v1/completions", PROMPT)[0] == 503
        short = {"prompt": "The king", "n_predict": 2}
        other = read_stream(serving.port, short, source="127.0.0.2")
        answered = time.monotonic()
    assert other.is_whole
    assert all(stream.result().is_whole for stream in streams)
    assert answered < max(first_tokens.values())


def test_large_bodies_and_headers_are_refused(serving: Serving) -> None:
    status, answer, _ = serving.ask("POST", "/v1/completions", b" " * (2**20 + 1))
    assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
    with connect(serving, b"GET /health HTTP/1.1\r\nX: " + b"x" * 100_000) as connection:
        assert b" 400 " in received(connection).partition(b"\r\n")[0]


@pytest.mark.parametrize(
    "more",
    [
        {"chat_template_kwargs": {"messages": 1}},
        {"chat_template_kwargs": {"x": 10**30}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}]},
        {"messages": [{"role": "assistant", "tool_calls": -1}]},
        {"messages": [{"role": "tool", "content": "", "tool_call_id": {}}, {"role": "user", "content": "a"}]},
    ],
)
def test_what_the_ranks_could_not_read_is_refused(serving: Serving, more: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    status, answer, _ = serving.ask("POST", "/v1/chat/completions", json.dumps({**body, **more}).encode())
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert serving.ask("POST", "/v1/chat/completions", json.dumps(body).encode())[0] == 200
