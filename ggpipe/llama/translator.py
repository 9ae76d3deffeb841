"""Two vocabularies side by side: the same text in the tokens of a target and in those of its draft model."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from ggpipe.errors import UsageError
from ggpipe.llama.vocab import Vocab

_MARK = b"\xff"  # in no text that is UTF-8
_MARKED = re.compile(_MARK + b"([^" + _MARK + b"]*)" + _MARK)
_END = b""
"""Name of all tokens that end an output."""
_MOST_CACHED = 1 << 16


class TextTranslator:
    """Translates between two vocabularies, as `core.drafters.translated_text.Translator`.

    Special tokens are the same where their names are. Where the draft model lacks one, as in prompts of a chat
    template, it reads its name."""

    def __init__(self, target: Vocab, draft: Vocab) -> None:
        """Both stay open as long as this is used."""
        self._target = target
        self._draft = draft
        self._target_names = _names(target)
        self._draft_names = _names(draft)
        self.draft_ends = frozenset(draft.end_tokens)
        """Tokens of the draft model that end an output."""
        self._target_ids = {name: token for token, name in self._target_names.items() if name != _END}
        self._draft_ids = {name: token for token, name in self._draft_names.items() if name != _END}
        if draft.end_tokens:
            self._draft_ids[_END] = draft.turn_end
        self.target_text = functools.cache(self._target_text)
        self.draft_text = functools.cache(self._draft_text)
        self.target_tokens = functools.lru_cache(_MOST_CACHED)(self._target_tokens)

    def _target_text(self, token: int) -> bytes:
        """The text of one of the target's tokens; a part of a character, perhaps."""
        if token == self._target.bos:
            return b""
        return _text(self._target, self._target_names, token)

    def _draft_text(self, token: int) -> bytes:
        """The text of one of the draft model's tokens."""
        return _text(self._draft, self._draft_names, token)

    def _target_tokens(self, text: bytes) -> tuple[int, ...]:
        """The target's tokens for a text of whole characters, in the middle of an output."""
        return _tokens(self._target, self._target_ids, text, spells=False)

    def draft_tokens(self, text: bytes) -> tuple[int, ...]:
        """The draft model's tokens for such a text."""
        return _tokens(self._draft, self._draft_ids, text, spells=True)

    def draft_prompt(self, text: bytes) -> tuple[int, ...]:
        """The draft model's tokens for a prompt: at least one."""
        tokens = self.draft_tokens(text)
        added = self._draft.added_bos
        if added is not None:
            return (added, *tokens)
        return tokens or (max(self._draft.bos, 0),)

    def draft_banned(self, banned: Iterable[int]) -> tuple[int, ...]:
        """The draft model's tokens for these of the target, where it has them."""
        found: list[int] = []
        for text in map(self.target_text, banned):
            match self.draft_tokens(text) if text else ():
                case (token,) if self.draft_text(token) == text:
                    found.append(token)
        return tuple(found)


def _names(vocab: Vocab) -> dict[int, bytes]:
    """The special tokens with their names."""
    names = {token: name.encode("utf-8", "surrogateescape") for name, token in vocab.special_tokens.items()}
    return names | dict.fromkeys(vocab.end_tokens, _END)


def _text(vocab: Vocab, names: dict[int, bytes], token: int) -> bytes:
    name = names.get(token)
    return vocab.piece(token, special=True) if name is None else _MARK + name + _MARK


def _tokens(vocab: Vocab, ids: dict[bytes, int], text: bytes, spells: bool) -> tuple[int, ...]:
    """`spells`: with the names of special tokens that the vocabulary lacks; else without them."""
    tokens: list[int] = []
    for i, part in enumerate(_MARKED.split(text)):
        is_name = bool(i % 2)
        if is_name and part in ids:
            tokens.append(ids[part])
        elif part and (spells or not is_name):
            try:
                tokens += vocab.inner_tokens(part.decode("utf-8", "surrogateescape"))
            except UsageError:  # this vocabulary has no tokens for it
                continue
    return tuple(tokens)
