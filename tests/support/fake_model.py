"""A language model for tests of the core: its next token is a hash of all tokens before."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from ggpipe.core.request import Finish

END = 0  # the token that ends a text

Tokens = tuple[int, ...]


def is_below(path: Tokens, text: Tokens) -> bool:
    """It begins with the text, and goes on."""
    return len(path) > len(text) and path[: len(text)] == text


def chance(*what: object) -> int:
    """A number that depends on its arguments and on nothing else."""
    return zlib.crc32(repr(what).encode())


@dataclass(frozen=True)
class FakeModel:
    """Its logits are a hash of all tokens before; with a small vocabulary, outputs end soon."""

    n_vocab: int
    seed: int = 0
    draws: bool = False
    """The next token is drawn, from the best three: by the request and the number of its tokens, as a sampler does."""

    def ranking(self, history: Tokens, n: int) -> Tokens:
        """The best `n` tokens."""
        best = chance(self.seed, history)
        return tuple((best + i) % self.n_vocab for i in range(min(n, self.n_vocab)))

    def rank(self, request: int, n_accepted: int) -> int:
        """Which of the best tokens is drawn."""
        return chance(self.seed, request, n_accepted) % min(3, self.n_vocab) if self.draws else 0

    def next(self, request: int, history: Tokens, n_prompt: int) -> int:
        return self.ranking(history, 3)[self.rank(request, len(history) - n_prompt)]

    def text(self, request: int, prompt: Tokens, n_predict: int, n_ctx: int) -> tuple[list[int], Finish]:
        """What plain decoding gives, one token after the other, and why it ends. The end token is not part of it."""
        tokens = prompt
        while len(tokens) - len(prompt) != n_predict:
            if len(tokens) > n_ctx:  # the last token has no cell to be computed in
                return list(tokens[len(prompt) :]), Finish.CONTEXT_FULL
            token = self.next(request, tokens, len(prompt))
            if token == END:
                return list(tokens[len(prompt) :]), Finish.END_OF_TEXT
            tokens += (token,)
        return list(tokens[len(prompt) :]), Finish.LENGTH
