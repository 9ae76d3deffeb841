"""Hostfiles, in the formats of Open MPI and hydra: which rank is on which machine."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from ggpipe.errors import LaunchError, Setting

_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?::(?P<hydra>\d+))?(?P<settings>(?:\s+[a-z_]+\s*=\s*\S+)*)", re.ASCII)
_SLOTS = re.compile(r"\bslots\s*=\s*(\S+)")
_OF_OPEN_MPI = re.compile(r"^[^#\n]*\bslots\s*=", re.MULTILINE)
_OF_HYDRA = re.compile(r"^\s*[^\s:#]+:\d+\s*(?:#|$)", re.MULTILINE)
_MOST_SLOTS = 4096  # per machine: more than any job has ranks


def hosts_of(hostfile: Path) -> list[str]:
    """The machine of each slot of a hostfile: `slots=N` or `HOST:N`, by default one per machine.

    Raises LaunchError for a file that cannot be read, or names no machine.
    """
    try:
        text = hostfile.read_text()
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not text"
        raise LaunchError(Setting("hostfile"), f" {hostfile}: {why}") from e
    hosts: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line := line.partition("#")[0].strip():
            hosts += _hosts_on(line, f" {hostfile}, line {number}: ")
    if not hosts:
        raise LaunchError(
            Setting("hostfile"), f" {hostfile} names no machines: write one per line, as in `node1 slots=1`"
        )
    return hosts


def _hosts_on(line: str, where: str) -> list[str]:
    """The slots of a line. `where`: of it, for messages. Raises LaunchError."""
    if (match := _LINE.fullmatch(line)) is None:
        raise LaunchError(
            Setting("hostfile"), f"{where}{line!r} is not a machine: write its name or address, as in `node1 slots=1`"
        )
    slots = _SLOTS.search(match["settings"])
    n_slots = match["hydra"] or (slots[1] if slots is not None else "1")
    if not n_slots.isdecimal():
        raise LaunchError(Setting("hostfile"), f"{where}slots must be a number, got {n_slots}")
    return [match["name"]] * min(int(n_slots[:9]), _MOST_SLOTS)


def is_readable(hostfile: Path, for_hydra: bool) -> bool:
    """Whether hydra's mpirun, or Open MPI's, can read an existing hostfile. Neither reads the other's format."""
    return (_OF_OPEN_MPI if for_hydra else _OF_HYDRA).search(hostfile.read_text()) is None


def hostfile_lines(hosts: Sequence[str], like: Path | None = None) -> list[str]:
    """A hostfile with these machines for ranks 0, 1, 2, …, in the format of another one, or in Open MPI's."""
    return _lines(hosts, like is not None and bool(re.search(r"^[^\s#]+:\d", like.read_text(), re.MULTILINE)))


def write_hostfile(path: Path, hosts: Sequence[str], for_hydra: bool) -> None:
    """Write a hostfile with these machines for ranks 0, 1, 2, …, for hydra's mpirun or for Open MPI's."""
    path.write_text("".join(f"{line}\n" for line in _lines(hosts, for_hydra)))


def _lines(hosts: Sequence[str], for_hydra: bool) -> list[str]:
    between = ":" if for_hydra else " slots="
    return [f"{host}{between}{len(list(ranks))}" for host, ranks in itertools.groupby(hosts)]
