"""All kinds of drafters, by the names that users give them. A new one is a file beside this one, and a row here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ggpipe.core.drafters.base import Drafter, DraftPipeline, TextDrafter


def _made_by(module: str, name: str) -> Callable[..., Any]:
    """A class of a module beside this one, which is loaded when a drafter is made: options name drafters, too."""

    def make(*arguments: Any) -> Any:
        return getattr(importlib.import_module(f"ggpipe.core.drafters.{module}"), name)(*arguments)

    return make


MTP = "mtp"
"""The kind whose model is the target itself."""
WITH_MODEL: Mapping[str, Callable[[int, DraftPipeline], Drafter]] = {
    "draft": _made_by("draft_model", "DraftModel"),
    "eagle3": _made_by("eagle", "EagleHead"),
    "dflash": _made_by("dflash", "DFlashHead"),
    MTP: _made_by("mtp", "MtpLayers"),
}
"""Made with the id of the drafter. Each loaded draft model has one, by its architecture (`kind_of`), and so have a
target's MTP layers."""

GRAMMAR = "grammar"
"""The kind that drafts for requests with a grammar only."""
WITHOUT_MODEL: Mapping[str, Callable[[int], TextDrafter]] = {
    "ngram": _made_by("ngram", "Ngrams"),
    GRAMMAR: _made_by("grammar", "GrammarDrafter"),
}
"""Made with the id of the drafter. Each engine has one of each kind, which all of its requests share."""

HEADS: Mapping[str, str] = {"eagle3": "an EAGLE-3 head", "dflash": "a DFlash head"}
"""Those with a model that read the target's states: what people call the model."""

_ALIASES = {
    "draft-simple": "draft",
    "draft-eagle3": "eagle3",
    "draft-mtp": MTP,
    "draft-dflash": "dflash",
    "draft-dspark": "dflash",
    "dspark": "dflash",
    "ngram-simple": "ngram",
    "ngram-map-k": "ngram",
    "ngram-map-k4v": "ngram",
    "ngram-mod": "ngram",
    "ngram-cache": "ngram",
}
"""llama.cpp's names, and a kind of DFlash heads."""


def kind_of(architecture: str) -> str:
    """The kind of a draft model's drafter."""
    return architecture if architecture in WITH_MODEL else next(iter(WITH_MODEL))


def has_window(kind: str) -> bool:
    """Whether such a drafter may see less than all of a text: draft models, but no draft heads."""
    return kind in WITH_MODEL and not reads_states(kind)


def reads_states(kind: str) -> bool:
    """Whether a drafter of this kind reads states of the target."""
    return kind == MTP or kind in HEADS


def sharing(kinds: Mapping[int, str]) -> tuple[int, ...]:
    """Of drafters with a model, by their ids, those that are sent the draft tokens of others."""
    return tuple(drafter for drafter, kind in kinds.items() if not reads_states(kind))


def model_of(kind: str) -> str:
    """What people call the model that a drafter of this kind needs."""
    return "the model's MTP layers" if kind == MTP else HEADS.get(kind, "a draft model")


def kinds(models: Sequence[str]) -> tuple[str, ...]:
    """The kind of each drafter of an engine whose draft models' drafters, which come first, are of these kinds; its
    place is its id."""
    return (*models, *WITHOUT_MODEL)


def labels(models: Sequence[str]) -> tuple[str, ...]:
    """What people call each of these drafters: `draft`, of several `draft model 1` and so on; else its kind."""
    several = {kind for kind in models if models.count(kind) > 1}
    return tuple(f"{kind} model {number + 1}" if kind in several else kind for number, kind in enumerate(kinds(models)))


def chosen(names: Sequence[str] | None, models: Sequence[str]) -> tuple[int, ...]:
    """The ids of the drafters that a request names, in an engine with drafters of these kinds for its draft models.
    None: all of them, or none where there is no draft model."""
    own = kinds(models) if models or names is not None else ()
    return tuple(drafter for drafter, kind in enumerate(own) if names is None or kind in names)


def most_chosen(names: Sequence[str] | None, n_models: int) -> int:
    """How many drafters a request that names these may have, in an engine with draft models of any kind, MTP layers
    among them. Those without a model count as one: they seldom name different tokens."""
    if names is None:
        return n_models + (n_models > 0)
    has_models, has_others = (any(name in kinds for name in names) for kinds in (WITH_MODEL, WITHOUT_MODEL))
    return n_models * has_models + has_others


def read_names(text: str) -> tuple[str, ...]:
    """Names of drafters as users write them: separated by commas; `none` stands for no name. Raises ValueError with
    what to write instead."""
    names = tuple(dict.fromkeys(_ALIASES.get(word, word) for word in map(str.strip, text.split(","))))
    if names == ("none",):
        return ()
    known = (*WITH_MODEL, *WITHOUT_MODEL)
    if any(name not in known for name in names):
        raise ValueError(f"name one or more of {', '.join(known)}, separated by commas, or none")
    return names
