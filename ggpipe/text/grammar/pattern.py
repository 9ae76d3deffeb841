"""Converts regular expressions of JSON schemas (`pattern`) to rules for JSON strings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NoReturn

_LAST = 0x10FFFF
_MOST_DEPTH = 50
_Ranges = list[tuple[int, int]]

_DIGITS: _Ranges = [(0x30, 0x39)]
_WORD: _Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACES: _Ranges = [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x2028, 0x2029), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
_LINE_ENDS: _Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_JSON_ESCAPES = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_NOT_PLAIN: _Ranges = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F), (0xD800, 0xDFFF)]
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d{1,6})(?:(,)(\d{1,6})?)?\})\??")


class PatternError(ValueError):
    """An unsupported regular expression. The message continues a sentence that begins with the name of a setting."""


def pattern_rule(pattern: object) -> str:
    """The rule for JSON strings in which the regular expression is found. The grammar must have the rule `char`.

    Raises PatternError.
    """
    if not isinstance(pattern, str):
        raise PatternError("must be a string")
    return _Parser(pattern).rule()


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def rule(self) -> str:
        ways = [self._outer_way()]
        while self._take("|"):
            ways.append(self._outer_way())
        if self._at < len(self._pattern):
            self._fail("is unmatched")
        return rf'"\"" ( {" | ".join(ways)} ) "\""'

    def _outer_way(self) -> str:
        """An alternative outside parentheses. Without ^ or $, any text may precede or follow it."""
        before = "" if self._take("^") else "char*"
        inside = self._sequence()
        after = "" if self._take("$") else "char*"
        return f"{before} {inside} {after}"

    def _fail(self, why: str) -> NoReturn:
        raise PatternError(f"{self._pattern!r} is not supported: {self._pattern[self._at : self._at + 3]!r} {why}")

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _sequence(self) -> str:
        items: list[str] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)$":
            item = self._item()
            found = _QUANTIFIER.match(self._pattern, self._at)
            if found is not None:
                item = f"( {item} ){self._times(found)}"
                self._at = found.end()
            items.append(item)
        return " ".join(items)

    def _times(self, found: re.Match[str]) -> str:
        if found[1]:
            return found[1]
        least, most = int(found[2]), int(found[4]) if found[4] else None
        if most is not None and most < least:
            self._fail("follows an invalid range")
        return f"{{{least}}}" if found[3] is None else f"{{{least},{'' if most is None else most}}}"

    def _item(self) -> str:
        character = self._pattern[self._at]
        if character == "(":
            return self._group()
        if character == "[":
            return _in_json(self._class())
        if character in "^*+?{":
            self._fail("is not allowed here")
        self._at += 1
        if character == ".":
            return _in_json(_all_but(_LINE_ENDS))
        if character == "\\":
            return _in_json(self._escape(inside_class=False))
        return _in_json([(ord(character), ord(character))])

    def _group(self) -> str:
        if self._pattern.startswith("(?", self._at) and not self._pattern.startswith("(?:", self._at):
            self._fail("begins a lookaround or a named group")
        self._at += 3 if self._pattern.startswith("(?:", self._at) else 1
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            self._fail("is nested too deeply")
        ways = [self._sequence()]
        while self._take("|"):
            ways.append(self._sequence())
        if not self._take(")"):
            self._fail("is in a group that is not closed")
        self._depth -= 1
        return f"( {' | '.join(ways)} )"

    def _class(self) -> _Ranges:
        self._at += 1
        is_negated = self._take("^")
        ranges: _Ranges = []
        while not self._take("]"):
            first = self._class_item()
            if self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at):
                self._at += 1
                last = self._class_item()
                if len(first) + len(last) > 2 or first[0][0] != first[0][1] or first[0][0] > last[0][1]:
                    self._fail("follows an invalid range")
                first = [(first[0][0], last[0][1])]
            ranges += first
        return _all_but(ranges) if is_negated else ranges

    def _class_item(self) -> _Ranges:
        if self._at >= len(self._pattern):
            self._fail("is in a character class that is not closed")
        character = self._pattern[self._at]
        self._at += 1
        return self._escape(inside_class=True) if character == "\\" else [(ord(character), ord(character))]

    def _escape(self, inside_class: bool) -> _Ranges:
        """The characters of an escape, after its backslash."""
        character = self._pattern[self._at : self._at + 1]
        classes = {"d": _DIGITS, "w": _WORD, "s": _SPACES}
        if character.lower() in classes:
            self._at += 1
            found = classes[character.lower()]
            return found if character.islower() else _all_but(found)
        if (code := re.compile("x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})").match(self._pattern, self._at)) is not None:
            self._at = code.end()
            number = int(code[1] or code[2], 16)
            return [(number, number)]
        controls = {"t": 0x09, "n": 0x0A, "f": 0x0C, "r": 0x0D, **({"b": 0x08} if inside_class else {})}
        if character in controls:
            self._at += 1
            return [(controls[character], controls[character])]
        if not character or character.isalnum():
            self._at -= 1
            self._fail("has no meaning here")
        self._at += 1
        return [(ord(character), ord(character))]


def _merged(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    merged: _Ranges = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _all_but(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    found: _Ranges = []
    next_one = 0
    for first, last in _merged(ranges):
        if first > next_one:
            found.append((next_one, first - 1))
        next_one = last + 1
    return [*found, (next_one, _LAST)] if next_one <= _LAST else found


def _in_json(ranges: _Ranges) -> str:
    """A rule for one of these characters in a JSON string, except characters that need an escape with `\\u`.

    Raises PatternError if none is left.
    """
    ways = []
    plain = _all_but([*_all_but(ranges), *_NOT_PLAIN])
    if plain:
        ways.append("[" + "".join(_range(first, last) for first, last in plain) + "]")
    escaped = [_JSON_ESCAPES[code] for code in _JSON_ESCAPES if any(first <= code <= last for first, last in ranges)]
    if escaped:
        ways.append('"\\\\" [' + "".join("\\\\" if one == "\\" else one for one in escaped) + "]")
    if not ways:
        raise PatternError("has a character that JSON strings contain only as an escape with \\u")
    return f"( {' | '.join(ways)} )" if len(ways) > 1 else ways[0]


def _range(first: int, last: int) -> str:
    return _character(first) if first == last else f"{_character(first)}-{_character(last)}"


def _character(code: int) -> str:
    is_plain = 0x30 <= code <= 0x39 or 0x41 <= code <= 0x5A or 0x61 <= code <= 0x7A or 0xA0 <= code < 0x2000
    return chr(code) if is_plain else f"\\U{code:08X}"
