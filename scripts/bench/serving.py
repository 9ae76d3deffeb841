"""Measures several users at a time; run it as `scripts/bench/serving`.

Two target ranks under mpirun, one thread each, as two stages or with `--group` as one, and with `--draft` a draft rank,
on the bundled pair inflated to 0.4 B in Q8_0. With `--experts`, the target is a mixture of experts (2 of 16), with
`--hybrid` a model of which four layers in five are recurrent. With `--one`, a single target rank, and the draft rank on
the other core. All settings take turns in each round. Tables show medians over the rounds; ratios are of one round.

users   1, 4 and 8 users at a time, each with a prompt of 16 tokens and 64 tokens to generate: tokens a second of all
        together, from the first arrival to the last token. Beside it libllama driven directly: one process with two
        threads that decodes all users in one batch, and the limit that the times of the round's runs set: prompts one
        behind the other through all stages, each row as fast as in the fastest run, then the most rows a second with
        all stages busy, whichever number of rows gives it.
again   the second question of a conversation of 1,000 tokens: its time to first token against the first one's.
prompt  one user decodes while another's prompt of 2,000 tokens comes in: the first one's tokens a second and latencies
        between them against the usual ones of `iterative`, and the prompt's time to first token against what it takes
        alone.

`scripts/bench/serving --http` measures servers instead, see `scripts/bench/serving_http.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ggpipe.channel.events import TokenReady
from ggpipe.config.context import MAX_STATES, ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.core.messages import RunRecord
from ggpipe.engine.head import Head
from ggpipe.engine.process import run_rank
from ggpipe.engine.session import Session
from ggpipe.launch.environment import rank_in_environment
from ggpipe.llama.bundled import ModelPair, inflated_hybrid, inflated_mixture, inflated_pair
from ggpipe.stats.records import RequestStats, percentile
from scripts.bench.measuring import ITERATIVE, greedy, middle, pin_rank, run_ranks

N_CTX, N_UBATCH, N_TARGET = 4096, 512, 2
N_SHORT, N_LONG, N_CONVERSATION = 16, 2000, 1000
USERS = (1, 4, 8)
PARTS = ("users", "again", "prompt")
SCRIPT = (sys.executable, "-m", "scripts.bench.serving")  # from the project's folder
_MANY = 20  # runs of a round, of which the mean counts for that round
TALE = Path(__file__).parents[2] / "prompts" / "tale.txt"


def prompts(tokens: Sequence[int], n: int, length: int) -> list[tuple[int, ...]]:
    """`n` different prompts of this many tokens from one text, which is repeated if it is too short."""
    repeated = list(tokens) * (math.ceil((length + 7 * n) / len(tokens)) + 1)
    return [tuple(repeated[7 * i : 7 * i + length]) for i in range(n)]


# The engine: all ranks


def pair_of(args: argparse.Namespace) -> ModelPair:
    """The inflated pair to measure."""
    if args.hybrid:
        return inflated_hybrid()
    return inflated_mixture() if args.experts else inflated_pair()


def job(args: argparse.Namespace) -> int:
    """One rank's part. The head measures and prints all numbers as JSON."""
    rank = rank_in_environment() or 0
    cores = sorted(os.sched_getaffinity(0))
    if args.one or rank < N_TARGET:  # else the draft runs on any core
        pin_rank(rank)
    pair = pair_of(args)
    sizes = ContextConfig(n_ctx=N_CTX, n_ubatch=N_UBATCH, n_seq=2 * max(USERS), n_states=MAX_STATES)
    pipeline = PipelineConfig(LayerSplit((1 / N_TARGET,) * N_TARGET), (1,))
    if args.one:
        pipeline = PipelineConfig(LayerSplit((1.0,)), (1,))
    if args.group:
        pipeline = PipelineConfig(LayerSplit((1.0,), (N_TARGET,)), (1,))
    config = EngineConfig(
        ModelConfig(path=pair.target),
        sizes,
        pipeline,
        (DraftConfig(model=ModelConfig(path=pair.draft), context=sizes, layer_split=LayerSplit((1.0,))),)
        if args.draft
        else (),
        n_requests=max(USERS),
        prefill_slowdown=args.prefill_slowdown,
    )

    def head(ranks: Head) -> int:
        engine = Session.load(ranks)
        with libllama(pair.target, cores) as ask:
            print(json.dumps(_measured(engine, args, ask)))
        return 0

    return run_rank(config, head)


