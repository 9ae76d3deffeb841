"""Reads tool calls character by character, with generators that receive one character at a time.

After a mark, calls in most forms are understood, whichever form the model was trained with: a JSON object or a list of
them, tags (`tags`), or Mistral's tool name followed by the arguments.
"""

from __future__ import annotations

import json

from ggpipe.text.chat.tools.calls import Calls, NotACall
from ggpipe.text.chat.tools.characters import BLANKS, MOST_NAME, Reads, blank, drop, expect, until, value, whole
from ggpipe.text.chat.tools.forms import Form
from ggpipe.text.chat.tools.tags import read_pairs, read_tagged


def read_calls(calls: Calls) -> Reads[None]:
    """Read the calls after a mark, or at the beginning of an answer. Raises NotACall."""
    first = yield from blank(drop)
    match first:
        case "{":
            yield from _object(calls)
        case "[":
            yield from _list(calls)
        case "<":
            yield from read_tagged(calls)
        case _ if calls.form in (Form.GLM, Form.GLM_INLINE):
            yield from read_pairs(first, calls)
        case _ if calls.form is Form.HARMONY:
            yield from _message(first, calls)
        case _:
            yield from _named(first, calls)


def _list(calls: Calls) -> Reads[None]:
    c = yield from blank(drop)
    while c != "]":
        expect(c, "{")
        yield from _object(calls)
        c = yield from blank(drop)
        if c == ",":
            c = yield from blank(drop)
        else:
            expect(c, "]")


def _object(calls: Calls) -> Reads[None]:
    """Read `{"name": …, "arguments": {…}}` after its first bracket; members come in any order, unknown ones too."""
    name = arguments = None
    has_begun = False
    c = yield from blank(drop)
    while c != "}":
        expect(c, '"')
        key = json.loads((yield from whole(c))[0])
        expect((yield from blank(drop)), ":")
        c = yield from blank(drop)
        following: str | None = None
        if key in ("arguments", "parameters") and arguments is None and name is not None and c == "{":
            calls.begin(name)
            has_begun, arguments = True, ""
            following = yield from value(c, calls.write)
        else:
            text, following = yield from whole(c)
            if key == "name" and name is None:
                name = json.loads(text)
                if not isinstance(name, str):
                    raise NotACall
                calls.check(name)
            elif key in ("arguments", "parameters") and arguments is None:
                arguments = _as_object(text)
        c = yield from blank(drop, following)
        if c == ",":
            c = yield from blank(drop)
            expect(c, '"')
        else:
            expect(c, "}")
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
        if c in BLANKS or len(name) > MOST_NAME:
            raise NotACall
        name, c = name + c, (yield)
    calls.check(name)
    if c == "[":
        tag = yield from until("]")
        if tag == "CALL_ID":
            yield from until("[")
            tag = yield from until("]")
        if tag != "ARGS":
            raise NotACall
        c = yield from blank(drop)
    expect(c, "{")
    calls.begin(name)
    yield from value(c, calls.write)
    calls.end()


def _message(first: str, calls: Calls) -> Reads[None]:
    """Read `name <|constrain|>json<|message|>{…}`, whose header may name a channel as well."""
    name, c = "", first
    while c not in " <":
        if len(name) > MOST_NAME:
            raise NotACall
        name, c = name + c, (yield)
    calls.check(name)
    header = c + (yield from until("<|message|>"))
    expect((yield from blank(drop)), "{")
    if "<|end|>" in header:
        raise NotACall
    calls.begin(name)
    yield from value("{", calls.write)
    calls.end()
