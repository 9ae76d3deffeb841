"""A radix tree over tokens: which sequences of the KV cache hold which cells.

A segment stands for a row of tokens and for the KV cells that hold them; a sequence lies on the segments from the top
down to its own. So cells that several sequences share are one segment, and count once. What two requests computed each
for itself are two segments beside each other, also where they hold the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ggpipe.core.kv.checkpoints import Checkpoint
from ggpipe.core.tree import Tree

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False, kw_only=True)
class Segment:
    """A row of tokens that the same sequences hold."""

    tokens: Tokens = ()
    end: int = 0
    """Position after its last token."""
    parent: Segment | None = None
    children: list[Segment] = field(default_factory=list)
    served: list[Prefix] = field(default_factory=list)
    """Sequences of requests that are being served which end here."""
    kept: list[KeptPrefix] = field(default_factory=list)
    """Kept sequences that end here."""
    n_served: int = 0
    """Requests that are being served whose sequences go through it."""

    @property
    def path(self) -> Tokens:
        """All tokens from the first one to its last."""
        tokens: Tokens = ()
        segment: Segment | None = self
        while segment is not None:
            tokens = segment.tokens + tokens
            segment = segment.parent
        return tokens


@dataclass(slots=True, eq=False, kw_only=True)
class Prefix:
    """The sequence of a request that is being served, as far as it is computed."""

    segment: Segment
    tree: Tree
    """The request's."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Of its prompt."""
    pending: list[tuple[Checkpoint, int]] = field(default_factory=list)
    """Those in the pipeline, with their ids: it is not certain yet that they will be computed."""

    @property
    def n_tokens(self) -> int:
        """Tokens from the first on whose cells are in the cache."""
        return self.segment.end

    @property
    def seq(self) -> int:
        """The id that holds its cells."""
        return self.tree.seq


@dataclass(slots=True, eq=False, kw_only=True)
class KeptPrefix:
    """A sequence that no request uses: of one that ended, or a checkpoint."""

    segment: Segment
    seq: int
    """The id that holds its cells."""
    used_at: int


class RadixTree:
    """See the module's text."""

    def __init__(self) -> None:
        self.root = Segment()
        self.n_cells = 0
        """Cells of all sequences in the tree; each counts once."""
        self.n_held = 0
        """Those of them that requests which are being served hold."""

    def along(self, tokens: Tokens) -> Iterator[tuple[Segment, int]]:
        """The segments that hold the first of these tokens, parents first; and how many tokens agree down to there."""
        rest = [self.root]
        while rest:
            segment = rest.pop()
            for child in segment.children:
                n = agreeing(child.tokens, tokens[segment.end : child.end])
                if n:
                    yield child, segment.end + n
                if n == len(child.tokens):
                    rest.append(child)

    def split(self, segment: Segment, n: int) -> Segment:
        """The segment that ends at position `n`, within this one."""
        parent = segment.parent
        if n == segment.end or parent is None:
            return segment
        at = n - parent.end
        upper = Segment(tokens=segment.tokens[:at], end=n, parent=parent, n_served=segment.n_served)
        upper.children.append(segment)
        parent.children[parent.children.index(segment)] = upper
        segment.tokens, segment.parent = segment.tokens[at:], upper
        return upper

    def serve(self, prefix: Prefix) -> None:
        """A request begins with this sequence."""
        prefix.segment.served.append(prefix)
        self._count(prefix.segment, 1)

    def extend(self, prefix: Prefix, tokens: Tokens) -> None:
        """These tokens follow what a request's sequence holds."""
        segment = prefix.segment
        if segment is self.root or segment.children or segment.kept or len(segment.served) > 1:
            segment.served.remove(prefix)
            below = Segment(end=segment.end, parent=segment, served=[prefix], n_served=1)
            segment.children.append(below)
            prefix.segment = segment = below
        segment.tokens += tokens
        segment.end += len(tokens)
        self.n_cells += len(tokens)
        self.n_held += len(tokens)

    def leave(self, prefix: Prefix, kept: KeptPrefix | None) -> None:
        """A request's sequence ends; `kept` takes its place."""
        segment = prefix.segment
        self._count(segment, -1)
        segment.served.remove(prefix)
        if kept is not None:
            segment.kept.append(kept)
        self._prune(segment)

    def keep(self, prefix: Prefix, n: int, seq: int, used_at: int) -> KeptPrefix:
        """Another id holds the first `n` tokens of a request's sequence as well."""
        segment = prefix.segment
        while segment.parent is not None and segment.parent.end >= n:
            segment = segment.parent
        kept = KeptPrefix(segment=self.split(segment, n), seq=seq, used_at=used_at)
        kept.segment.kept.append(kept)
        return kept

    def drop(self, kept: KeptPrefix) -> None:
        """A kept sequence is given up, or taken over."""
        kept.segment.kept.remove(kept)
        self._prune(kept.segment)

    def _count(self, segment: Segment, n: int) -> None:
        """Count a request in or out (`n` 1 or -1) that holds this segment and all above it."""
        at: Segment | None = segment
        while at is not None:
            before, at.n_served = at.n_served, at.n_served + n
            self.n_held += len(at.tokens) * ((at.n_served > 0) - (before > 0))
            at = at.parent

    def _prune(self, segment: Segment) -> None:
        """Take out the segments from here up that no sequence needs, and join those that need not be two."""
        while (parent := segment.parent) is not None and not (segment.served or segment.kept or segment.children):
            parent.children.remove(segment)
            self.n_cells -= len(segment.tokens)
            segment = parent
        if parent is not None and not (segment.served or segment.kept) and len(segment.children) == 1:
            (child,) = segment.children
            child.tokens, child.parent = segment.tokens + child.tokens, parent
            parent.children[parent.children.index(segment)] = child

    def validate(self) -> set[KeptPrefix]:
        """Check what must hold between events; returns all kept sequences. Raises AssertionError."""
        n_cells = n_held = 0
        kept: set[KeptPrefix] = set()
        rest = [self.root]
        while rest:
            segment = rest.pop()
            start = segment.parent.end if segment.parent is not None else 0
            assert segment.end == start + len(segment.tokens)
            assert segment.n_served == len(segment.served) + sum(child.n_served for child in segment.children)
            if segment is not self.root:
                here = segment.served or segment.kept
                assert segment.tokens
                assert here or segment.children, "cells that no sequence holds"
                assert here or len(segment.children) != 1, "two segments could be one"
            assert all(prefix.segment is segment for prefix in segment.served)
            assert all(one.segment is segment for one in segment.kept)
            kept.update(segment.kept)
            n_cells += len(segment.tokens)
            n_held += len(segment.tokens) if segment.n_served else 0
            assert all(child.parent is segment for child in segment.children)
            rest += segment.children
        assert (n_cells, n_held) == (self.n_cells, self.n_held)
        return kept


def sequences_through(segment: Segment) -> Iterator[Prefix | KeptPrefix]:
    """The sequences that hold a segment."""
    rest = [segment]
    while rest:
        segment = rest.pop()
        yield from segment.served
        yield from segment.kept
        rest += segment.children


def agreeing(a: Tokens, b: Tokens) -> int:
    """How many tokens agree, from the first on."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
