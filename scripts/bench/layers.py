"""Layers of mixtures and of recurrent models, with ggpipe's kernels and with ggml's; run it as `scripts/bench/layers`.

Models are random ones in Q4_K_M whose four layers are as large as real ones (tests/support/architectures.py). Two
stages continue the same sequence in turn, with `--context` from the same place if the model can forget the rest. A line
for each model and number of rows: milliseconds of a run, medians, and the ratio of the two with the quartiles of the
rounds; then how often ggpipe's threads wait for each other in a run, and the number of its operations. ggml's threads
wait after each of these, but for norms and their weights, which are one.

With `--no-repack`, both multiply weights as they are in the file, as they do where these are streamed.

With `--load`: seconds to load the model from a file that is in memory, with weights repacked and as in the file.

With `--prompt N`: seconds until the first token after a prompt of N tokens, in two stages of one thread each, by the
longest run (`-ub`, given by `--rows`).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from support.architectures import Sizes, write
from support.zoo import Value

import ggpipe
from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.messages import KvKind, KvOp, LogitsKind, LogitsRequest, Row, Run
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.libllama import start
from ggpipe.llama.stage import Stage
from scripts.models.quantize import quantize

N_CTX = 16384
N_ROWS = (1, 4, 32, 128)


@dataclass(frozen=True)
class Shape:
    """A model of four layers."""

    sizes: Sizes
    more: dict[str, Value]


SHAPES = {
    # As Qwen3-30B-A3B, with 8 of 32 experts instead of 128
    "qwen3moe": Shape(
        Sizes(width=2048, n_head=32, n_ff=768, n_experts=32), {"expert_used_count": 8, "attention.head_count_kv": 4}
    ),
    # As Qwen3.5-35B-A3B, with 8 of 32 experts instead of 256: three delta nets, then attention
    "qwen35moe": Shape(
        Sizes(width=2048, n_head=16, n_ff=512, n_experts=32),
        {
            "ssm.inner_size": 4096, "ssm.time_step_rank": 32, "ssm.group_count": 16, "expert_used_count": 8,
            "full_attention_interval": 4, "attention.head_count_kv": 2,
        },
    ),
    # Half as wide as DeepSeek-V3, with half the heads and 8 of 16 experts instead of 256; latent attention
    "deepseek2": Shape(
        Sizes(width=3584, n_head=64, n_ff=1024, n_experts=16), {"expert_used_count": 8, "attention.q_lora_rank": 1536}
    ),
    # The same for DeepSeek-V3.2 and GLM-5, whose rows see at most 2048 cells
    "deepseek32": Shape(
        Sizes(width=3584, n_head=64, n_ff=1024, n_experts=16, n_indexers=64),
        {"expert_used_count": 8, "attention.q_lora_rank": 1536, "attention.indexer.top_k": 2048},
    ),
    # As DeepSeek-V4-Flash, but half as wide: four hidden states for each token
    "deepseek4": Shape(
        Sizes(width=2048, n_ff=1024, n_experts=16, n_indexers=64),
        {
            "expert_used_count": 6, "attention.head_count": 32, "attention.key_length": 512,
            "attention.value_length": 512, "rope.dimension_count": 64, "attention.q_lora_rank": 1024,
            "attention.output_lora_rank": 1024, "attention.indexer.top_k": 512,
        },
    ),
    # As MiniMax-M3, but narrower: each head of keys sees 16 blocks of 128 cells
    "minimax-m3": Shape(
        Sizes(width=2048, n_head=16, n_ff=768, n_experts=16, n_indexers=4),
        {
            "expert_used_count": 4, "attention.head_count_kv": 4, "attention.indexer.head_count": 4,
            "attention.indexer.top_k": 16, "attention.indexer.block_size": 128,
        },
    ),
    "mamba2": Shape(
        Sizes(width=2048, n_head=16), {"ssm.inner_size": 4096, "ssm.time_step_rank": 64, "ssm.group_count": 8}
    ),
    "mamba": Shape(
        Sizes(width=2048, n_head=16), {"ssm.inner_size": 4096, "ssm.time_step_rank": 128, "ssm.state_size": 16}
    ),
}  # fmt: skip


class Continued:
    """A stage of all layers that continues one sequence, or its first `context` tokens."""

    def __init__(self, model: ModelConfig, threads: int, context: int = 0, *, fast: bool) -> None:
        file = ModelFile.open(model.path)
        config = ContextConfig(n_ctx=N_CTX, fast_kernels=fast)
        self._stage = Stage(file, (0, file.n_layer), model, config, (threads, threads))
        self._run = self._pos = 0
        self._kept = 0
        while self._pos < context:
            self.decode(min(512, context - self._pos))
        self._kept = context

    def decode(self, n: int) -> float:
        """Milliseconds of n rows more."""
        ops: tuple[KvOp, ...] = ()
        if self._kept and self._stage.rolls_back:
            self._pos = self._kept
            ops = (KvOp(KvKind.RM, 0, -1, self._kept, -1),)
        elif self._pos + n > N_CTX:
            self._stage.forget_all()
            self._pos = 0
        self._run += 1
        rows = tuple(
            Row(token=(7 * pos) % 100, pos=pos, seqs=(0,), request=0, logits_request=0 if pos == self._pos else -1)
            for pos in range(self._pos, self._pos + n)
        )
        self._pos += n
        outcome = self._stage.decode(
            Run(id=self._run, rows=rows, ops=ops, logits_requests=(LogitsRequest(LogitsKind.TOP, 1),)), None
        )
        return outcome.compute_s * 1e3

    @property
    def waits(self) -> tuple[int, int]:
        """Of the last run's threads for each other, and operations."""
        return self._stage._native.waits


