"""A DFlash head as a drafter: one run drafts a block of tokens, from the target's states of all tokens before it.

It is told of states as an EAGLE-3 head is (`eagle`), and a row of the text is the same: the token at P + 1, with the
target's state at P. The row of the last token asks for the logits of several positions (`LogitsRequest.n_positions`):
the head's stage computes the block and forgets it, so that only states of the target are in its KV cache.

    the block says of each position      which tokens are probable there, whatever is drafted before
    so the tree has for each node        the candidates of the next position, with the same probabilities

Of some heads, it says that after each candidate of the position before (`RowLogits.after`). Then branches have
candidates of their own.

No draft token is decoded: as soon as a block has come, the tree is as deep as that. A block holds until the text leaves
its most probable tokens. The next one, which begins at the new root, is drafted then, or when half of the block is
text. Until it has come, drafting continues with the rest of the old one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from ggpipe.core.draft_messages import BlockOf, Candidates, Expansion
from ggpipe.core.drafters.draft_state import DraftState
from ggpipe.core.drafters.eagle import EagleHead, HeadState
from ggpipe.core.messages import LogitsRequest, RowLogits
from ggpipe.core.tree import Node

_MOST_NODES = 128
"""Draft tokens of a block, at most."""


@dataclass(slots=True, eq=False, kw_only=True)
class _BlockState(HeadState):
    """A request that is drafted for."""

    rows: dict[int, RowLogits] = field(default_factory=dict)
    """The block by the position of the token that each row follows, the root or later."""

    @property
    def block_size(self) -> int:
        """Positions to draft after the root. Each mask changes what the head says of the others, so where one block is
        drafted at a time, its size stays the same to the end of the text, as in llama.cpp."""
        if not self.overlaps:
            return min(self.horizon, self.begin.speculation.most_drafted)
        return max(self.deepest - self.tree.root.pos, 1)

    @property
    def block_of(self) -> BlockOf:
        is_of_root = min(self.rows, default=self.tree.root.pos) == self.tree.root.pos
        return BlockOf.THIS_ROOT if is_of_root else BlockOf.EARLIER_ROOT

    @property
    def needs_block(self) -> bool:
        """Whether to draft a block now. While the text follows one, the head stays free for the next correction."""
        n_left = max(self.rows, default=-1) + 1 - self.tree.root.pos
        return not self.overlaps or n_left < min(self.horizon / 2, self.deepest - self.tree.root.pos)

    def tips(self) -> Iterator[Node]:
        """Draft tokens are not decoded."""
        return iter(())

    def add_candidates(self, nodes: Iterable[Node]) -> None:
        """A block came. Its rest counts where the text went on as it says."""
        for node in nodes:
            if node.logits is None or not (self.overlaps or node is self.tree.root):
                continue
            rows = dict(enumerate((node.logits, *node.logits.later), node.pos))
            since = enumerate(self.tokens[node.pos + 1 :], node.pos)
            if all(self._names_best(rows, pos, token) for pos, token in since):
                self.rows = rows
                self._open_block()

    def _names_best(self, rows: Mapping[int, RowLogits], pos: int, token: int) -> bool:
        """Whether this block finds this token most probable after the text up to `pos`."""
        row = _row_after(rows, pos, self.tokens[pos])
        return row is not None and self.candidates(row, pos)[0][0] == token

    def following(self, node: Node) -> RowLogits | None:
        """What the block says of the token after a node; None: nothing."""
        row = _row_after(self.rows, node.pos, self.tokens[-1] if node is self.tree.root else node.token)
        row = self.adjusted(row, node.path) if row is not None else None
        return row if row is not None and row.ids else None

    def accept(self, tokens: Iterable[int], epoch: int) -> list[Node]:
        """As `HeadState.accept`."""
        dead = HeadState.accept(self, tokens, epoch)
        if self.overlaps:
            self._open_block()
        return dead

    def _open_block(self) -> None:
        """Draft from the block, instead of what an earlier one said."""
        root = self.tree.root
        if (row := self.following(root)) is not None:
            self.tree.drop_waiting()
            self.sent_nodes = {root: self.sent}
            self.open = {root: self.candidates(row, root.pos)}
            self.untried = [root]

    def _judge(self, token: int) -> None:
        root = self.tree.root
        row = self.following(root)
        found = self.candidates(row, root.pos) if row is not None else ()
        if row is not None and self.is_best_first:
            for i, (candidate, prob) in enumerate(found):
                self.calibration.judged(prob, candidate == token, is_best=i == 0)
            if self.foresight is not None and self.knows_numbers:
                self.foresight.learn(row, self.n_drawn, token)
        if not found or found[0][0] != token:
            self.rows = {}

    def _expand(self, node: Node, found: Candidates, probabilities: Sequence[float]) -> None:
        HeadState._expand(self, node, found, probabilities)
        for child in node.children.values():
            if (row := self.following(child)) is not None:
                self.open[child] = self.candidates(row, child.pos)

    def _grow_best_first(self) -> list[tuple[Expansion, ...]]:
        full: list[tuple[Expansion, ...]] = []
        order = itertools.count()
        nodes = [(-node.log_path, next(order), node) for node in self.untried]
        self.untried = []
        while nodes:
            _, _, node = heapq.heappop(nodes)
            room = min(_MOST_NODES - self.tree.n_nodes, self.begin.speculation.most_drafted - self.n_drafted)
            if node.pos >= self.deepest or not (probabilities := self._worth(node, self.open[node][:room])):
                continue
            self._expand(node, self.open.pop(node), probabilities)
            for child in node.children.values():
                if child in self.open:
                    heapq.heappush(nodes, (-child.log_path, next(order), child))
            if self.micro_batch_is_full:
                full.append(tuple(self.held))
                self.held, self.n_drafted = [], 0
        return full

    def _grow_by_thresholds(self) -> list[tuple[Expansion, ...]]:
        full: list[tuple[Expansion, ...]] = []
        n_before = -1
        while n_before < self.tree.n_nodes < _MOST_NODES:
            n_before = self.tree.n_nodes
            full += HeadState._grow_by_thresholds(self)
        return full


def _row_after(rows: Mapping[int, RowLogits], pos: int, token: int) -> RowLogits | None:
    """What a block says at a position after this token; None: nothing."""
    row = rows.get(pos)
    if row is None or not row.ids:
        return None
    return next((other for before, other in row.after if before == token), row)


class DFlashHead(EagleHead):
    """The drafter (see the module's docstring), for any number of requests."""

    _state = _BlockState
    _rows_with_root = 1 << 30  # rows of the text have no logits that would cost anything

    def _is_wanted(self, state: DraftState) -> bool:
        assert isinstance(state, _BlockState)
        is_coming = state.overlaps and any(part.nodes for part in self._in_flight.of(state))
        return super()._is_wanted(state) and not is_coming and state.needs_block

    def _logits_request(self, state: DraftState) -> LogitsRequest:
        assert isinstance(state, _BlockState)
        return structs.replace(super()._logits_request(state), n_positions=state.block_size)
