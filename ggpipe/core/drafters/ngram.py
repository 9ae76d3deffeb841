"""An n-gram drafter: what followed the last tokens where they occurred before, in this text or another request's.

It copies quotes, code and names that occur again, and whole answers to prompts that are asked again. The places that
match the end of the text (`text_index`) name the tokens that may follow, and how many of them agree.

How probable these tokens are is learned, from zero, and once for all requests: for each accepted token the drafter
notes whether it had the token, whether or not it had sent it. So it sends nothing while nothing repeats, and starts
within a few tokens where something does.

The idea is that of prompt lookup decoding (Saxena, 2023), of SuffixDecoding (Oliaro et al., 2024) for several
continuations and a memory of other requests, and of llama.cpp's `--spec-type ngram-simple` and its relatives.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from ggpipe.core.draft_messages import ROOT, Accepted, BeginDrafting, DrafterMessage, EndDrafting, Expansion, MicroBatch
from ggpipe.core.drafters.text_index import Match, SharedTexts, Text

_MOST_TOKENS = 1_000_000
"""Of all texts that are kept: about 20 bytes each."""
_LEAST_PATH = 0.1
"""Probability of a draft token's path: less probable ones cost rows and energy, and delay corrections."""
_SUREST = 0.99
"""Probability of a token, at most."""
_MOST_NODES = 256
"""Draft tokens below the root, at most."""
_BORDERS = (4, 5, 6, 8, 11, 16, 24, 40)
"""Of the bins by a match's length in tokens. Within a quote the next bin is always near."""
_KEEPS = 1 - 1 / 64
"""Weight of a bin's earlier tokens when one more is judged."""
_PRIOR = 3.0
"""Tokens: as much zero counts in the first bin."""
_INHERITED = 1.0
"""Tokens: as much the bin of the next shorter matches counts in a bin."""
_ONE, _ALL, _SOME = range(3)
"""What names a token: the only place that matches as long; several places that agree; places that differ."""


class Chances:
    """How often the token is right that matches name, by their length and agreement."""

    def __init__(self) -> None:
        n = len(_BORDERS) + 1
        self._right = [[0.0] * n for _ in range(3)]
        self._named = [[0.0] * n for _ in range(3)]
        self._known = [[0.0] * n for _ in range(3)]

    def of(self, kind: int, length: int) -> float:
        """Probability of a token named after a match of this length, as a multiple of the share of the places that
        name it."""
        return self._known[kind][bisect_right(_BORDERS, length)]

    def judged(self, kind: int, length: int, share: float, right: bool) -> None:
        """A token that this share of the matching places named was the next one, or another one was."""
        first = bisect_right(_BORDERS, length)
        self._right[kind][first] = self._right[kind][first] * _KEEPS + right
        self._named[kind][first] = self._named[kind][first] * _KEEPS + share
        for one in (kind,) if kind != _ONE else (_ONE, _ALL, _SOME):
            self._reckon(one, first)

    def _reckon(self, kind: int, first: int) -> None:
        """Bins inherit from those of shorter matches, and of single places."""
        rights, named, known, single = self._right[kind], self._named[kind], self._known[kind], self._known[_ONE]
        shorter = known[first - 1] if first else 0.0
        for i in range(first, len(known)):
            inherited = shorter if kind == _ONE else max(shorter, single[i])
            prior = _INHERITED if i else _PRIOR
            shorter = known[i] = (rights[i] + prior * inherited) / (named[i] + prior)


class Ngrams:
    """See the module's text. It serves several requests."""

    def __init__(self, drafter: int = 0, most_tokens: int = _MOST_TOKENS) -> None:
        """`drafter`: its id, which the head knows it by. `most_tokens`: of all texts that are kept."""
        self._drafter = drafter
        self._texts = SharedTexts(most_tokens)
        self._chances = Chances()
        self._requests: dict[int, _NgramRequest] = {}

    def answer(self, message: DrafterMessage) -> list[MicroBatch]:
        """Take in one message; returns the draft tokens that follow from it, in one micro-batch."""
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
    """A draft token that the head was sent, or the last accepted token."""

    __slots__ = ("children", "dead", "log_path", "number", "pos")

    def __init__(self, number: int, pos: int) -> None:
        self.number = number
        self.pos = pos
        self.log_path = 0.0
        """Logarithm of its path's probability; those of two nodes differ by what lies between them."""
        self.children: dict[int, _Node] = {}
        self.dead = False

    def below(self) -> Iterable[_Node]:
        """All its descendants."""
        rest = list(self.children.values())
        while rest:
            node = rest.pop()
            yield node
            rest += node.children.values()


