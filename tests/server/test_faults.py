"""Ranks that die during requests, and a server that is killed."""

from __future__ import annotations

import collections
import functools
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import anthropic
import openai
from support import server_faults
from support.commands import names_killed
from support.http_streams import read_streams
from support.servers import LIMIT_S, Serving, server

N_TOKENS = 60
HELLO = "Tell me of a king."
SAMPLING = {"seed": 3, "temperature": 0.7, "ignore_eos": True}
RESPONSE = {"model": "any", "input": HELLO, "max_output_tokens": 400, **SAMPLING}
MESSAGE = {"model": "any", "messages": [{"role": "user", "content": HELLO}], "max_tokens": 400, **SAMPLING}
ENDLESS_RESPONSE: dict[str, Any] = {
    "model": "any", "input": HELLO, "stream": True, "extra_body": {"ignore_eos": True}
}  # fmt: skip
ENDLESS_CHAT: dict[str, Any] = {
    "model": "any", "messages": [{"role": "user", "content": HELLO}], "extra_body": {"ignore_eos": True}
}  # fmt: skip


def test_texts_outlive_ranks_and_no_rank_outlives_the_server() -> None:
    with server(
        "--exact", "--mpi-layer-split", "0.5,0.5", "-c", "1024", "-np", "4", "--restart", "10",
        "--sse-ping-interval", str(server_faults.PING_S),
    ) as own:  # fmt: skip
        own.wait_until_ready()
        bodies = server_faults.bodies(N_TOKENS)
        expected = read_streams(own.port, bodies)
        assert all(stream.is_whole for stream in expected)
        _, wrong = server_faults.play(own, 2, bodies, expected, 0, seed=1)
        assert not wrong
        for _ in range(3):  # the ranks may have finished before they are killed
            own.wait_for(lambda: has_ranks(own))
            if has_pinged := check_named_events(own):
                break
        assert has_pinged
        own.wait_for(lambda: has_ranks(own))
        ranks = own.ranks()
        own.process.kill()
        own.process.wait()
        server_faults.wait_for_end(ranks)
        with socket.create_server(("127.0.0.1", own.port)):  # as the next server does
            pass


def has_ranks(own: Serving) -> bool:
    return own.ask("GET", "/health")[0] == 200 and len(own.ranks()) == 2


def check_named_events(own: Serving) -> bool:
    """Streams of `/v1/responses` and `/v1/messages` continue after a rank is killed, with the same text as whole
    answers. Returns whether both had pings."""
    (response,) = own.ask("POST", "/v1/responses", RESPONSE)[1]["output"]
    (block,) = own.ask("POST", "/v1/messages", MESSAGE)[1]["content"]
    kill = kill_when_all_write(own, 2)
    read = functools.partial(read_events, own, kill)
    with ThreadPoolExecutor(2) as pool:
        (responses, pings), (messages, more_pings) = pool.map(
            read, ("/v1/responses", "/v1/messages"), (RESPONSE, MESSAGE)
        )
    assert [event["sequence_number"] for event in responses] == list(range(len(responses)))
    assert responses[-1]["type"] == "response.incomplete"
    (item,) = responses[-1]["response"]["output"]
    assert item["content"][0]["text"] == response["content"][0]["text"]
    assert joined(responses, "response.output_text.delta", lambda event: event["delta"]) == item["content"][0]["text"]
    assert messages[-1]["type"] == "message_stop"
    assert joined(messages, "content_block_delta", lambda event: event["delta"]["text"]) == block["text"]
    return pings > 0 and more_pings > 0


def kill_when_all_write(own: Serving, n_streams: int) -> Callable[[], object]:
    """Call it from each active stream: the last one kills the second rank, and the others wait for that."""
    process = max(own.ranks())
    return functools.partial(threading.Barrier(n_streams, lambda: os.kill(process, signal.SIGKILL)).wait, LIMIT_S)


def read_events(own: Serving, kill: Callable[[], object], path: str, body: dict[str, Any]) -> tuple[list[Any], int]:
    """The events of a stream, and the number of comments."""
    with own.streaming(path, body) as answer:
        events, n_comments = [], 0
        for line in answer:
            n_comments += line.startswith(b":")
            if line.startswith(b"data: "):
                events.append(json.loads(line[6:]))
                if len(events) == 10:
                    kill()
    return events, n_comments


def joined(events: Sequence[Any], kind: str, text_of: Callable[[Any], str]) -> str:
    return "".join(text_of(event) for event in events if event["type"] == kind)


def test_streams_end_with_an_error_where_ranks_are_not_started_again() -> None:
    with server("--mpi-layer-split", "0.5,0.5", "-c", "32768", "--restart", "0") as own:
        own.wait_until_ready()
        kill = kill_when_all_write(own, 3)
        with (
            openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0) as client,
            anthropic.Anthropic(base_url=own.url, api_key="none", max_retries=0) as claude,
        ):

            def respond() -> str:
                stream = client.responses.create(**ENDLESS_RESPONSE)
                events = [next(stream)]
                kill()
                events += stream
                error, failed = events[-2:]
                assert failed.response.status == "failed"
                assert failed.response.output[0].status == "incomplete"
                assert failed.response.error.message == error.message
                return f"{error.type} {error.code} {error.message}"

            def chat() -> str:
                try:
                    stream = client.chat.completions.create(**ENDLESS_CHAT, stream=True)
                    next(stream)
                    kill()
                    collections.deque(stream, maxlen=0)
                except openai.APIError as e:
                    return f"{e.code} {e.message}"
                return "no error"

            def message() -> str:
                try:
                    stream = claude.messages.create(**ENDLESS_CHAT, max_tokens=8000, stream=True)
                    next(stream)
                    kill()
                    collections.deque(stream, maxlen=0)
                except anthropic.APIStatusError as e:
                    error = cast(Any, e.body)["error"]
                    return f"{error['type']} {error['message']}"
                return "no error"

            with ThreadPoolExecutor(3) as pool:
                errors = [asked.result(LIMIT_S) for asked in [pool.submit(ask) for ask in (respond, chat, message)]]
        assert own.process.wait(LIMIT_S) == 1
    whys = {re.sub(r"^(error 503|503|overloaded_error) ", "", error) for error in errors}
    assert len(whys) == 1, whys
    assert names_killed(1, whys.pop())
    assert not any("Traceback" in line for line in own.lines)
