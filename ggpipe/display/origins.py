"""The colours of tokens by origin: the target's own, or those of the drafters that had named them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.style import Style

OWN, SEVERAL = "own", "several"
_FIRST = Style(color="green")
_STYLES: Mapping[str, Style] = {
    "draft": _FIRST,
    "draft model 1": _FIRST,
    "draft model 2": Style(color="bright_blue"),
    "draft model 3": Style(color="red"),
    "eagle3": Style(color="magenta"),
    "mtp": Style(color="magenta"),
    "dflash": Style(color="bright_magenta"),
    "ngram": Style(color="yellow"),
    "grammar": Style(color="dark_orange"),
    SEVERAL: Style(color="bright_cyan"),
}


def origin_of(drafters: Sequence[str]) -> str:
    """The origin of a token that these drafters had named: one of them, several, or none."""
    return OWN if not drafters else drafters[0] if len(drafters) == 1 else SEVERAL


def origin_style(drafters: Sequence[str]) -> Style | None:
    """The style of a token that these drafters had named; None for the target's own."""
    return style_of(origin_of(drafters))


def style_of(origin: str) -> Style | None:
    """The style of tokens of this origin, as in `origin_of`."""
    return None if origin == OWN else _STYLES.get(origin, _FIRST)
