"""Measures what `ggpipe` adds to libllama; run it as `scripts/bench/stage`.

single  one rank against libllama driven directly (llama_cpp's low-level calls), default numerics; and --exact, with
        ggml's kernels and with ggpipe's own
rows    runs of 1 to 128 rows, with ggpipe's own kernels and with ggml's, for several types of weights
hops    two and three ranks under mpirun: the stages' decode times against the whole model's, and what a hop adds
memory  a quarter of the layers: resident memory (smaps) mapped, bytes read (rchar) unmapped
idle    CPU time of a rank that waits for 10 s

With --attention: only flash attention, ours against ggml's (`scripts/bench/attention.py`), with KV cells of the type
--cells. Exit code 1 where ours is slower.

All on random Q4_0 models of 0.75 B parameters, one thread a rank, each rank pinned to one core (not for rows). What is
compared is measured in turn, A B A B, in one run; tables show medians of the pairs' ratios with the quartiles.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from gguf import GGMLQuantizationType

from ggpipe.config.context import ContextConfig, KvType
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.core.messages import LogitsKind, LogitsRequest, Row, Run
from ggpipe.engine.head import Head
from ggpipe.engine.process import run_rank
from ggpipe.engine.session import Session
from ggpipe.llama.bundled import inflated_pair
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.libllama import lib, start
from ggpipe.llama.model_shape import shape_of
from ggpipe.llama.stage import Stage
from ggpipe.stats.records import RequestStats
from ggpipe.transport.local import LocalWorld
from scripts.bench.attention import bench_attention
from scripts.bench.measuring import greedy, middle, pin_rank, run_ranks
from scripts.models.make_pair import Shape, make_pair
from scripts.models.quantize import quantize

N_PROMPT, N_DECODE, N_CTX = 128, 24, 1024
SCRIPT = (sys.executable, "-m", "scripts.bench.stage")  # from the project's folder, as scripts/bench/stage runs it


def make_model(path: Path, n_vocab: int) -> Path:
    """A random target of 16 layers, width 2048, Q4_0."""
    make_pair(path, path.with_suffix(".draft"), Shape(n_vocab=n_vocab))
    path.with_suffix(".draft").unlink()
    return path


def prompt_tokens(n: int) -> tuple[int, ...]:
    """Ordinary tokens; all prompts of a run may be the same."""
    return tuple(300 + 7 * i % 7000 for i in range(n))


# single


class Libllama:
    """libllama as llama_cpp's low-level calls drive it: default parameters, one sequence, greedy sampler."""

    def __init__(self, path: Path) -> None:
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(str(path).encode(), params)
        settings = lib.llama_context_default_params()
        settings.n_ctx, settings.n_threads, settings.n_threads_batch = N_CTX, 1, 1
        settings.flash_attn_type = 1
        self.context = lib.llama_init_from_model(self.model, settings)
        self.sampler = lib.llama_sampler_init_greedy()

    def generate(self, prompt: tuple[int, ...], n: int) -> tuple[float, float]:
        """Seconds to the first token, and for the n - 1 after it."""
        lib.llama_memory_clear(lib.llama_get_memory(self.context), False)
        start = time.perf_counter()
        tokens = (lib.llama_token * len(prompt))(*prompt)
        lib.llama_decode(self.context, lib.llama_batch_get_one(tokens, len(prompt)))
        token = lib.llama_sampler_sample(self.sampler, self.context, -1)
        first = time.perf_counter()
        one = (lib.llama_token * 1)()
        for _ in range(n - 1):
            one[0] = token
            lib.llama_decode(self.context, lib.llama_batch_get_one(one, 1))
            token = lib.llama_sampler_sample(self.sampler, self.context, -1)
        return first - start, time.perf_counter() - first


def one_rank(path: Path, exact: bool, fast: bool) -> Session:
    """A loaded session without MPI. `fast`: with ggpipe's own kernels."""
    config = EngineConfig(
        ModelConfig(path=path),
        ContextConfig(n_ctx=N_CTX, exact=exact, fast_kernels=fast),
        PipelineConfig(threads=(1,)),
        cache_prompt=False,
    )
    return Session.load(Head(LocalWorld(1).transports[0], config))


def generate(session: Session, prompt: tuple[int, ...], n: int) -> tuple[float, float]:
    """As Libllama.generate, by a session."""
    stats = RequestStats()
    collections.deque(session.stream(greedy(prompt, n), stats), 0)
    assert stats.ttft_s is not None
    return stats.ttft_s, stats.decode_s


