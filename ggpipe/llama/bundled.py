"""The models that come with ggpipe: a target and its draft, as they are, and at a size where speculation pays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ggpipe.errors import RunError
from ggpipe.launch.cache_folder import cache_folder, remove_others, whole_file

_MODELS = Path(__file__).parents[1] / "models"
_KIND = "models"
_FORMAT = 2  # goes up when what is written changes
_WIDEN = 4
_TARGET_DEEPEN, _DRAFT_DEEPEN = 5, 1


@dataclass(frozen=True)
class ModelPair:
    """A target and its draft."""

    target: Path
    draft: Path


BUNDLED_PAIR = ModelPair(_MODELS / "tales-target.gguf", _MODELS / "tales-draft.gguf")
"""7.3 and 0.9 million parameters. A target so small takes less time for a token than a message between ranks."""


def inflated_pair(on_progress: Callable[[int, int], None] = lambda done, total: None) -> ModelPair:
    """The bundled pair at the cost of 413 and 7.2 million parameters (439 and 8 MB, most of it holes), from the cache.

    The target takes about 25 ms for a token on one core of 2024. Files that are not there are made in a moment, those
    of other models and other versions removed; `on_progress` is called with the bytes made and the bytes to make.
    Raises RunError when they cannot be written.
    """
    folder = cache_folder(_KIND)
    pair = ModelPair(
        _inflated_path(folder, BUNDLED_PAIR.target, _TARGET_DEEPEN),
        _inflated_path(folder, BUNDLED_PAIR.draft, _DRAFT_DEEPEN),
    )
    if pair.target.exists() and pair.draft.exists():
        return pair
    from ggpipe.llama.inflate import Inflation  # with the package gguf, which only those need who inflate

    work = {
        pair.target: Inflation(BUNDLED_PAIR.target, _WIDEN, _TARGET_DEEPEN),
        pair.draft: Inflation(BUNDLED_PAIR.draft, _WIDEN, _DRAFT_DEEPEN),
    }
    total = sum(inflation.n_bytes for inflation in work.values())
    done = 0

    def on_bytes(n: int) -> None:
        nonlocal done
        done += n
        on_progress(done, total)

    try:
        for path, inflation in work.items():
            with whole_file(path) as unfinished:
                inflation.write(unfinished, on_bytes)
        remove_others(folder, (pair.target, pair.draft))
    except OSError as e:
        raise RunError(
            f"cannot write the inflated models to {folder}: {e.strerror or e}; "
            "make room there (40 MB, or 450 MB where files cannot have holes), or set XDG_CACHE_HOME to another folder"
        ) from e
    return pair


def _inflated_path(folder: Path, source: Path, deepen: int) -> Path:
    """Where the inflated model is kept: its name says what it was made of, and how."""
    digest = hashlib.sha256(f"{_FORMAT} {_WIDEN} {deepen} ".encode() + source.read_bytes())
    return folder / f"{source.stem}-inflated-{digest.hexdigest()[:16]}.gguf"
