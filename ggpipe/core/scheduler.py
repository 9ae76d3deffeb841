"""The head's scheduler: which run goes into the pipeline next.

    handle(event, now) -> list[Action]

Events say what happened (a request arrived, a run came back, a token was sampled), actions what is to be done
(submit a run, sample a row, end a request). Nothing in here waits, sends or computes, so the same object runs
under MPI, inside one process and on virtual time.

A prompt goes in as chunks whose borders follow from the prompt and the batch sizes alone, several in flight so that
chunk i+1 is in the first stage while chunk i is in the second. Then each sampled token is one run, until the text
ends, its length is reached or the context is full. Requests are served one after the other.
"""

from __future__ import annotations

import collections
import enum
import itertools
from dataclasses import dataclass, field

from ggpipe.core.messages import KvKind, KvOp, Row, Run, Want

NEVER = 2**31 - 1


class Finish(enum.Enum):
    """Why a request ended."""

    END_OF_TEXT = "end of text"
    LENGTH = "length"
    CONTEXT_FULL = "context full"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the pipeline can hold."""

    n_ctx: int
    """KV cells: tokens of a prompt and its answer together."""
    n_batch: int
    n_ubatch: int
    n_in_flight: int
    """Runs in the pipeline at the same time; more only wait in its queues."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue."""

    id: int
    prompt: tuple[int, ...]
    n_predict: int = -1
    """Tokens to generate at most; -1 until the text ends or the context is full."""


# Events


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request came in. `want`: what sampling its first token takes."""

    request: Request
    want: Want


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run's result is back at the head, or its marker when it was cancelled."""

    run: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token was drawn as asked. `end`: it ends the text. `want`: what sampling the one after it takes."""

    request: int
    token: int
    end: bool
    want: Want


@dataclass(frozen=True, slots=True)
class Stop:
    """The user wants no more of a request."""

    request: int


Event = Arrived | RunEnded | Sampled | Stop


# Actions


@dataclass(frozen=True, slots=True)
class Submit:
    """Put a run into the pipeline."""

    run: Run


@dataclass(frozen=True, slots=True)
class Sample:
    """Draw a request's next token from a row of a run's result, then say `Sampled`."""

    request: int
    run: int
    row: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Runs whose results nobody needs: stages skip or stop them."""

    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request is over; nothing of it is in flight."""

    request: int
    reason: Finish


Action = Submit | Sample | Cancel | Finished


@dataclass(slots=True)
class _Active:
    request: Request
    want: Want
    seq: int
    chunks: collections.deque[tuple[int, ...]]
    n_past: int = 0
    n_accepted: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)
    """Run id -> row to sample from, -1 for none."""
    ending: Finish | None = None


class Scheduler:
    """See the module's text."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._ids = itertools.count(1)
        self._waiting: collections.deque[tuple[Request, Want]] = collections.deque()
        self._active: _Active | None = None
        self._ops: list[KvOp] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event that happened at `now` (seconds, any clock that does not go back)."""
        actions: list[Action] = []
        match event:
            case Arrived(request, want):
                if not 0 < len(request.prompt) < self._limits.n_ctx:
                    raise ValueError(f"a prompt of {len(request.prompt)} tokens in {self._limits.n_ctx} cells")
                self._waiting.append((request, want))
                self._start_next(actions)
            case RunEnded(run):
                self._run_ended(run, actions)
            case Sampled(request_id, token, end, want):
                self._sampled(request_id, token, end, want, actions)
            case Stop(request_id):
                self._stop(request_id, actions)
        return actions

    def _start_next(self, actions: list[Action]) -> None:
        while self._active is None and self._waiting:
            request, want = self._waiting.popleft()
            chunks = collections.deque(cut_prompt(request.prompt, self._limits.n_batch, self._limits.n_ubatch))
            self._active = _Active(request, want, 0, chunks)
            self._submit_chunks(self._active, actions)

    def _submit_chunks(self, active: _Active, actions: list[Action]) -> None:
        while active.chunks and len(active.in_flight) < self._limits.n_in_flight and active.ending is None:
            chunk = active.chunks.popleft()
            self._submit(active, chunk, wanted=not active.chunks, actions=actions)

    def _submit(self, active: _Active, tokens: tuple[int, ...], wanted: bool, actions: list[Action]) -> None:
        last = len(tokens) - 1
        rows = tuple(
            Row(token, active.n_past + i, (active.seq,), active.request.id, 0 if wanted and i == last else -1)
            for i, token in enumerate(tokens)
        )
        wants = (active.want,) if wanted else ()
        run = Run(next(self._ids), active.n_accepted, rows, tuple(self._ops), wants)
        self._ops.clear()
        active.n_past += len(tokens)
        active.in_flight[run.id] = last if wanted else -1
        actions.append(Submit(run))

    def _run_ended(self, run: int, actions: list[Action]) -> None:
        active = self._active
        if active is None or run not in active.in_flight:
            raise ValueError(f"run {run} is not in flight")
        row = active.in_flight.pop(run)
        if active.ending is not None:
            self._end_if_drained(active, actions)
        elif row >= 0:
            if active.request.n_predict == 0:
                self._end(active, Finish.LENGTH, actions)
            else:
                actions.append(Sample(active.request.id, run, row))
        else:
            self._submit_chunks(active, actions)

    def _sampled(self, request_id: int, token: int, end: bool, want: Want, actions: list[Action]) -> None:
        active = self._active
        if active is None or active.request.id != request_id or active.ending is not None:
            return  # stopped meanwhile
        active.n_accepted += 1
        active.want = want
        limit = active.request.n_predict if active.request.n_predict >= 0 else NEVER
        if end:
            self._end(active, Finish.END_OF_TEXT, actions)
        elif active.n_accepted >= limit:
            self._end(active, Finish.LENGTH, actions)
        elif active.n_past >= self._limits.n_ctx:
            self._end(active, Finish.CONTEXT_FULL, actions)
        else:
            self._submit(active, (token,), wanted=True, actions=actions)

    def _stop(self, request_id: int, actions: list[Action]) -> None:
        active = self._active
        if active is not None and active.request.id == request_id:
            if active.ending is None:
                self._end(active, Finish.STOPPED, actions)
            return
        kept = [(r, w) for r, w in self._waiting if r.id != request_id]
        if len(kept) < len(self._waiting):
            self._waiting = collections.deque(kept)
            actions.append(Finished(request_id, Finish.STOPPED))

    def _end(self, active: _Active, reason: Finish, actions: list[Action]) -> None:
        active.ending = reason
        active.chunks.clear()
        if active.in_flight:
            actions.append(Cancel(tuple(active.in_flight)))
        self._end_if_drained(active, actions)

    def _end_if_drained(self, active: _Active, actions: list[Action]) -> None:
        if active.in_flight or active.ending is None:
            return
        self._ops.append(KvOp(KvKind.RM, active.seq))  # rides in front of the next request's first run
        self._active = None
        actions.append(Finished(active.request.id, active.ending))
        self._start_next(actions)


def cut_prompt(prompt: tuple[int, ...], n_batch: int, n_ubatch: int) -> list[tuple[int, ...]]:
    """A prompt's chunks, as libllama cuts it: batches of `n_batch` tokens, each in pieces of `n_ubatch`."""
    return [
        prompt[at : min(at + n_ubatch, start + n_batch, len(prompt))]
        for start in range(0, len(prompt), n_batch)
        for at in range(start, min(start + n_batch, len(prompt)), n_ubatch)
    ]
