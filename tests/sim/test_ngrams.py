"""N-grams where an output copies its prompt: how fast they fill the pipeline, and what draft models do meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.quoting import Quote
from support.virtual import ASYNC, ITERATIVE, checked, cluster

from ggpipe.cluster.links import Overheads
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulator import simulate
from ggpipe.sim.text import SimulatedTokens, SyntheticTokens
from ggpipe.sim.virtual_cluster import VirtualCluster

ALONE, DRAFT, BOTH = (replace(ASYNC, drafters=kinds) for kinds in (("ngram",), ("draft",), ("draft", "ngram")))
SIZES = Sizes(2048)
DEAR = 0.35
"""A further row's cost, as a share of a run's, where 32 rows cost 12 times one."""


def times_iterative(own: VirtualCluster, text: SimulatedTokens, speculation: object = ALONE) -> float:
    """Speed relative to iterative decoding."""
    base = simulate(own, text, ITERATIVE, len(text.output), SIZES)
    stats = checked(own, text, speculation, SIZES)  # type: ignore[arg-type]
    assert base.decode_tps is not None
    assert stats.decode_tps is not None
    return stats.decode_tps / base.decode_tps


def test_a_copy_is_as_fast_as_rows_are_cheap() -> None:
    """From nothing: the output is all that the drafter ever saw."""
    free, dear = (cluster((0.02, 0.02), row_share=share) for share in (0.01, DEAR))
    assert times_iterative(free, Quote(144)) > 9
    assert times_iterative(dear, Quote(144)) > 3.1
    bound = 2 * 64 / (1 + 63 * DEAR)
    assert times_iterative(dear, Quote(512)) > 0.7 * bound


def test_a_copy_next_to_a_draft_model() -> None:
    free = cluster((0.02, 0.02), 0.004, row_share=0.01)
    alone, together = (times_iterative(free, Quote(144), drafters) for drafters in (DRAFT, BOTH))
    assert together > 9 > 2 * alone


def test_a_copy_with_changes() -> None:
    """Each change ends what is in flight; the copy goes on behind it."""
    dear = cluster((0.02, 0.02), row_share=DEAR)
    assert times_iterative(dear, Quote(288, changed=24)) > 2.5


@pytest.mark.parametrize(("n", "share", "gain"), [(144, 0.5, 1.9), (512, 0.1, 2.5)])
def test_a_draft_model_on_the_targets_cores_rests_while_n_grams_copy(n: int, share: float, gain: float) -> None:
    own = cluster((0.015, 0.015), 0.004, row_share=DEAR, cores=2, crowd=0.85, overheads=Overheads())
    stats = checked(own, Quote(n), BOTH, SIZES)
    alone = checked(own, Quote(n), DRAFT, SIZES)
    assert len(stats.draft_runs) < share * len(alone.draft_runs)
    assert stats.decode_tps is not None
    assert alone.decode_tps is not None
    assert stats.decode_tps > gain * alone.decode_tps


def test_new_text_costs_nothing() -> None:
    text = SyntheticTokens(0.7, 128, 300, 1)
    own = cluster((0.02, 0.02), 0.004, row_share=DEAR)
    without, together = (simulate(own, text, drafters, 300, SIZES).decode_tps or 0.0 for drafters in (DRAFT, BOTH))
    assert together > 0.99 * without
    assert times_iterative(cluster((0.02, 0.02), row_share=DEAR), text) > 0.99
