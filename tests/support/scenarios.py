"""Requests, drafters and limits as hypothesis draws them, and a head that serves them in any order of events."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import msgspec
from hypothesis import strategies as st

from ggpipe.config.embeddings import Pooling
from ggpipe.config.speculation import Policy, SpeculationConfig
from ggpipe.core.prefixes import ErasePrefix, PrefixOrder, RestorePrefix, SavePrefix
from ggpipe.core.request import Limits, Request
from support.fake_drafts import Adversary, Echo, FakeDraftModel, RealDraft, Silent, TextDraft
from support.fake_model import END, FakeModel, Tokens, chance
from support.fake_pipeline import NO_FILES, Dropping, Restored
from support.heads import Head
from support.requests import ADJUSTED, DRAWN, changed, core_request
from support.translated_draft import TranslatedDraft

Kind = Literal["model", "translated", "adversary", "echo", "silent", "ngram", "grammar"]


@dataclass(frozen=True)
class Fussy:
    """A grammar that a third of all draft tokens do not fit, whatever the model writes."""

    seed: int

    def fits(self, path: Tokens, token: int) -> bool:
        return chance(self.seed, path, token) % 3 > 0

    def forced(self, path: Tokens) -> tuple[tuple[int, float], ...]:
        return ()


@dataclass(frozen=True)
class Scenario:
    limits: Limits
    draft_limits: Limits
    n_stages: int
    n_draft_stages: int
    model: FakeModel
    agreement: float
    drafts: tuple[Kind, ...]
    """In order of their ids."""
    requests: list[Request | PrefixOrder]
    stops: dict[int, int]
    """Request -> moves until it is stopped."""
    pace: dict[str, int]
    """How much more often than others some things happen."""
    seed: int
    alike: float = 0.4
    """How often a prompt begins as an earlier text does."""
    hybrid: bool = False
    drops: tuple[Dropping, ...] = ()
    """Of each stage; those without drop all dead rows."""
    restored: Restored = NO_FILES
    draft_restored: Restored = NO_FILES
    window: int = 0
    """Of draft models."""
    is_fussy: bool = False
    """Many draft tokens do not fit."""

    def open(self) -> Head:
        drafts = [self._draft(number, kind) for number, kind in enumerate(self.drafts)]
        head = Head(self.limits, self.n_stages, self.model, drafts, self.restored, self.hybrid, self.drops)
        head.fetches = self.seed % 2 == 1
        head.draft_check = Fussy(self.seed) if self.is_fussy else None
        return head

    def _draft(self, number: int, kind: Kind) -> RealDraft | TextDraft | Adversary:
        agreement = self.agreement / (1 + number)
        if kind == "adversary":
            return Adversary(self.model, agreement, self.seed + number, number)
        if kind == "echo":
            return Echo(self.model, agreement, self.seed, number)
        if kind == "silent":
            return Silent(self.model, agreement, self.seed, number)
        if kind == "ngram":
            return TextDraft(number)
        if kind == "grammar":
            return TextDraft(number, self._forced)
        draft_model = FakeDraftModel(self.model, agreement)
        if kind == "translated":
            return TranslatedDraft(self.draft_limits, self.n_draft_stages, draft_model, number)
        restored = self.draft_restored
        return RealDraft(self.draft_limits, self.n_draft_stages, draft_model, restored, number, self.window)

    def _forced(self, request: int, tokens: Tokens, n_prompt: int) -> list[tuple[int, float]]:
        """What a grammar might force: nothing, what the model writes, or something else."""
        found: list[tuple[int, float]] = []
        for _ in range(chance(self.seed, tokens) % 4):
            is_right = chance(self.seed, request, tokens, "right") % 100 < 100 * self.agreement
            token = self.model.next(request, tokens, n_prompt) if is_right else chance(tokens) % self.model.n_vocab
            found.append((token, 0.2 + 0.79 * self.agreement))
            tokens += (token,)
        return found


SPECULATIONS = st.sampled_from([(1, 0), (1, 1), (2, 1), (4, 0), (4, 3), (6, 0)]).flatmap(
    lambda sizes: speculations(*sizes)
)


POLICIES = st.sampled_from(get_args(Policy))


def speculations(n_draft: int, n_min: int) -> st.SearchStrategy[SpeculationConfig]:
    return st.builds(
        SpeculationConfig,
        mode=st.sampled_from(["async", "async", "speculative", "iterative"]),
        policy=POLICIES,
        n_draft=st.just(n_draft),
        n_draft_rows=st.none() | st.integers(1, 4),
        n_min=st.just(n_min),
        p_accept=st.sampled_from([0.0, 0.0, 0.3, 0.8]),
        p_split=st.sampled_from([0.01, 0.1, 0.5]),
        p_recovery=st.sampled_from([0.0, 0.2]),
        p_decay=st.sampled_from([0.0, 0.05, 0.3]),
        n_parallel=st.integers(1, 4),
        cancel=st.booleans(),
        continuous=st.booleans(),
    )


KINDS = st.sampled_from(get_args(Kind))
DROPS = st.lists(st.sampled_from(Dropping), max_size=3).map(tuple)
PAUSES = st.sampled_from((0, 0, 3))
SHARING = st.sampled_from(((), (0, 1, 2)))
DRAFTS = st.lists(KINDS, min_size=1, max_size=2).map(tuple) | st.lists(KINDS, min_size=1, max_size=4).map(tuple)

PACES = st.fixed_dictionaries(
    {
        name: st.sampled_from([1, 5, 50])
        for name in ("target stage", "target cancel", "target result", "sample", "draft", "draft tokens", "steering")
    }
)


@st.composite
def requests(
    draw: st.DrawFn, number: int, speculations: st.SearchStrategy[SpeculationConfig], n_predict: tuple[int, ...]
) -> Request:
    n = draw(st.integers(1, 14))
    return core_request(
        id=number,
        prompt=tuple(range(number * 100, number * 100 + n)),
        n_predict=draw(st.sampled_from(n_predict)),
        speculation=draw(speculations),
        ends=draw(st.sampled_from([frozenset({END}), frozenset()])),
        logits_request_grows=draw(st.booleans()),
        remembers_rows=draw(st.booleans()),
        saves=draw(st.sampled_from(["nothing", "prompt", "text"])),
        drawing=draw(st.sampled_from([None, DRAWN])),
        adjustments=draw(st.sampled_from([None, ADJUSTED])),
    )


@st.composite
def embeddings(draw: st.DrawFn, request: Request) -> Request:
    """The embedding of a request's prompt."""
    return changed(
        replace(request, saves="nothing"),
        n_predict=0,
        speculation=SpeculationConfig(mode="iterative"),
        cache_prompt=False,
        pooling=draw(st.sampled_from(get_args(Pooling))),
    )


