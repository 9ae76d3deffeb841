"""How a request's tokens are sampled: llama.cpp's samplers, their order and their settings.

Names and defaults are those of llama-server's JSON, where it has the setting.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ggpipe.config.checks import MAX_TOKENS, check_finite, check_range
from ggpipe.config.samplers import SAMPLERS, samplers_by_name
from ggpipe.errors import SettingError

MODEL_KEYS = {
    "general.sampling.sequence": "samplers",
    "general.sampling.temp": "temp",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.xtc_probability": "xtc_probability",
    "general.sampling.xtc_threshold": "xtc_threshold",
    "general.sampling.penalty_last_n": "repeat_last_n",
    "general.sampling.penalty_repeat": "repeat_penalty",
    "general.sampling.mirostat": "mirostat",
    "general.sampling.mirostat_tau": "mirostat_tau",
    "general.sampling.mirostat_eta": "mirostat_eta",
}
"""Settings that a model's metadata may recommend, by their keys there."""
_DEFAULT_SAMPLERS = tuple(SAMPLERS)[:9]
_MOST_BIASES = 10_000
_MOST_PROBS = 1000
_MOST_SAMPLERS, _MOST_TEXTS, _MOST_TEXT = 64, 100, 1000


def _known(names: Iterable[str]) -> tuple[str, ...]:
    """Samplers by name, without unknown names."""

    def found() -> Iterator[str]:
        for name in names:
            with contextlib.suppress(SettingError):
                yield from samplers_by_name([name])

    return tuple(found())


@dataclass(frozen=True, kw_only=True)
class ToolSchema:
    """The schema of a value in a tool call."""

    schema: str
    """As JSON."""
    at: str
    """Where the user gave it: `tools[0].function.parameters`."""
    is_strict: bool
    """A schema that cannot be followed is an error."""
    fallback: str
    """Otherwise, the rule to use instead."""

    @staticmethod
    def rule(number: int) -> str:
        """The name of the rule for a schema, by its number."""
        return f"schema-{number}"


@dataclass(frozen=True, kw_only=True)
class CallGrammar:
    """A grammar for answers with tool calls."""

    lark: str
    """In llguidance's form of Lark, but for the rules of the schemas."""
    schemas: tuple[ToolSchema, ...]


