"""Pieces of grammars in llguidance's form of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping


class Marks:
    """Spells output that contains special tokens, which have no spelling in a grammar."""

    def __init__(self, special_tokens: Mapping[str, int], ends: Collection[int] = ()) -> None:
        """`special_tokens`: ids by name. `ends`: those that end the output."""
        self._ids = special_tokens
        names = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._names = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._others = sorted(set(special_tokens.values()).difference(ends))

    def spelled(self, text: str) -> str:
        """A text as a sequence of strings and special tokens."""
        parts = self._names.split(text) if self._names is not None else [text]
        found = [f"<[{self._ids[part]}]>" if i % 2 else string(part) for i, part in enumerate(parts) if part]
        return " ".join(found) or '""'

    def is_token(self, text: str) -> bool:
        """Whether the whole text is one special token."""
        return text in self._ids

    def other_tokens(self, marks: Collection[str]) -> str:
        """Any special token but `marks` and those that end the output; empty if there is none."""
        taken = {self._ids[mark] for mark in marks if mark in self._ids}
        ids = [token for token in self._others if token not in taken]
        return f"<[{_ranges(ids)}]>" if ids else ""

    def until(self, name: str, mark: str, not_first: str = "") -> dict[str, str]:
        """Rules for any text up to and including the first `mark`. `name`: of the rule. `not_first`: the text does not
        begin with this. If only a part of the mark is a special token, there is no other special token in the text."""
        if self.is_token(mark):
            free = self.free(f"{name}-text", (mark,), not_first)
            return {name: f"{name}-text {self.spelled(mark)}", **free}
        if (found := self._names.search(mark) if self._names is not None else None) is not None:
            text, terminal = mark[: found.start()], terminal_name(f"{name}-head")
            head, times = (f"/(?s:.*){regex(text)}/", "") if text else ("/(?s:.+)/", "?")
            return {name: f"{terminal}{times} {self.spelled(mark[found.start() :])}", terminal: head}
        free = self.free(f"{name}-text", (mark,), not_first, is_whole=False)
        head = f"/(?s:.*){regex(mark)}/"
        terminal = terminal_name(f"{name}-mark")
        if not_first:
            head += f" & ~/{regex(not_first)}(?s:.*)/"
        rules = {terminal: head, f"{name}-end[lazy]": terminal}
        return {name: f"{name}-text {name}-end" if free else f"{name}-end", **rules, **free}

    def free(self, name: str, without: Collection[str], not_first: str = "", is_whole: bool = True) -> dict[str, str]:
        """Rules for any text without `without`, which may be empty. `is_whole`: false: only what comes before the last
        special token in it. No rules if it is always empty."""
        other = self.other_tokens(without)
        terminal = terminal_name(name)
        limits = "".join(f" & ~/(?s:.*){regex(mark)}(?s:.*)/" for mark in without if not self.is_token(mark))
        rules = {terminal: f"/(?s:.+)/{limits}"}
        first = terminal
        if not_first:
            first = terminal_name(f"{name}-first")
            rules[first] = f"/(?s:.+)/{limits} & ~/{regex(not_first)}(?s:.*)/"
        if not other:
            return {name: f"{first}?", **rules} if is_whole else {}
        last, alone = (f" {terminal}?", f" | {first}") if is_whole else ("", "")
        return {name: f"( {first}? {other} ( {terminal}? {other} )*{last} )?{alone}", **rules}


def terminal_name(name: str) -> str:
    """The name of a terminal that belongs to a rule."""
    return name.upper().replace("-", "_")


def string(text: str) -> str:
    """A text as a string."""
    return json.dumps(text, ensure_ascii=False)


def regex(text: str) -> str:
    """A text as a part of a regular expression between slashes."""
    return (
        re.sub(r"([][(){}|*+?.^$/\\#&~-])", r"\\\1", text)
        .replace("\n", r"\n")
        .replace("\r", r"\r")
        .replace("\t", r"\t")
    )


def written(rules: Mapping[str, str]) -> str:
    """Rules, one a line."""
    return "\n".join(f"{name}: {rule}" for name, rule in rules.items())


def _ranges(ids: Collection[int]) -> str:
    found: list[list[int]] = []
    for token in sorted(ids):
        if found and found[-1][1] == token - 1:
            found[-1][1] = token
        else:
            found.append([token, token])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in found)
