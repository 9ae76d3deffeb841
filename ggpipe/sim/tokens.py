"""Where the simulator's tokens come from: what the target writes, and what the draft thinks of each place of it.

Either recorded from a real pair of models (`ggpipe record`), so that any policy meets real confidences and real
mistakes, or made up for a given acceptance, where no models are at hand.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, Protocol

from ggpipe.errors import UsageError

Candidates = tuple[tuple[int, float], ...]
"""The draft's best tokens for a place with their probabilities, the most probable first."""

Confidence = Literal["calibrated", "overconfident", "underconfident"]


class Tokens(Protocol):
    """One request: what the target writes, and what the draft thinks of it."""

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    """What the target generates after the prompt."""

    def candidates(self, place: int, lost: bool) -> Candidates:
        """What the draft says at text[place], which may lie past the text's end.

        `lost`: the path has left the text before, by a wrong guess. What the draft says there is about as confident,
        and means nothing.
        """


class RecordedTokens:
    """A recording played back; the text goes round when more of it is wanted than was recorded.

    After a wrong guess come the candidates that the draft really gave after a wrong guess at the place before: those
    after its best wrong one, and the same however long ago the mistake was. On the demo pair the draft is as sure of
    itself after a mistake as before, but for texts that repeat themselves: there up to a fifth less, recovering within
    some 3 tokens.
    """

    def __init__(
        self,
        prompt: tuple[int, ...],
        text: Sequence[int],
        candidates: Sequence[Candidates],
        astray: Sequence[Candidates],
        n_text: int | None = None,
    ) -> None:
        """`candidates[i]`: for text[i]. `astray[i]`: for the place after it, had the draft's best wrong guess been
        taken at i. `n_text`: tokens of text; None takes as many as were recorded.
        """
        if not len(text) == len(candidates) == len(astray) > 0:
            raise ValueError("a recording has candidates for each token of its text, and at least one token")
        n_text = len(text) if n_text is None else n_text
        self.prompt = prompt
        self.text = (tuple(text) * -(-n_text // len(text)))[:n_text]
        self._on_text, self._astray = tuple(candidates), tuple(astray)
        self._n = len(text)

    def candidates(self, place: int, lost: bool) -> Candidates:
        """See `Tokens`."""
        return self._astray[(place - 1) % self._n] if lost else self._on_text[place % self._n]


# What follows looks like the demo pair at temperature 0.8 (4 prompts, 256 tokens each): the best candidate's
# probability has a Beta distribution of this concentration; of what the candidates before leave, the k-th further one
# takes a share of 1 / (2.5 + 1.6 k); neither is correlated from place to place.
_CONCENTRATION = 2.8
_SHARE = (2.5, 1.6)
_N_VOCAB = 32000
_SHARPNESS: dict[Confidence, float] = {"calibrated": 1.0, "overconfident": 2.0, "underconfident": 0.5}


class SyntheticTokens:
    """Made up, the same for the same seed.

    `acceptance` is the share of places where the draft's best candidate is the target's token, to one place in
    `n_text`. Best probabilities have a Beta distribution with that mean, stretched a little to meet it exactly, and
    the target's token is drawn from the candidates' probabilities, so these mean what they say ("calibrated").

    "overconfident" and "underconfident" drafts are right just as often, but tell other probabilities: p^s over the sum
    of p^s of all candidates at the place, with s = 2 and s = 1/2 (as a softmax at temperature 1/s).
    """

    def __init__(
        self,
        acceptance: float,
        n_prompt: int,
        n_text: int,
        seed: int = 0,
        confidence: Confidence = "calibrated",
        n_candidates: int = 8,
    ) -> None:
        """Raises UsageError where these make no sense."""
        if not 0 <= acceptance <= 1:
            raise UsageError(f"acceptance is a share between 0 and 1; {acceptance} is not")
        if n_prompt < 1 or n_text < 1 or n_candidates < 2:
            raise UsageError("made-up text has a token of prompt and one of text at least, and two candidates a place")
        if confidence not in _SHARPNESS:
            raise UsageError(f"confidence {confidence}: known kinds are {', '.join(_SHARPNESS)}")
        rng = random.Random(seed)
        self.prompt = tuple(rng.randrange(_N_VOCAB) for _ in range(n_prompt))
        best = _best_probs(acceptance, n_text, rng)
        right = _draw(best, rng)
        text: list[int] = []
        places: list[Candidates] = []
        for p, is_right in zip(best, right, strict=True):
            probs = _series(p, n_candidates)
            ids = rng.sample(range(_N_VOCAB), n_candidates + 1)  # the last one stands for all that are no candidates
            drawn = (
                0 if is_right else rng.choices(range(1, n_candidates + 1), (*probs[1:], max(1 - sum(probs), 1e-9)))[0]
            )
            text.append(ids[drawn])
            places.append(tuple(zip(ids, _told(probs, _SHARPNESS[confidence]), strict=False)))
        self.text = tuple(text)
        self._places = tuple(places)
        elsewhere = list(places)
        rng.shuffle(elsewhere)
        self._lost = tuple(elsewhere)

    def candidates(self, place: int, lost: bool) -> Candidates:
        """See `Tokens`. On lost paths: those of some other place."""
        places = self._lost if lost else self._places
        return places[place % len(places)]


def _best_probs(mean: float, n: int, rng: random.Random) -> list[float]:
    """Probabilities of best candidates with this mean."""
    if mean == 0:
        return [1 / _N_VOCAB] * n  # it knows nothing, and says so
    if mean == 1:
        return [1.0] * n
    alpha, beta = _CONCENTRATION * mean, _CONCENTRATION * (1 - mean)
    drawn = [min(max(rng.betavariate(alpha, beta), 1e-9), 1 - 1e-9) for _ in range(n)]
    low, high = -40.0, 40.0  # the binary logarithm of the power that makes the mean exact
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(p ** (2**middle) for p in drawn) > n * mean else (low, middle)
    return [max(p ** (2**low), 1 / _N_VOCAB) for p in drawn]


def _draw(probs: Sequence[float], rng: random.Random) -> list[bool]:
    """True with these probabilities, and as often in all as they add up to (systematic sampling in random order)."""
    if min(probs) == 1:
        return [True] * len(probs)
    if max(probs) == 1 / _N_VOCAB:
        return [False] * len(probs)
    order = list(range(len(probs)))
    rng.shuffle(order)
    drawn = [False] * len(probs)
    total = rng.random()
    for i in order:
        drawn[i] = int(total + probs[i]) > int(total)
        total += probs[i]
    return drawn


def _series(best: float, n: int) -> list[float]:
    """A best candidate's probability and those of n - 1 further ones, falling."""
    probs, rest = [best], 1 - best
    for k in range(1, n):
        probs.append(min(probs[-1], rest / (_SHARE[0] + _SHARE[1] * k)))
        rest -= probs[-1]
    return probs


def _told(probs: Sequence[float], sharpness: float) -> list[float]:
    if sharpness == 1:
        return list(probs)
    powers = [p**sharpness for p in probs]
    total = sum(powers)
    return [power / total for power in powers]
