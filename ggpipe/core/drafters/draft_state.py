"""One request's tree in the draft model, and how it grows: which candidates become draft tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ggpipe.core.draft_messages import ROOT, BeginDrafting, Candidates, Expansion
from ggpipe.core.drafters.thresholds import Thresholds
from ggpipe.core.kv.radix_tree import Prefix
from ggpipe.core.messages import RowLogits
from ggpipe.core.tree import Node, Proposal, Tree


@dataclass(slots=True, eq=False, kw_only=True)
class DraftState:
    """A request that is drafted for."""

    begin: BeginDrafting
    prefix: Prefix
    """What the prefix cache had of its prompt, and its tree."""
    thresholds: Thresholds
    tokens: list[int]
    """Prompt and accepted tokens; the root is the last."""
    look_ahead: int
    """Depth of the deepest draft token below the root, at most."""
    n_decoded: int = 0
    """Tokens of the text that are submitted."""
    epoch: int = 0
    """Accepted tokens."""
    open: dict[Node, Candidates] = field(default_factory=dict)
    """Nodes without children that were decoded, with their candidates."""
    next_number: int = ROOT + 1
    n_drafted: int = 0
    """Draft tokens in this micro-batch so far."""
    held: list[Expansion] = field(default_factory=list)
    """Not sent yet."""
    complete: bool = False
    """The head was sent that nothing more is coming at this epoch."""
    retry_at: float | None = None
    """When to try again with lower thresholds."""
    n_cached: int = 0
    """Tokens of the prompt that the prefix cache had."""
    is_saved: bool = False
    """Its `Save` is in the pipeline, or was."""

    @property
    def tree(self) -> Tree:
        """Its draft tokens."""
        return self.prefix.tree

    @property
    def saves_prompt(self) -> bool:
        """Its prompt is saved as soon as all but its last token is in the pipeline."""
        new = len(self.begin.prompt) - 1 > self.n_cached
        return self.begin.saves == "prompt" and new and not self.is_saved

    @property
    def overlaps(self) -> bool:
        """It keeps drafting while earlier draft tokens are verified; else one micro-batch for each epoch."""
        return self.begin.speculation.mode == "async" and self.begin.speculation.continuous

    @property
    def micro_batch_is_full(self) -> bool:
        """The micro-batch has as many draft tokens as it may have."""
        return self.n_drafted >= self.begin.speculation.n_draft

    @property
    def deepest(self) -> int:
        """Position of the last draft token that is of use now."""
        return self.tree.root.pos + min(self.look_ahead, self.begin.n_left - self.epoch - 1)

    @property
    def n_used(self) -> int:
        """Cells in use outside the prefix cache."""
        return self.n_decoded + self.tree.n_submitted - self.prefix.n_tokens

    def may_grow(self, node: Node) -> bool:
        """Children of this node would be of use now."""
        return node.pos < self.deepest and (self.overlaps or not self.micro_batch_is_full)

    def tips(self) -> list[Node]:
        """Draft tokens to decode, the most probable path first."""
        return [node for node in self.tree.best_first() if self.may_grow(node)]

    def add_candidates(self, nodes: Iterable[Node]) -> None:
        """Logits of these nodes came: those that still hang on the root are open."""
        for node in nodes:
            if node.logits is not None and node.within(self.tree.root) and node.logits.ids:  # else all are banned
                self.open[node] = candidates(node.logits)

    def accept(self, tokens: Iterable[int], epoch: int) -> list[Node]:
        """The text went on with these tokens, `epoch` so far. Returns the nodes that died of it."""
        dead: list[Node] = []
        for token in tokens:
            dead += self.tree.advance(token)
            self.tokens.append(token)
            if self.tree.root.submitted:
                self.n_decoded = len(self.tokens)
        root = self.tree.root
        self.open = {node: best for node, best in self.open.items() if node.within(root)}
        self.epoch, self.complete, self.retry_at = epoch, False, None
        self.n_drafted = 0 if self.overlaps else sum(1 for _ in root.below())
        self.thresholds.accepted()
        return dead

    def grow(self) -> list[tuple[Expansion, ...]]:
        """Turn candidates into draft tokens, as far as thresholds and look-ahead allow; they are held until they are
        sent.

        Returns the micro-batches that became full: they are to be sent at once.
        """
        if not self.open:
            return []
        full: list[tuple[Expansion, ...]] = []
        root = self.tree.root
        n_tips = sum(not node.children for node in (root, *root.below()))
        for node in sorted(self.open, key=lambda node: -node.log_path):
            found = self.open[node]
            best, prob = found[0]
            if not self.may_grow(node) or prob < self.thresholds.cutoff:
                continue
            del self.open[node]
            if best in self.begin.ends:
                continue
            n = self._n_children(found, n_tips)
            n_tips += n - 1
            self._expand(node, found, n)
            if self.overlaps and self.micro_batch_is_full:
                full.append(tuple(self.held))
                self.held = []
                self.n_drafted = 0
                self.thresholds.n_batches += 1
        return full

    def _n_children(self, found: Candidates, n_tips: int) -> int:
        """How many candidates become draft tokens: the best, and further ones while tips and the batch have room."""
        n, speculation = 1, self.begin.speculation
        most = min(len(found), speculation.n_draft - self.n_drafted, 1 + speculation.n_parallel - n_tips)
        while n < most and found[n][1] >= self.thresholds.split and found[n][0] not in self.begin.ends:
            n += 1
        return n

    def _expand(self, node: Node, found: Candidates, n: int) -> None:
        for i, (token, prob) in enumerate(found[:n]):
            self.tree.add(node, token, Proposal(0, self.next_number + i, prob), prob)
        parent = ROOT if node is self.tree.root else node.proposals[0].number
        self.held.append(Expansion(parent, self.next_number, n, found))
        self.next_number += n
        self.n_drafted += n


def candidates(row: RowLogits) -> Candidates:
    """A row's best tokens with their probabilities, best first."""
    assert row.ids is not None
    return tuple((token, math.exp(x - row.log_sum_exp)) for token, x in zip(row.ids, row.logits, strict=True))
