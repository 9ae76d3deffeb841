"""Which draft tokens fit a grammar.

Copies of the grammar's state follow the paths of the tree, for at most a small share of the time. Draft tokens that do
not fit are not added to the tree.
"""

from __future__ import annotations

import time

from ggpipe.llama.grammar import Grammar

_SHARE = 0.02  # of the time since a request began, for looking at draft tokens
_AT_ONCE_S = 20e-3


class GrammarDraftCheck:
    """Which draft tokens fit a grammar. It is followed along the paths that are asked for, which takes a copy for each
    place; where that takes long, draft tokens count as fitting."""

    def __init__(self, grammar: Grammar) -> None:
        """`grammar`: its state after the last accepted token. Call `accept` after advancing it."""
        self._root = grammar
        self._behind: dict[tuple[int, ...], Grammar | None] = {}
        """By path; None: it does not fit."""
        self._began = time.monotonic()
        self._spent_s = 0.0

    def fits(self, path: tuple[int, ...], token: int) -> bool:
        """Whether a token may follow these draft tokens, which follow the last accepted token."""
        start = time.monotonic()
        if self._spent_s > _AT_ONCE_S + _SHARE * (start - self._began):
            return True
        grammar: Grammar | None = self._root
        for n in range(1, len(path) + 1):
            if path[:n] not in self._behind:
                grammar = grammar.clone() if grammar is not None else None
                if grammar is not None and not grammar.accept(path[n - 1]):
                    grammar.close()
                    grammar = None
                self._behind[path[:n]] = grammar
            grammar = self._behind[path[:n]]
        found = grammar is not None and grammar.fits(token)
        self._spent_s += time.monotonic() - start
        return found

    def accept(self, token: int) -> None:
        """Continue after this accepted token, and forget paths that do not begin with it."""
        behind = {}
        for path, grammar in self._behind.items():
            if len(path) > 1 and path[0] == token:
                behind[path[1:]] = grammar
            elif grammar is not None:
                grammar.close()
        self._behind = behind

    def close(self) -> None:
        """Free the copies."""
        for grammar in self._behind.values():
            if grammar is not None:
                grammar.close()
        self._behind.clear()
