"""Reads text and JSON character by character, with generators that receive one character at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from ggpipe.text.chat.tools.calls import NotACall

R = TypeVar("R")
Reads = Generator[None, str, R]
Write = Callable[[str], object]

BLANKS = " \t\r\n"
MOST_NAME = 256
_WORD = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzE0123456789+-.")
_ESCAPES, _HEX = frozenset('"\\/bfnrt'), frozenset("0123456789abcdefABCDEF")
_MOST_DEPTH = 64


def drop(_: str) -> None:
    pass


def expect(character: str, wanted: str) -> None:
    if character != wanted:
        raise NotACall


def blank(write: Write, first: str | None = None) -> Reads[str]:
    """Skip whitespace, and return the character after it. `first`: a character that was already read."""
    c = (yield) if first is None else first
    while c in BLANKS:
        write(c)
        c = yield
    return c


def until(mark: str, most: int | None = MOST_NAME) -> Reads[str]:
    """The text before a mark. Raises NotACall after `most` characters without the mark."""
    found: list[str] = []
    tail = ""
    while tail != mark:
        c = yield
        found.append(c)
        tail = (tail + c)[-len(mark) :]
        if most is not None and len(found) > most:
            raise NotACall
    return "".join(found)[: -len(mark)]


def whole(first: str) -> Reads[tuple[str, str | None]]:
    """A value as text, and the character after it if that was already read."""
    parts: list[str] = []
    following = yield from value(first, parts.append)
    return "".join(parts), following


def value(first: str, write: Write, depth: int = _MOST_DEPTH) -> Reads[str | None]:
    """Copy a value. `first`: its first character. Returns the character after it, if that was already read."""
    if first == '"':
        yield from _string(write)
        return None
    if first in "{[":
        yield from _container(first, write, depth)
        return None
    word, c = "", first
    while c in _WORD_CHARACTERS:
        word, c = word + c, (yield)
    if not _WORD.fullmatch(word):
        raise NotACall
    write(word)
    return c


def _container(first: str, write: Write, depth: int) -> Reads[None]:
    if not depth:
        raise NotACall
    last = "}" if first == "{" else "]"
    write(first)
    c = yield from blank(write)
    while c != last:
        if first == "{":
            expect(c, '"')
            yield from _string(write)
            expect((yield from blank(write)), ":")
            write(":")
            c = yield from blank(write)
        following = yield from value(c, write, depth - 1)
        c = yield from blank(write, following)
        if c == ",":
            write(c)
            c = yield from blank(write)
            if c == last:
                raise NotACall
        else:
            expect(c, last)
    write(last)


def _string(write: Write) -> Reads[None]:
    """Copy a string after its first quote. Control characters that the model left unescaped are escaped."""
    write('"')
    while (c := (yield)) != '"':
        if c == "\\":
            c = yield
            if c == "u":
                digits = ""
                for _ in range(4):
                    digits += yield
                if not _HEX.issuperset(digits):
                    raise NotACall
                write(f"\\u{digits}")
            elif c in _ESCAPES:
                write(f"\\{c}")
            else:
                raise NotACall
        else:
            write(json.dumps(c)[1:-1] if c < " " else c)
    write('"')


def typed(text: str, schema: Any) -> str:
    """A parameter's value as JSON: a string if the schema asks for one, or if the text is not JSON."""
    wanted = schema.get("type") if isinstance(schema, Mapping) else None
    if wanted != "string":
        try:
            return json.dumps(json.loads(text, parse_constant=_refuse), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
