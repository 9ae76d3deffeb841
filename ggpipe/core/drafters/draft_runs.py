"""What goes into a draft model's next run: tips of requests' trees, and tokens of a prompt with them."""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Collection

from ggpipe.core.drafters.draft_state import DraftState
from ggpipe.core.prompt_chunks import TILE
from ggpipe.core.run_cost import RunCost, most_per_second

_READING = 5.0
"""How many times as long prompts make runs with draft tokens of others, approximately. With 3, requests decode up to
3 % faster or slower, with 9 up to 6 % slower (simulated: prompts of 500 to 3,000 tokens that arrive at random, on five
clusters)."""
_FIRST_READ = 32
"""Rows of a prompt in such a run, before a run has shown what they take."""


def n_best_first(states: Collection[DraftState], cost: RunCost, most: int) -> collections.Counter[DraftState]:
    """How many tips of each tree that grows best-first are decoded next: the most probable paths of all requests, as
    many as bring most for the run's time, and `most` rows at most."""
    most = min(most, cost.most_rows)
    tips = [
        (state.path_probability(node), state)
        for state in states
        if state.is_best_first
        for node in itertools.islice(state.tips(), min(state.begin.speculation.draft_rows, most))
    ]
    if len(states) > 1:
        tips.sort(key=operator.itemgetter(0), reverse=True)
    n = most_per_second([probability for probability, _ in tips[:most]], cost)
    return collections.Counter([state for _, state in tips[:n]])


def rows_beside(n_tips: int, cost: RunCost, most: int) -> int:
    """How many tokens of a prompt are read in a run with `n_tips` tips of other requests, and `most` rows at most."""
    row_s = cost.prompt_row_s(_FIRST_READ)
    if row_s is None or not cost.is_known:
        return max(min(_FIRST_READ, most - n_tips), 1)
    n = round((_READING - 1) * cost.seconds(max(n_tips, 1)) / row_s) if row_s else most
    return max(min(n // TILE * TILE, most - n_tips), 1)
