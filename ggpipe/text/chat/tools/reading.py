"""Reads tool calls character by character, with generators that receive one character at a time.

After a mark, calls in all forms are understood, whichever form the model was trained with: a JSON object or a list of
them, Qwen's tags, or Mistral's tool name followed by the arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from ggpipe.text.chat.tools.calls import Calls, NotACall

R = TypeVar("R")
Reads = Generator[None, str, R]
Write = Callable[[str], object]

_BLANKS = " \t\r\n"
_WORD = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzE0123456789+-.")
_ESCAPES, _HEX = frozenset('"\\/bfnrt'), frozenset("0123456789abcdefABCDEF")
_MOST_DEPTH = 64
_MOST_NAME = 256


def read_calls(calls: Calls) -> Reads[None]:
    """Read the calls after a mark, or at the beginning of an answer. Raises NotACall."""
    first = yield from _blank(_drop)
    match first:
        case "{":
            yield from _object(calls)
        case "[":
            yield from _list(calls)
        case "<":
            yield from _tags(calls)
        case _:
            yield from _named(first, calls)


def _list(calls: Calls) -> Reads[None]:
    c = yield from _blank(_drop)
    while c != "]":
        _expect(c, "{")
        yield from _object(calls)
        c = yield from _blank(_drop)
        if c == ",":
            c = yield from _blank(_drop)
        else:
            _expect(c, "]")


def _object(calls: Calls) -> Reads[None]:
    """Read `{"name": …, "arguments": {…}}` after its first bracket; members come in any order, unknown ones too."""
    name = arguments = None
    has_begun = False
    c = yield from _blank(_drop)
    while c != "}":
        _expect(c, '"')
        key = json.loads((yield from _whole(c))[0])
        _expect((yield from _blank(_drop)), ":")
        c = yield from _blank(_drop)
        following: str | None = None
        if key in ("arguments", "parameters") and arguments is None and name is not None and c == "{":
            calls.begin(name)
            has_begun, arguments = True, ""
            following = yield from _value(c, calls.write)
        else:
            text, following = yield from _whole(c)
            if key == "name" and name is None:
                name = json.loads(text)
                if not isinstance(name, str):
                    raise NotACall
                calls.check(name)
            elif key in ("arguments", "parameters") and arguments is None:
                arguments = _as_object(text)
        c = yield from _blank(_drop, following)
        if c == ",":
            c = yield from _blank(_drop)
            _expect(c, '"')
        else:
            _expect(c, "}")
    if name is None:
        raise NotACall
    if not has_begun:
        arguments = calls.without_arguments() if arguments is None else arguments
        calls.begin(name)
        calls.write(arguments)
    calls.end()


def _as_object(text: str) -> str:
    """The arguments as a JSON object; the model may write null, or an object in a string. Raises NotACall."""
    found = json.loads(text)
    if found is None:
        return "{}"
    if isinstance(found, str):
        text = found
        try:
            found = json.loads(text)
            text.encode()
        except (ValueError, RecursionError):
            raise NotACall from None
    if not isinstance(found, dict):
        raise NotACall
    return text


def _named(first: str, calls: Calls) -> Reads[None]:
    """Read `name[ARGS]{…}`, `name[CALL_ID]id[ARGS]{…}` or `name{…}`."""
    name, c = "", first
    while c not in "[{":
        if c in _BLANKS or len(name) > _MOST_NAME:
            raise NotACall
        name, c = name + c, (yield)
    calls.check(name)
    if c == "[":
        tag = yield from _until("]")
        if tag == "CALL_ID":
            yield from _until("[")
            tag = yield from _until("]")
        if tag != "ARGS":
            raise NotACall
        c = yield from _blank(_drop)
    _expect(c, "{")
    calls.begin(name)
    yield from _value(c, calls.write)
    calls.end()


def _tags(calls: Calls) -> Reads[None]:
    """Read `<function=name> <parameter=key> value </parameter> </function>` after the first bracket."""
    tag = yield from _until(">")
    name = tag.removeprefix("function=")
    if name == tag:
        raise NotACall
    calls.begin(name)
    schemas, before = calls.properties(name), "{"
    while True:
        _expect((yield from _blank(_drop)), "<")
        tag = yield from _until(">")
        if tag == "/function":
            break
        key = tag.removeprefix("parameter=")
        if key == tag:
            raise NotACall
        text = yield from _until("</parameter>", None)
        text = text.removeprefix("\n").removesuffix("\n")
        calls.write(f"{before}{json.dumps(key)}: {_typed(text, schemas.get(key))}")
        before = ", "
    calls.write("{}" if before == "{" else "}")
    calls.end()


def _typed(text: str, schema: Any) -> str:
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


# JSON


def _drop(_: str) -> None:
    pass


def _expect(character: str, wanted: str) -> None:
    if character != wanted:
        raise NotACall


def _blank(write: Write, first: str | None = None) -> Reads[str]:
    """Skip whitespace, and return the character after it. `first`: a character that was already read."""
    c = (yield) if first is None else first
    while c in _BLANKS:
        write(c)
        c = yield
    return c


def _until(mark: str, most: int | None = _MOST_NAME) -> Reads[str]:
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


def _whole(first: str) -> Reads[tuple[str, str | None]]:
    """A value as text, and the character after it if that was already read."""
    parts: list[str] = []
    following = yield from _value(first, parts.append)
    return "".join(parts), following


def _value(first: str, write: Write, depth: int = _MOST_DEPTH) -> Reads[str | None]:
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
    c = yield from _blank(write)
    while c != last:
        if first == "{":
            _expect(c, '"')
            yield from _string(write)
            _expect((yield from _blank(write)), ":")
            write(":")
            c = yield from _blank(write)
        following = yield from _value(c, write, depth - 1)
        c = yield from _blank(write, following)
        if c == ",":
            write(c)
            c = yield from _blank(write)
            if c == last:
                raise NotACall
        else:
            _expect(c, last)
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
