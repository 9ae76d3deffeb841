"""The specification of a simulation: a cluster, models, outputs and settings; and the parameters of a sweep."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ggpipe.cluster.links import Link, SumTimes
from ggpipe.cluster.memory import USABLE, Memory, memory_by_rank, with_streaming
from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.recording import Recording
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config.layer_split import MAX_PARTS
from ggpipe.config.speculation import THRESHOLDS, Mode, Policy, SpeculationConfig
from ggpipe.core.layout import Layout, lay_out
from ggpipe.errors import Setting, SettingError, UsageError
from ggpipe.sim.arrivals import Arrival, Traffic
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulator import SimulatedRequest, SimulationResult, serve
from ggpipe.sim.text import SECOND_CHOICE, Confidence, SimulatedTokens, SyntheticTokens, recorded
from ggpipe.sim.virtual_cluster import VirtualPlacement, build
from ggpipe.stats.records import RequestStats

_MOST_TOKENS = 1_000_000  # of a prompt and its text
_HEADROOM = 4096  # KV cells beyond the text, for draft tokens
_SPECULATION = {
    "draft": "n_draft",
    "draft-min": "n_min",
    "pa": "p_accept",
    "ps": "p_split",
    "pr": "p_recovery",
    "pd": "p_decay",
    "np": "n_parallel",
}
_TRAFFIC = {"users": "users", "rate": "rate", "concurrent": "n_requests"}
TRAFFIC_NAMES = tuple(_TRAFFIC)
"""Names that are of several requests."""
WHOLE = ("draft", "draft-min", "np", "prompt-tokens", "group", "users", "concurrent")
"""Names whose values are whole numbers."""
NAMES = (
    *_SPECULATION,
    "acceptance",
    "overlap",
    "prompt-tokens",
    "latency-us",
    "gbit",
    "group",
    "users",
    "rate",
    "concurrent",
)
"""What `SimulationSpec.changed` can change. latency-us and gbit are those of the links between nodes; group is the
number of ranks in each of the target's stages, which then get as many layers each; acceptance is the agreement of a
synthetic text with the first draft model, overlap as in `SyntheticText`; users, rate and concurrent are of the
traffic."""
SPECULATIVE_NAMES = (*_SPECULATION, "acceptance", "overlap")
"""Names that make no difference without draft tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticText:
    """An output made without models, see `SyntheticTokens`."""

    agreement: float = 0.7
    """How often the first draft model's best candidate is the target's token."""
    others: tuple[float | None, ...] = ()
    """The same of further draft models; None: as the first one."""
    overlap: float = 0.5
    """Share of positions at which they are right or wrong with the first one."""
    repeats: float = 0.0
    """Share of the output that repeats earlier text."""
    second_choice: float = SECOND_CHOICE
    """How often a draft model's second choice is the target's token where its best candidate is not."""
    n_prompt: int = 128
    confidence: Confidence = "calibrated"
    seed: int = 0

    def __post_init__(self) -> None:
        shares = (("acceptance", self.agreement), ("overlap", self.overlap), ("second_choice", self.second_choice))
        for name, share in shares:
            if not 0 <= share <= 1:
                raise SettingError(name, f"must be a share between 0 and 1, got {share:g}")
        if self.n_prompt < 1:
            raise SettingError("prompt_tokens", f"must be 1 or more, got {self.n_prompt}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSpec:
    """One simulation, without its mode."""

    cluster: ClusterSpec
    placement: VirtualPlacement
    target: ModelShape
    drafts: tuple[ModelShape, ...]
    """The draft models, draft heads among them."""
    speculation: SpeculationConfig
    tokens: SyntheticText | Recording
    n_predict: int
    """Tokens to generate; -1: the number that was recorded."""
    sizes: Sizes
    """Sizes of context and batches. A context of 0 tokens is made as large as needed."""
    traffic: Traffic | None = None
    """Requests that share the pipeline; None: one request, or one per recorded prompt, served one at a time."""

    def check(self) -> None:
        """Raises UsageError if the context is too small for the output, a node's memory is too small for its ranks, or
        the model does not support the groups."""
        for shape, layout in ((self.target, self.placement.layout), *self._drafts):
            if shape.max_parts == 1 and layout is not None and layout.group_sizes:
                raise UsageError(f"{shape.name} is not known to work in groups: give each rank its own layers")
        n_ctx, longest = self.sizes.n_ctx, self._longest
        if 0 < n_ctx < longest:
            raise UsageError(
                f"a context of {n_ctx} tokens cannot hold {longest}: raise ",
                Setting("n_ctx"),
                ", or lower ",
                Setting("n_predict"),
            )
        if self.placement.streamed_bytes:
            return  # by a plan, which has looked at the memory
        needed_bytes = Counter[int]()
        for node, memory in zip(self.placement.node_of, self.memory(), strict=True):
            needed_bytes[node] += math.ceil(memory.total)
        for number, own in enumerate(self.cluster.nodes):
            if needed_bytes[number] > own.memory_bytes:
                streams = "" if own.disk_bytes_per_s else ", or give its disk_gb_per_s, so that it can stream weights"
                raise UsageError(
                    f"{own.name} has {own.memory_bytes / 1e9:.3g} GB of memory, and its ranks need "
                    f"{needed_bytes[number] / 1e9:.3g} GB: give it a smaller share of the layers, or use more nodes"
                    f"{streams}"
                )

    @property
    def _drafts(self) -> list[tuple[ModelShape, Layout | None]]:
        return [(shape, self.placement.draft_layout(number)) for number, shape in enumerate(self.drafts)]

    @property
    def streamed_bytes(self) -> tuple[float, ...]:
        """See `VirtualPlacement`."""
        if self.placement.streamed_bytes or not any(node.disk_bytes_per_s for node in self.cluster.nodes):
            return self.placement.streamed_bytes
        found = tuple(memory.streamed for memory in self.memory())
        return found if any(found) else ()

    @property
    def _longest(self) -> int:
        """Tokens of the longest prompt with its output."""
        return max(_n_tokens(asked.tokens) for asked in self._asked())

    def memory(self) -> list[Memory]:
        """Memory of each rank. Those of nodes without enough stream weights, if the speed of their disks is known."""
        placement, nodes = self.placement, self.cluster.nodes
        at_a_time = self.traffic.at_a_time if self.traffic is not None else 1
        n_ctx = self.sizes.n_ctx or self._longest * at_a_time
        layout = placement.layout or lay_out(self.target.n_layer, len(placement.target_on), None)
        sizes = n_ctx, self.sizes.n_ubatch, placement.tensor_split
        drafts = [(shape.with_window(self.sizes.window, at_a_time), own) for shape, own in self._drafts]
        needs = memory_by_rank(self.target, layout, drafts, *sizes)
        usable = {i: own.memory_bytes * USABLE for i, own in enumerate(nodes) if own.disk_bytes_per_s}
        return list(
            with_streaming(self.target, layout, needs, placement.node_of, usable, placement.tensor_split).values()
        )

    def changed(self, values: Mapping[str, float]) -> SimulationSpec:
        """With other values for some of `NAMES`. Raises UsageError where they make no sense."""
        own = {_SPECULATION[name]: _as_given(name, value) for name, value in values.items() if name in _SPECULATION}
        n_draft = int(own.get("n_draft", self.speculation.most_drafted))
        n_min = int(own.get("n_min", self.speculation.n_min))
        policy: Policy = self.speculation.policy if THRESHOLDS.isdisjoint(own) else "thresholds"
        own["n_min"] = min(n_min, n_draft)
        speculation = replace(self.speculation, policy=policy, **own)  # type: ignore[arg-type]
        traffic = {_TRAFFIC[name]: _as_given(name, value) for name, value in values.items() if name in _TRAFFIC}
        return replace(
            self,
            speculation=speculation,
            tokens=self._tokens(values),
            cluster=self._cluster(values),
            placement=self._placement(values),
            traffic=replace(self.traffic or Traffic(), **traffic) if traffic else self.traffic,  # type: ignore[arg-type]
        )

    def run(self, mode: Mode) -> list[RequestStats]:
        """As `serve`: the requests alone."""
        return [stats for served in self.serve(mode) for stats in served.requests]

    def serve(self, mode: Mode) -> list[SimulationResult]:
        """Simulate the traffic. Without it: a request by itself or, with a recording, one for each of its prompts.

        Raises UsageError as `check`.
        """
        self.check()
        placement = replace(self.placement, streamed_bytes=self.streamed_bytes)
        virtual = build(self.cluster, placement, self.target, self.drafts)
        speculation, asked = replace(self.speculation, mode=mode), self._asked()
        n_requests = self.traffic.at_a_time if self.traffic is not None else 1
        n_ctx = self.sizes.n_ctx or n_requests * max(_n_tokens(one.tokens) for one in asked) + _HEADROOM
        sizes = replace(self.sizes, n_ctx=n_ctx, n_requests=n_requests)
        together = [asked] if self.traffic is not None else [[one] for one in asked]
        return [serve(virtual, requests, speculation, sizes) for requests in together]

    def _asked(self) -> Sequence[SimulatedRequest]:
        if self.traffic is None:
            alone = Arrival(at_s=0.0)
            n_texts = len(self.tokens.prompts) if isinstance(self.tokens, Recording) else 1
            return [SimulatedRequest(self._text(i, alone), alone) for i in range(n_texts)]
        return [SimulatedRequest(self._text(i, arrival), arrival) for i, arrival in enumerate(self.traffic.arrivals())]

    def _text(self, i: int, arrival: Arrival) -> SimulatedTokens:
        """The tokens of a request, counted from 0."""
        n_predict = self.n_predict if arrival.n_predict is None else arrival.n_predict
        n_all = n_predict + (arrival.n_prompt or (0 if isinstance(self.tokens, Recording) else self.tokens.n_prompt))
        if n_all > _MOST_TOKENS:
            raise UsageError(
                f"a prompt and a text of {n_all} tokens are too long to simulate: at most {_MOST_TOKENS} are possible"
            )
        if isinstance(self.tokens, Recording):
            prompts = self.tokens.prompts
            return recorded(prompts[i % len(prompts)], None if n_predict < 0 else n_predict, arrival.n_prompt)
        n_prompt = arrival.n_prompt or self.tokens.n_prompt
        return _synthetic(replace(self.tokens, n_prompt=n_prompt, seed=self.tokens.seed + i), n_predict)

    def _tokens(self, values: Mapping[str, float]) -> SyntheticText | Recording:
        names = [name for name in ("acceptance", "overlap", "prompt-tokens") if name in values]
        if not names:
            return self.tokens
        if isinstance(self.tokens, Recording):
            raise UsageError(f"a recording has its own {names[0]}: leave out ", Setting("recording"), ", or that sweep")
        agreement = values.get("acceptance", self.tokens.agreement)
        overlap = values.get("overlap", self.tokens.overlap)
        n_prompt = int(values.get("prompt-tokens", self.tokens.n_prompt))
        return replace(self.tokens, agreement=agreement, overlap=overlap, n_prompt=n_prompt)

    def _placement(self, values: Mapping[str, float]) -> VirtualPlacement:
        if "group" not in values:
            return self.placement
        size, n_ranks = int(values["group"]), len(self.placement.target_on)
        if not 1 <= size <= MAX_PARTS or n_ranks % size:
            raise UsageError(
                f"group must divide the target's {n_ranks} ranks, and be from 1 to {MAX_PARTS}, got {size}"
            )
        stages = lay_out(self.target.n_layer, n_ranks // size, None).layers
        return replace(self.placement, layout=Layout.of_ranks(stages, 0, (size,) * len(stages)))

    def _cluster(self, values: Mapping[str, float]) -> ClusterSpec:
        names = [name for name in ("latency-us", "gbit") if name in values]
        if not names:
            return self.cluster
        hosts = [self.cluster.nodes[node].host for node in self.placement.node_of]
        if len(set(hosts)) < 2:
            raise UsageError(f"{names[0]} is that of the network between machines, and all ranks are on one machine")
        if values.get("gbit", 1) <= 0:
            raise UsageError(f"gbit must be above 0, got {values['gbit']:g}")
        if values.get("latency-us", 0) < 0:
            raise UsageError(f"latency-us must be 0 or more, got {values['latency-us']:g}")

        def other(link: Link) -> Link:
            latency_s = values["latency-us"] / 1e6 if "latency-us" in values else link.latency_s
            return Link(latency_s, values["gbit"] * 1e9 / 8 if "gbit" in values else link.bytes_per_s)

        links = {(a, b): other(link) if hosts[a] != hosts[b] else link for (a, b), link in self.cluster.links.items()}
        network, sums = other(self.cluster.network), self.cluster.network_sums
        if sums is not None:
            latency_s = network.latency_s if "latency-us" in values else sums.seconds(0)
            sums = SumTimes.of_link(replace(network, latency_s=latency_s), sums.skew)
        return replace(
            self.cluster,
            network=network,
            links=links,
            network_sums=sums,
            sums={(a, b): times for (a, b), times in self.cluster.sums.items() if a == b},
        )


@functools.lru_cache(256)
def _synthetic(tokens: SyntheticText, n_text: int) -> SyntheticTokens:
    return SyntheticTokens(
        tokens.agreement,
        tokens.n_prompt,
        n_text,
        tokens.seed,
        tokens.confidence,
        others=[tokens.agreement if own is None else own for own in tokens.others],
        overlap=tokens.overlap,
        repeats=tokens.repeats,
        second_choice=tokens.second_choice,
    )


def _n_tokens(tokens: SimulatedTokens) -> int:
    return len(tokens.prompt) + len(tokens.output)


def _as_given(name: str, value: float) -> float:
    return int(value) if name in WHOLE else value
