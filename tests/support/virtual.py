"""Virtual clusters whose times can be worked out by hand."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from unittest import mock

from ggpipe.cluster.links import Link, Overheads
from ggpipe.cluster.profile import Kernels, LinkProfile, MeasuredLayers, ModelFacts, Point, Profile, RankProfile
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.drafters import registry
from ggpipe.core.drafters.base import DraftAction, DraftEvent
from ggpipe.core.drafters.draft_model import DraftModel
from ggpipe.core.events import RunEnded, SchedulerAction, SchedulerEvent, SubmitRun
from ggpipe.core.layout import lay_out
from ggpipe.core.messages import Run
from ggpipe.core.request import Finish
from ggpipe.core.scheduler import Scheduler
from ggpipe.sim import simulator
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulator import simulate
from ggpipe.sim.text import SimulatedTokens, SyntheticTokens
from ggpipe.sim.virtual_cluster import PipelineSpec, StageSpec, VirtualCluster, VirtualNode
from ggpipe.stats.records import RequestStats
from support import examples

ITERATIVE, SPECULATIVE, ASYNC = (SpeculationConfig(mode=mode) for mode in ("iterative", "speculative", "async"))
CHAINS = replace(ASYNC, policy="thresholds")
NO_OVERHEADS = Overheads(**dict.fromkeys(Overheads.__dataclass_fields__, 0.0))
FAST = Link(1e-6, 1e15)


@dataclass(frozen=True)
class Linear:
    """`run_s` for a run, and `row_s` for each row beyond the first."""

    run_s: float
    row_s: float = 0.0

    def seconds(self, n_rows: int, n_past: float, n_others: float = 0) -> float:
        return self.run_s + self.row_s * (n_rows - 1)


def cluster(
    stages_s: Sequence[float],
    draft_s: float | None = None,
    *,
    row_share: float = 0.0,
    draft_rank: bool = True,
    cores: int | None = None,
    crowd: float = 1.0,
    link: Link = FAST,
    overheads: Overheads = NO_OVERHEADS,
    rolls_back: bool = True,
) -> VirtualCluster:
    """A stage for each time, then the draft. `cores`: those of one node for all ranks; None: a node for each rank.

    A row beyond the first takes `row_share` of a run's time. `draft_rank`: the draft has a rank of its own.
    `rolls_back`: as in `Limits`.
    """
    n_target, n_ranks = len(stages_s), len(stages_s) + (draft_s is not None and draft_rank)
    alone = cores is None
    nodes = (
        tuple(VirtualNode(name=f"node{i}", cores=1, crowd=crowd) for i in range(n_ranks))
        if cores is None
        else (VirtualNode(name="one", cores=cores, crowd=crowd),)
    )
    target = PipelineSpec(
        layout=lay_out(n_target, n_target, None),
        stages={
            rank: StageSpec(threads=1, cost=Linear(s, s * row_share), state_s=None if rolls_back else 0.0)
            for rank, s in enumerate(stages_s)
        },
        row_bytes=1000,
        rolls_back=rolls_back,
    )
    draft = None
    if draft_s is not None:
        head = n_target if draft_rank else 0
        draft = PipelineSpec(
            layout=lay_out(1, 1, None, head),
            stages={head: StageSpec(threads=1, cost=Linear(draft_s), nice=not (alone and draft_rank))},
            row_bytes=0,
        )
    node_of = tuple(range(n_ranks)) if alone else (0,) * n_ranks
    return VirtualCluster(
        title="test",
        nodes=nodes,
        node_of=node_of,
        target=target,
        drafts=(draft,) if draft is not None else (),
        links={},
        network=link,
        local=link,
        overheads=overheads,
    )


def several_drafts(stages_s: Sequence[float], drafts_s: Sequence[float], row_share: float) -> VirtualCluster:
    """A stage for each time, and draft models that take these times for a token, each on a node of its own. For all
    models, a row beyond the first takes `row_share` of a run's time."""
    own = cluster(stages_s, row_share=row_share)
    first = len(stages_s)
    drafts = [
        PipelineSpec(
            layout=lay_out(1, 1, None, rank),
            stages={rank: StageSpec(threads=1, cost=Linear(s, s * row_share))},
            row_bytes=0,
        )
        for rank, s in enumerate(drafts_s, first)
    ]
    nodes = (*own.nodes, *(VirtualNode(name=f"draft{i}", cores=1) for i in range(len(drafts))))
    return replace(own, nodes=nodes, node_of=tuple(range(len(nodes))), drafts=tuple(drafts))


