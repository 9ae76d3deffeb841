"""Values of options that are lists."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ggpipe.config.layer_split import LayerSplits, parse_layer_split


def layer_split(text: str) -> LayerSplits | Literal["auto"]:
    """`0.2,0.4,0.4`, `0.5,0.5*2/1.0` or `auto`. Raises SettingError."""
    return "auto" if text == "auto" else parse_layer_split(text)


def numbers(text: str) -> tuple[int, ...]:
    """A list of numbers, for all ranks or for each of them. Raises ValueError with what to write instead."""
    try:
        return tuple(int(value) for value in text.replace("/", ",").split(","))
    except ValueError:
        raise ValueError("give one number, or one per rank, as in 6,32,20") from None


def weights(text: str) -> tuple[float, ...]:
    """A list of proportions. Raises ValueError with what to write instead."""
    try:
        return tuple(float(value) for value in text.replace("/", ",").split(","))
    except ValueError:
        raise ValueError("give one number per rank of a group, as in 3,1") from None


def words(text: str) -> tuple[str, ...]:
    """A list of words; one that is named twice counts once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def layers(text: str) -> tuple[int, int]:
    """`A-B` or `A`, as the first layer and the one after the last. Raises ValueError with what to write instead."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal() and int(last or first) >= int(first)) or text[-1:] == "-":
        raise ValueError("write the first and the last layer, as in 4-7, or one layer")
    return int(first), int(last or first) + 1


def scaled_loras(texts: list[str]) -> tuple[tuple[Path, float], ...]:
    """`FILE:SCALE`, each. Raises ValueError with what to write instead."""
    return tuple(_scaled_lora(text) for text in texts)


def _scaled_lora(text: str) -> tuple[Path, float]:
    path, colon, scale = text.rpartition(":")
    try:
        if colon:
            return Path(path), float(scale)
    except ValueError:
        pass
    raise ValueError("write FILE:SCALE") from None
