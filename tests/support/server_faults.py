"""Ranks of a server that die while it writes four streams."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

from support.commands import HANG_S
from support.http_streams import Stream, read_streams
from support.servers import Serving

PING_S = 0.5
"""`--sse-ping-interval` of these servers."""
SUBJECTS = ("a king", "a dog and a cat", "the sea", "a poor tailor", "three brothers", "the moon", "a talking fish")


def bodies(n_predict: int) -> list[dict[str, Any]]:
    """Four streams: greedy, and with samplers."""
    samplings: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.8, "seed": 1}, {"temperature": 0.8, "seed": 2, "repeat_penalty": 1.2},
        {"temperature": 1.2, "top_k": 0, "seed": 3},
    ]  # fmt: skip
    prompts = [f"Once upon a time there was {subject}" for subject in SUBJECTS[:4]]
    return [
        {"prompt": prompt, "n_predict": n_predict, "ignore_eos": True, **sampling}
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]


def play(
    own: Serving, n_ranks: int, bodies: list[dict[str, Any]], expected: list[Stream], number: int, seed: int
) -> tuple[str, list[str]]:
    """Let a rank die under streams. Returns what was done, and what was wrong."""
    rng = random.Random(f"{seed} {number}")
    own.wait_for(lambda: own.ask("GET", "/health")[0] == 200 and len(own.ranks()) == n_ranks)
    process = sorted(own.ranks())[number % n_ranks]
    rank, stops = number % n_ranks, number // n_ranks % 2 == 1
    n_tokens_each = bodies[0]["n_predict"]
    after = rng.randrange(10, int(0.8 * n_tokens_each * len(bodies)))
    n_lines, n_tokens = len(own.lines), 0
    is_time, at = threading.Event(), time.monotonic()

    def count() -> None:
        nonlocal n_tokens
        n_tokens += 1  # a lost one only makes the fault late
        if n_tokens >= after:
            is_time.set()

    streams: list[Stream] = []
    reading = threading.Thread(target=lambda: streams.extend(read_streams(own.port, bodies, count)))
    reading.start()
    is_time.wait(HANG_S)
    with contextlib.suppress(ProcessLookupError):  # the fault before came so late that it ends the ranks now
        os.kill(process, signal.SIGSTOP if stops else signal.SIGKILL)
    at = time.monotonic()
    states = set()
    while reading.is_alive():
        states.add(own.ask("GET", "/health")[1]["status"])
        time.sleep(0.05)
    seconds = time.monotonic() - at
    reading.join()
    problems = [
        f"stream {i} is another text: {len(stream.tokens)} tokens, {stream.error}"
        for i, (stream, whole) in enumerate(zip(streams, expected, strict=True))
        if (stream.tokens, stream.text, stream.is_whole) != (whole.tokens, whole.text, True)
    ]
    has_restarted = any("starting the ranks again" in line for line in own.lines[n_lines:])
    has_waited = has_restarted and seconds > 4 * PING_S  # else the texts had ended already
    if has_waited and "restarting" not in states:
        problems.append(f"/health never said restarting, but {sorted(states)}")
    silent_s = max((_longest_gap(stream.pings_s, at) for stream in streams), default=0.0)
    if has_restarted and not any(stream.pings_s for stream in streams):
        waited_s = max((_longest_gap(stream.events_s, 0) for stream in streams), default=0.0)
        if waited_s > 4 * PING_S:
            problems.append(f"no pings in {waited_s:.1f} s")
    how = f"{'SIGSTOP' if stops else 'SIGKILL'} rank {rank} after {after:3} tokens: {seconds:4.1f} s, pings at most"
    return f"{how} {silent_s:.1f} s apart", problems


def _longest_gap(times: list[float], since: float) -> float:
    times = [at for at in times if at > since]
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def wait_for_end(processes: list[int], limit_s: float = 60.0) -> None:
    """Of processes that are not this one's children."""
    deadline = time.monotonic() + limit_s
    while left := [process for process in processes if Path(f"/proc/{process}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
