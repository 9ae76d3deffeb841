"""Ways to divide the ranks of an arrangement into groups of neighbours, which compute a stage together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

from ggpipe.planning.placements import Arrangement

_FEW_STAGES = 4
_UNEVEN = 1.1  # times faster than another part of its group: then they divide tensors by speed


def grouped(arrangement: Arrangement, max_parts: int, speed: Callable[[int, int], float]) -> Iterator[Arrangement]:
    """The arrangement with groups of about equal size, with at most `max_parts` ranks each.

    `speed(node, threads)`: in any unit. Parts of different speed divide tensors in proportion to it.
    """
    for sizes in group_sizes(len(arrangement.target), max_parts):
        made = replace(arrangement, group_sizes=sizes, skips=())
        skips = tuple(
            all(arrangement.skips[i] for i in stage) and not (arrangement.in_order and len(stage) > 1)
            for stage in made.stages
        )
        yield replace(made, skips=skips, tensor_split=_tensor_split(made, speed))


def group_sizes(n_ranks: int, max_parts: int) -> list[tuple[int, ...]]:
    """Sizes of the stages: a few stages, half as many stages as ranks, and any number of stages of equal size."""
    found = []
    for n_stages in range(1, (n_ranks + 1) // 2 + 1):
        size, n_larger = divmod(n_ranks, n_stages)
        sizes = (size + 1,) * n_larger + (size,) * (n_stages - n_larger)
        is_usual = n_stages <= _FEW_STAGES or n_larger == 0 or n_stages == (n_ranks + 1) // 2
        if is_usual and 1 < sizes[0] <= max_parts:
            found.append(sizes)
    return found


def _tensor_split(arrangement: Arrangement, speed: Callable[[int, int], float]) -> tuple[float, ...]:
    """`PipelineConfig.tensor_split`, for the group size with the most uneven speeds; empty: even."""
    speeds: dict[int, list[list[float]]] = {}
    for stage in arrangement.stages:
        own = [speed(arrangement.target[i].node, arrangement.threads[i]) for i in stage]
        speeds.setdefault(len(stage), []).append([one / max(own) for one in own])
    means = [[statistics.fmean(parts) for parts in zip(*groups, strict=True)] for groups in speeds.values()]
    most = min(means, key=lambda parts: min(parts) / max(parts))
    if max(most) < _UNEVEN * min(most):
        return ()
    return tuple(round(part / min(most), 1) for part in most)
