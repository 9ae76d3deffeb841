"""Which mixtures of experts run on which bundled clusters, and how fast; run it as `scripts/experiments/mixtures`.

Prints the table of docs/mixtures.md. Nothing in it is measured: each cell is the planner's best arrangement, simulated.
A model is described by what its header says, and by the size of its file in 4 bits. Unless they are in MXFP4, its
experts are assumed to have the file's average bits per weight. Its draft is the cluster's. Each cell is planned without
a draft model and, in the mode `async`, with one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.cluster.tables import ModelTable
from ggpipe.cluster.toml import read_cluster
from ggpipe.config.layer_split import MAX_PARTS
from ggpipe.display.tables.plan import stages_text
from ggpipe.errors import UsageError
from ggpipe.planning.candidates import Constraints
from ggpipe.planning.plan import Plan
from ggpipe.planning.planner import PlanRequest, make_plan
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulation_spec import SyntheticText

N_CTX = 4096
MXFP4 = 4.25  # bits per weight
LATENT = 576
"""Numbers of a token in a layer's latent KV cache, in all models here that have one."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A published mixture of experts."""

    name: str
    weights_b: float
    """Billions of weights."""
    file_gb: float
    """Size of its file, in Q4_K_M, or in MXFP4 where the experts are published in it."""
    n_layer: int
    n_dense: int = 0
    """First layers without experts."""
    width: int
    n_ff: int
    """Columns of an expert."""
    n_expert: int
    n_used: int
    n_heads: int
    """KV heads; query heads if the KV cache is latent."""
    cell: int
    """Numbers of a token in a layer's KV cache, in layers that have one."""
    n_cells: int | None = None
    """Layers that have a KV cache, and attention; the others have a recurrent state. None: all."""
    state_mb: float | None = None
    """A sequence's recurrent state, of all layers together."""
    q_width: int | None = None
    """Of all query heads together; None: the KV cache is latent."""
    window: int | None = None
    """Tokens that a token sees in some layers."""
    n_windows: int | None = None
    """Number of these layers; None: all."""
    index_width: int = 0
    """Of the heads that select these tokens, together."""
    n_streams: int = 1
    """As in `ModelShape`."""
    whole_gb: float = 0.0
    """Size of what groups do not divide, where it is more than norms and routers."""
    n_vocab: int
    expert_bits: float | None = None
    """Bits per weight of the experts; None: the average of the file."""

    @property
    def expert_gb(self) -> float:
        """Size of all routed experts."""
        expert_b = (self.n_layer - self.n_dense) * self.n_expert * 3 * self.width * self.n_ff / 1e9
        return expert_b * (self.expert_bits / 8 if self.expert_bits else self.file_gb / self.weights_b)

    def shape(self) -> ModelShape:
        """The model as the planner sees it."""
        table = ModelTable(
            name=self.name,
            layers=self.n_layer,
            weights_gb=self.file_gb,
            parameters_b=self.weights_b,
            width=self.width,
            kv_kb=2 * self.cell * (self.n_cells or self.n_layer) / 1e3,  # 16-bit floats
            vocabulary=self.n_vocab,
            kv_heads=min(self.n_heads, MAX_PARTS),
            latent_kv=self.cell == LATENT,
            attention_width=self.q_width,
            window=self.window,
            window_layers=self.n_windows,
            index_width=self.index_width,
            state_mb=self.state_mb,
            state_layers=None if self.n_cells is None else self.n_layer - self.n_cells,
            experts=self.n_expert,
            experts_used=self.n_used,
            expert_gb=self.expert_gb,
            dense_layers=self.n_dense,
        )
        whole_bytes = (int(self.whole_gb * 1e9 / self.n_layer),) * self.n_layer if self.whole_gb else ()
        return replace(table.shape(self.name), n_streams=self.n_streams, layer_whole_bytes=whole_bytes)


