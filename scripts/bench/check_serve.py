"""A server for long, and under faults; run it as `scripts/bench/check_serve`.

requests  short outputs, 8 at a time, a third of which their clients leave midway. After the first 200, the resident
          memory of the server and of each rank must not grow by more than 2 %. At the end all KV cells must be free,
          since a request gets the whole context, and all slots, since as many streams as there are slots write side by
          side.
kills     four streams at a time, while a rank is killed (SIGKILL) or stopped (SIGSTOP): the head, a worker or the draft
          rank, at a random time. All outputs must be complete and, with `--exact`, equal to those of streams that
          nothing happened to; pings must continue, and `/health` must say that ranks are being restarted.

A line for each step; exit code 1 when something is not as it should be.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support import server_faults
from support.http_streams import Stream, read_stream, read_streams
from support.servers import DRAFT, Serving, server

N_CTX, N_SLOTS, N_TOKENS, N_RANKS = 2048, 8, 150, 3
N_FIRST, MOST_GROWTH = 200, 0.02
RANK_TIMEOUT_S = 3.0
RANKS = ("-md", str(DRAFT), "--mpi-layer-split", "0.5,0.5/1.0")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser("check_serve", description="Is memory held, is anything lost?")
    parser.add_argument("--requests", type=int, default=2000, help="short outputs (default 2000; 0: none)")
    parser.add_argument("--kills", type=int, default=20, help="faults (default 20; 0: none)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves no server
    wrong = []
    if args.requests:
        wrong += list(_requests(args.requests, args.seed))
    if args.kills:
        wrong += list(_kills(args.kills, args.seed))
    print("\n".join(wrong) or "all as it should be")
    return 1 if wrong else 0


# Many requests


def _requests(n_requests: int, seed: int) -> Iterator[str]:
    with server(*RANKS, "-c", str(N_CTX), "-np", str(N_SLOTS), "--metrics", "--timeout", "60") as own:
        own.wait_until_ready()
        resident: list[dict[str, int]] = []
        began = time.monotonic()
        for first in range(0, n_requests, N_FIRST):
            numbers = range(first, min(first + N_FIRST, n_requests))
            with ThreadPoolExecutor(N_SLOTS) as pool:
                for number, found in zip(numbers, pool.map(lambda n: _short(own.port, n, seed), numbers), strict=True):
                    if found:
                        yield f"request {number}: {found}"
            yield from _is_idle(own)
            resident.append(_resident(own))
            memory = ", ".join(f"{name} {n_bytes / 2**20:.1f}" for name, n_bytes in resident[-1].items())
            seconds = time.monotonic() - began
            print(f"{numbers.stop:5} requests  {seconds:5.0f} s  resident MiB: {memory}", flush=True)
        for name, before in resident[0].items():
            growth = resident[-1].get(name, 0) / before - 1
            print(f"{name}: {growth:+.1%} since request {N_FIRST}")
            if growth > MOST_GROWTH:
                yield f"the resident memory of {name} grew by {growth:.1%}"
        yield from _all_is_free(own)
        yield from _bad_lines(own)
        if code := own.end():
            yield f"exit code {code}"


def _short(port: int, number: int, seed: int) -> str:
    """One request; what was wrong with it."""
    rng = random.Random(f"{seed} {number}")
    prompt = f"Once upon a time there was {rng.choice(server_faults.SUBJECTS)}"
    prompt += f" and number {rng.randrange(50)}" * rng.randrange(4)
    body = {"prompt": prompt, "n_predict": rng.randint(8, 48), "seed": number, "ignore_eos": True}
    if number % 3 == 0:
        read_stream(port, body, leaves_after=rng.randint(1, 6))
        return ""
    found = read_stream(port, body)
    n_tokens = len(found.tokens)
    if found.error or not found.is_whole:
        return found.error or f"ended after {n_tokens} tokens"
    return "" if n_tokens == body["n_predict"] else f"{n_tokens} of {body['n_predict']} tokens"


def _is_idle(own: Serving) -> Iterator[str]:
    """Requests that clients left end within a run."""
    deadline = time.monotonic() + 20
    while (n_left := _figure(own, "llamacpp:requests_processing")) and time.monotonic() < deadline:
        time.sleep(0.05)
    if n_left:
        yield f"{n_left:.0f} requests are being served though nobody asks"


def _all_is_free(own: Serving) -> Iterator[str]:
    (whole,) = read_streams(own.port, [{"prompt": "The king", "n_predict": N_CTX, "ignore_eos": True}])
    n_prompt = len(own.ask("POST", "/tokenize", {"content": "The king", "add_special": True})[1]["tokens"])
    if len(whole.tokens) < N_CTX - n_prompt:
        yield f"a request got {len(whole.tokens)} of {N_CTX - n_prompt} cells: {whole.error}"
    n_each = N_CTX // N_SLOTS - 16
    body = {"prompt": "The king", "n_predict": n_each, "ignore_eos": True}
    began: dict[int, float] = {}
    ended: dict[int, float] = {}

    def read(number: int) -> Stream:
        found = read_stream(own.port, body, on_token=lambda: began.setdefault(number, time.monotonic()))
        ended[number] = time.monotonic()
        return found

    with ThreadPoolExecutor(N_SLOTS) as pool:
        side_by_side = list(pool.map(read, range(N_SLOTS)))
    if any(len(stream.tokens) != n_each for stream in side_by_side) or max(began.values()) > min(ended.values()):
        yield "not all slots are free"


def _figure(own: Serving, name: str) -> float:
    lines = own.ask("GET", "/metrics")[1].splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def _resident(own: Serving) -> dict[str, int]:
    """Bytes, by process."""
    processes = {"server": own.process.pid} | {f"rank {i}": process for i, process in enumerate(sorted(own.ranks()))}
    return {name: _resident_bytes(process) for name, process in processes.items()}


def _resident_bytes(process: int) -> int:
    fields = Path(f"/proc/{process}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _bad_lines(own: Serving) -> Iterator[str]:
    for line in own.lines:
        if "Traceback" in line or "a bug" in line or "broke" in line:
            yield line.rstrip()


# Faults


def _kills(n_kills: int, seed: int) -> Iterator[str]:
    with server(
        *RANKS, "--exact", "-c", str(N_CTX), "-np", "4", "--restart", "100", "--rank-timeout", str(RANK_TIMEOUT_S),
        "--sse-ping-interval", str(server_faults.PING_S),
    ) as own:  # fmt: skip
        own.wait_until_ready()
        bodies = server_faults.bodies(N_TOKENS)
        expected = read_streams(own.port, bodies)
        for number in range(n_kills):
            how, problems = server_faults.play(own, N_RANKS, bodies, expected, number, seed)
            print(f"{number:3} {how}  {'; '.join(problems) or 'ok'}", flush=True)
            yield from (f"fault {number}: {problem}" for problem in problems)
        yield from _bad_lines(own)
        if code := own.end():
            yield f"exit code {code}"
        if left := own.ranks():
            yield f"processes are left: {left}"


if __name__ == "__main__":
    sys.exit(main())
