"""Validation of single settings, with uniform error messages."""

from __future__ import annotations

import math

from ggpipe.errors import SettingError, Wording

MAX_TOKENS = 2**31 - 256
"""Maximum size of a context, batch or draft, in tokens: positions have 32 bits, and libllama rounds a context up to a
multiple of 256."""


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises SettingError unless `value` is one of `choices`. `name`: of the setting."""
    if value not in choices:
        raise SettingError(name, f"must be {', '.join(choices[:-1])} or {choices[-1]}, got {value}")


def check_range(
    name: str, value: int, least: int, most: int, what: str = "a number", special: str | Wording | None = None
) -> None:
    """Raises SettingError unless `value` is from `least` to `most`.

    `name`: of the setting. `what`: the kind of value, for the message. `special`: another valid value with its meaning,
    such as `-1 (all)`.
    """
    also = special is not None and value == int(str(special).split()[0])
    if not (least <= value <= most or also):
        start = (special, " or ") if special is not None else ()
        raise SettingError(name, Wording("must be ", *start, f"{what} from {least} to {most}, got {value}"))


def check_finite(name: str, value: float) -> None:
    """Raises SettingError for infinity and NaN. `name`: of the setting."""
    if not math.isfinite(value):
        raise SettingError(name, f"must be a finite number, got {value:g}")
