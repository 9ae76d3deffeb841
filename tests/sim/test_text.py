"""Synthetic and recorded texts: probabilities are calibrated where they should be, and a seed gives the same text."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggpipe.core.draft_messages import Candidates
from ggpipe.errors import UsageError
from ggpipe.sim.text import Confidence, RecordedTokens, SimulatedTokens, SyntheticTokens

KINDS: tuple[Confidence, ...] = ("calibrated", "overconfident", "underconfident")
SHARES = st.floats(0, 1)
SEEDS = st.integers(0, 2**32)


def agrees(tokens: SimulatedTokens) -> list[bool]:
    """Where the best candidate is the text's token."""
    return [tokens.candidates(i, False)[0][0] == token for i, token in enumerate(tokens.output)]


def best_probs(tokens: SimulatedTokens, k: int = 0) -> list[float]:
    """Probabilities of the k-th candidates."""
    return [tokens.candidates(i, False)[k][1] for i in range(len(tokens.output))]


def is_well_formed(candidates: Candidates, n: int) -> bool:
    ids, probs = [token for token, _ in candidates], [prob for _, prob in candidates]
    falling = sorted(probs, reverse=True)
    return len(ids) == len(set(ids)) == n and probs == falling and probs[-1] >= 0 and sum(probs) < 1 + 1e-9


