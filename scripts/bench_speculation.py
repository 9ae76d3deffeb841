"""Measures what speculation gains; run it as `scripts/bench_speculation`.

Two target ranks and a draft rank under mpirun, one thread each, on random pairs of a 0.75 B Q4_0 target and a draft of
one of its layers, at several agreements, and on the demo pair. All modes take turns in one session, so each round
compares them on the same machine at the same time. Tables show medians over the rounds; ratios are of one round.

asleep  2, 4 and 8 target ranks and a draft rank whose stages sleep instead of computing: what scheduling, messages and
        cancelling are worth where every rank has a machine of its own
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from make_pair import Shape, make_pair

import ggpipe
from ggpipe.config import (
    ContextConfig,
    DraftConfig,
    EngineConfig,
    ModelConfig,
    PipelineConfig,
    SamplingConfig,
    SpeculationConfig,
)
from ggpipe.core.messages import Row, RowLogits, Run
from ggpipe.engine.model_file import ModelFile
from ggpipe.engine.stage import Cut, Outcome
from ggpipe.runtime import launch, startup
from ggpipe.runtime.rank import run_rank
from ggpipe.runtime.session import Session
from ggpipe.runtime.stats import RequestStats

N_CTX, N_PROMPT = 512, 128
GREEDY = SamplingConfig(temp=0, ignore_eos=True)
MODELS = Path(ggpipe.__file__).parent / "models"
SETTINGS = {
    "iterative": SpeculationConfig("iterative"),
    **{f"speculative --draft {n}": SpeculationConfig("speculative", n_draft=n) for n in (1, 2, 3, 4, 7)},
    **{f"async --draft {n}": SpeculationConfig("async", n_draft=n) for n in (1, 3, 8)},
}


class SleepingStage:
    """A stage that takes its time without taking a core. Its model's next token follows from the last and its position;
    the draft says the same for a share `agreement` of the positions."""

    def __init__(self, n_layer: int, layers: tuple[int, int], token_s: float, agreement: float) -> None:
        self.is_first, self.is_last = layers[0] == 0, layers[1] == n_layer
        self.cut = Cut(collections.Counter(), collections.Counter())
        self.n_ctx = N_CTX
        self._run_s = token_s * (layers[1] - layers[0]) / n_layer
        self._agreement = agreement
        self._cancelled: set[int] = set()

    def decode(self, run: Run, _incoming: object, headroom: int) -> Outcome:
        """Each row beyond the first takes a tenth of the first one's time, as where memory is the limit."""
        if run.cancelled or not run.rows:
            return Outcome(bytearray(headroom), (), 0.0, run.cancelled)
        start = time.monotonic()
        end = start + self._run_s * (1 + 0.1 * (len(run.rows) - 1))
        while (left := end - time.monotonic()) > 0 and run.id not in self._cancelled:
            time.sleep(min(left, 1e-3))
        if run.id in self._cancelled:
            return Outcome(bytearray(headroom), (), time.monotonic() - start, True)
        rows = tuple(self._answer(i, row, run.wants[row.want].n) for i, row in enumerate(run.rows) if row.want >= 0)
        return Outcome(bytearray(headroom + 8192), rows if self.is_last else (), time.monotonic() - start, False)

    def _answer(self, i: int, row: Row, n: int) -> RowLogits:
        right = random.Random(row.pos).random() < self._agreement
        token = 300 + (31 * row.token + 7 * row.pos + (not right)) % 1000
        return RowLogits(i, tuple(token + k for k in range(n)), (-0.1, *[-5.0 - k for k in range(n - 1)]), 0.0)

    def cancel(self, run_id: int) -> None:
        """As a stage's."""
        self._cancelled.add(run_id)

    def close(self) -> None:
        """As a stage's."""


def sleep_instead(agreement: float) -> None:
    """From now on this rank's stages sleep: 80 ms a token all together, the draft 8 ms."""

    def loader(_config: object, _transport: object, file: ModelFile, layers: tuple[int, int], draft: bool) -> Any:
        seconds, agrees = (0.008, agreement) if draft else (0.08, 1.0)
        return lambda _progress: SleepingStage(file.n_layer, layers, seconds, agrees)

    startup.stage_loader = loader  # type: ignore[assignment]


def settings_named(names: list[str]) -> dict[str, SpeculationConfig]:
    """Those whose names contain one of these; all for none."""
    return {key: value for key, value in SETTINGS.items() if not names or any(name in key for name in names)}


