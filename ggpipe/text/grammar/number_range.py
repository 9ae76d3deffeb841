"""Integers between two bounds, as a rule of a grammar."""

from __future__ import annotations

_MOST_DIGITS = 16


def digits_between(least: int | None, most: int | None) -> str:
    """The rule for integers from `least` to `most`, both included; None: no bound, but for 16 digits."""
    low = -(10**_MOST_DIGITS - 1) if least is None else least
    high = 10**_MOST_DIGITS - 1 if most is None else most
    ways: list[str] = []
    if low < 0:
        ways += [f'"-" {way}' for way in _positive(max(1, -high), -low)]
    if low <= 0 <= high:
        ways.append('"0"')
    if high > 0:
        ways += _positive(max(1, low), high)
    return " | ".join(ways)


def _positive(low: int, high: int) -> list[str]:
    """Ways to write the integers from `low` to `high`, both above 0."""
    ways: list[str] = []
    for n_digits in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (n_digits - 1))
        last = min(high, 10**n_digits - 1)
        ways += _same_length(str(first), str(last))
    return ways


def _same_length(low: str, high: str) -> list[str]:
    """Ways to write the numbers between two of as many digits."""
    if not low:
        return [""]
    rest = len(low) - 1
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return [_digits(low[0], high[0]) + (f" [0-9]{{{rest}}}" if rest else "")]
    if low[0] == high[0]:
        return [f'"{low[0]}" {way}' for way in _same_length(low[1:], high[1:])]
    ways: list[str] = []
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        ways += [f'"{first}" {way}' for way in _same_length(low[1:], "9" * rest)]
        first += 1
    tail: list[str] = []
    if high[1:] != "9" * rest:
        tail = [f'"{last}" {way}' for way in _same_length("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        ways.append(_digits(str(first), str(last)) + f" [0-9]{{{rest}}}")
    return ways + tail


def _digits(first: str, last: str) -> str:
    return f'"{first}"' if first == last else f"[{first}-{last}]"
