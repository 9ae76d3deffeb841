"""An n-gram drafter: what followed the last tokens when they stood in prompt or output before.

It looks for the longest run of tokens before the end of the text that is found earlier as well, and proposes what came
after it there. So it copies quotes, code and names that occur again. Its probabilities follow from the length of the
match. They begin low, and `Calibration` learns what they are worth in each text.

Memory is linear in the text: for each position, the one before it that ends with the same few tokens. The idea is that
of prompt lookup decoding (Saxena, 2023), and of llama.cpp's `--spec-type ngram-simple`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ggpipe.core.draft_messages import ROOT, Accepted, BeginDrafting, DrafterMessage, EndDrafting, Expansion, MicroBatch

_SHORTEST = 3  # tokens of a match
_LONGEST = 128  # tokens of a match that are counted: a longer one is not surer
_MOST_TRIED = 16  # earlier places that are compared, the latest first
_HALF_SURE = 8  # tokens of a match that is thought to be right half of the time


class Ngrams:
    """See the module's text. It serves several requests."""

    def __init__(self, drafter: int = 0) -> None:
        """`drafter`: its id, which the head knows it by."""
        self._drafter = drafter
        self._requests: dict[int, _NgramRequest] = {}

    def answer(self, message: DrafterMessage) -> list[MicroBatch]:
        """Take in one message; returns the draft tokens that follow from it, in one micro-batch."""
        match message:
            case BeginDrafting():
                state = self._requests[message.request] = _NgramRequest(message)
                look_ahead = message.look_ahead
            case Accepted(request, epoch, tokens, look_ahead):
                state = self._requests[request]
                state.accept(tokens, epoch)
            case EndDrafting(request):
                del self._requests[request]
                return []
        micro_batch = MicroBatch(
            request=message.request,
            epoch=state.epoch,
            expansions=state.draft(look_ahead),
            complete=True,
            drafter=self._drafter,
        )
        return [micro_batch]


class _Index:
    """A text, and where its n-grams stood before."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        """By the tokens of an n-gram: the position of its last one, at its latest place but the text's end."""
        self._before: list[int] = []
        """By position: where the n-gram that ends there stood before; -1: nowhere."""
        self.place = -1
        """Position of the earlier token that the text's last one matches; -1: none."""
        self.length = 0
        """Tokens up to there that are those at the text's end."""
        for token in tokens:
            self._append(token)
        self._find()

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        end = len(self.tokens) - 1
        key = tuple(self.tokens[-_SHORTEST:])
        self._before.append(self._latest.get(key, -1))
        if len(key) == _SHORTEST:
            self._latest[key] = end

    def push(self, token: int) -> None:
        """The text goes on: the match does as well, or another is looked for."""
        goes_on = self.place >= 0 and self.tokens[self.place + 1] == token
        self._append(token)
        if goes_on:
            self.place, self.length = self.place + 1, min(self.length + 1, _LONGEST)
        else:
            self._find()

    def _find(self) -> None:
        """The longest match of the text's end, of those at its latest places."""
        self.place, self.length = -1, 0
        place = self._before[-1]
        for _ in range(_MOST_TRIED):
            if place < 0:
                return
            length = self._matching(place)
            if length > self.length:
                self.place, self.length = place, length
            place = self._before[place]

    def _matching(self, place: int) -> int:
        tokens, end, n = self.tokens, len(self.tokens) - 1, _SHORTEST
        while n < _LONGEST and n <= place and tokens[place - n] == tokens[end - n]:
            n += 1
        return n

    def after(self, n: int) -> int:
        """The token that is thought to follow `n` tokens behind the text's end; there must be a match. Where that is
        the text's own end, the text repeats itself from there on."""
        period = len(self.tokens) - 1 - self.place
        return self.tokens[self.place + 1 + n % period]


class _NgramRequest:
    """A request that is drafted for: a chain of draft tokens that follow its match."""

    def __init__(self, begin: BeginDrafting) -> None:
        self._begin = begin
        self._index = _Index(begin.prompt)
        self.epoch = 0
        """Accepted tokens."""
        self._chain: list[tuple[int, int]] = []
        """(number, token) of the draft tokens below the last accepted token, which the head was sent."""
        self._next_number = ROOT + 1

    def accept(self, tokens: Iterable[int], epoch: int) -> None:
        """The text went on with these tokens, `epoch` so far."""
        for token in tokens:
            follows = bool(self._chain) and self._chain[0][1] == token
            self._chain = self._chain[1:] if follows else []
            self._index.push(token)
        self.epoch = epoch

    def draft(self, look_ahead: int) -> tuple[Expansion, ...]:
        """Make the chain as long as it may be; returns what is new."""
        index, begin = self._index, self._begin
        if index.place < 0:
            return ()
        kept = 0
        while kept < len(self._chain) and self._chain[kept][1] == index.after(kept):
            kept += 1
        del self._chain[kept:]  # the match that they came from ended, and another was found
        new: list[Expansion] = []
        for depth in range(len(self._chain), min(look_ahead, begin.n_left - self.epoch - 1)):
            token = index.after(depth)
            if token in begin.ends or token in begin.banned:
                break
            parent = self._chain[-1][0] if self._chain else ROOT
            new.append(Expansion(parent, self._next_number, 1, ((token, _prob(index.length + depth)),)))
            self._chain.append((self._next_number, token))
            self._next_number += 1
        return tuple(new) if len(new) >= begin.speculation.n_min else self._withdraw(new)

    def _withdraw(self, new: list[Expansion]) -> tuple[Expansion, ...]:
        """They are too few for a micro-batch: they come with the next one, if they still follow then."""
        if new:
            del self._chain[-len(new) :]
        return ()


def _prob(length: int) -> float:
    """How sure it is of a draft token behind a match of so many tokens."""
    n = min(length, _LONGEST)
    return n / (n + _HALF_SURE)
