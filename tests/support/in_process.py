"""ggpipe's command line inside this process: a child process computes for a second before it reads the first option.

Command lines that need real ranks are in `commands`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from unittest import mock

import pytest

from ggpipe.channel import started
from ggpipe.cli import launching, main
from ggpipe.engine.session import LocalRanks
from ggpipe.launch.job import Job
from support.commands import ROOT
from support.pipeline import local_ranks

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCONT, signal.SIGUSR1)
"""Those that a command may handle."""
_LOGGERS = ("ggpipe.server", "uvicorn")
"""Those that a command sets up."""


def ggpipe(*arguments: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same as `commands.ggpipe`, for a command line that starts no ranks. Raises AssertionError if it would.

    What the command changes in this process is restored.
    """
    words = list(map(str, arguments))
    files = _Files()
    with (
        _restored(),
        contextlib.chdir(cwd),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["ggpipe", *words]),
        mock.patch.object(started, "RankProcesses", side_effect=AssertionError("ranks would be started")) as processes,
        files.in_place(),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    code = ended.value.code
    assert isinstance(code, int)
    assert not processes.called, processes.call_args  # an engine's thread may have had the error
    return subprocess.CompletedProcess(words, code, files.out, files.err)


def ggpipe_on_threads(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The same, where ranks that the command starts are threads of this process."""
    with mock.patch.object(launching, "supervised", _threads):
        return ggpipe(*arguments)


def output(*arguments: object) -> str:
    """The stdout of `ggpipe ARGUMENTS`, whose exit code must be 0."""
    result = ggpipe(*arguments)
    assert result.returncode == 0, (result.returncode, result.stdout, result.stderr)
    return result.stdout


@contextlib.contextmanager
def _threads(job: Job, *_: object) -> Iterator[LocalRanks]:
    with local_ranks(job.settings.config, job.n_ranks) as head:
        yield LocalRanks(head)


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Restores signal handlers, timers (pytest-timeout's too) and loggers."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    switch_s, (left_s, every_s) = sys.getswitchinterval(), signal.getitimer(signal.ITIMER_REAL)
    logs = [(log := logging.getLogger(name), log.handlers[:], log.level, log.propagate) for name in _LOGGERS]
    try:
        yield
    finally:
        for log, own, level, propagates in logs:
            log.handlers[:], log.level, log.propagate = own, level, propagates
        sys.setswitchinterval(switch_s)
        signal.setitimer(signal.ITIMER_REAL, left_s, every_s)
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _Files:
    """Files in place of stdout and stderr, for C code too; stdin is empty."""

    def __init__(self) -> None:
        self.out = self.err = ""
        """What was written."""

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The process's own ones are back afterwards."""
        with (
            open(os.devnull) as null,
            os.fdopen(os.memfd_create("out"), "w+", encoding="utf-8") as out,
            os.fdopen(os.memfd_create("err"), "w+", encoding="utf-8") as err,
        ):
            with _standard(0, "stdin", null), _standard(1, "stdout", out), _standard(2, "stderr", err):
                yield
            self.out, self.err = (self._all_of(file) for file in (out, err))

    @staticmethod
    def _all_of(file: IO[str]) -> str:
        file.seek(0)
        return file.read()


@contextlib.contextmanager
def _standard(number: int, name: str, file: IO[str]) -> Iterator[None]:
    """`file` as the standard file of this number and name."""
    saved = os.dup(number)
    os.dup2(file.fileno(), number)
    try:
        with (
            open(number, file.mode[0], encoding="utf-8", closefd=False) as stream,
            mock.patch.object(sys, name, stream),
        ):
            yield
    finally:
        os.dup2(saved, number)
        os.close(saved)
