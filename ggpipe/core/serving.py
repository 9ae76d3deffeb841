"""What the scheduler knows of a request that it serves, and of a run in flight."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field

from ggpipe.core.events import Counters, Finish, Request
from ggpipe.core.messages import ROOT, MicroBatch, Want
from ggpipe.core.policy import RunWidth
from ggpipe.core.tree import Node, Tree

_TIMED = 4  # guesses below a fresh root by which the draft's pace is known; later it may wait for us


@dataclass(slots=True)
class Flight:
    """A run in the pipeline."""

    active: Active | None
    """None: it only carries operations."""
    nodes: list[Node]
    n_prompt: int
    """Rows in front of the nodes'."""
    n_guesses: int
    n_live: int
    """Rows that are not known to be wrong."""
    cancelled: bool = False


@dataclass(slots=True)
class Active:
    """A request that is being served."""

    request: Request
    want: Want
    tree: Tree
    chunks: collections.deque[tuple[int, ...]]
    reserve: int
    """Cells that its text may take up."""
    n_past: int = 0
    text: list[int] = field(default_factory=list)
    """Accepted tokens; their number is the epoch."""
    n_told: int = 0
    """Of these, the ones that the draft was told."""
    sampling: bool = False
    guesses: dict[int, Node] = field(default_factory=dict)
    """Live guesses by their numbers."""
    passed: dict[int, int] = field(default_factory=dict)
    """Guesses that became text: number -> tokens accepted with it."""
    ready: bool = False
    """The draft has no more guesses for this root."""
    flights: set[int] = field(default_factory=set)
    ending: Finish | None = None
    counters: Counters = field(default_factory=Counters)
    width: RunWidth = field(default_factory=RunWidth)
    held_until: float | None = None
    """A fresh root waits so long for guesses to ride with it."""
    gate_at: float | None = None
    """When the next run of guesses may go in."""
    _due_since: float | None = None
    """When the draft learned of a fresh root, or sent its last guess below it."""
    _n_below: int = 0
    """Guesses that it sent below it since."""

    @property
    def epoch(self) -> int:
        """Accepted tokens."""
        return len(self.text)

    @property
    def n_used(self) -> int:
        """Cells in use."""
        return self.tree.root.pos + 1 + self.tree.n_submitted

    @property
    def n_depths(self) -> int:
        """How far below the root a guess is of use."""
        depths = self.reserve - 1 - self.tree.root.pos
        if self.request.n_predict >= 0:  # the last token of all is sampled from the row before it
            depths = min(depths, self.request.n_predict - self.epoch - 1)
        return depths

    def best_guesses(self) -> list[Node]:
        """Guesses that are worth a row, the most probable path first, so parents before their children."""
        last = self.tree.root.pos + self.n_depths
        return [node for node in self.tree.waiting if node.pos <= last]

    def chances(self, guesses: Sequence[Node]) -> list[float]:
        """How probable each of these is, from the first parent on that is in the pipeline."""
        chances: dict[Node, float] = {}
        for node in guesses:
            before = chances.get(node.parent, 1.0) if node.parent is not None else 1.0
            chances[node] = before * self.width.chance(node.prob)
        return list(chances.values())

    def told(self, now: float) -> None:
        """The draft is told of the root; of one that it had not guessed, how long it takes is noted."""
        self._due_since, self._n_below = (now if self.tree.root.guess < 0 else None), 0

    def take(self, batch: MicroBatch, now: float) -> None:
        """The draft sent guesses: hang them where they belong, as far as they may still be right."""
        if batch.epoch == self.epoch and batch.expansions and self._due_since is not None:
            n = len(batch.expansions)
            self.width.guessed(self._n_below == 0, (now - self._due_since) / n)
            self._n_below += n
            self._due_since = now if self._n_below < _TIMED else None
        for expansion in batch.expansions:
            self.counters.drafted_tokens += expansion.n
            at = batch.epoch if expansion.parent == ROOT else self.passed.get(expansion.parent)
            parent = self.guesses.get(expansion.parent)
            for i, (token, prob) in enumerate(expansion.candidates[: expansion.n]):
                self._graft(at, parent, expansion.first + i, token, prob)

    def _graft(self, at: int | None, parent: Node | None, guess: int, token: int, prob: float) -> None:
        """Take a guess over. It hangs on `parent`, or on the text's token `at` (which the draft knew as the last)."""
        if at is not None:
            if at < self.epoch:  # the text went on: right or wrong is known already
                if self.text[at] == token:
                    self.passed[guess] = at + 1
                return
            parent = self.tree.root
        if parent is not None and parent.within(self.tree.root) and token not in self.request.ends:
            self.guesses[guess] = self.tree.add(parent, token, prob, guess)


def cut_prompt(prompt: tuple[int, ...], n_batch: int, n_ubatch: int) -> list[tuple[int, ...]]:
    """A prompt's chunks, as libllama cuts it: batches of `n_batch` tokens, each in pieces of `n_ubatch`."""
    return [
        prompt[at : min(at + n_ubatch, start + n_batch, len(prompt))]
        for start in range(0, len(prompt), n_batch)
        for at in range(start, min(start + n_batch, len(prompt)), n_ubatch)
    ]
