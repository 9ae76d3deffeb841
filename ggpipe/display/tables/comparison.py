"""The gain from a draft model: the speed of the same output with and without it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ggpipe.display.format import counted, human_rate, three_digits
from ggpipe.display.live.terminal import Terminal
from ggpipe.stats.records import RankStats, RequestStats


def comparison(ranks: Sequence[RankStats], drafted: RequestStats, alone: RequestStats) -> list[str]:
    """Sentences on what each rank does, both speeds, and their ratio. Empty if an output is too short to have a speed.

    `drafted`: the request with draft tokens. `alone`: the one without.
    """
    fast, slow = drafted.decode_tps, alone.decode_tps
    if fast is None or slow is None:
        return []
    ratio = three_digits(fast / slow)
    verdict = f"{ratio} times as fast" if fast > slow else f"{ratio} times as fast: here, drafting does not pay"
    return [
        f"{_roles(ranks)}.",
        f"With the draft model: {human_rate(fast)}. Without: {human_rate(slow)} "
        f"(measured over {counted(alone.n_generated, 'token')}). {verdict}.",
    ]


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
