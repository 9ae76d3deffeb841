"""Texts that go on until a mark, as rules of a grammar."""

from __future__ import annotations

from ggpipe.text.grammar.json_text import class_character, quoted


def until(mark: str, name: str, then: str, may_end: bool) -> dict[str, str]:
    """Rules for any text in which `mark` comes once, at its end, and `then` follows; the first rule has this name.
    `may_end`: the text may as well end before the mark comes.

    A rule for each number of the mark's characters that the text ends with (Knuth, Morris and Pratt's automaton).
    """
    rules = {}
    for n in range(len(mark)):
        ways: dict[int, str] = {}
        for character in dict.fromkeys(mark):
            behind = _n_begun(mark, mark[:n] + character)
            if behind:
                ways[behind] = ways.get(behind, "") + character
        others = "".join(class_character(character) for character in "".join(ways.values()))
        rule = [f"[^{others}] {name}"] if others else [f". {name}"]
        for behind, characters in ways.items():
            after = then if behind == len(mark) else f"{name}-{behind}"
            rule += [f"{quoted(character)} {after}" for character in characters]
        rules[f"{name}-{n}" if n else name] = " | ".join(rule) + (' | ""' if may_end else "")
    return rules


def _n_begun(mark: str, text: str) -> int:
    """How many characters at the end of a text are the mark's beginning."""
    return next((n for n in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:n])), 0)
