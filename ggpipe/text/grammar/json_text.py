"""The syntax of JSON values as rules of a grammar: strings, numbers, keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_ESCAPES = {"\r": r"\r", "\n": r"\n", "\t": r"\t", '"': r"\"", "\\": r"\\"}
_MOST_DIGITS = 16

RULES: Mapping[str, str] = {
    "space": r'| " " | "\n"{1,2} [ \t]{0,20}',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" space ( string ":" space value ( "," space string ":" space value )* )? space "}"',
    "array": '"[" space ( value ( "," space value )* )? space "]"',
    "string": r'"\"" char* "\""',
    "char": r'plain | "\\" ( ["\\bfnrt] | "u" hex4 )',
    "plain": r'[^"\\\x7F\x00-\x1F]',
    "hex4": "[0-9a-cA-CefEF] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2}",
    "number": 'integer ( "." [0-9]{1,16} )? ( [eE] [-+]? [0-9]{1,2} )?',
    "integer": '"-"? ( "0" | [1-9] [0-9]{0,15} )',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "date": '[0-9]{3} [1-9] "-" ( ( "0" [1-9] | "1" [0-2] ) "-" ( "0" [1-9] | "1" [0-9] | "2" [0-8] ) '
    '| ( "0" [13-9] | "1" [0-2] ) "-" ( "29" | "30" ) | ( "0" [13578] | "10" | "12" ) "-31" )',
    "time": '( [01] [0-9] | "2" [0-3] ) ":" [0-5] [0-9] ":" [0-5] [0-9] ( "." [0-9]{3} )? '
    '( "Z" | [-+] ( [01] [0-9] | "2" [0-3] ) ":" [0-5] [0-9] )',
    "date-time": 'date "T" time',
    "uuid": '[0-9a-fA-F]{8} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{4} "-" [0-9a-fA-F]{12}',
}
"""Rules that schemas share, by name. They refer to each other."""


def rules_named_in(rule: str) -> list[str]:
    """Names of the rules that a rule refers to."""
    return re.findall(r"[a-z][a-z0-9-]*", re.sub(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^]\\])*\]', " ", rule))


def literal(value: Any) -> str:
    """A value in JSON as a literal in a rule."""
    return quoted(json.dumps(value, ensure_ascii=False))


def quoted(text: str) -> str:
    """A text as a literal in a rule."""
    return '"' + "".join(_ESCAPES.get(character, character) for character in text) + '"'


def times(least: int, most: int | None) -> str:
    """The repetition mark for `least` to `most` times; None: any number of times."""
    match least, most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
    return f"{{{least},{'' if most is None else most}}}"


def other_strings(names: Mapping[str, Any]) -> str:
    """A rule for all keys except `names`. They contain no escapes, with which they could spell one of the names."""
    tree: dict[str, Any] = {}
    for name in names:
        if re.search(r'["\\\x00-\x1f\x7f]', name):
            continue  # no key without escapes equals this name
        at = tree
        for character in name:
            at = at.setdefault(character, {})
        at[""] = {}
    return rf'"\"" {_other(tree)} "\""'


def _other(tree: Mapping[str, Any]) -> str:
    """A rule for every continuation that is not in the tree of names."""
    characters = [character for character in tree if character]
    escaped = "".join(class_character(character) for character in characters)
    ways = [rf'[^"\\\x7F\x00-\x1F{escaped}] plain*']
    ways += [f"{quoted(character)} {_other(tree[character])}" for character in characters]
    return f"( {' | '.join(ways)} )" + ("" if "" in tree else "?")


def class_character(character: str) -> str:
    """A character as it is written in a rule's character class."""
    if character in "[]-\\":
        return "\\" + character
    return f"\\x{ord(character):02X}" if character in "^\r\n\t" else character


def digits_between(least: int | None, most: int | None) -> str:
    """The rule for integers from `least` to `most` inclusive; None: no bound other than 16 digits."""
    low = -(10**_MOST_DIGITS - 1) if least is None else least
    high = 10**_MOST_DIGITS - 1 if most is None else most
    ways: list[str] = []
    if low < 0:
        ways += [f'"-" {way}' for way in _positive(max(1, -high), -low)]
    if low <= 0 <= high:
        ways.append('"0"')
    if high > 0:
        ways += _positive(max(1, low), high)
    return " | ".join(ways)


def _positive(low: int, high: int) -> list[str]:
    """Alternatives for the integers from `low` to `high`, both positive."""
    ways: list[str] = []
    for n_digits in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (n_digits - 1))
        last = min(high, 10**n_digits - 1)
        ways += _same_length(str(first), str(last))
    return ways


def _same_length(low: str, high: str) -> list[str]:
    """Alternatives for the numbers between two with the same number of digits."""
    if not low:
        return [""]
    rest = len(low) - 1
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return [_digits(low[0], high[0]) + (f" [0-9]{{{rest}}}" if rest else "")]
    if low[0] == high[0]:
        return [f'"{low[0]}" {way}' for way in _same_length(low[1:], high[1:])]
    ways: list[str] = []
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        ways += [f'"{first}" {way}' for way in _same_length(low[1:], "9" * rest)]
        first += 1
    tail: list[str] = []
    if high[1:] != "9" * rest:
        tail = [f'"{last}" {way}' for way in _same_length("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        ways.append(_digits(str(first), str(last)) + f" [0-9]{{{rest}}}")
    return ways + tail


def _digits(first: str, last: str) -> str:
    return f'"{first}"' if first == last else f"[{first}-{last}]"
