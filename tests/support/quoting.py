"""Outputs that copy their prompt."""

from __future__ import annotations

import random

from ggpipe.core.draft_messages import Candidates
from ggpipe.sim.text import SyntheticTokens

_N_VOCAB = 32000


class Quote:
    """A prompt with a passage of `n` tokens, and an output that repeats it. In the output, each `changed`-th token is
    another one (0: none is). A draft model agrees with the output as often as with `SyntheticTokens`."""

    def __init__(self, n: int, changed: int = 0, agreement: float = 0.7, seed: int = 0) -> None:
        rng, self._text = random.Random(seed), SyntheticTokens(agreement, 8, n, seed)
        passage = [rng.randrange(_N_VOCAB) for _ in range(n)]
        self.prompt = (*self._text.prompt, *passage, *self._text.prompt[:4])
        if changed:
            passage[changed - 1 :: changed] = [rng.randrange(_N_VOCAB) for _ in passage[changed - 1 :: changed]]
        self.output = tuple(passage)

    def candidates(self, position: int, after_rejection: bool, drafter: int = 0) -> Candidates:
        """See `SimulatedTokens`."""
        found = self._text.candidates(position, after_rejection, drafter)
        if after_rejection or position >= len(self.output):
            return found
        old, new = self._text.output[position], self.output[position]
        swapped = {old: new, new: old}
        return tuple((swapped.get(token, token), prob) for token, prob in found)
