"""What happens to the head's scheduler (events), and what it wants done (actions)."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from ggpipe.config import SpeculationConfig
from ggpipe.core.messages import MicroBatch, RowLogits, Run, Steering, Want


class Finish(enum.Enum):
    """Why a request ended."""

    END_OF_TEXT = "end of text"
    LENGTH = "length"
    CONTEXT_FULL = "context full"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pipeline can hold."""

    n_ctx: int
    """KV cells, of all requests together."""
    n_batch: int
    n_ubatch: int
    n_in_flight: int
    """Runs in the pipeline at the same time; more only wait in its queues, and delay the next correction."""
    n_seq: int = 1
    """Sequence ids, of all requests together."""
    n_requests: int = 1
    """Requests that are served at the same time."""

    @property
    def n_rows(self) -> int:
        """Rows in a run, at most."""
        return min(self.n_batch, self.n_ubatch)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue."""

    id: int
    prompt: tuple[int, ...]
    n_predict: int = -1
    """Tokens to generate at most; -1 until the text ends or the context is full."""
    speculation: SpeculationConfig = field(default_factory=lambda: SpeculationConfig(mode="iterative"))
    ends: frozenset[int] = frozenset()
    """Tokens that end the text: nothing is guessed from there on."""
    banned: tuple[int, ...] = ()
    """Tokens that are never drawn."""
    want_grows: bool = False
    """Each token more in the text takes one more of the best logits to sample (penalties look back on it)."""


@dataclass(slots=True)
class Counters:
    """What speculation did for a request so far."""

    drafted_tokens: int = 0
    """Guesses that came from the draft."""
    submitted_tokens: int = 0
    """Guesses that went into the pipeline."""
    accepted_tokens: int = 0
    """Submitted guesses that the target confirmed."""
    cancelled_tokens: int = 0
    """Guesses in runs that were cancelled."""
    speculative_runs: int = 0
    """Runs with guesses."""
    verified_runs: int = 0
    """Of these, the ones that came back with logits."""
    cancelled_runs: int = 0
    wrong_rows: dict[int, int] = field(default_factory=dict)
    """For each run with guesses that turned out wrong, how many of its rows that were."""
    by_lead: dict[int, list[int]] = field(default_factory=dict)
    """[submitted, accepted] guesses, by how far ahead of the last accepted token they were when they were submitted."""

    def submitted(self, leads: Iterable[int]) -> None:
        """A run with these guesses, each so far ahead, went into the pipeline."""
        for lead in leads:
            self.submitted_tokens += 1
            self.by_lead.setdefault(lead, [0, 0])[0] += 1

    def accepted(self, lead: int) -> None:
        """The target confirmed a guess that was submitted so far ahead."""
        self.accepted_tokens += 1
        self.by_lead[lead][1] += 1

    def found_wrong(self, runs: Iterable[int]) -> None:
        """Rows of these runs turned out wrong."""
        for run in runs:
            self.wrong_rows[run] = self.wrong_rows.get(run, 0) + 1

    @property
    def acceptance(self) -> float | None:
        """Accepted guesses of those submitted, 0 to 1; None before the first."""
        return self.accepted_tokens / self.submitted_tokens if self.submitted_tokens else None

    @property
    def accepted_per_run(self) -> float | None:
        """Accepted guesses for each verified run."""
        return self.accepted_tokens / self.verified_runs if self.verified_runs else None


# Events


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request came in. `want`: what sampling its first token takes."""

    request: Request
    want: Want


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run's result is back, or its marker when it was cancelled."""

    run: int
    rows: tuple[RowLogits, ...] = ()
    compute_s: float = 0.0
    """Of its slowest stage."""
    all_s: float = 0.0
    """Of all stages together."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token was drawn as asked. `end`: it ends the text. `want`: what sampling the one after it takes."""

    request: int
    token: int
    end: bool
    want: Want


@dataclass(frozen=True, slots=True)
class Guessed:
    """The draft sent guesses."""

    batch: MicroBatch


@dataclass(frozen=True, slots=True)
class Stop:
    """The user wants no more of a request."""

    request: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The time has come that `wake_at` named: the scheduler's, or the drafter's."""


Event = Arrived | RunEnded | Sampled | Guessed | Stop | Tick


# Actions


@dataclass(frozen=True, slots=True)
class Submit:
    """Put a run into the pipeline. `n_guesses`: of its rows, the ones that may be wrong."""

    run: Run
    n_guesses: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """Draw a request's next token from a row that came back, then say `Sampled`."""

    request: int
    row: RowLogits


@dataclass(frozen=True, slots=True)
class Emit:
    """A token of the answer is certain. `guessed`: it was in the pipeline before it was drawn."""

    request: int
    token: int
    guessed: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Runs whose results nobody needs: stages skip or stop them."""

    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Steer:
    """Tell the draft."""

    message: Steering


@dataclass(frozen=True, slots=True)
class Finished:
    """A request is over; nothing of it is in flight."""

    request: int
    reason: Finish


Action = Submit | Sample | Emit | Cancel | Steer | Finished
