"""Processes that work on input which is not trusted, within limits of time and memory.

A grammar of a few lines can take a parser hours and all memory, and so can a chat template.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

_MOST_WALL_S = 120.0  # a machine may be busy
_LENGTH = 8


@dataclass(frozen=True)
class Limits:
    """What a process may use."""

    cpu_s: int
    """CPU time per question."""
    memory_bytes: int
    """Address space."""


class Exceeded(enum.Enum):
    """Why a process ended instead of answering."""

    TIME = "CPU time"
    MEMORY = "memory, or depth of recursion"


class LimitedProcess:
    """A process that runs a module which calls `answer_questions`. All methods but `kill` belong to one thread at a
    time."""

    def __init__(self, module: str, limits: Limits) -> None:
        """Raises OSError if the process cannot be started."""
        self._limits = limits
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for others
        )  # fmt: skip

    def ask(self, question: bytes) -> bytes | None:
        """The answer; None if the process ended, or takes too long: then call `end`."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(len(question).to_bytes(_LENGTH) + question)
            process.stdin.flush()
        except OSError:
            return None
        deadline, found = time.monotonic() + _MOST_WALL_S, bytearray()
        descriptor = process.stdout.fileno()
        while True:
            n_needed = _LENGTH + (int.from_bytes(found[:_LENGTH]) if len(found) >= _LENGTH else 0)
            if len(found) >= _LENGTH and len(found) == n_needed:
                return bytes(found[_LENGTH:])
            ready = select.select([descriptor], [], [], max(deadline - time.monotonic(), 0.0))[0]
            piece = os.read(descriptor, n_needed - len(found)) if ready else b""
            if not piece:
                return None
            found += piece

    def kill(self) -> None:
        """Make `ask` return, in any thread. The process must not have been ended."""
        os.kill(self._process.pid, signal.SIGKILL)

    def end(self) -> Exceeded:
        """End the process. Returns why it did not answer."""
        process = self._process
        self.kill()  # where it has not ended; Popen.kill would take its usage from us
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        used_s = usage.ru_utime + usage.ru_stime
        has_taken_long = process.returncode == -signal.SIGXCPU or used_s > self._limits.cpu_s - 1
        return Exceeded.TIME if has_taken_long else Exceeded.MEMORY


def answer_questions(answer: Callable[[bytes], bytes], limits: Limits) -> None:
    """Answer questions from stdin until it ends. If `answer` exceeds a limit, this process ends."""
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := questions.read(_LENGTH):
        question = questions.read(int.from_bytes(head))
        used_s = math.ceil(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used_s + limits.cpu_s, resource.RLIM_INFINITY))
        encoded = answer(question)
        answers.write(len(encoded).to_bytes(_LENGTH) + encoded)
        answers.flush()
