"""Simulate a cluster in several modes, and with each combination of some values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from ggpipe.config.speculation import Mode
from ggpipe.errors import SettingError, UsageError
from ggpipe.sim.simulation_spec import NAMES, SPECULATIVE_NAMES, WHOLE, SimulationSpec
from ggpipe.stats.records import RequestStats
from ggpipe.stats.summary import Summary, summary_of
from ggpipe.stats.traffic import TrafficSummary, traffic_summary

_MOST_RUNS = 2000
_MOST = 1e12
_STEPS = 8  # values between the ends of a range of fractions that names no step


@dataclass(frozen=True, slots=True)
class Axis:
    """Values of one name, in the order in which they are simulated."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModeResult:
    """What one mode's simulation gave."""

    summary: Summary
    gain: float | None
    """Speed relative to iterative: decode speed, or with traffic that of all requests together."""
    traffic: TrafficSummary | None = None
    """Figures of all requests together; None where each request had the pipeline to itself."""
    requests: tuple[RequestStats, ...] = ()
    """The simulated requests; empty in a sweep, where they would fill the memory."""

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed, or with traffic that of all requests together."""
        return self.summary.tokens_per_s if self.traffic is None else self.traffic.total_tokens_per_s


@dataclass(frozen=True, slots=True)
class Combination:
    """One value of each axis, and what each mode gave with them."""

    values: Mapping[str, float]
    """By name; empty where nothing was swept."""
    by_mode: Mapping[Mode, ModeResult]


def parse_axis(text: str) -> Axis:
    """`NAME=VALUES`: numbers and ranges `a..b` or `a..b/step`, separated by commas. Raises UsageError."""
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("_", "-")
    if not equals:
        raise SettingError("sweep", text, "write NAME=VALUES, as in draft=2..8 or pa=0.1,0.3,0.5")
    if name not in NAMES:
        raise SettingError("sweep", f"{text}: {name or 'nothing'} cannot be swept; names are {', '.join(NAMES)}")
    found = list(itertools.chain.from_iterable(_parse_piece(text, name in WHOLE, piece) for piece in values.split(",")))
    return Axis(name, tuple(dict.fromkeys(found)))


def sweep(
    spec: SimulationSpec,
    axes: Sequence[Axis],
    modes: Sequence[Mode],
    on_run: Callable[[int, int], None] = lambda done, total: None,
) -> list[Combination]:
    """Simulate each combination in each mode, the last axis changing fastest. Without axes there is one combination.

    Iterative is always simulated, since other modes are compared with it; the result holds `modes` alone.
    `on_run` is called with the number of simulations done and their total. Raises UsageError for axes and values that
    make no sense, before anything is simulated.
    """
    everything = [mode for mode in get_args(Mode) if mode in ("iterative", *modes)]
    _check_axes(axes, modes, len(everything))
    names = [axis.name for axis in axes]
    combinations = [
        dict(zip(names, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))
    ]
    specs = [spec.changed(values) for values in combinations]
    for own in specs:
        own.check()
    known: dict[tuple[object, ...], ModeResult] = {}
    found: list[Combination] = []
    n_done, total = 0, len(combinations) * len(everything)
    for values, own in zip(combinations, specs, strict=True):
        results: dict[Mode, ModeResult] = {}
        for mode in everything:
            matters = [v for v in values.items() if mode != "iterative" or v[0] not in SPECULATIVE_NAMES]
            key = (mode, *matters)
            if key not in known:
                result = _result(own, mode)
                known[key] = replace(result, requests=()) if axes else result
            results[mode] = known[key]
            n_done += 1
            on_run(n_done, total)
        base = results["iterative"].tokens_per_s
        found.append(Combination(values, {mode: _compared(results[mode], base) for mode in modes}))
    return found


def _result(spec: SimulationSpec, mode: Mode) -> ModeResult:
    served = spec.serve(mode)
    requests = tuple(stats for one in served for stats in one.requests)
    traffic = traffic_summary(requests, served[0].ranks) if spec.traffic is not None else None
    return ModeResult(summary_of(requests), None, traffic, requests)


def _compared(result: ModeResult, base: float | None) -> ModeResult:
    return replace(result, gain=result.tokens_per_s / base if result.tokens_per_s and base else None)


def _check_axes(axes: Sequence[Axis], modes: Sequence[Mode], n_modes: int) -> None:
    """Raises UsageError for axes that make no difference, for names given twice, and for too many simulations."""
    names = [axis.name for axis in axes]
    for name in names:
        if name in SPECULATIVE_NAMES and list(modes) == ["iterative"]:
            raise SettingError("sweep", f"{name}=… makes no difference without draft tokens", "leave it out")
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise SettingError("sweep", f"{twice[0]}=… is given twice", "give all its values in one, separated by commas")
    n_runs = math.prod(len(axis.values) for axis in axes) * n_modes
    if n_runs > _MOST_RUNS:
        raise UsageError(f"these sweeps are {n_runs} simulations, at most {_MOST_RUNS} are possible: name fewer values")


def _parse_piece(text: str, whole: bool, piece: str) -> list[float]:
    ends, slash, step_text = piece.partition("/")
    low_text, dots, high_text = ends.partition("..")
    if slash and not dots:
        raise SettingError("sweep", f"{text}: {piece} has a step and no range; write a..b/step")
    low = _number(text, whole, low_text)
    if not dots:
        return [low]
    high = _number(text, whole, high_text)
    if not (slash or whole):
        return [low, *(float(f"{low + i * (high - low) / _STEPS:.3g}") for i in range(1, _STEPS)), high]
    step = _number(text, whole, step_text) if slash else 1
    if low > high:
        raise SettingError("sweep", f"{text}: {piece} is empty; write the smaller number first")
    if low == high:
        return [low]
    if step <= 0:
        raise SettingError("sweep", f"{text}: a step is above 0")
    n_steps = math.floor(min((high - low) / step * (1 + 1e-9), _MOST))
    if n_steps > _MOST_RUNS:
        raise SettingError("sweep", f"{text}: {piece} has more than {_MOST_RUNS} values; take larger steps")
    return [_rounded(low + i * step) for i in range(n_steps + 1)]


def _number(text: str, whole: bool, number: str) -> float:
    try:
        value = int(number) if whole else float(number)
        if not abs(value) <= _MOST:
            raise ValueError
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise SettingError("sweep", f"{text}: {number.strip() or 'nothing'} is not {kind}") from None
    return value


def _rounded(value: float) -> float:
    """Without what adding up decimal steps leaves in the last digits."""
    return value if isinstance(value, int) else float(f"{value:.6g}")
