"""Measures servers over HTTP; run it as `scripts/bench/serving --http`.

All take turns in each round, on the bundled pair's target inflated to 0.4 B in Q8_0 (or as `--as` says), with prompts
of 16 tokens:

api         the Python API: tokens of `ggpipe.Answer`, in the process of the server below, of the same ranks
stages      `ggpipe serve` with two ranks of one thread each, pinned to a core each, as two stages
group       the same as one stage, which both ranks compute together
llama       `llama-server` with two threads, or libllama's batches where there is no llama-server
rpc         `llama-server` over two `rpc-server`s of one thread each, pinned to a core each, where there are any

One client reads all streams of a server with plain sockets: it notes when data came and counts events, and reads no
JSON but the last. It shares the cores with server and ranks, so its time counts as HTTP's. A server's tokens a second
are those of all streams, from the first request sent to the last token's event; its ITL is the time between two events.
Ratios are of one round; tables show medians with quartiles over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import math
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ggpipe.api.answer import Answer
from ggpipe.api.engine_thread import EngineThread
from ggpipe.api.feed import Feed
from ggpipe.cli.command_line import parse
from ggpipe.cli.commands import serve
from ggpipe.errors import GgpipeError
from ggpipe.launch.environment import die_with_parent
from ggpipe.llama.bundled import BUNDLED_PAIR, inflated_pair
from ggpipe.options.commands import COMMANDS
from ggpipe.options.table import OPTIONS
from scripts.bench.http_streams import Streams, stream
from scripts.bench.measuring import greedy, middle
from scripts.bench.serving import N_CTX, N_SHORT, libllama, prompts
from scripts.models.quantize import quantize

SPLITS = {"stages": "0.5,0.5", "group": "1.0*2"}
SERVERS = ("api", *SPLITS, "llama", "rpc")
TOKENS = [5 + i * 7919 % 2000 for i in range(500)]  # of which prompts are made; the bundled target has 2048
_READY_S = 180.0
_SCRIPT = (sys.executable, "-m", "scripts.bench.serving_http")  # from the project's folder


# The servers


def serving_job(arguments: Sequence[str]) -> int:
    """`ggpipe serve ARGUMENTS`. Its Python API answers each line of stdin, prompts and a number of tokens, with the
    median ITL and tokens a second."""
    command = next(command for command in COMMANDS if command.name == "serve")
    return serve.run(parse(command, OPTIONS, arguments), _answer_lines)


def _answer_lines(engine: EngineThread) -> None:
    def answer() -> None:
        for line in sys.stdin:
            texts, n = json.loads(line)
            began = time.monotonic()
            try:
                if len(texts) == 1:
                    times = [[time.monotonic() for _ in _submitted(engine, texts[0], n)]]
                else:
                    times = asyncio.run(_together(engine, texts, n))
            except GgpipeError as e:
                print(json.dumps(str(e)), flush=True)
                continue
            found = Streams(began, times)
            print(json.dumps([found.itl_s, found.tps(n)]), flush=True)

    threading.Thread(target=answer, daemon=True).start()


def _submitted(engine: EngineThread, text: Sequence[int], n: int) -> Answer:
    feed = Feed()
    engine.submit(feed, lambda _: greedy(tuple(text), n))
    return Answer(feed, lambda: engine.cancel(feed), text)


async def _together(engine: EngineThread, texts: Sequence[Sequence[int]], n: int) -> list[list[float]]:
    async def follow(answer: Answer) -> list[float]:
        return [time.monotonic() async for _ in answer]

    return await asyncio.gather(*(follow(_submitted(engine, text, n)) for text in texts))


@dataclass(frozen=True)
class Server:
    """A server that is ready."""

    process: subprocess.Popen[bytes]
    port: int

    def api(self, texts: Sequence[Sequence[int]], n: int) -> tuple[float, float]:
        """What `serving_job` measured: seconds, and tokens a second."""
        source, sink = self.process.stdout, self.process.stdin
        assert source is not None
        assert sink is not None
        sink.write(json.dumps([texts, n]).encode() + b"\n")
        sink.flush()
        answer = json.loads(source.readline())
        if isinstance(answer, str):
            raise RuntimeError(f"the Python API answered: {answer}")
        return answer[0], answer[1]

    @property
    def cpu_s(self) -> float:
        """Of all threads of its process, without ranks."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@contextlib.contextmanager