def job_single(path: Path, pairs: int, backwards: bool) -> int:
    """Seconds of prefill and decode, and CPU seconds, of each contender in each round, in a process of its own."""
    pin_rank(0)
    start()
    makers: dict[str, Callable[[], Callable[[tuple[int, ...], int], tuple[float, float]]]] = {
        "libllama": lambda: Libllama(path).generate,
        "ggpipe": lambda: partial(generate, one_rank(path, False, True)),
        "ggpipe --exact": lambda: partial(generate, one_rank(path, True, False)),
        "ggpipe --exact --fast-kernels": lambda: partial(generate, one_rank(path, True, True)),
    }
    names = list(makers)[:: -1 if backwards else 1]
    runs = {name: makers[name]() for name in names}
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for i in range(pairs + 1):
        for name in names[i % 4 :] + names[: i % 4]:  # no contender always follows the same one
            cpu = time.process_time()
            prefill, decode = runs[name](prompt_tokens(N_PROMPT), N_DECODE)
            if i > 0:  # the first round warms up
                times[name].append((prefill, decode, time.process_time() - cpu))
    print(json.dumps(times))
    return 0


def bench_single(path: Path, pairs: int) -> None:
    """One rank against libllama. Twice, because the first to load gets slower memory: up to 3 % here."""
    times: dict[str, list[tuple[float, float, float]]] = {}
    for order in ("forwards", "backwards"):
        command = [*SCRIPT, "--job", f"single-{order}", "--model", str(path), "--pairs", str(pairs)]
        result = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        for name, values in result.items():
            times.setdefault(name, []).extend(values)
    print(f"\nsingle: one rank, -t 1, {N_PROMPT} prompt tokens, {N_DECODE} generated, 2 x {pairs} rounds in turn")
    width = max(map(len, times))
    for name, values in times.items():
        prefill = statistics.median(N_PROMPT / v[0] for v in values)
        decode = statistics.median((N_DECODE - 1) / v[1] for v in values)
        print(f"  {name:{width}s} prefill {prefill:7.2f} t/s   decode {decode:7.2f} t/s")
    for name in [name for name in times if name != "libllama"]:
        for what, index in (("prefill speed", 0), ("decode speed", 1), ("CPU time", 2)):
            both = list(zip(times["libllama"], times[name], strict=True))
            ratios = [b[2] / a[2] if index == 2 else a[index] / b[index] for a, b in both]
            print(f"  {name:{width}s} {what:13s} / libllama's {middle(ratios, 3)}")


# rows

N_ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 128)
FILE_TYPES = (
    "Q8_0", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "Q2_K", "Q3_K_M", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS",
    "IQ2_XXS", "IQ1_M", "IQ1_S", "NVFP4", "Q2_0", "TQ2_0", "TQ1_0", "Q1_0", "F16", "BF16",
)  # fmt: skip


def bench_rows(path: Path, rounds: int, file_types: Sequence[str]) -> None:
    """Whole runs of one rank with one thread, milliseconds: the fastest of some."""
    start()  # which silences libllama
    print(f"\nrows: milliseconds of a run, best of {rounds} rounds: ggml's kernels / ggpipe's")
    print("  rows    " + "".join(f"{n:>15}" for n in N_ROWS))
    for file_type in file_types:
        with tempfile.TemporaryDirectory(prefix="ggpipe-bench-") as folder:
            model = quantize(path, Path(folder) / f"{file_type}.gguf", file_type, pure=True, n_threads=0)
            file = ModelFile.open(model)
            stages = [
                Stage(file, (0, file.n_layer), ModelConfig(path=model), context, (1, 1))
                for context in (ContextConfig(n_ctx=N_CTX, fast_kernels=fast) for fast in (False, True))
            ]
            best = {(kernels, n): float("inf") for kernels in range(2) for n in N_ROWS}
            for run in range(rounds + 1):
                for n in N_ROWS:
                    for kernels, stage in enumerate(stages):
                        stage.forget_all()
                        rows = tuple(
                            Row(token=token, pos=i, seqs=(0,), request=0, logits_request=0)
                            for i, token in enumerate(prompt_tokens(n))
                        )
                        wanted = (LogitsRequest(LogitsKind.TOP, 1),)
                        outcome = stage.decode(Run(id=run * 1000 + n, rows=rows, logits_requests=wanted), None)
                        if run > 0:  # the first round warms up
                            best[kernels, n] = min(best[kernels, n], outcome.compute_s * 1e3)
            print(f"  {file_type:8}" + "".join(f"{best[0, n]:7.1f} /{best[1, n]:6.1f}" for n in N_ROWS), flush=True)


