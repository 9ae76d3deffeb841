"""The prefix cache: what ended requests computed is kept in the KV cache, for prompts that begin with the same tokens.

A radix tree over tokens. A segment stands for a row of tokens and for the KV cells that hold them; a sequence lies on
the segments from the top down to its own. So cells that several sequences share are one segment, and count once.

    a prompt begins as a sequence does       CP(id of that sequence -> the request's id, up to there)
    it continues a kept one to the last cell   that id becomes the request's          no operation
    a request ends                           RM(its id, behind what is computed), the id is kept
    cells or ids are needed                  RM(the id that was used longest ago, everything)

A request that is being served is in the tree as well: its cells may be copied, and are not given up. What two requests
computed each for itself are two segments beside each other, also where they hold the same tokens.

Some models cannot continue a part of a sequence (`Limits.partial_prefixes`): there only whole ones are taken over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ggpipe.core.messages import KvKind, KvOp
from ggpipe.core.request import Limits
from ggpipe.core.tree import SequenceIds, Tree


@dataclass(slots=True, eq=False, kw_only=True)
class _Segment:
    tokens: tuple[int, ...] = ()
    end: int = 0
    """Position behind its last token."""
    parent: _Segment | None = None
    children: list[_Segment] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    """Sequences that end here."""
    n_served: int = 0
    """Requests that are being served whose sequences go through it."""


@dataclass(slots=True, eq=False, kw_only=True)
class Prefix:
    """A sequence in the cache: kept, or of a request that is being served."""

    segment: _Segment
    tree: Tree
    """Of the request that it serves, or did when it is kept: then it is closed, and has left its id."""
    kept: bool = False
    used_at: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens from the first on whose cells are in the cache."""
        return self.segment.end

    @property
    def own(self) -> int:
        """The id that holds its cells."""
        return self.tree.own


