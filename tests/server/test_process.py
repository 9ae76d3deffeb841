"""The server's process: its start, its faults, and its end."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading

import pytest
from support import commands
from support.commands import HANG_S, TARGET
from support.in_process import ggpipe, ggpipe_on_threads
from support.servers import server

from ggpipe.server import process

PROMPT = "Once upon a time"


def test_a_killed_rank_costs_no_text_and_sigterm_lets_streams_end() -> None:
    sampling = ("-n", "400", "--seed", "7", "--temp", "0.8", "--ignore-eos")
    ranks = ("--exact", "--mpi-layer-split", "0.5,0.5", "-c", "1024", "-t", "1")
    expected = ggpipe_on_threads("generate", "-m", TARGET, "-p", PROMPT, *ranks, *sampling).stdout
    with server(*ranks, *sampling) as own:
        status, answer, _ = own.ask("GET", "/health")
        assert (status, answer["status"]) == (503, "loading")
        status, answer, headers = own.ask("POST", "/v1/completions", {"prompt": PROMPT})
        assert (status, answer["error"]["type"]) == (503, "unavailable_error")
        assert "retry-after" in headers
        own.wait_until_ready()
        got: list[str] = []
        asking = threading.Thread(
            target=lambda: got.append(own.ask("POST", "/v1/completions", {"prompt": PROMPT, "stream": True})[1])
        )
        asking.start()
        own.wait_for(lambda: len(own.ranks()) == 2)
        os.kill(own.ranks()[-1], signal.SIGKILL)
        own.wait_for(lambda: any("starting the ranks again" in line for line in own.lines))
        own.process.send_signal(signal.SIGTERM)
        asking.join(HANG_S)
        assert own.process.wait(HANG_S) == 0, own.lines
        assert not own.ranks()
    events = [json.loads(line[6:]) for line in got[0].splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == expected.rstrip("\n")


def test_mistakes_are_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        busy = commands.ggpipe("serve", "-m", TARGET, "--port", port)
    assert busy.returncode == 2
    assert busy.stderr.startswith("ggpipe: error: --port ")
    missing = ggpipe("serve", "-m", "nothing.gguf", "--port", "0", "-t", "1")
    assert missing.returncode == 2
    assert missing.stderr.splitlines()[-1].startswith("ggpipe: error: ")
    template = ggpipe("serve", "-m", TARGET, "--chat-template", "nothing")
    assert template.returncode == 2
    assert template.stderr.startswith("ggpipe: error: --chat-template ")


@pytest.mark.parametrize(
    ("limits", "raised", "connections"),
    [
        ((1024, 524288), [(16384, 524288)], 500),
        ((1024, 1024), [(1024, 1024)], 488),
        ((64, 64), [(64, 64)], 8),
        ((-1, -1), [], 500),
    ],
)
def test_connections_leave_files_for_ranks(
    limits: tuple[int, int],
    raised: list[tuple[int, int]],
    connections: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: set_to.append(new))
    assert process._connections(500) == connections
    assert set_to == raised
