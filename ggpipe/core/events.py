"""What happens to the head's scheduler (events), and what it wants done (actions)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ggpipe.core.draft_messages import DrafterMessage, MicroBatch
from ggpipe.core.dropped_rows import DeadRow
from ggpipe.core.messages import LogitsRequest, RowLogits, Run, RunRecord, RunResult
from ggpipe.core.prefixes import ErasePrefix, PrefixDone, RestorePrefix, SavePrefix
from ggpipe.core.request import Counters, DraftCheck, Finish, Request

# Events


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request came in. `logits_request`: what sampling its first token takes. `counters`: to be kept up to date for
    it."""

    request: Request
    logits_request: LogitsRequest
    counters: Counters = field(default_factory=Counters)
    draft_check: DraftCheck | None = None
    """Says which draft tokens may be sampled; None: all may."""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run's result is back, or its marker when it was cancelled."""

    result: RunResult


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token was sampled as asked. `end`: it ends the text. `logits_request`: what sampling the one after it takes.
    `stop`: the output ends with this token, in a stop string."""

    request: int
    token: int
    end: bool
    logits_request: LogitsRequest
    stop: bool = False


@dataclass(frozen=True, slots=True)
class RowNeeded:
    """Sampling a request's next token takes the whole row."""

    request: int


@dataclass(frozen=True, slots=True)
class RowFetched:
    """The whole row came back that was fetched for a request."""

    request: int
    row: RowLogits


@dataclass(frozen=True, slots=True)
class NoToken:
    """No token can be sampled for a request: its grammar allows none."""

    request: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """A drafter sent draft tokens."""

    micro_batch: MicroBatch


@dataclass(frozen=True, slots=True)
class StopRequest:
    """The user wants no more of a request, or of an order."""

    request: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The time has come that `wake_at` named: the scheduler's, or a drafter's."""


SchedulerEvent = (
    Arrived | RunEnded | Sampled | RowNeeded | RowFetched | NoToken | Drafted | SavePrefix | RestorePrefix | ErasePrefix
    | PrefixDone | StopRequest | Tick
)  # fmt: skip
"""`PrefixDone`: all ranks have saved or restored their parts."""


# Actions


@dataclass(frozen=True, slots=True)
class SubmitRun:
    """Put a run into the pipeline."""

    run: Run


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample a request's next token from a row that came back, then answer with `Sampled`, `RowNeeded` or `NoToken`."""

    request: int
    row: RowLogits


@dataclass(frozen=True, slots=True)
class Fetch:
    """Have the last stage send the whole row of a run that it kept; `RowFetched` follows."""

    request: int
    run: int
    row: int


@dataclass(frozen=True, slots=True)
class Replay:
    """The rows that a resumed request's next tokens were drawn from, in order."""

    request: int
    rows: tuple[RowLogits, ...]


@dataclass(frozen=True, slots=True)
class Embed:
    """The next rows of hidden states that a request's embedding is made of, in order."""

    request: int
    rows: tuple[RowLogits, ...]


@dataclass(frozen=True, slots=True)
class Emit:
    """A token of the answer is certain. `drafters`: those that had named it, if it was in the pipeline before it was
    sampled."""

    request: int
    token: int
    drafters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelRuns:
    """Runs whose results are not needed any more: stages skip or stop them."""

    runs: tuple[int, ...]
    dead_rows: tuple[DeadRow, ...] = ()
    """Rows of other runs that are not needed any more."""


@dataclass(frozen=True, slots=True)
class ToDrafter:
    """Send this to a drafter, by its id."""

    drafter: int
    message: DrafterMessage


@dataclass(frozen=True, slots=True)
class RunDone:
    """A run with rows ended. For statistics: a record for each request that had rows in it."""

    records: tuple[RunRecord, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request is over; nothing of it is in flight."""

    request: int
    reason: Finish


SchedulerAction = (
    SubmitRun | Sample | Fetch | Replay | Embed | Emit | CancelRuns | ToDrafter | RunDone | Finished | PrefixDone
)
"""`PrefixDone`: nothing of the order is in flight."""
