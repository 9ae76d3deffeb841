"""Compares the simulator with this machine; run it as `scripts/bench/check_simulator`.

For a random 0.75 B pair and for the bundled pair, or with --inflated for the bundled pair inflated to 0.4 B: measures
the machine (`ggpipe profile`), records what the pair writes (`ggpipe record`), runs the modes on one, two and three
ranks of one thread each (`ggpipe bench`), and simulates the same from the profile and the recording alone. Medians of
the rounds; exit code 1 when a mode is off by more than 15 %. The inflated pair is slower in longer contexts: --seconds
12 lets its profiles measure one.

The layouts: the draft in the head's process; two target ranks and the draft in the head's process; two target ranks and
a draft rank. With the draft, that is two or three threads for two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ggpipe.cluster import profile as profiles
from ggpipe.cluster import recording as recordings
from ggpipe.cluster.from_profile import spec_from_profile
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config import Mode, SpeculationConfig
from ggpipe.core.layout import lay_out
from ggpipe.llama.bundled import BUNDLED_PAIR, inflated_pair
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_shape import shape_of
from ggpipe.sim.simulation_spec import SimulationSpec
from ggpipe.sim.simulator import Sizes
from ggpipe.sim.virtual_cluster import Placement
from scripts.models.make_pair import Shape, make_pair

ROOT = Path(__file__).parents[2]
MODES: tuple[Mode, ...] = ("iterative", "speculative", "async")
LAYOUTS = {"1 rank": None, "2 ranks": "0.5,0.5", "3 ranks": "0.5,0.5/1.0"}
N_CTX = 1024
WORST = 0.15


def run(*words: object) -> None:
    """Run a `ggpipe` command."""
    command = [sys.executable, "-m", "ggpipe", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")


def measured(target: Path, draft: Path, given: Sequence[object], split: str | None, to: Path) -> dict[Mode, float]:
    """Tokens per second by mode: the median over the prompts."""
    words: list[object] = ["-m", target, "-md", draft, *given, "--rounds", 1, "--modes", ",".join(MODES), "--json", to]
    run("bench", *words, *(["--mpi-layer-split", split] if split else []))
    runs = json.loads(to.read_text())["runs"]
    return {mode: statistics.median(r["decode_tokens_per_s"] for r in runs if r["mode"] == mode) for mode in MODES}


def profiled(target: Path, draft: Path, seconds: float, folder: Path) -> ClusterSpec:
    """This machine, profiled now."""
    layers, to = f"0-{ModelFile.open(target).n_layer - 1}", folder / "profile.json"
    given = ["-m", target, "-md", draft, "-t", 1, "-c", N_CTX, "-r", 2]
    run("profile", *given, "--layers", layers, "--seconds", seconds, "-o", to)
    return spec_from_profile(profiles.read(to), "this machine")


def simulated(setup: SimulationSpec) -> dict[Mode, float]:
    """Tokens per second by mode: the median over the recording's prompts."""
    return {mode: statistics.median(stats.decode_tps or 0.0 for stats in setup.run(mode)) for mode in MODES}


def setup_of(
    spec: ClusterSpec, crowd: float, target: Path, draft: Path, recording: Path, split: str | None, n_draft: int
) -> SimulationSpec:
    """The same layout as `bench` has."""
    spec = replace(spec, nodes=tuple(replace(node, crowd=crowd) for node in spec.nodes))
    target_shape, draft_shape = (shape_of(ModelFile.open(path)) for path in (target, draft))
    n_target = 1 if split is None else 2
    outside = split is not None and "/" in split
    placement = Placement(
        target_on=(0,) * n_target,
        draft_on=(0,) if outside else (),
        layout=lay_out(target_shape.n_layer, n_target, None),
        draft_layout=lay_out(draft_shape.n_layer, 1, None, n_target) if outside else None,
        threads=(1,) * (n_target + outside),
    )
    speculation = SpeculationConfig(n_draft=n_draft)
    tokens = recordings.read(recording)
    return SimulationSpec(
        cluster=spec,
        placement=placement,
        target=target_shape,
        draft=draft_shape,
        speculation=speculation,
        tokens=tokens,
        n_predict=-1,
        sizes=Sizes(N_CTX),
    )


