"""Measures groups of ranks that compute one stage together; run it as `scripts/bench/tensor_parallel`.

The bundled pair inflated to 0.4 B in Q8_0, one thread a rank, on this machine: the whole model on one rank, on one rank
with two threads, on a group of two ranks, and on a pipeline of two stages; then the last two with the draft, in the
head's process and on a rank of its own. All layouts take turns in each round. Tables show medians over the rounds;
ratios are of one round.

Several users at a time on a group: `scripts/bench/serving --group`. What a sum takes: `scripts/bench/group_sum`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ggpipe.llama.bundled import inflated_pair
from scripts.bench.check_simulator import ROOT, run

ONE = "one rank"


@dataclass(frozen=True)
class Setting:
    """A layout, and how it runs."""

    name: str
    split: str = ""
    threads: int = 1
    modes: tuple[str, ...] = ("iterative",)


PLAIN = (
    Setting(ONE),
    Setting("one rank, two threads", threads=2),
    Setting("group of two", "1.0*2"),
    Setting("two stages", "0.5,0.5"),
)
SPECULATIVE = ("speculative", "async")
WITH_DRAFT = (
    Setting("two stages, draft in the head", "0.5,0.5", modes=SPECULATIVE),
    Setting("two stages / draft", "0.5,0.5/1.0", modes=SPECULATIVE),
    Setting("group of two, draft in the head", "1.0*2", modes=SPECULATIVE),
    Setting("group of two / draft", "1.0*2/1.0", modes=SPECULATIVE),
)

Runs = dict[tuple[str, str], list[dict[str, Any]]]
"""By setting and mode: of each round, what `ggpipe bench` says of the run."""


def measure(settings: Sequence[Setting], prompt: Path, args: argparse.Namespace) -> Runs:
    """All settings in turn; the first round warms up."""
    pair = inflated_pair()
    found: Runs = {}
    with tempfile.TemporaryDirectory(prefix="ggpipe-bench-") as folder:
        out = Path(folder, "bench.json")
        for i in range(args.rounds + 1):
            for setting in settings[:: 1 if i % 2 else -1]:
                words: list[object] = ["-m", pair.target, "-f", prompt, "-n", args.n, "-c", 2048, "--temp", 0]
                words += ["-t", setting.threads, "--rounds", 1, "--modes", ",".join(setting.modes), "--json", out]
                words += ["--mpi-layer-split", setting.split] if setting.split else []
                words += ["-md", pair.draft] if setting.modes != PLAIN[0].modes else []
                run("bench", *words)
                for result in json.loads(out.read_text())["runs"] if i else ():
                    found.setdefault((setting.name, result["mode"]), []).append(result)
            print(f"round {i} of {args.rounds}", file=sys.stderr, flush=True)
    return found


def report(runs: Runs, base: tuple[str, str]) -> None:
    """Print a table of all settings, and their speeds as ratios to `base`."""

    def shown(value: Callable[[dict[str, Any]], float], own: Sequence[dict[str, Any]]) -> str:
        ratios = sorted(value(a) / value(b) for a, b in zip(own, runs[base], strict=True))
        spread = f"[{ratios[0]:.2f} … {ratios[-1]:.2f}]"
        return f"{statistics.median(map(value, own)):8.1f} {statistics.median(ratios):6.2f} {spread:15s}"

    print(f"\nratios to: {base[0]}, {base[1]}")
    print(f"  {'setting':32s} {'mode':12s}  decode t/s, ratio [range]      prefill t/s, ratio [range]     resident MB")
    for (name, mode), own in runs.items():
        memory = "/".join(f"{rank['resident_bytes'] / 1e6:.0f}" for rank in own[-1]["ranks"])
        decode = shown(lambda r: r["decode_tokens_per_s"], own)
        print(f"  {name:32s} {mode:12s} {decode} {shown(lambda r: r['prefill_tokens_per_s'], own)}  {memory}")


def main() -> int:
    """Parse the command line and bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-n", type=int, default=64, help="tokens to generate")
    parser.add_argument("--parts", nargs="+", choices=("plain", "draft"), default=("plain", "draft"))
    args = parser.parse_args()
    tale = ROOT / "prompts" / "tale.txt"
    if "plain" in args.parts:
        with tempfile.TemporaryDirectory(prefix="ggpipe-bench-") as folder:
            prompt = Path(folder, "long.txt")
            prompt.write_text(" ".join([tale.read_text()] * 8))
            report(measure(PLAIN, prompt, args), (ONE, "iterative"))
    if "draft" in args.parts:
        report(measure(WITH_DRAFT, tale, args), (WITH_DRAFT[1].name, "async"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
