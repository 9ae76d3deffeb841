"""Measures what speculation gains; run it as `scripts/bench/speculation`.

Two target ranks and a draft rank under mpirun, one thread each, on random pairs of a 0.75 B Q4_0 target and a draft of
one of its layers, at several agreements, on the bundled pair, and on the bundled pair inflated to 0.4 B in Q8_0, which
continues real text: it has the confidences and the rejections of a trained pair. All modes take turns in one session,
so each round compares them on the same machine at the same time. Tables show medians over the rounds; ratios are of one
round.

quotes  what n-grams gain where the output copies the prompt. The bundled model was not trained to copy, so a grammar
        forces its output, in all modes
asleep  2, 4 and 8 target ranks and a draft rank whose stages sleep instead of computing: what scheduling, messages and
        cancellation gain where every rank has a machine of its own
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from msgspec import structs

from ggpipe.config.context import MAX_STATES, ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.engine.active_request import ActiveRequest
from ggpipe.engine.head import Head
from ggpipe.engine.process import run_rank
from ggpipe.engine.session import Session
from ggpipe.launch.environment import die_with_parent, rank_in_environment
from ggpipe.llama.bundled import BUNDLED_PAIR, ModelPair, inflated_hybrid, inflated_mixture, inflated_pair
from ggpipe.llama.sampler import Sampler
from ggpipe.stats.records import RequestStats
from scripts.bench.asleep import N_CTX, sleep_instead
from scripts.bench.measuring import ITERATIVE, greedy, middle, pin_rank, run_ranks
from scripts.models.make_pair import Shape, make_pair
from scripts.models.quantize import quantize
from scripts.models.renumber import renumbered

N_PROMPT, N_STARTED = 128, 16
MOST_DRAFT_ROWS = 16
"""Rows of the draft's longest runs that are shown; longer ones are prompts."""
SCRIPT = (sys.executable, "-m", "scripts.bench.speculation")  # from the project's folder
PROMPTS = Path(__file__).parents[2] / "prompts"
PROMPT_NAMES = ("tale", "program", "chat")
"""Prompts of the inflated pairs. What follows the last two ends soon, and then repeats itself."""
QUOTED = PROMPTS / "long.txt"
_MOST_REPEATS = 16
N_KEPT_WORDS = 12
"""Of a text, before those that a round leaves out."""
SETTINGS = {
    "iterative": ITERATIVE,
    **{f"speculative --draft {n}": SpeculationConfig(mode="speculative", n_draft=n) for n in (1, 2, 3, 4, 7)},
    **{f"async --draft {n}": SpeculationConfig(mode="async", n_draft=n) for n in (1, 3, 8)},
    "async": SpeculationConfig(),
    "async --policy thresholds": SpeculationConfig(policy="thresholds"),
    "async -np 4": SpeculationConfig(policy="thresholds", n_parallel=4),
    "async, draft alone": SpeculationConfig(drafters=("draft",)),
    "async, n-grams alone": SpeculationConfig(drafters=("ngram",)),
    "async, seed not used": SpeculationConfig(),
    "async, penalties not known": SpeculationConfig(),
}
NOT_TOLD = {"async, seed not used": (ActiveRequest, "drawing"), "async, penalties not known": (Sampler, "adjustments")}
"""Draft models are not told how tokens are drawn, or which are penalized. Pauses last, so each of these is measured
alone, beside `iterative`."""
SAMPLINGS = {
    "greedy": SamplingConfig(temp=0),
    "default": SamplingConfig(),
    "all-tokens": SamplingConfig(temp=1, top_k=0, top_p=1, min_p=0),
    "penalties": SamplingConfig(temp=0, presence_penalty=1.5),
    "drawn-with-penalties": SamplingConfig(temp=1, top_k=20, top_p=0.95, min_p=0, presence_penalty=1.5),
}