MODELS = (
    Mixture(name="gpt-oss-20b", weights_b=20.9, file_gb=12.1, n_layer=24, width=2880, n_ff=2880, n_expert=32, n_used=4,
            n_heads=8, cell=1024, q_width=4096, window=128, n_windows=12, n_vocab=201088, expert_bits=MXFP4),
    Mixture(name="Qwen3-30B-A3B", weights_b=30.5, file_gb=18.6, n_layer=48, width=2048, n_ff=768, n_expert=128,
            n_used=8, n_heads=4, cell=1024, q_width=4096, n_vocab=151936),
    Mixture(name="Qwen3-Next-80B-A3B", weights_b=79.7, file_gb=48.5, n_layer=48, width=2048, n_ff=512, n_expert=512,
            n_used=10, n_heads=2, cell=1024, n_cells=12, state_mb=79, q_width=4096, n_vocab=151936),
    Mixture(name="gpt-oss-120b", weights_b=116.8, file_gb=62.8, n_layer=36, width=2880, n_ff=2880, n_expert=128,
            n_used=4, n_heads=8, cell=1024, q_width=4096, window=128, n_windows=18, n_vocab=201088, expert_bits=MXFP4),
    Mixture(name="GLM-4.5-Air", weights_b=106.9, file_gb=70.5, n_layer=46, n_dense=1, width=4096, n_ff=1408,
            n_expert=128, n_used=8, n_heads=8, cell=2048, q_width=12288, n_vocab=151552),
    Mixture(name="Qwen3-235B-A22B", weights_b=235.1, file_gb=142.2, n_layer=94, width=4096, n_ff=1536, n_expert=128,
            n_used=8, n_heads=4, cell=1024, q_width=8192, n_vocab=151936),
    Mixture(name="DeepSeek-V4-Flash", weights_b=284, file_gb=156.1, n_layer=43, width=4096, n_ff=2048, n_expert=256,
            n_used=6, n_heads=8, cell=80, q_width=32768, window=640, index_width=2048, n_streams=4, whole_gb=1.6,
            n_vocab=129280, expert_bits=MXFP4),
    Mixture(name="GLM-4.6", weights_b=352.8, file_gb=213.0, n_layer=92, n_dense=3, width=5120, n_ff=1536, n_expert=160,
            n_used=8, n_heads=8, cell=2048, q_width=12288, n_vocab=151552),
    Mixture(name="DeepSeek-V3.1", weights_b=671, file_gb=404.5, n_layer=61, n_dense=3, width=7168, n_ff=2048,
            n_expert=256, n_used=8, n_heads=128, cell=LATENT, n_vocab=129280),
    Mixture(name="GLM-5.1", weights_b=744, file_gb=464.7, n_layer=78, n_dense=3, width=6144, n_ff=2048, n_expert=256,
            n_used=8, n_heads=64, cell=LATENT, window=2048, index_width=4096, n_vocab=154880),
    Mixture(name="Kimi-K2", weights_b=1026.5, file_gb=621.0, n_layer=61, n_dense=1, width=7168, n_ff=2048,
            n_expert=384, n_used=8, n_heads=64, cell=LATENT, n_vocab=163840),
)  # fmt: skip
"""By size of the file. Published sizes of the repositories with the most common files, to about 2 %."""
CLUSTERS = {
    "gpt-oss-120b-pcs": "4 PCs, 32 GB, 1 Gbit/s",
    "gpt-oss-120b-pcs-2g5": "4 PCs, 32 GB, 2.5 Gbit/s",
    "qwen3-235b-xeons": "8 sockets, 64 GB, 1 Gbit/s",
    "deepseek-v3-xeons": "8 sockets, 96 GB, 100 Gbit/s",
    "glm-5-xeons": "8 nodes, 128 GB, 100 Gbit/s",
}
"""Bundled clusters, each of which has a further machine like the others for the draft."""


def planned(spec: ClusterSpec, model: ModelShape, draft: ModelShape | None, effort: float) -> Plan:
    """The best plan, with the draft if there is one. Raises UsageError if the model does not fit."""
    constraints = Constraints(n_ctx=N_CTX, n_ubatch=512, must_draft=draft is not None, halves=True)
    request = PlanRequest(
        constraints=constraints,
        tokens=SyntheticText(),
        sizes=Sizes(N_CTX),
        mode="iterative" if draft is None else "async",
        tunes=False,
        effort=effort,
    )
    return make_plan(spec, model, draft, request)


def cell(spec: ClusterSpec, model: ModelShape, effort: float) -> str:
    """`iterative -> async, stages` in tokens per second; `-` if the model does not fit."""
    try:
        with_draft = planned(spec, model, spec.draft, effort)
    except UsageError:
        return "-"
    alone = planned(spec, model, None, effort)
    speeds = (f"{plan.best.tokens_per_s:.3g}" for plan in (alone, with_draft))
    return f"{' → '.join(speeds)} ({stages_text(with_draft.placement)})"


def rows(models: list[Mixture], clusters: list[str], effort: float) -> Iterator[str]:
    """The table, line by line."""
    yield f"| model | file | read per token | {' | '.join(CLUSTERS[name] for name in clusters)} |"
    yield "|---" * (3 + len(clusters)) + "|"
    specs = [read_cluster(Path(name)) for name in clusters]
    for model in models:
        shape = model.shape()
        read_gb = shape.read_bytes((0, shape.n_layer)) / 1e9
        cells = " | ".join(cell(spec, shape, effort) for spec in specs)
        yield f"| {model.name} | {model.file_gb:.3g} GB | {read_gb:.2g} GB | {cells} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("models", nargs="*", help="default: all")
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS), help="default: all")
    parser.add_argument("--effort", type=float, default=0.5, help="of the planner, relative to that of `ggpipe plan`")
    args = parser.parse_args()
    known = {model.name: model for model in MODELS}
    if unknown := [name for name in args.models if name not in known]:
        parser.error(f"unknown model {unknown[0]}; known are {', '.join(known)}")
    for line in rows([known[name] for name in args.models or known], args.clusters, args.effort):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
