"""A grammar as llguidance follows it, token by token, on a model's vocabulary.

A token takes a microsecond, and the mask of a whole vocabulary some 40. Special tokens have no text: a grammar allows
them by number only.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ggpipe.errors import UsageError
from ggpipe.llama.forced_text import ByteVocab, ForcedText
from ggpipe.llama.llguidance import library, new_matcher, new_tokenizer
from ggpipe.llama.vocab import Vocab
from ggpipe.text.grammar.json_schema import one_line

_SPECIAL = b"\xff"


class GuidanceVocab:
    """A model's vocabulary as llguidance needs it. Thread-safe."""

    def __init__(self, vocab: Vocab) -> None:
        """Nothing is read before the first matcher."""
        self.vocab = vocab
        self._lock = threading.Lock()
        self._tokenizer: int | None = None
        self._bytes = ByteVocab(vocab)
        self.n_tokens = vocab.n_tokens
        self.ends = frozenset(vocab.end_tokens)
        """Tokens that end the output."""

    def matcher(self, lark: str, forces: bool = False) -> GuidedGrammar:
        """A grammar in its first state. `lark`: as `check` returns it. `forces`: it is to know what it forces.

        Takes a second at the first time, for 150,000 tokens. Other threads go on meanwhile. Raises UsageError for a
        grammar that llguidance refuses, such as one that is too large, and RunError for a vocabulary that it cannot
        use.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._read()
        text = self._bytes.text(lark) if forces else None
        grammar = GuidedGrammar(self, new_matcher(self._tokenizer, lark), text)
        if error := grammar.error:
            grammar.close()
            raise UsageError(f"llguidance cannot follow this grammar or schema: {error}; simplify it")
        return grammar

    def _read(self) -> int:
        special = {*self.vocab.special_tokens.values(), *self.ends}
        pieces = [
            _SPECIAL + (self.vocab.text(token).encode() or piece) if token in special else piece
            for token, piece in enumerate(self.vocab.pieces())
        ]
        return new_tokenizer(pieces, self.ends)

    def close(self) -> None:
        """Free it, after all grammars. A second call does nothing."""
        with self._lock:
            if self._tokenizer is not None:
                library().llg_free_tokenizer(self._tokenizer)
            self._tokenizer = None
        self._bytes.close()


class GuidedGrammar:
    """The state of a grammar after a part of the output."""

    def __init__(self, vocab: GuidanceVocab, matcher: int, text: ForcedText | None = None) -> None:
        """`matcher`: llguidance's. `text`: what the grammar forces in this state. Both belong to this from now on."""
        self._vocab = vocab
        self._own = library()
        self._matcher: int | None = matcher
        self._text = text
        self._mask: NDArray[np.bool_] | None = None
        """Which tokens may be next, where that was asked for in this state."""
        self._n_mask_bytes = int(self._own.llg_matcher_get_mask_byte_size(matcher))

    @property
    def error(self) -> str:
        """Why it cannot be followed, or became too complex; empty: it can."""
        found = self._own.llg_matcher_get_error(self._matcher)
        return one_line(found.decode("utf-8", "replace")) if found else ""

    @property
    def forces(self) -> bool:
        """See `Grammar`."""
        return self._text is not None

    def clone(self) -> GuidedGrammar:
        """Another one that stands where this one does."""
        other = GuidedGrammar(self._vocab, self._own.llg_clone_matcher(self._matcher))
        other._mask = self._mask
        other._text = self._text.clone() if self._text is not None else None
        return other

    def fits(self, token: int) -> bool:
        """Whether it may be the next one."""
        return bool(self._mask[token]) if self._mask is not None else self.fit((token,))

    def fit(self, tokens: Sequence[int]) -> bool:
        """Whether these may follow, one after the other."""
        n = len(tokens)
        found: int = self._own.llg_matcher_validate_tokens(self._matcher, (ctypes.c_uint32 * n)(*tokens), n)
        return found == n

    def allowed(self, tokens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of these may be the next one."""
        found: NDArray[np.bool_] = self._fitting()[np.asarray(tokens)]
        return found

    def best(self, logits: NDArray[np.float32], n: int) -> NDArray[np.int32]:
        """All that may be next of a whole row, without tokens whose logits are minus infinity."""
        return np.flatnonzero(self._fitting() & np.isfinite(logits)).astype(np.int32)

    def all(self, most: int) -> NDArray[np.int32] | None:
        """All tokens that may be the next one; None when there are more than `most`."""
        fitting = self._fitting()
        return np.flatnonzero(fitting).astype(np.int32) if np.count_nonzero(fitting) <= most else None

    def _fitting(self) -> NDArray[np.bool_]:
        if self._mask is None:
            packed = np.zeros(self._n_mask_bytes, np.uint8)  # stays empty where the grammar became too complex
            self._own.llg_matcher_compute_mask_into(self._matcher, packed.ctypes.data, len(packed))
            self._mask = np.unpackbits(packed, bitorder="little")[: self._vocab.n_tokens].view(np.bool_)
        return self._mask

    def accept(self, token: int) -> bool:
        """Advance by a token. Returns False, and changes nothing, if it is not allowed. Tokens that end the output
        do not change the state."""
        if not self.fits(token):
            return False
        self.go_on(token)
        return True

    def go_on(self, token: int) -> None:
        """Advance by a token that fits for certain."""
        if token not in self._vocab.ends:
            self._own.llg_matcher_consume_token(self._matcher, token)
            self._mask = None

    def settle(self) -> None:
        """Nothing is left for later."""

    def draft_check(self) -> GuidedDraftCheck:
        """Says which draft tokens fit after this state, as it is then. Only the first of them knows what is forced."""
        text, self._text = self._text, None
        return GuidedDraftCheck(self, text)

    def close(self) -> None:
        """Free it. A second call does nothing."""
        if self._matcher is not None:
            self._own.llg_free_matcher(self._matcher)
        if self._text is not None:
            self._text.close()
        self._matcher = self._text = None


class GuidedDraftCheck:
    """Which draft tokens fit a grammar: llguidance follows a path and goes back, a microsecond a token."""

    def __init__(self, grammar: GuidedGrammar, text: ForcedText | None) -> None:
        """`grammar`: as it stands after the last accepted token. `text`: what it forces, which belongs to this from now
        on; None: that is not known."""
        self._grammar = grammar
        self._text = text

    def fits(self, path: tuple[int, ...], token: int) -> bool:
        """Whether a token may follow these draft tokens, which follow the last accepted token."""
        return self._grammar.fit((*path, token))

    def forced(self, path: tuple[int, ...]) -> Sequence[tuple[int, float]]:
        """See `core.request.DraftCheck`."""
        return self._text.after(path) if self._text is not None else ()

    def accept(self, token: int) -> None:
        """The grammar has advanced by this token."""
        if self._text is not None:
            self._text.accept(token)

    def close(self) -> None:
        """Free what belongs to it."""
        if self._text is not None:
            self._text.close()