def settings_named(names: list[str]) -> dict[str, SpeculationConfig]:
    """Those with one of these names, or whose names contain one that is no setting's name; all for none."""
    whole, parts = {name for name in names if name in SETTINGS}, [name for name in names if name not in SETTINGS]
    usual = [key for key in SETTINGS if key not in NOT_TOLD]
    wanted = [key for key in SETTINGS if key in whole or any(part in key for part in parts)] if names else usual
    return {key: SETTINGS[key] for key in wanted}


def never_right(draft: Path, path: Path) -> Path:
    """Write the draft model as `path` with the rows of its output rolled by one: as confident, and always wrong."""
    shutil.copyfile(draft, path)
    (output,) = (tensor for tensor in gguf.GGUFReader(draft).tensors if tensor.name == "output.weight")
    rows = np.memmap(path, np.uint8, "r+", offset=output.data_offset, shape=output.data.shape)
    rows[:] = np.roll(output.data, 1, axis=0)
    rows.flush()
    return path


@contextlib.contextmanager
def busy_guest(is_wanted: bool) -> Iterator[None]:
    """A process at nice 15 that computes all the time."""
    if not is_wanted:
        yield
        return
    guest = subprocess.Popen(("nice", "-n", "15", sys.executable, "-c", "while True: pass"), preexec_fn=die_with_parent)
    try:
        yield
    finally:
        guest.kill()
        guest.wait()


def time_by_rows(stats: RequestStats, draft: bool) -> dict[int, list[float]]:
    """Of computed runs without parts of prompts, by their rows: [runs, seconds in the slowest stage, all told]."""
    found: dict[int, list[float]] = {}
    for run in stats.draft_runs if draft else stats.runs:
        most = MOST_DRAFT_ROWS if draft else run.n_draft_tokens + 1
        if run.spans and not run.cancelled and run.n_run_rows <= most:
            entry = found.setdefault(run.n_run_rows, [0, 0.0])
            entry[0] += 1
            entry[1] += max(span.busy_s for span in run.spans)
    return found


def text_to_quote(session: Session, n: int) -> tuple[int, ...]:
    """A prompt: the first `n` tokens of a text, and a newline.

    A grammar of characters leaves the target free to divide the text into other tokens than the prompt's. So what it
    writes becomes the prompt, until it repeats that token for token. Raises RuntimeError if it never does.
    """
    text, newline = QUOTED.read_text(), session.vocab.tokenize("\n")
    quoted: tuple[int, ...] = ()
    said = session.vocab.tokenize(text)[:n]
    for _ in range(_MOST_REPEATS):
        if said == quoted:
            return (*quoted, *newline)
        quoted = said
        said = tuple(token.id for token in session.stream(greedy((*quoted, *newline), n, grammar=only(text))))
    raise RuntimeError(f"after {_MOST_REPEATS} repetitions of {QUOTED.name}, the target still divides it differently")


def only(text: str) -> str:
    """A grammar that allows this text and nothing else."""
    return f"root ::= {json.dumps(text, ensure_ascii=False)}"


