"""Checks grammars in GBNF, llama.cpp's form of BNF, before libllama reads them.

Some grammars end libllama's process, and on others it hangs. So whatever it would reject is rejected here, with the
line, and so is what it does not detect:

- left recursion after a part that may be empty (`a ::= b? a "x"`), which uses up all memory
- rules that branch without reading a character, which take time and memory exponential in their depth
- tokens (`<think>`, `<[7]>`) in a grammar of characters, which end the process
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ggpipe.errors import SettingError

ROOT = "root"

_MOST_REPETITIONS = 2000  # libllama's
_MOST_ELEMENTS = 200_000
_MOST_WAYS = 20_000
_MOST_DEPTH = 200
_MOST_RULES_DEEP = 1000
_MOST_TEXT = 1_000_000
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_CHAR = re.compile(
    r"""\\x[0-9a-fA-F]{2} | \\u[0-9a-fA-F]{4} | \\U[0-9a-fA-F]{8} | \\[trn\\"\[\]-] | [^\\]""", re.VERBOSE | re.DOTALL
)
_REPEAT = re.compile(r"\{[ \t]*([0-9]+)[ \t]*(?:(,)[ \t]*([0-9]*)[ \t]*)?\}")


@dataclass(slots=True)
class _Part:
    """Part of an alternative: characters or a rule, possibly repeated."""

    rule: str = ""
    """Name of the rule; empty: characters."""
    is_optional: bool = False
    n_repeats: int = 1
    """Maximum number of repetitions; 2 if there is no maximum."""


@dataclass(slots=True)
class _Rule:
    line: int
    alternatives: list[list[_Part]] = field(default_factory=list)


@dataclass(slots=True)
class _Item:
    """What a repetition mark would repeat."""

    start: int
    """Index of its first part in the alternative."""
    n_elements: int
    n_rules: int
    """Maximum number of rules into which libllama expands it."""


def check(text: str) -> None:
    """Check a grammar. Raises SettingError, in one line, if libllama cannot use it safely."""
    if len(text) > _MOST_TEXT:
        raise _error(f"it has more than {_MOST_TEXT} characters")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise _error("it has NUL characters, or bytes that are not UTF-8")
    rules = _Parser(text).rules()
    if ROOT not in rules:
        raise _error(f"it has no rule '{ROOT}'")
    for rule in rules.values():
        for part in (part for alternative in rule.alternatives for part in alternative):
            if part.rule and part.rule not in rules:
                raise _error(f"line {rule.line}: there is no rule '{part.rule}'")
    _check_recursion(rules, _empty_rules(rules))


def _error(why: str) -> SettingError:
    return SettingError("grammar", f"is not a grammar in GBNF: {why}")


