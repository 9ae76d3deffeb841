"""The prefix cache: what ended requests computed is kept in the KV cache, for prompts that begin with the same tokens.

It knows by a radix tree over tokens (`radix_tree`) which sequence holds which cells.

    a prompt begins as a sequence does       CP(id of that sequence -> the request's id, up to there)
    it continues a kept one to the last cell   that id becomes the request's          no operation
    a request ends                           RM(its id, after its last computed token), the id is kept
    cells or ids are needed                  RM(the id that was used longest ago, everything)

A request that is being served is in the tree as well: its cells may be copied, and are not given up.

The first request may find a sequence that was restored from a file. It takes over as much of it as it can use; the rest
is given up.

Recurrent models cannot continue a part of a sequence (`Limits.partial_prefixes`). There whole ones are kept, of ended
requests and of prompts that are being computed (`checkpoints`):

    a prompt begins with all of a kept one   CP(its id -> the request's id, everything)
    a prompt stands at a checkpoint          CP(the request's id -> a free one, everything), before the next run
    the run before it is cancelled           RM(that id, everything)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ggpipe.core.kv.checkpoints import checkpoints_of
from ggpipe.core.kv.radix_tree import KeptPrefix, Prefix, RadixTree, Segment, Tokens, agreeing, sequences_through
from ggpipe.core.messages import KvKind, KvOp
from ggpipe.core.request import Limits
from ggpipe.core.sequence_ids import SequenceIds
from ggpipe.core.tree import Tree

RESTORED = 0
"""The id of a sequence that is in the KV cache before the first request, from a file."""


class PrefixCache:
    """See the module's text. It shares ids and operations with the trees of a pipeline."""

    def __init__(
        self, limits: Limits, ids: SequenceIds, ops: list[KvOp], restored: tuple[int, ...] | None = None
    ) -> None:
        """`ids` must leave one per future request and one per prefix that may be kept. `restored`: what all
        stages have as the first tokens of the sequence `RESTORED`, some of them more; None: it is empty."""
        self._restored = restored
        self._limits = limits
        self._ids = ids
        self._ops = ops
        self._tree = RadixTree()
        self._kept: list[KeptPrefix] = []
        self._n_pending = 0
        """Checkpoints in the pipeline."""
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        """Sequences that have an id beside those of requests."""
        return len(self._kept) + self._n_pending

    @property
    def n_cells(self) -> int:
        """Cells of all sequences in the cache; each counts once."""
        return self._tree.n_cells

    @property
    def n_held(self) -> int:
        """Those of them that requests which are being served hold: evicting does not free them."""
        return self._tree.n_held

    # Requests

    def open(self, prompt: Sequence[int], reuse: bool, n_last: int = 1) -> Prefix:
        """A request begins: it gets a tree, and with `reuse` what there is of its prompt.

        The prompt's last tokens, `n_last` of them, are left to compute: their logits are needed. There must be a free
        id.
        """
        wanted = tuple(prompt[: len(prompt) - n_last]) if reuse else ()
        if self._restored is not None:
            return self._open_restored(prompt, wanted)
        segment, n = self._longest(wanted)
        partial = self._limits.partial_prefixes
        kept = next(iter(segment.kept), None) if n == segment.end else None
        taken_over = kept if partial else None
        if taken_over is not None:
            self._ids.reserved += 1
            seq = taken_over.seq
        else:
            seq = self._ids.take()
            if n and partial:
                segment = self._tree.split(segment, n)
                self._ops.append(KvOp(KvKind.CP, next(sequences_through(segment)).seq, seq, 0, n))
            elif kept is not None:
                kept.used_at = next(self._clock)
                self._ops.append(KvOp(KvKind.CP, kept.seq, seq))
        prefix = Prefix(segment=segment, tree=self._tree_of(prompt, seq))
        if reuse and not partial and self._limits.n_prefixes:
            n_shared = max((n for _, n in self._tree.along(wanted)), default=0)
            prefix.checkpoints = checkpoints_of(len(prompt), n, n_shared, self._limits.n_rows)
        self._tree.serve(prefix)
        if taken_over is not None:
            self._kept.remove(taken_over)
            self._tree.drop(taken_over)
        return prefix

    def _open_restored(self, prompt: Sequence[int], wanted: Tokens) -> Prefix:
        """As `open`, for the first request."""
        assert self._restored is not None
        restored, self._restored = self._restored, None
        limits = self._limits
        n = agreeing(restored, wanted) if limits.n_prefixes else 0
        if n < len(restored) and not limits.partial_prefixes:
            n = 0
        seq = self._ids.take()
        assert seq == RESTORED
        self._ops.append(KvOp(KvKind.RM, seq, p0=n))
        prefix = Prefix(segment=self._tree.root, tree=self._tree_of(prompt, seq))
        if wanted and not limits.partial_prefixes and limits.n_prefixes:
            prefix.checkpoints = checkpoints_of(len(prompt), n, n, limits.n_rows)
        self._tree.serve(prefix)
        self.grow(prefix, restored[:n])
        return prefix

    def _tree_of(self, prompt: Sequence[int], seq: int) -> Tree:
        limits = self._limits
        return Tree(self._ids, self._ops, prompt[-1], len(prompt) - 1, seq, limits.rolls_back, limits.most_taken_back)

    def checkpoint(self, prefix: Prefix, position: int) -> None:
        """Take a checkpoint before a request's next run, if one is due at this position."""
        due = next((one for one in prefix.checkpoints if one.position == position), None)
        if due is None or not self._free_a_place(may_evict=not due.is_spare):
            return
        seq = self._ids.take()
        self._ids.reserved -= 1
        self._ops.append(KvOp(KvKind.CP, prefix.seq, seq))
        prefix.pending.append((due, seq))
        self._n_pending += 1

    def grow(self, prefix: Prefix, tokens: Sequence[int]) -> None:
        """All cells of these tokens, from the first of the text on, are computed: others may copy them."""
        more = tuple(tokens[prefix.n_tokens :])
        if not more or not self._limits.n_prefixes:
            return
        self._tree.extend(prefix, more)
        while prefix.pending and prefix.pending[0][0].position <= prefix.n_tokens:
            checkpoint, seq = prefix.pending.pop(0)
            self._n_pending -= 1
            used_at = 0 if checkpoint.is_spare else next(self._clock)
            self._kept.append(self._tree.keep(prefix, checkpoint.position, seq, used_at))

    def close(self, prefix: Prefix, tokens: Sequence[int], clean: bool) -> bool:
        """A request is over: keep its sequence as far as these tokens, of which all cells are computed. Returns whether
        it is kept.

        `clean`: it has no other cells, in flight or computed. Nothing is kept of no tokens, and of a sequence that is
        not clean where parts cannot be continued; but checkpoints before the end of these tokens are.
        """
        partial = self._limits.partial_prefixes
        keep = bool(tokens) and self._limits.n_prefixes > 0 and (clean or partial)
        if keep or prefix.pending:
            self.grow(prefix, tokens)
        for _, seq in prefix.pending:
            self._n_pending -= 1
            self._give_up(seq)
        prefix.pending.clear()
        if not keep or not self._is_new(tuple(tokens)) or not self._free_a_place():
            prefix.tree.close()
            self._tree.leave(prefix, None)
            return False
        prefix.tree.close(keep=True)
        kept = KeptPrefix(segment=prefix.segment, seq=prefix.seq, used_at=next(self._clock))
        if not clean:
            self._ops.append(KvOp(KvKind.RM, kept.seq, p0=len(tokens)))
        self._ids.reserved -= 1
        self._tree.leave(prefix, kept)
        self._kept.append(kept)
        return True

    def _is_new(self, tokens: Tokens) -> bool:
        """Whether no kept sequence holds these tokens already. Those that they continue are given up, where any part of
        the longer one will do."""
        along = list(self._tree.along(tokens))
        partial = self._limits.partial_prefixes
        ends = [segment for segment, n in along if n == len(tokens) and (partial or n == segment.end)]
        for same in (other for end in ends for other in (sequences_through(end) if partial else end.kept)):
            if isinstance(same, KeptPrefix):
                same.used_at = next(self._clock)
                return False
        if partial:
            for segment in [segment for segment, n in along if n == segment.end]:
                for shorter in list(segment.kept):
                    self._evict(shorter)
        return True

    def erase(self, tokens: Tokens) -> None:
        """Give up the kept sequences that these tokens begin with, or are. Others that share cells with them stay."""
        segments = [segment for segment, n in self._tree.along(tokens) if n == segment.end]
        for kept in [kept for segment in segments for kept in segment.kept]:
            self._evict(kept)

    # Room

    def fits(self, prompt: Sequence[int], reuse: bool, reserve: int, n_others: int, n_last: int = 1) -> bool:
        """Whether a request has room that takes up `reserve` cells, its prompt included, beside `n_others` of others.

        Cells of the cache do not count into `n_others`.
        """
        segment, shared = self._longest(tuple(prompt[: len(prompt) - n_last]) if reuse else ())
        while not segment.n_served and segment.parent is not None:  # kept until now: it needs room as well
            segment = segment.parent
            shared = segment.end
        return n_others + self.n_held + reserve - shared <= self._limits.n_ctx

    def shrink(self, n_cells: int) -> None:
        """Evict until the cache holds at most this number of cells, or nothing is left that would free any."""
        while self.n_cells > n_cells:
            # What a request that is being served holds as well frees no cell.
            frees = [kept for kept in self._kept if not kept.segment.n_served]
            if not frees:
                return
            self._evict(min(frees, key=lambda kept: kept.used_at))

    def evict(self) -> int:
        """Give up the kept sequence that was used longest ago, if there is one. Returns the number of freed cells."""
        if not self._kept:
            return 0
        before = self.n_cells
        self._evict(min(self._kept, key=lambda kept: kept.used_at))
        return before - self.n_cells

    def _free_a_place(self, may_evict: bool = True) -> bool:
        """Make sure that one more sequence may be kept. False where those that are cannot be given up now."""
        if may_evict and len(self) == self._limits.n_prefixes:
            self.evict()
        return len(self) < self._limits.n_prefixes

    def _evict(self, kept: KeptPrefix) -> None:
        self._kept.remove(kept)
        self._give_up(kept.seq)
        self._tree.drop(kept)

    def _give_up(self, seq: int) -> None:
        self._ops.append(KvOp(KvKind.RM, seq))
        self._ids.give_back(seq)
        self._ids.reserved += 1

    def _longest(self, tokens: Tokens) -> tuple[Segment, int]:
        """The segment that continues furthest as these tokens do, and how many tokens agree down to there."""
        best, most = self._tree.root, 0
        for segment, n in self._tree.along(tokens):
            whole = n == segment.end and bool(segment.kept)
            # Where several agree as far, a sequence that ends there needs no copy.
            if (whole or self._limits.partial_prefixes) and (n, whole) > (most, False):
                best, most = segment, n
        return best, most

    def validate(self) -> None:
        """Check what must hold between events. Raises AssertionError."""
        assert self._tree.validate() == set(self._kept)
        pending = [
            seq
            for sequence in sequences_through(self._tree.root)
            if isinstance(sequence, Prefix)
            for _, seq in sequence.pending
        ]
        assert len(pending) == self._n_pending
        assert len(self) <= self._limits.n_prefixes
        ids = [*(kept.seq for kept in self._kept), *pending]
        assert len(set(ids)) == len(ids), "two prefixes have one id"
        assert not self._ids.free.intersection(ids), "an id is free and kept"

    @property
    def kept(self) -> dict[int, Tokens]:
        """The kept sequences: their ids and their tokens."""
        return {kept.seq: kept.segment.path for kept in self._kept}