# hops


def run_pinned(path: Path, head: Callable[[Head], int]) -> int:
    """Be a rank, on a core of its own."""
    pin_rank()
    config = EngineConfig(
        ModelConfig(path=path), ContextConfig(n_ctx=N_CTX), PipelineConfig(threads=(1,)), cache_prompt=False
    )
    return run_rank(config, head)


def job_hops(path: Path, pairs: int) -> int:
    """A rank's part: the pipeline, and in turn the whole model on the head."""

    def head(ranks: Head) -> int:
        session = Session.load(ranks)
        file = ModelFile.open(path)
        whole = Stage(file, (0, file.n_layer), ModelConfig(path=path), ContextConfig(n_ctx=N_CTX), (1, 1))
        sums, wholes, hops = [], [], []
        for i in range(pairs + 1):
            stats = RequestStats()
            collections.deque(session.stream(greedy(prompt_tokens(16), N_DECODE), stats), 0)
            decodes = stats.runs[-len(stats.itl_s) :]  # the prompt went in before, in chunks
            tokens = [sum(span.compute_s for span in run.spans) for run in decodes]
            alone = whole_decode(whole)
            if i > 0:  # the first round warms up
                sums.append(statistics.median(tokens))
                wholes.append(statistics.median(alone))
                hops += [(itl - t) / len(session.ranks) * 1e6 for itl, t in zip(stats.itl_s, tokens, strict=True)]
        print(json.dumps({"sums": sums, "wholes": wholes, "hops": hops}))
        return 0

    return run_pinned(path, head)


def whole_decode(stage: Stage) -> list[float]:
    """Decode times of single tokens after a prompt of 16 tokens, in seconds."""
    want = (LogitsRequest(LogitsKind.TOP, 1),)
    tokens, seconds = prompt_tokens(16), []
    stage.forget_all()
    rows = tuple(
        Row(token=t, pos=i, seqs=(0,), request=0, logits_request=0 if i == 15 else -1) for i, t in enumerate(tokens)
    )
    outcome = stage.decode(Run(id=1, rows=rows, logits_requests=want), None)
    for i in range(N_DECODE - 1):
        token = outcome.rows[0].ids[0] if outcome.rows[0].ids else 0
        outcome = stage.decode(
            Run(
                id=2 + i,
                rows=(Row(token=token, pos=16 + i, seqs=(0,), request=0, logits_request=0),),
                logits_requests=want,
            ),
            None,
        )
        seconds.append(outcome.compute_s)
    return seconds


def bench_hops(path: Path, pairs: int) -> None:
    """Two and three ranks."""
    for n in (2, 3):
        result = run_ranks(n, [*SCRIPT, "--job", "hops", "--model", path, "--pairs", pairs])
        ratios = [a / b for a, b in zip(result["sums"], result["wholes"], strict=True)]
        print(f"\nhops: {n} ranks, one thread each, pinned, {pairs} rounds of {N_DECODE - 1} tokens in turn")
        print(f"  whole model decodes a token in {statistics.median(result['wholes']) * 1e3:.2f} ms (median)")
        print(f"  sum of the stages' decode times / whole model's {middle(ratios, 3)}")
        print(f"  a hop, decode excluded, microseconds            {middle(result['hops'], 3)}")


# memory


def job_memory(path: Path, layers: tuple[int, int], mode: str) -> int:
    """Open a stage and print its memory, and the bytes that were read."""
    file = ModelFile.open(path)
    read_before = io_counter("rchar")
    stage = Stage(file, layers, ModelConfig(path=path, load_mode=mode), ContextConfig(n_ctx=N_CTX), (1, 1))  # type: ignore[arg-type]
    names = {"blk." + str(i) + "." for i in range(*layers)}
    share = sum(t.size for name, t in file.tensors.items() if any(name.startswith(n) for n in names))
    if layers[0] == 0:
        share += sum(t.size for name, t in file.tensors.items() if name.startswith("token_embd"))
    if layers[1] == file.n_layer:
        share += sum(t.size for name, t in file.tensors.items() if name.startswith("output"))
    kv = int(shape_of(file).cell_bytes(layers)) * N_CTX
    resident = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
        if line.startswith("Rss:")
    )
    print(json.dumps({"resident": resident, "share": share, "kv": kv, "header": sum(file.header_bytes),
                      "read": io_counter("rchar") - read_before}))  # fmt: skip
    stage.close()
    return 0