class _NgramRequest:
    """A request that is drafted for: its text, and the tree of what was sent of its matches' continuations."""

    def __init__(self, begin: BeginDrafting, text: Text, chances: Chances) -> None:
        self.text = text
        self.epoch = 0
        """Accepted tokens."""
        self._begin = begin
        self._chances = chances
        self._root = _Node(ROOT, len(begin.prompt) - 1)
        self._n_nodes = 0
        """Live ones below the root."""
        self._order = itertools.count()
        self._open: list[tuple[float, int, _Node, Sequence[Match]]] = []
        """A heap of nodes that may get children, the most probable path first, with the matches that go on there."""
        self._next_number = ROOT + 1
        self._named: tuple[int, int, int, float] | None = None
        """(token, kind, length, share) that the matches name first for the next token."""
        self._restart()

    def accept(self, tokens: Iterable[int], epoch: int) -> None:
        """The text continued with these tokens, `epoch` so far."""
        for token in tokens:
            if self._named is not None:
                named, kind, length, share = self._named
                self._chances.judged(kind, length, share, named == token)
            only_followed = self.text.push(token)
            if self._advance(token) and only_followed:
                self._name()
            else:
                self._restart()
        self.epoch = epoch

    def _advance(self, token: int) -> bool:
        """The token becomes the root. False where it was not drafted."""
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
        """Other matches than before: draft from the root on. What is sent already is not sent again."""
        self._open = [(-self._root.log_path, next(self._order), self._root, self.text.matches)]
        self._name()

    def _name(self) -> None:
        """Note what the matches name for the next token."""
        if not self.text.matches:
            self._named = None
            return
        top, kind, shares = _agreement(self.text.matches)
        token = max(shares, key=lambda one: shares[one]) if shares else None
        self._named = None if token is None else (token, kind, top.length, shares[token])

    def draft(self, look_ahead: int) -> tuple[Expansion, ...]:
        """Let the tree grow as far as it may; returns what is new."""
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
        """Draft tokens that may follow a node, with their probabilities, the most probable one first."""
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
        """Tokens that the matches name, with their probabilities, the most probable one first. Shorter matches have
        what the longest ones leave."""
        top, kind, shares = _agreement(matches)
        if not shares:
            return []
        chance = self._chances.of(kind, top.length)
        probs = {token: min(chance * share, _SUREST) for token, share in shares.items()}
        rest = [match for match in matches if match.length != top.length and match.next() not in probs]
        if rest and (left := 1 - sum(probs.values())) > 0:
            top, kind, shares = _agreement(rest)
            chance = self._chances.of(kind, top.length)
            probs |= {token: min(chance * share, _SUREST) * left for token, share in shares.items()}
        return sorted(probs.items(), key=lambda one: -one[1])

    def _withdraw(self, new: Sequence[tuple[_Node, Expansion]]) -> None:
        """They are too few for a micro-batch: they come with the next one, if they still follow then."""
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
    """The first of the longest matches that go on, how far those of its length agree, and which share of them names
    which token. Matches are sorted, the longest first."""
    top = matches[0]
    if len(matches) == 1:
        token = top.next()
        return top, _ONE, {} if token is None else {token: 1.0}
    counts: dict[int, int] = {}
    n = 0
    for match in matches:
        if n and match.length != top.length:
            break
        token = match.next()
        if token is not None:
            if not n:
                top = match
            counts[token] = counts.get(token, 0) + 1
            n += 1
    kind = _ONE if n == 1 else _ALL if len(counts) == 1 else _SOME
    return top, kind, {token: count / n for token, count in counts.items()}
