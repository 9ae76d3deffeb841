"""Commands and files of the deployment page."""

from __future__ import annotations

import contextlib
import io
import re
import socket
import subprocess
from pathlib import Path

import pytest
from support.commands import ROOT
from support.servers import server

from ggpipe.launch import environment
from ggpipe.options.table import OPTIONS

PAGE = (ROOT / "docs" / "deployment.md").read_text()
FLAGS = {flag.strip() for row in OPTIONS for text in row.flags for flag in text.split("/")}


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_batch_file_is_bash() -> None:
    done = subprocess.run(["bash", "-n"], input=block("bash"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_commands_have_flags_that_exist() -> None:
    files = [path.read_text() for path in (ROOT / "scripts" / "container").iterdir()]
    texts = [PAGE, (ROOT / "README.md").read_text(), *files]
    commands = [found for text in texts for found in re.findall(r"serve -m (?:[^\n`]*\\\n)*[^\n`]*", text)]
    assert len(commands) >= 4
    for command in commands:
        assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", command)) <= FLAGS, command


def test_the_readmes_client() -> None:
    (example,) = re.findall(r"```python\n(import openai\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    with server("-c", "512", "-n", "4") as own:
        own.wait_until_ready()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(example.replace("http://127.0.0.1:8080", own.url), {})
    assert out.getvalue().strip()


def test_systemd_gets_its_datagram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        environment.notify_systemd("READY=1")
        assert systemd.recv(64) == b"READY=1"
    environment.notify_systemd("STATUS=nobody reads it")
