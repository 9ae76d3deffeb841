"""The requests of a simulation, and when they arrive: from users who ask again, at a rate, from a file, or at once."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ggpipe.cluster.decode import decode
from ggpipe.config.context import MAX_SEQUENCES
from ggpipe.errors import Setting, SettingError, UsageError, Wording

MOST_REQUESTS = 2000
"""In a simulation."""
_EACH = 2  # requests of a user, where their number is not given
_AT_A_RATE = 32  # requests at a rate, where their number is not given
_AT_A_TIME = 4  # requests that are served at the same time, where neither that nor users are given
_COLUMNS = ("arrival_s", "prompt_tokens", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """When a request arrives, and its size."""

    at_s: float
    """Seconds since the start or, with `after`, since that request ended."""
    after: int | None = None
    """The request, counted from 0, whose end this one follows; it is an earlier one."""
    n_prompt: int | None = None
    """Tokens of the prompt; None: the length of the recorded or synthetic prompt."""
    n_predict: int | None = None
    """Tokens to generate; None: the length of the recorded or synthetic output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests of a simulation: from users, at a rate, from a file, or else all at once."""

    users: int | None = None
    """Number of users. Each one asks at the start, and again as soon as the answer is complete."""
    rate: float | None = None
    """Requests per second, at independent times: a Poisson process."""
    n_total: int | None = None
    """Number of requests; None: 2 per user, 32 at a rate, or all of the file."""
    listed: tuple[Arrival, ...] = ()
    """The requests of a file."""
    n_requests: int | None = None
    """Maximum number of requests served at a time; None: the number of users, or 4."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, most in (
            ("users", self.users, MAX_SEQUENCES),
            ("requests", self.n_total, MOST_REQUESTS),
            ("concurrent", self.n_requests, MAX_SEQUENCES),
        ):
            if value is not None and not 1 <= value <= most:
                raise SettingError(name, f"must be a number from 1 to {most}, got {value}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise SettingError("rate", f"must be a number of requests per second above 0, got {self.rate:g}")
        given = [
            name for name, value in (("users", self.users), ("rate", self.rate), ("arrivals", self.listed)) if value
        ]
        if len(given) > 1:
            raise SettingError(
                given[0], Wording("and ", Setting(given[1]), " both say when requests arrive"), "leave out one of them"
            )
        if self.listed and self.n_total is not None:
            raise SettingError(
                "arrivals", "has a number of requests already", Wording("leave out ", Setting("requests"))
            )
        if self.users and self.n_total is not None and self.n_total < self.users:
            raise SettingError("requests", f"must be at least {self.users}, one per user, got {self.n_total}")

    @property
    def at_a_time(self) -> int:
        """Requests that are served at the same time, at most."""
        return self.n_requests or self.users or min(_AT_A_TIME, len(self.arrivals()))

    def arrivals(self) -> tuple[Arrival, ...]:
        """Arrivals of all requests."""
        if self.listed:
            return self.listed
        if self.users:
            n_total, users = self.n_total or _EACH * self.users, self.users
            return tuple(Arrival(at_s=0.0, after=i - users if i >= users else None) for i in range(n_total))
        if self.rate:
            return tuple(self._poisson(self.rate))
        return (Arrival(at_s=0.0),) * (self.n_total or 1)

    def _poisson(self, rate: float) -> Iterator[Arrival]:
        rng, at_s = random.Random(self.seed), 0.0
        for _ in range(self.n_total or _AT_A_RATE):
            at_s += rng.expovariate(rate)
            yield Arrival(at_s=at_s)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a file of arrivals. It has the names that users write."""

    arrival_s: float
    prompt_tokens: int | None = None
    tokens: int | None = None


def read_arrivals(path: Path) -> tuple[Arrival, ...]:
    """Read a file with one request a line: second of arrival, prompt tokens and tokens to generate as CSV, with or
    without a line of names; or JSON objects with `arrival_s`, `prompt_tokens` and `tokens`. The latter two may be
    missing.

    Raises UsageError for a file that cannot be read or has other content.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise UsageError(f"cannot read the arrivals {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"{path} has no arrivals: it is not a text") from e
    filled = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    is_json = bool(filled) and filled[0][1].startswith("{")
    if filled and not is_json and _first_cell(filled[0][1]) == _COLUMNS[0]:
        names = _cells(filled.pop(0)[1])
        if len(set(names)) < len(names) or not set(names) <= set(_COLUMNS):
            raise UsageError(f"{path}: the columns of arrivals are {', '.join(_COLUMNS)}, got {', '.join(names)}")
    else:
        names = _COLUMNS
    found = []
    for number, line in filled:
        try:
            found.append(_arrival(msgspec.json.decode(line) if is_json else _row(line, names)))
        except (ValueError, msgspec.DecodeError) as e:
            raise UsageError(f"{path}, line {number}: {e}") from e
    if not 0 < len(found) <= MOST_REQUESTS:
        raise UsageError(f"{path} must have from 1 to {MOST_REQUESTS} arrivals, got {len(found)}")
    return tuple(sorted(found, key=lambda arrival: arrival.at_s))


def _first_cell(line: str) -> str:
    """Nothing where the line cannot be read."""
    try:
        return _cells(line)[0]
    except ValueError:
        return ""


def _cells(line: str) -> tuple[str, ...]:
    """Raises ValueError."""
    try:
        return tuple(cell.strip() for cell in next(csv.reader([line])))
    except csv.Error as e:  # a line that is very long
        raise ValueError(str(e)) from e


def _row(line: str, names: tuple[str, ...]) -> dict[str, object]:
    cells = _cells(line)
    if len(cells) > len(names):
        raise ValueError(f"{', '.join(names)} are wanted, got {len(cells)} values")
    return {name: _number(cell) for name, cell in zip(names, cells, strict=False) if cell}


def _number(cell: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell


def _arrival(content: object) -> Arrival:
    """Raises ValueError, in one line."""
    line = decode(content, _Line)
    if not 0 <= line.arrival_s < math.inf:
        raise ValueError(f"arrival_s must be a time of 0 or more, got {line.arrival_s:g}")
    for name, value in (("prompt_tokens", line.prompt_tokens), ("tokens", line.tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    return Arrival(at_s=line.arrival_s, n_prompt=line.prompt_tokens, n_predict=line.tokens)
