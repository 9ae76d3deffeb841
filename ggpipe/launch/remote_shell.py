"""Runs a command on several machines at a time, by the remote shell that mpirun uses, within a limit."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import selectors
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ggpipe.launch.environment import die_with_parent
from ggpipe.launch.mpirun import kill_session

_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")
"""Variables with which users name another remote shell than ssh."""
_SSH = ("ssh", "-n", "-o", "BatchMode=yes")
_TICK_S = 0.05
_SSH_FAILED = 255
_FAULTS = (  # what ssh says, the fault, and the command that mends it
    (r"could not resolve|not known|no address associated", "its name does not resolve",
     "correct the hostfile, or add the name to /etc/hosts"),
    (r"connection refused", "nothing listens at its ssh port", "on {host}: sudo systemctl enable --now ssh"),
    (r"permission denied|publickey|too many authentication", "ssh asks for a password", "ssh-copy-id {host}"),
    (r"host key verification failed|identification has changed", "ssh does not know its key, or another one",
     "ssh-keygen -R {host}; ssh {host} true"),
    (r"timed out|no route to host|network is unreachable", "it does not answer", "ping {host}"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command on a machine has printed."""

    code: int | None
    """Exit code; None: it did not end within the limit."""
    output: str
    errors: str
    is_local: bool

    @property
    def is_reached(self) -> bool:
        """Whether the remote shell has started a command there."""
        return self.is_local or bool(self.output) or self.code not in (None, _SSH_FAILED)


def ask_all(
    hosts: Collection[str], command: Sequence[str], limit_s: float, attend: Callable[[], None] = lambda: None
) -> dict[str, Answer]:
    """Run a command on each machine, all at the same time, and kill it after `limit_s` seconds.

    On this machine it needs no remote shell. `attend` is called meanwhile, and may raise. Raises OSError if processes
    cannot be started.
    """
    printed = {host: {"stdout": b"", "stderr": b""} for host in hosts}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with contextlib.ExitStack() as stack:
        waiting = stack.enter_context(selectors.DefaultSelector())
        for host in printed:
            process = subprocess.Popen(
                [*_shell(host), *command] if is_this_machine(host) else [*_shell(host), host, shlex.join(command)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            processes[host] = process
            stack.callback(_end, process)
            for name in printed[host]:
                waiting.register(stack.enter_context(getattr(process, name)), selectors.EVENT_READ, (host, name))
        deadline = time.monotonic() + limit_s
        while waiting.get_map() and time.monotonic() < deadline:
            attend()
            for key, _ in waiting.select(_TICK_S):
                host, name = key.data
                data = os.read(key.fd, 1 << 16)
                printed[host][name] += data
                if not data:
                    waiting.unregister(key.fileobj)
        open_hosts = {key.data[0] for key in waiting.get_map().values()}
        codes = {host: None if host in open_hosts else processes[host].wait() for host in printed}
    return {
        host: Answer(
            code=codes[host],
            output=own["stdout"].decode(errors="replace"),
            errors=own["stderr"].decode(errors="replace"),
            is_local=is_this_machine(host),
        )
        for host, own in printed.items()
    }


def why_unreached(host: str, answer: Answer, limit_s: float) -> tuple[str, str]:
    """Why the remote shell could not start a command on a machine, and the command that mends it; empty if it could."""
    if answer.is_reached:
        return "", ""
    if answer.code is None:
        return f"it does not answer within {limit_s:g} s", f"ping {host}"
    for pattern, fault, cure in _FAULTS:
        if re.search(pattern, answer.errors, re.IGNORECASE):
            return fault, cure.format(host=host)
    said = " ".join(answer.errors.split()) or f"exit code {answer.code}"
    return f"the remote shell failed ({said})", f"ssh {host} true"


def is_this_machine(host: str) -> bool:
    """Whether a machine of a hostfile is this one, as far as its name or address says."""
    name = socket.gethostname()
    if host in ("localhost", name) or host.partition(".")[0] == name.partition(".")[0] != "":
        return True
    with contextlib.suppress(OSError, ValueError):
        ipaddress.ip_address(host)  # names are not looked up: that may take long
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return bool(probe.getsockname()[0] == probe.getpeername()[0])
    return False


def _shell(host: str) -> list[str]:
    """The start of a command line for a machine."""
    if is_this_machine(host):
        return []
    if "SLURM_JOB_ID" in os.environ:
        return ["srun", "--overlap", "-N1", "-n1", "-w"]
    agents = [own for name in _AGENTS if (own := os.environ.get(name, ""))]
    return shlex.split(agents[0]) if agents else list(_SSH)


def _end(process: subprocess.Popen[bytes]) -> None:
    kill_session(process.pid)
    process.wait()
