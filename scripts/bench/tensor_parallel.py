"""Measures groups of ranks that compute one stage together; run it as `scripts/bench/tensor_parallel`.

The bundled pair inflated to 0.4 B in Q8_0, one thread a rank, on this machine. All layouts are loaded at the same time
and generate in turn, so that a round compares them within seconds. Tables show medians over the rounds; ratios are of
one round.

plain   the whole model on one rank, on one rank with two threads, on a group of two ranks, and on two stages
hosts   a group of two ranks on virtual hosts, where messages carry the sums, beside one rank and two stages; as root
draft   two stages and a group of two ranks with the draft, in the head's process and on a rank of its own

Several users at a time on a group: `scripts/bench/serving --group`. What a sum takes: `scripts/bench/group_sum`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from support.virtual_hosts import VirtualHosts, virtual_hosts

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import n_ranks_of, parse_layer_split
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.engine.head import Head
from ggpipe.engine.process import run_rank
from ggpipe.engine.session import Session
from ggpipe.launch.environment import die_with_parent, mpi_environment
from ggpipe.launch.mpirun import find_mpirun, mpirun_command
from ggpipe.llama.bundled import inflated_mixture, inflated_pair
from scripts.bench.measuring import greedy

TALE = Path(__file__).parents[2] / "prompts" / "tale.txt"
SETTLE_S = 0.3
SCRIPT = (sys.executable, "-m", "scripts.bench.tensor_parallel")


@dataclass(frozen=True)
class Setting:
    """A layout, and how it runs."""

    name: str
    split: str = "1.0"
    threads: int = 1
    modes: tuple[Mode, ...] = ("iterative",)
    over_hosts: bool = False

    @property
    def n_ranks(self) -> int:
        """Of the target and of the draft."""
        return n_ranks_of(parse_layer_split(self.split))


ONE = Setting("one rank")
PLAIN = (
    ONE,
    Setting("one rank, two threads", threads=2),
    Setting("group of two", "1.0*2"),
    Setting("two stages", "0.5,0.5"),
)
HOSTS = (
    ONE,
    Setting("group of two hosts", "1.0*2", over_hosts=True),
    Setting("two stages on two hosts", "0.5,0.5", over_hosts=True),
)
SPECULATIVE: tuple[Mode, ...] = ("speculative", "async")
DRAFT = (
    Setting("two stages / draft", "0.5,0.5/1.0", modes=SPECULATIVE),
    Setting("two stages, draft in the head", "0.5,0.5", modes=SPECULATIVE),
    Setting("group of two, draft in the head", "1.0*2", modes=SPECULATIVE),
    Setting("group of two / draft", "1.0*2/1.0", modes=SPECULATIVE),
)
PARTS = {"plain": (PLAIN, ONE, "iterative"), "hosts": (HOSTS, ONE, "iterative"), "draft": (DRAFT, DRAFT[0], "async")}
"""Settings; which one of them the ratios are to, and its mode."""

Result = dict[str, Any]
Results = dict[tuple[str, Mode], list[Result]]
"""By setting and mode: of each round."""


def job(setting: Setting, args: argparse.Namespace) -> int:
    """One rank's part. The head answers each line of stdin, a mode, with what a text in this mode took."""
    pair = inflated_mixture() if args.experts else inflated_pair()
    context, split = ContextConfig(n_ctx=2048, n_seq=8), parse_layer_split(setting.split)
    own = split[1] if len(split) > 1 else None
    draft = DraftConfig(model=ModelConfig(path=pair.draft), context=context, layer_split=own)
    config = EngineConfig(
        ModelConfig(path=pair.target),
        context,
        PipelineConfig(split[0], threads=(setting.threads,)),
        (draft,) if setting.modes == SPECULATIVE else (),
    )

    def head(ranks: Head) -> int:
        session = Session.load(ranks)
        prompt = session.tokenize(" ".join([TALE.read_text()] * (1 if setting.modes == SPECULATIVE else 8)))
        print("loaded", flush=True)
        while line := sys.stdin.readline().strip():
            mode = cast(Mode, line)
            for tokens, n in ((prompt[:1], 2), (prompt, args.n)):  # the first brings weights back that were not used
                request = session.submit(greedy(tokens, n, SpeculationConfig(mode=mode)))
                while request.is_active:
                    session.step()
            session.measure()
            session.idle(SETTLE_S)
            stats, memory = request.stats, [rank.resident_bytes for rank in ranks.ranks]
            print(json.dumps({"prefill": stats.prefill_tps, "decode": stats.decode_tps, "memory": memory}), flush=True)
        return 0

    return run_rank(config, head)


