"""The drafter of forced tokens: where it drafts them, how far, and each of them once."""

from __future__ import annotations

from collections.abc import Sequence

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import ROOT, Accepted, BeginDrafting, EndDrafting, Expansion, Shared, SharedToken
from ggpipe.core.drafters.grammar import GrammarDrafter

END = 0


class Forced:
    """A grammar that forces these tokens, of which `n` are accepted."""

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.n, self.prob = tokens, 0, 0.9
        self.asked: list[tuple[int, ...]] = []

    def fits(self, path: tuple[int, ...], token: int) -> bool:
        return True

    def forced(self, path: tuple[int, ...]) -> Sequence[tuple[int, float]]:
        self.asked.append(path)
        rest = self.tokens[self.n :]
        return [(token, self.prob) for token in rest[len(path) :]] if rest[: len(path)] == path else []


def begin(look_ahead: int = 8, n_left: int = 100, p_accept: float = 0.0, banned: tuple[int, ...] = ()) -> BeginDrafting:
    return BeginDrafting(
        request=1, prompt=(9,), n_left=n_left, look_ahead=look_ahead, ends=frozenset({END}), banned=banned,
        speculation=SpeculationConfig(p_accept=p_accept),
    )  # fmt: skip


def drafted(drafter: GrammarDrafter, message: BeginDrafting | Accepted | Shared, forced: Forced) -> list[Expansion]:
    batches = drafter.answer(message, forced)
    drafter.validate()
    assert all(batch.complete and batch.drafter == 3 for batch in batches)
    return [one for batch in batches for one in batch.expansions]


def chain(expansions: Sequence[Expansion]) -> list[tuple[int, int, int]]:
    """(parent, number, token) of each draft token."""
    return [(one.parent, one.first, one.candidates[0][0]) for one in expansions]


def test_forced_tokens_are_drafted_once() -> None:
    drafter, forced = GrammarDrafter(3), Forced(5, 6, 7, 8, 5, 6)
    assert chain(drafted(drafter, begin(3), forced)) == [(ROOT, 1, 5), (1, 2, 6), (2, 3, 7)]
    forced.n = 2
    assert chain(drafted(drafter, Accepted(1, 2, (5, 6), 3), forced)) == [(3, 4, 8), (4, 5, 5)]
    forced.n = 3
    assert chain(drafted(drafter, Accepted(1, 3, (7,), 2), forced)) == []
    forced.tokens, forced.n = (5, 6, 7, 9, 4), 4  # another token was accepted than was drafted
    assert chain(drafted(drafter, Accepted(1, 4, (9,), 8), forced)) == [(ROOT, 6, 4)]
    assert drafter.answer(EndDrafting(1)) == []
    assert drafter.answer(EndDrafting(1)) == []


def test_forced_tokens_follow_those_of_others() -> None:
    drafter, forced = GrammarDrafter(3), Forced()
    assert drafted(drafter, begin(5), forced) == []
    forced.tokens = (5, 6, 7, 8, 9, 4)
    forced.asked.clear()
    shared = [SharedToken((5,), -1, 0.8), SharedToken((4,), -2, 0.1), SharedToken((5, 6), -3, 0.9)]
    assert chain(drafted(drafter, Shared(1, 0, tuple(shared)), forced)) == [(-3, 1, 7), (1, 2, 8), (2, 3, 9)]
    assert forced.asked == [(4,), (5, 6)], "not after a token that is followed by another one"
    assert drafted(drafter, Shared(1, 0, (SharedToken((5, 6, 7), -4, 0.5),)), forced) == []
    assert drafted(drafter, Shared(1, 1, tuple(shared)), forced) == [], "of another root"
    forced.n = 3
    assert chain(drafted(drafter, Accepted(1, 3, (5, 6, 7), 5), forced)) == [(3, 4, 4)]


def test_drafts_end_where_they_are_not_worth_it() -> None:
    for message, n in (
        (begin(n_left=3), 2),
        (begin(banned=(6,)), 1),
        (begin(p_accept=0.95), 0),
        (begin(), 4),
    ):
        assert len(drafted(GrammarDrafter(3), message, Forced(5, 6, 7, 8, END, 9))) == n
    improbable = Forced(5, 6, 7, 8)
    improbable.prob = 0.4
    assert len(drafted(GrammarDrafter(3), begin(), improbable)) == 2
    assert GrammarDrafter(3).answer(begin())[0].expansions == (), "without a grammar"