@dataclass(frozen=True, kw_only=True)
class ReasoningMarks:
    """The marks around a model's reasoning."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    """The first one is inserted when the budget is spent."""
    is_open: bool = False
    """The prompt ends inside the reasoning."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """llama.cpp's sampler chain: logit bias, then `samplers` in their order. Mirostat replaces all of `samplers`."""

    samplers: tuple[str, ...] = _DEFAULT_SAMPLERS
    """Samplers in the order in which they are applied. Others are not applied."""
    temp: float = 0.8
    """Temperature; sampling is greedy at 0 and below."""
    dynatemp_range: float = 0.0
    """The temperature varies from `temp` minus this to `temp` plus this, with the entropy of the candidates; 0: off."""
    dynatemp_exponent: float = 1.0
    """Exponent that maps normalized entropy to temperature."""
    top_k: int = 40
    """Keep this many of the most likely tokens; all at 0 and below."""
    top_p: float = 0.95
    """Keep the most likely tokens whose probabilities add up to this; all at 1 and above."""
    min_p: float = 0.05
    """Keep tokens with at least this share of the most likely token's probability; 0 keeps all."""
    top_n_sigma: float = -1.0
    """Keep tokens whose logit is within this many standard deviations of the largest logit; all at 0 and below."""
    typical_p: float = 1.0
    """Keep the most typical tokens whose probabilities add up to this; all at 1 and above."""
    xtc_probability: float = 0.0
    """Probability of removing the most likely tokens; 0: never."""
    xtc_threshold: float = 0.1
    """Tokens at least this likely are removed, except the least likely of them; above 0.5 none."""
    repeat_last_n: int = 64
    """Number of recent tokens to which penalties apply; 0: no penalties, -1: the whole context."""
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    """Penalty of a token that would continue a repetition; 0: off."""
    dry_base: float = 1.75
    """The penalty grows by this factor per token of the repetition beyond `dry_allowed_length`."""
    dry_allowed_length: int = 2
    """Tokens that may be repeated without a penalty."""
    dry_penalty_last_n: int = 64
    """Number of recent tokens to search for repetitions; 0: DRY is off, -1: the whole context."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """Strings that end a repetition."""
    mirostat: int = 0
    """1 or 2: use this version of Mirostat, after `temp`, instead of `samplers`; 0: off."""
    mirostat_tau: float = 5.0
    """Mirostat's target entropy."""
    mirostat_eta: float = 0.1
    """Mirostat's learning rate."""
    adaptive_target: float = -1.0
    """`adaptive_p`, the last sampler, prefers tokens near this probability; below 0 it has no preference."""
    adaptive_decay: float = 0.9
    """How slowly `adaptive_p` adapts to the tokens that it has sampled, from 0 to 0.99."""
    min_keep: int = 0
    """Minimum number of tokens that top-p, min-p, typical and XTC keep."""
    stop: tuple[str, ...] = ()
    """Stop strings: generation ends when the model produces one of them, which is not part of the output."""
    n_probs: int = 0
    """Return the log-probabilities of this many of the most likely tokens with each token; 0: none."""
    post_sampling_probs: bool = False
    """Return probabilities after the samplers instead of the model's own."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias): added to the token's logit; minus infinity: the token is never sampled."""
    seed: int = -1
    """-1 chooses a random seed for each request."""
    ignore_eos: bool = False
    """Never sample the model's end-of-sequence token."""
    grammar: str = ""
    """Constrain the output with this grammar, in GBNF; empty: no constraint."""
    json_schema: str = ""
    """Constrain the output to JSON that matches this schema; empty: no constraint. Not together with `grammar`."""
    call_grammar: CallGrammar | None = None
    """Constrain the output to valid tool calls. Set for conversations with tools."""
    reasoning_budget: int = -1
    """Tokens of a reasoning in an answer to a conversation, after which its end is inserted; -1: no limit."""
    reasoning_budget_message: str = ""
    """Inserted before the end of a reasoning whose budget is spent."""
    reasoning_marks: ReasoningMarks | None = None
    """Set for conversations with a reasoning budget."""

    def __post_init__(self) -> None:
        for name in (
            "temp", "dynatemp_range", "dynatemp_exponent", "top_p", "min_p", "top_n_sigma", "typical_p",
            "xtc_probability", "xtc_threshold", "repeat_penalty", "presence_penalty", "frequency_penalty",
            "dry_multiplier", "dry_base", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay",
        ):  # fmt: skip
            check_finite(name, getattr(self, name))
        for name in self.samplers:
            if name not in SAMPLERS:
                raise SettingError("samplers", f"has no {name}", f"choose from {', '.join(SAMPLERS)}")
        if self.repeat_penalty <= 0:
            raise SettingError("repeat_penalty", f"must be above 0, got {self.repeat_penalty:g}")
        for name in ("repeat_last_n", "dry_penalty_last_n"):
            check_range(
                name, getattr(self, name), 0, MAX_TOKENS, "a number of tokens", special="-1 (the whole context)"
            )
        check_range("dry_allowed_length", self.dry_allowed_length, 0, MAX_TOKENS, "a number of tokens")
        if self.dry_base < 1:
            raise SettingError("dry_base", f"must be 1 or more, got {self.dry_base:g}")
        if abs(self.top_k) > MAX_TOKENS:
            raise SettingError("top_k", f"must be 0 (all tokens) or a number up to {MAX_TOKENS}, got {self.top_k}")
        check_range("mirostat", self.mirostat, 0, 2)
        check_range("min_keep", self.min_keep, 0, MAX_TOKENS, "a number of tokens")
        if self.adaptive_target > 1:
            raise SettingError(
                "adaptive_target", f"must be below 0 (off) or a probability from 0 to 1, got {self.adaptive_target:g}"
            )
        if not 0 <= self.adaptive_decay <= 0.99:
            raise SettingError("adaptive_decay", f"must be a number from 0 to 0.99, got {self.adaptive_decay:g}")
        check_range("seed", self.seed, 0, 2**32 - 2, special="-1 (a random one)")  # libllama: 2**32 - 1 is "random"
        if len(self.logit_bias) > _MOST_BIASES:
            raise SettingError("logit_bias", f"must have at most {_MOST_BIASES} tokens, got {len(self.logit_bias)}")
        n = self.reasoning_budget
        check_range("reasoning_budget", n, 0, MAX_TOKENS, "a number of tokens", special="-1 (no limit)")
        message = self.reasoning_budget_message
        if len(message) > _MOST_TEXT or any("\ud800" <= c <= "\udfff" for c in message):
            raise SettingError("reasoning_budget_message", f"must be UTF-8 of at most {_MOST_TEXT} characters")
        check_range("n_probs", self.n_probs, 0, _MOST_PROBS, "a number of tokens")
        if len(self.samplers) > _MOST_SAMPLERS:
            raise SettingError("samplers", f"must name at most {_MOST_SAMPLERS}, got {len(self.samplers)}")
        for name in ("stop", "dry_sequence_breakers"):
            if len(texts := getattr(self, name)) > _MOST_TEXTS:
                raise SettingError(name, f"must be at most {_MOST_TEXTS} strings, got {len(texts)}")
            for text in texts:
                if len(text) > _MOST_TEXT:
                    raise SettingError(name, f"must be strings of at most {_MOST_TEXT} characters, got {len(text)}")
                if not text or any("\ud800" <= c <= "\udfff" for c in text):
                    raise SettingError(name, f"must be strings in UTF-8 that are not empty, got {text!r}")
        for token, bias in self.logit_bias:
            if token < 0 or math.isnan(bias) or bias == math.inf:
                raise SettingError(
                    "logit_bias",
                    f"must be token ids with finite numbers or minus infinity, got {token} and {bias:g}",
                )

    @classmethod
    def of_model(cls, metadata: Mapping[str, str]) -> SamplingConfig:
        """The defaults of a model. `metadata`: its values for `MODEL_KEYS`, where malformed ones and those out of
        bounds are ignored."""
        config = cls()
        for key, text in metadata.items():
            field = MODEL_KEYS[key]
            with contextlib.suppress(ValueError, OverflowError, SettingError):
                value: Any = _known(text.split(";")) if field == "samplers" else float(text)
                value = int(value) if isinstance(getattr(cls, field), int) else value
                config = replace(config, **{field: value})
        return config

    def is_on(self, sampler: str) -> bool:
        """Whether one of `samplers` has an effect with these settings."""
        match sampler:
            case "penalties":
                on = self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
                return on and self.repeat_last_n != 0
            case "dry":
                return self.dry_multiplier != 0 and self.dry_penalty_last_n != 0
            case "top_n_sigma":
                return self.top_n_sigma > 0
            case "top_k":
                return self.top_k > 0
            case "typ_p":
                return self.typical_p < 1
            case "top_p":
                return self.top_p < 1
            case "min_p":
                return self.min_p > 0
            case "xtc":
                return self.xtc_probability > 0 and self.xtc_threshold <= 0.5
        return True

    @property
    def active_samplers(self) -> tuple[str, ...]:
        """The samplers that have an effect with these settings, in order."""
        return () if self.mirostat else tuple(name for name in self.samplers if self.is_on(name))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token, after biases and penalties, is always chosen."""
        if self.temp > 0 or self.mirostat or self.dynatemp_range > 0:
            return self.temp <= 0 and self.mirostat > 0
        is_filtered = False
        for name in self.active_samplers:
            match name:
                case "temperature":
                    return True
                case "xtc" | "typ_p" | "infill":
                    return False
                case "penalties" | "dry":
                    if is_filtered:  # the penalized best token may have been removed before
                        return False
                case _:
                    is_filtered = True
        return False

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change the logits."""
        return not {"penalties", "dry"}.isdisjoint(self.active_samplers)

    @property
    def n_best(self) -> int | None:
        """How many of the most likely tokens sampling needs; None: all of them."""
        if self.greedy:
            return None if self._raises else 1
        if self.mirostat:
            return None
        for name in self.active_samplers:
            match name:
                case "top_k":
                    return self.top_k
                case "min_p" | "adaptive_p":  # the first looks at the best one only, the second comes last
                    pass
                case "penalties" | "dry" if not self._raises:
                    pass
                case "temperature" if self.dynatemp_range <= 0:
                    if self.temp <= 0:
                        return 1
                case _:
                    return None
        return None

    @property
    def _raises(self) -> bool:
        """Whether a penalty can raise a logit, so that the best tokens after it need not be among the best before."""
        own = self.active_samplers
        negative = self.repeat_penalty < 1 or self.presence_penalty < 0 or self.frequency_penalty < 0
        return ("penalties" in own and negative) or ("dry" in own and self.dry_multiplier < 0)

    @property
    def remembers_rows(self) -> bool:
        """Whether sampling depends on the logits of earlier tokens, and not only on the tokens."""
        own = {"xtc", "adaptive_p"}.intersection(self.active_samplers)
        return not self.greedy and (self.mirostat > 0 or bool(own))