def check(name: str, target: Path, draft: Path, prompts: Sequence[Path], args: argparse.Namespace) -> float:
    """Print a pair's table; the worst deviation. Profiles and runs take turns, since machines change their speed."""
    files = [word for prompt in prompts for word in ("-f", prompt)]
    given = [*files, "-n", args.n, "-c", N_CTX, "-t", 1, "--temp", 0]
    found: dict[tuple[str, Mode], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="ggpipe-check-") as folder:
        recording, runs = (Path(folder) / f"{kind}.json" for kind in ("recording", "runs"))
        run("record", "-m", target, "-md", draft, *given, "--ignore-eos", "-o", recording)
        specs, benches = [profiled(target, draft, args.seconds, Path(folder))], []
        for i in range(args.rounds * len(LAYOUTS)):
            layout, split = list(LAYOUTS.items())[i % len(LAYOUTS)]
            benches.append((layout, split, measured(target, draft, [*given, "--draft", args.draft], split, runs)))
            print(f"\r{name}: {i + 1} of {args.rounds * len(LAYOUTS)}", end="", file=sys.stderr, flush=True)
            specs.append(profiled(target, draft, args.seconds, Path(folder)))
        crowd = statistics.median(spec.nodes[0].crowd or 1.0 for spec in specs)
        for (layout, split, real), *around in zip(benches, specs, specs[1:], strict=False):
            virtual = [simulated(setup_of(s, crowd, target, draft, recording, split, args.draft)) for s in around]
            for mode in MODES:
                pair = real[mode], statistics.fmean(speeds[mode] for speeds in virtual)
                found.setdefault((layout, mode), []).append(pair)
        agreement = recordings.read(recording).agreement
    print(file=sys.stderr)
    print(f"\n{name}: {args.n} tokens, {args.rounds} rounds, agreement {agreement:.0%}")
    print("  layout   mode         measured t/s   simulated   simulated / measured [quartiles]")
    worst = 0.0
    for (layout, mode), pairs in found.items():
        ratios = [virtual / real for real, virtual in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        worst = max(worst, abs(middle - 1))
        speeds = [statistics.median(pair[i] for pair in pairs) for i in range(2)]
        line = f"  {layout:8s} {mode:12s} {speeds[0]:12.2f} {speeds[1]:11.2f} {middle:12.2f} [{low:.2f} … {high:.2f}]"
        print(line + ("" if abs(middle - 1) <= WORST else "  <-- off"), flush=True)
    return worst


def main() -> int:
    """Parse the command line, check the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-n", type=int, default=96, help="tokens to generate")
    parser.add_argument("--seconds", type=float, default=4, help="for each profile")
    parser.add_argument("-s", type=float, default=0.07, help="how the random pair differs")
    parser.add_argument("--draft", type=int, default=3, help="draft tokens in a micro-batch")
    parser.add_argument("--pair", type=Path, nargs=2, help="a pair to check instead of these")
    parser.add_argument("--inflated", action="store_true", help="the inflated bundled pair instead of these")
    args = parser.parse_args()
    tale, program = ROOT / "prompts" / "tale.txt", ROOT / "prompts" / "program.txt"
    if args.pair:
        worst = check(args.pair[0].name, args.pair[0], args.pair[1], [tale], args)
    elif args.inflated:
        inflated = inflated_pair()
        worst = check("inflated bundled pair", inflated.target, inflated.draft, [tale, program], args)
    else:
        with tempfile.TemporaryDirectory(prefix="ggpipe-check-") as folder:
            target, draft = (Path(folder) / f"{name}.gguf" for name in ("target", "draft"))
            make_pair(target, draft, Shape(), s=args.s)
            short = Path(folder) / "short.txt"  # this pair's words are letters
            short.write_text("Once upon a time")
            worst = check("0.75 B random pair", target, draft, [short], args)
        bundled = check("bundled pair", BUNDLED_PAIR.target, BUNDLED_PAIR.draft, [tale, program], args)
        worst = max(worst, bundled)
    print(f"\nworst deviation: {worst:.0%} (limit: {WORST:.0%})")
    return int(worst > WORST)


if __name__ == "__main__":
    sys.exit(main())
