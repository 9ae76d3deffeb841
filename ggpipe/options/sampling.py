"""Sampling settings as a command line writes them."""

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
"""How tokens are drawn, by what is to be taken where nothing is given (`EngineClient.sampling`)."""
_BIAS = re.compile(r"(?P<token>\d+)(?P<bias>[+-].+)")


def sampling_config(options: Options, of_model: SamplingConfig | None = None) -> SamplingConfig:
    """How tokens are drawn. `of_model`: for what is not given. Raises SettingError."""
    fields = options.fields(SamplingConfig)
    for name in ("dry_sequence_breakers", "stop"):
        if name in fields and options[PromptSettings].escape:
            fields[name] = tuple(unescape(text) for text in fields[name])
    if "reasoning_budget_message" in fields and options[PromptSettings].escape:
        fields["reasoning_budget_message"] = unescape(fields["reasoning_budget_message"])
    return replace(of_model or SamplingConfig(), **fields, grammar=options[Constraint].gbnf())


def samplers(text: str) -> tuple[str, ...]:
    """Names between semicolons or commas. Raises SettingError."""
    return samplers_by_name(name.strip() for name in re.split("[;,]", text) if name.strip())


def breakers(texts: list[str]) -> tuple[str, ...] | None:
    """Texts as they are given; `none` forgets those before it. None where there are none."""
    last = max((i for i, text in enumerate(texts) if text == "none"), default=-1)
    return tuple(texts[last + 1 :]) if texts else None


def logit_bias(texts: list[str]) -> tuple[tuple[int, float], ...]:
    """`15043+1`, `15043-inf`. Raises ValueError with what to write instead."""
    return tuple(_bias(text) for text in texts)


def _bias(text: str) -> tuple[int, float]:
    match = _BIAS.fullmatch(text)
    try:
        return int(match["token"]), float(match["bias"])  # type: ignore[index]
    except (TypeError, ValueError):
        raise ValueError("write a token's number and a bias with its sign, as in 15043+1 or 15043-inf") from None