class Started:
    """A setting's ranks."""

    def __init__(self, setting: Setting, hosts: VirtualHosts | None, args: argparse.Namespace) -> None:
        self.setting = setting
        command = [*SCRIPT, "--job", setting.name, "-n", str(args.n), *["--experts"] * args.experts]
        environment = {**os.environ, **mpi_environment()}
        if setting.n_ranks > 1:
            hostfile = hosts.hostfile if hosts is not None else None
            command = [*mpirun_command(find_mpirun(), setting.n_ranks, hostfile, ()), *command]
        if hosts is not None:
            command = [*hosts.on(1), *command]
            environment |= hosts.environment
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=die_with_parent,
        )
        self._answer()

    def measure(self, mode: Mode) -> Result:
        """Generate a text."""
        assert self._process.stdin is not None
        print(mode, file=self._process.stdin, flush=True)
        return cast(Result, json.loads(self._answer()))

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self.setting.name} ended with exit code {self._process.wait()}")
        return line

    def close(self) -> None:
        """Have the ranks end."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)  # mpirun does not pass on its end
        self._process.wait()


@contextlib.contextmanager
def started(settings: Sequence[Setting], args: argparse.Namespace) -> Iterator[list[Started]]:
    """The ranks of all settings."""
    with contextlib.ExitStack() as stack:
        over = any(setting.over_hosts for setting in settings)
        hosts = stack.enter_context(virtual_hosts(2)) if over else None
        all_of_them = []
        for setting in settings:
            all_of_them.append(Started(setting, hosts if setting.over_hosts else None, args))
            stack.callback(all_of_them[-1].close)
        yield all_of_them


def measure(settings: Sequence[Setting], args: argparse.Namespace) -> Results:
    """All settings in turn; the first round warms up."""
    found: Results = {}
    with started(settings, args) as jobs:
        for i in range(args.rounds + 1):
            shown = []
            for each in jobs[:: 1 if i % 2 else -1]:
                for mode in each.setting.modes:
                    result = each.measure(mode)
                    shown.append(f"{each.setting.name} {mode} {result['decode']:.1f}, {result['prefill']:.0f}")
                    if i:
                        found.setdefault((each.setting.name, mode), []).append(result)
            print(f"round {i} of {args.rounds}: {'; '.join(shown)}", file=sys.stderr, flush=True)
    return found


def report(results: Results, base: tuple[str, Mode]) -> None:
    """Print a table of all settings, and their speeds as ratios to `base`."""

    def shown(name: str, own: Sequence[Result]) -> str:
        ratios = sorted(a[name] / b[name] for a, b in zip(own, results[base], strict=True))
        spread = f"[{ratios[0]:.2f} … {ratios[-1]:.2f}]"
        return f"{statistics.median(result[name] for result in own):8.1f} {statistics.median(ratios):6.2f} {spread:15s}"

    print(f"\nratios to: {base[0]}, {base[1]}")
    print(f"  {'setting':32s} {'mode':12s}  decode t/s, ratio [range]      prefill t/s, ratio [range]     resident MB")
    for (name, mode), own in results.items():
        memory = "/".join(f"{size / 1e6:.0f}" for size in own[-1]["memory"])
        print(f"  {name:32s} {mode:12s} {shown('decode', own)} {shown('prefill', own)}  {memory}")


def main() -> int:
    """Parse the command line and bench, or run one rank's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-n", type=int, default=64, help="tokens to generate")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=("plain", "draft"), help="what to measure")
    parser.add_argument("--experts", action="store_true", help="the inflated mixture of experts, 2 of 16")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is not None:
        (setting,) = {s for settings, _, _ in PARTS.values() for s in settings if s.name == args.job}
        return job(setting, args)
    inflated_mixture() if args.experts else inflated_pair()  # made once, before ranks read it
    for part in args.parts:
        settings, base, mode = PARTS[part]
        report(measure(settings, args), (base.name, cast(Mode, mode)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