def started(command: Sequence[str | Path], port: int, log: IO[bytes], cores: Sequence[int] = ()) -> Iterator[Server]:
    """A server that is ready to answer `/health` (port 0: no server of HTTP). `cores`: all that it may use."""

    def prepare() -> None:
        die_with_parent()
        if cores:
            os.sched_setaffinity(0, cores)

    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, preexec_fn=prepare)
    try:
        deadline = time.monotonic() + _READY_S
        while port and not _is_ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not become ready: see {log.name}")
            time.sleep(0.1)
        yield Server(process, port)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
            return b" 200 " in connection.recv(100)
    except OSError:
        return False


def free_port() -> int:
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def pin(server: Server, cores: Sequence[int]) -> None:
    """Give each rank of a `ggpipe serve` a core, in turn."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    for pid in parents:
        up = pid
        while up in parents and up != server.process.pid:
            up = parents[up]
        if up != server.process.pid or pid == up:
            continue
        with contextlib.suppress(OSError):
            found = re.search(rb"(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
            if found is None:
                continue
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {cores[int(found[1]) % len(cores)]})


# Rounds


Measure = Callable[[Sequence[Sequence[int]]], dict[str, float]]
"""Has prompts continued."""


@contextlib.contextmanager
def all_servers(args: argparse.Namespace) -> Iterator[dict[str, Measure]]:
    """What is measured, by name."""
    path = BUNDLED_PAIR.target if args.bundled else args.model or inflated_pair().target
    cores = sorted(os.sched_getaffinity(0))
    found: dict[str, Measure] = {}
    with contextlib.ExitStack() as stack:
        if args.file_type:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ggpipe-bench-")))
            path = quantize(path, folder / f"{args.file_type}.gguf", args.file_type)
        log = stack.enter_context(args.log.open("wb"))

        def start(command: Sequence[str | Path], own_cores: Sequence[int] = ()) -> Server:
            port = free_port()
            return stack.enter_context(started([*command, "--port", str(port)], port, log, own_cores))

        for name, split in SPLITS.items():
            if name in args.servers:
                flags = ["-t", "1", "-np", str(args.users), "-c", str(N_CTX), "--mpi-layer-split", split]
                server = start([*_SCRIPT, "--serve", "-m", path, *flags])
                pin(server, cores)
                found[name] = functools.partial(_over_http, server, args.n)
                if name == "stages" and "api" in args.servers:
                    found["api"] = functools.partial(_by_api, server, args.n)
        common = ["-m", path, "-np", str(args.users), "-c", str(N_CTX), "--cache-ram", "0"]
        if "llama" in args.servers and args.llama_server:
            server = start([args.llama_server, *common, "-t", str(len(cores))])
            found["llama"] = functools.partial(_over_http, server, args.n)
        elif "llama" in args.servers:
            ask = stack.enter_context(libllama(path, cores))
            found["llama"] = lambda texts: {"tps": ask(texts, args.n)}
        if "rpc" in args.servers and args.llama_server and args.rpc_server:
            ports = [free_port() for _ in cores[:2]]
            for core, port in zip(cores, ports, strict=False):
                command = [args.rpc_server, "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
                stack.enter_context(started(command, 0, log, [core]))
            time.sleep(1)  # they have no health to ask for
            places = ",".join(f"127.0.0.1:{port}" for port in ports)
            server = start([args.llama_server, *common, "-t", "1", "--rpc", places, "-ngl", "99"])
            found["rpc"] = functools.partial(_over_http, server, args.n)
        yield found


def _over_http(server: Server, n: int, texts: Sequence[Sequence[int]]) -> dict[str, float]:
    cpu_s, own_s = server.cpu_s, time.process_time()
    streams = stream(server.port, texts, n)
    n_tokens = len(texts) * n
    return {
        "itl": streams.itl_s,
        "tps": streams.tps(n),
        "cpu": (server.cpu_s - cpu_s) / n_tokens,
        "client": (time.process_time() - own_s) / n_tokens,
    }


def _by_api(server: Server, n: int, texts: Sequence[Sequence[int]]) -> dict[str, float]:
    cpu_s = server.cpu_s
    itl_s, tps = server.api(texts, n)
    return {"itl": itl_s, "tps": tps, "cpu": (server.cpu_s - cpu_s) / (len(texts) * n)}


def measured(args: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """All rounds but the first, which warms up."""
    rounds = []
    with all_servers(args) as servers:
        for i in range(args.rounds + 1):
            found = {}
            for name in list(servers)[:: 1 if i % 2 else -1]:
                for users in sorted({1, args.users}):
                    if users == 1 and name not in ("api", "stages"):
                        continue
                    found[f"{name} {users}"] = servers[name](prompts(TOKENS, users, N_SHORT))
            shown = {name: {key: float(f"{value:.4g}") for key, value in one.items()} for name, one in found.items()}
            print(f"round {i} of {args.rounds}: {shown}", file=sys.stderr, flush=True)
            if i:
                rounds.append(found)
    return rounds


# Tables


def report(rounds: Sequence[dict[str, dict[str, float]]], users: int) -> None:
    """Print medians and ratios."""

    def usual(name: str, key: str) -> float:
        return statistics.median(r[name].get(key, math.nan) for r in rounds)

    first = rounds[0]
    if "api 1" in first and "stages 1" in first:
        itl = middle((r["stages 1"]["itl"] / r["api 1"]["itl"] for r in rounds), 3)
        print(f"one stream, ITL p50 over HTTP / by the API: {itl}")
        tps = middle((r[f"stages {users}"]["tps"] / r[f"api {users}"]["tps"] for r in rounds), 3)
        print(f"{users} streams, tokens/s over HTTP / by the API: {tps}")
    print("server   streams   tokens/s   ITL p50, ms   CPU ms a token: server, client   tokens/s: llama's x   rpc's x")
    for name in first:
        server, n = name.split()
        ratios = [
            middle((r[name]["tps"] / r[f"{base} {n}"]["tps"] for r in rounds), 3) if f"{base} {n}" in first else "-"
            for base in ("llama", "rpc")
        ]
        figures = f"{usual(name, 'tps'):8.1f} {1e3 * usual(name, 'itl'):10.2f}"
        costs = f"{1e3 * usual(name, 'cpu'):6.2f} {1e3 * usual(name, 'client'):6.2f}"
        print(f"{server:8s} {n:>6s} {figures}    {costs}    {'   '.join(ratios)}")


def main(arguments: Sequence[str]) -> int:
    """Parse the command line and bench, or be a server."""
    if arguments[:1] == ["--serve"]:
        return serving_job(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="serving --http", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-n", type=int, default=64, help="tokens to generate for each user")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS, help="what to measure")
    parser.add_argument("--llama-server", default=shutil.which("llama-server"), help="where it is; default: on PATH")
    parser.add_argument("--rpc-server", help="where it is; default: beside llama-server")
    parser.add_argument("--model", type=Path, help="instead of the inflated target")
    parser.add_argument("--bundled", action="store_true", help="the bundled target as it is")
    parser.add_argument("--as", dest="file_type", metavar="TYPE", help="quantize it anew: Q4_K_M, Q4_0, ...")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="where servers write what they say")
    args = parser.parse_args(arguments)
    if not args.rpc_server and args.llama_server:
        beside = [Path(args.llama_server).with_name(name) for name in ("ggml-rpc-server", "rpc-server")]
        args.rpc_server = next((path for path in beside if path.exists()), None)
    report(measured(args), args.users)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
