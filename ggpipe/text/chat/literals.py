"""Keeps users' messages text, even where they contain the name of a special token.

Otherwise users could end their own turn and write a system message. Special tokens in messages and tools are replaced
with marks before the template sees them, and the marks are found again in its output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ggpipe.errors import UsageError

_MARK = "\ufdd0"
"""A noncharacter, which Unicode reserves for internal use. The next two characters encode which text it replaces."""
_FIRST, _BASE = 0xE000, 0x1900  # private characters: the digits
_DIGITS = f"{chr(_FIRST)}-{chr(_FIRST + _BASE - 1)}"


class Literals:
    """Replaces names of special tokens with marks, and finds them again. Thread-safe."""

    def __init__(self, specials: Sequence[str]) -> None:
        """`specials`: names of special tokens."""
        self._texts = [_MARK, *sorted(filter(None, specials), key=len, reverse=True)]
        self._marks = {text: _mark(i) for i, text in enumerate(self._texts)}
        self._special = re.compile("|".join(map(re.escape, self._texts)))

    def mark_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message with marks in place of special tokens everywhere except in its role."""
        return {self.mark(name): item if name == "role" else self.mark(item) for name, item in message.items()}

    def mark(self, value: Any) -> Any:
        """A JSON value with marks in place of special tokens."""
        match value:
            case str():
                return self._special.sub(lambda found: self._marks[found[0]], value)
            case dict():
                return {self.mark(name): self.mark(item) for name, item in value.items()}
            case list():
                return [self.mark(item) for item in value]
        return value

    def pieces(self, text: str) -> Sequence[tuple[str, bool]]:
        """Split a template's output. Returns (text, is_literal): is_literal is True for what replaces a mark, and False
        for text in which names of special tokens are special tokens."""
        pieces: list[tuple[str, bool]] = []
        parts = re.split(f"{_MARK}([{_DIGITS}]{{2}})", text)
        for i, part in enumerate(parts):
            number = (ord(part[0]) - _FIRST) * _BASE + ord(part[1]) - _FIRST if i % 2 else len(self._texts)
            if number < len(self._texts):
                pieces.append((self._texts[number], True))
            elif part:
                pieces.append((part, False))
        return pieces


def _mark(number: int) -> str:
    high, low = divmod(number, _BASE)
    return _MARK + chr(_FIRST + high) + chr(_FIRST + low)


def plain_json(value: Any) -> Any:
    """A value with the types of JSON only, since a template may call methods of its variables. Raises UsageError for
    others."""
    match value:
        case Mapping():
            return {str(name): plain_json(item) for name, item in value.items()}
        case str():
            return str(value)
        case None | bool() | int() | float():
            return value
        case Sequence():
            return [plain_json(item) for item in value]
    raise UsageError(f"a conversation may contain strings, numbers, lists and objects, not {type(value).__name__}")
