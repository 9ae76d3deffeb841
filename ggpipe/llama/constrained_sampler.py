"""Drawing tokens that fit a grammar.

As in llama.cpp, a token is drawn without the grammar first, and drawn again among the tokens that fit only if the first
one does not. The best few candidates are enough for the second draw if as many of them fit as the sampler looks at.
Otherwise the whole row is needed: the last rank keeps the rows of such requests (`LogitsRequest.keeps`) until a run
says that they are not needed any more (`Run.kept_from`), and sends one when the head asks for it. Meanwhile, other
requests continue. After that, the head asks for all tokens that fit by name (`LogitsRequest.also`), if they are few.

A second draw takes a second random number. A token therefore says whether it took one (`Token.redrawn`), and resumed
requests skip as many.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.draft_messages import Adjustments, Drawing
from ggpipe.core.messages import LogitsKind, LogitsRequest, RowLogits
from ggpipe.core.random_numbers import RandomNumbers
from ggpipe.errors import Setting, UsageError
from ggpipe.llama.grammar import DraftCheck, Grammar
from ggpipe.llama.sampler import Sampler
from ggpipe.llama.vocab import Vocab

_LEAST, _MORE = 128, 4  # candidates that the last rank sends: at least, and times those of the sampler alone
_WHOLE_ROWS = 16  # that follow one that was needed, where the last rank selects tokens of others
_MOST_NAMED = 2048  # tokens that fit, and are asked for by their names


class NoTokenFits(Exception):
    """The grammar requires output that the vocabulary cannot spell, or that the sampling settings rule out."""


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
        self._is_closed = False
        self._is_rejected = False
        """A token was drawn that does not fit, and the whole row is awaited."""
        self._is_narrow = False
        """The best candidates were too few lately, so all tokens that fit are asked for, where they are not many."""
        self._listed: frozenset[int] | None = None
        """All tokens that fit, when they were listed last; None: they are many, or were not listed."""
        self._is_up_to_date = False
        """That was at this place of the text."""
        self._is_steady = False
        """Whether the last two lists were the same."""
        self._numbers, self._n_drawn = RandomNumbers(own.seed), 0
        """The request's random numbers, and how many are taken."""
        self._n_whole = 0
        """For how many tokens more whole rows are asked for in any case, since one was needed."""
        self._fitting_token: int | None = None
        """The token that was drawn last, until it is accepted."""
        self._asked: tuple[LogitsRequest, frozenset[int] | None, LogitsRequest] | None = None
        """The last of the sampler's wants, the tokens named beside it, and what it was made into."""
        self.banned = own.banned
        self.seed = own.seed
        self.logits_request_grows = own.logits_request_grows
        self.draft_check: DraftCheck = grammar.draft_check()
        """Says which draft tokens fit."""

    @property
    def drawing(self) -> Drawing | None:
        """As `Sampler.drawing`."""
        return self._own.drawing

    @property
    def adjustments(self) -> Adjustments | None:
        """As `Sampler.adjustments`."""
        return self._own.adjustments

    def logits_request(self) -> LogitsRequest:
        """What drawing the next token takes: the row is kept, and a few more come than without the grammar.

        If only few tokens fit, the row has exactly these. Draft tokens' rows get the same set, since it often fits
        after them as well.
        """
        logits_request = self._own.logits_request()
        if logits_request.kind is not LogitsKind.TOP:
            if self._n_whole:
                return LogitsRequest(LogitsKind.FULL, banned=logits_request.banned)
            return structs.replace(logits_request, keeps=logits_request.kind is not LogitsKind.FULL)
        if self._is_narrow and not self._is_steady:
            self._list()
        named = self._listed if self._is_narrow else None
        if self._asked is None or self._asked[0] is not logits_request or self._asked[1] is not named:
            if named is None:
                asked = structs.replace(logits_request, n=max(_MORE * logits_request.n, _LEAST), keeps=True)
            else:
                asked = structs.replace(logits_request, keeps=True, also=tuple(named.union(logits_request.also)))
            self._asked = logits_request, named, asked
        return self._asked[2]

    def _list(self) -> None:
        """List all tokens that fit, where they are not many."""
        if self._is_up_to_date:
            return
        fitting = self._grammar.all(_MOST_NAMED)
        listed = frozenset(fitting.tolist()).difference(self.banned) if fitting is not None else None
        self._is_narrow = listed is not None
        self._is_steady = listed is not None and listed == self._listed
        self._listed = self._listed if self._is_steady else listed
        self._is_up_to_date = True

    @property
    def _few(self) -> frozenset[int] | None:
        """All tokens that fit next, where they were to be asked for."""
        if self._is_narrow:
            self._list()
        return self._listed if self._is_narrow else None

    def sample(self, row: RowLogits) -> Drawn | None:
        """Draw from a row that was asked for by `logits_request`; None: the whole row is needed, with which to call
        this again.

        Raises NoTokenFits.
        """
        if row.ids is not None and self._own.logits_request().kind is LogitsKind.FULL:
            return None  # a draft token's row, submitted when fewer candidates were enough
        self._check_written()
        if not self._is_rejected:
            if self._is_drawn_with_another(row):
                return None
            self._n_drawn += 1
            token, few = self._own.sample(self._without_grammar(row)), self._few
            if self._grammar.fits(token) if few is None else token in few:
                self._fitting_token = token
                return Drawn(token)
        self._is_rejected = True
        is_selected = self._own.logits_request().kind is not LogitsKind.TOP
        fitting = self._fitting(row) if row.ids is None or not is_selected else None
        if fitting is None:
            self._is_narrow, self._n_whole = not is_selected, _WHOLE_ROWS
            return None
        self._is_rejected = False
        if not np.isfinite(fitting.logits).any():
            raise NoTokenFits
        self._n_drawn += 1
        self._fitting_token = self._own.sample(fitting, row)
        return Drawn(self._fitting_token, is_second=True)

    def _is_drawn_with_another(self, row: RowLogits) -> bool:
        """The last rank did not know yet that an earlier token would take two random numbers."""
        is_drawn = row.ids is not None and self._own.logits_request().kind is LogitsKind.DRAWN
        return is_drawn and row.log_sum_exp != self._numbers[self._n_drawn]

    def _check_written(self) -> None:
        """The end of a reasoning is written only where the grammar has room for it."""
        if written := self._own.written:
            try:
                self.check(written)
            except NoTokenFits:
                self._own.write_nothing()

    def _without_grammar(self, row: RowLogits) -> RowLogits:
        """What the last rank would have sent of this row without the grammar."""
        logits_request = self._own.logits_request()
        if row.ids is None or len(row.ids) == logits_request.n or logits_request.kind is not LogitsKind.TOP:
            return row
        others = (
            [place for place in range(logits_request.n, len(row.ids)) if row.ids[place] in logits_request.also]
            if logits_request.also
            else ()
        )
        ids = row.ids[: logits_request.n] + tuple(row.ids[place] for place in others)
        logits = row.logits[: logits_request.n] + tuple(row.logits[place] for place in others)
        return RowLogits(row.row, ids, logits, row.log_sum_exp)

    def _fitting(self, row: RowLogits) -> RowLogits | None:
        """The row's tokens that fit, or the best ones of them: as many as the sampler looks at. None: this row has not
        as many, and may not have all. Where the whole vocabulary has not as many, others fill up, with logits of minus
        infinity."""
        logits_request = self._own.logits_request()
        if row.ids is not None:
            few = self._few
            if few is None:
                allowed = self._grammar.allowed(row.ids).tolist()
                fits = [fits and id not in self.banned for id, fits in zip(row.ids, allowed, strict=True)]
            else:
                fits = [id in few for id in row.ids]
            pairs = list(itertools.compress(zip(row.ids, row.logits, strict=True), fits))
            if sum(fits[: len(row.ids) - row.n_also]) < logits_request.n:
                if few is None or len(pairs) != len(few):
                    return None
                others = itertools.compress(row.ids, (not fits for fits in fits))
                pairs += [(id, -math.inf) for id in itertools.islice(others, max(logits_request.n - len(pairs), 0))]
            found, their_logits = zip(*pairs, strict=True)
            return RowLogits(row.row, found, their_logits, row.log_sum_exp)
        logits = np.array(row.logits, np.float32)
        logits[list(self.banned)] = -np.inf
        n = logits_request.n if logits_request.kind is LogitsKind.TOP else len(logits)
        best = self._grammar.best(logits, n)
        masked = np.full_like(logits, -np.inf)
        masked[best] = logits[best]
        if logits_request.kind is not LogitsKind.TOP:
            return structs.replace(row, logits=masked)
        order = np.lexsort((best, -logits[best]))
        ids = best[order][:n]
        if len(ids) < n:
            ids = np.concatenate((ids, np.flatnonzero(np.isneginf(masked))[: n - len(ids)].astype(np.int32)))
        return structs.replace(row, ids=tuple(ids.tolist()), logits=tuple(masked[ids].tolist()))

    @property
    def probs(self) -> tuple[tuple[int, float], ...]:
        """See `Sampler.logits_request_grows`."""
        return self._own.probs

    def accept(self, tokens: Iterable[int]) -> None:
        """Drawn tokens. Raises NoTokenFits for one that does not fit."""
        for token in tokens:
            if token == self._fitting_token:
                self._grammar.go_on(token)
            elif not self._grammar.accept(token):
                raise NoTokenFits
            self._fitting_token, self._is_up_to_date = None, False
            self._n_whole = max(self._n_whole - 1, 0)
            self.draft_check.accept(token)
            self._own.accept((token,))

    def settle(self) -> None:
        """Do what `accept` and `logits_request` have left for later: when the run is being computed that it would hold
        up. Does nothing when this is closed."""
        if self._is_closed:
            return
        self._grammar.settle()
        if self._is_narrow:
            self._list()

    def resume(self, tokens: Sequence[int], second: Collection[int]) -> None:
        """Tokens that another process drew with the same seed and grammar: continue as if they had been drawn here.
        `second`: the places of those that were drawn at the second attempt. Raises NoTokenFits for those that do not
        fit."""
        for place, token in enumerate(tokens):
            self._n_drawn += 1
            if place in second:
                self._n_drawn += 1
                self._own.skip(token)
            if not self._grammar.accept(token):
                raise NoTokenFits
            self.draft_check.accept(token)
            self._own.resume((token,))

    def check(self, tokens: Iterable[int]) -> None:
        """Advance by these tokens. Raises NoTokenFits if the grammar does not allow them."""
        grammar = self._grammar.clone()
        fits = all(grammar.accept(token) for token in tokens)
        grammar.close()
        if not fits:
            raise NoTokenFits

    def replay_logits_request(self, _: int) -> LogitsRequest:
        """As `Sampler.replay_logits_request`: whole rows, for tokens that were drawn again."""
        return LogitsRequest(LogitsKind.FULL, banned=self._own.logits_request().banned)

    def replay(self, row: RowLogits, token: int, is_second: bool) -> None:
        """As `resume`, for one token and the row that it was drawn from."""
        self._check_written()
        self._own.sample(row)
        if is_second and (fitting := self._fitting(row)) is not None:
            self._own.sample(fitting)
        self.accept((token,))

    def close(self) -> None:
        """Free it. A second call does nothing."""
        self._is_closed = True
        self.draft_check.close()
        self._grammar.close()
        self._own.close()


def sampler_at(
    prompt: Sequence[int],
    sampling: SamplingConfig,
    tokens: Sequence[int],
    redrawn: Collection[int],
    vocab: Vocab,
    n_ctx: int,
    grammar: Grammar | None = None,
) -> Sampler | ConstrainedSampler:
    """A sampler after a prompt and `tokens` of its output, except for rows that are to be replayed. `redrawn`: places
    of tokens that were drawn at the second attempt. `grammar`: of the settings, in its first state, which belongs to
    the sampler from now on. Raises UsageError where the text does not fit the grammar."""
    sampler = Sampler(sampling, vocab, n_ctx)
    sampler.begin(prompt, vocab)
    if grammar is None:
        if not sampling.remembers_rows:
            sampler.resume(tokens)
        return sampler
    constrained = ConstrainedSampler(sampler, grammar)
    try:
        if sampling.remembers_rows:
            constrained.check(tokens)
        else:
            constrained.resume(tokens, redrawn)
    except NoTokenFits:
        constrained.close()
        name = "grammar" if sampling.grammar else "json_schema"
        raise UsageError("the output so far does not fit ", Setting(name)) from None
    return constrained
