"""Faults while four streams are served: ranks that are killed, stopped or cut off from the network at random times.

Which fault, on which rank and when, follows from a number (`fault_of`). `play` runs the streams
(`support/streams.py`) with the fault and says what was wrong, if anything.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ggpipe.launch.environment import die_with_parent, mpi_environment
from support.commands import ROOT, TARGET, marked, processes_with, ranks_of
from support.streams import STREAMS
from support.virtual_hosts import VirtualHosts

N_PREDICT = 150
RANK_TIMEOUT_S = 3.0
RANKS = ("head", "worker", "draft rank")
"""By their numbers."""
_PROGRAM = Path(__file__).with_name("streams.py")
_DRAFT = TARGET.with_name("tales-draft.gguf")
_LIMIT_S = 240.0
_SLOW_MACHINE_S = 10.0
_TICK_S = 0.02

Texts = list[list[int]]
"""Of each stream, its tokens."""


class Kind(enum.Enum):
    """What happens to a rank."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    CUT = "link down"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A rank's fault."""

    number: int
    kind: Kind
    rank: int
    after_tokens: int
    """It happens when the streams have this number of tokens together."""
    after_s: float
    """And so much later."""
    on_hosts: bool
    """Each rank is on a machine of its own."""

    def __str__(self) -> str:
        where = "on hosts" if self.on_hosts else ""
        when = f"after {self.after_tokens} tokens"
        return f"{self.number:3} {self.kind.value:9} {RANKS[self.rank]:10} {when:16} {where:8}"


def fault_of(number: int, seed: int = 0) -> Fault:
    """The fault of a number. Kinds and ranks take turns, the time is random."""
    rng = random.Random(f"{seed} {number}")
    kind, rank = tuple(Kind)[number % len(Kind)], number // len(Kind) % len(RANKS)
    return Fault(
        number=number,
        kind=kind,
        rank=rank,
        after_tokens=rng.randrange(int(0.8 * N_PREDICT * len(STREAMS))),
        after_s=rng.random() * 0.2,
        on_hosts=kind is Kind.CUT or rng.random() < 0.3,
    )


@dataclass
class Outcome:
    """What came of four streams."""

    texts: Texts = field(default_factory=lambda: [[] for _ in STREAMS])
    finished: dict[int, str] = field(default_factory=dict)
    """Why streams ended, by their numbers."""
    has_happened: bool = False
    """The fault, while the job ran."""
    code: int | None = None
    """Exit code; None: it hangs."""
    seconds: float = 0.0
    """From the fault to the end."""
    errors: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """Of stderr, the errors included."""
    left_over: list[int] = field(default_factory=list)
    """Processes."""


def undisturbed(n_predict: int = N_PREDICT) -> Texts:
    """The texts of streams that nothing happens to, on one rank."""
    outcome = Streams(None, 0, n_predict, RANK_TIMEOUT_S, one_rank=True).outcome(None)
    if outcome.code != 0:
        raise RuntimeError(f"the streams failed without a fault: {outcome.lines}")
    return outcome.texts


def play(
    fault: Fault,
    expected: Texts,
    n_restarts: int,
    hosts: VirtualHosts | None = None,
    rank_timeout_s: float = RANK_TIMEOUT_S,
) -> tuple[Outcome, list[str]]:
    """Run the streams with a fault. Returns what came of them, and what was wrong.

    `expected`: as of `undisturbed`, to the same number of tokens. `hosts`: four, of which the first has the front end
    and each of the others a rank; they are connected again.
    """
    outcome = Streams(hosts, n_restarts, len(expected[0]), rank_timeout_s).outcome(fault)
    return outcome, list(_wrong(outcome, expected, n_restarts, rank_timeout_s))


def _wrong(outcome: Outcome, expected: Texts, n_restarts: int, rank_timeout_s: float) -> Iterator[str]:
    for number, (text, whole) in enumerate(zip(outcome.texts, expected, strict=True)):
        if text != whole[: len(text)]:
            yield f"stream {number} differs at token {_agreeing(text, whole)}"
        elif n_restarts and text != whole:
            yield f"stream {number} ended after {len(text)} of {len(whole)} tokens"
    if not outcome.has_happened and outcome.texts != expected:
        yield "the job ended before the fault"
    if outcome.code is None:
        yield "it hangs"
    elif any("Traceback" in line for line in outcome.lines):
        yield "a traceback"
    elif n_restarts or outcome.texts == expected:  # the streams may have ended before anybody noticed
        if outcome.code != 0:
            yield f"exit code {outcome.code}"
    else:
        if outcome.code != 1:
            yield f"exit code {outcome.code}, not 1"
        if len(outcome.errors) != 1:
            yield f"{len(outcome.errors)} lines of errors"
        if outcome.seconds > rank_timeout_s + 5:
            yield f"it took {outcome.seconds:.1f} s to end"
    if outcome.left_over:
        yield f"processes are left: {outcome.left_over}"