def made(name: str, folder: Path) -> Path:
    """The model of a shape, quantized."""
    shape = SHAPES[name]
    whole = write(name, folder / f"{name}.gguf", n_layer=4, sizes=shape.sizes, more=shape.more)
    path = quantize(whole, folder / f"{name}-q4.gguf", "Q4_K_M")
    whole.unlink()
    return path


def bench_prompt(name: str, folder: Path, args: argparse.Namespace) -> None:
    """Print a line for each length of runs: seconds of each round."""
    path = made(name, folder)
    for n_ubatch in args.rows:
        n_ctx = args.prompt + 256
        with ggpipe.Engine(path, layer_split="0.5,0.5", n_ctx=n_ctx, n_ubatch=n_ubatch, threads=1, temp=0) as engine:
            engine.generate([1] * 100, n_predict=2).wait()
            prompts = [[(7 * i + 13 * r) % 100 + 1 for i in range(args.prompt)] for r in range(args.rounds)]
            times = [engine.generate(prompt, n_predict=1).wait().stats.ttft_s or 0.0 for prompt in prompts]
        print(
            f"{name:10} {n_ubatch:5d} {statistics.median(times):8.2f}  [{min(times):.2f}-{max(times):.2f}]", flush=True
        )


def bench_load(name: str, folder: Path, args: argparse.Namespace) -> None:
    """Print a line for each layout of the weights: seconds of each round."""
    path = made(name, folder)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(args.rounds):
        for repack, own in times.items():
            start_s = time.monotonic()
            Continued(ModelConfig(path=path, repack=repack), args.threads, fast=True)
            own.append(time.monotonic() - start_s)
    for repack, own in times.items():
        layout = "repacked" if repack else "as in the file"
        print(f"{name:10} {layout:14} {statistics.median(own):8.2f}  [{min(own):.2f}-{max(own):.2f}]", flush=True)


def bench(name: str, folder: Path, args: argparse.Namespace) -> None:
    """Print a line for each number of rows."""
    model = ModelConfig(path=made(name, folder), repack=args.repack)
    ggml, own = (Continued(model, args.threads, args.context, fast=fast) for fast in (False, True))
    for n in args.rows:
        pairs = [(ggml.decode(n), own.decode(n)) for _ in range(args.rounds + 1)][1:]  # the first round warms up
        low, ratio, high = statistics.quantiles([b / a for a, b in pairs], n=4)
        before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
        times = f"{before:8.1f} {after:8.1f}  {ratio:.2f} [{low:.2f}-{high:.2f}]"
        waits, operations = own.waits
        print(f"{name:10} {n:5d} {times} {waits:6d} {operations:6d}", flush=True)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *SHAPES], help=f"some of {', '.join(SHAPES)}; default: all")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=N_ROWS)
    parser.add_argument(
        "--context", type=int, default=0, help="tokens before each run; default: those of the runs before"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--no-repack", dest="repack", action="store_false", help="leave weights as they are in the file"
    )
    parser.add_argument("--load", action="store_true", help="measure how long the model takes to load")
    parser.add_argument("--prompt", type=int, metavar="N", help="tokens of a prompt for two stages")
    args = parser.parse_args()
    start()
    if args.prompt:
        print(f"prompt of {args.prompt} tokens, two stages of one thread: TTFT in seconds, {args.rounds} rounds")
        print("model         -ub   median  [all]")
    elif args.load:
        print(f"seconds to load, {args.rounds} rounds")
        print("model      weights          median  [all]")
    else:
        print(
            f"layers: {args.threads} threads, {args.context or 'the last'} tokens before each run, {args.rounds} rounds"
        )
        print("model       rows     ggml     ours  ratio             waits    ops")
    for name in args.models or SHAPES:
        with tempfile.TemporaryDirectory(prefix="ggpipe-bench-") as folder:
            (bench_prompt if args.prompt else bench_load if args.load else bench)(name, Path(folder), args)


if __name__ == "__main__":
    main()
