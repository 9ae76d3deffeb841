"""Compares the plan of `ggpipe plan` with real runs of other splits; run it as `scripts/bench/check_plan`.

For a random 0.75 B pair, or with --inflated for the bundled pair inflated to 0.4 B, on 2 and on 3 ranks of this
machine, one thread each: asks `ggpipe plan` for a command line, then runs a small exhaustive search with `ggpipe
bench`: splits of the layers in steps of an eighth, and all target ranks as a group, with the draft on a rank of its own
and inside the head, in the modes of --modes; where there are more than --most splits, all with a draft rank and a
random choice of the others. Splits take turns, --rounds times; then the best one and the plan take turns again, since
the best of many noisy medians looks better than it is. Exit code 1 when the plan's speed is below 90 % of the best's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ggpipe.config.layer_split import text_of
from ggpipe.config.speculation import Mode
from ggpipe.core.layout import Layout, decimal_split
from ggpipe.llama.bundled import ModelPair, inflated_pair
from ggpipe.llama.gguf import ModelFile
from scripts.bench.measuring import run_ggpipe
from scripts.models.make_pair import Shape, make_pair

N_CTX = 1024
LEAST = 0.9
FLAGS = ("--mpi-layer-split", "--tensor-split", "-t", "-td", "--draft", "-pa", "-np")


@dataclass(frozen=True)
class Setting:
    """Ranks and flags, as words of a command line."""

    words: tuple[str, ...]
    drafts: bool = True

    def __str__(self) -> str:
        return " ".join(word for word in self.words if word != "--mpi-layer-split")


@dataclass(frozen=True)
class Bench:
    """Measures settings."""

    target: Path
    draft: Path
    prompt: Path
    n: int
    to: Path

    def measure(self, setting: Setting, modes: tuple[Mode, ...]) -> dict[Mode, float]:
        """Tokens per second by mode."""
        own = modes if setting.drafts else ("iterative",)
        draft = ["-md", str(self.draft)] if setting.drafts else []
        run_ggpipe(
            "bench", "-m", self.target, *draft, *setting.words, "-f", self.prompt, "-n", self.n, "-c", N_CTX,
            "--temp", 0, "--rounds", 1, "--modes", ",".join(own), "--json", self.to,
        )  # fmt: skip
        return {run["mode"]: run["decode_tokens_per_s"] for run in json.loads(self.to.read_text())["runs"]}


def planned(bench: Bench, n_ranks: int, recording: Path, seconds: float) -> tuple[Setting, Mode, float]:
    """The plan of `ggpipe plan`: the setting, its mode, and the predicted speed."""
    run_ggpipe(
        "plan", "-m", bench.target, "-md", bench.draft, "-r", n_ranks, "-t", 1, "-c", N_CTX, "--recording", recording,
        "--seconds", seconds, "--json", bench.to,
    )  # fmt: skip
    content = json.loads(bench.to.read_text())
    command = shlex.split(content["command"])
    words = [w for flag, value in itertools.pairwise(command) if flag in FLAGS for w in (flag, value)]
    mode: Mode = content["best"]
    return Setting(tuple(words), "-md" in command), mode, content["modes"][mode]["tokens_per_s"]


def splits(n_layer: int, n_ranks: int) -> list[Setting]:
    """Settings for `n_ranks` ranks, in steps of an eighth of the layers, with one thread per rank.

    Also those whose head holds no layers.
    """
    found, step = [], max(n_layer // 8, 1)
    for n_target in (n_ranks - 1, n_ranks):  # with and without a rank for the draft
        draft = Layout.of_ranks([(0, 1)], n_target) if n_target < n_ranks else None
        headless = [(0, *rest) for rest in compositions(n_layer, n_target - 1, step)] if n_target > 1 else []
        for counts in [*compositions(n_layer, n_target, step), *headless]:
            starts = [sum(counts[:i]) for i in range(n_target)]
            layout = Layout.of_ranks([(a, a + n) for a, n in zip(starts, counts, strict=True)])
            found.append(Setting(("--mpi-layer-split", _text(layout, draft), "-t", "1")))
        if n_target > 1:
            group = Layout.of_ranks([(0, n_layer)], 0, (n_target,))
            found.append(Setting(("--mpi-layer-split", _text(group, draft), "-t", "1")))
    return found


def _text(*layouts: Layout | None) -> str:
    return text_of([decimal_split(layout) for layout in layouts if layout is not None])


def compositions(n: int, parts: int, step: int) -> list[tuple[int, ...]]:
    """Ways to write n as a sum of `parts` multiples of `step` above 0; the last one takes the remainder."""
    if parts == 1:
        return [(n,)]
    return [(first, *rest) for first in range(step, n, step) for rest in compositions(n - first, parts - 1, step)]


def check(bench: Bench, n_ranks: int, recording: Path, args: argparse.Namespace) -> float:
    """Print the table; the plan's speed as a share of the best's."""
    plan, plan_mode, promised = planned(bench, n_ranks, recording, args.seconds)
    everything = splits(ModelFile.open(bench.target).n_layer, n_ranks)
    if len(everything) > args.most:
        first = [s for s in everything if "/" in str(s)]
        others = [s for s in everything if s not in first]
        everything = first + random.Random(1).sample(others, max(args.most - len(first), 1))
    found: dict[tuple[Setting, Mode], list[float]] = {}
    for i in range(args.rounds):
        order = list(everything)
        random.Random(i).shuffle(order)
        for setting in order:
            for mode, speed in bench.measure(setting, tuple(args.modes)).items():
                found.setdefault((setting, mode), []).append(speed)
        print(f"{n_ranks} ranks: round {i + 1} of {args.rounds} done", file=sys.stderr)
    ranked = sorted(found, key=lambda key: -statistics.median(found[key]))
    best, best_mode = ranked[0]
    pairs = []
    for i in range(args.finals):
        two = [(plan, plan_mode), (best, best_mode)]
        speeds = {key: bench.measure(key[0], (key[1],))[key[1]] for key in (two if i % 2 else two[::-1])}
        pairs.append((speeds[plan, plan_mode], speeds[best, best_mode]))
    print(f"\n{n_ranks} ranks, {args.n} tokens; medians of {args.rounds} rounds in t/s")
    for setting, mode in ranked[: args.shown]:
        speeds_of = found[setting, mode]
        span = f"[{min(speeds_of):.2f} … {max(speeds_of):.2f}]"
        print(f"  {setting!s:32s} {mode:12s} {statistics.median(speeds_of):7.2f} {span}")
    ratio = statistics.median(own / other for own, other in pairs)
    own_speed, best_speed = (statistics.median(pair[i] for pair in pairs) for i in range(2))
    print(f"  the plan: {plan} {plan_mode}, predicted {promised:.2f} t/s")
    print(f"  in turn with the best of these, {args.finals} times: {own_speed:.2f} against {best_speed:.2f} t/s")
    print(f"  the plan's share of the best: {ratio:.2f}" + ("" if ratio >= LEAST else "  <-- too little"), flush=True)
    return ratio


def main() -> int:
    """Parse the command line, check 2 and 3 ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--modes", nargs="+", default=["iterative", "async"])
    parser.add_argument("--rounds", type=int, default=3, help="of the search")
    parser.add_argument("--finals", type=int, default=7, help="turns of the plan and the best split")
    parser.add_argument("-n", type=int, default=64, help="tokens to generate")
    parser.add_argument("--seconds", type=float, default=6, help="for the plan's profile")
    parser.add_argument("-s", type=float, default=0.07, help="how the pair differs: 0.07 gives an agreement of 70 %%")
    parser.add_argument("--n-layer", type=int, default=16, help="of the random target")
    parser.add_argument("--inflated", action="store_true", help="the inflated bundled pair instead of a random one")
    parser.add_argument("--most", type=int, default=14, help="splits; those with a draft rank come first")
    parser.add_argument("--shown", type=int, default=8, help="lines of the table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ggpipe-check-") as folder:
        prompt, recording, to = (Path(folder) / name for name in ("prompt.txt", "recording.json", "to.json"))
        if args.inflated:
            pair = inflated_pair()
        else:
            pair = ModelPair(Path(folder) / "target.gguf", Path(folder) / "draft.gguf")
            make_pair(pair.target, pair.draft, Shape(n_layer=args.n_layer), s=args.s)
        prompt.write_text("Once upon a time")  # the random pair's words are letters
        run_ggpipe(
            "record", "-m", pair.target, "-md", pair.draft, "-f", prompt, "-n", args.n, "-c", N_CTX, "-t", 1,
            "--temp", 0, "--ignore-eos", "-o", recording,
        )  # fmt: skip
        bench = Bench(pair.target, pair.draft, prompt, args.n, to)
        ratios = [check(bench, n_ranks, recording, args) for n_ranks in args.ranks]
    return int(min(ratios) < LEAST)


if __name__ == "__main__":
    sys.exit(main())
