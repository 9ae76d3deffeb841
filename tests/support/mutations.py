"""Requests of HTTP as attackers and broken clients send them: bytes that follow from a number."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LIMIT_S = 120.0
_BODY: dict[str, Any] = {
    "model": "any", "prompt": "Once upon a time", "content": "a king", "input": "a king", "tokens": [5, 6, 7],
    "messages": [{"role": "user", "content": "Tell me of a king."}], "max_tokens": 3, "n_predict": 3, "stream": False,
    "temperature": 0.5, "top_p": 0.9, "top_k": 20, "n": 1, "stop": ["never"], "seed": 3, "logit_bias": {"5": -1},
    "stream_options": {"include_usage": True}, "response_format": {"type": "text"}, "samplers": ["top_k", "min_p"],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], "tool_choice": "none",
    "chat_template_kwargs": {"a": 1}, "dry_sequence_breakers": ["\n"], "logprobs": None, "cache_prompt": True,
}  # fmt: skip
"""Something for every endpoint: fields that one does not know are ignored."""
_WRONG: tuple[Any, ...] = (
    None, True, "", "text", "\x00", "\ud800", "\u202e" * 30, 0, -1, 1, 2**31, 2**63, -(2**63) - 1,
    10**400, 1e308, -0.0, 1e-320, float("nan"), float("inf"), [], [[]], [None], [-1], [2**31], [1e3], ["", 1], {},
    {"": {}}, {"type": 5}, {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"type": "json_object", "schema": {"minimum": []}},
    {"role": 7}, [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url", "image_url": "file:///etc"}]}],
    "{{ ''.__class__.__mro__ }}", "root ::= root", "../../etc/passwd", "x" * 20000, list(range(3000)), ["\ud800"],
)  # fmt: skip
_PATHS = (
    "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/v1/../../etc/passwd", "/v1/chat/completions/",
    "/v1/nothing", "/%00", "/%ff%fe", "/" + "a" * 5000, "/health?" + "q=1&" * 500, "*", "/..%5c..%5cetc", "/slots/..",
    "/%2fetc%2fpasswd", "/.env", "/index.html/../../secret",
)  # fmt: skip
_METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "BREW", "post")


@dataclass(frozen=True)
class Mutation:
    """A request, and how it was made."""

    how: str
    data: bytes
    is_whole: bool = True
    """The server can answer it without more of it."""


def mutation(number: int, gets: Sequence[str], posts: Sequence[str]) -> Mutation:
    """The request of a number, to one of these paths."""
    rng = random.Random(number)
    if number % 3 == 0:
        return rng.choice(_OF_HTTP)(rng, rng.choice(posts), rng.choice(gets))
    return rng.choice(_OF_BODY)(rng, posts[number % len(posts)])


def answer_to(port: int, mutation: Mutation) -> tuple[int, bytes]:
    """Status and body; 0 where the server closes the connection without an answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
        try:
            connection.sendall(mutation.data)
            if not mutation.is_whole:
                with contextlib.suppress(OSError):  # it has closed; its answer may be here
                    connection.shutdown(socket.SHUT_WR)
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionError:  # it has answered and closed before it had all
            return 0, b""
    head, _, body = received.partition(b"\r\n\r\n")
    return (int(head.split()[1]), body) if head else (0, b"")


def _request(path: str, body: bytes, method: str = "POST", *headers: bytes, length: bytes | None = None) -> bytes:
    n_bytes = str(len(body)).encode() if length is None else length
    lines = (
        f"{method} {path} HTTP/1.1".encode(), b"Host: localhost", b"Connection: close", b"Content-Length: " + n_bytes,
        *headers,
    )  # fmt: skip
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


# Bodies


def _wrong_value(rng: random.Random, path: str) -> Mutation:
    body, name, value = dict(_BODY), rng.choice(list(_BODY)), rng.choice(_WRONG)
    body[name] = value
    return Mutation(f"{path}: {name} = {value!r:.60}", _request(path, _json(body)))


def _wrong_inside(rng: random.Random, path: str) -> Mutation:
    body = json.loads(json.dumps(_BODY))
    name = rng.choice([name for name, value in body.items() if isinstance(value, list | dict)])
    holder, value = body[name], rng.choice(_WRONG)
    if isinstance(holder, list):
        holder[0] = value
    else:
        holder[rng.choice(list(holder))] = value
    return Mutation(f"{path}: inside {name}: {value!r:.60}", _request(path, _json(body)))


def _missing(rng: random.Random, path: str) -> Mutation:
    left_out = set(rng.sample(sorted(_BODY), 12))
    body = {name: value for name, value in _BODY.items() if name not in left_out}
    return Mutation(f"{path}: without {sorted(left_out)}", _request(path, _json({**body, "max_tokens": 2})))


