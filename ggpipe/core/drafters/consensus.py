"""How probable draft tokens are after a parent that several drafters drafted for.

First, Dempster's rule combines the drafters' calibrated probabilities as if their mistakes had nothing to do with each
other. A drafter gives each token that it named its probability, and leaves the rest open. So

    two drafters name one token with p and q     1 - (1 - p) (1 - q)
    each names another token                     p (1 - q) / (1 - p q), and the same for q

Drafters of one family make the same mistakes, so what comes out is then calibrated: by the drafters that named a token,
the others that named a sibling of it, and the combined probability. Each drafter's own calibration learns nothing here.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping

from ggpipe.core.drafters.calibration import Calibration
from ggpipe.core.tree import Node

_MOST = 0.999
"""Probability of all tokens that a drafter named, at most: no drafter overrules all others."""

_Namers = tuple[frozenset[int], frozenset[int]]
"""The drafters that named a token, and all that named it or a sibling of it."""


def combined(beliefs: Collection[dict[int, float]]) -> dict[int, float]:
    """The probability of each token by Dempster's rule. `beliefs`: by drafter, the probability of each token that it
    named."""
    masses: dict[int, float] = {}
    is_open = 1.0
    for belief in beliefs:
        named = sum(belief.values())
        scale = min(_MOST / named, 1.0) if named > 0 else 1.0
        own_open = 1 - named * scale
        masses = {
            token: masses.get(token, 0.0) * (own_open + own) + is_open * own
            for token in (masses | belief)
            for own in (belief.get(token, 0.0) * scale,)
        }
        is_open *= own_open
        total = is_open + sum(masses.values())
        masses = {token: mass / total for token, mass in masses.items()}
        is_open /= total
    return masses


class Consensus:
    """See the module's text. For one request."""

    def __init__(self) -> None:
        self._learned: dict[_Namers, Calibration] = collections.defaultdict(Calibration)

    def probabilities(self, siblings: Collection[Node], calibrations: Mapping[int, Calibration]) -> list[float] | None:
        """How probable each of these draft tokens is after its parent. `siblings`: all children of a node.
        `calibrations`: by drafter. None where a single drafter named all of them."""
        if (judged := _judged(siblings, calibrations)) is None:
            return None
        return [self._learned[namers].probability(prob) if namers in self._learned else prob for namers, prob in judged]

    def judged(self, siblings: Collection[Node], token: int, calibrations: Mapping[int, Calibration]) -> None:
        """The target's token after the parent of these draft tokens is known."""
        for node, (namers, prob) in zip(siblings, _judged(siblings, calibrations) or (), strict=False):
            self._learned[namers].judged(prob, node.token == token)


def _judged(siblings: Collection[Node], calibrations: Mapping[int, Calibration]) -> list[tuple[_Namers, float]] | None:
    """Of each of these draft tokens, who named it, and its combined probability. None where a single drafter named
    all of them."""
    if len({proposal.drafter for node in siblings for proposal in node.proposals}) < 2:
        return None
    beliefs: dict[int, dict[int, float]] = {}
    for node in siblings:
        for proposal in node.proposals:
            belief = beliefs.setdefault(proposal.drafter, {})
            probability = calibrations[proposal.drafter].probability(proposal.prob)
            belief[node.token] = max(probability, belief.get(node.token, 0.0))
    probabilities, everyone = combined(beliefs.values()), frozenset(beliefs)
    return [
        ((frozenset(proposal.drafter for proposal in node.proposals), everyone), probabilities[node.token])
        for node in siblings
    ]