def io_counter(name: str) -> int:
    """A counter of /proc/self/io."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise KeyError(name)


def bench_memory(paths: Sequence[tuple[int, Path]]) -> None:
    """A quarter of the layers: the first, a middle, the last."""
    print("\nmemory: stages of a quarter of the layers, MB (resident includes Python and the libraries)")
    print("  vocabulary  layers  mode   weights     KV   header   resident  above share      read  above share+header")
    for n_vocab, path in paths:
        for layers in ((0, 4), (4, 8), (12, 16)):
            for mode in ("mmap", "none"):
                command = [*SCRIPT, "--job", "memory", "--model", str(path), "--layers",
                           f"{layers[0]}-{layers[1]}", "--mode", mode]  # fmt: skip
                r = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
                above, more = r["resident"] - r["share"] - r["kv"], r["read"] - r["share"] - r["header"]
                mb = {k: v / 1e6 for k, v in r.items()}
                print(
                    f"  {n_vocab:10d}  {layers[0]:2d}-{layers[1] - 1:<3d}  {mode:5s} {mb['share']:8.1f} {mb['kv']:6.1f}"
                    f" {mb['header']:8.2f} {mb['resident']:10.1f} {above / 1e6:12.1f} {mb['read']:9.1f}"
                    f" {more / 1e6:12.1f}"
                )


# idle


def job_idle(path: Path) -> int:
    """Generate a few tokens, wait 10 s, and print each rank's CPU time of the wait."""

    def head(ranks: Head) -> int:
        session = Session.load(ranks)
        collections.deque(session.stream(greedy(prompt_tokens(16), 4)), 0)
        session.measure()
        before = [r.cpu_s for r in session.ranks]
        session.idle(10)
        session.measure()
        print(json.dumps({"cpu_s": [r.cpu_s - b for r, b in zip(session.ranks, before, strict=True)]}))
        return 0

    return run_pinned(path, head)


def bench_idle(path: Path) -> None:
    """CPU time of ranks that wait."""
    result = run_ranks(3, [*SCRIPT, "--job", "idle", "--model", path])
    print("\nidle: CPU seconds of three ranks, the head first, that wait for 10 s: ", end="")
    print(", ".join(f"{s:.3f}" for s in result["cpu_s"]))


def main() -> int:
    """Parse the command line and run benches, or one rank's part of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="*", help="single, rows, hops, memory, idle; default: all")
    parser.add_argument("--pairs", type=int, default=11, help="rounds of each comparison")
    parser.add_argument("--types", nargs="+", default=FILE_TYPES, help="of weights (rows)")
    parser.add_argument("--model", type=Path, help="use this model instead of a random one (single, hops, idle)")
    parser.add_argument("--inflated", action="store_true", help="as --model, with the inflated bundled target (Q8_0)")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--layers", help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="mmap", help=argparse.SUPPRESS)
    parser.add_argument("--attention", action="store_true", help="compare flash attention with ggml's over 60 shapes")
    parser.add_argument("--cells", choices=get_args(KvType), default="f16", help="with --attention: type of KV cells")
    args = parser.parse_args()
    if args.attention:
        start()
        return bench_attention(GGMLQuantizationType[args.cells.upper()])
    match args.job:
        case "single-forwards" | "single-backwards":
            return job_single(args.model, args.pairs, args.job == "single-backwards")
        case "hops":
            return job_hops(args.model, args.pairs)
        case "idle":
            return job_idle(args.model)
        case "memory":
            a, b = args.layers.split("-")
            return job_memory(args.model, (int(a), int(b)), args.mode)
    wanted = args.benches or ["single", "rows", "hops", "memory", "idle"]
    with tempfile.TemporaryDirectory(prefix="ggpipe-bench-") as folder:
        given = inflated_pair().target if args.inflated else args.model
        path = given or make_model(Path(folder) / "target.gguf", 8192)
        if "single" in wanted:
            bench_single(path, args.pairs)
        if "rows" in wanted:
            bench_rows(path, args.pairs, args.types)
        if "hops" in wanted:
            bench_hops(path, args.pairs)
        if "memory" in wanted:
            bench_memory([(n, make_model(Path(folder) / f"v{n}.gguf", n)) for n in (32_000, 150_000)])
        if "idle" in wanted:
            bench_idle(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
