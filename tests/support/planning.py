"""Clusters and models to plan for, and what holds of any plan."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import pytest

from ggpipe.cluster.links import Link
from ggpipe.cluster.model_shape import ModelShape, even_shape
from ggpipe.cluster.spec import ClusterSpec, NodeSpec
from ggpipe.config.layer_split import n_ranks_of, parse_layer_split, text_of
from ggpipe.core.layout import lay_out
from ggpipe.planning import evaluate
from ggpipe.planning.candidates import CandidateSearch, Constraints
from ggpipe.planning.evaluate import Candidate, Evaluator
from ggpipe.planning.placements import Arrangement
from ggpipe.planning.plan import Plan
from ggpipe.planning.planner import PlanRequest
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulation_spec import SyntheticText

GB = 1e9
TARGET = even_shape(
    name="target", n_layer=24, weight_bytes=40 * GB, parameters=70e9, n_embd=8192, cell_bytes=320e3, n_vocab=32000
)
DRAFT = even_shape(
    name="draft", n_layer=8, weight_bytes=1 * GB, parameters=1.8e9, n_embd=2048, cell_bytes=32e3, n_vocab=32000
)
SMALL = even_shape(
    name="target", n_layer=4, weight_bytes=8 * GB, parameters=14e9, n_embd=4096, cell_bytes=120e3, n_vocab=32000
)
NETWORK, LOCAL = Link(80e-6, 1e8), Link(40e-6, 5e9)


@contextlib.contextmanager
def shorter_outputs(full: bool) -> Iterator[None]:
    """Without --full, plans are compared on outputs of a quarter of the length: what holds of any plan holds of those
    too."""
    with pytest.MonkeyPatch.context() as patch:
        if not full:
            patch.setattr(evaluate, "_SHORT", evaluate._SHORT // 4)
            patch.setattr(evaluate, "_LONG", evaluate._LONG // 4)
        yield


def boxes(n: int) -> str:
    """A cluster file of `n` equal machines."""
    return f"""
[network]
latency_us = 50
gbit_per_s = 10

[[node]]
name = "box"
count = {n}
cores = 4
memory_gb = 8
memory_gb_per_s = 20
core_gflops = 20
"""


def node(name: str, speed: float = 1.0, memory_gb: float = 64, cores: int = 8) -> NodeSpec:
    """A machine that is `speed` times as fast as any."""
    return NodeSpec(
        name=name,
        cores=cores,
        memory_bytes=memory_gb * GB,
        bytes_per_s=speed * 40 * GB,
        core_bytes_per_s=speed * 8 * GB,
        core_flop_per_s=speed * 50e9,
    )


def cluster(*nodes: NodeSpec, ranks: Sequence[int] | None = None) -> ClusterSpec:
    on = tuple(range(len(nodes)) if ranks is None else ranks)
    return ClusterSpec(
        title="test", nodes=nodes, target_on=on, draft_on=(), target=None, draft=None, network=NETWORK, local=LOCAL
    )


def request(
    effort: float = 0.2, tokens: SyntheticText | None = None, groups: bool = False, **needs: object
) -> PlanRequest:
    return PlanRequest(
        constraints=Constraints(n_ctx=4096, n_ubatch=512, groups=groups, **needs),  # type: ignore[arg-type]
        tokens=tokens or SyntheticText(agreement=0.7, n_prompt=32),
        tunes=False,
        effort=effort,
    )


def layers_of(plan: Plan) -> list[int]:
    """Of the target's ranks."""
    return [rank.layers[1] - rank.layers[0] for rank in plan.ranks if not rank.drafts]


def check(plan: Plan, spec: ClusterSpec, target: ModelShape) -> None:
    """What holds of any plan."""
    used: Counter[str] = Counter()
    for rank in plan.ranks:
        used[rank.node] += rank.memory.total  # type: ignore[assignment]
        assert rank.threads >= 1
    for machine in spec.nodes:
        assert used[machine.name] <= machine.memory_bytes
    layout = plan.placement.layout
    assert layout is not None
    assert sum(b - a for a, b in (stage.layers for stage in layout.stages)) == target.n_layer
    split, *drafts = parse_layer_split(text_of(plan.placement.layer_splits))
    assert split is not None
    assert lay_out(target.n_layer, len(layout.layers), split) == layout
    assert max(split.sizes) <= target.max_parts
    assert not plan.placement.tensor_split or len(plan.placement.tensor_split) in split.sizes
    assert n_ranks_of(drafts) == sum(rank.drafts for rank in plan.ranks) == len(plan.placement.draft_on)
    assert len(plan.placement.threads) == len(plan.ranks) == len(plan.places)


def fastest(spec: ClusterSpec, own: PlanRequest, arrangements: Iterable[Arrangement], full: bool) -> float:
    """Tokens/s of the best of all candidates of `SMALL` with its draft in `async`, each of them simulated: all of them
    carefully with `full`, else those that may be the best by a short simulation."""
    evaluator = Evaluator(spec, SMALL, DRAFT, own.tokens, Sizes())
    possible = CandidateSearch(spec, SMALL, DRAFT, own.constraints)
    candidates = []
    for arrangement in arrangements:
        choices = [range(0 if skip else 1, SMALL.n_layer + 1) for skip in arrangement.skips]
        for counts in itertools.product(*choices):
            candidate = Candidate(arrangement, counts)
            if sum(counts) == SMALL.n_layer and possible.fits(candidate):
                candidates.append(candidate)
    if not full:
        speeds = {candidate: evaluator.evaluate(candidate, "async").tokens_per_s for candidate in candidates}
        least = 0.9 * max(speeds.values())
        candidates = [candidate for candidate in candidates if speeds[candidate] >= least]
    return max(evaluator.evaluate(candidate, "async", carefully=True).tokens_per_s for candidate in candidates)