def _measured(engine: Session, args: argparse.Namespace, ask: Any) -> list[dict[str, Any]]:
    tokens = engine.vocab.tokenize(TALE.read_text())
    modes: tuple[Mode, ...] = ("iterative", "async") if args.draft else ("iterative",)
    results: list[dict[str, Any]] = []
    for i in range(args.rounds + 1):
        found: dict[str, Any] = {"round": i}
        if "users" in args.parts:
            for n in USERS:
                found[f"libllama {n}"] = ask(prompts(tokens, n, N_SHORT), args.n)
                for mode in modes[:: 1 if i % 2 else -1]:
                    stats = _serve(engine, prompts(tokens, n, N_SHORT), args.n, SpeculationConfig(mode=mode))
                    end_s = max(s.token_times[-1] for s in stats) - min(s.arrived for s in stats)
                    found[f"{mode} {n}"] = n * args.n / end_s
                    found[f"{mode} {n} accepted"] = sum(s.counters.accepted_tokens for s in stats) / (n * args.n)
                    if mode == "iterative":
                        found[f"rows {n}"] = _times_by_rows(stats)
                        found[f"prompt row {n}"] = min(_slowest_s(s.runs[0]) / s.runs[0].n_run_rows for s in stats)
        if "prompt" in args.parts:
            (long,) = prompts(tokens, 1, N_LONG)
            (alone,) = _serve(engine, [long], 2, ITERATIVE)
            found["prompt alone"] = alone.ttft_s
            for mode in modes[:: 1 if i % 2 else -1]:
                beside = _beside_a_prompt(engine, tokens, args.n, SpeculationConfig(mode=mode))
                found |= {f"{mode} {name}": value for name, value in beside.items()}
        if "again" in args.parts:
            found["again"] = _second_question(engine, tokens, i)
        results.append(found)
        shown = {name: round(value, 3) for name, value in found.items() if isinstance(value, float)}
        print(f"round {i} of {args.rounds}: {shown}", file=sys.stderr, flush=True)
    return results


def _serve(
    engine: Session, texts: Sequence[tuple[int, ...]], n: int, speculation: SpeculationConfig
) -> list[RequestStats]:
    requests = [engine.submit(greedy(text, n, speculation)) for text in texts]
    while any(request.is_active for request in requests):
        engine.step()
    return [request.stats for request in requests]


