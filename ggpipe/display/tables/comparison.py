"""The gain from a draft model: the speed of the same output with and without it, measured in turn."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ggpipe.display.format import counted, human_rate, percent, three_digits
from ggpipe.display.live.terminal import Terminal
from ggpipe.stats.records import RankStats, RequestStats

_BUSY = 0.25  # share of the processors' time that others may use; waiting ranks take a few percent
_SPREAD = 1.5  # the largest ratio of a round, relative to the smallest


@dataclass(frozen=True)
class ComparedRound:
    """The same output with the draft model and without it."""

    drafted: RequestStats
    alone: RequestStats

    @property
    def ratio(self) -> float | None:
        """How many times as fast the draft model makes it; None if an output is too short to have a speed."""
        fast, slow = self.drafted.decode_tps, self.alone.decode_tps
        return fast / slow if fast is not None and slow is not None else None


def comparison(ranks: Sequence[RankStats], rounds: Sequence[ComparedRound], busy: float = 0.0) -> list[str]:
    """Sentences on what each rank does, both speeds, and their ratio. Empty if the outputs are too short to have a
    speed.

    `busy`: share of the machine's processors that other programs used meanwhile.
    """
    ratios = sorted(ratio for one in rounds if (ratio := one.ratio) is not None)
    if not ratios:
        return []
    fast = statistics.median(one.drafted.decode_tps or 0.0 for one in rounds)
    slow = statistics.median(one.alone.decode_tps or 0.0 for one in rounds)
    n_tokens = max(one.alone.n_generated for one in rounds)
    speeds = f"With the draft model: {human_rate(fast)}. Without: {human_rate(slow)}."
    return [f"{_roles(ranks)}.", f"{speeds} {_verdict(ratios, busy)}", _how(len(ratios), n_tokens)]


def _verdict(ratios: Sequence[float], busy: float) -> str:
    low, high = ratios[0], ratios[-1]
    if busy > _BUSY:
        return (
            f"This machine is too busy to tell which is faster: other programs use {percent(busy)} of its processors. "
            "Try again when they have ended."
        )
    if high > _SPREAD * low:
        return (
            f"This machine is too busy to tell which is faster: {three_digits(low)} to {three_digits(high)} times as "
            "fast with the draft model. Try again when nothing else runs."
        )
    ratio = statistics.median(ratios)
    return f"{three_digits(ratio)} times as fast" + ("." if ratio > 1 else ": here, drafting does not pay.")


def _how(n_rounds: int, n_tokens: int) -> str:
    return f"(Medians of {counted(n_rounds, 'round')} of {counted(n_tokens, 'token')}, with and without in turn.)"


def print_sentences(terminal: Terminal | None, sentences: Sequence[str], style: str | None = None) -> None:
    """Print lines on the terminal, in a Rich style, or on stderr if there is no terminal."""
    if terminal is not None:
        terminal.measure()
        for sentence in sentences:
            terminal.console.print(sentence, style=style)
        return
    for sentence in sentences:
        print(sentence, file=sys.stderr)


def _roles(ranks: Sequence[RankStats]) -> str:
    processes = {rank.rank for rank in ranks}
    hosts = {rank.host for rank in ranks}
    target = {rank.rank for rank in ranks if not rank.draft and rank.layers[0] < rank.layers[1]}
    drafting = {rank.rank for rank in ranks if rank.draft}
    where = "this machine" if len(hosts) == 1 else f"{len(hosts)} machines"
    roles = [_does(len(target), "hold", "the target's layers")]
    if outside := drafting - target:
        roles.append(_does(len(outside), "run", "the draft model"))
    if inside := drafting & target:
        roles.append(f"rank {min(inside)} also runs the draft model")
    return f"{counted(len(processes), 'rank')} on {where}: {', '.join(roles)}"


def _does(n: int, verb: str, what: str) -> str:
    return f"{n} {verb}{'s' if n == 1 else ''} {what}"