def _deep(rng: random.Random, path: str) -> Mutation:
    depth, name = rng.choice((70, 500, 5000, 100000)), rng.choice(("messages", "tools", "prompt", "json_schema", "zzz"))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    deep = f'{{"{name}": {opening * depth}1{closing * depth}}}'
    return Mutation(f"{path}: {name} nested {depth} times", _request(path, deep.encode()))


def _bytes_changed(rng: random.Random, path: str) -> Mutation:
    body = bytearray(_json(_BODY))
    for _ in range(rng.randint(1, 8)):
        body[rng.randrange(len(body))] = rng.choice((0, 0xFF, 0xC0, 0xED, *b'"\\{}[],:e-'))
    return Mutation(f"{path}: bytes changed: {bytes(body)!r:.60}", _request(path, bytes(body)))


def _short(rng: random.Random, path: str) -> Mutation:
    body = _json(_BODY)
    return Mutation(f"{path}: JSON cut off", _request(path, body[: rng.randrange(len(body))]))


def _twice(rng: random.Random, path: str) -> Mutation:
    name = rng.choice(list(_BODY))
    body = _json(_BODY)[:-1] + f', "{name}": {json.dumps(rng.choice(_WRONG))}}}'.encode()
    return Mutation(f"{path}: {name} twice", _request(path, body))


def _no_object(rng: random.Random, path: str) -> Mutation:
    body = rng.choice((b"", b"null", b"[]", b"5", b'"x"', b"NaN", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{'a':1}"))
    return Mutation(f"{path}: {body!r}", _request(path, body))


_OF_BODY: tuple[Callable[[random.Random, str], Mutation], ...] = (
    _wrong_value, _wrong_value, _wrong_value, _wrong_inside, _wrong_inside, _missing, _deep, _bytes_changed, _short,
    _twice, _no_object,
)  # fmt: skip


# HTTP


def _length(rng: random.Random, path: str, _: str) -> Mutation:
    length = rng.choice((b"-1", b"1e3", b"abc", b"", b"99999999999999999999", b"0x10", b"5, 6", b"+5"))
    return Mutation(f"{path}: Content-Length: {length!r}", _request(path, _json(_BODY), length=length), is_whole=False)


def _cut_off(rng: random.Random, path: str, _: str) -> Mutation:
    whole = _request(path, _json(_BODY))
    return Mutation(f"{path}: cut off", whole[: rng.randrange(1, len(whole))], is_whole=False)


def _chunks(rng: random.Random, path: str, _: str) -> Mutation:
    chunks = rng.choice((b"zz\r\nabc\r\n", b"5\r\nab\r\n0\r\n\r\n", b"-1\r\n\r\n", b"f" * 40, b"\r\n\r\n", b"2\r\n{}"))
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    return Mutation(f"{path}: chunks {chunks!r:.60}", head.encode() + chunks, is_whole=False)


def _headers(rng: random.Random, path: str, _: str) -> Mutation:
    further = rng.choice(
        (
            (b"X: " + b"a" * 200_000,), tuple(b"X%d: y" % i for i in range(9000)), (b"no colon",), (b": nameless",),
            (b"X: \x00\x01",), (b"\xff\xfe: x",), (b"Transfer-Encoding: chunked",), (b"Transfer-Encoding: gzip",),
            (b"Content-Encoding: gzip",), (b"Content-Type: text/\xff",), (b"Authorization: Bearer \xe9\xff",),
            (b"Content-Length: 3",), (b"Host: b",), (b"Expect: 100-continue",),
            (b"Upgrade: websocket", b"Connection: upgrade"), (b" folded: x",), (b"Range: bytes=0-",),
            (b"Accept-Encoding: " + b"q, " * 900,),
        )
    )  # fmt: skip
    data = _request(path, _json(_BODY), "POST", *further)
    return Mutation(f"{path}: header {further[0]!r:.60}", data, is_whole=False)


def _line(rng: random.Random, path: str, _: str) -> Mutation:
    line = rng.choice((b"", b"\x16\x03\x01\x02\x00\x01", b"GET", b"GET /", b"GET / HTTP/9.9", b"\x00" * 64))
    return Mutation(f"first line {line!r:.60}", line + b"\r\nHost: a\r\nConnection: close\r\n\r\n", is_whole=False)


def _method(rng: random.Random, path: str, get: str) -> Mutation:
    method = rng.choice(_METHODS)
    place = path if method != "HEAD" else get
    return Mutation(f"{method} {place}", _request(place, b"", method))


def _path(rng: random.Random, _: str, __: str) -> Mutation:
    path, method = rng.choice(_PATHS), rng.choice(("GET", "POST"))
    return Mutation(f"{method} {path:.60}", _request(path, b"{}", method))


_OF_HTTP: tuple[Callable[[random.Random, str, str], Mutation], ...] = (
    _length, _cut_off, _chunks, _headers, _headers, _line, _method, _path,
)  # fmt: skip
