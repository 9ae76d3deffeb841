"""Texts for simulations: the target's tokens, and the draft's candidates at each position.

They are recorded from a real pair of models (`ggpipe record`), with real confidences and real mistakes, or synthetic
with a given agreement, where no models are at hand.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, Protocol

from ggpipe.cluster.recording import RecordedPrompt
from ggpipe.core.draft_messages import Candidates
from ggpipe.errors import SettingError, UsageError

Confidence = Literal["calibrated", "overconfident", "underconfident", "never-right"]


class SimulatedTokens(Protocol):
    """One request: the target's tokens, and the draft's candidates."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    """What the target generates after the prompt."""

    def candidates(self, position: int, after_rejection: bool) -> Candidates:
        """The draft's candidates at output[position], which may lie past the output's end.

        `after_rejection`: the path holds a draft token that the target rejects. The draft is about as confident there,
        and its candidates mean nothing.
        """


class RecordedTokens:
    """A recording played back; the text repeats when more of it is wanted than was recorded.

    After a rejected draft token come the candidates that were recorded after the best rejected one at the position
    before, however far back the rejected token lies. On the demo pair the draft is as confident after a rejected token
    as on the text. Texts that repeat themselves are the exception: there it is up to a fifth less confident, and
    recovers within about 3 tokens.
    """

    def __init__(
        self,
        prompt: tuple[int, ...],
        text: Sequence[int],
        candidates: Sequence[Candidates],
        after_rejection: Sequence[Candidates],
        n_text: int | None = None,
    ) -> None:
        """`candidates[i]`: for text[i]. `after_rejection[i]`: for position i + 1, had the draft's best rejected
        candidate been taken at i. `n_text`: tokens of text; None takes as many as were recorded.
        """
        if not len(text) == len(candidates) == len(after_rejection) > 0:
            raise ValueError("a recording has candidates for each token of its text, and at least one token")
        n_text = len(text) if n_text is None else n_text
        self.prompt = prompt
        self.output = (tuple(text) * -(-n_text // len(text)))[:n_text]
        self._on_text, self._after_rejection = tuple(candidates), tuple(after_rejection)
        self._n = len(text)

    def candidates(self, position: int, after_rejection: bool) -> Candidates:
        """See `SimulatedTokens`."""
        if after_rejection:
            return self._after_rejection[(position - 1) % self._n]
        return self._on_text[position % self._n]


# Fitted to the demo pair at temperature 0.8 (4 prompts, 256 tokens each): the best candidate's probability has a Beta
# distribution of this concentration; the k-th further candidate takes 1 / (2.5 + 1.6 k) of the probability that the
# candidates before it leave; neither is correlated from position to position.
_CONCENTRATION = 2.8
_SHARE = (2.5, 1.6)
_N_VOCAB = 32000
_SHARPNESS: dict[Confidence, float] = {
    "calibrated": 1.0,
    "overconfident": 2.0,
    "underconfident": 0.5,
    "never-right": 1.0,
}


class SyntheticTokens:
    """A synthetic text, the same for the same seed.

    `agreement` is the share of positions where the draft's best candidate is the target's token, to one token in
    `n_text`. Best probabilities have a Beta distribution with that mean, stretched a little to meet it exactly, and the
    target's token is drawn from the candidates' probabilities, so these are calibrated.

    "overconfident" and "underconfident" drafts agree as often but give other probabilities: p^s over the sum of p^s of
    all candidates at the position, with s = 2 and s = 1/2 (as a softmax at temperature 1/s).

    A "never-right" draft is as confident as a calibrated one of this agreement, and none of its candidates is ever the
    target's token.
    """

    def __init__(
        self,
        agreement: float,
        n_prompt: int,
        n_text: int,
        seed: int = 0,
        confidence: Confidence = "calibrated",
        n_candidates: int = 8,
    ) -> None:
        """Raises UsageError where these make no sense."""
        if not 0 <= agreement <= 1:
            raise SettingError("acceptance", f"must be a share between 0 and 1, got {agreement}")
        for name, value, least in (("n_prompt", n_prompt, 1), ("n_text", n_text, 1), ("n_candidates", n_candidates, 2)):
            if value < least:
                raise UsageError(f"{name} must be at least {least}, got {value}")
        if confidence not in _SHARPNESS:
            raise UsageError(f"confidence must be one of {', '.join(_SHARPNESS)}, got {confidence}")
        rng = random.Random(seed)
        self.prompt = tuple(rng.randrange(_N_VOCAB) for _ in range(n_prompt))
        best = _best_probs(agreement, n_text, rng)
        agrees = _draw(best, rng)
        text: list[int] = []
        on_text: list[Candidates] = []
        for p, is_best in zip(best, agrees, strict=True):
            probs = _series(p, n_candidates)
            ids = rng.sample(range(_N_VOCAB), n_candidates + 1)  # the last one stands for all other tokens
            drawn = (
                0 if is_best else rng.choices(range(1, n_candidates + 1), (*probs[1:], max(1 - sum(probs), 1e-9)))[0]
            )
            text.append(ids[-1 if confidence == "never-right" else drawn])
            on_text.append(tuple(zip(ids, _sharpened(probs, _SHARPNESS[confidence]), strict=False)))
        self.output = tuple(text)
        self._on_text = tuple(on_text)
        rng.shuffle(on_text)
        self._after_rejection = tuple(on_text)

    def candidates(self, position: int, after_rejection: bool) -> Candidates:
        """See `SimulatedTokens`. After a rejected draft token: the candidates of some other position."""
        own = self._after_rejection if after_rejection else self._on_text
        return own[position % len(own)]


def _best_probs(mean: float, n: int, rng: random.Random) -> list[float]:
    """Probabilities of best candidates with this mean."""
    if mean == 0:
        return [1 / _N_VOCAB] * n  # it knows nothing
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
    """True with these probabilities, and in total as often as their sum (systematic sampling in random order)."""
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


def _sharpened(probs: Sequence[float], sharpness: float) -> list[float]:
    if sharpness == 1:
        return list(probs)
    powers = [p**sharpness for p in probs]
    total = sum(powers)
    return [power / total for power in powers]


def recorded(recorded_prompt: RecordedPrompt, n_text: int | None = None, n_prompt: int | None = None) -> RecordedTokens:
    """A recorded prompt as a request with `n_text` tokens; None: as many as were recorded. `n_prompt`: tokens of the
    prompt, which repeats where more than it has are wanted."""
    prompt = recorded_prompt.prompt
    if n_prompt is not None:
        prompt = (prompt * -(-n_prompt // len(prompt)))[:n_prompt]
    return RecordedTokens(
        prompt, recorded_prompt.text, recorded_prompt.candidates, recorded_prompt.after_rejection, n_text
    )
