"""Sampling settings of a command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from ggpipe.config.samplers import samplers_by_name
from ggpipe.config.sampling import SamplingConfig
from ggpipe.options.escapes import unescape
from ggpipe.options.grammar import Constraint
from ggpipe.options.option import Options
from ggpipe.options.settings import PromptSettings

SamplingOf = Callable[[SamplingConfig], SamplingConfig]
"""Sampling settings, given the model's own (`EngineClient.sampling`) for those that the user did not set."""
_BIAS = re.compile(r"(?P<token>\d+)(?P<bias>[+-].+)")


def sampling_config(options: Options, of_model: SamplingConfig | None = None) -> SamplingConfig:
    """The sampling settings. `of_model`: for those that were not given; None: the settings are only checked, grammars
    and schemas included. Raises UsageError."""
    fields = options.fields(SamplingConfig)
    for name in ("dry_sequence_breakers", "stop", "reasoning_budget_message"):
        if name in fields and options[PromptSettings].escape:
            given = fields[name]
            fields[name] = unescape(given) if isinstance(given, str) else tuple(map(unescape, given))
    sampling = replace(of_model or SamplingConfig(), **fields, **options[Constraint].fields())
    if of_model is None and (sampling.grammar or sampling.json_schema):
        from ggpipe.text.grammar.check import Constraint as Checkable  # --help does not need it
        from ggpipe.text.grammar.check import checked

        checked(Checkable(grammar=sampling.grammar, json_schema=sampling.json_schema))
    return sampling


def samplers(text: str) -> tuple[str, ...]:
    """Names separated by semicolons or commas. Raises SettingError."""
    return samplers_by_name(name.strip() for name in re.split("[;,]", text) if name.strip())


def breakers(texts: list[str]) -> tuple[str, ...] | None:
    """The strings given, after the last `none`. None if none were given."""
    last = max((i for i, text in enumerate(texts) if text == "none"), default=-1)
    return tuple(texts[last + 1 :]) if texts else None


def logit_bias(texts: list[str]) -> tuple[tuple[int, float], ...]:
    """`15043+1`, `15043-inf`. Raises ValueError that says what to write instead."""
    return tuple(_bias(text) for text in texts)


def _bias(text: str) -> tuple[int, float]:
    match = _BIAS.fullmatch(text)
    try:
        return int(match["token"]), float(match["bias"])  # type: ignore[index]
    except (TypeError, ValueError):
        raise ValueError("write a token id and a signed bias, as in 15043+1 or 15043-inf") from None