@given(SHARES, st.integers(1, 200), SEEDS, st.sampled_from(KINDS), st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_agreement_is_met_to_one_token(a: float, n: int, seed: int, kind: Confidence, n_candidates: int) -> None:
    tokens = SyntheticTokens(a, 5, n, seed, kind, n_candidates)
    assert abs(sum(agrees(tokens)) - a * n) <= 1 + n / 32000
    assert (len(tokens.prompt), len(tokens.output)) == (5, n)
    assert all(
        is_well_formed(tokens.candidates(i, rejected), n_candidates)
        for i in range(n + 20)
        for rejected in (True, False)
    )


@pytest.mark.parametrize("share", [0.0, 0.24, 0.5])
def test_second_choices_are_right_as_often_as_told(share: float) -> None:
    """At these positions the best candidate is wrong, and leaves room for a second one that is as probable."""
    tokens = SyntheticTokens(0.7, 1, 20_000, 5, second_choice=share)
    both = [(tokens.candidates(i, False)[:2], token) for i, token in enumerate(tokens.output)]
    mistakes = [(second, token) for (best, second), token in both if best[0] != token and best[1] > 0.5]
    assert len(mistakes) > 1000
    right = sum(second[0] == token for second, token in mistakes) / len(mistakes)
    assert right == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("kind", KINDS)
def test_never_and_always_agreeing(kind: Confidence) -> None:
    assert not any(agrees(SyntheticTokens(0, 1, 1000, 3, kind)))
    assert all(agrees(SyntheticTokens(1, 1, 1000, 3, kind)))
    assert set(best_probs(SyntheticTokens(1, 1, 1000, 3, kind))) == {1.0}


def test_a_draft_that_never_agrees_has_no_candidate_of_the_text() -> None:
    tokens = SyntheticTokens(0, 1, 500)
    assert not any(token in dict(tokens.candidates(i, False)) for i, token in enumerate(tokens.output))
    assert max(best_probs(tokens)) < 1e-4


@pytest.mark.parametrize("a", [0.0, 0.6, 1.0])
def test_a_draft_that_is_never_right_is_as_confident_as_another(a: float) -> None:
    tokens, other = SyntheticTokens(a, 1, 500, 4, "never-right"), SyntheticTokens(a, 1, 500, 4)
    assert not any(token in dict(tokens.candidates(i, False)) for i, token in enumerate(tokens.output))
    assert best_probs(tokens) == best_probs(other)


@given(SHARES, SEEDS, st.sampled_from(KINDS))
@settings(max_examples=15, deadline=None)
def test_the_same_for_the_same_seed(a: float, seed: int, kind: Confidence) -> None:
    one, two, other = (SyntheticTokens(a, 4, 40, s, kind) for s in (seed, seed, seed + 1))
    assert (one.prompt, one.output) == (two.prompt, two.output)
    assert all(
        one.candidates(i, rejected) == two.candidates(i, rejected) for i in range(50) for rejected in (False, True)
    )
    assert one.output != other.output


@pytest.mark.parametrize("a", [0.1, 0.52, 0.79])
def test_probabilities_are_calibrated(a: float) -> None:
    tokens = SyntheticTokens(a, 1, 20_000, seed=7)
    bins: dict[int, list[tuple[float, bool]]] = {}
    for prob, is_best in zip(best_probs(tokens), agrees(tokens), strict=True):
        bins.setdefault(int(prob * 10), []).append((prob, is_best))
    for pairs in bins.values():
        if len(pairs) > 300:
            assert statistics.mean(p for p, _ in pairs) == pytest.approx(statistics.mean(r for _, r in pairs), abs=0.06)
    assert statistics.mean(best_probs(tokens)) == pytest.approx(a, abs=1e-3)
    for k in range(1, 8):
        share = sum(tokens.candidates(i, False)[k][0] == token for i, token in enumerate(tokens.output)) / 20_000
        assert statistics.mean(best_probs(tokens, k)) == pytest.approx(share, abs=0.01)


def test_most_of_a_good_drafts_probabilities_are_near_one() -> None:
    probs = best_probs(SyntheticTokens(0.8, 1, 5000))
    tenths = [sum(int(p * 10) == i for p in probs) for i in range(10)]
    assert tenths == sorted(tenths)
    assert tenths[-1] > 0.3 * len(probs)


def test_over_and_underconfident_drafts_agree_as_often() -> None:
    plain, over, under = (SyntheticTokens(0.6, 1, 2000, 5, kind) for kind in KINDS)
    assert plain.output == over.output == under.output
    assert agrees(plain) == agrees(over) == agrees(under)
    assert statistics.mean(best_probs(over)) > 0.75
    assert statistics.mean(best_probs(under)) < 0.5
    assert all(o >= p for o, p in zip(best_probs(over), best_probs(plain), strict=True))
    probs = [p for _, p in plain.candidates(3, False)]
    sharper = [p**2 / sum(q**2 for q in probs) for p in probs]
    assert [p for _, p in over.candidates(3, False)] == pytest.approx(sharper)


def test_rejections_are_not_spread_evenly() -> None:
    """As many as asked for, but runs of agreeing tokens are as long as chance makes them."""
    is_best = agrees(SyntheticTokens(0.5, 1, 4000, 2))
    repeats = sum(a == b for a, b in itertools.pairwise(is_best)) / 3999
    assert repeats == pytest.approx(0.5, abs=0.04)


def test_the_draft_is_as_confident_after_a_rejected_token() -> None:
    tokens = SyntheticTokens(0.7, 1, 300)
    rejected = [tokens.candidates(i, True) for i in range(300)]
    assert sorted(rejected) == sorted(tokens.candidates(i, False) for i in range(300))
    assert sum(best[0][0] == token for best, token in zip(rejected, tokens.output, strict=True)) < 10


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((1.5, 1, 1), "between 0 and 1"),
        ((float("nan"), 1, 1), "between 0 and 1"),
        ((0.5, 0, 1), "n_prompt must be at least 1, got 0"),
        ((0.5, 1, 0), "n_text must be at least 1"),
        ((0.5, 1, 1, 0, "calibrated", 1), "n_candidates must be at least 2, got 1"),
        ((0.5, 1, 1, 0, "shy"), "calibrated, overconfident"),
    ],
)
def test_bad_settings_are_named(arguments: tuple[float, int, int], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        SyntheticTokens(*arguments)


def test_recorded_tokens_are_played_back() -> None:
    on_text: list[Candidates] = [((i, 0.5), (i + 100, 0.25)) for i in range(3)]
    after_rejection: list[Candidates] = [((i + 50, 0.4),) for i in range(3)]
    tokens = RecordedTokens((9, 8), (0, 1, 2), on_text, after_rejection)
    assert tokens.output == (0, 1, 2)
    assert [tokens.candidates(i, False) for i in range(4)] == [*on_text, on_text[0]]
    assert [tokens.candidates(i, True) for i in range(1, 5)] == [*after_rejection, after_rejection[0]]
    longer = RecordedTokens((9, 8), (0, 1, 2), on_text, after_rejection, 7)
    assert longer.output == (0, 1, 2, 0, 1, 2, 0)
    assert agrees(longer) == [True] * 7
    assert RecordedTokens((9, 8), (0, 1, 2), on_text, after_rejection, 2).output == (0, 1)
    with pytest.raises(ValueError, match="each token"):
        RecordedTokens((9, 8), (0, 1), on_text, after_rejection)
