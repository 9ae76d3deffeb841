"""An n-gram drafter: what it proposes after which text, and how sure it is."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support.fake_drafts import TextDraft

from ggpipe.config.speculation import Policy, SpeculationConfig
from ggpipe.core.draft_messages import ROOT, Accepted, BeginDrafting, EndDrafting, MicroBatch
from ggpipe.core.drafters import registry
from ggpipe.core.drafters.ngram import Chances, Ngrams

END = 0
CHAINS = SpeculationConfig(policy="thresholds")
A_TALE = tuple(range(1000, 1060))


def request_of(
    request: int,
    *prompt: int,
    lead: int = 4,
    n_left: int = 1000,
    banned: tuple[int, ...] = (),
    speculation: SpeculationConfig = CHAINS,
    cache_prompt: bool = True,
) -> BeginDrafting:
    return BeginDrafting(
        request=request, prompt=prompt, n_left=n_left, look_ahead=lead, ends=frozenset({END}), banned=banned,
        speculation=speculation, cache_prompt=cache_prompt,
    )  # fmt: skip


def taught() -> Ngrams:
    """A drafter that knows quotes: it was asked for some before, all in a request of its own."""
    drafter = Ngrams(3)
    for _ in range(3):
        drafter.answer(request_of(99, *A_TALE, *A_TALE[:3], cache_prompt=False))
        drafter.answer(Accepted(99, 40, A_TALE[3:43], 0))
        drafter.answer(EndDrafting(99))
    return drafter


class Copier:
    """A request of an n-gram drafter, and the paths of all that was proposed for it."""

    def __init__(self, begin: BeginDrafting, drafter: Ngrams | None = None) -> None:
        self.drafter, self.begin = drafter or taught(), begin
        self.text = list(begin.prompt)
        self.paths: dict[int, tuple[int, ...]] = {}
        self.probs: dict[tuple[int, ...], float] = {}
        """Of all proposed paths: the probability of their last token."""
        self.first = self._read(self.drafter.answer(begin))

    def accept(self, *tokens: int) -> list[int]:
        """The text goes on: the last tokens of the paths that are proposed because of it."""
        self.text += tokens
        epoch = len(self.text) - len(self.begin.prompt)
        return self._read(self.drafter.answer(Accepted(self.begin.request, epoch, tokens, self.begin.look_ahead)))

    def _read(self, batches: list[MicroBatch]) -> list[int]:
        (batch,) = batches
        assert (batch.request, batch.complete) == (self.begin.request, True)
        assert batch.epoch == len(self.text) - len(self.begin.prompt)
        last = []
        for expansion in batch.expansions:
            path = tuple(self.text) if expansion.parent == ROOT else self.paths[expansion.parent]
            assert path[: len(self.text)] == tuple(self.text)
            for number, (token, prob) in enumerate(expansion.candidates, expansion.first):
                assert number not in self.paths
                self.paths[number] = (*path, token)
                self.probs[self.paths[number]] = prob
                last.append(token)
        self.drafter.validate()
        return last


def copier(*prompt: int, lead: int = 4, n_left: int = 100, banned: tuple[int, ...] = (), n_min: int = 0) -> Copier:
    speculation = SpeculationConfig(policy="thresholds", n_min=n_min)
    return Copier(request_of(1, *prompt, lead=lead, n_left=n_left, banned=banned, speculation=speculation))


# What follows


def test_it_continues_as_the_same_tokens_continued_before() -> None:
    it = copier(1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3)
    assert it.first == [4, 5, 6, 7]
    assert it.accept(4) == [9], "what it proposed before is not proposed again"
    assert it.accept(5, 6) == [1, 2]
    assert it.accept(8) == []


def test_nothing_that_occurs_again() -> None:
    assert copier(1, 2, 3, 4).first == []
    assert copier(1).first == []
    assert copier(1, 2, 9, 1, 2).first == [], "two tokens are too few"


def test_tokens_that_are_accepted_together_are_followed() -> None:
    """Before the first of them, the match was as long as is compared; after the last one, it is followed."""
    it = Copier(request_of(1, *A_TALE, *A_TALE[:15], lead=8))
    assert it.first == list(A_TALE[15:23])
    assert it.accept(*A_TALE[15:18]) == list(A_TALE[23:26])
    assert it.accept(*A_TALE[18:26]) == list(A_TALE[26:34])


def test_a_copy_is_resumed_after_a_change() -> None:
    """Copies in which each 20th token is another one: soon the tokens after it are proposed at once."""
    it = Copier(request_of(1, *A_TALE, *A_TALE[:10], lead=8))
    n_first = []
    for i in (20, 40):
        it.accept(*A_TALE[len(it.text) - 60 : i])
        n_first.append(len(it.accept(2000 + i)))
        it.accept(*A_TALE[i + 1 : i + 6])
    assert n_first[0] == 0 < n_first[1]


def test_a_longer_match_comes_before_a_later_one() -> None:
    assert copier(7, 8, 1, 2, 3, 50, 9, 1, 2, 3, 60, 8, 1, 2, 3, lead=1).first == [50]
    assert copier(8, 1, 2, 3, 50, 9, 1, 2, 3, 60, 4, 1, 2, 3, lead=1).first == [60], "of equal ones the latest"


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    assert copier(5, 6, 5, 6, 5, 6, lead=5).first == [5, 6, 5, 6, 5]
    assert copier(5, 5, 5, 5, lead=3).first == [5, 5, 5]


def test_it_stops_where_the_text_may_end() -> None:
    assert copier(1, 2, 3, 4, END, 1, 2, 3).first == [4]
    assert copier(1, 2, 3, 4, 5, 1, 2, 3, banned=(5,)).first == [4]
    assert copier(1, 2, 3, 4, 5, 6, 1, 2, 3, n_left=3).first == [4, 5], "the last token needs no row"
    assert copier(1, 2, 3, 4, 5, 6, 1, 2, 3, lead=0).first == []
    few = copier(1, 2, 3, 4, END, 1, 2, 3, n_min=2)
    assert few.first == []
    assert few.accept(4) == []


def test_places_that_differ_are_branches() -> None:
    """Three places go on with 50, one with 60 and then 61."""
    part = (1, 2, 3, 4)
    prompt = (*part, 50, 51, 91, *part, 60, 61, 92, *part, 50, 51, 93, *part, 50, 51, 94, *part)
    it = Copier(request_of(1, *prompt, speculation=SpeculationConfig()))
    assert it.first[:3] == [50, 60, 51], "the most probable path first, and all that may follow it"
    assert 61 in it.first
    assert it.probs[*prompt, 50] > 2 * it.probs[*prompt, 60] > 0
    assert it.probs[*prompt, 60, 61] > 0.9, "one place is left, and nothing against it"
    chain = Copier(request_of(1, *prompt, speculation=CHAINS))
    assert chain.first[:2] == [50, 51]
    assert 60 not in chain.first


def test_a_branch_is_followed() -> None:
    part = (1, 2, 3, 4)
    prompt = (*part, 50, 51, 91, *part, 60, 61, 62, 63, 64, *part)
    it = Copier(request_of(1, *prompt, speculation=SpeculationConfig()))
    known = set(it.paths.values())
    it.accept(60)
    assert {(*prompt, 60), (*prompt, 60, 61)} <= known
    it.accept(61)
    assert (*prompt, 60, 61, 62, 63, 64) in it.paths.values()
    assert len(set(it.paths.values())) == len(it.paths), "each token once"


def test_shorter_matches_have_what_longer_ones_leave() -> None:
    prompt = (6, 7, 1, 2, 3, 50, 9, 8, 1, 2, 3, 60, 6, 7, 1, 2, 3)
    it = Copier(request_of(1, *prompt, lead=1, speculation=SpeculationConfig(p_accept=0.0)))
    assert it.first[0] == 50
    assert it.probs.get((*prompt, 60), 0.0) < 1 - it.probs[*prompt, 50]


# How sure it is


def test_it_knows_nothing_at_first() -> None:
    it = Copier(request_of(1, *A_TALE, *A_TALE[:20], lead=8), Ngrams())
    assert it.first == [], "the longest match proves nothing"


def test_it_learns_within_a_few_tokens() -> None:
    it = Copier(request_of(1, *A_TALE, *A_TALE[:3], lead=8), Ngrams())
    proposed = [it.accept(token) for token in A_TALE[3:20]]
    at = next(i for i, tokens in enumerate(proposed) if tokens)
    assert at <= 2
    assert it.probs[tuple(it.text[:-3])] > 0.8, "a few tokens later"
    assert len(it.paths) > 16


def test_it_learns_while_it_may_propose_nothing() -> None:
    it = Copier(request_of(1, *A_TALE, *A_TALE[:3], lead=0), Ngrams())
    it.accept(*A_TALE[3:20])
    assert not it.paths
    other = Copier(request_of(2, *range(50), *range(20), lead=3), it.drafter)
    assert len(other.first) == 3, "the next request has it from the start"


def test_new_text_costs_nothing() -> None:
    """Few tokens, so that some occur again by chance and are followed by anything."""
    rng = random.Random(5)
    it = Copier(request_of(1, *(rng.randrange(1, 30) for _ in range(3000)), lead=8), Ngrams())
    for _ in range(500):
        it.accept(rng.randrange(1, 30))
    assert len(it.paths) < 25


def test_what_it_learned_is_unlearned() -> None:
    """After quotes, a text whose repetitions end after three tokens."""
    it = Copier(request_of(1, 1, 2, 3, 4), taught())
    for token in range(100, 190):
        it.accept(1, 2, 3, token)
    before = len(it.paths)
    for token in range(200, 230):
        it.accept(1, 2, 3, token)
    assert len(it.paths) - before < 30


def test_longer_matches_inherit() -> None:
    chances = Chances()
    for _ in range(10):
        chances.judged(0, 5, 1.0, True)
    assert chances.of(0, 3) == 0
    assert chances.of(0, 5) > 0.8
    assert chances.of(0, 100) == pytest.approx(chances.of(0, 5))
    assert chances.of(1, 100) == pytest.approx(chances.of(0, 100)), "places that agree are as sure as one"
    chances.judged(1, 100, 1.0, False)
    assert chances.of(1, 100) < chances.of(0, 100)


# Requests


def replayed(cache_prompt: tuple[bool, bool]) -> Copier:
    """A request whose prompt is the one of an earlier request, which has ended. `cache_prompt`: of both."""
    drafter = taught()
    drafter.answer(request_of(1, 1, 2, 3, 4, 5, cache_prompt=cache_prompt[0]))
    drafter.answer(Accepted(1, 6, (10, 11, 12, 13, 14, 15), 4))
    drafter.answer(EndDrafting(1))
    return Copier(request_of(2, 1, 2, 3, 4, 5, cache_prompt=cache_prompt[1]), drafter)


def test_what_other_requests_said_is_proposed() -> None:
    assert replayed((True, True)).first == [10, 11, 12, 13]


@pytest.mark.parametrize("cache_prompt", [(False, True), (True, False), (False, False)])
def test_a_private_request_neither_reads_nor_leaves_anything(cache_prompt: tuple[bool, bool]) -> None:
    assert replayed(cache_prompt).first == []


def test_its_own_text_comes_first() -> None:
    drafter = taught()
    drafter.answer(request_of(1, 1, 2, 3, 4, 5, 60, 61))
    it = Copier(request_of(2, 1, 2, 3, 4, 5, 70, 71, 72, 73, 1, 2, 3, 4, 5, lead=2), drafter)
    assert it.first == [70, 71]


def test_requests_at_the_same_time() -> None:
    drafter = taught()
    both = [Copier(request_of(i, *range(1, 9)), drafter) for i in (1, 2)]
    assert [it.first for it in both] == [[], []]
    both[0].accept(20, 21, 22)
    assert both[1].accept(20) == [21, 22], "one says what the other one has just said"


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("policy", ["best-first", "thresholds"])
def test_any_text_of_any_requests(seed: int, policy: Policy) -> None:
    """Random texts of few tokens, which repeat themselves and each other a lot; `TextDraft` checks each answer."""
    rng, draft = random.Random(seed), TextDraft(0)
    speculation = SpeculationConfig(policy=policy, n_draft=16)
    texts: dict[int, list[int]] = {}
    n_prompt: dict[int, int] = {}
    n_drafted = 0
    for number in range(150):
        if len(texts) < 2 or (len(texts) < 4 and rng.random() < 0.05):
            prompt = tuple(rng.randrange(1, 4) for _ in range(rng.randint(1, 20)))
            draft.answer(
                request_of(
                    number, *prompt, lead=rng.randint(0, 12), speculation=speculation, cache_prompt=rng.random() < 0.8
                )
            )
            texts[number], n_prompt[number] = list(prompt), len(prompt)
        request = rng.choice(list(texts))
        if rng.random() < 0.03:
            draft.answer(EndDrafting(request))
            del texts[request]
            continue
        said = _continued(texts[request], rng)
        texts[request] += said
        epoch = len(texts[request]) - n_prompt[request]
        (batch,) = draft.answer(Accepted(request, epoch, tuple(said), rng.randint(0, 12)))
        n_drafted += sum(expansion.n for expansion in batch.expansions)
    assert n_drafted > 0
    for request in texts:
        draft.answer(EndDrafting(request))
    draft.check_empty()


def _continued(text: Sequence[int], rng: random.Random) -> list[int]:
    """What comes next: often as it was five tokens before."""
    said: list[int] = []
    for _ in range(rng.randint(1, 3)):
        known = [*text, *said]
        said.append(known[-5] if len(known) > 5 and rng.random() < 0.85 else rng.randrange(1, 4))
    return said


# Names


def test_names_of_drafters() -> None:
    assert registry.read_names("ngram") == ("ngram",)
    assert registry.read_names("draft, ngram-simple,ngram") == ("draft", "ngram")
    for name in ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"):
        assert registry.read_names(name) == ("ngram",), "llama.cpp's"
    assert registry.read_names("none") == ()
    for text in ("", "ngram,", "none,draft", "eagle"):
        with pytest.raises(ValueError, match="eagle3, dflash, mtp, ngram, grammar, separated by commas, or none"):
            registry.read_names(text)


def test_which_drafters_a_request_has() -> None:
    assert registry.chosen(None, ()) == ()
    assert registry.chosen(None, ("draft", "draft")) == (0, 1, 2, 3), "all draft models, n-grams and grammars"
    assert registry.chosen(("draft",), ("draft", "draft")) == (0, 1)
    assert registry.chosen(("ngram",), ()) == (0,)
    assert registry.chosen(("ngram",), ("draft",)) == (1,)
    assert registry.chosen(("draft", "ngram"), ("draft",)) == (0, 1)
    assert registry.chosen((), ("draft",)) == ()
    assert registry.chosen(("eagle3",), ("draft", "eagle3")) == (1,)
    assert registry.labels(("draft", "eagle3")) == ("draft", "eagle3", "ngram", "grammar")
