"""`ggpipe serve` on ranks that the user started with mpirun."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
from typing import Any

from support.commands import TARGET, mpirun, ranks_of
from support.servers import LIMIT_S, Serving, server

from ggpipe.launch.mpirun import find_mpirun, mpirun_command

RANKS = ("--mpi-layer-split", "0.5,0.5", "-c", "2048")
BODY = {"prompt": "Once upon a time", "max_tokens": 1200, "ignore_eos": True, "temperature": 1, "stream": True}


def start() -> list[str]:
    return list(map(str, mpirun_command(find_mpirun(), 2, None, ())))


def streamed(own: Serving) -> tuple[threading.Thread, list[str]]:
    """A stream that has begun, and its text once it has ended."""
    text: list[str] = []
    begun = threading.Event()

    def ask() -> None:
        killed = contextlib.suppress(OSError, http.client.HTTPException)
        with killed, own.streaming("/v1/completions", BODY) as answer:
            first = answer.readline()
            begun.set()
            text.append((first + answer.read()).decode())

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(LIMIT_S)
    return asking, text


def last_event(text: str) -> Any:
    return json.loads([line for line in text.splitlines() if line.startswith("data: {")][-1][6:])


def test_sigusr1_lets_streams_end() -> None:
    with server(*RANKS, "--metrics", launch=start()) as own:
        own.wait_until_ready()
        asking, text = streamed(own)
        own.process.send_signal(signal.SIGUSR1)
        asking.join(LIMIT_S)
        assert own.process.wait(LIMIT_S) == 0, own.lines
    assert text[0].endswith("data: [DONE]\n\n")
    assert last_event(text[0])["choices"][0]["finish_reason"] == "length"


def test_a_rank_that_dies_ends_the_server_with_one_line() -> None:
    name = f"own-{os.getpid()}"
    with server(*RANKS, "--metrics", "--alias", name, launch=start()) as own:
        own.wait_until_ready()
        asking, text = streamed(own)
        os.kill(ranks_of(name)[1], signal.SIGKILL)
        asking.join(LIMIT_S)
        assert own.process.wait(LIMIT_S) != 0
    assert not any("Traceback" in line for line in own.lines)
    # mpirun also kills the first rank, and may leave it no time for a message.
    errors = [line for line in own.lines if line.startswith("ggpipe: error: ")]
    assert len(errors) < 2
    assert all("rank 1" in line for line in errors)
    if text and "error" in last_event(text[0]):
        assert "rank 1" in last_event(text[0])["error"]["message"]


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = mpirun(2, "serve", "-m", TARGET, *RANKS, "-t", "1", "--port", taken.getsockname()[1])
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ggpipe: ")]  # mpirun adds its own comment
    assert line.startswith("ggpipe: error: --port ")
