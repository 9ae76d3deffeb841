"""Draft models foresee draws: the seed tells which random numbers select the next tokens.

llama.cpp draws a token by adding up the probabilities of the candidates, in their order, until they reach a random
number. The seed decides all of these numbers in advance, and the text stays the target's. So a drafter that knows the
next one, and whose probabilities resemble the target's, names the very token that will be drawn, however many others
are as probable; and it knows when the draw will be an unlikely one (M. Daliri, C. Musco, A. T. Suresh: Coupling without
Communication and Drafter-Invariant Speculative Decoding, 2024).

    place of the number in the drafter's own order          0 ......... u ............ 1
    candidates                                              [   the   ][ a ][ his  ][..]

How far the target's borders are from the drafter's is learned from the tokens that were drawn: their probability is a
mixture of one without the number, and of others for which the number has noise of several widths.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

from ggpipe.core.draft_messages import Candidates, Drawing
from ggpipe.core.messages import RowLogits
from ggpipe.core.random_numbers import RandomNumbers

N_CANDIDATES = 20
"""Of each answer: as many as `min_p` of 0.05 can leave."""
_MOST_NAMED = 8
"""Candidates that are left to choose draft tokens from."""
_NOISE = (0.02, 0.1)
"""Widths of the noise (of a logistic distribution)."""
_KEEPS = 1 - 1 / 128
"""Weight of earlier tokens when one more is judged."""
_PRIOR = 4.0
"""Tokens: as much counts each part of the mixture at first."""
_LEAST = 1e-6
_NOTHING = 0.0, 0.0


class Mixture:
    """Shares of the parts, by how well each has predicted the drawn tokens; the one without the number comes first."""

    def __init__(self) -> None:
        self._counts = [_PRIOR] * (1 + len(_NOISE))

    @property
    def shares(self) -> Sequence[float]:
        """They add up to 1."""
        total = sum(self._counts)
        return [count / total for count in self._counts]

    def learn(self, probabilities: Sequence[float]) -> None:
        """A token was drawn to which the parts gave these probabilities."""
        weights = [share * max(prob, _LEAST) for share, prob in zip(self.shares, probabilities, strict=True)]
        total = sum(weights)
        self._counts = [count * _KEEPS + weight / total for count, weight in zip(self._counts, weights, strict=True)]


class Foresight:
    """Predicts the draws of one request from its seed and a drafter's candidates."""

    def __init__(self, drawing: Drawing, mixture: Mixture) -> None:
        """`mixture`: shared with other requests whose candidates are in the same kind of order; it learns from all."""
        self.drawing = drawing
        self._mixture = mixture
        self._numbers = RandomNumbers(drawing.seed)

    def candidates(self, row: RowLogits, place: int, n: int = _MOST_NAMED) -> Candidates:
        """The `n` most probable tokens that the target may draw after a row, with their probabilities. `place`: random
        numbers that are taken before."""
        tokens, parts = self._parts(row, place)
        shares = self._mixture.shares
        probabilities = [min(sum(map(operator.mul, shares, probs)), 1.0) for probs in zip(*parts, strict=True)]
        found = sorted(zip(tokens, probabilities, strict=True), key=lambda one: -one[1])
        return tuple(found[:n])

    def learn(self, row: RowLogits, place: int, token: int) -> None:
        """The target drew this token."""
        tokens, parts = self._parts(row, place)
        if token in tokens:
            at = tokens.index(token)
            self._mixture.learn([probs[at] for probs in parts])
        else:
            self._mixture.learn([1 - sum(probs) for probs in parts])

    def _parts(self, row: RowLogits, place: int) -> tuple[Sequence[int], list[Sequence[float]]]:
        """The candidates, and their probabilities in each part of the mixture. Tokens that the samplers remove here may
        remain in the target's row, so the first part has them too."""
        assert row.ids is not None
        temp = self.drawing.temp if row.below else 1.0
        plain = [math.exp(logit / temp - row.log_sum_exp) for logit in row.logits]
        whole = zip(row.ids, zip(row.below, plain, strict=True), strict=True) if row.below else ()
        left = dict(whole) or self._left(row)
        number = self._numbers[place]
        borders = [
            (start - number, start + prob - number) for start, prob in (left.get(token, _NOTHING) for token in row.ids)
        ]
        parts: list[Sequence[float]] = [plain]
        for noise in _NOISE:
            total = _logistic((1 - number) / noise) - _logistic(-number / noise)
            parts.append([(_logistic(end / noise) - _logistic(start / noise)) / total for start, end in borders])
        return row.ids, parts

    def _left(self, row: RowLogits) -> dict[int, tuple[float, float]]:
        """The candidates that the samplers leave, with the probability of all those before each, and its own."""
        assert row.ids is not None
        tokens = list(row.ids)
        weights = [math.exp(logit - row.logits[0]) for logit in row.logits]
        rest = max(math.exp(row.log_sum_exp - row.logits[0]) - sum(weights), 0.0)  # of tokens that are not known
        for sampler, value in self.drawing.samplers:
            n = len(weights)
            match sampler:
                case "top_k":
                    n = min(n, int(value))
                    rest = rest if n < value else 0.0
                case "top_p":
                    most = value * (sum(weights) + rest)
                    n = next((i for i, total in enumerate(itertools.accumulate(weights), 1) if total >= most), n)
                case "min_p":
                    n = sum(weight >= value * weights[0] for weight in weights)
                case "temperature":
                    power = 1 / value
                    if rest and weights[-1]:  # as if each of the rest were as probable as the last one
                        rest *= weights[-1] ** (power - 1)
                    weights = [weight**power for weight in weights]
            if n < len(weights):
                tokens, weights, rest = tokens[:n], weights[:n], 0.0
        if not self.drawing.is_sorted:
            order = sorted(range(len(tokens)), key=tokens.__getitem__)
            tokens, weights = [tokens[i] for i in order], [weights[i] for i in order]
        total = sum(weights) + rest
        probs = [weight / total for weight in weights]
        return dict(zip(tokens, zip([0.0, *itertools.accumulate(probs[:-1])], probs, strict=True), strict=True))


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -500 else 0.0
