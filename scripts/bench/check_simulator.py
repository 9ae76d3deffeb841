"""Compares the simulator with this machine; run it as `scripts/bench/check_simulator`.

For a random 0.75 B pair, for the bundled pair inflated to 0.4 B, and for the bundled pair: records what the pair writes
(`ggpipe record`), runs the modes on ranks of one thread each (`ggpipe bench`), and simulates the same from the
recording and from what `ggpipe profile` measures before and after each bench. Exit code 1 when the simulator is off by
more than 15 % anywhere; the bundled pair, whose tokens take 2 ms, is reported only.

The layouts: one rank, two stages, or a group of two, each with the draft in the head's process; two stages, or a group
of two, and a draft rank. With the draft, that is two or three threads for two cores.

A ratio compares a round's bench with the simulation from the medians of all profiles, which are as noisy as benches;
the table has the median of the rounds. `again` is what the same bench gives from one round to the next: the larger /
the smaller speed, the median. No simulator can be nearer to a machine than the machine is to itself.

With --keep, what was measured stays in a folder, and what is there is not measured again: so a check can be done in
pieces (--pairs, --layouts), and simulated again with another simulator.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ggpipe.cluster import profile as profiles
from ggpipe.cluster import recording as recordings
from ggpipe.cluster.from_profile import spec_from_profile
from ggpipe.cluster.links import Overheads, SumTimes
from ggpipe.cluster.profile import Point
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config.layer_split import n_ranks_of, parse_layer_split
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.core.layout import lay_out
from ggpipe.llama.bundled import BUNDLED_PAIR, inflated_pair
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_shape import shape_of
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulation_spec import SimulationSpec
from ggpipe.sim.virtual_cluster import VirtualPlacement
from scripts.bench.measuring import run_ggpipe
from scripts.models.make_pair import Shape, make_pair

ROOT = Path(__file__).parents[2]
MODES: tuple[Mode, ...] = ("iterative", "speculative", "async")
LAYOUTS = {"1": "1.0", "2": "0.5,0.5", "3": "0.5,0.5/1.0", "group": "1.0*2", "group-draft": "1.0*2/1.0"}
NAMES = {"1": "1 rank", "2": "2 ranks", "3": "3 ranks", "group": "group of two", "group-draft": "group / draft"}
N_CTX = 1024
WORST = 0.15


@dataclass(frozen=True)
class Pair:
    """A pair to check, and its prompts."""

    title: str
    target: Path
    draft: Path
    prompts: tuple[Path, ...]
    counts: bool = True
    """The exit code depends on it."""


def random_pair(folder: Path, s: float) -> Pair:
    """A pair of random weights, and a short prompt, whose letters are its words. Few prompts are as good: random
    weights have many near-ties, and no mode may leave the text that was recorded."""
    target, draft, prompt = (folder / name for name in ("target.gguf", "draft.gguf", "short.txt"))
    if not prompt.exists():
        make_pair(target, draft, Shape(), s=s)
        prompt.write_text("The king had three daughters")
    return Pair("0.75 B random pair", target, draft, (prompt,))


class Measurements:
    """One pair's measurements in a folder."""

    def __init__(self, pair: Pair, folder: Path, args: argparse.Namespace) -> None:
        self.pair = pair
        self._folder = folder
        self._args = args
        files = [word for prompt in pair.prompts for word in ("-f", prompt)]
        self._models: list[object] = ["-m", pair.target, "-md", pair.draft]
        self._given: list[object] = [*files, "-n", args.n, "-c", N_CTX, "-t", 1, "--temp", 0]
        folder.mkdir(parents=True, exist_ok=True)

    def recording(self) -> Path:
        """What the pair writes."""
        return self._once(
            "recording.json", lambda to: run_ggpipe("record", *self._models, *self._given, "--ignore-eos", "-o", to)
        )

    def profile(self, layout: str, i: int) -> Path:
        """This machine before round `i` of a layout."""
        layers = f"0-{ModelFile.open(self.pair.target).n_layer - 1}"
        words = [*self._models, "-t", 1, "-c", N_CTX, "-r", 2, "--layers", layers, "--seconds", self._args.seconds]
        return self._once(f"profile-{layout}-{i}.json", lambda to: run_ggpipe("profile", *words, "-o", to))

    def bench(self, layout: str, i: int) -> Path:
        """All modes, in round `i` of a layout, without n-grams: the simulator knows the draft model only."""
        words = [*self._models, *self._given, "--spec-type", "draft", "--draft", self._args.draft]
        words += ["--rounds", 1, "--modes", ",".join(MODES)]
        split = ["--mpi-layer-split", LAYOUTS[layout]] if layout != "1" else []
        return self._once(f"bench-{layout}-{i}.json", lambda to: run_ggpipe("bench", *words, *split, "--json", to))

    def _once(self, name: str, measure: Callable[[Path], None]) -> Path:
        path = self._folder / name
        if not path.exists():
            unfinished = self._folder / f"unfinished-{name}"
            measure(unfinished)
            unfinished.rename(path)
        return path


