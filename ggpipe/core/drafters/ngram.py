"""An n-gram drafter: it repeats what followed the last tokens at earlier places, in this request or another one.

It copies quotes, code and names that occur again, and whole answers to prompts that are repeated. Each earlier place
that matches the end of the sequence (`text_index`) proposes the token that follows it there, and places may agree.

The probabilities of proposed tokens are learned, starting from zero, and shared by all requests: for each accepted
token, the drafter records whether the matches had proposed it, sent or not. So it sends nothing while nothing repeats,
and begins to draft within a few tokens of a repetition.

Based on prompt lookup decoding (Saxena, 2023), on SuffixDecoding (Oliaro et al., 2024) for several continuations and a
memory of other requests, and on llama.cpp's `--spec-type ngram-simple` and its relatives.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from ggpipe.core.draft_messages import ROOT, Accepted, BeginDrafting, DrafterMessage, EndDrafting, Expansion, MicroBatch
from ggpipe.core.drafters.text_index import Match, SharedTexts, Text
from ggpipe.core.request import DraftCheck

_MOST_TOKENS = 1_000_000
"""Maximum number of indexed tokens of all requests. A token takes about 20 bytes."""
_LEAST_PATH = 0.1
"""Minimum path probability of a draft token. Less probable ones cost rows and energy, and delay corrections."""
_SUREST = 0.998
"""Maximum probability of a token."""
_MOST_NODES = 256
"""Maximum number of draft tokens below the root."""
_BORDERS = (4, 5, 6, 8, 11, 16, 24, 40)
"""Upper bounds of the bins of match lengths, in tokens. A match within a quote soon reaches the next bin."""
_KEEPS, _LONG_KEEPS, _LONG = 1 - 1 / 64, 1 - 1 / 256, 16
"""Factor by which a bin's counts decay with each token that is judged; the same for matches of `_LONG` tokens and more,
which rarely end."""
_PRIOR = 3.0
"""Weight of the prior probability, zero, in the first bin, in tokens."""
_INHERITED = 1.0
"""Weight of the next shorter bin's probability in every other bin, in tokens."""
_ONE, _ALL, _SOME, _RESUMED = range(4)
"""Kinds of agreement among the longest matches: a single match; several that propose the same token; several that do
not; and the place in a passage that is copied with a change."""


class Chances:
    """How often proposed tokens are right, by the length and agreement of the matches that propose them."""

    def __init__(self) -> None:
        n = len(_BORDERS) + 1
        self._right, self._named, self._known = ([[0.0] * n for _ in range(4)] for _ in range(3))

    def of(self, kind: int, length: int) -> float:
        """Factor that turns the share of matches that propose a token into the token's probability."""
        return self._known[kind][_bin(kind, length)]

    def judged(self, kind: int, length: int, share: float, right: bool) -> None:
        """Record whether a token proposed by this share of the matches was right."""
        first, keeps = _bin(kind, length), _KEEPS if length < _LONG else _LONG_KEEPS
        self._right[kind][first] = self._right[kind][first] * keeps + right
        self._named[kind][first] = self._named[kind][first] * keeps + share
        for one in (kind,) if kind != _ONE else (_ONE, _ALL, _SOME):
            self._reckon(one, first)

    def _reckon(self, kind: int, first: int) -> None:
        """Recompute probabilities from a bin on: bins inherit from those of shorter matches and of single matches.

        As many tokens as were judged show no more than that another one may be wrong (Jeffreys' prior): where a match
        is nearly certain, how certain it is decides how many rows a run takes.
        """
        rights, named, known, single = self._right[kind], self._named[kind], self._known[kind], self._known[_ONE]
        inherits = kind in (_ALL, _SOME)
        n_judged = sum(named[:first]) + (sum(self._named[_ONE][:first]) if inherits else 0.0)
        shorter = known[first - 1] if first else 0.0
        for i in range(first, len(known)):
            inherited = max(shorter, single[i]) if inherits else shorter
            prior = _INHERITED if i else _PRIOR
            n_judged += named[i] + (self._named[_ONE][i] if inherits else 0.0)
            most = 1 - 0.5 / (n_judged + 1)
            shorter = known[i] = min((rights[i] + prior * inherited) / (named[i] + prior), most)


