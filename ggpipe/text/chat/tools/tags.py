"""Reads tool calls between tags or special tokens, character by character."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

from ggpipe.text.chat.tools.calls import Calls, NotACall
from ggpipe.text.chat.tools.characters import MOST_NAME, Reads, blank, drop, expect, typed, until, value

_INVOKE = re.compile(r'(｜DSML｜)?invoke name="([^"]+)"')
_PARAMETER = re.compile(r'(?:｜DSML｜)?parameter name="([^"]+)"(?: string="(true|false)")?')
_INVOKES_END = ("/minimax:tool_call", "/｜DSML｜function_calls", "/｜DSML｜tool_calls")
_CALL_BEGIN = ("|tool_call_begin|", "｜tool▁call▁begin｜")
_ARGUMENTS_BEGIN = ("|tool_call_argument_begin|", "｜tool▁sep｜")
_CALL_END = ("|tool_call_end|", "｜tool▁call▁end｜")
_CALLS_END = ("|tool_calls_section_end|", "｜tool▁calls▁end｜")
_FENCE = ("", "```json", "```")


def read_tagged(calls: Calls) -> Reads[None]:
    """Read calls after their first angle bracket. Raises NotACall."""
    tag = yield from until(">")
    if tag in _CALL_BEGIN:
        yield from _between_tokens(calls)
    elif _INVOKE.fullmatch(tag):
        yield from _invokes(tag, calls)
    else:
        yield from _function(tag, calls)


def read_pairs(first: str, calls: Calls) -> Reads[None]:
    """Read GLM's `name <arg_key>key</arg_key> <arg_value>value</arg_value> </tool_call>`."""
    name, c = "", first
    while c not in "\n<":
        if len(name) > MOST_NAME:
            raise NotACall
        name, c = name + c, (yield)
    arguments = _Arguments(calls, name.strip())
    while True:
        expect((yield from blank(drop, c)), "<")
        if (tag := (yield from until(">"))) == "/tool_call":
            break
        _one_of(tag, ("arg_key",))
        key = yield from until("</arg_key>")
        expect((yield from blank(drop)), "<")
        _one_of((yield from until(">")), ("arg_value",))
        arguments.add(key.strip(), (yield from until("</arg_value>", None)))
        c = yield
    arguments.end()


class _Arguments:
    """A call whose arguments come one at a time."""

    def __init__(self, calls: Calls, name: str) -> None:
        calls.begin(name)
        self._calls = calls
        self._schemas = calls.properties(name)
        self._before = "{"

    def add(self, key: str, text: str, is_string: bool = False) -> None:
        """The next one. `is_string`: the text is a string, even if the schema does not say so."""
        found = json.dumps(text, ensure_ascii=False) if is_string else typed(text, self._schemas.get(key))
        self._calls.write(f"{self._before}{json.dumps(key)}: {found}")
        self._before = ", "

    def end(self) -> None:
        """The call is complete."""
        self._calls.write("{}" if self._before == "{" else "}")
        self._calls.end()


def _function(tag: str, calls: Calls) -> Reads[None]:
    """Read Qwen's `<function=name> <parameter=key> value </parameter> </function>` after its first tag."""
    if not tag.startswith("function="):
        raise NotACall
    arguments = _Arguments(calls, tag.removeprefix("function="))
    while True:
        expect((yield from blank(drop)), "<")
        tag = yield from until(">")
        if tag == "/function":
            break
        if not tag.startswith("parameter="):
            raise NotACall
        text = yield from until("</parameter>", None)
        arguments.add(tag.removeprefix("parameter="), text.removeprefix("\n").removesuffix("\n"))
    arguments.end()


def _invokes(tag: str, calls: Calls) -> Reads[None]:
    """Read MiniMax's and DeepSeek's `<invoke name="…"> <parameter name="…">value</parameter> </invoke>` after the
    first tag, until the end of the calls."""
    while tag not in _INVOKES_END:
        invoke = _INVOKE.fullmatch(tag)
        if invoke is None:
            raise NotACall
        prefix = invoke[1] or ""
        arguments = _Arguments(calls, invoke[2])
        while True:
            expect((yield from blank(drop)), "<")
            tag = yield from until(">")
            if tag == f"/{prefix}invoke":
                break
            parameter = _PARAMETER.fullmatch(tag)
            if parameter is None:
                raise NotACall
            text = yield from until(f"</{prefix}parameter>", None)
            arguments.add(parameter[1], text, is_string=parameter[2] == "true")
        arguments.end()
        expect((yield from blank(drop)), "<")
        tag = yield from until(">")


class _Head(NamedTuple):
    """What comes before a call's arguments."""

    name: str
    id: str | None


def _between_tokens(calls: Calls) -> Reads[None]:
    """Read Kimi's and DeepSeek's calls after the token that begins the first one, until the end of the calls."""
    tag = _CALL_BEGIN[0]
    while tag not in _CALLS_END:
        _one_of(tag, _CALL_BEGIN)
        head = yield from until("<")
        _one_of((yield from until(">")), _ARGUMENTS_BEGIN)
        c = yield from blank(drop)
        if c != "{":  # the name comes here, and then a code block
            head = c + (yield from until("\n"))
            _one_of((yield from until("{", 32)).strip(), _FENCE)
        calls.begin(*_head(head.strip()))
        yield from value("{", calls.write)
        calls.end()
        _one_of((yield from until("<", 32)).strip(), _FENCE)
        _one_of((yield from until(">")), _CALL_END)
        expect((yield from blank(drop)), "<")
        tag = yield from until(">")


def _head(text: str) -> _Head:
    """Kimi writes ids, which its template repeats: `functions.name:0`."""
    found = re.fullmatch(r"functions\.(.+):[0-9]+", text)
    return _Head(text, None) if found is None else _Head(found[1], text)


def _one_of(text: str, wanted: Iterable[str]) -> None:
    if text not in wanted:
        raise NotACall
