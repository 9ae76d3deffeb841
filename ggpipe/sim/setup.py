"""All that a simulation is made of, and what may be changed of it."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ggpipe.config import Mode, SpeculationConfig
from ggpipe.core.layout import lay_out
from ggpipe.errors import UsageError
from ggpipe.runtime.stats import RequestStats
from ggpipe.sim.build import Placement, build
from ggpipe.sim.cluster import Link
from ggpipe.sim.memory import memory_by_rank
from ggpipe.sim.recording import Recording
from ggpipe.sim.shapes import ModelShape
from ggpipe.sim.simulator import Sizes, simulate
from ggpipe.sim.spec import ClusterSpec
from ggpipe.sim.tokens import Confidence, SyntheticTokens, Tokens

_HEADROOM = 4096  # cells beyond the text, for guesses
_SPECULATION = {
    "draft": "n_draft",
    "draft-min": "n_min",
    "pa": "p_accept",
    "ps": "p_split",
    "pr": "p_recovery",
    "pd": "p_decay",
    "np": "n_parallel",
}
WHOLE = ("draft", "draft-min", "np", "prompt-tokens")
"""Of the names below, those of whole numbers."""
NAMES = (*_SPECULATION, "acceptance", "prompt-tokens", "latency-us", "gbit")
"""What `Setup.changed` can change. latency-us and gbit: of the links between nodes."""
GUESSING = (*_SPECULATION, "acceptance")
"""Of these, what makes no difference where nothing is guessed."""


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Tokens without models, see `SyntheticTokens`."""

    acceptance: float = 0.7
    n_prompt: int = 128
    confidence: Confidence = "calibrated"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise UsageError(f"acceptance is a share between 0 and 1; {self.acceptance:g} is not")
        if self.n_prompt < 1:
            raise UsageError(f"a prompt has one token or more, not {self.n_prompt}")


@dataclass(frozen=True, slots=True)
class Setup:
    """One simulation, but for its mode."""

    spec: ClusterSpec
    placement: Placement
    target: ModelShape
    draft: ModelShape | None
    speculation: SpeculationConfig
    tokens: MadeUp | Recording
    n_predict: int
    """-1: as many as were recorded."""
    sizes: Sizes
    """A context of 0 tokens is as large as it has to be."""

    def check(self) -> None:
        """Raises UsageError when the context cannot hold the text, or a node's memory its ranks."""
        n_ctx, n_tokens = self.sizes.n_ctx, max(map(_n_tokens, self._requests()))
        if 0 < n_ctx < n_tokens:
            raise UsageError(f"a context of {n_ctx} tokens cannot hold {n_tokens}: raise -c, or lower -n")
        needed_bytes = self._needed_bytes(n_ctx or n_tokens)
        for number, node in enumerate(self.spec.nodes):
            if needed_bytes[number] > node.memory_bytes:
                raise UsageError(
                    f"{node.name} has {node.memory_bytes / 1e9:.3g} GB of memory, and its ranks need "
                    f"{needed_bytes[number] / 1e9:.3g} GB: give it a smaller share of the layers, or use more nodes"
                )

    def _needed_bytes(self, n_ctx: int) -> Counter[int]:
        """By node."""
        place, needed = self.placement, Counter[int]()
        layout = place.layout or lay_out(self.target.n_layer, len(place.target_on), None)
        needs = memory_by_rank(self.target, layout, self.draft, place.draft_layout, n_ctx, self.sizes.n_ubatch)
        for node, need in zip(place.node_of, needs, strict=True):
            needed[node] += math.ceil(need.total)
        return needed

    def changed(self, values: Mapping[str, float]) -> Setup:
        """With other values for some of `NAMES`. Raises UsageError where they make no sense."""
        own = {_SPECULATION[name]: _as_given(name, value) for name, value in values.items() if name in _SPECULATION}
        n_draft = int(own.get("n_draft", self.speculation.n_draft))
        n_min = int(own.get("n_min", self.speculation.n_min))
        speculation = replace(self.speculation, **{**own, "n_min": min(n_min, n_draft)})  # type: ignore[arg-type]
        return replace(self, speculation=speculation, tokens=self._tokens(values), spec=self._spec(values))

    def run(self, mode: Mode) -> list[RequestStats]:
        """A request; with a recording, one for each of its prompts. Raises UsageError as `check`."""
        self.check()
        cluster = build(self.spec, self.placement, self.target, self.draft)
        speculation, requests = replace(self.speculation, mode=mode), self._requests()
        n_ctx = self.sizes.n_ctx or max(map(_n_tokens, requests)) + _HEADROOM
        sizes = replace(self.sizes, n_ctx=n_ctx)
        return [simulate(cluster, tokens, speculation, len(tokens.text), sizes) for tokens in requests]

    def _requests(self) -> Sequence[Tokens]:
        if isinstance(self.tokens, Recording):
            return self.tokens.requests(None if self.n_predict < 0 else self.n_predict)
        return (_made_up(self.tokens, self.n_predict),)

    def _tokens(self, values: Mapping[str, float]) -> MadeUp | Recording:
        names = [name for name in ("acceptance", "prompt-tokens") if name in values]
        if not names:
            return self.tokens
        if isinstance(self.tokens, Recording):
            raise UsageError(f"a recording says its own {names[0]}: leave out --recording, or that sweep")
        acceptance = values.get("acceptance", self.tokens.acceptance)
        return replace(
            self.tokens, acceptance=acceptance, n_prompt=int(values.get("prompt-tokens", self.tokens.n_prompt))
        )

    def _spec(self, values: Mapping[str, float]) -> ClusterSpec:
        names = [name for name in ("latency-us", "gbit") if name in values]
        if not names:
            return self.spec
        node_of = self.placement.node_of
        if len(set(node_of)) < 2:
            raise UsageError(f"{names[0]} is of the network between nodes, and all ranks are on one")
        if values.get("gbit", 1) <= 0:
            raise UsageError(f"gbit is above 0; {values['gbit']:g} is not")
        if values.get("latency-us", 0) < 0:
            raise UsageError(f"latency-us is 0 or more; {values['latency-us']:g} is not")

        def other(link: Link) -> Link:
            latency_s = values["latency-us"] / 1e6 if "latency-us" in values else link.latency_s
            return Link(latency_s, values["gbit"] * 1e9 / 8 if "gbit" in values else link.bytes_per_s)

        links = {(a, b): other(link) if node_of[a] != node_of[b] else link for (a, b), link in self.spec.links.items()}
        return replace(self.spec, network=other(self.spec.network), links=links)


@functools.lru_cache(64)
def _made_up(tokens: MadeUp, n_text: int) -> SyntheticTokens:
    return SyntheticTokens(tokens.acceptance, tokens.n_prompt, n_text, tokens.seed, tokens.confidence)


def _n_tokens(tokens: Tokens) -> int:
    return len(tokens.prompt) + len(tokens.text)


def _as_given(name: str, value: float) -> float:
    return int(value) if name in WHOLE else value
