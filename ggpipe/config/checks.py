"""Checks of single settings, in the words of all error messages, and a bound that many share."""

from __future__ import annotations

import math

from ggpipe.errors import SettingError, Wording

MAX_TOKENS = 2**31 - 256
"""The largest context, batch or draft, in tokens: positions are 32-bit, and libllama rounds a context up to a multiple
of 256."""


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises SettingError unless the setting `name` has one of these values."""
    if value not in choices:
        raise SettingError(name, f"must be {', '.join(choices[:-1])} or {choices[-1]}, got {value}")


def check_range(
    name: str, value: int, least: int, most: int, what: str = "a number", special: str | Wording | None = None
) -> None:
    """Raises SettingError unless the setting `name` is within these limits.

    `special`: a further value, or the least one, and its meaning, as in `-1 (all)`.
    """
    also = special is not None and value == int(str(special).split()[0])
    if not (least <= value <= most or also):
        start = (special, " or ") if special is not None else ()
        raise SettingError(name, Wording("must be ", *start, f"{what} from {least} to {most}, got {value}"))


def check_finite(name: str, value: float) -> None:
    """Raises SettingError for infinite values and those that are no number."""
    if not math.isfinite(value):
        raise SettingError(name, f"must be a finite number, got {value:g}")
