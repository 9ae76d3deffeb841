"""The names of llama.cpp's samplers."""

from __future__ import annotations

from collections.abc import Iterable

from ggpipe.errors import SettingError

SAMPLERS = {
    "penalties": "e",
    "dry": "d",
    "top_n_sigma": "s",
    "top_k": "k",
    "typ_p": "y",
    "top_p": "p",
    "min_p": "m",
    "xtc": "x",
    "temperature": "t",
    "adaptive_p": "a",
    "infill": "i",
}
"""Names of all samplers, and their letters in `--sampling-seq`."""
_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}


def samplers_by_name(names: Iterable[str]) -> tuple[str, ...]:
    """Samplers by name, in any spelling that llama.cpp accepts (`top-k`, `topk`, `temp`).

    Raises SettingError for an unknown name.
    """
    spelled = {alias: name for name in SAMPLERS for alias in (name, name.replace("_", "-"), name.replace("_", ""))}
    spelled |= _ALIASES
    found = []
    for name in names:
        if name.lower() not in spelled:
            raise SettingError("samplers", f"has no {name}", f"choose from {', '.join(SAMPLERS)}")
        found.append(spelled[name.lower()])
    return tuple(found)


def samplers_by_letter(letters: str) -> tuple[str, ...]:
    """Samplers by letter. Raises SettingError for an unknown letter."""
    named = {letter: name for name, letter in SAMPLERS.items()}
    for letter in letters:
        if letter not in named:
            known = ", ".join(f"{letter} ({name})" for letter, name in named.items())
            raise SettingError("sampling_seq", f"has no {letter}", f"choose from {known}")
    return tuple(named[letter] for letter in letters)
