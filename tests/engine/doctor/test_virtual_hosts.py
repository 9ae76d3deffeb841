"""Faults planted on virtual hosts: the doctor names each, with the command that mends it, and fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT, TARGET
from support.virtual_hosts import VirtualHosts, virtual_hosts, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

LIMIT_S = 30
FAULTS = {  # by the number of the host: what its shell does before the command, and what the doctor says
    2: ("ulimit -s 256", "the stack of its processes is limited to 256 kB", "ulimit -s 8192"),
    3: ("ulimit -f 100", "its processes may write only 100 kB to a file", "ulimit -f unlimited"),
    4: ("ulimit -n 64", "its processes may open only 64 files", "ulimit -n 8192"),
    5: ("mount -t tmpfs -o size=64k none /dev/shm", "its shared memory is full", "remount"),
    6: (f"mount -t tmpfs none {TARGET.parent}", "cannot open model file", "rsync -L --mkpath"),
    7: (f"mount --bind {TARGET.with_name('tales-draft.gguf')} {TARGET}", "differs from the one on", "rsync -L"),
    8: ("ip link set eth0 down", "it cannot connect to", "ufw allow"),
    9: ("command=${command//-m ggpipe/-m ggpipe_missing}; exec 2> >(sed s/ggpipe_missing/ggpipe/ >&2)",
        "it has no ggpipe at", "rsync -aR"),
    10: ("command=\"$command | sed 's/\\\"libllama\\\":\\\"/&9/'\"", "it has libllama 9", "rsync -aR"),
    11: ("command=\"$command | sed 's/Open MPI v\\|MPICH Version: /Other MPI /'\"", "its MPI library is Other MPI",
         "rsync -aR"),
    12: ("echo 'host: Permission denied (publickey).' >&2; exit 255", "ssh asks for a password", "ssh-copy-id"),
    13: ("echo 'Host key verification failed.' >&2; exit 255", "ssh does not know its key", "ssh-keygen -R"),
    14: ("sleep 3600", f"it does not answer within {LIMIT_S} s", "ping"),
    15: ("kill -ILL $$", "ggpipe crashes there with an illegal instruction", "./scripts/install"),
}  # fmt: skip
NAMED = {
    "nobody.invalid": ("its name does not resolve", "/etc/hosts"),
    "10.78.0.16": ("nothing listens at its ssh port", "systemctl enable --now ssh"),
}
"""Hosts that are asked by ssh itself."""
SHELL = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1 command="${{*:2}}"
case $host in nobody.invalid|10.78.0.16) exec ssh -n -o BatchMode=yes $host "$command" ;; esac
export command host
exec {real} "$host" unshare --mount {script}
"""


def planted(hosts: VirtualHosts, folder: Path, faults: dict[int, str]) -> dict[str, str]:
    """The environment in which a remote shell plants a fault on each host."""
    cases = "".join(f"  {hosts.address(i)}) {fault} ;;\n" for i, fault in faults.items())
    script = folder / "script"
    script.write_text(f'#!/bin/bash\ncase $host in\n{cases}esac\neval "$command"\n')
    script.chmod(0o755)
    shell = folder / "faulty"
    shell.write_text(SHELL.format(real=hosts.shell, script=script))
    shell.chmod(0o755)
    return {**os.environ, **hosts.environment, "PRTE_MCA_plm_ssh_agent": str(shell), "HYDRA_LAUNCHER_EXEC": str(shell)}


def doctor(hosts: VirtualHosts, environment: dict[str, str], *words: object) -> tuple[int, Any]:
    command = [*hosts.on(1), sys.executable, "-P", "-m", "ggpipe", "doctor", "--json", *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)["findings"]


def test_each_planted_fault_is_named(tmp_path: Path) -> None:
    with virtual_hosts(16) as hosts:
        environment = planted(hosts, tmp_path, {i: fault for i, (fault, *_) in FAULTS.items()})
        file = tmp_path / "hosts"
        file.write_text(hosts.lines_for(1, *FAULTS) + "nobody.invalid\n" + hosts.lines_for(16))
        code, findings = doctor(hosts, environment, "--hostfile", file, "-m", TARGET, "--launch-timeout", LIMIT_S)
    assert code == 1
    found = {finding["host"]: finding for finding in findings if finding["is_fatal"]}
    expected = {hosts.address(i): rest for i, (_, *rest) in FAULTS.items()} | NAMED
    assert set(found) == set(expected)
    for host, (problem, cure) in expected.items():
        assert problem in found[host]["problem"], found[host]
        assert cure in found[host]["cure"], found[host]


def test_a_run_that_does_not_fit(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemAvailable: 100 kB\n")
    faults = {2: f"mount --bind {memory} /proc/meminfo", 3: "ulimit -l 16"}
    with virtual_hosts(3) as hosts:
        environment = planted(hosts, tmp_path, faults)
        words = ("--hostfile", hosts.hostfile, "-m", TARGET, "--mpi-layer-split", "0.4,0.3,0.3", "-t", "1,512,1")
        code, findings = doctor(hosts, environment, *words, "--mlock", "--launch-timeout", LIMIT_S)
    assert code == 1
    problems = [(finding["host"], finding["problem"].partition(",")[0]) for finding in findings]
    assert (hosts.address(2), "its ranks have 512 threads") in problems
    assert any(host == hosts.address(2) and problem.startswith("its ranks need 0.") for host, problem in problems)
    assert (hosts.address(3), "its processes may lock only 16 kB in memory") in problems


def test_healthy_hosts(tmp_path: Path) -> None:
    with virtual_hosts(2) as hosts:
        environment = planted(hosts, tmp_path, {})
        words = ("--hostfile", hosts.hostfile, "-m", TARGET, "--mpi-layer-split", "0.5,0.5", "-t", 1)
        assert doctor(hosts, environment, *words, "--launch-timeout", LIMIT_S) == (0, [])
