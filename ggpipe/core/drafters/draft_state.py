"""One request's tree in the draft model, and how it grows: which candidates become draft tokens."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from ggpipe.core.draft_messages import ROOT, Accepted, BeginDrafting, BlockOf, Candidates, Expansion, SharedToken
from ggpipe.core.drafters.adjusted_rows import AdjustedRows
from ggpipe.core.drafters.calibration import Calibration
from ggpipe.core.drafters.foresight import Foresight
from ggpipe.core.drafters.thresholds import Thresholds
from ggpipe.core.kv.radix_tree import Prefix
from ggpipe.core.messages import RowLogits
from ggpipe.core.tree import Node, Proposal, Tree

_LEAST_PATH = 1 / 500
"""Draft tokens of less probable paths only take energy, and cores from others."""
_LEAST_AGREEMENT = 0.01
_MOST_NODES = 256
"""Draft tokens below the root, at most."""
_MOST_SHARED = _MOST_NODES // 2
"""No draft tokens of other drafters are taken in beyond this number."""
_ROUNDING = 1e-6
_OTHER = 1
"""In a draft model's own tree: any other drafter."""
_LOG_PATH = operator.attrgetter("log_path")


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
    least_path: float = 0.0
    """Path probability below which draft tokens are not worth their time."""
    n_decoded: int = 0
    """Tokens of the text that are submitted."""
    epoch: int = 0
    """Accepted tokens."""
    open: dict[Node, Candidates] = field(default_factory=dict)
    """Nodes that were decoded and have no draft tokens of its own after them, with their candidates."""
    untried: list[Node] = field(default_factory=list)
    """Open nodes that may have children in a tree that grows best-first. The others' paths are not probable enough, or
    too long, below this root."""
    calibration: Calibration = field(default_factory=Calibration)
    """How often candidates turned out right, those included that did not become draft tokens."""
    foresight: Foresight | None = None
    """Predicts draws; None: tokens are not drawn, or trees grow by thresholds."""
    adjusted_rows: AdjustedRows | None = None
    """Adjusts logits as the target's are; None: those are not."""
    n_drawn: int = 0
    """Random numbers that were taken for the text."""
    knows_numbers: bool = True
    """It is known which of them selected each token that is being accepted."""
    has_shared: bool = False
    """Draft tokens of other drafters were taken in."""
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
    n_hidden: int = 0
    """Tokens right after the prompt that have no cells any more."""
    is_saved: bool = False
    """Whether its `Save` is or was in the pipeline."""
    tree: Tree = field(init=False)
    """Its draft tokens."""

    def __post_init__(self) -> None:
        self.tree = self.prefix.tree

    @classmethod
    def of(cls, begin: BeginDrafting, prefix: Prefix, foresight: Foresight | None) -> Self:
        """State of a request that begins. `prefix` is what the prefix cache has of its prompt."""
        return cls(
            foresight=foresight,
            adjusted_rows=AdjustedRows(begin.adjustments, begin.prompt) if begin.adjustments is not None else None,
            n_drawn=begin.drawing.n_drawn if begin.drawing is not None else 0,
            begin=begin,
            prefix=prefix,
            thresholds=Thresholds(begin.speculation),
            tokens=list(begin.prompt),
            look_ahead=begin.look_ahead,
            n_decoded=prefix.n_tokens,
            n_cached=prefix.n_tokens,
        )

    @property
    def saves_prompt(self) -> bool:
        """Whether its prompt is saved as soon as all but its last token is in the pipeline."""
        new = len(self.begin.prompt) - 1 > self.n_cached
        return self.begin.saves == "prompt" and new and not self.is_saved

    @property
    def is_best_first(self) -> bool:
        """Whether its tree grows by the probability of paths, not by thresholds."""
        return self.begin.speculation.is_best_first

    @property
    def overlaps(self) -> bool:
        """It keeps drafting while earlier draft tokens are verified; else one micro-batch for each epoch."""
        return self.begin.speculation.mode == "async" and self.begin.speculation.continuous

    @property
    def is_drafting(self) -> bool:
        """Its prompt is decoded, and draft tokens are wanted."""
        return self.look_ahead > 0 and self.n_decoded >= len(self.begin.prompt)

    @property
    def may_retry(self) -> bool:
        """What is not probable enough to be drafted now may be a little later."""
        return self.overlaps and not self.is_best_first and self.thresholds.can_fall

    @property
    def block_of(self) -> BlockOf:
        """Where its draft tokens come from now."""
        return BlockOf.NONE

    @property
    def micro_batch_is_full(self) -> bool:
        """The micro-batch has as many draft tokens as it may have."""
        return self.n_drafted >= self.begin.speculation.most_drafted

    @property
    def deepest(self) -> int:
        """Position of the deepest draft token that is useful now."""
        return self.tree.root.pos + min(self.look_ahead, self.begin.n_left - self.epoch - 1)

    def has_drafted_after(self, node: Node) -> bool:
        """Draft tokens of its own follow this node."""
        return any(proposal.drafter != _OTHER for child in node.children.values() for proposal in child.proposals)

    @property
    def n_used(self) -> int:
        """Cells in use outside the prefix cache."""
        return self.n_decoded - self.n_hidden + self.tree.n_submitted - self.prefix.n_tokens

    def hide(self) -> None:
        """Hide the older half of the output that is not hidden yet."""
        first = len(self.begin.prompt) + self.n_hidden
        n = max(self.n_decoded - first, 0) // 2
        if n:
            self.tree.hide(first, first + n)
            self.n_hidden += n

    def share(self, tokens: Iterable[SharedToken]) -> None:
        """Take in draft tokens that other drafters named."""
        for one in tokens:
            parent: Node | None = self.tree.root
            *above, token = one.path
            for ancestor in above:
                parent = parent and parent.children.get(ancestor)
            if parent is not None and token not in parent.children and self.tree.n_nodes < _MOST_SHARED:
                self.tree.add(parent, token, Proposal(_OTHER, one.number, one.probability), one.probability)
                self.has_shared = True
                self._weigh_shared(parent)

    def may_grow(self, node: Node) -> bool:
        """Whether children of this node would be useful now."""
        return node.pos < self.deepest and (self.overlaps or not self.micro_batch_is_full)

    def tips(self) -> Iterator[Node]:
        """Draft tokens to decode, the most probable path first."""
        if not self.overlaps and self.micro_batch_is_full:
            return iter(())
        deepest, least = self.deepest, -math.inf
        if self.is_best_first:
            least = max(_LEAST_PATH, self.least_path / max(self.calibration.agreement, _LEAST_AGREEMENT))
            least = self.tree.root.log_path + math.log(least) - _ROUNDING
        return (node for node in self.tree.best_first() if node.pos < deepest and node.log_path >= least)

    def path_probability(self, node: Node) -> float:
        """Probability of a node's path below the root."""
        return math.exp(node.log_path - self.tree.root.log_path)

    def add_candidates(self, nodes: Iterable[Node]) -> None:
        """Logits of these nodes came: those that still hang on the root are open."""
        for node in nodes:
            if node.logits is not None and node.within(self.tree.root) and node.logits.ids:  # else all are banned
                node.logits = self.adjusted(node.logits, node.path)
                self.open[node] = self.candidates(node.logits, node.pos)
                self.untried.append(node)

    def adjusted(self, row: RowLogits, path: tuple[int, ...]) -> RowLogits:
        """A row as the target's samplers would change it. `path`: as `Node.path`."""
        if self.adjusted_rows is None:
            return row
        drawing = self.begin.drawing if self.foresight is not None else None
        return self.adjusted_rows.adjusted(row, path, drawing.whole_temp if drawing is not None else 0.0)

    def candidates(self, row: RowLogits, pos: int) -> Candidates:
        """The best candidates after the token at this position, from its row."""
        if self.foresight is None:
            return candidates(row)
        return self.foresight.candidates(row, self.n_drawn + pos - self.tree.root.pos)

    def take_numbers(self, accepted: Accepted) -> None:
        """Random numbers were taken for the tokens that are accepted next: one each, but for draws that did not fit a
        grammar."""
        extra = accepted.n_drawn - self.n_drawn - len(accepted.tokens)
        self.knows_numbers = not extra or len(accepted.tokens) == 1
        if extra and self.foresight is not None:
            self.n_drawn += extra
            self.open = {node: self.candidates(node.logits, node.pos) for node in self.open if node.logits is not None}

    def accept(self, tokens: Iterable[int], epoch: int) -> list[Node]:
        """Append accepted tokens. `epoch`: number of tokens accepted so far. Returns the nodes that are dead now."""
        dead: list[Node] = []
        for token in tokens:
            self._judge(token)
            dead += self.tree.advance(token)
            self._append(token)
            if self.tree.root.submitted:
                self.n_decoded = len(self.tokens)
        root = self.tree.root
        self.open = {node: best for node, best in self.open.items() if node.within(root)}
        self.untried = list(self.open)
        self.epoch, self.complete, self.retry_at = epoch, False, None
        self.n_drafted = 0 if self.overlaps else self.tree.n_nodes
        self.thresholds.accepted()
        return dead

    def _append(self, token: int) -> None:
        self.n_drawn += 1
        self.tokens.append(token)
        if self.adjusted_rows is not None:
            self.adjusted_rows.accept(token)

    def _judge(self, token: int) -> None:
        """The token after the root is known: compare it with the candidates."""
        logits = self.tree.root.logits
        if self.is_best_first and logits is not None and logits.ids:
            for i, (candidate, prob) in enumerate(self.candidates(logits, self.tree.root.pos)):
                self.calibration.judged(prob, candidate == token, is_best=i == 0)
            if self.foresight is not None and self.knows_numbers:
                self.foresight.learn(logits, self.n_drawn, token)

    def grow(self) -> list[tuple[Expansion, ...]]:
        """Turn candidates into draft tokens, as far as policy and lead allow; they are held until they are sent.

        Returns the micro-batches that became full: they are to be sent at once.
        """
        if not self.open:
            return []
        return self._grow_best_first() if self.is_best_first else self._grow_by_thresholds()

    def _grow_best_first(self) -> list[tuple[Expansion, ...]]:
        """Candidates become draft tokens whose whole path is probable enough, the most probable ones first."""
        full: list[tuple[Expansion, ...]] = []
        most_drafted, deepest, room = self.begin.speculation.most_drafted, self.deepest, _MOST_NODES - self.tree.n_nodes
        self.untried.sort(key=_LOG_PATH, reverse=True)
        for node in self.untried:
            if node.pos >= deepest:
                continue
            found = self.open[node]
            probabilities = self._worth(node, found[: min(room, most_drafted - self.n_drafted)])
            if not probabilities:
                continue  # its path may become more probable as the root moves on
            del self.open[node]
            room -= len(probabilities)
            self._expand(node, found, probabilities)
            self._weigh_shared(node)
            if self.micro_batch_is_full:
                full.append(tuple(self.held))
                self.held, self.n_drafted = [], 0
        self.untried.clear()
        return full

    def _weigh_shared(self, parent: Node) -> None:
        """Other drafters' tokens after a node are less probable if the draft model itself prefers another one there: of
        two that each seem this probable, not both can be right."""
        if not self.has_shared or parent.logits is None or not parent.logits.ids:
            return
        best, prob = self.candidates(parent.logits, parent.pos)[0]
        own = self.calibration.probability(prob)

        def weighed(child: Node) -> float:
            first = child.proposals[0]
            if first.drafter != _OTHER or child.token == best:
                return child.probability
            return first.prob * (1 - own) / max(1 - first.prob * own, _ROUNDING)

        self.tree.reevaluate_children(parent, [weighed(child) for child in parent.children.values()])

    def _worth(self, node: Node, found: Candidates) -> list[float]:
        """The probabilities of those candidates that become draft tokens after this node: the first ones."""
        path, ends, p_accept = self.path_probability(node), self.begin.ends, self.begin.speculation.p_accept
        probabilities: list[float] = []
        for token, prob in found:
            probability = self.calibration.probability(prob)
            if token in ends or prob < p_accept or path * probability < _LEAST_PATH:
                break
            probabilities.append(probability)
        return probabilities

    def _grow_by_thresholds(self) -> list[tuple[Expansion, ...]]:
        full: list[tuple[Expansion, ...]] = []
        root = self.tree.root
        n_tips = sum(not node.children for node in (root, *root.below()))
        for node in sorted(self.open, key=_LOG_PATH, reverse=True):
            found = self.open[node]
            best, prob = found[0]
            if not self.may_grow(node) or prob < self.thresholds.cutoff:
                continue
            del self.open[node]
            if best in self.begin.ends:
                continue
            n = self._n_children(found, n_tips)
            n_tips += n - 1
            self._expand(node, found, [self.calibration.probability(prob) for _, prob in found[:n]])
            if self.overlaps and self.micro_batch_is_full:
                full.append(tuple(self.held))
                self.held = []
                self.n_drafted = 0
                self.thresholds.n_batches += 1
        return full

    def _n_children(self, found: Candidates, n_tips: int) -> int:
        """How many candidates become draft tokens: the best, and further ones while tips and the batch have room."""
        n, speculation = 1, self.begin.speculation
        most = min(len(found), speculation.most_drafted - self.n_drafted, 1 + speculation.n_parallel - n_tips)
        while n < most and found[n][1] >= self.thresholds.split and found[n][0] not in self.begin.ends:
            n += 1
        return n

    def _expand(self, node: Node, found: Candidates, probabilities: Sequence[float]) -> None:
        """The first candidates after a node become draft tokens, with these probabilities."""
        n, first = len(probabilities), self.next_number
        for number, (token, prob), probability in zip(itertools.count(first), found, probabilities, strict=False):
            self.tree.add(node, token, Proposal(0, number, prob), probability)
        parent = ROOT if node is self.tree.root else node.proposals[0].number
        self.held.append(Expansion(parent, first, n, found))
        self.next_number += n
        self.n_drafted += n


def candidates(row: RowLogits) -> Candidates:
    """A row's best tokens with their probabilities, best first."""
    assert row.ids is not None
    return tuple(zip(row.ids, [math.exp(x - row.log_sum_exp) for x in row.logits], strict=True))
