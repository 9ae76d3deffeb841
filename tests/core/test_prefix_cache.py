"""The prefix cache over a model of libllama's cells: what is found is right, and cells and ids are conserved."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import n_examples
from support.fake_cache import FakeCache
from support.fake_model import Tokens

from ggpipe.core.kv.prefix_cache import PrefixCache
from ggpipe.core.kv.radix_tree import Prefix
from ggpipe.core.messages import KvKind, KvOp, Row
from ggpipe.core.request import Limits
from ggpipe.core.sequence_ids import SequenceIds
from ggpipe.core.tree import Tree

N_EXAMPLES = n_examples(100, 200)
N_CTX = 64


@dataclass(eq=False)
class Served:
    """A request that decodes plainly."""

    prefix: Prefix
    tree: Tree
    text: Tokens
    n_cells: int
    """Cells of its own sequence, those of its prefix included."""


class Cells:
    """A prefix cache, the operations that it asks for, and the cells behind them."""

    def __init__(self, **limits: int) -> None:
        known = {"n_ctx": N_CTX, "n_batch": 8, "n_ubatch": 8, "n_in_flight": 2, "n_prefixes": 3, "n_requests": 2}
        partial = bool(limits.pop("partial", True))
        known |= limits
        self.limits = Limits(
            **known, n_seq=known["n_prefixes"] + known["n_requests"] + 1,  # type: ignore[arg-type]
            partial_prefixes=partial,
        )  # fmt: skip
        self.ids = SequenceIds(self.limits.n_seq, self.limits.n_requests + self.limits.n_prefixes)
        self.ops: list[KvOp] = []
        self.prefixes = PrefixCache(self.limits, self.ids, self.ops)
        self.cells = FakeCache(self.limits.n_ctx, self.limits.n_seq, hybrid=not partial)
        self.served: list[Served] = []
        self.run = 0

    def carry_out(self) -> list[KvOp]:
        ops = list(self.ops)
        for op in ops:
            self.cells.apply(op)
        self.ops.clear()
        return ops

    @property
    def n_own(self) -> int:
        """Cells of requests outside the cache."""
        return sum(served.n_cells - served.prefix.n_tokens for served in self.served)

    def open(self, prompt: Tokens, reuse: bool = True) -> Served:
        prefix = self.prefixes.open(prompt, reuse)
        n = prefix.n_tokens
        served = Served(prefix, prefix.tree, prompt, n)
        self.served.append(served)
        self.carry_out()
        assert self.cells.history(served.tree.seq) == prompt[:n]
        assert n < len(prompt)
        return served

    def compute(self, served: Served, n: int) -> None:
        """Up to `n` further tokens of its text, to the next checkpoint at most."""
        n = min(n, len(served.text) - served.n_cells)
        if n:
            self.prefixes.checkpoint(served.prefix, served.n_cells)
        borders = (checkpoint.position - served.n_cells for checkpoint in served.prefix.checkpoints)
        n = min([n, *(n for n in borders if n > 0)])
        self.prefixes.shrink(self.limits.n_ctx - self.n_own - n)
        self.carry_out()
        at = served.n_cells
        own = (served.tree.seq,)
        rows = [Row(token=served.text[at + i], pos=at + i, seqs=own, request=0) for i in range(n)]
        self.cells.decode(rows)
        served.n_cells += n

    def close(self, served: Served, n: int, clean: bool = False) -> None:
        """`n`: tokens that count as computed."""
        self.prefixes.close(served.prefix, served.text[:n], clean)
        self.served.remove(served)
        self.carry_out()

    def check(self) -> None:
        self.prefixes.validate()
        kept = self.prefixes.kept
        for seq, tokens in kept.items():
            assert self.cells.history(seq) == tokens
        assert len(self.cells.cells) == self.prefixes.n_cells + self.n_own
        ids = set(kept) | {served.tree.seq for served in self.served}
        for served in self.served:
            for checkpoint, own in served.prefix.pending:
                assert self.cells.history(own) == served.text[: checkpoint.position]
                ids.add(own)
        assert len(self.ids) == self.limits.n_seq - len(ids), "an id is lost"
        assert self.ids.reserved == (
            self.limits.n_requests - len(self.served) + self.limits.n_prefixes - len(self.prefixes)
        )
        assert len(self.ids) >= self.ids.reserved


def kept_text(cells: Cells, tokens: Tokens) -> Served:
    """A request with this text, that ends with all of it computed."""
    served = cells.open(tokens)
    cells.compute(served, len(tokens))
    cells.close(served, len(tokens), clean=True)
    cells.check()
    return served


def test_a_common_prefix_is_copied_and_what_is_kept_stays() -> None:
    cells = Cells()
    kept_text(cells, (1, 2, 3, 4))
    prefix = cells.prefixes.open((1, 2, 9, 9), reuse=True)
    assert cells.ops == [KvOp(KvKind.CP, 0, 1, 0, 2)]
    assert prefix.n_tokens == 2
    assert len(cells.prefixes) == 1


def test_a_whole_sequence_is_taken_over_without_a_copy() -> None:
    cells = Cells()
    kept_text(cells, (1, 2, 3))
    served = cells.open((1, 2, 3, 4, 5))
    assert (served.tree.seq, served.prefix.n_tokens, len(cells.prefixes)) == (0, 3, 0)
    second = cells.open((1, 2, 3, 4, 6))
    assert (second.tree.seq, second.prefix.n_tokens) == (1, 3), "it is still there for others"
    cells.check()


def test_the_last_token_of_a_prompt_is_left() -> None:
    cells = Cells()
    kept_text(cells, (1, 2, 3))
    assert cells.open((1, 2, 3)).prefix.n_tokens == 2


def test_requests_copy_from_one_that_is_served() -> None:
    cells = Cells()
    first = cells.open((1, 2, 3, 4))
    cells.compute(first, 3)
    assert cells.open((1, 2, 3, 9), reuse=False).prefix.n_tokens == 0
    cells.close(cells.served[1], 0)
    cells.prefixes.grow(first.prefix, (1, 2, 3))
    second = cells.open((1, 2, 9))
    assert second.prefix.n_tokens == 2
    cells.close(first, 0)
    cells.check()
    assert cells.cells.history(second.tree.seq) == (1, 2)


def test_a_longer_sequence_replaces_a_shorter_one() -> None:
    cells = Cells()
    kept_text(cells, (1, 2, 3))
    first, second = cells.open((1, 2, 3, 4)), cells.open((1, 2, 3, 4, 5), reuse=False)
    for served in (second, first):
        cells.compute(served, 9)
        cells.close(served, len(served.text))
        cells.check()
    assert list(cells.prefixes.kept.values()) == [(1, 2, 3, 4, 5)]


def test_what_was_used_longest_ago_goes_first() -> None:
    cells = Cells()
    for token in (1, 2, 3):
        kept_text(cells, (token, 7))
    kept_text(cells, (1, 7, 8))
    kept_text(cells, (4, 7))
    assert sorted(cells.prefixes.kept.values()) == [(1, 7, 8), (3, 7), (4, 7)]
    assert cells.prefixes.evict() == 2
    assert (3, 7) not in cells.prefixes.kept.values()
    cells.carry_out()
    cells.check()


def test_shared_cells_are_freed_with_their_last_sequence() -> None:
    cells = Cells()
    kept_text(cells, (1, 2, 3, 4))
    kept_text(cells, (1, 2, 9))
    assert cells.prefixes.n_cells == 5
    assert cells.prefixes.evict() == 2
    assert cells.prefixes.evict() == 3
    assert cells.prefixes.evict() == 0


def test_what_was_not_computed_is_cut_off() -> None:
    cells = Cells()
    served = cells.open((1, 2, 3, 4, 5, 6))
    cells.compute(served, 6)
    cells.close(served, 4)
    assert list(cells.prefixes.kept.values()) == [(1, 2, 3, 4)]
    cells.check()


def test_only_whole_sequences_where_parts_cannot_be_continued() -> None:
    cells = Cells(partial=False)
    kept_text(cells, (1, 2, 3, 4))
    assert cells.open((1, 2, 9, 9)).prefix.n_tokens == 0
    assert cells.open((1, 2, 3, 4)).prefix.n_tokens == 0
    cells.close(cells.served[0], 0)
    served = cells.open((1, 2, 3, 4, 5))
    assert served.prefix.n_tokens == 4
    cells.compute(served, 1)
    cells.close(served, 5, clean=False)
    assert list(cells.prefixes.kept.values()) == [(1, 2, 3, 4)], "something may lie behind what it computed"
    cells.check()


def test_shared_cells_leave_more_room_for_requests() -> None:
    cells = Cells()
    first = cells.open(tuple(range(40)))
    cells.compute(first, 40)
    assert not cells.prefixes.fits((*range(30), 1), True, 31, 40)
    cells.prefixes.grow(first.prefix, first.text)
    assert cells.prefixes.fits((*range(30), 1), True, 31, 0)
    assert not cells.prefixes.fits((*range(30), 1), False, 31, 0)
    assert not cells.prefixes.fits((*range(30), 1), True, 55, 0)


@pytest.mark.parametrize("reuse", [True, False])
def test_nothing_is_kept_with_no_room_for_prefixes(reuse: bool) -> None:
    cells = Cells(n_prefixes=0)
    kept_text(cells, (1, 2, 3))
    assert cells.open((1, 2, 3, 4), reuse).prefix.n_tokens == 0
    assert not cells.prefixes.kept


def n_common(a: Tokens, b: Tokens) -> int:
    return max(n for n in range(min(len(a), len(b)) + 1) if a[:n] == b[:n])


class Walk:
    """Requests begin, compute, and end, in any order; cells and ids run short."""

    def __init__(self, cells: Cells, seed: int, n_vocab: int) -> None:
        self.it, self.random, self.n_vocab = cells, random.Random(seed), n_vocab

    def step(self) -> None:
        moves = [self.open, self.open, self.evict, self.fits]
        if self.it.served:
            moves += [self.compute, self.compute, self.compute, self.close, self.close]
        self.random.choice(moves)()
        self.it.check()

    def text(self, most: int) -> Tokens:
        """Like a kept one, at times, at its start or as a whole."""
        kept = sorted(self.it.prefixes.kept.values())
        start = self.random.choice(kept) if kept and self.random.random() < 0.6 else ()
        if self.random.random() < 0.3:
            start = start[: self.random.randint(0, len(start))]
        more = self.random.choices(range(self.n_vocab), k=self.random.randint(1, most))
        return (*start, *more)

    def longest(self, prompt: Tokens) -> int:
        """The longest prefix that may be continued, found by comparing all there is."""
        it = self.it
        kept = it.prefixes.kept.values()
        if not it.limits.partial_prefixes:
            return max((len(tokens) for tokens in kept if prompt[:-1][: len(tokens)] == tokens), default=0)
        served = [served.text[: served.prefix.n_tokens] for served in it.served]
        return max((n_common(tokens, prompt[:-1]) for tokens in (*kept, *served)), default=0)

    def open(self) -> None:
        prompt, reuse = self.text(6), self.random.random() < 0.8
        n_own = sum(len(served.text) - served.prefix.n_tokens for served in self.it.served)
        text = prompt + self.text(6)
        if len(self.it.served) == self.it.limits.n_requests:
            return
        fits = self.it.prefixes.fits(prompt, reuse, len(text), n_own)
        self.it.carry_out()
        if fits:
            longest = self.longest(prompt) if reuse else 0
            served = self.it.open(prompt, reuse)
            assert served.prefix.n_tokens == longest
            served.text = text
        else:
            assert self.it.served or len(text) > self.it.limits.n_ctx, "it could be served alone"

    def compute(self) -> None:
        served = self.random.choice(self.it.served)
        self.it.compute(served, self.random.randint(1, 9))
        if self.random.random() < 0.5:
            self.it.prefixes.grow(served.prefix, served.text[: served.n_cells])

    def close(self) -> None:
        served = self.random.choice(self.it.served)
        clean = self.random.random() < 0.7
        n = served.n_cells if clean else self.random.randint(served.prefix.n_tokens, served.n_cells)
        self.it.close(served, n if self.random.random() < 0.9 else 0, clean)

    def evict(self) -> None:
        if self.random.random() < 0.2:
            before = len(self.it.cells.cells)
            freed = self.it.prefixes.evict()
            self.it.carry_out()
            assert len(self.it.cells.cells) == before - freed

    def fits(self) -> None:
        """Whatever is asked, what is being served stays whole."""
        n_own = sum(len(served.text) - served.prefix.n_tokens for served in self.it.served)
        reserve = self.random.randint(1, 2 * self.it.limits.n_ctx)
        fits = self.it.prefixes.fits(self.text(9), True, reserve, n_own)
        self.it.carry_out()
        if not self.it.served:
            assert fits == (reserve <= self.it.limits.n_ctx)


@settings(max_examples=N_EXAMPLES, deadline=None)
@given(
    partial=st.booleans(),
    n_ctx=st.sampled_from([12, 30, N_CTX]),
    n_prefixes=st.integers(0, 4),
    n_requests=st.integers(1, 3),
    n_vocab=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 2**32),
)
def test_cells_and_ids_are_conserved(
    *, partial: bool, n_ctx: int, n_prefixes: int, n_requests: int, n_vocab: int, seed: int
) -> None:
    cells = Cells(partial=partial, n_ctx=n_ctx, n_prefixes=n_prefixes, n_requests=n_requests)
    walk = Walk(cells, seed, n_vocab)
    for _ in range(80):
        walk.step()
    for served in list(cells.served):
        cells.close(served, 0)
    cells.check()
    cells.prefixes.shrink(0)
    cells.carry_out()
    assert not cells.cells.cells, "cells are left behind"