def speeds_of(bench: Path) -> dict[Mode, float]:
    """Tokens per second by mode: the median over the prompts."""
    runs = json.loads(bench.read_text())["runs"]
    return {mode: statistics.median(r["decode_tokens_per_s"] for r in runs if r["mode"] == mode) for mode in MODES}


def simulated(setup: SimulationSpec) -> dict[Mode, float]:
    """Tokens per second by mode: the median over the recording's prompts."""
    return {mode: statistics.median(stats.decode_tps or 0.0 for stats in setup.run(mode)) for mode in MODES}


def setup_of(spec: ClusterSpec, pair: Pair, recording: Path, layout: str, n_draft: int) -> SimulationSpec:
    """The same layout as `bench` has."""
    target_shape, draft_shape = (shape_of(ModelFile.open(path)) for path in (pair.target, pair.draft))
    target, *drafts = parse_layer_split(LAYOUTS[layout])
    n_target, n_draft_ranks = n_ranks_of([target]), n_ranks_of(drafts)
    placement = VirtualPlacement(
        target_on=(0,) * n_target,
        draft_on=(0,) * n_draft_ranks,
        layout=lay_out(target_shape.n_layer, n_target, target),
        draft_layouts=(lay_out(draft_shape.n_layer, 1, None, n_target),) if n_draft_ranks else (),
        threads=(1,) * (n_target + n_draft_ranks),
    )
    return SimulationSpec(
        cluster=spec,
        placement=placement,
        target=target_shape,
        drafts=(draft_shape,),
        speculation=SpeculationConfig(n_draft=n_draft),
        tokens=recordings.read(recording),
        n_predict=-1,
        sizes=Sizes(N_CTX),
    )


def check(measurements: Measurements, layouts: Sequence[str], args: argparse.Namespace) -> float:
    """Print a pair's table; the worst deviation. Profiles and benches take turns, since machines change their speed."""
    pair, start = measurements.pair, time.monotonic()
    recording = measurements.recording()
    around: dict[str, list[ClusterSpec]] = {}
    benches: dict[str, list[dict[Mode, float]]] = {}
    for layout, i in itertools.product(layouts, range(args.rounds + 1)):
        print(f"\r{pair.title}: layout {layout}, round {i} of {args.rounds}", end="", file=sys.stderr, flush=True)
        profile = profiles.read(measurements.profile(layout, i))
        around.setdefault(layout, []).append(spec_from_profile(profile, "this machine"))
        if i < args.rounds:
            benches.setdefault(layout, []).append(speeds_of(measurements.bench(layout, i)))
    spent_s = time.monotonic() - start
    print(f"\n\n{pair.title}: {args.n} tokens, {args.rounds} rounds, {spent_s:.0f} s", end="")
    print(f", agreement {recordings.read(recording).agreement:.0%}")
    print("  layout        mode         measured t/s   simulated   simulated / measured [rounds]   again")
    worst = 0.0
    for layout in layouts:
        virtual = simulated(setup_of(usual_spec(layout, around), pair, recording, layout, args.draft))
        for mode in MODES:
            real = [speeds[mode] for speeds in benches[layout]]
            ratios = sorted(virtual[mode] / speed for speed in real)
            middle = statistics.median(ratios)
            again = [max(a, b) / min(a, b) for a, b in itertools.pairwise(real)]
            worst = max(worst, abs(middle - 1))
            line = f"  {NAMES[layout]:13s} {mode:12s} {statistics.median(real):12.2f} {virtual[mode]:11.2f}"
            line += f" {middle:12.2f} [{ratios[0]:.2f} … {ratios[-1]:.2f}]"
            line += f"{statistics.median(again):15.2f}" if again else ""
            print(line + ("" if abs(middle - 1) <= WORST else "  <-- off"), flush=True)
    return worst if pair.counts else 0.0


