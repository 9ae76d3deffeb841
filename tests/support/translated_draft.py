"""A draft model with other tokens than the fake model's, over a fake pipeline."""

from __future__ import annotations

import math

from ggpipe.core.draft_messages import ROOT, MicroBatch
from ggpipe.core.drafters.base import DraftEvent
from ggpipe.core.drafters.translated import TranslatedModel
from ggpipe.core.messages import LogitsRequest, Row, RowLogits, Run
from ggpipe.core.request import Limits
from support.fake_drafts import FakeDraftModel, RealDraft
from support.fake_model import END, Tokens
from support.translation import Words, WordTranslator

_N_WORDS = 1300
"""Prompts have tokens that the fake model never writes."""
_END = b"\xff"
_LETTERS = b"abcdefghi"
_OWN = (b"ab", b"abc", b"ba", b" ab", b"ef", b"dde", b" c", b"ihg", b"  ", b"a ")


def _word(number: int) -> bytes:
    word = b""
    while number or not word:
        number, letter = divmod(number, len(_LETTERS))
        word = _LETTERS[letter : letter + 1] + word
    return b" " + word


_MOST_OWN = 5
"""Tokens of the draft model for one of the target, at most."""
_SINGLE = (_END, b" ", *(bytes([letter]) for letter in _LETTERS))
TARGET = Words((*_SINGLE, *map(_word, range(_N_WORDS))))
OWN = Words((*_SINGLE, *_OWN))


class TranslatedDraft(RealDraft):
    """As `RealDraft`, but the draft model works in tokens of its own."""

    def __init__(self, limits: Limits, n_stages: int, model: FakeDraftModel, id: int = 0) -> None:
        super().__init__(limits, n_stages, model, id=id)
        assert END == 0
        self._inner = self.drafter
        self._translated = TranslatedModel(self._inner, id, WordTranslator(TARGET, OWN, frozenset({END})))

    def _answer(self, i: int, row: Row, want: LogitsRequest, history: Tokens) -> RowLogits:
        found: dict[int, float] = {}
        for n_begun in range(min(len(history), _MOST_OWN)):  # tokens of its own for the next one of the target
            before, begun = history[: len(history) - n_begun], history[len(history) - n_begun :]
            for token, prob in self.model.candidates(TARGET.tokens(OWN.text(before)), want.n):
                own = OWN.tokens(TARGET.text((token,)))
                if len(own) > n_begun and own[:n_begun] == begun:
                    found[own[n_begun]] = found.get(own[n_begun], 0.0) + prob
        ranked = sorted(found.items(), key=lambda one: -one[1])
        return RowLogits(i, tuple(token for token, _ in ranked), tuple(math.log(min(p, 1.0)) for _, p in ranked), 0.0)

    def handle(self, event: DraftEvent) -> None:
        self.now += 0.001
        for action in self._translated.handle(event, self.now):
            self._act(action)
        self._translated.validate()
        self._inner.validate()

    def _submitted(self, run: Run) -> None:
        self.pipeline.submit(run)

    def _sent(self, batch: MicroBatch) -> None:
        assert batch.expansions or batch.complete, "nothing in it"
        text = self.text[batch.request]
        assert len(text) == len(self.begun[batch.request].prompt) + batch.epoch
        for expansion in batch.expansions:
            path = text if expansion.parent == ROOT else self.paths[batch.request, expansion.parent]
            assert path[: len(text)] == text, "a draft token that is known to be rejected"
            for i, (token, _) in enumerate(expansion.candidates[: expansion.n]):
                assert token != END
                self.paths[batch.request, expansion.first + i] = (*path, token)
        self.batches.append(batch)
