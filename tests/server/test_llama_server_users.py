"""What llama-server's users expect of `ggpipe serve`: found by llama-server's own tests."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator

import pytest
from support.commands import TARGET
from support.in_process import ggpipe
from support.servers import Serving, server

HELLO = [{"role": "user", "content": "Tell me of a king."}]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with server("--host", "127.0.0.1,127.0.0.2", "-c", "512", "-t", "1", "-v") as own:
        own.wait_until_ready()
        yield own


def test_all_addresses_are_served(serving: Serving) -> None:
    for host in ("127.0.0.1", "127.0.0.2"):
        with urllib.request.urlopen(f"http://{host}:{serving.port}/health") as answer:
            assert answer.status == 200
    assert any("http://127.0.0.1:" in line and "http://127.0.0.2:" in line for line in serving.lines)


def test_one_bad_address_of_several_is_named() -> None:
    for hosts in ("127.0.0.1,nowhere.invalid", ","):
        failed = ggpipe("serve", "-m", TARGET, "--port", "0", "--host", hosts)
        assert failed.returncode == 2
        assert "--host" in failed.stderr.splitlines()[-1]


def test_biased_strings_are_not_written(serving: Serving) -> None:
    body = {"prompt": "The king went to the", "n_predict": 24, "temperature": 0, "logit_bias": {" the": False}}
    status, found, _ = serving.ask("POST", "/completion", body)
    assert status == 200
    assert " the " not in found["content"]


def test_the_prompt_is_returned_on_request(serving: Serving) -> None:
    found = serving.ask("POST", "/completion", {"prompt": "A king", "n_predict": 2})[1]
    assert found["prompt"].endswith("A king")
    chat = {"messages": HELLO, "max_tokens": 2}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": HELLO[0]["content"]})):
        found = serving.ask("POST", path, {**body, "max_tokens": 2})[1]  # as -v says
        assert HELLO[0]["content"] in found["__verbose"]["prompt"]
        assert "__verbose" not in serving.ask("POST", path, {**body, "max_tokens": 2, "verbose": False})[1]
    with serving.streaming("/v1/chat/completions", {**chat, "verbose": True}) as stream:
        events = [json.loads(line[6:]) for line in stream.read().decode().splitlines() if line.startswith("data: {")]
    assert [HELLO[0]["content"] in one["__verbose"]["prompt"] for one in events if "__verbose" in one] == [True]


def test_a_client_may_close_its_half_of_the_connection(serving: Serving) -> None:
    body = json.dumps({"prompt": "Once", "n_predict": 1}).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", serving.port)) as client, client.makefile("rb") as reply:
        client.sendall(head.encode() + body)
        client.shutdown(socket.SHUT_WR)
        assert reply.readline().startswith(b"HTTP/1.1 200")


def test_responses_have_timings(serving: Serving) -> None:
    body = {"input": "Once", "max_output_tokens": 4, "timings_per_token": True, "return_progress": True}
    with serving.streaming("/v1/responses", body) as stream:
        events = [json.loads(line[6:]) for line in stream.read().decode().splitlines() if line.startswith("data: {")]
    assert any("prompt_progress" in one for one in events)
    deltas = [one for one in events if one["type"] == "response.output_text.delta"]
    assert deltas
    assert all("predicted_per_second" in one["timings"] for one in deltas)


def test_a_time_limit_ends_the_output_with_a_line(serving: Serving) -> None:
    body = {"prompt": "Once", "grammar": 'root ::= ([a-z]{40} "\\n")+', "n_predict": 400, "t_max_predict_ms": 1}
    status, answer, _ = serving.ask("POST", "/completion", body)
    assert (status, answer["stop_type"], answer["has_new_line"]) == (200, "limit", True)
    assert len(answer["content"]) == 41
    assert answer["content"].endswith("\n")