def usual_spec(layout: str, around: dict[str, list[ClusterSpec]]) -> ClusterSpec:
    """This machine as it usually was between a layout's benches. What compares two noisy times comes from the profiles
    of all layouts: how ranks share the machine, and `fixed_s`."""
    nodes = [other.nodes[0] for specs in around.values() for other in specs]
    found = [own for spec in around[layout] if (own := spec.nodes[0].profile) is not None]
    first = found[0]
    drafts = tuple(
        draft and replace(draft, alone=usual_points([part.alone for other in found if (part := other.drafts[number])]))
        for number, draft in enumerate(first.drafts)
    )
    profile = replace(
        first,
        alone=usual_points([other.alone for other in found]),
        drafts=drafts,
        change_s=statistics.median(other.change_s for other in found),
        fixed_s=statistics.fmean(node.profile.fixed_s for node in nodes if node.profile is not None),
    )
    node = replace(
        around[layout][0].nodes[0],
        crowd=statistics.median(node.crowd or 1.0 for node in nodes),
        turns=statistics.median(node.turns for node in nodes),
        profile=profile,
    )
    overheads = {
        field.name: statistics.median(getattr(spec.overheads, field.name) for spec in around[layout])
        for field in fields(Overheads)
    }
    return replace(around[layout][0], nodes=(node,), overheads=Overheads(**overheads), sums=usual_sums(around))


def usual_sums(around: dict[str, list[ClusterSpec]]) -> dict[tuple[int, int], SumTimes]:
    """The medians of all profiles."""
    found = [spec.sums[0, 0].points for specs in around.values() for spec in specs if (0, 0) in spec.sums]
    if not found:
        return {}
    points = (tuple(map(statistics.median, zip(*same, strict=True))) for same in zip(*found, strict=True))
    return {(0, 0): SumTimes(tuple((n_bytes, seconds) for n_bytes, seconds in points))}


def usual_points(profiles: Sequence[Sequence[Point]]) -> tuple[Point, ...]:
    """The median of each point that all profiles have."""
    found = [{(point.rows, point.n_past): point.seconds for point in points} for points in profiles]
    common = sorted(set.intersection(*(set(points) for points in found)))
    return tuple(Point(*key, statistics.median(points[key] for points in found)) for key in common)


def main() -> int:
    """Parse the command line, check the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-n", type=int, default=96, help="tokens to generate")
    parser.add_argument("--seconds", type=float, default=24, help="for each profile")
    parser.add_argument("-s", type=float, default=0.07, help="how the random pair differs")
    parser.add_argument("--draft", type=int, default=3, help="draft tokens in a micro-batch")
    parser.add_argument("--pair", type=Path, nargs=2, help="a pair to check instead of these")
    parser.add_argument("--pairs", nargs="+", choices=("random", "inflated", "bundled"), help="these only")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="these only")
    parser.add_argument("--keep", type=Path, help="a folder for what is measured")
    args = parser.parse_args()
    prompts = tuple(ROOT / "prompts" / name for name in ("tale.txt", "program.txt"))
    with tempfile.TemporaryDirectory(prefix="ggpipe-check-") as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        pairs: dict[str, Callable[[], Pair]] = {
            "random": lambda: random_pair(folder, args.s),
            "inflated": lambda: Pair("inflated bundled pair", inflated_pair().target, inflated_pair().draft, prompts),
            "bundled": lambda: Pair("bundled pair", BUNDLED_PAIR.target, BUNDLED_PAIR.draft, prompts, counts=False),
        }
        if args.pair:
            pairs = {"given": lambda: Pair(args.pair[0].name, args.pair[0], args.pair[1], prompts[:1])}
        chosen = args.pairs if args.pairs and not args.pair else list(pairs)
        found = {name: check(Measurements(pairs[name](), folder / name, args), args.layouts, args) for name in chosen}
    worst = max(found.values())
    print(f"\nworst deviation: {worst:.0%} (limit: {WORST:.0%})")
    return int(worst > WORST)


if __name__ == "__main__":
    sys.exit(main())
