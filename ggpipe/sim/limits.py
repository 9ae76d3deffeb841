"""What schedulers and drafters of a virtual cluster are told of their pipelines."""

from __future__ import annotations

import collections
from dataclasses import dataclass, replace

from ggpipe.config.context import MAX_SEQUENCES, MAX_STATES
from ggpipe.config.draft import WINDOW
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.drafters import registry
from ggpipe.core.layout import RankPlace, crowding
from ggpipe.core.overtaking import pays
from ggpipe.core.request import Limits
from ggpipe.sim.virtual_cluster import PipelineSpec, VirtualCluster


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the context and of batches. See `n_ctx`, `n_batch` and `n_ubatch` of ContextConfig."""

    n_ctx: int = 4096
    n_batch: int = 2048
    n_ubatch: int = 512
    n_in_flight: int = 0
    """Maximum number of runs in the target's pipeline; 0: one more than there are stages."""
    n_requests: int = 1
    """Requests that are served at the same time."""
    window: int = WINDOW
    """See `DraftConfig`."""


def target_limits(sizes: Sizes, cluster: VirtualCluster, speculation: SpeculationConfig, n_drafters: int) -> Limits:
    """The limits of the target's pipeline. `n_drafters`: of each request."""
    limits = limits_of(sizes, cluster.target, speculation, n_drafters)
    crowded = crowding(cluster.target.layout, [draft.layout for draft in cluster.drafts], _places(cluster))
    late = crowded > 0 and not any(registry.reads_states(draft.drafter) for draft in cluster.drafts)
    n_in_flight = sizes.n_in_flight or limits.n_in_flight
    sharing = registry.sharing(dict(enumerate(draft.drafter for draft in cluster.drafts)))
    layout = cluster.target.layout
    may_pause = limits.n_requests > 1 and pays(len(layout.stages) == 1, limits.work.sparsity)
    n_pauses = layout.fewest_layers - 1 if may_pause else 0
    return replace(
        limits, n_in_flight=n_in_flight, crowding=crowded, drafts_late=late, sharing=sharing, n_pauses=n_pauses
    )


def limits_of(sizes: Sizes, model: PipelineSpec, speculation: SpeculationConfig, n_drafters: int = 1) -> Limits:
    """The limits of a model's pipeline, whatever else is on its machines."""
    n_paths = speculation.sequences + n_drafters - 1
    n_branches = speculation.branches if model.rolls_back else MAX_STATES
    return Limits(
        n_ctx=sizes.n_ctx,
        n_batch=sizes.n_batch,
        n_ubatch=sizes.n_ubatch,
        n_in_flight=len(model.layout.stages) + 1,
        n_seq=max(min(n_paths * sizes.n_requests + n_branches, MAX_SEQUENCES), sizes.n_requests),
        n_requests=sizes.n_requests,
        partial_prefixes=model.rolls_back,
        rolls_back=model.rolls_back,
        work=model.work,
    )


def _places(cluster: VirtualCluster) -> list[RankPlace]:
    """Where each rank is. A machine with several sockets has several nodes."""
    n_cores = collections.Counter[str]()
    for node in cluster.nodes:
        n_cores[node.host] += node.cores
    stages = {rank: stage for pipeline in (cluster.target, *cluster.drafts) for rank, stage in pipeline.stages.items()}
    hosts = [cluster.host(rank) for rank in range(len(cluster.node_of))]
    threads = (stages[rank].threads if rank in stages else 0 for rank in range(len(hosts)))
    return [RankPlace(host, n_cores[host], n_threads) for host, n_threads in zip(hosts, threads, strict=True)]
