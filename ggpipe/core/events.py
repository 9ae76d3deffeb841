"""What happens to the head's scheduler (events), and what it wants done (actions).

They are msgspec structs, as the messages of `messages.py` are, and for the same reason.
"""

from __future__ import annotations

import msgspec

from ggpipe.core.draft_messages import DrafterMessage, MicroBatch
from ggpipe.core.dropped_rows import DeadRow
from ggpipe.core.messages import LogitsRequest, RowLogits, Run, RunRecord, RunResult
from ggpipe.core.prefixes import ErasePrefix, PrefixDone, RestorePrefix, SavePrefix
from ggpipe.core.request import Counters, DraftCheck, Finish, Request

# Events


class Arrived(msgspec.Struct, frozen=True):
    """A request came in. `logits_request`: what sampling its first token takes. `counters`: to be kept up to date for
    it."""

    request: Request
    logits_request: LogitsRequest
    counters: Counters = msgspec.field(default_factory=Counters)
    draft_check: DraftCheck | None = None
    """Says which draft tokens may be sampled; None: all may."""


class RunEnded(msgspec.Struct, frozen=True):
    """A run's result is back, or its marker when it was cancelled."""

    result: RunResult


class Sampled(msgspec.Struct, frozen=True):
    """A token was sampled as asked. `logits_request`: what sampling the one after it takes. `finish`: why the output
    ends here; with END_OF_TEXT, the token is not a part of the output."""

    request: int
    token: int
    logits_request: LogitsRequest
    finish: Finish | None = None
    n_draws: int = 1
    """Random numbers that it took, where tokens are drawn with them."""


class RowNeeded(msgspec.Struct, frozen=True):
    """Sampling a request's next token takes the whole row."""

    request: int


class RowFetched(msgspec.Struct, frozen=True):
    """The whole row came back that was fetched for a request."""

    request: int
    row: RowLogits


class NoToken(msgspec.Struct, frozen=True):
    """No token can be sampled for a request: its grammar allows none."""

    request: int


class Drafted(msgspec.Struct, frozen=True):
    """A drafter sent draft tokens."""

    micro_batch: MicroBatch


class StopRequest(msgspec.Struct, frozen=True):
    """The user wants no more of a request, or of an order."""

    request: int


class Tick(msgspec.Struct, frozen=True):
    """The time has come that `wake_at` named: the scheduler's, or a drafter's."""


SchedulerEvent = (
    Arrived | RunEnded | Sampled | RowNeeded | RowFetched | NoToken | Drafted | SavePrefix | RestorePrefix | ErasePrefix
    | PrefixDone | StopRequest | Tick
)  # fmt: skip
"""`PrefixDone`: all ranks have saved or restored their parts."""


# Actions


class SubmitRun(msgspec.Struct, frozen=True):
    """Put a run into the pipeline."""

    run: Run


class Sample(msgspec.Struct, frozen=True):
    """Sample a request's next token from a row that came back, then answer with `Sampled`, `RowNeeded` or `NoToken`."""

    request: int
    row: RowLogits


class Fetch(msgspec.Struct, frozen=True):
    """Have the last stage send the whole row of a run that it kept; `RowFetched` follows."""

    request: int
    run: int
    row: int


class Replay(msgspec.Struct, frozen=True):
    """The rows that a resumed request's next tokens were drawn from, in order."""

    request: int
    rows: tuple[RowLogits, ...]


class Embed(msgspec.Struct, frozen=True):
    """The next rows of hidden states that a request's embedding is made of, in order."""

    request: int
    rows: tuple[RowLogits, ...]


class Emit(msgspec.Struct, frozen=True):
    """A token of the answer is certain. `drafters`: those that had named it, if it was in the pipeline before it was
    sampled."""

    request: int
    token: int
    drafters: tuple[int, ...]


class CancelRuns(msgspec.Struct, frozen=True):
    """Runs whose results are not needed any more: stages skip or stop them."""

    runs: tuple[int, ...]
    dead_rows: tuple[DeadRow, ...] = ()
    """Rows of other runs that are not needed any more."""


class ToDrafter(msgspec.Struct, frozen=True):
    """Send this to a drafter, by its id."""

    drafter: int
    message: DrafterMessage


class RunDone(msgspec.Struct, frozen=True):
    """A run with rows ended. For statistics: a record for each request that had rows in it."""

    records: tuple[RunRecord, ...]


class Finished(msgspec.Struct, frozen=True):
    """A request is over; nothing of it is in flight."""

    request: int
    reason: Finish


SchedulerAction = (
    SubmitRun | Sample | Fetch | Replay | Embed | Emit | CancelRuns | ToDrafter | RunDone | Finished | PrefixDone
)
"""`PrefixDone`: nothing of the order is in flight."""