class PrefixCache:
    """See the module's text. It shares ids and operations with the trees of a pipeline."""

    def __init__(self, limits: Limits, ids: SequenceIds, ops: list[KvOp]) -> None:
        """`ids` must leave one for each request to come and one for each prefix that may be kept."""
        self._limits = limits
        self._ids = ids
        self._ops = ops
        self._root = _Segment()
        self._kept: list[Prefix] = []
        self._clock = itertools.count(1)
        self.n_cells = 0
        """Cells of all sequences in the cache; each counts once."""
        self.n_held = 0
        """Those of them that requests which are being served hold: evicting does not free them."""

    def __len__(self) -> int:
        return len(self._kept)

    # Requests

    def open(self, prompt: Sequence[int], reuse: bool) -> Prefix:
        """A request begins: it gets a tree, and with `reuse` what there is of its prompt.

        The prompt's last token is always left to compute: its logits are needed. There must be a free id.
        """
        wanted = tuple(prompt[:-1]) if reuse else ()
        segment, n = self._longest(wanted)
        kept = next((prefix for prefix in segment.prefixes if prefix.kept), None)
        if kept is not None and n == segment.end:
            self._kept.remove(kept)
            segment.prefixes.remove(kept)
            self._ids.reserved += 1
            own = kept.own
        else:
            own = self._ids.take()
            if n:
                segment = self._split(segment, n)
                self._ops.append(KvOp(KvKind.CP, _any(segment).own, own, 0, n))
        tree = Tree(self._ids, self._ops, prompt[-1], len(prompt) - 1, own)
        prefix = Prefix(segment=segment, tree=tree, used_at=next(self._clock))
        segment.prefixes.append(prefix)
        self._serve(segment, 1)
        return prefix

    def grow(self, prefix: Prefix, tokens: Sequence[int]) -> None:
        """All cells of these tokens, from the first of the text on, are computed: others may copy them."""
        segment = prefix.segment
        more = tuple(tokens[segment.end :])
        if not more or not self._limits.n_prefixes:
            return
        if segment is self._root or segment.children or len(segment.prefixes) > 1:
            segment.prefixes.remove(prefix)
            below = _Segment(end=segment.end, parent=segment, prefixes=[prefix], n_served=1)
            segment.children.append(below)
            prefix.segment = segment = below
        segment.tokens += more
        segment.end += len(more)
        self.n_cells += len(more)
        self.n_held += len(more)

    def close(self, prefix: Prefix, tokens: Sequence[int], clean: bool) -> None:
        """A request is over: keep its sequence as far as these tokens, of which all cells are computed.

        `clean`: it has no other cells, in flight or computed. Nothing is kept of no tokens, and of a sequence that is
        not clean where parts cannot be continued.
        """
        keep = bool(tokens) and self._limits.n_prefixes > 0 and (clean or self._limits.partial_prefixes)
        if keep:
            self.grow(prefix, tokens)
            keep = not self._limits.partial_prefixes or self._is_new(tuple(tokens))
        self._serve(prefix.segment, -1)
        if not keep:
            prefix.tree.close()
            self._remove(prefix)
            return
        if len(self._kept) == self._limits.n_prefixes:
            self.evict()
        prefix.tree.close(keep=True)
        prefix.kept = True
        prefix.used_at = next(self._clock)
        if not clean:
            self._ops.append(KvOp(KvKind.RM, prefix.own, p0=len(tokens)))
        self._ids.reserved -= 1
        self._kept.append(prefix)

    def _is_new(self, tokens: tuple[int, ...]) -> bool:
        """Whether no kept sequence holds these tokens already. Those that they continue are given up."""
        along = list(self._along(tokens))
        for longer in (other for segment, n in along if n == len(tokens) for other in _all(segment)):
            if longer.kept:
                longer.used_at = next(self._clock)
                return False
        for segment in [segment for segment, n in along if n == segment.end]:
            for shorter in [other for other in segment.prefixes if other.kept]:
                self._evict(shorter)
        return True

    # Room

    def fits(self, prompt: Sequence[int], reuse: bool, reserve: int, n_others: int) -> bool:
        """Whether a request has room that takes up `reserve` cells, its prompt included, beside `n_others` of others.

        Cells of the cache do not count into `n_others`.
        """
        segment, shared = self._longest(tuple(prompt[:-1]) if reuse else ())
        while not segment.n_served and segment.parent is not None:  # kept until now: it needs room as well
            segment = segment.parent
            shared = segment.end
        return n_others + self.n_held + reserve - shared <= self._limits.n_ctx

    def shrink(self, n_cells: int) -> None:
        """Evict until the cache holds at most this number of cells, or nothing is left to evict."""
        while self.n_cells > n_cells and self._kept:
            self.evict()

    def evict(self) -> int:
        """Give up the kept sequence that was used longest ago, if there is one. Returns the number of freed cells."""
        if not self._kept:
            return 0
        before = self.n_cells
        self._evict(min(self._kept, key=lambda prefix: prefix.used_at))
        return before - self.n_cells

    def _evict(self, prefix: Prefix) -> None:
        self._kept.remove(prefix)
        self._ops.append(KvOp(KvKind.RM, prefix.own))
        self._ids.give_back(prefix.own)
        self._ids.reserved += 1
        self._remove(prefix)

    # The radix tree

    def _along(self, tokens: tuple[int, ...]) -> Iterator[tuple[_Segment, int]]:
        """The segments that hold the first of these tokens, parents first; and how many tokens agree down to there."""
        rest = [self._root]
        while rest:
            segment = rest.pop()
            for child in segment.children:
                n = _agreeing(child.tokens, tokens[segment.end : child.end])
                if n:
                    yield child, segment.end + n
                if n == len(child.tokens):
                    rest.append(child)

    def _longest(self, tokens: tuple[int, ...]) -> tuple[_Segment, int]:
        """The segment that continues furthest as these tokens do, and how many tokens agree down to there."""
        best, most = self._root, 0
        for segment, n in self._along(tokens):
            whole = n == segment.end and any(prefix.kept for prefix in segment.prefixes)
            # Where several agree as far, a sequence that ends there needs no copy.
            if (whole or self._limits.partial_prefixes) and (n, whole) > (most, False):
                best, most = segment, n
        return best, most

    def _split(self, segment: _Segment, n: int) -> _Segment:
        """The segment that ends at position `n`, within this one."""
        parent = segment.parent
        if n == segment.end or parent is None:
            return segment
        at = n - parent.end
        upper = _Segment(tokens=segment.tokens[:at], end=n, parent=parent, n_served=segment.n_served)
        upper.children.append(segment)
        parent.children[parent.children.index(segment)] = upper
        segment.tokens, segment.parent = segment.tokens[at:], upper
        return upper

    def _serve(self, segment: _Segment, n: int) -> None:
        """Count a request in or out (`n` 1 or -1) that holds this segment and all above it."""
        at: _Segment | None = segment
        while at is not None:
            before, at.n_served = at.n_served, at.n_served + n
            self.n_held += len(at.tokens) * ((at.n_served > 0) - (before > 0))
            at = at.parent

    def _remove(self, prefix: Prefix) -> None:
        """Take a sequence out, and the segments that no other sequence needs."""
        segment = prefix.segment
        segment.prefixes.remove(prefix)
        while (parent := segment.parent) is not None and not segment.prefixes and not segment.children:
            parent.children.remove(segment)
            self.n_cells -= len(segment.tokens)
            segment = parent
        if parent is not None and not segment.prefixes and len(segment.children) == 1:
            (child,) = segment.children
            child.tokens, child.parent = segment.tokens + child.tokens, parent
            parent.children[parent.children.index(segment)] = child

    def validate(self) -> None:
        """Check what must hold between events. Raises AssertionError."""
        n_cells = n_held = 0
        kept: set[Prefix] = set()
        rest = [self._root]
        while rest:
            segment = rest.pop()
            start = segment.parent.end if segment.parent is not None else 0
            assert segment.end == start + len(segment.tokens)
            below = list(_all(segment))
            assert segment.n_served == sum(not prefix.kept for prefix in below)
            if segment is not self._root:
                assert segment.tokens
                assert below, "cells that no sequence holds"
                assert segment.prefixes or len(segment.children) != 1, "two segments could be one"
            assert all(prefix.segment is segment for prefix in segment.prefixes)
            kept.update(prefix for prefix in segment.prefixes if prefix.kept)
            n_cells += len(segment.tokens)
            n_held += len(segment.tokens) if segment.n_served else 0
            assert all(child.parent is segment for child in segment.children)
            rest += segment.children
        assert (n_cells, n_held) == (self.n_cells, self.n_held)
        assert kept == set(self._kept)
        assert len(self._kept) <= self._limits.n_prefixes
        ids = [prefix.own for prefix in self._kept]
        assert len(set(ids)) == len(ids), "two prefixes have one id"
        assert not self._ids.free.intersection(ids), "an id is free and kept"

    @property
    def kept(self) -> dict[int, tuple[int, ...]]:
        """The kept sequences: their ids and their tokens."""
        found = {}
        for prefix in self._kept:
            tokens: tuple[int, ...] = ()
            segment: _Segment | None = prefix.segment
            while segment is not None:
                tokens = segment.tokens + tokens
                segment = segment.parent
            found[prefix.own] = tokens
        return found


def _all(segment: _Segment) -> Iterator[Prefix]:
    """The sequences that go through a segment."""
    rest = [segment]
    while rest:
        segment = rest.pop()
        yield from segment.prefixes
        rest += segment.children


def _any(segment: _Segment) -> Prefix:
    return next(_all(segment))


def _agreeing(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens agree, from the first on."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