class Ngrams:
    """The n-gram drafter (see the module's docstring), for any number of requests."""

    joins = False

    def __init__(self, drafter: int = 0, most_tokens: int = _MOST_TOKENS) -> None:
        """`drafter`: id of this drafter. `most_tokens`: maximum number of tokens that the index keeps of all
        requests."""
        self._drafter = drafter
        self._texts = SharedTexts(most_tokens)
        self._chances = Chances()
        self._requests: dict[int, _NgramRequest] = {}

    def answer(self, message: DrafterMessage, _: DraftCheck | None = None) -> list[MicroBatch]:
        """Process a message. Returns the resulting draft tokens in one micro-batch; nothing for `EndDrafting`."""
        match message:
            case BeginDrafting():
                shared = self._texts if message.cache_prompt else None
                state = self._requests[message.request] = _NgramRequest(
                    message, Text(message.prompt, shared), self._chances
                )
                look_ahead = message.look_ahead
            case Accepted(request, epoch, tokens, look_ahead):
                state = self._requests[request]
                state.accept(tokens, epoch)
            case EndDrafting(request):
                self._requests.pop(request).text.end()
                return []
        micro_batch = MicroBatch(
            request=message.request,
            epoch=state.epoch,
            expansions=state.draft(look_ahead),
            complete=True,
            drafter=self._drafter,
        )
        return [micro_batch]

    def validate(self) -> None:
        """Check what must hold between messages. Raises AssertionError."""
        self._texts.validate()
        for state in self._requests.values():
            state.validate()


class _Node:
    """A draft token that was sent to the head, or the last accepted token."""

    __slots__ = ("children", "dead", "log_path", "number", "pos")

    def __init__(self, number: int, pos: int) -> None:
        self.number = number
        self.pos = pos
        self.log_path = 0.0
        """Logarithm of the path probability, up to a constant: only differences between nodes have a meaning."""
        self.children: dict[int, _Node] = {}
        self.dead = False

    def below(self) -> Iterable[_Node]:
        """All descendants."""
        rest = list(self.children.values())
        while rest:
            node = rest.pop()
            yield node
            rest += node.children.values()