def measured(hosts: Sequence[str] = ("node0", "node1"), slower: float = 1.0, threads: int = 8) -> Profile:
    """What `ggpipe profile` could have found on these ranks' hosts of 8 cores: stages of 2 of 4 layers.

    `slower`: how much longer runs took while all ranks computed.
    """
    model = ModelFacts(
        name="some",
        architecture="llama",
        fingerprint="0123456789abcdef",
        n_layer=4,
        n_embd=64,
        n_vocab=128,
        n_expert=0,
        n_expert_used=0,
        layer_bytes=(10, 10, 10, 10),
        input_bytes=5,
        output_bytes=5,
    )
    alone = (Point(1, 32, 0.010), Point(8, 32, 0.030), Point(1, 512, 0.012))
    together = tuple(Point(p.rows, p.n_past, p.seconds * slower) for p in alone[:2])
    half = MeasuredLayers((1, 2), 10, alone[:1])
    ranks = tuple(
        RankProfile(
            rank=i,
            host=host,
            cores=8,
            threads=threads,
            threads_batch=threads,
            memory_bytes=2**34,
            memory_bytes_per_s=2e10,
            layers=(1, 3),
            weight_bytes=20,
            alone=alone,
            together=together,
            half=half,
            overheads=Overheads(run_s=7e-5, hand_s=9e-5),
            change_s=2e-4,
            fixed_s=2e-3,
        )
        for i, host in enumerate(hosts)
    )
    links = tuple(
        LinkProfile(a, b, 5e-5 + 1e-5 * a, 1e9) for a in range(len(hosts)) for b in range(len(hosts)) if a != b
    )
    return Profile(model=model, kernels=Kernels(), ranks=ranks, links=links)


def tokens(acceptance: float = 0.7, n_text: int = 60, n_prompt: int = 4, seed: int = 0) -> SyntheticTokens:
    """A text behind a prompt that is one chunk, whatever the number of stages."""
    return SyntheticTokens(acceptance, n_prompt, n_text, seed)


def n_misses(text: SyntheticTokens) -> int:
    """Places where the draft's best candidate is not the text's token."""
    return sum(text.candidates(i, False)[0][0] != token for i, token in enumerate(text.output))


@dataclass
class Watched:
    """What went into the target's pipeline, and came out of it."""

    schedulers: list[Scheduler] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    @property
    def submitted(self) -> list[int]:
        """The runs' ids."""
        return [run.id for run in self.runs]


@contextlib.contextmanager
def watched(each: bool = False) -> Iterator[Watched]:
    """The scheduler and the draft model as they are, seen at work. They are valid after each event with `each` or
    --full, else after every seventh: to check them takes longer than to simulate them."""
    seen, every, n_events = Watched(), 1 if each or examples.full else 7, itertools.count()

    class Seen(Scheduler):
        def handle(self, event: SchedulerEvent, now: float) -> list[SchedulerAction]:
            if self not in seen.schedulers:
                seen.schedulers.append(self)
            if isinstance(event, RunEnded):
                seen.ended.append(event.result.run)
            actions = super().handle(event, now)
            if next(n_events) % every == 0:
                self.validate()
            seen.runs += [action.run for action in actions if isinstance(action, SubmitRun)]
            return actions

    class SeenDraft(DraftModel):
        def handle(self, event: DraftEvent, now: float) -> list[DraftAction]:
            actions = super().handle(event, now)
            if next(n_events) % every == 0:
                self.validate()
            return actions

    with (
        mock.patch.object(simulator, "Scheduler", Seen),
        mock.patch.object(registry, "WITH_MODEL", {"draft": SeenDraft}),
    ):
        yield seen


def checked(
    own: VirtualCluster,
    text: SimulatedTokens,
    speculation: SpeculationConfig,
    sizes: Sizes | None = None,
    each: bool = False,
) -> RequestStats:
    """Simulate all of the text. Whatever the times: it is all there, and every run ended exactly once. `each`: see
    `watched`."""
    with watched(each) as seen:
        stats = simulate(own, text, speculation, len(text.output), sizes)
    (scheduler,) = seen.schedulers
    assert scheduler.n_in_flight == 0
    assert len(set(seen.submitted)) == len(seen.submitted)
    last = [run for run in seen.submitted if run not in seen.ended]
    assert len(last) <= 1, "only the last run, with nothing but operations, may be on its way when all is over"
    assert sorted([*seen.ended, *last]) == sorted(seen.submitted)
    assert {run.id for run in stats.runs} <= set(seen.ended)
    assert stats.n_generated == len(text.output)
    assert stats.finish is Finish.LENGTH
    assert stats.ended is not None
    assert 0 <= stats.arrived < stats.token_times[0]
    assert stats.token_times == sorted(stats.token_times)
    assert stats.token_times[-1] <= stats.ended
    counters = stats.counters
    assert counters.accepted_tokens == sum(stats.drafted) <= counters.submitted_tokens
    assert counters.verified_runs + counters.cancelled_runs >= counters.speculative_runs
    assert counters.cancelled_runs <= counters.speculative_runs
    assert sum(run.n_draft_tokens for run in stats.runs) == counters.submitted_tokens
    for run in (*stats.runs, *stats.draft_runs):
        assert all(0 <= span.compute_s <= span.busy_s + 1e-12 for span in run.spans)
    return stats
