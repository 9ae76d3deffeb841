"""Runs PipeInfer's settings in the simulator and writes a report; run it as `scripts/experiments/run`.

The paper's six pairs of models on 4 to 32 nodes in all modes, the bound of chains, asynchronous speculation with parts
left out, and links, drafts and rows of all kinds. Writes report.md, CSV files and figures. Nothing is measured: the
same program writes the same files on every machine, in some minutes on one core.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from ggpipe.display.figures.canvas import check_plottable
from ggpipe.display.files import make_folder
from ggpipe.errors import UsageError
from scripts.experiments.plots import plot_all
from scripts.experiments.report import write_report
from scripts.experiments.simulations import Simulations
from scripts.experiments.studies import QUICK, Scale, find_all
from scripts.experiments.tables import write_csv_files


def main() -> int:
    """Parse the command line, simulate, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("experiments"), metavar="DIR", help="default: experiments")
    parser.add_argument("--quick", action="store_true", help="few simulations, in seconds: for tests")
    parser.add_argument(
        "-j", "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes; default: one per core"
    )
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"-j must be 1 or more, got {args.jobs}")
    signal.signal(signal.SIGTERM, _terminated)
    try:
        make_folder(args.out)
        check_plottable(args.out / "pairs.svg")
        simulations = Simulations(args.jobs)
        found = find_all(simulations, QUICK if args.quick else Scale())
        write_csv_files(args.out, found)
        plot_all(args.out, found)
        write_report(args.out, found)
    except UsageError as e:
        print(f"experiments: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"{simulations.n_done} requests simulated, see {args.out / 'report.md'}")
    return 0


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(143)


if __name__ == "__main__":
    sys.exit(main())
