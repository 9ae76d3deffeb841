"""Keyword arguments as options, from the same table as the command line's.

A keyword is the setting's name in messages (`n_ctx`, `top_k`), except for those in `NAMES`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.errors import Setting, SettingError, Wording
from ggpipe.options.commands import ENGINE
from ggpipe.options.grammar import Constraint
from ggpipe.options.option import Option, Options
from ggpipe.options.settings import PromptSettings
from ggpipe.options.table import OPTIONS, SAMPLING

NAMES = {
    "draft.model": "draft",
    "draft.threads": "threads_draft",
    "draft.threads_batch": "threads_batch_draft",
    "draft.window": "draft_window",
}
"""Keywords of settings whose names in messages differ."""

_OF_REQUESTS = (PromptSettings, SpeculationConfig, SamplingConfig, Constraint)

_WITHOUT_FLAGS = tuple(
    Option(record=SamplingConfig, field=field, flags=(f"--{field}",), panel=SAMPLING, help=help)
    for field, help in (
        ("n_probs", "Give each token `probs`: its log-probability, and those of the N most probable tokens; 0: none."),
        ("post_sampling_probs", "Give the probabilities that the draw had, not those of the model."),
    )
)
_OF_SERVERS = ("slot_save_path",)
_KINDS: Mapping[type, str] = {bool: "True or False", int: "a whole number", float: "a number"}
ROWS: Mapping[str, Option] = {
    NAMES.get(row.name, row.name): row
    for row in (*ENGINE.options(OPTIONS), *_WITHOUT_FLAGS)
    if row.name not in _OF_SERVERS
}
"""Options of an engine, by keyword."""
REQUEST_ROWS: Mapping[str, Option] = {name: row for name, row in ROWS.items() if row.record in _OF_REQUESTS}
"""Options that may differ between requests, by keyword."""


def options_of(keywords: Mapping[str, object]) -> Options:
    """Keyword arguments as options of an engine. Raises SettingError that names the keyword."""
    _check_names(keywords, ROWS)
    given: dict[Option, Any] = {row: ENGINE.default_of(row) for row in ROWS.values()}
    for name, value in keywords.items():
        if value is not None:
            given[ROWS[name]] = _given(name, ROWS[name], value)
    return Options(ENGINE, given)


def check_request(keywords: Mapping[str, object]) -> None:
    """Raises SettingError for keywords that are not options of a request."""
    _check_names(keywords, REQUEST_ROWS)


def _check_names(keywords: Iterable[str], rows: Mapping[str, Option]) -> None:
    for name in keywords:
        if name in rows:
            continue
        if name in ROWS:
            raise SettingError(name, "is a setting of the engine, not of a request", "give it to ggpipe.Engine")
        flag = "--" + name.replace("_", "-")
        right = next((own for own, row in rows.items() if flag in re.split(r"[ /]", " ".join(row.flags))), None)
        if right is None:
            right = next(iter(difflib.get_close_matches(name, rows, 1)), None)
        hint = Wording("did you mean ", Setting(right), "?") if right is not None else ""
        raise SettingError(name, "is not an option", hint)


def _given(name: str, row: Option, value: object) -> object:
    """A value in the command line's form. Raises SettingError."""
    reads = row.reads
    if row.many:
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        return [_single(name, row, get_args(reads)[0], one) for one in values]
    return _single(name, row, reads, value)


def _single(name: str, row: Option, reads: type, value: object) -> object:
    if reads in _KINDS:
        try:
            return msgspec.convert(value, reads)
        except msgspec.ValidationError:
            raise SettingError(name, f"must be {_KINDS[reads]}, got {value!r}") from None
    if isinstance(value, str | os.PathLike):
        return Path(value) if reads is Path else os.fspath(value)
    if isinstance(value, Mapping) and (row.parse is not None or row.record is Constraint):
        return json.dumps(value)
    if row.parse is not None:
        if isinstance(value, int | float):
            return str(value)
        if isinstance(value, Sequence):
            return ",".join(map(str, value))
    raise SettingError(name, f"must be a {'path' if reads is Path else 'string'}, got {value!r}")
