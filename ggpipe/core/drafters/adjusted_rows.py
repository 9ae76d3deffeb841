"""Draft models' logits are adjusted as the target's are before a token is chosen: some tokens are biased, and others
penalized because they were written lately.

A draft model that does not know of this names the very tokens that the target is made to avoid.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from msgspec import structs

from ggpipe.core.draft_messages import Adjustments, Dry, Penalties
from ggpipe.core.messages import RowLogits

N_MORE = 12
"""Further candidates to ask for, since penalties may lower the best ones."""
_LEAST_SUM, _MOST = 1e-30, 1e30
_LOG_OF_MOST, _LEAST_BASE = 88.7228391, 1.000001
"""As llama.cpp has it: of the largest number that DRY's penalty may reach, and the base from which on it grows."""


class _Recent:
    """The last tokens, which are penalized."""

    def __init__(self, penalties: Penalties, tokens: Iterable[int]) -> None:
        self._penalties = penalties
        self._last = collections.deque(tokens, penalties.n_last)
        self._counts = collections.Counter(self._last)

    def accept(self, token: int) -> None:
        if len(self._last) == self._penalties.n_last:
            self._counts[self._last[0]] -= 1
        self._last.append(token)
        self._counts[token] += 1

    def penalize(self, logits: dict[int, float], path: Sequence[int]) -> None:
        own = self._penalties
        path = path[-own.n_last :]
        too_old = list(itertools.islice(self._last, max(len(self._last) + len(path) - own.n_last, 0)))
        for token, logit in logits.items():
            if n := self._counts[token] + path.count(token) - too_old.count(token):
                repeated = logit / own.repeat if logit > 0 else logit * own.repeat
                logits[token] = repeated - n * own.frequency - own.presence


class _Repetitions:
    """What has been written before in the same words, whose next tokens are penalized."""

    def __init__(self, dry: Dry, tokens: Iterable[int]) -> None:
        self._dry = dry
        self._tokens = list(tokens)[-dry.n_last :]
        self._breakers = frozenset(dry.breakers)
        self._most_exponent = _LOG_OF_MOST // math.log(dry.base) if dry.base > _LEAST_BASE else math.inf

    def accept(self, token: int) -> None:
        self._tokens.append(token)
        if len(self._tokens) > 2 * self._dry.n_last:
            del self._tokens[: -self._dry.n_last]

    def penalize(self, logits: dict[int, float], path: Sequence[int]) -> None:
        dry = self._dry
        for token, n in self._lengths([*self._tokens, *path][-dry.n_last :]).items():
            if token in logits and token not in self._breakers:
                logits[token] -= dry.multiplier * dry.base ** min(n - dry.allowed_length, self._most_exponent)

    def _lengths(self, tokens: list[int]) -> dict[int, int]:
        """By token: how many of the last tokens have been written just before it."""
        found: dict[int, int] = {}
        end = len(tokens) - 1
        longest = next((i for i, token in enumerate(reversed(tokens)) if token in self._breakers), len(tokens))
        if end < self._dry.allowed_length or longest < self._dry.allowed_length:
            return found
        for at in self._places(tokens, end):
            n = 0
            while n < min(longest, at + 1) and tokens[at - n] == tokens[end - n]:
                n += 1
            if n >= max(self._dry.allowed_length, found.get(tokens[at + 1], 0)):
                found[tokens[at + 1]] = n
        return found

    def _places(self, tokens: list[int], end: int) -> Iterator[int]:
        """Where a repetition may end: at the last token, unless none at all is allowed."""
        if not self._dry.allowed_length:
            yield from range(end)
            return
        at = -1
        with contextlib.suppress(ValueError):
            while True:
                at = tokens.index(tokens[end], at + 1, end)
                yield at


class AdjustedRows:
    """Adjusts the rows of one request."""

    def __init__(self, adjustments: Adjustments, tokens: Sequence[int]) -> None:
        """`tokens`: the text so far."""
        self._biases = adjustments.biases
        self._parts: list[_Recent | _Repetitions] = []
        if adjustments.penalties is not None:
            self._parts.append(_Recent(adjustments.penalties, tokens))
        if adjustments.dry is not None:
            self._parts.append(_Repetitions(adjustments.dry, tokens))

    def accept(self, token: int) -> None:
        """The text continues with this token."""
        for part in self._parts:
            part.accept(token)

    def adjusted(self, row: RowLogits, path: Sequence[int], temp: float = 0.0) -> RowLogits:
        """A row as the samplers change it. `path`: the tokens between the text and the row's next token. `temp`: as in
        `LogitsRequest`. Logits that did not come stay as they are."""
        assert row.ids is not None
        logits = self._adjusted_logits(row, path)
        scale = 1 / temp if temp else 1.0
        most = max(row.log_sum_exp, max(logits) * scale)
        sum_before = math.exp(row.log_sum_exp - most)
        weights = [math.exp(logit * scale - most) for logit in logits]
        gains = [weight - math.exp(before * scale - most) for weight, before in zip(weights, row.logits, strict=True)]
        total = max(sum_before + sum(gains), sum(weights), _LEAST_SUM)
        below: dict[int, float] = {}
        if row.below:
            by_id = sorted(zip(row.ids, gains, row.below, strict=True))
            gained = itertools.accumulate((gain for _, gain, _ in by_id), initial=0.0)
            below = {
                id: max(share * sum_before + more, 0.0) / total
                for (id, _, share), more in zip(by_id, gained, strict=False)
            }
        order = sorted(range(len(logits)), key=logits.__getitem__, reverse=True)
        ids = tuple(row.ids[i] for i in order)
        return structs.replace(
            row,
            ids=ids,
            logits=tuple(logits[i] for i in order),
            log_sum_exp=most + math.log(total),
            n_also=0,
            below=tuple(below[id] for id in ids) if below else (),
        )

    def _adjusted_logits(self, row: RowLogits, path: Sequence[int]) -> list[float]:
        assert row.ids is not None
        logits = dict(zip(row.ids, row.logits, strict=True))
        for token, bias in self._biases:
            if token in logits:
                logits[token] += bias
        for part in self._parts:
            part.penalize(logits, path)
        return [max(min(logit, _MOST), -_MOST) for logit in logits.values()]
