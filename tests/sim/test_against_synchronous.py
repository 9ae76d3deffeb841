"""Without any setting, `async` is about as fast as the best of several synchronous settings, or faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.virtual import ASYNC, ITERATIVE, cluster

from ggpipe.cluster.links import Link, Overheads
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.sim.simulator import simulate
from ggpipe.sim.text import SyntheticTokens
from ggpipe.sim.virtual_cluster import PipelineSpec, VirtualCluster

N = 128
STAGE_S = 0.04
CORES = 8
ETHERNET = Link(3e-4, 1e8)


def with_threads(pipeline: PipelineSpec, threads: int, nice: bool) -> PipelineSpec:
    stages = {rank: replace(stage, threads=threads, nice=nice) for rank, stage in pipeline.stages.items()}
    return replace(pipeline, stages=stages)


def machines(n_stages: int, draft_share: float, row_share: float, has_spare: bool) -> VirtualCluster:
    """A machine of eight cores for each stage. The draft has one of its own, or half the threads of the first stage's
    machine, as in the head's process. `draft_share`: its time for a token, relative to a stage's."""
    stages_s = [STAGE_S] * n_stages
    own = cluster(stages_s, STAGE_S * draft_share, row_share=row_share, overheads=Overheads(), link=ETHERNET)
    draft = with_threads(own.drafts[0], CORES if has_spare else CORES // 2, nice=not has_spare)
    return replace(
        own,
        nodes=tuple(replace(node, cores=CORES) for node in own.nodes),
        node_of=own.node_of if has_spare else (*range(n_stages), 0),
        target=with_threads(own.target, CORES, nice=False),
        drafts=(draft,),
    )


@pytest.mark.parametrize("row_share", [0.02, 0.1])
@pytest.mark.parametrize("draft_share", [0.1, 0.4])
@pytest.mark.parametrize("has_spare", [False, True])
@pytest.mark.parametrize("n_stages", [1, 4])
def test_it_finds_the_faster_way(n_stages: int, has_spare: bool, draft_share: float, row_share: float) -> None:
    virtual = machines(n_stages, draft_share, row_share, has_spare)
    text = SyntheticTokens(0.75, 40, N, seed=1)
    synchronous = [SpeculationConfig(mode="speculative", n_draft=n) for n in (1, 3, 5)]
    best, own = (
        max(simulate(virtual, text, one, N).decode_tps or 0.0 for one in tried)
        for tried in ((ITERATIVE, *synchronous), (ASYNC,))
    )
    assert own > (1.1 if has_spare else 0.93) * best, own / best
