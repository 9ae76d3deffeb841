"""A grammar as libllama follows it, token by token, on a model's vocabulary.

Filtering a whole vocabulary takes libllama 9 to 20 ms with 128,000 tokens, and a single token 5 µs. So only as many
tokens are tried as are needed: the best ones first, and where few of these fit, those whose beginnings fit.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggpipe.errors import SettingError
from ggpipe.llama.libllama import last_error, lib, logged_errors, native
from ggpipe.llama.vocab import Vocab
from ggpipe.text.grammar import gbnf

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # llama_token_data
_FEW = 4096
_MOST_STEPS = 20_000
"""For an operation, beyond those that its tokens take: one takes about a microsecond."""
_STEPS_PER_TOKEN = 100
_SHARE = 0.02  # of the time since a request began, for looking at draft tokens
_AT_ONCE_S = 20e-3


class GbnfGrammar:
    """The state of a grammar after a part of the output."""

    forces = False

    def __init__(self, text: str, vocab: Vocab) -> None:
        """`text`: in GBNF, and checked (`gbnf.check`). Raises SettingError where libllama cannot follow it."""
        logged_errors()
        sampler = lib.llama_sampler_init_grammar(vocab.pointer, text.encode(), gbnf.ROOT.encode())
        if not sampler:
            raise SettingError("grammar", f"is not a grammar in GBNF: {last_error()}")
        self._vocab = vocab
        self._guard = _guard(vocab)
        _beginnings(vocab)  # now, in a thread that nobody waits for
        self._sampler: Any = sampler
        self._address = _address(sampler)
        self._is_spent = False
        """There are too many ways to read the text so far, so no token fits any more."""
        self._behind: int | None = None
        """An allowed token that has not been applied yet."""
        self._one = lib.llama_token_data()
        self._only_one = lib.llama_token_data_array(ctypes.pointer(self._one), 1, -1, False)

    def clone(self) -> GbnfGrammar:
        """Another one that stands where this one does."""
        self.settle()
        other = GbnfGrammar.__new__(GbnfGrammar)
        other._vocab = self._vocab
        other._sampler = lib.llama_sampler_clone(self._sampler)
        other._guard, other._address, other._is_spent = self._guard, _address(other._sampler), self._is_spent
        other._behind, other._one, other._only_one = None, self._one, self._only_one
        return other

    def fits(self, token: int) -> bool:
        """Whether it may be the next one."""
        self.settle()
        if not self._can_try(np.array((token,), np.int32)):
            return False
        self._one.id, self._one.logit = token, 0.0  # type: ignore[assignment]
        lib.llama_sampler_apply(self._sampler, ctypes.byref(self._only_one))
        return bool(self._one.logit == 0.0)

    def allowed(self, tokens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of these may be the next one. 5 µs, and 0.1 µs for each token."""
        self.settle()
        if not self._can_try(np.asarray(tokens, np.int32)):
            return np.zeros(len(tokens), np.bool_)
        candidates = np.zeros(len(tokens), _CANDIDATE)
        candidates["id"] = tokens
        data = ctypes.cast(candidates.ctypes.data, ctypes.POINTER(lib.llama_token_data))
        array = lib.llama_token_data_array(data, len(candidates), -1, False)
        lib.llama_sampler_apply(self._sampler, ctypes.byref(array))
        found: NDArray[np.bool_] = candidates["logit"] == 0
        return found

    def best(self, logits: NDArray[np.float32], n: int) -> NDArray[np.int32]:
        """All that may be next of a whole row, or at least the `n` most probable ones of them; without tokens whose
        logits are minus infinity."""
        found = self.all(_FEW)
        if found is None and n < _FEW < len(logits):
            few = np.argpartition(logits, -_FEW)[-_FEW:].astype(np.int32)
            few = few[self.allowed(few)]
            if np.count_nonzero(np.isfinite(logits[few])) >= n:
                found = few
        if found is None:
            found = self.all(len(logits))
            assert found is not None
        return found[np.isfinite(logits[found])]

    def all(self, most: int) -> NDArray[np.int32] | None:
        """All tokens that may be the next one; None when more than `most` were tried.

        What a token begins with must fit, so no token is tried that begins with another one that does not.
        """
        beginnings = _beginnings(self._vocab)
        tried, n_tried = beginnings.first, 0
        found = []
        while len(tried):
            n_tried += len(tried)
            if n_tried > most:
                return None
            fitting = tried[self.allowed(tried)]
            found.append(fitting)
            tried = beginnings.longer_than(fitting)
        return np.concatenate(found)

    def accept(self, token: int) -> bool:
        """Advance by a token. Returns False, and changes nothing, if it is not allowed. Tokens that end the output
        do not change the state."""
        if not self.fits(token):  # libllama would end the process
            return False
        self._advance(token)
        return True

    def _can_try(self, tokens: NDArray[np.int32]) -> bool:
        """Whether libllama can be asked about these tokens."""
        steps = _MOST_STEPS + _STEPS_PER_TOKEN * len(tokens)
        self._is_spent = self._is_spent or not self._guard.can_try(self._address, tokens, steps)
        return not self._is_spent

    def _advance(self, token: int) -> None:
        self._is_spent = self._is_spent or not self._guard.can_accept(self._address, token, _MOST_STEPS)
        if not self._is_spent:
            lib.llama_sampler_accept(self._sampler, token)

    def go_on(self, token: int) -> None:
        """As `accept`, for a token that fits for certain; it takes place in `settle`, or when it matters."""
        self.settle()
        self._behind = token

    def settle(self) -> None:
        """Do now what `go_on` has left for later."""
        if self._behind is not None:
            token, self._behind = self._behind, None
            self._advance(token)

    def draft_check(self) -> GbnfDraftCheck:
        """Says which draft tokens fit after this state, as it is then."""
        return GbnfDraftCheck(self)

    def close(self) -> None:
        """Free it. A second call does nothing."""
        if self._sampler is not None:
            lib.llama_sampler_free(self._sampler)
        self._sampler = None


