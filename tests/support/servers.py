"""`ggpipe serve` as its users start it: a child process with a free port, ended with SIGTERM."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ggpipe.launch.environment import mpi_environment
from support.commands import ROOT, TARGET

DRAFT = TARGET.with_name("tales-draft.gguf")
LIMIT_S = 120


@dataclass
class Serving:
    """A server that listens."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    """What it has written."""
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """The status, the JSON and the headers of an answer. `body`: bytes as they are, all else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            text = answer.read()
            is_json = "json" in (answer.getheader("content-type") or "")
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, json.loads(text) if is_json else text.decode(), found

    @contextlib.contextmanager
    def streaming(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """A stream that has begun. Its client leaves at the end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps({**body, "stream": True}).encode())
            yield connection.getresponse()

    def wait_until_ready(self) -> None:
        """It has loaded."""
        self.wait_for(lambda: self.ask("GET", "/health")[0] == 200)

    def wait_for(self, happened: Any) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            assert self.process.poll() is None, self.lines[-5:]
            assert time.monotonic() < deadline, self.lines[-5:]
            time.sleep(0.1)

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        found = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        rows = [(int(pid), int(parent), args) for pid, parent, args in re.findall(r"(\d+) +(\d+) (.*)", found)]
        own = {self.process.pid}
        for _ in range(5):
            own |= {pid for pid, parent, _ in rows if parent in own}
        return [pid for pid, _, args in rows if pid in own and re.match(r"\S*python\S* .*-m ggpipe rank", args)]

    def end(self) -> int:
        """Its exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)


@contextlib.contextmanager
def server(*arguments: str, launch: Sequence[str] = ()) -> Iterator[Serving]:
    """`ggpipe serve ARGUMENTS` with the bundled pair, behind `launch`. It listens, and has not loaded yet."""
    command = [sys.executable, "-P", "-m", "ggpipe", "serve", "-m", str(TARGET), "--port", "0", "-t", "1", *arguments]
    process = subprocess.Popen(
        [*launch, *command], cwd=ROOT, env={**os.environ, **mpi_environment()}, stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    own = Serving(process)

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            own.lines.append(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        own.wait_for(lambda: any("listening on" in line for line in own.lines))
        (found,) = re.findall(r"listening on http://[\d.]+:(\d+)", "".join(own.lines))
        own.port = int(found)
        yield own
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join(10)