@st.composite
def whatever(draw: st.DrawFn, request: Request) -> Request | PrefixOrder:
    """A request, or something else with its prompt."""
    number, prompt, file = request.id, request.prompt, draw(st.sampled_from(["whole", "whole", "damaged"]))
    kind = draw(st.sampled_from([None, None, None, "save", "restore", "erase", "embed"]))
    match kind:
        case "save":
            return SavePrefix(number, prompt, file)
        case "restore":
            return RestorePrefix(number, prompt, file)
        case "erase":
            return ErasePrefix(number, prompt)
        case "embed":
            return draw(embeddings(request))
    return request


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Anything."""
    n_requests = draw(st.integers(1, 4))

    def limits(n_ctx: int) -> Limits:
        n_prefixes, partial_prefixes = draw(st.integers(0, 3)), draw(st.booleans())
        return Limits(
            n_ctx=n_ctx,
            n_batch=draw(st.sampled_from([1, 2, 5, 12, 12])),
            n_ubatch=draw(st.sampled_from([1, 2, 5, 12, 12])),
            n_in_flight=draw(st.integers(1, 5)),
            n_seq=draw(st.sampled_from([n_requests, n_requests + 1, 5, 9])) + n_prefixes,
            n_requests=n_requests,
            n_prefixes=n_prefixes,
            partial_prefixes=partial_prefixes,
            crowding=draw(st.sampled_from((0.0, 0.75, 1.5))),
            drafts_late=draw(st.booleans()),
            sharing=draw(SHARING),
            n_pauses=draw(PAUSES) if partial_prefixes else 0,
        )

    return Scenario(
        limits(draw(st.sampled_from([20, 30, 60, 60]))),
        limits(draw(st.sampled_from([15, 30, 60, 60]))),
        n_stages=draw(st.integers(1, 3)),
        n_draft_stages=draw(st.integers(1, 2)),
        model=FakeModel(draw(st.sampled_from([3, 20, 100, 1000, 1000])), draw(st.integers(0, 99)), draw(st.booleans())),
        agreement=draw(st.sampled_from([0.0, 0.5, 0.8, 0.9, 1.0])),
        drafts=draw(DRAFTS),
        requests=[draw(requests(i + 1, SPECULATIONS, (-1, 0, 1, 5, 15, 25))) for i in range(draw(st.integers(1, 5)))],
        stops=draw(st.dictionaries(st.integers(1, 5), st.integers(0, 200), max_size=2)),
        pace=draw(PACES),
        seed=draw(st.integers(0, 2**32)),
        drops=draw(DROPS),
        is_fussy=draw(st.booleans()),
        window=draw(st.sampled_from([0, 0, 0, 4, 7, 12, 20])),
    )


@st.composite
def thickets(draw: st.DrawFn) -> Scenario:
    """Many branches in many small runs, and ids that are scarce."""
    speculations = st.builds(
        SpeculationConfig,
        mode=st.just("async"),
        policy=POLICIES,
        n_draft=st.integers(1, 3),
        n_parallel=st.integers(2, 4),
    )
    n = draw(st.integers(1, 3))
    return Scenario(
        Limits(
            n_ctx=90,
            n_batch=12,
            n_ubatch=12,
            n_in_flight=draw(st.integers(3, 6)),
            n_seq=draw(st.integers(n, 12)),
            n_requests=n,
            crowding=draw(st.sampled_from((0.0, 0.75, 1.5))),
            drafts_late=draw(st.booleans()),
            sharing=draw(SHARING),
            n_pauses=draw(PAUSES),
        ),
        Limits(n_ctx=90, n_batch=12, n_ubatch=12, n_in_flight=2, n_seq=draw(st.integers(n, 12)), n_requests=n),
        n_stages=draw(st.integers(1, 3)),
        n_draft_stages=1,
        model=FakeModel(1000, draw(st.integers(0, 99)), draws=True),
        agreement=draw(st.sampled_from([0.5, 0.9])),
        drafts=draw(DRAFTS),
        requests=[draw(requests(i + 1, speculations, (4, 10, 15))) for i in range(n + 1)],
        stops={},
        pace=draw(PACES),
        seed=draw(st.integers(0, 2**32)),
        drops=draw(DROPS),
        is_fussy=draw(st.booleans()),
    )


@st.composite
def conversations(draw: st.DrawFn) -> Scenario:
    """Prompts that continue earlier outputs, and contexts that hold few of them."""
    speculations = st.builds(
        SpeculationConfig,
        mode=st.sampled_from(["async", "speculative", "iterative"]),
        policy=POLICIES,
        n_draft=st.integers(1, 3),
        n_parallel=st.integers(1, 3),
    )
    n = draw(st.integers(1, 3))

    def restored(limits: Limits) -> Restored:
        if draw(st.booleans()):
            return NO_FILES
        n = draw(st.integers(0, 14))
        tokens = (*range(100, 100 + n), *range(200, 200 + draw(st.integers(0, 14))))
        return Restored(tokens, (7, 8, 9) if draw(st.booleans()) and limits.partial_prefixes else ())

    def limits(n_in_flight: int) -> Limits:
        n_prefixes, partial_prefixes = draw(st.integers(1, 4)), draw(st.booleans())
        return Limits(
            n_ctx=draw(st.sampled_from([50, 90, 150])),
            n_batch=12,
            n_ubatch=draw(st.sampled_from([2, 5, 12])),
            n_in_flight=n_in_flight,
            n_seq=draw(st.integers(n, 6)) + n_prefixes,
            n_requests=n,
            n_prefixes=n_prefixes,
            partial_prefixes=partial_prefixes,
            crowding=draw(st.sampled_from((0.0, 0.75, 1.5))),
            drafts_late=draw(st.booleans()),
            sharing=draw(SHARING),
            n_pauses=draw(PAUSES) if partial_prefixes else 0,
        )

    target, draft = limits(draw(st.integers(1, 4))), limits(2)
    return Scenario(
        target,
        draft,
        n_stages=draw(st.integers(1, 3)),
        n_draft_stages=1,
        model=FakeModel(1000, draw(st.integers(0, 99)), draws=draw(st.booleans())),
        agreement=draw(st.sampled_from([0.5, 0.9])),
        drafts=draw(st.sampled_from([("model",), ("model",), ("ngram", "model"), ("model", "model")])),
        requests=[draw(whatever(draw(requests(i + 1, speculations, (0, 2, 10))))) for i in range(8)],
        stops=draw(st.dictionaries(st.integers(1, 8), st.integers(0, 900), max_size=2)),
        pace=draw(PACES),
        seed=draw(st.integers(0, 2**32)),
        drops=draw(DROPS),
        is_fussy=draw(st.booleans()),
        alike=0.9,
        restored=restored(target),
        draft_restored=restored(draft),
    )


@st.composite
def recurrent(draw: st.DrawFn) -> Scenario:
    """Conversations with a model whose states cannot go back, on up to four stages."""
    scenario = draw(conversations() | scenarios())
    limits = replace(scenario.limits, partial_prefixes=False, rolls_back=False, drops_rows=False, n_pauses=draw(PAUSES))
    limits = replace(limits, most_taken_back=draw(st.sampled_from((None, 1, 2, 4))))
    return replace(
        scenario,
        limits=replace(limits, n_seq=limits.n_requests + limits.n_prefixes + draw(st.integers(0, 6))),
        restored=replace(scenario.restored, more=()),
        n_stages=draw(st.integers(1, 4)),
        stops=draw(st.dictionaries(st.integers(1, 8), st.integers(0, 300), max_size=6)),
        alike=draw(st.sampled_from([0.5, 0.9])),
        hybrid=True,
    )


def play(scenario: Scenario, lives: Sequence[int] = ()) -> Head:
    """Let everything happen in an order that the seed and the paces say.

    `lives`: after so many moves the ranks are lost, all of them, and the requests go on in new ones.
    """
    head, rng = scenario.open(), random.Random(scenario.seed)
    drafters = tuple(head.drafts)
    choices = [drafters, drafters[::-1], drafters[-1:], drafters[:2]]
    to_come = collections.deque(
        replace(one, drafters=rng.choice(choices)) if isinstance(one, Request) else one for one in scenario.requests
    )
    stops, losses = dict(scenario.stops), set(itertools.accumulate(lives))

    @functools.cache
    def weight(name: str) -> int:
        return max((pace for prefix, pace in scenario.pace.items() if name.startswith(prefix)), default=1)

    for n_moves in range(30_000):
        for request in [request for request, at in stops.items() if at == n_moves]:
            del stops[request]
            head.stop(request)
        if n_moves in losses:
            lost, head = head, scenario.open()
            head.resume(lost, lambda n: rng.choice((n, n, rng.randint(0, n))))  # the last ones may be lost as well
        moves = head.moves()
        if to_come:
            moves.append(("arrival", functools.partial(arrive_next, head, to_come, rng, scenario.alike)))
        if not moves:
            return head
        rng.choices(moves, [weight(name) for name, _ in moves])[0][1]()
    raise AssertionError("it never ends")


def arrive_next(
    head: Head, to_come: collections.deque[Request | PrefixOrder], rng: random.Random, alike: float
) -> None:
    one = to_come.popleft()
    prompt = one.prompt if isinstance(one, Request) else one.tokens
    texts = [*(seen.tokens for seen in head.seen.values()), *(seen.order.tokens for seen in head.orders.values())]
    if texts and rng.random() < alike:
        text = rng.choice(texts)
        if rng.random() < 0.3:
            text = text[: rng.randint(0, len(text))]
        room = head.limits.n_ctx - len(text) - 1
        prompt = text + prompt[:room] if room > 0 else prompt
    if isinstance(one, Request):
        head.arrive(replace(one, prompt=prompt))
    else:
        head.order(msgspec.structs.replace(one, tokens=prompt))
