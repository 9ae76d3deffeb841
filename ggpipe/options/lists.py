"""Parsers for options whose values are lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from ggpipe.config.layer_split import LayerSplits, parse_layer_split
from ggpipe.core.drafters import registry
from ggpipe.options.settings import SimulatedDrafter

T = TypeVar("T")


def layer_split(text: str) -> LayerSplits | Literal["auto"]:
    """`0.2,0.4,0.4`, `0.5,0.5*2/1.0` or `auto`. Raises SettingError."""
    return "auto" if text == "auto" else parse_layer_split(text)


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers: one for all ranks, or one per rank. Raises ValueError that says what to write instead."""
    return _values(text, int, "give one number, or one per rank, as in 6,32,20")


def weights(text: str) -> tuple[float, ...]:
    """Proportions. Raises ValueError that says what to write instead."""
    return _values(text, float, "give one number per rank of a group, as in 3,1")


def _values(text: str, kind: Callable[[str], T], advice: str) -> tuple[T, ...]:
    try:
        return tuple(kind(value) for value in text.replace("/", ",").split(","))
    except ValueError:
        raise ValueError(advice) from None


def words(text: str) -> tuple[str, ...]:
    """Words, without repetitions."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def simulated_drafters(text: str) -> tuple[SimulatedDrafter, ...]:
    """`draft:0.6,eagle3:0.7,ngram`: drafters, some with a share. Raises ValueError that says what to write instead."""
    found = []
    for word in text.split(","):
        name, colon, share = word.partition(":")
        try:
            (kind,) = registry.read_names(name)
            number = float(share) if colon else None
        except ValueError:
            advice = "write drafters, separated by commas, some with a share, as in draft:0.6,eagle3:0.7,ngram"
            raise ValueError(advice) from None
        if number is not None and not 0 <= number <= 1:
            raise ValueError(f"{word.strip()}: a share is a number between 0 and 1")
        found.append(SimulatedDrafter(kind, number))
    kinds = [drafter.kind for drafter in found]
    if registry.GRAMMAR in kinds:
        raise ValueError("grammar cannot be simulated: simulated outputs have no grammar")
    if kinds.count("ngram") > 1:
        raise ValueError("there is one ngram drafter at most")
    heads = (*registry.HEADS, registry.MTP)
    if sum(kind in heads for kind in kinds) > 1:
        raise ValueError(f"there is one drafter at most of {', '.join(heads)}")
    return tuple(found)


def layers(text: str) -> tuple[int, int]:
    """`A-B` or `A`: the first layer, and the one after the last. Raises ValueError that says what to write instead."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal() and int(last or first) >= int(first)) or text[-1:] == "-":
        raise ValueError("write the first and the last layer, as in 4-7, or one layer")
    return int(first), int(last or first) + 1


def scaled_loras(texts: list[str]) -> tuple[tuple[Path, float], ...]:
    """Values of the form `FILE:SCALE`. Raises ValueError that says what to write instead."""
    pairs = [text.rpartition(":") for text in texts]
    try:
        return tuple((Path(path), float(scale if colon else "")) for path, colon, scale in pairs)
    except ValueError:
        raise ValueError("write FILE:SCALE") from None