class _Parser:
    """Parses as libllama's `llama_grammar_parser` does, or more strictly."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line_ends = [i for i, character in enumerate(text) if character == "\n"]
        self._rules: dict[str, _Rule] = {}
        self._n_groups = 0
        self._symbols: set[str] = set()
        self._n_made = 0
        """Rules into which libllama expands groups and repetitions."""
        self._n_elements = 0
        self._depth = 0

    def rules(self) -> dict[str, _Rule]:
        """All rules by name. Groups in parentheses are rules with generated names."""
        self._match(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._match(_NAME)
            if name is None:
                raise self._wrong("expected the name of a rule: letters, digits and -")
            self._symbols.add(name)
            line = self._line
            self._match(_SPACE)
            if not self._text.startswith("::=", self._at):
                raise self._wrong(f"'::=' must follow the name '{name}'")
            self._at += 3
            self._match(_SPACE_AND_LINES)
            self._alternatives(name, line, inside=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._wrong(f"{self._text[self._at]!r} is not allowed here")
            self._match(_SPACE_AND_LINES)
        return self._rules

    @property
    def _line(self) -> int:
        return bisect.bisect_left(self._line_ends, self._at) + 1

    def _wrong(self, why: str) -> SettingError:
        return _error(f"line {self._line}: {why}")

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return found[0]

    def _alternatives(self, name: str, line: int, inside: bool) -> None:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise self._wrong(f"more than {_MOST_DEPTH} parentheses are open")
        rule = _Rule(line, [self._sequence(inside)])
        while self._text.startswith("|", self._at):
            self._at += 1
            self._match(_SPACE_AND_LINES)
            rule.alternatives.append(self._sequence(inside))
        self._rules[name] = rule
        self._depth -= 1

    def _sequence(self, inside: bool) -> list[_Part]:
        space = _SPACE_AND_LINES if inside else _SPACE
        parts: list[_Part] = []
        last: _Item | None = None
        while self._at < len(self._text):
            first = self._text[self._at]
            start, n, n_rules, n_symbols = len(parts), 1, 1, self._n_symbols
            if first in "*+?{":
                if last is None or last.n_elements == 0:
                    raise self._wrong(f"{first!r} has nothing to repeat")
                self._repeat(parts, last)
                self._match(space)
                continue
            if first == '"':
                n = self._characters('"')
                parts += [_Part()] * bool(n)
            elif first == "[":
                n = self._class()
                parts += [_Part()] * bool(n)
            elif first == ".":
                self._at += 1
                parts.append(_Part())
            elif first == "(":
                self._at += 1
                self._match(_SPACE_AND_LINES)
                self._n_groups += 1
                self._n_made += 1
                name = f"({self._n_groups}"
                self._alternatives(name, self._line, inside=True)
                if not self._text.startswith(")", self._at):
                    raise self._wrong("')' is missing")
                self._at += 1
                parts.append(_Part(rule=name))
                n_rules = max(self._n_symbols - n_symbols, 1)
            elif (name_here := self._match(_NAME)) is not None:
                self._symbols.add(name_here)
                parts.append(_Part(rule=name_here))
            elif first in "<!":
                raise self._wrong("tokens as in <think> or <[7]> are not supported: write their text in quotes")
            else:
                break
            last = _Item(start, n, n_rules)
            self._count(n)
            self._match(space)
        return parts

    def _count(self, n: int) -> None:
        self._n_elements += n
        if self._n_elements > _MOST_ELEMENTS:
            raise self._wrong(f"more than {_MOST_ELEMENTS} characters and names so far, including repetitions")

    @property
    def _n_symbols(self) -> int:
        return len(self._symbols) + self._n_made

    def _repeat(self, parts: list[_Part], last: _Item) -> None:
        mark = self._text[self._at]
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(mark, (0, None))
        if mark == "{":
            found = _REPEAT.match(self._text, self._at)
            if found is None:
                raise self._wrong("write a repetition as {3}, {3,} or {3,5}")
            self._at = found.end()
            least = int(found[1][:9])
            most = least if found[2] is None else int(found[3][:9]) if found[3] else None
        else:
            self._at += 1
        if max(least, most or 0) > _MOST_REPETITIONS:
            raise self._wrong(f"more than {_MOST_REPETITIONS} repetitions")
        if most is not None and most < least:
            raise self._wrong(f"{{{least},{most}}} is not a valid range")
        n_times = max(least, most or 0, 1)
        self._count(last.n_elements * (n_times + 1))
        last.n_rules *= n_times
        if last.n_rules > _MOST_REPETITIONS:
            raise self._wrong(f"nested repetitions make more than {_MOST_REPETITIONS}: turn the inner one into a rule")
        self._n_made += 1 if most is None else most - least
        (part,) = parts[last.start :]
        n_repeats = (2 if most is None else n_times) * part.n_repeats
        parts[last.start :] = [_Part(part.rule, part.is_optional or least == 0, n_repeats)]

    def _characters(self, end: str) -> int:
        """Read from a quote up to the closing one. Returns the number of characters between them."""
        self._at += 1
        n = 0
        while not self._text.startswith(end, self._at):
            self._character()
            n += 1
        self._at += 1
        return n

    def _character(self) -> None:
        if self._at >= len(self._text):
            raise self._wrong("a quote or bracket is not closed")
        if self._match(_CHAR) is None:
            raise self._wrong(f"{self._text[self._at : self._at + 2]!r} is not an escape in GBNF")

    def _class(self) -> int:
        self._at += self._text.startswith("[^", self._at)
        self._at += 1
        n = 0
        while not self._text.startswith("]", self._at):
            self._character()
            n += 1
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                self._character()
                n += 1
        self._at += 1
        return n


def _empty_rules(rules: dict[str, _Rule]) -> frozenset[str]:
    """Rules that match the empty string. Since there may be thousands of alternatives and rules, each alternative is
    visited once per rule in it."""
    alternatives = [
        (name, {part.rule for part in alternative if not part.is_optional})
        for name, rule in rules.items()
        for alternative in rule.alternatives
    ]
    n_left = [len(needed) for _, needed in alternatives]
    users: dict[str, list[int]] = {}
    for number, (_, needed) in enumerate(alternatives):
        for name in needed:
            users.setdefault(name, []).append(number)
    empty: set[str] = set()
    waiting = [name for name, needed in alternatives if not needed]
    while waiting:
        name = waiting.pop()
        if name in empty:
            continue
        empty.add(name)
        for number in users.get(name, ()):
            n_left[number] -= 1
            if not n_left[number]:
                waiting.append(alternatives[number][0])
    return frozenset(empty)


@dataclass(slots=True)
class _Visit:
    """A rule on the stack of the traversal."""

    name: str
    parts: Iterator[_Part]
    """The parts with which its alternatives can begin, as far as they have not been visited."""
    n_times: int
    """How many times it counts for the rule above it."""
    n_ways: int = 1
    """Ways to its first character, as far as they are known."""


def _check_recursion(rules: dict[str, _Rule], empty: frozenset[str]) -> None:
    """Count each rule's ways to its first character, depth first. libllama follows all of them, and does not return if
    a rule leads back to itself. Raises SettingError for left recursion, and for too many ways."""
    ways: dict[str, int] = {}
    for start in rules:
        visits = [] if start in ways else [_Visit(start, _beginnings(rules[start], empty), 1)]
        while visits:
            visit = visits[-1]
            part = next(visit.parts, None)
            if part is None:
                visits.pop()
                ways[visit.name] = visit.n_ways
                if visit.n_ways > _MOST_WAYS:
                    raise _error(
                        f"line {rules[visit.name].line}: there are more than {_MOST_WAYS} ways to its first character"
                    )
                if visits:
                    visits[-1].n_ways += visit.n_ways * visit.n_times
                continue
            n_times = part.n_repeats if part.rule in empty else 1
            if not part.rule or part.rule in ways:
                visit.n_ways += ways.get(part.rule, 1) * n_times
            elif any(other.name == part.rule for other in visits):
                shown = next((v.name for v in reversed(visits) if not v.name.startswith("(")), ROOT)
                raise _error(
                    f"line {rules[shown].line}: rule '{shown}' begins with itself (left recursion): "
                    "write it as a repetition"
                )
            elif len(visits) > _MOST_RULES_DEEP:
                raise _error(f"line {rules[part.rule].line}: more than {_MOST_RULES_DEEP} rules begin with each other")
            else:
                visits.append(_Visit(part.rule, _beginnings(rules[part.rule], empty), n_times))


def _beginnings(rule: _Rule, empty: frozenset[str]) -> Iterator[_Part]:
    for alternative in rule.alternatives:
        for part in alternative:
            yield part
            if not (part.is_optional or part.rule in empty):
                break
