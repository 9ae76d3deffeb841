"""Commands on several machines, by a remote shell that plays them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.commands import HANG_S

from ggpipe.launch.remote_shell import Answer, ask_all, is_this_machine, why_unreached

SHELL = """#!/bin/bash
host=$1; shift
case $host in
  there) eval "$*" ;;
  fails) eval "$*" >/dev/null; exit 3 ;;
  silent) sleep 3600 ;;
  talks) echo something; sleep 3600 ;;
  *) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255 ;;
esac
"""


@pytest.fixture(autouse=True)
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "shell"
    program.write_text(SHELL)
    program.chmod(0o700)
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(program))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_all_machines_are_asked_within_the_limit() -> None:
    command = ["echo", "two words; x"]
    found = ask_all(["there", "fails", "gone", "localhost"], command, HANG_S)  # they answer, however late
    found |= ask_all(["silent", "talks"], command, 0.5)
    assert {host: answer.code for host, answer in found.items()} == {
        "there": 0, "fails": 3, "silent": None, "talks": None, "gone": 255, "localhost": 0,
    }  # fmt: skip
    assert found["there"].output == found["localhost"].output == "two words; x\n"
    unreached = {host: why_unreached(host, answer, 2)[0] for host, answer in found.items()}
    assert {host: why for host, why in unreached.items() if why} == {
        "silent": "it does not answer within 2 s", "gone": "its name does not resolve",
    }  # fmt: skip


def test_attention_while_waiting() -> None:
    def attend() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_all(["silent"], ["true"], 60, attend)


@pytest.mark.parametrize(
    ("errors", "fault", "cure"),
    [
        ("ssh: Could not resolve hostname x: Name or service not known", "its name does not resolve", "/etc/hosts"),
        ("ssh: connect to host x port 22: Connection refused", "nothing listens at its ssh port", "systemctl"),
        ("ssh: connect to host x port 22: No route to host", "it does not answer", "ping x"),
        ("ssh: connect to host x port 22: Connection timed out", "it does not answer", "ping x"),
        ("x: Permission denied (publickey,password).", "ssh asks for a password", "ssh-copy-id x"),
        ("Host key verification failed.", "ssh does not know its key, or another one", "ssh-keygen -R x"),
        ("strange", "the remote shell failed (strange)", "ssh x true"),
    ],
)
def test_what_ssh_says(errors: str, fault: str, cure: str) -> None:
    found = why_unreached("x", Answer(code=255, output="", errors=errors, is_local=False), 10)
    assert found[0] == fault
    assert cure in found[1]


def test_names_of_this_machine() -> None:
    for host in ("localhost", "127.0.0.1", "::1", socket.gethostname(), f"{socket.gethostname()}.example.org"):
        assert is_this_machine(host), host
    for host in ("node-of-nobody", "192.0.2.7"):
        assert not is_this_machine(host), host
