"""What a test's head has seen of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from ggpipe.core.messages import LogitsKind, LogitsRequest, RowLogits, Run, RunRecord
from ggpipe.core.prefixes import PrefixDone, PrefixOrder, SavePrefix
from ggpipe.core.random_numbers import RandomNumbers
from ggpipe.core.request import Counters, Finish, Request
from support.fake_model import Tokens
from support.requests import DRAWN

WHOLE = 2.0
"""In place of the random number of a row that was fetched."""
_NUMBERS = RandomNumbers(DRAWN.seed)


@dataclass
class SeenOrder:
    """What the head did for an order."""

    order: PrefixOrder
    n_positions: int = 0
    """Rows that were computed for it."""
    n_runs: int = 0
    n_done: int = 0
    """Runs that the scheduler said ended."""
    stopped: bool = False
    done: PrefixDone | None = None

    may_cancel = True

    def lives(self, history: Tokens) -> bool:
        """It is part of the prefix."""
        assert history == self.order.tokens[: len(history)]
        return True

    def computed(self, run: Run) -> None:
        """A run has rows of it."""
        rows = [row for row in run.rows if row.request == self.order.id]
        assert isinstance(self.order, SavePrefix)
        assert all(row.logits_request < 0 for row in rows), "nothing is sampled"
        assert rows[0].pos == self.n_positions or not self.n_runs
        self.n_positions, self.n_runs = rows[-1].pos + 1, self.n_runs + 1


@dataclass
class Seen:
    """What the head did for one request."""

    request: Request
    text: list[int] = field(default_factory=list)
    n_sampled: int = 0
    n_drawn: int = 0
    """Random numbers that were taken."""
    n_drafted: int = 0
    """Tokens that were in the pipeline before they were drawn."""
    runs: list[Run] = field(default_factory=list)
    n_done: int = 0
    """Runs that the scheduler said ended."""
    n_replayed: int = 0
    """Rows of a resumed text that came back."""
    told: list[int] = field(default_factory=list)
    """Tokens that the draft was sent."""
    stopped: bool = False
    ended: bool = False
    """The end token was drawn."""
    finish: Finish | None = None
    counters: Counters = field(default_factory=Counters)

    def want(self, keeps: bool) -> LogitsRequest:
        """What sampling its next token takes."""
        if self.request.drawing is not None:
            return LogitsRequest(LogitsKind.DRAWN, 3, keeps=keeps)
        return LogitsRequest(LogitsKind.TOP, 3 + self.n_sampled * self.request.logits_request_grows, keeps=keeps)

    def is_stale(self, row: RowLogits) -> bool:
        """A second draw has moved the random numbers on since the row was submitted. The fake pipeline's rows have
        theirs in place of the sum."""
        return self.request.drawing is not None and row.log_sum_exp not in (_NUMBERS[self.n_drawn], WHOLE)

    def sampled(self, row: RowLogits) -> int:
        """A token was sampled from a row. Returns how many random numbers that took."""
        n_draws = 1 + (row.log_sum_exp == WHOLE and self.n_sampled % 2)
        self.n_drawn += n_draws
        self.n_sampled += 1
        return n_draws

    @property
    def may_cancel(self) -> bool:
        return self.request.speculation.cancel

    @property
    def tokens(self) -> Tokens:
        return (*self.request.prompt, *self.text)

    def lives(self, history: Tokens) -> bool:
        """It is part of the text, or may become so."""
        n = min(len(history), len(self.tokens))
        return history[:n] == self.tokens[:n]

    @property
    def chunks(self) -> list[int]:
        """Rows of the prompt in each run that has any."""
        n_prompt = len(self.request.prompt)
        rows = [[row for row in run.rows if row.request == self.request.id] for run in self.runs]
        return [n for n in (sum(row.pos < n_prompt for row in of_run) for of_run in rows) if n]

    def submitted(self, run: Run, histories: list[Tokens]) -> None:
        """A run has rows of it. `histories`: the tokens up to each of them."""
        self.runs.append(run)
        assert all(self.lives(history) for history in histories), "a token that is known to be rejected"
        draft_tokens = [history for history in histories if len(history) > len(self.tokens)]
        assert len(draft_tokens) <= self.request.speculation.most_drafted
        for row, history in zip((row for row in run.rows if row.request == self.request.id), histories, strict=True):
            is_replayed = row.pos in self.request.wanted
            is_again = len(self.request.prompt) <= len(history) < len(self.tokens)
            is_wanted = len(history) >= len(self.request.prompt) and not is_again
            assert (row.logits_request >= 0) == (is_replayed or is_wanted)
        if self.request.n_predict > 0:
            assert len(histories[-1]) < len(self.request.prompt) + self.request.n_predict

    def run_done(self, record: RunRecord) -> None:
        """The scheduler says that a run of it ended."""
        (run,) = (run for run in self.runs if run.id == record.id)
        assert record.n_rows == sum(row.request == self.request.id for row in run.rows)
        assert record.n_run_rows == len(run.rows)
        assert record.n_draft_tokens <= record.n_rows
        self.n_done += 1

    def check_counters(self, counters: Counters) -> None:
        """What the scheduler has counted so far."""
        assert counters.accepted_tokens == self.n_drafted
        assert counters.accepted_tokens <= counters.submitted_tokens <= counters.drafted_tokens
        assert counters.verified_runs <= counters.speculative_runs
        by_lead = counters.by_lead
        assert all(lead > 0 and accepted <= submitted for lead, (submitted, accepted) in by_lead.items())
        assert sum(submitted for submitted, _ in by_lead.values()) == counters.submitted_tokens
        assert sum(accepted for _, accepted in by_lead.values()) == counters.accepted_tokens
        assert sum(counters.rejected_rows.values()) <= counters.submitted_tokens - counters.accepted_tokens
        assert counters.cancelled_tokens <= counters.submitted_tokens
