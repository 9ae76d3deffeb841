"""How a body says that tokens are drawn, with llama-server's names of all samplers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec

from ggpipe.config.sampling import SamplingConfig, samplers_by_letter, samplers_by_name
from ggpipe.errors import BodyError

MOST_STOPS = 64
_RANDOM_SEED = 2**32 - 1  # llama-server's number for a random one
_SAME = {
    name: kind
    for name, kind in get_type_hints(SamplingConfig).items()
    if kind in (bool, int, float, str) and name not in ("grammar", "reasoning_budget")
}
"""Fields of bodies that are fields of `SamplingConfig`, and their types."""
BODY_NAMES = {"temp": "temperature", "reasoning_budget": "reasoning_budget_tokens"}
"""What bodies call a setting, where it has another name than in the library's messages."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


if TYPE_CHECKING:

    class _SameFields(msgspec.Struct, kw_only=True):
        """Those that are read by name; mypy knows no others."""

        top_p: float | None = None
        seed: int | None = None
        post_sampling_probs: bool | None = None

else:
    _SameFields = msgspec.defstruct(
        "_SameFields", [(name, kind | None, None) for name, kind in _SAME.items()], kw_only=True
    )


class SamplingBody(_SameFields, kw_only=True):
    """How tokens are drawn, and where the text ends: the fields of `SamplingConfig`, and those that bodies have in
    another form. None: as usual."""

    temperature: float | None = None
    """`temp`, as OpenAI calls it."""
    dry_sequence_breakers: list[str] | None = None
    samplers: list[str] | str | None = None
    """Names, or letters."""
    logit_bias: dict[str, float] | list[tuple[TokenId, float | bool]] | None = None
    """By token; false: never."""
    stop: str | list[str] | None = None
    reasoning_budget_tokens: int | None = None
    """Of conversations; -1: as the server says."""
    thinking_budget_tokens: int | None = None
    """The same by llama-server's older name."""

    def sampling(self, usual: SamplingConfig) -> SamplingConfig:
        """`usual`: for what the body does not say. Raises SettingError, BodyError."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        if self.temperature is not None:
            fields["temp"] = self.temperature
        for budget in (self.thinking_budget_tokens, self.reasoning_budget_tokens):
            if budget is not None and budget != -1:
                fields["reasoning_budget"] = budget
        if isinstance(self.samplers, str):
            fields["samplers"] = samplers_by_letter(self.samplers)
        elif self.samplers is not None:
            fields["samplers"] = samplers_by_name(self.samplers)
        if self.dry_sequence_breakers is not None:
            fields["dry_sequence_breakers"] = tuple(self.dry_sequence_breakers)
        if self.seed is not None:
            fields["seed"] = _seed(self.seed)
        if self.logit_bias is not None:
            fields["logit_bias"] = _biases(self.logit_bias)
        if self.stop is not None:
            fields["stop"] = _stops(self.stop)
        return replace(usual, **{name: value for name, value in fields.items() if value is not None})


def _seed(seed: int) -> int:
    """In 32 bits: OpenAI's have 64. One that has more stays, and is refused."""
    if seed in (-1, _RANDOM_SEED):
        return -1
    return min(seed % 2**32, _RANDOM_SEED - 1) if -(2**63) <= seed < 2**63 else seed


def _stops(stop: str | list[str]) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > MOST_STOPS:
        raise BodyError(f"`stop` must have at most {MOST_STOPS} texts, got {len(texts)}", "stop")
    return tuple(filter(None, texts))


def _biases(biases: dict[str, float] | list[tuple[int, float | bool]]) -> tuple[tuple[int, float], ...]:
    found: list[tuple[int, float]] = []
    for token, bias in biases.items() if isinstance(biases, dict) else biases:
        if isinstance(token, str) and not (token.isdecimal() and token.isascii() and len(token) < 10):
            raise BodyError(f"`logit_bias` must have numbers of tokens, got {token!r}", "logit_bias")
        found.append((int(token), float("-inf") if bias is False else float(bias)))
    return tuple(found)