def _beside_a_prompt(
    engine: Session, tokens: Sequence[int], n: int, speculation: SpeculationConfig
) -> dict[str, float]:
    (long,), (short,) = prompts(tokens, 1, N_LONG), prompts(tokens, 1, N_SHORT)
    (usual,) = _serve(engine, [short], n, ITERATIVE)
    user = engine.submit(greedy(short, N_CTX // 4, speculation))
    while user.stats.n_generated < 8:
        engine.step()
    other = engine.submit(greedy(long, 2))
    while other.is_active:
        engine.step()
    first, last = other.stats.arrived, other.stats.token_times[0]
    engine.cancel(user)
    while user.is_active:
        engine.step()
    times = [t for t in user.stats.token_times if first <= t <= last]
    latencies = [b - a for a, b in itertools.pairwise(times)]
    usual_s, p50, p99 = percentile(usual.itl_s, 0.5), percentile(latencies, 0.5), percentile(latencies, 0.99)
    assert other.stats.ttft_s is not None
    assert usual_s is not None
    assert p50 is not None
    assert p99 is not None
    return {
        "prompt": other.stats.ttft_s,
        "tokens": len(times) / (last - first) * usual_s,
        "ITL p50": p50 / usual_s,
        "ITL p99": p99 / usual_s,
    }


def _second_question(engine: Session, tokens: Sequence[int], i: int) -> float:
    """TTFT of the second question, relative to the first's, in a conversation that no earlier round had."""
    first = (300 + i, *prompts(tokens, 1, N_CONVERSATION - 1)[0])
    request = engine.submit(greedy(first, 16, cache_prompt=True))
    answer: list[int] = []
    while request.is_active:
        answer += [event.token.id for event in engine.step() if isinstance(event, TokenReady)]
    second = (*first, *answer, *prompts(tokens, 2, 24)[1])
    again = engine.submit(greedy(second, 2, cache_prompt=True))
    while again.is_active:
        engine.step()
    assert request.stats.ttft_s is not None
    assert again.stats.ttft_s is not None
    return again.stats.ttft_s / request.stats.ttft_s


def _times_by_rows(stats: Sequence[RequestStats]) -> dict[int, list[float]]:
    """Seconds that runs without prompts took in their slowest stages, by their rows."""
    times: dict[int, dict[int, float]] = {}
    for run in (run for request in stats for run in request.runs[-len(request.itl_s) :]):
        if run.n_run_rows <= max(USERS):  # no other prompt in it
            times.setdefault(run.n_run_rows, {})[run.id] = _slowest_s(run)
    return {n: list(by_run.values()) for n, by_run in times.items()}


def _slowest_s(run: RunRecord) -> float:
    return max(span.compute_s for span in run.spans)


# libllama alone


@contextmanager
def libllama(path: Path, cores: Sequence[int]) -> Iterator[Any]:
    """A process with one thread for each core that serves a batch of all users; asks it for tokens a second."""
    command = [*SCRIPT, "--libllama", str(path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PMI", "PRTE"))}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        source, sink = process.stdout, process.stdin

        def ask(texts: list[tuple[int, ...]], n: int) -> float:
            sink.write(json.dumps([texts, n]).encode() + b"\n")
            sink.flush()
            return float(source.readline())

        yield ask
        sink.close()


def serve_with_libllama(path: Path) -> int:
    """Answer each line of stdin, prompts and a number of tokens, with tokens a second of all together."""
    from ggpipe.llama.libllama import lib, start

    start()
    model = lib.llama_model_load_from_file(os.fsencode(path), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_ubatch, params.n_seq_max, params.kv_unified = N_CTX, N_UBATCH, max(USERS), True
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    context = lib.llama_init_from_model(model, params)
    memory, batch = lib.llama_get_memory(context), lib.llama_batch_init(2048, 0, 1)
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(rows)
        for i, (token, pos, seq, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, pos, 1
            batch.seq_id[i][0], batch.logits[i] = seq, wanted
        if lib.llama_decode(context, batch) != 0:
            raise RuntimeError("libllama could not decode")

    def best(i: int) -> int:
        return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (n_vocab,)).argmax())

    for line in sys.stdin:
        texts, n = json.loads(line)
        lib.llama_memory_clear(memory, False)
        began = time.monotonic()
        rows = [(t, i, seq, i == len(text) - 1) for seq, text in enumerate(texts) for i, t in enumerate(text)]
        decode(rows)
        wanted = [i for i, row in enumerate(rows) if row[3]]
        for step in range(n):
            tokens = [best(i) for i in wanted]
            if step < n - 1:
                decode([(token, len(texts[seq]) + step, seq, True) for seq, token in enumerate(tokens)])
            wanted = list(range(len(texts)))
        print(len(texts) * n / (time.monotonic() - began), flush=True)
    return 0


# Tables


def report(results: Sequence[dict[str, Any]], n_tokens: int, draft: bool, n_stages: int) -> None:
    """Print the medians of all rounds but the first, which warms up."""
    rounds = [result for result in results if result["round"] > 0]
    if "again" in rounds[0]:
        again = middle(r["again"] for r in rounds)
        print(f"second question of {N_CONVERSATION} tokens: first token after {again} times what the first's took")
    for mode in ("iterative", "async") if draft else ("iterative",):
        if f"{mode} prompt" not in rounds[0]:
            continue
        beside = {name: middle(r[f"{mode} {name}"] for r in rounds) for name in ("tokens", "ITL p50", "ITL p99")}
        longer = middle(r[f"{mode} prompt"] / r["prompt alone"] for r in rounds)
        print(
            f"beside a prompt of {N_LONG} tokens, {mode}: tokens a second {beside['tokens']} times the usual ones, "
            f"ITL p50 {beside['ITL p50']} and p99 {beside['ITL p99']} times the usual one; "
            f"that prompt: {longer} times as long as alone"
        )
    if "libllama 1" not in rounds[0]:
        return
    times = run_times(results)
    shown = ", ".join(f"{n} {s * 1e3:.1f} ms" for n, s in sorted(times.items()))
    print(f"runs by their rows, in the slowest stage: {shown}")
    print("users   libllama t/s   pipeline t/s   ratio [quartiles]          limit by the times of the round's runs")
    for n in USERS:
        base = statistics.median(r[f"libllama {n}"] for r in rounds)
        own = statistics.median(r[f"iterative {n}"] for r in rounds)
        ratio = middle(r[f"iterative {n}"] / r[f"libllama {n}"] for r in rounds)
        bounds = []
        for r in rounds:
            rate, size = limit(times | run_times([r], _MANY), n, n_stages)
            prompt_s = r[f"prompt row {n}"] * N_SHORT * (n + n_stages - 1)
            bounds.append((n * n_tokens / (prompt_s + n * (n_tokens - 1) / rate), size))
        reached = middle(r[f"iterative {n}"] / bound for r, (bound, _) in zip(rounds, bounds, strict=True))
        bound, size = statistics.median_low(bounds)
        allowed = f"{bound:.1f} t/s with {size} a run; reached {reached} of it"
        print(f"{n:5d} {base:14.1f} {own:14.1f}   {ratio:28s} {allowed}")
        if draft:
            gain = middle(r[f"async {n}"] / r[f"iterative {n}"] for r in rounds)
            accepted = statistics.median(r[f"async {n} accepted"] for r in rounds)
            print(f"        with a draft, times without: {gain}, {accepted:.0%} of the tokens accepted")


def run_times(results: Sequence[dict[str, Any]], fewest: int = 1) -> dict[int, float]:
    """Mean time of runs in their slowest stage, in seconds, by number of rows; only numbers with at least `fewest`
    runs. A mean, because users wait for slow runs too."""
    times: dict[int, list[float]] = {}
    for result in results:
        for users in USERS:
            for n, seconds in result[f"rows {users}"].items():
                times.setdefault(int(n), []).extend(seconds)
    return {n: statistics.fmean(seconds) for n, seconds in times.items() if len(seconds) >= fewest}


def limit(times: dict[int, float], n_users: int, n_stages: int) -> tuple[float, int]:
    """Maximum tokens per second for `n_users` if all runs have the same size, and that size. With fewer runs than
    stages, some stages are idle."""
    sizes = [n for n in times if n <= n_users]
    return max((n / times[n] * min(n_users / n / n_stages, 1), n) for n in sizes)


def main() -> int:
    """Parse the command line and bench, or run one rank's part."""
    if sys.argv[1:2] == ["--http"]:
        from scripts.bench import serving_http  # which imports this module

        return serving_http.main(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-n", type=int, default=64, help="tokens to generate for each user")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--draft", action="store_true", help="with a draft rank")
    parser.add_argument("--one", action="store_true", help="a single target rank, and the draft rank on the other core")
    parser.add_argument("--group", action="store_true", help="the target ranks compute one stage together")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    parser.add_argument("--hybrid", action="store_true", help="a hybrid model")
    parser.add_argument("--prefill-slowdown", type=float, default=EngineConfig.prefill_slowdown)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--libllama", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.libllama:
        return serve_with_libllama(args.libllama)
    if args.job:
        return job(args)
    pair_of(args)  # made once, before ranks read it
    results = run_ranks((1 if args.one else N_TARGET) + args.draft, [*SCRIPT, "--job", *sys.argv[1:]])
    report(results, args.n, args.draft, 1 if args.group or args.one else N_TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
