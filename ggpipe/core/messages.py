"""What the scheduler, the stages and the draft say to each other: rows, runs, results, guesses."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from ggpipe.config import SpeculationConfig


class KvKind(enum.IntEnum):
    """An operation on the KV cache's sequences (`llama_memory_seq_*`)."""

    RM = 0
    CP = 1
    KEEP = 2


@dataclass(frozen=True, slots=True)
class KvOp:
    """One operation. `p0`, `p1`: positions [p0, p1); -1 is open. `dst`: the sequence that CP copies to."""

    kind: KvKind
    seq: int
    dst: int = -1
    p0: int = -1
    p1: int = -1


class WantKind(enum.IntEnum):
    """What a row's logits are needed for."""

    TOP = 0  # the n best, with the log-sum-exp of all; n = 1 is the argmax
    FULL = 1  # all of them


@dataclass(frozen=True, slots=True)
class Want:
    """What is wanted back of a row's logits; banned tokens count as minus infinity."""

    kind: WantKind
    n: int = 1
    banned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One token of a run. `want` is the place of its Want in the run's table, -1 for none."""

    token: int
    pos: int
    seqs: tuple[int, ...]
    request: int
    want: int = -1


@dataclass(frozen=True, slots=True)
class Run:
    """What goes through the pipeline in one piece: KV operations, then one decode of the rows.

    A run without rows, or a cancelled one, is a marker: its operations are applied and nothing is computed.
    """

    id: int
    epoch: int
    """Tokens that its request had accepted when it was submitted."""
    rows: tuple[Row, ...]
    ops: tuple[KvOp, ...] = ()
    wants: tuple[Want, ...] = ()
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class RowLogits:
    """What came back for one row: token ids (best first) with their logits; FULL: logits of all ids in order."""

    row: int
    ids: tuple[int, ...] | None
    logits: Any
    """TOP: floats, as many as ids. FULL: a float32 array of the vocabulary's size."""
    log_sum_exp: float
    """Of all logits; not a number when only the best one was wanted, which does not need it."""


@dataclass(frozen=True, slots=True)
class Span:
    """A rank's time on one run. Seconds."""

    rank: int
    start_s: float
    """When it took the run up, by its own clock (`time.monotonic`)."""
    compute_s: float
    """In libllama's decode."""
    busy_s: float
    """From taking the run up to having its outcome ready, compute included."""
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run's end: what its rows asked for, nothing when it was cancelled; and where the time went."""

    run: int
    rows: tuple[RowLogits, ...]
    spans: tuple[Span, ...]
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run that ended."""

    id: int
    n_rows: int
    n_guesses: int
    """Of its rows, the ones that were guesses."""
    cancelled: bool
    spans: tuple[Span, ...]
    """Its time in each stage."""


# Between the head and the draft

ROOT = 0
"""As a guess's parent: the last accepted token that the draft knew."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """What the draft thinks of one node: its best candidates with their probabilities.

    The first `n` candidates are guesses, numbered `first`, `first + 1`, ... within their request.
    """

    parent: int
    first: int
    n: int
    candidates: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Guesses on their way to the head, parents before children."""

    request: int
    epoch: int
    """Tokens that the draft knew accepted."""
    expansions: tuple[Expansion, ...]
    complete: bool
    """Nothing more is coming until a further token is accepted."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A request the draft is to guess for."""

    request: int
    prompt: tuple[int, ...]
    n_left: int
    """Tokens that may be generated."""
    lead: int
    """Guesses from the last accepted token to the deepest one, at most."""
    ends: frozenset[int]
    banned: tuple[int, ...]
    speculation: SpeculationConfig


@dataclass(frozen=True, slots=True)
class Accepted:
    """Tokens that the target added to the text since the last such message; `epoch` counts all so far.

    `lead` replaces the one that the request began with.
    """

    request: int
    epoch: int
    tokens: tuple[int, ...]
    lead: int


@dataclass(frozen=True, slots=True)
class Done:
    """No more guesses for this request."""

    request: int


Steering = Begin | Accepted | Done
