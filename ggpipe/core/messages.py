"""What the head and the stages send each other: rows, runs, KV operations, results.

They are msgspec structs, which take a tenth of a dataclass's time to define and to create.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from ggpipe.config.model import TARGET


class KvKind(enum.IntEnum):
    """An operation on the KV cache's sequences (`llama_memory_seq_*`)."""

    RM = 0
    CP = 1


class KvOp(msgspec.Struct, frozen=True):
    """One operation. `p0`, `p1`: positions [p0, p1); -1 is open. `dst`: the sequence that CP copies to."""

    kind: KvKind
    seq: int
    dst: int = -1
    p0: int = -1
    p1: int = -1


class LogitsKind(enum.IntEnum):
    """What a row's logits are needed for."""

    TOP = 0  # the n best; n = 1 is the argmax
    FULL = 1  # all of them
    HIDDEN = 2  # nothing: the last hidden state is wanted, which they are made of
    LIKELY = 3  # all that are at least `min_p` times as probable as the best one, by id
    DRAWN = 4  # the one that `number` draws at the temperature `temp`


class LogitsRequest(msgspec.Struct, frozen=True):
    """What is wanted back of a row's logits; banned tokens count as minus infinity."""

    kind: LogitsKind
    n: int = 1
    banned: tuple[int, ...] = ()
    keeps: bool = False
    """The last rank keeps the whole row, until a run says that it is not needed any more (`Run.kept_from`)."""
    sums: bool = True
    """The log-sum-exp is needed, unless n is 1."""
    also: tuple[int, ...] = ()
    """Further tokens whose logits are sent, after those of the n best; none of them is banned."""
    n_positions: int = 1
    """Positions after the row whose logits are wanted, of a head that drafts a block at a time. It does not travel."""
    temp: float = 0.0
    """Above 0: the log-sum-exp is that of the logits divided by it, and `RowLogits.below` is needed."""
    min_p: float = 0.0
    number: float = 0.0
    """A random number, from 0 to 1."""


class StateRef(msgspec.Struct, frozen=True):
    """A hidden state, by the row that it was computed for. States themselves stay where they are computed and read."""

    run: int
    row: int
    """Number of the row in its run."""
    is_target: bool = False
    """A run of the target; else one of the pipeline that reads it."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a run."""

    token: int
    pos: int
    seqs: tuple[int, ...]
    """Sequence ids that the token's KV cell belongs to."""
    request: int
    logits_request: int = -1
    """Index of the row's `LogitsRequest` in the run's table; -1: nothing is wanted back."""
    state: StateRef | None = None
    """The state that a draft head reads with the token. It stays in one process: it does not travel with a run."""


class Restored(msgspec.Struct, frozen=True):
    """What a stage has of a prefix that was on disk."""

    tokens: tuple[int, ...] = ()
    problem: str = ""
    """Why there is nothing, though there is a file."""


class Save(msgspec.Struct, frozen=True):
    """Write a sequence to disk, which has exactly these tokens. Without tokens there is nothing to write."""

    request: int
    seq: int
    tokens: tuple[int, ...]
    file: str = ""
    """Name in the folder of saved prefixes; empty: the prompt cache's file."""


class Restore(msgspec.Struct, frozen=True):
    """Put these tokens from the folder of saved prefixes into an empty sequence."""

    request: int
    seq: int
    tokens: tuple[int, ...]
    file: str


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What goes through the pipeline in one piece: KV operations, then one decode of the rows.

    A run without rows, or a cancelled one, is a marker: its operations are applied and nothing is computed.
    """

    id: int
    rows: tuple[Row, ...]
    ops: tuple[KvOp, ...] = ()
    logits_requests: tuple[LogitsRequest, ...] = ()
    cancelled: bool = False
    save: Save | Restore | None = None
    """Of a run without rows: what to save, or to restore, behind its operations."""
    kept_from: int = 0
    """Rows that are kept of runs before this one are not needed any more."""
    dropped: frozenset[int] = frozenset()
    """Numbers of the rows that the stage before did not compute; see `dropped_rows`."""
    pauses: bool = False
    """Later runs may overtake it, in each stage, if they do not touch its sequences."""


class RowLogits(msgspec.Struct, frozen=True):
    """What came back for one row: token ids with their logits (best first, then those of `LogitsRequest.also`; LIKELY:
    in order); FULL: logits of all ids in order; HIDDEN: the last hidden state."""

    row: int
    ids: tuple[int, ...] | None
    logits: Any
    """TOP: floats, as many as ids. FULL: a float32 array of the vocabulary's size. HIDDEN: one of the model's width, or
    an empty one where the model has none."""
    log_sum_exp: float
    """Of all logits, divided by `LogitsRequest.temp` where that is set; not a number where it was not wanted. DRAWN:
    instead, the random number."""
    n_also: int = 0
    """How many of the last ones are only here because `LogitsRequest.also` names them."""
    later: tuple[RowLogits, ...] = ()
    """The same of the next positions, where `LogitsRequest.n_positions` asks for them. They do not travel."""
    below: tuple[float, ...] = ()
    """Share of the probability, at `LogitsRequest.temp`, that smaller ids than each of `ids` have. Empty without it."""
    after: tuple[tuple[int, RowLogits], ...] = ()
    """The same after other tokens just before than the most probable one, by these tokens: of a head that drafts a
    block at a time and knows them. They do not travel."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's time on one run. Seconds."""

    rank: int
    start_s: float
    """When it took the run up, by its own clock (`time.monotonic`)."""
    compute_s: float
    """In libllama's decode."""
    busy_s: float
    """From taking the run up to having its outcome ready, compute included."""
    sent_bytes: int
    n_rows: int
    """Rows that it computed; 0 if the run was cancelled."""


class RunResult(msgspec.Struct, frozen=True):
    """A run's end: what its rows asked for, nothing when it was cancelled; and where the time went."""

    run: int
    rows: tuple[RowLogits, ...] = ()
    spans: tuple[Span, ...] = ()
    cancelled: bool = False

    @property
    def slowest_s(self) -> float:
        """Seconds of decoding in the slowest stage."""
        return max([span.compute_s for span in self.spans], default=0.0)

    @property
    def total_s(self) -> float:
        """Seconds that all stages together were busy with it."""
        return sum([span.busy_s for span in self.spans])


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run that ended, for one request's statistics. A run of several requests leaves one record for each."""

    id: int
    request: int
    n_rows: int
    """The request's own rows."""
    n_run_rows: int
    """All rows of the run."""
    n_draft_tokens: int
    """The request's rows that held draft tokens."""
    cancelled: bool
    spans: tuple[Span, ...]
    """The whole run's time in each stage."""
    model: int = TARGET
    """Id of the model that computed it, as far as the statistics know."""

    @property
    def share(self) -> float:
        """The request's share of the run, by rows."""
        return self.n_rows / self.n_run_rows
