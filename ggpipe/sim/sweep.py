"""Many simulations: each combination of some values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ggpipe.config import Mode
from ggpipe.errors import UsageError
from ggpipe.runtime.stats import RequestStats
from ggpipe.sim.setup import GUESSING, NAMES, WHOLE, Setup

_MOST_RUNS = 2000
_MOST = 1e12
_STEPS = 8  # of a range of fractions that names none

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Axis:
    """Values that something takes, in this order."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Point(Generic[T]):
    """What came of one combination."""

    values: Mapping[str, float]
    by_mode: Mapping[str, T]


def parse_axis(text: str) -> Axis:
    """`NAME=VALUES`: numbers and ranges `a..b` or `a..b/step`, separated by commas. Raises UsageError."""
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("_", "-")
    if not equals:
        raise UsageError(f"--sweep {text}: write NAME=VALUES, as in draft=2..8 or pa=0.1,0.3,0.5")
    if name not in NAMES:
        raise UsageError(f"--sweep {text}: {name or 'nothing'} cannot be swept; names are {', '.join(NAMES)}")
    found = list(itertools.chain.from_iterable(_parse_piece(text, name in WHOLE, piece) for piece in values.split(",")))
    return Axis(name, tuple(dict.fromkeys(found)))


def check_axes(axes: Sequence[Axis], n_modes: int) -> None:
    """Raises UsageError for a name that is there twice, and for more simulations than anybody waits for."""
    names = [axis.name for axis in axes]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise UsageError(f"--sweep {twice[0]}=… is there twice: give all its values in one, separated by commas")
    n_runs = math.prod(len(axis.values) for axis in axes) * n_modes
    if n_runs > _MOST_RUNS:
        raise UsageError(f"these sweeps are {n_runs} simulations, and at most {_MOST_RUNS} are possible: name fewer")


def sweep(
    setup: Setup,
    axes: Sequence[Axis],
    modes: Sequence[Mode],
    measure: Callable[[Sequence[RequestStats]], T],
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Point[T]]:
    """Simulate each combination in each mode, the last axis changing fastest.

    `measure` makes the result of a simulation's requests. `progress` is called with simulations done and in all.
    Raises UsageError for values that make no sense.
    """
    combinations = [
        dict(zip((axis.name for axis in axes), values, strict=True))
        for values in itertools.product(*(axis.values for axis in axes))
    ]
    setups = [setup.changed(values) for values in combinations]
    for own in setups:  # mistakes show before any is run
        own.check()
    known: dict[tuple[object, ...], T] = {}
    points: list[Point[T]] = []
    for values, own in zip(combinations, setups, strict=True):
        by_mode: dict[str, T] = {}
        for mode in modes:
            matters = values.items() if mode != "iterative" else [v for v in values.items() if v[0] not in GUESSING]
            key = (mode, *matters)
            if key not in known:
                known[key] = measure(own.run(mode))
            by_mode[mode] = known[key]
            progress(len(points) * len(modes) + len(by_mode), len(combinations) * len(modes))
        points.append(Point(values, by_mode))
    return points


def _parse_piece(text: str, whole: bool, piece: str) -> list[float]:
    ends, slash, step_text = piece.partition("/")
    low_text, dots, high_text = ends.partition("..")
    if slash and not dots:
        raise UsageError(f"--sweep {text}: {piece} has a step and no range; write a..b/step")
    low = _number(text, whole, low_text)
    if not dots:
        return [low]
    high = _number(text, whole, high_text)
    if not (slash or whole):
        return [low, *(float(f"{low + i * (high - low) / _STEPS:.3g}") for i in range(1, _STEPS)), high]
    step = _number(text, whole, step_text) if slash else 1
    if low > high:
        raise UsageError(f"--sweep {text}: {piece} is empty; write the smaller number first")
    if low == high:
        return [low]
    if step <= 0:
        raise UsageError(f"--sweep {text}: a step is above 0")
    n_steps = math.floor(min((high - low) / step * (1 + 1e-9), _MOST))
    if n_steps > _MOST_RUNS:
        raise UsageError(f"--sweep {text}: {piece} has more than {_MOST_RUNS} values; take larger steps")
    return [_rounded(low + i * step) for i in range(n_steps + 1)]


def _number(text: str, whole: bool, number: str) -> float:
    try:
        value = int(number) if whole else float(number)
        if not abs(value) <= _MOST:
            raise ValueError
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise UsageError(f"--sweep {text}: {number.strip() or 'nothing'} is not {kind}") from None
    return value


def _rounded(value: float) -> float:
    """Without what adding up decimal steps leaves in the last digits."""
    return value if isinstance(value, int) else float(f"{value:.6g}")
