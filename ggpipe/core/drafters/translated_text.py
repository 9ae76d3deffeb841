"""One request's text in the tokens of a target and in those of its draft model, and the draft tokens after it.

Each token of the draft model ends somewhere in the target's tree. The text since the last place where a token surely
begins, a space after a word, is tokenized for the target, and these tokens lead there. So a draft token may bring
several of the target's tokens, or replace the last one by a longer one: then the shorter one loses the probability that
the longer one gets.

The target may accept a part of the draft model's token. Then the draft model is told nothing until more text follows,
and continues to draft after tokens that may be right. If none is, it reads the text in other tokens. Tokens that it has
read are not taken back, so they may differ from the tokens of the whole text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ggpipe.core.draft_messages import ROOT, BeginDrafting, Expansion

_MOST_BYTES = 64
"""Of text that is tokenized together, where no space divides it."""
_MOST_PER_TOKEN = 4.0
"""Tokens of the draft model for one of the target's, at most, by which look-ahead is reckoned."""
_LEAST = 0.01
"""Probability that a token keeps when a longer one becomes more probable."""
_FOLLOWS = 0.97
"""Probability of a token that finishes the text of a draft model's token."""


class Translator(Protocol):
    """Both vocabularies. Special tokens have a text that no other tokens have."""

    draft_ends: frozenset[int]
    """Tokens of the draft model that end an output."""

    def target_text(self, token: int) -> bytes:
        """The text of one of the target's tokens; a part of a character, perhaps."""

    def draft_text(self, token: int) -> bytes:
        """The text of one of the draft model's tokens."""

    def target_tokens(self, text: bytes) -> tuple[int, ...]:
        """The target's tokens for a text of whole characters, in the middle of an output."""

    def draft_tokens(self, text: bytes) -> tuple[int, ...]:
        """The draft model's tokens for such a text."""

    def draft_prompt(self, text: bytes) -> tuple[int, ...]:
        """The draft model's tokens for a prompt: at least one."""

    def draft_banned(self, banned: Iterable[int]) -> tuple[int, ...]:
        """The draft model's tokens for these of the target, where it has them."""


@dataclass(slots=True, eq=False)
class _TargetNode:
    """A draft token as the head knows it, or the last accepted token."""

    token: int
    parent: _TargetNode | None = None
    mass: float = 1.0
    """Probability after its parent, of it and of longer tokens that begin like it."""
    probability: float = 1.0
    """Without the longer tokens."""
    number: int = ROOT
    """Its number for the head, once it is sent."""
    children: dict[int, _TargetNode] = field(default_factory=dict)


@dataclass(slots=True)
class _Place:
    """Where the text of one of the draft model's tokens ends."""

    last: _TargetNode
    """The target's last token of it."""
    way: tuple[_TargetNode, ...] = ()
    """The tokens up to `last` from where a token surely begins."""
    since: bytes = b""
    """The text from there."""
    missing: bytes = b""
    """Accepted text that follows it: then `last` is the target's root."""


@dataclass(slots=True, eq=False)
class _DraftNode:
    """A token of the draft model: a draft token, or the last one that it was told."""

    token: int
    text: bytes
    probability: float = 1.0
    """After its parent."""
    place: _Place | None = None
    """None: the accepted text differs from its own."""
    named: _TargetNode | None = None
    """The token of the target that it counts for."""
    children: dict[int, _DraftNode] = field(default_factory=dict)


class _Way(NamedTuple):
    """Draft tokens of the draft model that have the accepted text."""

    tokens: tuple[int, ...]
    probability: float
    rest: bytes = b""
    """The end of the text, with which its next token begins."""