def job(
    target: Path, draft: Path, n_target: int, agreement: float | None, rounds: int, n_predict: int, names: list[str]
) -> int:
    """One rank's part. The head prints all numbers as JSON."""
    rank = launch.rank_in_environment() or 0
    cores = sorted(os.sched_getaffinity(0))
    if agreement is not None:
        sleep_instead(agreement)
    elif rank < n_target:  # the draft goes where there is room
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    config = EngineConfig(
        ModelConfig(target),
        ContextConfig(N_CTX),
        PipelineConfig((1 / n_target,) * n_target, (1,)),
        DraftConfig(ModelConfig(draft), ContextConfig(N_CTX), (1.0,)),
    )

    def head(session: Session) -> int:
        session.load()
        results: list[dict[str, Any]] = []
        for i in range(rounds + 1):
            settings = list(settings_named(names).items())
            for name, speculation in settings[i % len(settings) :] + settings[: i % len(settings)]:
                stats = RequestStats()
                prompt = tuple(300 + 7 * (k + 11 * i) % 700 for k in range(N_PROMPT))
                tokens = [t.id for t in session.generate(prompt, GREEDY, n_predict, stats, speculation)]
                counters = stats.counters
                results.append({
                    "round": i, "name": name, "text": tokens, "tps": stats.decode_tps, "ttft": stats.ttft_s,
                    "acceptance": counters.acceptance, "per_run": counters.accepted_per_run,
                    "runs": counters.speculative_runs, "cancelled": counters.cancelled_runs,
                })  # fmt: skip
        print(json.dumps(results))
        return 0

    return run_rank(config, head)


def bench(
    title: str,
    target: Path,
    draft: Path,
    rounds: int,
    n_predict: int,
    names: list[str],
    n_target: int = 2,
    agreement: float | None = None,
) -> None:
    """One pair of models, all settings. With an `agreement`, stages only sleep."""
    command = launch.mpirun_command(launch.find_mpirun(), n_target + 1, None, [])
    command += [sys.executable, __file__, *names, "--job", str(target), str(draft), "--rounds", str(rounds)]
    command += ["-n", str(n_predict), "--targets", str(n_target)]
    command += [] if agreement is None else ["--agreement", str(agreement)]
    environment = {**os.environ, **launch.mpi_environment()}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    results = [r for r in json.loads(done.stdout) if r["round"] > 0]  # the first round warms up
    of = {(r["name"], r["round"]): r for r in results}
    shown = list(settings_named(names))
    print(f"\n{title}: {n_predict} tokens, {rounds} rounds")
    print("  setting                  t/s   x iterative [quartiles]     TTFT x   accepted   a run   cancelled   differ")
    for name in shown:
        rows = [of[name, i] for i in range(1, rounds + 1)]
        base = [of["iterative", i] for i in range(1, rounds + 1)]
        gain = [r["tps"] / b["tps"] for r, b in zip(rows, base, strict=True)]
        ttft = statistics.median(r["ttft"] / b["ttft"] for r, b in zip(rows, base, strict=True))
        low, middle, high = statistics.quantiles(gain, n=4) if len(gain) > 1 else gain * 3
        line = f"  {name:22s} {statistics.median(r['tps'] for r in rows):6.2f}"
        line += f"   {middle:5.2f}  [{low:.2f} … {high:.2f}] {ttft:12.2f}"
        if rows[0]["acceptance"] is not None:
            runs, cancelled = sum(r["runs"] for r in rows), sum(r["cancelled"] for r in rows)
            line += f"   {statistics.median(r['acceptance'] for r in rows):8.0%}"
            line += f"   {statistics.median(r['per_run'] or 0 for r in rows):5.2f}   {cancelled / runs:9.0%}"
            line += f"   {sum(r['text'] != b['text'] for r, b in zip(rows, base, strict=True)):6d}"
        print(line, flush=True)


def main() -> int:
    """Parse the command line and bench all pairs, or run one rank's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="only settings whose names contain one of these")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("-n", type=int, default=64, help="tokens to generate")
    parser.add_argument("-s", type=float, nargs="*", default=[0.03, 0.06, 0.12], help="how the pairs differ")
    parser.add_argument("--pair", type=Path, nargs=2, help="a pair to use instead")
    parser.add_argument("--asleep", action="store_true", help="only the stages that sleep")
    parser.add_argument("--job", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--targets", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--agreement", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        return job(args.job[0], args.job[1], args.targets, args.agreement, args.rounds, args.n, args.settings)
    if args.settings and "iterative" not in args.settings:
        args.settings.append("iterative")
    demo = MODELS / "tales-target.gguf", MODELS / "tales-draft.gguf"
    if args.asleep:
        for n in (2, 4, 8):
            for agreement in (0.0, 0.5, 0.7, 0.9):
                title = f"asleep: {n} target ranks, agreement {agreement:.0%}"
                bench(title, *demo, args.rounds, args.n, args.settings, n, agreement)
        return 0
    if args.pair:
        bench(args.pair[0].name, args.pair[0], args.pair[1], args.rounds, args.n, args.settings)
        return 0
    with tempfile.TemporaryDirectory(prefix="ggpipe-bench-") as folder:
        target, draft, other = (Path(folder) / f"{name}.gguf" for name in ("target", "draft", "other"))
        for s in args.s:
            make_pair(target, draft, Shape(), s=s)
            bench(f"0.75 B pair, s = {s}", target, draft, args.rounds, args.n, args.settings)
        make_pair(other, draft, Shape(), s=args.s[0], seed=8)
        other.unlink()
        bench("0.75 B, a draft that is always wrong", target, draft, args.rounds, args.n, args.settings)
        bench("demo pair", *demo, args.rounds, 256, args.settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
