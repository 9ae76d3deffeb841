"""What the head's scheduler and a draft model's drafter take of Python; run it as `scripts/bench/scheduler`.

Both serve one output on a simulated pipeline of equal stages in which further rows are nearly free, so that trees grow
as large as they may. Only the CPU time inside `Scheduler.handle` and `DraftModel.handle` counts, not that of the
simulator. It is divided by the runs that each of them submitted. All rounds have the same runs; the table has the
fastest round, since other work on the machine can only add to it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest import mock

from support.virtual import cluster

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.drafters import registry
from ggpipe.core.drafters.base import DraftAction, DraftEvent
from ggpipe.core.drafters.draft_model import DraftModel
from ggpipe.core.events import SchedulerAction, SchedulerEvent, SubmitRun
from ggpipe.core.scheduler import Scheduler
from ggpipe.core.tree import Tree
from ggpipe.sim import simulator
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulator import simulate
from ggpipe.sim.text import SyntheticTokens

TOKEN_S, ROW_SHARE, DRAFT_S = 0.32, 0.01, 0.005
"""Seconds of a one-row run in all stages, the share of it that a further row adds, seconds of a draft model's run."""


@dataclass
class Work:
    """What one state machine did for an output."""

    cpu_s: float = 0.0
    tree_sizes: list[int] = field(default_factory=list)
    """Draft tokens in the tree, after each run that was submitted."""

    @property
    def us(self) -> float:
        """Microseconds of CPU time for each run."""
        return self.cpu_s / len(self.tree_sizes) * 1e6

    def add(self, cpu_s: float, actions: Sequence[SchedulerAction | DraftAction], trees: Sequence[Tree]) -> None:
        """An event was handled."""
        self.cpu_s += cpu_s
        for action in actions:
            if isinstance(action, SubmitRun) and action.run.rows:
                self.tree_sizes.append(sum(tree.n_nodes for tree in trees))


def served(arguments: argparse.Namespace) -> dict[str, Work]:
    """What the scheduler and the drafter did for one output, by their names."""
    scheduling, drafting = Work(), Work()

    class TimedScheduler(Scheduler):
        def handle(self, event: SchedulerEvent, now: float) -> list[SchedulerAction]:
            start = time.thread_time()
            actions = super().handle(event, now)
            scheduling.add(time.thread_time() - start, actions, [state.tree for state in self._states.values()])
            return actions

    class TimedDraft(DraftModel):
        def handle(self, event: DraftEvent, now: float) -> list[DraftAction]:
            start = time.thread_time()
            actions = super().handle(event, now)
            drafting.add(time.thread_time() - start, actions, [state.tree for state in self._requests.values()])
            return actions

    virtual = cluster([TOKEN_S / arguments.nodes] * arguments.nodes, DRAFT_S, row_share=ROW_SHARE)
    text = SyntheticTokens(arguments.agreement, 80, arguments.predict)
    speculation = SpeculationConfig(n_draft=arguments.draft, drafters=("draft",))
    with (
        mock.patch.object(simulator, "Scheduler", TimedScheduler),
        mock.patch.object(registry, "WITH_MODEL", {"draft": TimedDraft}),
    ):
        simulate(virtual, text, speculation, arguments.predict, Sizes(16384))
    return {"scheduler": scheduling, "drafter": drafting}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=64, help="stages, each on a node of its own (64)")
    parser.add_argument("--draft", type=int, default=256, help="draft tokens in a run, at most (256)")
    parser.add_argument("--agreement", type=float, default=0.7, help="how often the draft's best token is right (0.7)")
    parser.add_argument("-n", "--predict", type=int, default=256, help="tokens of the output (256)")
    parser.add_argument("--rounds", type=int, default=5, help="outputs, all with the same runs (5)")
    arguments = parser.parse_args()
    rounds = [served(arguments) for _ in range(arguments.rounds)]
    print("| | runs | draft tokens in the tree, median and most | CPU time per run, µs |\n|---|---|---|---|")
    for name in rounds[0]:
        work = min((one[name] for one in rounds), key=lambda work: work.us)
        sizes = f"{statistics.median(work.tree_sizes):.0f}, {max(work.tree_sizes)}"
        print(f"| {name} | {len(work.tree_sizes)} | {sizes} | {work.us:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
