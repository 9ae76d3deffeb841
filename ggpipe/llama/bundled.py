"""The models that come with ggpipe: a target and its draft, as they are, and at a size where speculation pays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ggpipe.errors import RunError
from ggpipe.launch.cache_folder import cache_folder, remove_others, whole_file

_MODELS = Path(__file__).parents[1] / "models"
_FORMAT = 2  # goes up when what is written changes
_WIDEN = 4
_TARGET_DEEPEN, _DRAFT_DEEPEN = 5, 1


@dataclass(frozen=True)
class ModelPair:
    """A target and its draft."""

    target: Path
    draft: Path


BUNDLED_PAIR = ModelPair(_MODELS / "tales-target.gguf", _MODELS / "tales-draft.gguf")
"""7.3 and 1.8 million parameters. A target so small takes less time for a token than a message between ranks."""
BUNDLED_HEAD = _MODELS / "tales-eagle3.gguf"
"""An EAGLE-3 head for the target."""


def inflated_pair(on_progress: Callable[[int, int], None] = lambda done, total: None) -> ModelPair:
    """The bundled pair at the cost of 413 and 14 million parameters (439 and 15 MB, most of it holes), from the cache.

    The target takes about 25 ms for a token on one core of 2024. Missing files are made in a moment, and those of other
    models and versions removed; `on_progress` is called with the bytes made and the bytes to make. Raises RunError when
    they cannot be written.
    """
    target, draft = _cached(
        "models",
        (_Inflated(BUNDLED_PAIR.target, _TARGET_DEEPEN), _Inflated(BUNDLED_PAIR.draft, _DRAFT_DEEPEN)),
        on_progress,
    )
    return ModelPair(target, draft)


def inflated_mixture() -> ModelPair:
    """`inflated_pair` with a mixture of experts as its target, which uses as many weights for a token: 2 of 16 experts.

    Its 2.3 billion parameters take 2.5 GB of memory, and 0.7 GB on disk. Raises RunError as `inflated_pair` does.
    """
    (target,) = _cached("mixtures", (_Inflated(BUNDLED_PAIR.target, _TARGET_DEEPEN, (16, 2)),))
    return ModelPair(target, inflated_pair().draft)


def inflated_hybrid() -> ModelPair:
    """`inflated_pair` with a hybrid model as its target: four layers in five are recurrent.

    Its 600 million parameters take 0.64 GB of memory, and 0.18 GB on disk. Raises RunError as `inflated_pair` does.
    """
    (target,) = _cached("hybrids", (_Inflated(BUNDLED_PAIR.target, _TARGET_DEEPEN, is_hybrid=True),))
    return ModelPair(target, inflated_pair().draft)


@dataclass(frozen=True)
class _Inflated:
    """An inflated model in the cache."""

    source: Path
    deepen: int
    experts: tuple[int, int] | None = None
    """Experts in each layer, and how many a token uses; None: a dense model."""
    is_hybrid: bool = False
    """Its new layers are recurrent."""

    @property
    def file_name(self) -> str:
        """Name of the file, which identifies the model's source and how it was made."""
        settings = f"{_FORMAT} {_WIDEN} {self.deepen} {self.experts or ''}{'hybrid' * self.is_hybrid}"
        digest = hashlib.sha256(settings.encode() + self.source.read_bytes())
        return f"{self.source.stem}-inflated-{digest.hexdigest()[:16]}.gguf"


def _cached(
    kind: str, models: Sequence[_Inflated], on_progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Path]:
    """The files of all models that one cache folder holds, made where they are missing."""
    folder = cache_folder(kind)
    paths = [folder / model.file_name for model in models]
    if all(path.exists() for path in paths):
        return paths
    from ggpipe.llama.inflate import Inflation, Mixture  # gguf is needed only to inflate
    from ggpipe.llama.inflate_hybrid import HybridInflation

    work = [
        HybridInflation(model.source, _WIDEN, model.deepen)
        if model.is_hybrid
        else Inflation(model.source, _WIDEN, model.deepen, Mixture(*model.experts) if model.experts else None)
        for model in models
    ]
    total = sum(inflation.n_bytes for inflation in work)
    done = 0

    def on_bytes(n: int) -> None:
        nonlocal done
        done += n
        on_progress(done, total)

    try:
        for path, inflation in zip(paths, work, strict=True):
            with whole_file(path) as unfinished:
                inflation.write(unfinished, on_bytes)
        remove_others(folder, paths)
    except OSError as e:
        raise RunError(
            f"cannot write the inflated models to {folder}: {e.strerror or e}; "
            f"make room there (at most {total / 1e6:.0f} MB), or set XDG_CACHE_HOME to another folder"
        ) from e
    return paths
