"""Lets ranks die while four streams are served; run it as `scripts/bench/check_faults`.

Each fault kills a rank (SIGKILL), stops it (SIGSTOP), or takes its machine's link down: the head, a worker or the draft
rank, at a random time. With `--restart 3` each stream must end whole, with the tokens of an undisturbed run (`--exact`,
with and without temperature and penalties). Without, each must keep its text so far, and the job must end within the
rank timeout and 5 s, with one line. No process may be left. A line for each fault and a summary; exit code 1 when one
fails.

Links need virtual hosts, and these root; where there are none, such faults are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys

from support.faults import RANK_TIMEOUT_S, Kind, fault_of, play, undisturbed
from support.virtual_hosts import VirtualHosts, virtual_hosts, why_not

N_RESTARTS = 3


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser("check_faults", description="Ranks die at random times: is anything lost?")
    parser.add_argument("--first", type=int, default=0, help="number of the first fault (default 0)")
    parser.add_argument("--count", type=int, default=30, help="number of faults (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="other times (default 0)")
    parser.add_argument("--rank-timeout", type=float, default=RANK_TIMEOUT_S, metavar="S")
    parser.add_argument("--restart", choices=("with", "without", "both"), default="both")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves no hosts and no ranks
    modes = [n for n, name in ((N_RESTARTS, "with"), (0, "without")) if args.restart in (name, "both")]
    no_hosts = why_not()
    n_wrong, seconds = 0, dict[int, list[float]]((n, []) for n in modes)
    expected = undisturbed()
    for number in range(args.first, args.first + args.count):
        fault = fault_of(number, args.seed)
        if fault.kind is Kind.CUT and no_hosts is not None:
            print(f"{fault}  left out: {no_hosts}", flush=True)
            continue
        for n_restarts in modes:
            hosts: contextlib.AbstractContextManager[VirtualHosts | None] = contextlib.nullcontext()
            if fault.on_hosts and no_hosts is None:
                hosts = virtual_hosts(4)
            with hosts as machines:
                outcome, wrong = play(fault, expected, n_restarts, machines, args.rank_timeout)
            seconds[n_restarts].append(outcome.seconds)
            n_wrong += bool(wrong)
            texts = "/".join(str(len(text)) for text in outcome.texts)
            how = f"--restart {n_restarts}  {texts:15}  {outcome.seconds:4.1f} s"
            print(f"{fault}  {how}  {'; '.join(wrong) or 'ok'}", flush=True)
            if wrong:
                print("".join(f"      {line}\n" for line in outcome.lines[-20:]), end="", flush=True)
    for n_restarts, ends_s in seconds.items():
        if ends_s:
            what = "to the end of all streams" if n_restarts else f"to the end (rank timeout {args.rank_timeout:g} s)"
            median_s = statistics.median(ends_s)
            print(f"--restart {n_restarts}: {len(ends_s)} faults, {median_s:.1f} s (at most {max(ends_s):.1f}) {what}")
    print(f"{n_wrong} failed" if n_wrong else "all as they should be")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