class TranslatedText:
    """One request's text in both vocabularies, and the draft tokens after it."""

    def __init__(self, translator: Translator, begin: BeginDrafting) -> None:
        self._translator = translator
        prompt = b"".join(map(translator.target_text, begin.prompt))
        n_whole = _n_whole(prompt)
        self.prompt = translator.draft_prompt(prompt[:n_whole])
        """The draft model's tokens of the prompt."""
        self.epoch = 0
        """Accepted tokens of the target."""
        self.n_told = 0
        """Accepted tokens that the draft model was told, in its own vocabulary."""
        self._n_target, self._n_draft = len(begin.prompt), len(self.prompt)
        self._target_root = _TargetNode(begin.prompt[-1] if begin.prompt else 0)
        self._draft_root = _DraftNode(self.prompt[-1], b"", place=_Place(self._target_root, missing=prompt[n_whole:]))
        self._nodes: dict[int, _DraftNode] = {}
        """The draft model's live draft tokens by its numbers."""
        self._next_number = ROOT + 1
        self._new: dict[_TargetNode, list[_TargetNode]] = {}
        """Draft tokens that the head is to be sent, by their parents, and these before their children."""
        self._changed: dict[_TargetNode, set[_TargetNode]] = {}
        """Draft tokens by their parents whose probability changed since the head was sent them."""

    # The text

    def n_draft(self, n_target: int) -> int:
        """About how many tokens of the draft model have the text of that many of the target's; at least as many."""
        ratio = self._n_draft / max(self._n_target, 1)
        return math.ceil(n_target * min(max(ratio, 1.0), _MOST_PER_TOKEN))

    def accept(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """The target accepted tokens. Returns what the draft model is to be told of them, in its tokens."""
        place = self._draft_root.place
        assert place is not None
        missing = place.missing
        for token in tokens:
            missing += self._translator.target_text(token)
            self._target_root = self._target_root.children.get(token) or _TargetNode(token)
            self._target_root.parent = None
            self.epoch += 1
            self._n_target += 1
        told, missing = self._follow(missing)
        self.n_told += len(told)
        self._n_draft += len(told)
        self._draft_root.place = _Place(self._target_root, missing=missing)
        self._place_again()
        return tuple(told)

    def _follow(self, text: bytes) -> tuple[list[int], bytes]:
        """Move the draft model's root along a text. Returns its tokens, and the end of the text that has none yet."""
        ways = sorted(self._ways(self._draft_root, text), key=lambda way: way.probability, reverse=True)
        to_end = next((way for way in ways if not way.rest), None)
        beyond = [way for way in ways if way.rest]
        if beyond and sum(way.probability for way in beyond) > (to_end.probability if to_end is not None else 0.0):
            return self._tell(beyond[0].tokens), beyond[0].rest
        if to_end is not None:
            return self._tell(to_end.tokens), b""
        whole = text[: _n_whole(text)]
        return self._tell(self._translator.draft_tokens(whole) if whole else ()), text[len(whole) :]

    def _ways(
        self, node: _DraftNode, text: bytes, tokens: tuple[int, ...] = (), probability: float = 1.0
    ) -> Iterator[_Way]:
        """Along which draft tokens of the draft model a text may go on below a node."""
        for child in node.children.values() if text else ():
            share = probability * child.probability
            if child.text and text.startswith(child.text):
                rest, way = text[len(child.text) :], (*tokens, child.token)
                if not rest:
                    yield _Way(way, share)
                yield from self._ways(child, rest, way, share)
            elif child.text.startswith(text):
                yield _Way(tokens, share, text)

    def _tell(self, tokens: Iterable[int]) -> list[int]:
        """Move the draft model's root along its tokens."""
        told = list(tokens)
        for token in told:
            self._draft_root = self._draft_root.children.get(token) or _DraftNode(token, b"")
        return told

    def _place_again(self) -> None:
        """The roots moved: find out where the draft tokens that are left end now."""
        self._new.clear()
        self._changed.clear()
        live, rest = set[_DraftNode](), [self._draft_root]
        while rest:
            node = rest.pop()
            for child in node.children.values():
                child.place = self._placed(node, child)
                live.add(child)
                rest.append(child)
        self._nodes = {number: node for number, node in self._nodes.items() if node in live}

    # Draft tokens

    def add(self, expansions: Iterable[Expansion], is_current: bool) -> None:
        """Take in what the draft model proposes. `is_current`: since it was told of the last accepted tokens."""
        for expansion in expansions:
            parent = self._nodes.get(expansion.parent)
            if expansion.parent == ROOT and is_current:
                parent = self._draft_root
            if parent is None:
                continue
            for number, (token, prob) in enumerate(expansion.candidates[: expansion.n], expansion.first):
                child = _DraftNode(token, self._translator.draft_text(token), prob)
                parent.children[token] = self._nodes[number] = child
                child.place = self._placed(parent, child)

    def take_new(self) -> tuple[Expansion, ...]:
        """What the head is to be sent since the last call."""
        expansions: list[Expansion] = []
        for parent in dict.fromkeys((*self._new, *self._changed)):
            new, first = self._new.get(parent, []), self._next_number
            again = tuple((child.number, child.probability) for child in self._changed.get(parent, ()))
            for child in new:
                child.number = self._next_number
                self._next_number += 1
            candidates = tuple((child.token, child.probability) for child in new)
            number = ROOT if parent is self._target_root else parent.number
            expansions.append(Expansion(number, first, len(new), candidates, again))
        self._new.clear()
        self._changed.clear()
        return tuple(expansions)

    def _placed(self, parent: _DraftNode, node: _DraftNode) -> _Place | None:
        """Where a draft token of the draft model ends. The target's tokens on the way there become draft tokens."""
        before, text = parent.place, node.text
        if before is None:
            return None
        if before.missing:
            if before.missing.startswith(text):
                return _Place(self._target_root, missing=before.missing[len(text) :])
            if not text.startswith(before.missing):
                return None
            text = text[len(before.missing) :]
            before = _Place(self._target_root)
        if not text:
            return before
        if _begins_token(before.since, text):
            before = _Place(before.last)
        since = before.since + text
        tokens = self._translator.target_tokens(since[: _n_whole(since)])
        first = before.way[0].parent if before.way else before.last
        assert first is not None
        n_same = _n_equal(before.way, tokens)
        share = node.probability * math.prod(skipped.mass for skipped in before.way[n_same:])
        at, way, is_new = first, list[_TargetNode](), False
        for i, token in enumerate(tokens):
            child = at.children.get(token)
            if child is None:
                child = self._name(at, token, share if i == n_same else _FOLLOWS)
                is_new = is_new or i == n_same
            way.append(at := child)
        if node.named is not at and n_same < len(tokens):
            node.named = at
            if not is_new:  # other tokens of the draft model named it, too
                way[n_same].mass = min(way[n_same].mass + share, 1.0)
                self._change(way[n_same], share)
            if n_same < len(before.way):
                self._change(before.way[n_same], -share)
        return _Place(at, tuple(way), since)

    def _name(self, parent: _TargetNode, token: int, probability: float) -> _TargetNode:
        child = parent.children[token] = _TargetNode(token, parent, probability, probability)
        self._new.setdefault(parent, []).append(child)
        return child

    def _change(self, node: _TargetNode, share: float) -> None:
        assert node.parent is not None
        node.probability = min(max(node.probability + share, _LEAST), 1.0)
        if node.number:
            self._changed.setdefault(node.parent, set()).add(node)

    def validate(self) -> None:
        """Check what must hold between events. Raises AssertionError."""
        for node in self._below(self._draft_root):
            assert node.place is None or node.place.missing or self._is_live(node.place.last)
        assert not self._new
        assert not self._changed

    def _below(self, root: _DraftNode) -> Iterator[_DraftNode]:
        for child in root.children.values():
            yield child
            yield from self._below(child)

    def _is_live(self, node: _TargetNode) -> bool:
        while node.parent is not None:
            assert node.parent.children[node.token] is node
            node = node.parent
        return node is self._target_root


def _begins_token(before: bytes, text: bytes) -> bool:
    """Whether a token of any vocabulary begins between these: at a space after a word."""
    if not before or _n_whole(before) < len(before):
        return False
    return (text[:1] == b" " and not before[-1:].isspace()) or len(before) > _MOST_BYTES


def _n_equal(way: tuple[_TargetNode, ...], tokens: tuple[int, ...]) -> int:
    """How many of the first tokens are the same."""
    n = 0
    while n < min(len(way), len(tokens)) and way[n].token == tokens[n]:
        n += 1
    return n


def _n_whole(text: bytes) -> int:
    """Bytes without those of an incomplete character at the end."""
    for n in range(1, min(4, len(text)) + 1):
        byte = text[-n]
        if byte < 0x80:
            break
        if byte >= 0xC0:  # the first byte of a character
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - n if n < length and byte < 0xF8 else len(text)
    return len(text)
