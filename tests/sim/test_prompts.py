"""Time to the first token on bundled clusters, against an ideal: all stages busy, plus the way through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.toml import CLUSTERS, read_cluster
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.sim.arrivals import Traffic
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulation_spec import SimulationSpec, SyntheticText
from ggpipe.sim.virtual_cluster import build, placement_of

MOST = 1.25
_WIDTH, _EXPERT, _BYTES = 4096, int(0.57 * 128 * 3 * 4096 * 1536), 0.57
MIXTURE = ModelShape(
    name="a mixture of 128 experts of which a row uses 8",
    layer_bytes=(_EXPERT + int(_BYTES * 72e6),) * 94,
    input_bytes=int(_BYTES * 622e6),
    output_bytes=int(_BYTES * 622e6),
    parameters_per_byte=1 / _BYTES,
    n_embd=_WIDTH,
    layer_cell_bytes=(2048.0,) * 94,
    n_vocab=151936,
    layer_expert_bytes=(_EXPERT,) * 94,
    n_expert=128,
    n_expert_used=8,
)


def spec_of(name: str, n_stages: int, n_prompt: int, target: ModelShape | None = None) -> SimulationSpec:
    cluster = read_cluster(CLUSTERS / f"{name}.toml")
    nodes = tuple(replace(node, memory_bytes=1e12) for node in cluster.nodes)
    cluster = replace(cluster, nodes=nodes, target_on=cluster.target_on[:n_stages])
    target = target or cluster.target
    assert target is not None
    placement = placement_of(cluster, target, cluster.drafts)
    return SimulationSpec(
        cluster=cluster,
        placement=placement,
        target=target,
        drafts=cluster.drafts,
        speculation=SpeculationConfig(),
        tokens=SyntheticText(n_prompt=n_prompt),
        n_predict=1,
        sizes=Sizes(n_ctx=0),
    )


def ttft_s(spec: SimulationSpec) -> float:
    ttft_s = spec.run("iterative")[0].ttft_s
    assert ttft_s is not None
    return ttft_s


def ideal_s(spec: SimulationSpec) -> float:
    """The slowest stage computes all rows in the longest runs, and the last row goes through the others alone."""
    virtual = build(spec.cluster, spec.placement, spec.target, spec.drafts)
    assert isinstance(spec.tokens, SyntheticText)
    n_prompt = spec.tokens.n_prompt
    costs = [virtual.target.stages[stage.ranks[0]].cost for stage in virtual.target.layout.stages]
    through_s = sum(cost.seconds(1, n_prompt) for cost in costs)
    return max(
        through_s
        - cost.seconds(1, n_prompt)
        + sum(cost.seconds(min(512, n_prompt - at), at) for at in range(0, n_prompt, 512))
        for cost in costs
    )


@pytest.mark.parametrize("n_prompt", [32, 57, 128, 480, 2000])
@pytest.mark.parametrize(
    ("name", "n_stages"),
    [
        ("nodes8-gigabit", 2),
        ("nodes8-gigabit", 4),
        ("nodes8-gigabit", 8),
        ("nodes8-100g", 8),
        ("nodes32-gigabit", 16),
        ("nodes32-100g", 16),
        ("office", 5),
    ],
)
def test_the_first_token_comes_nearly_as_soon_as_it_can(name: str, n_stages: int, n_prompt: int) -> None:
    spec = spec_of(name, n_stages, n_prompt)
    assert 1 <= ttft_s(spec) / ideal_s(spec) <= MOST


@pytest.mark.parametrize(("n_prompt", "most_s"), [(128, 5.0), (2000, 48.0)])
def test_seventy_billion_parameters_on_eight_nodes(n_prompt: int, most_s: float) -> None:
    assert ttft_s(spec_of("nodes8-gigabit", 8, n_prompt)) <= most_s


@pytest.mark.parametrize(("n_stages", "n_prompt"), [(2, 128), (2, 480), (4, 480), (2, 2000), (4, 2000), (8, 2000)])
def test_mixtures_read_their_experts_for_many_rows(n_stages: int, n_prompt: int) -> None:
    spec = spec_of("nodes8-gigabit", n_stages, n_prompt, MIXTURE)
    assert 1 <= ttft_s(spec) / ideal_s(spec) <= MOST


@pytest.mark.parametrize("n_prompt", [32, 128, 480])
def test_short_prompts_of_mixtures_are_slower_than_the_ideal_and_faster_than_in_one_run(n_prompt: int) -> None:
    """Short runs share few experts: the ideal, in which all rows share them, cannot be reached."""
    spec = spec_of("nodes8-gigabit", 8, n_prompt, MIXTURE)
    costs = build(spec.cluster, spec.placement, spec.target, spec.drafts).target.stages.values()
    assert ttft_s(spec) <= 0.6 * sum(cost.cost.seconds(n_prompt, 0) for cost in costs)


@pytest.mark.parametrize("n_users", [2, 4, 8])
def test_prompts_that_arrive_together_keep_all_stages_busy(n_users: int) -> None:
    """The last of them is through when one prompt as long as all of them could be."""
    spec = spec_of("nodes8-gigabit", 8, 128)
    together = replace(spec, traffic=Traffic(n_total=n_users, n_requests=n_users))
    times = [stats.ttft_s for stats in together.run("iterative")]
    ideal = ideal_s(replace(spec, tokens=SyntheticText(n_prompt=128 * n_users)))
    assert max(time for time in times if time is not None) <= MOST * ideal
