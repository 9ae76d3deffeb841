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

    def candidates(self, position: int, after_rejection: bool, drafter: int = 0) -> Candidates:
        """A draft model's candidates at output[position], which may lie past the output's end. `drafter`: its id.

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

    def candidates(self, position: int, after_rejection: bool, drafter: int = 0) -> Candidates:
        """See `SimulatedTokens`. A recording is of one draft model."""
        if after_rejection:
            return self._after_rejection[(position - 1) % self._n]
        return self._on_text[position % self._n]


# Fitted to the demo pair at temperature 0.8 (4 prompts, 256 tokens each): the best candidate's probability has a Beta
# distribution of this concentration; the k-th further candidate takes 1 / (2.5 + 1.6 k) of the probability that the
# candidates before it leave; neither is correlated from position to position.
_CONCENTRATION = 2.8
_SHARE = (2.5, 1.6)
SECOND_CHOICE = 1 / sum(_SHARE)
"""How often a draft's second choice is right where its best candidate is not."""
_N_VOCAB = 32000
_SPAN = 32  # tokens that are copied at a time
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

    Where the best candidate is wrong, the second one is right with a chance of `second_choice`, as far as it stays less
    probable than the best one.

    "overconfident" and "underconfident" drafts agree as often but give other probabilities: p^s over the sum of p^s of
    all candidates at the position, with s = 2 and s = 1/2 (as a softmax at temperature 1/s).

    Further draft models (`others`) are calibrated as well. At a share `overlap` of the positions they are as confident
    as the first one, and right or wrong with it. At the others they have nothing to do with it, and where both are
    wrong they name different tokens.

    A share `repeats` of the text is copied from earlier text and the prompt, in spans of `_SPAN` tokens, which n-grams
    find.

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
        others: Sequence[float] = (),
        overlap: float = 0.5,
        repeats: float = 0.0,
        second_choice: float = SECOND_CHOICE,
    ) -> None:
        """Raises UsageError where these make no sense."""
        for name, share in (("acceptance", agreement), ("overlap", overlap), ("second_choice", second_choice)):
            if not 0 <= share <= 1:
                raise SettingError(name, f"must be a share between 0 and 1, got {share}")
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
        drawn_at: list[tuple[list[int], int]] = []
        for p, is_best in zip(best, agrees, strict=True):
            probs = _series(p, n_candidates, second_choice)
            ids = rng.sample(range(_N_VOCAB), n_candidates + 1)  # the last one stands for all other tokens
            drawn = _drawn(probs, is_best, rng)
            text.append(ids[-1 if confidence == "never-right" else drawn])
            drawn_at.append((ids, drawn))
            on_text.append(tuple(zip(ids, _sharpened(probs, _SHARPNESS[confidence]), strict=False)))
        after_rejection = on_text.copy()
        rng.shuffle(after_rejection)
        drafts = [on_text]
        for other in others:
            rights = _right_with(best, agrees, other, overlap, rng)
            drafts.append([])
            for (ids, first), token, (p, is_best, is_shared) in zip(drawn_at, text, rights, strict=True):
                probs = _series(p, n_candidates, second_choice)
                is_same = is_shared and is_best == (first == 0)
                drawn = first if is_same else _drawn(probs, is_best, rng)
                if not is_same:
                    ids = rng.sample(range(_N_VOCAB), n_candidates + 1)
                    if confidence != "never-right":
                        ids = _with_token(ids, drawn, token)
                drafts[-1].append(tuple(zip(ids, _sharpened(probs, _SHARPNESS[confidence]), strict=False)))
        if repeats:
            text, drafts = _repeating(self.prompt, text, drafts, repeats, rng)
        self.output = tuple(text)
        self._on_text = tuple(map(tuple, drafts))
        self._after_rejection = (tuple(after_rejection), *(_shuffled(own, rng) for own in self._on_text[1:]))

    def candidates(self, position: int, after_rejection: bool, drafter: int = 0) -> Candidates:
        """See `SimulatedTokens`. After a rejected draft token: the candidates of some other position."""
        own = (self._after_rejection if after_rejection else self._on_text)[drafter]
        return own[position % len(own)]


def _drawn(probs: Sequence[float], is_best: bool, rng: random.Random) -> int:
    """Which of the candidates with these probabilities the target's token is; past the last: another token."""
    if is_best:
        return 0
    return rng.choices(range(1, len(probs) + 1), (*probs[1:], max(1 - sum(probs), 1e-9)))[0]


def _with_token(ids: Sequence[int], at: int, token: int) -> list[int]:
    """The tokens with one of them at a place of its own, and nowhere else."""
    found = [own if own != token else ids[at] for own in ids]
    found[at] = token
    return found


def _shuffled(own: Sequence[Candidates], rng: random.Random) -> tuple[Candidates, ...]:
    return tuple(rng.sample(own, len(own)))


def _right_with(
    best: Sequence[float], agrees: Sequence[bool], mean: float, overlap: float, rng: random.Random
) -> list[tuple[float, bool, bool]]:
    """For each position: the probability of a further draft model's best candidate, whether that is the target's token,
    and whether this goes with the first one's, which gave its best candidates the probabilities `best`."""
    own = _best_probs(mean, len(best), rng)
    shared = _draw([overlap] * len(best), rng) if 0 < overlap < 1 else [overlap == 1] * len(best)
    at = [i for i, is_shared in enumerate(shared) if is_shared]
    by_first = sorted(at, key=lambda i: best[i])
    for i, prob in zip(by_first, sorted(own[i] for i in at), strict=True):  # as confident, by rank
        own[i] = prob
    found = []
    for i, is_right in enumerate(_draw(own, rng)):
        if shared[i]:  # one roll of the dice decides for both
            roll = rng.uniform(0, best[i]) if agrees[i] else rng.uniform(best[i], 1)
            is_right = roll < own[i] or (agrees[i] and own[i] >= best[i])
        found.append((own[i], is_right, shared[i]))
    return found


def _repeating(
    prompt: Sequence[int], text: Sequence[int], drafts: Sequence[list[Candidates]], share: float, rng: random.Random
) -> tuple[list[int], list[list[Candidates]]]:
    """The text with a share of it copied from what comes before, and the candidates that name it as they did."""
    tokens, candidates = [*prompt], [list(own) for own in drafts]
    n_prompt, source = len(prompt), None
    for i, token in enumerate(text):
        if i % _SPAN == 0:
            room = len(tokens) - _SPAN
            source = rng.randrange(room) if room > 0 and rng.random() < share else None
        if source is not None:
            copied = tokens[source + i % _SPAN]
            for own in candidates:
                own[i] = tuple((copied if one == token else token if one == copied else one, p) for one, p in own[i])
            token = copied
        tokens.append(token)
    return tokens[n_prompt:], candidates


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


def _series(best: float, n: int, second: float) -> list[float]:
    """A best candidate's probability and those of n - 1 further ones, falling. `second`: share of what the best one
    leaves that the second one takes."""
    probs, rest = [best], 1 - best
    for k in range(1, n):
        probs.append(min(probs[-1], rest * second if k == 1 else rest / (_SHARE[0] + _SHARE[1] * k)))
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
