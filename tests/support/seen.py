"""What a test's head has seen of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from ggpipe.core.messages import Run
from ggpipe.core.prefixes import PrefixDone, PrefixOrder
from ggpipe.core.request import Counters, Finish, Request
from support.fakes import Tokens


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


@dataclass
class Seen:
    """What the head did for one request."""

    request: Request
    text: list[int] = field(default_factory=list)
    n_sampled: int = 0
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
