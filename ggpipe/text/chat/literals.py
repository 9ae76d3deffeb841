"""What users write stays text, even where it looks like a special token of the model.

Else anybody could end their own turn and write the system's. Special tokens in messages and tools are replaced by marks
before the template sees them, which leaves everything else to the template, and found again in what it wrote.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_MARK = "\ufdd0"
"""No character, and meant to stay inside a program. The next two are the number of the text it stands for."""
_FIRST, _BASE = 0xE000, 0x1900  # private characters: the digits
_DIGITS = f"{chr(_FIRST)}-{chr(_FIRST + _BASE - 1)}"


class Literals:
    """Texts that are special, marked and found again. Safe to use from several threads."""

    def __init__(self, specials: Sequence[str]) -> None:
        """`specials`: texts of special tokens."""
        self._texts = [_MARK, *sorted(filter(None, specials), key=len, reverse=True)]
        self._marks = {text: _mark(i) for i, text in enumerate(self._texts)}
        self._special = re.compile("|".join(map(re.escape, self._texts)))

    def mark_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message, with marks in place of special texts, wherever they are in it but in its role."""
        return {self.mark(name): item if name == "role" else self.mark(item) for name, item in message.items()}

    def mark(self, value: Any) -> Any:
        """What is JSON, with marks in place of special texts, wherever they are in it."""
        match value:
            case str():
                return self._special.sub(lambda found: self._marks[found[0]], value)
            case dict():
                return {self.mark(name): self.mark(item) for name, item in value.items()}
            case list():
                return [self.mark(item) for item in value]
        return value

    def pieces(self, text: str) -> Sequence[tuple[str, bool]]:
        """A text with marks in pieces: what may hold special tokens, and what a mark stands for (True)."""
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