def _agreeing(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Streams:
    """The program, which is running."""

    def __init__(
        self,
        hosts: VirtualHosts | None,
        n_restarts: int,
        n_predict: int,
        rank_timeout_s: float,
        one_rank: bool = False,
    ) -> None:
        self._hosts = hosts
        self._folder = tempfile.TemporaryDirectory(prefix="ggpipe-streams-")
        folder = Path(self._folder.name)
        self._tokens, self._stderr = folder / "tokens", folder / "stderr"
        self._marker = str(folder / "unused.json")
        words: list[object] = ["generate", "-m", TARGET, "-p", "-", "-n", n_predict, "-c", 4096, "-ub", 64, "-t", 1]
        words += ["--exact", "--json", self._marker, "--rank-timeout", rank_timeout_s, "--restart", n_restarts]
        if not one_rank:
            words += ["-md", _DRAFT, "--mpi-layer-split", "0.5,0.5/1.0"]
        launch: list[str] = []
        environment = {**os.environ, **mpi_environment(), "GGPIPE_STREAMS": str(self._tokens), **marked(self._marker)}
        if hosts is not None:
            launch = hosts.on(1)
            environment |= hosts.environment
            hostfile = folder / "hosts"
            hostfile.write_text(hosts.lines_for(2, 3, 4))
            words += ["--hostfile", hostfile]
        with self._stderr.open("w") as stderr:
            self._process = subprocess.Popen(
                [*launch, sys.executable, "-P", str(_PROGRAM), *map(str, words)],
                env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip

    def outcome(self, fault: Fault | None) -> Outcome:
        """Let the fault happen, and wait for the end. What is left is killed."""
        outcome = Outcome()
        try:
            at = time.monotonic()
            if fault is not None and self._waits(lambda: self._n_tokens() >= fault.after_tokens):
                time.sleep(fault.after_s)
                outcome.has_happened = self._inject(fault)
                at = time.monotonic()
            if self._waits(lambda: False):
                outcome.code = self._process.wait()
            outcome.seconds = time.monotonic() - at
            self._look_for_rest(outcome)
            self._read(outcome)
        finally:
            self._end()
        return outcome

    def _waits(self, condition: Callable[[], bool]) -> bool:
        """Until the condition holds, or the program has ended. False when both take too long."""
        deadline = time.monotonic() + _LIMIT_S
        while self._process.poll() is None and not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(_TICK_S)
        return True

    def _n_tokens(self) -> int:
        with contextlib.suppress(OSError):
            return self._tokens.read_bytes().count(b'"tokens"')
        return -1

    def _inject(self, fault: Fault) -> bool:
        """Let it happen. False when the job has ended already."""
        process = ranks_of(self._marker).get(fault.rank)
        if process is None:
            return False
        if fault.kind is Kind.CUT:
            assert self._hosts is not None
            self._hosts.cut_off(2 + fault.rank)
        else:
            os.kill(process, signal.SIGKILL if fault.kind is Kind.KILL else signal.SIGSTOP)
        return True

    def _look_for_rest(self, outcome: Outcome) -> None:
        """Processes that are left on machines that can be reached; then on all of them once they are connected."""
        deadline = time.monotonic() + _SLOW_MACHINE_S
        if self._hosts is not None:
            for host in range(2, 5):
                self._hosts.connect(host)
        while (left_over := self._processes()) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        outcome.left_over = left_over

    def _processes(self) -> list[int]:
        found = processes_with(self._marker)
        return sorted({*found, *self._hosts.processes()}) if self._hosts is not None else found

    def _read(self, outcome: Outcome) -> None:
        outcome.lines = self._stderr.read_text(errors="replace").splitlines()
        outcome.errors = [line for line in outcome.lines if "ggpipe: error:" in line]  # behind rests of mpirun's own
        if self._tokens.exists():
            for line in self._tokens.read_text().splitlines():
                entry = json.loads(line)
                if "finish" in entry:
                    outcome.finished[entry["stream"]] = entry["finish"]
                else:
                    outcome.texts[entry["stream"]] += entry["tokens"]

    def _end(self) -> None:
        for process in (self._process.pid, *self._processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()
