"""What a machine has that a run needs. `ggpipe facts` prints it there, and `ggpipe doctor` reads it."""

from __future__ import annotations

import base64
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import msgspec

from ggpipe._version import __version__
from ggpipe.engine.doctor.links import LinkFacts, measure
from ggpipe.errors import GgpipeError, UsageError

VARIABLE = "GGPIPE_FACTS"
"""Environment variable with the questions."""
MARK = "ggpipe-facts:"
"""Start of the line with the answers; a shell's own greeting may come before."""

_LIMITS = {
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "stack": resource.RLIMIT_STACK,
    "fsize": resource.RLIMIT_FSIZE,
}


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """What to look at."""

    models: tuple[str, ...] = ()
    """Paths of model files."""
    link_to: str = ""
    """Address of the process that measures the link, as HOST:PORT."""
    secret: str = ""

    @property
    def environment(self) -> str:
        """`VARIABLE=value`, for `env`."""
        return f"{VARIABLE}={base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()}"


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A model file on a machine."""

    path: str
    fingerprint: str = ""
    """See `ModelFile.fingerprint`. Empty if it cannot be opened."""
    problem: str = ""
    is_missing: bool = False
    """There is no such file."""


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine has."""

    hostname: str
    system: str
    python: str
    ggpipe: str
    libllama: str
    cpu: str
    cpu_features: tuple[str, ...]
    cores: int
    numa_nodes: int
    available_bytes: int
    mpi: str
    """Name and version of the library that mpi4py loads; empty if there is none."""
    mpirun: str
    """Path and version of mpirun; empty if there is none."""
    limits: dict[str, int]
    """Resource limits of processes; -1: none."""
    temporary_free_bytes: int
    shared_memory_free_bytes: int
    time_s: float
    """Its clock, in seconds since 1970."""
    models: tuple[ModelFacts, ...] = ()
    link: LinkFacts | None = None
    """None: there is no other end."""


def questions_from_environment() -> Questions:
    """Raises UsageError if there are none: users do not call this command."""
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(os.environ[VARIABLE]), type=Questions)
    except (KeyError, ValueError, msgspec.MsgspecError) as e:
        raise UsageError("`ggpipe facts` is only for `ggpipe doctor`: use that") from e


def facts_of_this_machine(questions: Questions) -> MachineFacts:
    """Look at this machine."""
    from ggpipe.llama import machine  # a crash here, on a CPU that lacks instructions, has an exit code of its own

    return MachineFacts(
        hostname=platform.node(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        ggpipe=__version__,
        libllama=machine.libllama_version(),
        cpu=machine.cpu_name(),
        cpu_features=tuple(sorted(machine.cpu_features())),
        cores=machine.cores(),
        numa_nodes=max(len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))), 1),
        available_bytes=machine.available_bytes(),
        mpi=_mpi_library(),
        mpirun=_mpirun(),
        limits={name: resource.getrlimit(kind)[0] for name, kind in _LIMITS.items()},
        temporary_free_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
        shared_memory_free_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0,
        models=tuple(map(_model, questions.models)),
        link=measure(questions.link_to, questions.secret) if questions.link_to else None,
        time_s=time.time(),
    )


def _model(path: str) -> ModelFacts:
    from ggpipe.llama.gguf import ModelFile

    try:
        return ModelFacts(path=path, fingerprint=ModelFile.open(Path(path)).fingerprint)
    except (GgpipeError, OSError) as e:
        return ModelFacts(path=path, problem=str(e), is_missing=not Path(path).exists())


def _mpi_library() -> str:
    os.environ["MPI4PY_RC_INITIALIZE"] = "0"
    try:
        from ggpipe.transport.mpi import library_name

        return library_name()
    except GgpipeError:
        return ""


def _mpirun() -> str:
    from ggpipe.launch.mpirun import find_mpirun

    try:
        path = find_mpirun()
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5).stdout
    except (GgpipeError, OSError, subprocess.SubprocessError):
        return ""
    words = [line.strip() for line in said.splitlines() if any(char.isdigit() for char in line)]
    return f"{path}: {words[0] if words else 'unknown version'}"