class _NgramRequest:
    """A request's tokens, and the tree of draft tokens that were sent for it."""

    def __init__(self, begin: BeginDrafting, text: Text, chances: Chances) -> None:
        self.text = text
        self.epoch = 0
        """Accepted tokens."""
        self._begin = begin
        self._chances = chances
        self._root = _Node(ROOT, len(begin.prompt) - 1)
        self._n_nodes = 0
        """Number of live draft tokens below the root."""
        self._order = itertools.count()
        self._open: list[tuple[float, int, _Node, Sequence[Match]]] = []
        """Heap of nodes that may get children, with the matches that continue there; the most probable path comes
        first."""
        self._next_number = ROOT + 1
        self._named: tuple[int, int, int, float] | None = None
        """The first choice of the matches for the next token: (token, kind, length, share)."""
        self._restart()
        self._name()

    def accept(self, tokens: Iterable[int], epoch: int) -> None:
        """Append accepted tokens. `epoch`: number of tokens accepted so far."""
        is_continued = True
        for token in tokens:
            if self._named is not None:
                named, kind, length, share = self._named
                self._chances.judged(kind, length, share, named == token)
            only_followed = self.text.push(token)
            is_continued = self._advance(token) and only_followed and is_continued
            self._name()
        if not is_continued:
            self._restart()
        self.epoch = epoch

    def _advance(self, token: int) -> bool:
        """Make the token the root. Returns False if it was not drafted."""
        old = self._root
        child = old.children.pop(token, None)
        old.dead = True
        for node in old.below():
            node.dead = True
            self._n_nodes -= 1
        if child is None:
            self._root = _Node(ROOT, old.pos + 1)
            return False
        self._n_nodes -= 1
        self._root = child
        return True

    def _restart(self) -> None:
        """Draft from the root again, since the matches have changed. Nothing that was sent already is sent again."""
        self._open = [(-self._root.log_path, next(self._order), self._root, self.text.matches)]

    def _name(self) -> None:
        """Note the matches' first choice for the next token."""
        if not self.text.matches:
            self._named = None
            return
        top, kind, shares = _agreement(self.text.matches)
        token = max(shares, key=lambda one: shares[one]) if shares else None
        self._named = None if token is None else (token, kind, top.length, shares[token])

    def draft(self, look_ahead: int) -> tuple[Expansion, ...]:
        """Grow the tree as far as permitted. Returns the new draft tokens."""
        begin, root = self._begin, self._root
        deepest = root.pos + min(look_ahead, begin.n_left - self.epoch - 1)
        most = begin.speculation.most_drafted if begin.speculation.is_best_first else look_ahead
        room = min(most, _MOST_NODES - self._n_nodes)
        least = root.log_path + math.log(_LEAST_PATH)
        new: list[tuple[_Node, Expansion]] = []
        aside: list[tuple[float, int, _Node, Sequence[Match]]] = []
        heap, n_new = self._open, 0
        while heap and n_new < room and -heap[0][0] >= least:
            entry = heapq.heappop(heap)
            _, _, node, matches = entry
            if node.dead:
                continue
            if node.pos >= deepest:
                aside.append(entry)
                continue
            found = self._children(node, matches, least)
            if not found:
                aside.append(entry)
                continue
            added: list[tuple[int, float]] = []
            for token, prob in found:
                child = node.children.get(token)
                if child is None:
                    if n_new + len(added) == room:
                        continue
                    child = node.children[token] = _Node(self._next_number + len(added), node.pos + 1)
                    added.append((token, prob))
                log_path = child.log_path = node.log_path + math.log(prob)
                going_on = [match.longer() for match in matches if match.next() == token]
                heapq.heappush(heap, (-log_path, next(self._order), child, going_on))
            if added:
                parent = ROOT if node is root else node.number
                new.append((node, Expansion(parent, self._next_number, len(added), tuple(added))))
                self._next_number += len(added)
                n_new += len(added)
        for entry in aside:
            heapq.heappush(heap, entry)
        if n_new < begin.speculation.n_min:
            self._withdraw(new)
            return ()
        self._n_nodes += n_new
        return tuple(expansion for _, expansion in new)

    def _children(self, node: _Node, matches: Sequence[Match], least: float) -> list[tuple[int, float]]:
        """Draft tokens that may follow a node, with their probabilities. The most probable one comes first."""
        begin = self._begin
        if not matches:
            return []
        least_prob = max(math.exp(least - node.log_path), begin.speculation.p_accept)
        found: list[tuple[int, float]] = []
        for token, prob in self._candidates(matches):
            if prob < least_prob or token in begin.ends or token in begin.banned:
                if not found and not begin.speculation.is_best_first:
                    break
                continue
            found.append((token, prob))
            if not begin.speculation.is_best_first:
                break
        return found

    def _candidates(self, matches: Sequence[Match]) -> list[tuple[int, float]]:
        """Tokens that the matches propose, with their probabilities; the most probable one comes first. Shorter matches
        share the probability that the longest ones leave."""
        top, kind, shares = _agreement(matches)
        if not shares:
            return []
        chance = self._chances.of(kind, top.length)
        probs = {token: min(chance * share, _SUREST) for token, share in shares.items()}
        rest = [match for match in matches if not _alike(match, top) and match.next() not in probs]
        if rest and (left := 1 - sum(probs.values())) > 0:
            top, kind, shares = _agreement(rest)
            chance = self._chances.of(kind, top.length)
            probs |= {token: min(chance * share, _SUREST) * left for token, share in shares.items()}
        return sorted(probs.items(), key=lambda one: -one[1])

    def _withdraw(self, new: Sequence[tuple[_Node, Expansion]]) -> None:
        """Take new draft tokens back, because they are too few for a micro-batch. The next one may have them again."""
        for parent, expansion in new:
            for token, _ in expansion.candidates:
                node = parent.children.pop(token)
                node.dead = True
        if new:
            self._restart()

    def validate(self) -> None:
        """Check what must hold between messages. Raises AssertionError."""
        live = list(self._root.below())
        assert self._n_nodes == len(live) <= _MOST_NODES
        assert self._root.pos == len(self.text.tokens) - 1
        assert not any(node.dead for node in live)


def _agreement(matches: Sequence[Match]) -> tuple[Match, int, dict[int, float]]:
    """The first of the longest matches that have a next token, the kind of agreement among those of the same length,
    and the share of them that proposes each token. `matches`: sorted, the longest first."""
    top = matches[0]
    if len(matches) == 1:
        token = top.next()
        return top, _RESUMED if top.resumed else _ONE, {} if token is None else {token: 1.0}
    counts: dict[int, int] = {}
    n = 0
    for match in matches:
        if n and not _alike(match, top):
            break
        token = match.next()
        if token is not None:
            if not n:
                top = match
            counts[token] = counts.get(token, 0) + 1
            n += 1
    kind = _RESUMED if top.resumed else _ONE if n == 1 else _ALL if len(counts) == 1 else _SOME
    return top, kind, {token: count / n for token, count in counts.items()}


def _alike(match: Match, other: Match) -> bool:
    """Whether two matches are the same evidence for what comes next."""
    return match.length == other.length and match.resumed == other.resumed


def _bin(kind: int, length: int) -> int:
    """The bin of a match's length. After a change each token counts."""
    return length if kind == _RESUMED else bisect_right(_BORDERS, length)
