"""Which files of a repository are the wanted model, as llama.cpp chooses them (common/download.cpp)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ggpipe.errors import ModelError

_USUAL_QUANTS = ("Q4_K_M", "Q8_0")
_HEADS = "eagle3-"
_OTHER_FILES = ("mmproj", "imatrix", "mtp-", _HEADS, "dflash-", "dspark-")
"""In the names of GGUF files that are not a whole model."""
_PART = re.compile(r"(?P<prefix>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_MOST_LISTED = 12


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file of a repository."""

    path: str
    n_bytes: int
    sha256: str
    """Empty for a small file that the repository holds itself."""


def choose(
    repo: str, files: Sequence[HubFile], quant: str = "", file: str | None = None, is_draft: bool = False
) -> tuple[HubFile, ...]:
    """The files of a model, as llama.cpp chooses them: those with this quantization in their names.

    Without one: Q4_K_M, else Q8_0, else the first model. `file` names the (first) file itself. `is_draft`: an EAGLE-3
    head will do if there is no other model. Raises ModelError if there is none, or if parts are missing.
    """
    ggufs = sorted((own for own in files if own.path.endswith(".gguf")), key=lambda own: own.path)
    if file is not None:
        first = next((own for own in ggufs if own.path == file), None)
    else:
        models = [own for own in ggufs if not any(word in _name_of(own) for word in _OTHER_FILES)]
        heads = [own for own in ggufs if is_draft and _HEADS in _name_of(own)]
        first = _best(models, quant) or _best(heads, quant)
    if first is None:
        what = file or (f"model with {quant} in its name" if quant else "GGUF model")
        names = [own.path for own in ggufs if _part_no(own) == 1]
        more = f", and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
        known = f"; it has {', '.join(names[:_MOST_LISTED])}{more}" if names else ""
        raise ModelError(f"{repo} has no {what}{known}")
    match = _PART.fullmatch(first.path)
    if match is None:
        return (first,)
    n_parts = int(match["count"])
    names = [f"{match['prefix']}-{i:05d}-of-{n_parts:05d}.gguf" for i in range(1, n_parts + 1)]
    parts = {own.path: own for own in ggufs}
    if missing := [name for name in names if name not in parts]:
        raise ModelError(f"{repo} lacks {missing[0]}, one of {n_parts} parts of the model")
    return tuple(parts[name] for name in names)


def _best(models: Sequence[HubFile], quant: str) -> HubFile | None:
    firsts = [own for own in models if _part_no(own) == 1]
    for wanted in (quant,) if quant else _USUAL_QUANTS:
        pattern = re.compile(f"{re.escape(wanted)}[.-]", re.IGNORECASE)
        if (found := next((own for own in firsts if pattern.search(own.path)), None)) is not None:
            return found
    return None if quant else next(iter(firsts), None)


def _name_of(file: HubFile) -> str:
    return file.path.rpartition("/")[2]


def _part_no(file: HubFile) -> int:
    match = _PART.fullmatch(file.path)
    return int(match["no"]) if match else 1