def prompt_of(session: Session, i: int, prompts: list[str], quoted: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """Round i's prompt, and the grammar of its output (empty: none). The prompt is a text to quote and its first
    tokens, one of `prompts`, or tokens at random. Each round leaves out other words, because n-grams would know an
    output that they have seen."""
    if quoted:
        n = N_STARTED + i
        return (*quoted, *quoted[:n]), only(b"".join(session.detokenize(quoted[n:])).decode())
    if prompts:
        words = (PROMPTS / f"{prompts[i % len(prompts)]}.txt").read_text().split(" ")
        del words[N_KEPT_WORDS : N_KEPT_WORDS + 3 * i]
        return session.vocab.tokenize(" ".join(words)), ""
    return tuple(300 + 7 * (k + 11 * i) % 700 for k in range(N_PROMPT)), ""


def target_config(target: Path, streamed: float | None, n_target: int) -> ModelConfig:
    """The target: in memory, or streamed, where each rank keeps this share of its weights."""
    if streamed is None:
        return ModelConfig(path=target)
    kept_gb = streamed * target.stat().st_size / n_target / 1e9
    return ModelConfig(path=target, load_mode="stream", stream_memory_gb=kept_gb)


def job(args: argparse.Namespace) -> int:
    """One rank's part. The head prints all numbers as JSON."""
    (target, draft), n_target, agreement = args.job, args.targets, args.agreement
    rank = rank_in_environment() or 0
    if agreement is not None:
        sleep_instead(agreement)
    elif rank < n_target:  # the draft runs on any core
        pin_rank(rank)
    config = EngineConfig(
        target_config(target, args.streamed, n_target),
        ContextConfig(n_ctx=N_CTX, n_states=MAX_STATES),
        PipelineConfig(LayerSplit((1 / n_target,) * n_target), (1,)),
        (
            DraftConfig(
                model=ModelConfig(path=draft), context=ContextConfig(n_ctx=N_CTX), layer_split=LayerSplit((1.0,))
            ),
        ),
        cache_prompt=False,
    )

    def head(ranks: Head) -> int:
        session = Session.load(ranks)
        quoted = text_to_quote(session, N_STARTED + args.rounds + args.n) if args.quotes else ()
        results: list[dict[str, Any]] = []
        told = {name: vars(owner)[what] for name, (owner, what) in NOT_TOLD.items()}
        for i in range(args.rounds + 1):
            settings = list(settings_named(args.settings).items())
            for name, speculation in settings[i % len(settings) :] + settings[: i % len(settings)]:
                stats = RequestStats()
                prompt, grammar = prompt_of(session, i, args.prompts, quoted)
                sampling = dataclasses.replace(SAMPLINGS[args.sampling], seed=i, ignore_eos=True, grammar=grammar)
                request = structs.replace(greedy(prompt, args.n, speculation), sampling=sampling)
                for hiding, (owner, what) in NOT_TOLD.items():
                    setattr(owner, what, told[hiding] if name != hiding else property(lambda _: None))
                tokens = [t.id for t in session.stream(request, stats)]
                counters = stats.counters
                results.append({
                    "round": i, "name": name, "text": tokens, "tps": stats.decode_tps, "ttft": stats.ttft_s,
                    "acceptance": counters.acceptance, "per_run": counters.accepted_per_run,
                    "runs": counters.speculative_runs, "cancelled": counters.cancelled_runs,
                    "rows": time_by_rows(stats, draft=False), "draft_rows": time_by_rows(stats, draft=True),
                    "decode_s": stats.decode_s,
                    "paused": max(counters.paused_tokens.values(), default=0),
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
    prompts: Sequence[str] = (),
    quotes: bool = False,
    runs_shown: bool = False,
    sampling: str = "greedy",
    streamed: float | None = None,
) -> None:
    """One pair of models, all settings. With an `agreement`, stages only sleep; with `prompts`, prompts are these,
    with `quotes`, text that is in the prompt already. With `runs_shown`, a second table has runs by their rows. With
    `streamed`, target ranks keep that share of their weights and read the rest for each run."""
    command: list[object] = [*SCRIPT, *names, "--job", target, draft, "--rounds", rounds, "-n", n_predict]
    command += ["--targets", n_target, *([] if agreement is None else ["--agreement", agreement])]
    command += ["--quotes"] * quotes + ["--sampling", sampling, "--prompts", *prompts]
    command += [] if streamed is None else ["--streamed", streamed]
    results = [r for r in run_ranks(n_target + 1, command) if r["round"] > 0]  # the first round warms up
    of = {(r["name"], r["round"]): r for r in results}
    shown = list(settings_named(names))
    print(f"\n{title}: {n_predict} tokens, {rounds} rounds")
    head = "  setting                  t/s   x iterative [quartiles]     TTFT x"
    print(f"{head}   accepted   a run   cancelled   paused   differ")
    for name in shown:
        rows = [of[name, i] for i in range(1, rounds + 1)]
        base = [of["iterative", i] for i in range(1, rounds + 1)]
        gain = [r["tps"] / b["tps"] for r, b in zip(rows, base, strict=True)]
        ttft = statistics.median(r["ttft"] / b["ttft"] for r, b in zip(rows, base, strict=True))
        line = f"  {name:22s} {statistics.median(r['tps'] for r in rows):6.2f}  {middle(gain):26s} {ttft:7.2f}"
        if runs := sum(r["runs"] for r in rows):
            cancelled = sum(r["cancelled"] for r in rows)
            line += f"   {statistics.median(r['acceptance'] or 0 for r in rows):8.0%}"
            line += f"   {statistics.median(r['per_run'] or 0 for r in rows):5.2f}   {cancelled / runs:9.0%}"
            line += f"   {sum(r['paused'] for r in rows) / rounds / n_predict:6.0%}"
            line += f"   {sum(r['text'] != b['text'] for r, b in zip(rows, base, strict=True)):6d}"
        print(line, flush=True)
    if runs_shown:
        print_runs(shown, results)


def print_runs(names: list[str], results: list[dict[str, Any]]) -> None:
    """How many runs of how many rows were computed for each 100 tokens, and how long they took."""
    print(
        "\n  computed runs for 100 tokens: rows x runs (ms in the slowest stage), then the share of time that they take"
    )
    for name in names:
        for kind, key in (("target", "rows"), ("draft", "draft_rows")):
            total: dict[int, list[float]] = {}
            own = [r for r in results if r["name"] == name]
            for n_rows, (n, seconds) in (item for r in own for item in r[key].items()):
                entry = total.setdefault(int(n_rows), [0, 0.0])
                entry[0], entry[1] = entry[0] + n, entry[1] + seconds
            total = {n_rows: total[n_rows] for n_rows in sorted(total)}
            if total:
                per = sum(len(r["text"]) for r in own) / 100
                parts = [f"{rows} x {n / per:.1f} ({s / n * 1e3:.1f})" for rows, (n, s) in total.items()]
                share = sum(s for _, s in total.values()) / sum(r["decode_s"] for r in own)
                print(f"  {name:22s} {kind:6s} {', '.join(parts)}: {share:.0%}")


def main() -> int:
    """Parse the command line and bench all pairs, or run one rank's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="only these settings, or those whose names contain it")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("-n", type=int, default=64, help="tokens to generate")
    parser.add_argument("-s", type=float, nargs="*", default=[0.03, 0.06, 0.12], help="how the pairs differ")
    parser.add_argument("--pair", type=Path, nargs=2, help="a pair to use instead")
    parser.add_argument("--inflated", action="store_true", help="only the inflated bundled pair")
    parser.add_argument("--experts", action="store_true", help="only the inflated mixture of experts")
    parser.add_argument("--hybrid", action="store_true", help="only the inflated hybrid model")
    parser.add_argument("--quotes", action="store_true", help="only the inflated pair, whose output copies the prompt")
    parser.add_argument(
        "--sampling", choices=SAMPLINGS, default="greedy", help="how the inflated pairs' tokens are drawn"
    )
    parser.add_argument("--draft-as", metavar="TYPE", help="draft with the bundled target, quantized to this type")
    parser.add_argument("--draft", type=Path, metavar="FILE", help="draft with this model")
    parser.add_argument("--renumbered", action="store_true", help="with the draft's tokens in another order")
    parser.add_argument("--never-right", action="store_true", help="make the draft of the inflated pairs always wrong")
    parser.add_argument("--guest", action="store_true", help="beside a process at nice 15 that computes all the time")
    parser.add_argument(
        "--streamed",
        type=float,
        metavar="SHARE",
        help="share of the inflated pairs' weights in memory; others are streamed",
    )
    parser.add_argument("--prompts", nargs="*", choices=PROMPT_NAMES, default=[], help="of the inflated pairs, in turn")
    parser.add_argument("--runs", action="store_true", help="also show runs by their rows")
    parser.add_argument("--asleep", action="store_true", help="only the stages that sleep")
    parser.add_argument("--job", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--targets", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--agreement", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        return job(args)
    if args.settings and "iterative" not in args.settings:
        args.settings.append("iterative")
    bundled = BUNDLED_PAIR.target, BUNDLED_PAIR.draft
    if args.asleep:
        for n in (2, 4, 8):
            for agreement in (0.0, 0.5, 0.7, 0.9):
                title = f"asleep: {n} target ranks, agreement {agreement:.0%}"
                bench(title, *bundled, args.rounds, args.n, args.settings, n, agreement)
        return 0
    if args.pair:
        bench(args.pair[0].name, args.pair[0], args.pair[1], args.rounds, args.n, args.settings)
        return 0

    def bench_inflated(pair: ModelPair, title: str, quotes: bool = False) -> None:
        title += f", {args.sampling}" + f", draft: target in {args.draft_as}" * bool(args.draft_as)
        title += f", draft: {args.draft.name}" if args.draft else ""
        title += ", tokens renumbered" * args.renumbered
        title += ", never right" * args.never_right + ", beside a process at nice 15" * args.guest
        title += "" if args.streamed is None else f", {args.streamed:.0%} of the weights in memory"
        with tempfile.TemporaryDirectory(prefix="ggpipe-bench-") as folder, busy_guest(args.guest):
            draft = pair.draft
            if args.draft_as:
                draft = quantize(BUNDLED_PAIR.target, Path(folder) / "target.gguf", args.draft_as)
            if args.draft:
                draft = args.draft
            if args.renumbered:
                draft = renumbered(draft, Path(folder) / "renumbered.gguf")
            if args.never_right:
                draft = never_right(draft, Path(folder) / "draft.gguf")
            target = pair.target
            if args.streamed is not None:  # from a file without holes, or hardly anything would be read
                target = Path(folder) / "solid.gguf"
                subprocess.run(("cp", "--sparse=never", pair.target, target), check=True)
            prompts = () if quotes else args.prompts or PROMPT_NAMES
            files, what = (target, draft), {"prompts": prompts, "quotes": quotes, "runs_shown": args.runs}
            bench(
                title, *files, args.rounds, args.n, args.settings, **what,
                sampling=args.sampling, streamed=args.streamed,
            )  # fmt: skip

    if args.experts:
        bench_inflated(inflated_mixture(), "inflated mixture of experts, 2 of 16")
    if args.hybrid:
        bench_inflated(inflated_hybrid(), "inflated hybrid")
    if args.inflated:
        bench_inflated(inflated_pair(), "inflated bundled pair")
    if args.quotes:
        bench_inflated(inflated_pair(), "inflated bundled pair, quotes", quotes=True)
    if args.experts or args.hybrid or args.inflated or args.quotes:
        return 0
    with tempfile.TemporaryDirectory(prefix="ggpipe-bench-") as folder:
        target, draft, other = (Path(folder) / f"{name}.gguf" for name in ("target", "draft", "other"))
        for s in args.s:
            make_pair(target, draft, Shape(), s=s)
            bench(f"0.75 B pair, s = {s}", target, draft, args.rounds, args.n, args.settings)
        make_pair(other, draft, Shape(), s=args.s[0], seed=8)
        other.unlink()
        bench("0.75 B, a draft that is always wrong", target, draft, args.rounds, args.n, args.settings)
        bench("bundled pair", *bundled, args.rounds, 256, args.settings)
    bench_inflated(inflated_pair(), "inflated bundled pair")
    return 0


if __name__ == "__main__":
    sys.exit(main())