class GbnfDraftCheck:
    """Which draft tokens fit a grammar. It is followed along the paths that are asked for, which takes a copy for each
    place; where that takes long, draft tokens count as fitting."""

    def __init__(self, grammar: GbnfGrammar) -> None:
        """`grammar`: its state after the last accepted token. Call `accept` after advancing it."""
        self._root = grammar
        self._behind: dict[tuple[int, ...], GbnfGrammar | None] = {}
        """By path; None: it does not fit."""
        self._began = time.monotonic()
        self._spent_s = 0.0

    def fits(self, path: tuple[int, ...], token: int) -> bool:
        """Whether a token may follow these draft tokens, which follow the last accepted token."""
        start = time.monotonic()
        if self._spent_s > _AT_ONCE_S + _SHARE * (start - self._began):
            return True
        grammar: GbnfGrammar | None = self._root
        for n in range(1, len(path) + 1):
            if path[:n] not in self._behind:
                grammar = grammar.clone() if grammar is not None else None
                if grammar is not None and not grammar.accept(path[n - 1]):
                    grammar.close()
                    grammar = None
                self._behind[path[:n]] = grammar
            grammar = self._behind[path[:n]]
        found = grammar is not None and grammar.fits(token)
        self._spent_s += time.monotonic() - start
        return found

    def forced(self, path: tuple[int, ...]) -> Sequence[tuple[int, float]]:
        """What such a grammar forces is not known."""
        return ()

    def accept(self, token: int) -> None:
        """Continue after this accepted token, and forget paths that do not begin with it."""
        behind = {}
        for path, grammar in self._behind.items():
            if len(path) > 1 and path[0] == token:
                behind[path[1:]] = grammar
            elif grammar is not None:
                grammar.close()
        self._behind = behind

    def close(self) -> None:
        """Free the copies."""
        for grammar in self._behind.values():
            if grammar is not None:
                grammar.close()
        self._behind.clear()


class _Beginnings:
    """The tokens of a vocabulary by the longest other token that they begin with."""

    def __init__(self, vocab: Vocab) -> None:
        pieces = vocab.pieces()
        for token in vocab.end_tokens:  # grammars ignore their spelling
            pieces[token] = b""
        parents = np.full(len(pieces), -1, np.int32)
        open_tokens: list[int] = []  # each begins with the one before it
        for token in sorted(range(len(pieces)), key=pieces.__getitem__):
            piece = pieces[token]
            while open_tokens and not piece.startswith(pieces[open_tokens[-1]]):
                open_tokens.pop()
            if not piece:
                continue
            if open_tokens:
                parents[token] = open_tokens[-1]
            open_tokens.append(token)
        order = np.argsort(parents, kind="stable").astype(np.int32)
        n_first = np.count_nonzero(parents < 0)
        self.first = order[:n_first]
        """Those that begin with no other one."""
        self._longer = order[n_first:]
        self._ends = np.cumsum(np.bincount(parents[self._longer], minlength=len(pieces)))

    def longer_than(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """The tokens whose longest beginning is one of these."""
        ends = self._ends[tokens]
        counts = ends - np.where(tokens > 0, self._ends[tokens - 1], 0)
        offsets = np.arange(counts.sum()) + np.repeat(ends - np.cumsum(counts), counts)
        found: NDArray[np.int32] = self._longer[offsets]
        return found


@functools.lru_cache(maxsize=2)
def _beginnings(vocab: Vocab) -> _Beginnings:
    return _Beginnings(vocab)


def _address(sampler: Any) -> int:
    return ctypes.cast(sampler, ctypes.c_void_p).value or 0


@functools.lru_cache(maxsize=2)
def _guard(vocab: Vocab) -> native.GrammarGuard:
    """Stops what would take libllama too long. Its functions have C++'s names."""
    addresses = [
        ctypes.cast(getattr(lib._lib, name), ctypes.c_void_p).value or 0
        for name in ("_Z23llama_grammar_get_rulesPK13llama_grammar", "_Z24llama_grammar_get_stacksP13llama_grammar")
    ]
    return native.GrammarGuard(vocab.pieces(), *addresses)
