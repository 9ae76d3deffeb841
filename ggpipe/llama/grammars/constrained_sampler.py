"""Drawing tokens that fit a grammar."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ggpipe.core.messages import RowLogits, Want, WantKind
from ggpipe.llama.grammars.draft_check import DraftCheck
from ggpipe.llama.grammars.grammar import Grammar
from ggpipe.llama.sampler import Sampler

_LEAST, _MORE = 128, 4  # candidates that the last rank sends: at least, and times those of the sampler alone


class NoTokenFits(Exception):
    """The grammar wants a text that the vocabulary cannot write, or that the sampler's settings forbid."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token that was drawn."""

    token: int
    is_second: bool = False
    """The one drawn before did not fit the grammar."""


class ConstrainedSampler:
    """Draws one request's tokens as a grammar wants them, in llama.cpp's way: first without the grammar; where that
    token does not fit, once more among those that do."""

    def __init__(self, own: Sampler, grammar: Grammar) -> None:
        """`own`: the sampler of the same request, which knows its prompt."""
        self._own = own
        self._grammar = grammar
        self._is_rejected = False
        """A token was drawn that does not fit, and the whole row is awaited."""
        self.banned = own.banned
        self.seed = own.seed
        self.want_grows = own.want_grows
        self.draft_check = DraftCheck(grammar)
        """Says which draft tokens fit."""

    def want(self) -> Want:
        """What drawing the next token takes: a few more than without the grammar, and the row is kept."""
        want = self._own.want()
        n = want.n if want.kind is WantKind.FULL else max(_MORE * want.n, _LEAST)
        return replace(want, n=n, keeps=want.kind is WantKind.TOP)

    def sample(self, row: RowLogits) -> Drawn | None:
        """Draw from a row that was asked for by `want`; None: the whole row is needed, with which to call this again.

        Raises NoTokenFits.
        """
        if not self._is_rejected:
            token = self._own.sample(row)
            if self._grammar.allowed([token])[0]:
                return Drawn(token)
        self._is_rejected = True
        fitting = self._fitting(row)
        if fitting is None:
            return None
        self._is_rejected = False
        if not np.isfinite(fitting.logits).any():
            raise NoTokenFits
        return Drawn(self._own.sample(fitting, row), is_second=True)

    def _fitting(self, row: RowLogits) -> RowLogits | None:
        """The row's tokens that fit, or the best ones of them: as many as the sampler looks at. None: this row has not
        as many. Where the whole vocabulary has not as many, others fill up, with logits of minus infinity."""
        want = self._own.want()
        logits = np.array(row.logits, np.float32)
        if row.ids is not None:
            ids = np.asarray(row.ids, np.int32)
            fits = self._grammar.allowed(ids) & np.isfinite(logits) & ~np.isin(ids, self.banned)
            if np.count_nonzero(fits) < want.n:
                return None
            return replace(row, ids=tuple(ids[fits].tolist()), logits=tuple(logits[fits].tolist()))
        logits[list(self.banned)] = -np.inf
        n = want.n if want.kind is WantKind.TOP else len(logits)
        found = self._grammar.best(logits, n)
        masked = np.full_like(logits, -np.inf)
        masked[found] = logits[found]
        if want.kind is WantKind.FULL:
            return replace(row, logits=masked)
        order = np.lexsort((found, -logits[found]))
        ids = found[order][:n]
        if len(ids) < n:
            ids = np.concatenate((ids, np.flatnonzero(np.isneginf(masked))[: n - len(ids)].astype(np.int32)))
        return replace(row, ids=tuple(ids.tolist()), logits=tuple(masked[ids].tolist()))

    @property
    def probs(self) -> tuple[tuple[int, float], ...]:
        """As of the sampler."""
        return self._own.probs

    def accept(self, tokens: Iterable[int]) -> None:
        """Drawn tokens. Raises NoTokenFits for one that does not fit."""
        for token in tokens:
            if not self._grammar.accept(token):
                raise NoTokenFits
            self.draft_check.accept(token)
            self._own.accept((token,))

    def resume(self, tokens: Sequence[int], second: Collection[int]) -> None:
        """Tokens that another process drew with the same seed and grammar: go on as if they were drawn here. `second`:
        the places of those that were drawn at the second attempt. Raises NoTokenFits for those that do not fit."""
        for place, token in enumerate(tokens):
            if place in second:
                self._own.skip(token)
            if not self._grammar.accept(token):
                raise NoTokenFits
            self.draft_check.accept(token)
            self._own.resume((token,))

    def check(self, tokens: Iterable[int]) -> None:
        """Raises NoTokenFits where the text cannot begin with these tokens."""
        grammar = self._grammar.clone()
        fits = all(grammar.accept(token) for token in tokens)
        grammar.close()
        if not fits:
            raise NoTokenFits

    def replay_want(self, _: int) -> Want:
        """As `Sampler.replay_want`: whole rows, for tokens that were drawn again."""
        return Want(WantKind.FULL, banned=self._own.want().banned)

    def replay(self, row: RowLogits, token: int, is_second: bool) -> None:
        """As `resume`, for one token and the row that it was drawn from."""
        self._own.sample(row)
        if is_second and (fitting := self._fitting(row)) is not None:
            self._own.sample(fitting)
        self.accept((token,))

    def close(self) -> None:
        """Free it. A second call does nothing."""
        self.draft_check.close()
        self._grammar.close()
        self._own.close()
