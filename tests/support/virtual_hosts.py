"""Several hosts on this machine: network and host name namespaces on one bridge, and a remote shell between them.

Needs root and `ip netns`. Each host sees the files and processes of this machine. The bridge is in a namespace as well,
so that this machine's own network does not change: browsers end their requests when it does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ggpipe.launch.mpirun import find_mpirun

_NUMBERS = itertools.count(1)
_NETWORK = "10.78.0"
_SHELL = """#!/bin/bash
# As ssh: [options] HOST COMMAND...
while [[ $1 == -* ]]; do shift; done
host=${{1#*@}}
shift
exec nsenter --net=/run/netns/{prefix}${{host##*[!0-9]}} --uts={folder}/uts${{host##*[!0-9]}} /bin/bash -c "$*"
"""


def why_not() -> str | None:
    """Why this machine can have no virtual hosts; None where it can."""
    if os.geteuid() != 0:
        return "virtual hosts need root"
    if missing := [tool for tool in ("ip", "nsenter", "unshare", "mount") if shutil.which(tool) is None]:
        return f"virtual hosts need {', '.join(missing)}"
    name = f"ggprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return "virtual hosts need network namespaces"
    _quietly("ip", "netns", "del", name)
    return None


class VirtualHosts:
    """Hosts 1 to N, named by their addresses."""

    def __init__(self, folder: Path, n_hosts: int) -> None:
        """`folder`: a temporary one."""
        self._folder = folder
        name = f"gg{os.getpid()}{next(_NUMBERS)}"  # the kernel takes a while to forget an old one
        self._prefix, self._switch = f"{name}n", f"{name}switch"
        self.n_hosts = n_hosts
        self.shell = folder / "shell"
        self.hostfile = folder / "hosts"
        """One rank each."""
        self.environment = {
            "PRTE_MCA_plm_ssh_agent": str(self.shell),
            "PRTE_MCA_prte_if_include": "eth0",
            "OMPI_MCA_btl_tcp_if_include": "eth0",
            "HYDRA_LAUNCHER_EXEC": str(self.shell),
            "HYDRA_IFACE": "eth0",
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": "eth0",
        }
        """For the mpirun of Open MPI and of MPICH."""

    def __enter__(self) -> VirtualHosts:
        try:
            self._up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _up(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for i in range(1, self.n_hosts + 1):
            space, port = self._space(i), self._port(i)
            _run("ip", "netns", "add", space)
            _run("ip", "-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            names = self._names(i)
            names.touch()
            _run("unshare", f"--uts={names}", "hostname", f"node{i}")
        self.shell.write_text(_SHELL.format(prefix=self._prefix, folder=self._folder))
        self.shell.chmod(0o755)
        self.hostfile.write_text(self.lines_for(*range(1, self.n_hosts + 1)))

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for i in range(1, self.n_hosts + 1):
            _quietly("umount", str(self._names(i)))
            _quietly("ip", "netns", "del", self._space(i))
        _quietly("ip", "netns", "del", self._switch)

    @staticmethod
    def address(host: int) -> str:
        return f"{_NETWORK}.{host}"

    def lines_for(self, *hosts: int) -> str:
        """A hostfile with one rank on each of these hosts, as this machine's mpirun reads it."""
        version = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True).stdout
        ending = ":1" if "HYDRA" in version else " slots=1"
        return "".join(f"{self.address(host)}{ending}\n" for host in hosts)

    def on(self, host: int) -> list[str]:
        """The start of a command line that runs on a host."""
        return ["nsenter", f"--net=/run/netns/{self._space(host)}", f"--uts={self._names(host)}"]

    def cut_off(self, host: int) -> None:
        """Take a host's link down."""
        _run("ip", "-n", self._switch, "link", "set", self._port(host), "down")

    def connect(self, host: int) -> None:
        """Take its link up again."""
        _run("ip", "-n", self._switch, "link", "set", self._port(host), "up")

    def processes(self) -> list[int]:
        """Ids of the processes that run on any host."""
        found: list[int] = []
        for host in range(1, self.n_hosts + 1):
            listed = subprocess.run(["ip", "netns", "pids", self._space(host)], capture_output=True, text=True)
            found += map(int, listed.stdout.split())
        return found

    def _space(self, host: int) -> str:
        return f"{self._prefix}{host}"

    def _port(self, host: int) -> str:
        return f"port{host}"

    def _names(self, host: int) -> Path:
        return self._folder / f"uts{host}"


@contextlib.contextmanager
def virtual_hosts(n_hosts: int) -> Iterator[VirtualHosts]:
    """Hosts that are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="ggpipe-hosts-") as folder, VirtualHosts(Path(folder), n_hosts) as hosts:
        yield hosts


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _quietly(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True)
