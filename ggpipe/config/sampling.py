"""How a request's tokens are drawn: llama.cpp's samplers, their order and their settings.

Names and defaults are those of llama.cpp's server where its JSON has them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ggpipe.config.checks import MAX_TOKENS, check_finite, check_range
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
"""All samplers that may be named, with their letters."""
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
"""Settings that a model's file may recommend, by their keys in it."""
_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
_DEFAULT_SAMPLERS = tuple(SAMPLERS)[:9]
_MOST_BIASES = 10_000
_MOST_PROBS = 1000
_MOST_SAMPLERS, _MOST_TEXTS, _MOST_TEXT = 64, 100, 1000


def samplers_by_name(names: Iterable[str]) -> tuple[str, ...]:
    """Samplers of these names, in whatever spelling llama.cpp takes (`top-k`, `topk`, `temp`). Raises SettingError."""
    spelled = {alias: name for name in SAMPLERS for alias in (name, name.replace("_", "-"), name.replace("_", ""))}
    spelled |= _ALIASES
    found = []
    for name in names:
        if name.lower() not in spelled:
            raise SettingError("samplers", f"has no {name}", f"name some of {', '.join(SAMPLERS)}")
        found.append(spelled[name.lower()])
    return tuple(found)


def samplers_by_letter(letters: str) -> tuple[str, ...]:
    """Samplers of these letters. Raises SettingError."""
    named = {letter: name for name, letter in SAMPLERS.items()}
    for letter in letters:
        if letter not in named:
            known = ", ".join(f"{letter} ({name})" for letter, name in named.items())
            raise SettingError("sampling_seq", f"has no {letter}", f"write some of {known}")
    return tuple(named[letter] for letter in letters)


def _known(names: Iterable[str]) -> tuple[str, ...]:
    """As `samplers_by_name`, without those that are not known."""

    def found() -> Iterator[str]:
        for name in names:
            with contextlib.suppress(SettingError):
                yield from samplers_by_name([name])

    return tuple(found())


@dataclass(frozen=True, kw_only=True)
class ReasoningMarks:
    """Texts between which a model thinks before it answers."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    """The first one is written where the budget is used up."""
    is_open: bool = False
    """The prompt ends inside the reasoning."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """llama.cpp's sampler chain: logit bias, `samplers` in their order, draw. Mirostat replaces all but the bias."""

    samplers: tuple[str, ...] = _DEFAULT_SAMPLERS
    """Samplers in the order in which they are applied; one that is not named is not applied."""
    temp: float = 0.8
    """Temperature; at or below 0 sampling is greedy."""
    dynatemp_range: float = 0.0
    """The temperature is between `temp` minus and plus this, by the entropy of the candidates; 0 is off."""
    dynatemp_exponent: float = 1.0
    """How the entropy becomes a temperature."""
    top_k: int = 40
    """Most probable tokens that are kept; at or below 0 all tokens are kept."""
    top_p: float = 0.95
    """The most probable tokens that add up to this are kept; from 1 on all."""
    min_p: float = 0.05
    """Tokens are kept that have at least so much of the best one's probability; 0 keeps all."""
    top_n_sigma: float = -1.0
    """Tokens are kept whose logit is within so many standard deviations of the best one's; at or below 0 all."""
    typical_p: float = 1.0
    """The most typical tokens that add up to this are kept; from 1 on all."""
    xtc_probability: float = 0.0
    """How often the most probable tokens are left out; 0 is never."""
    xtc_threshold: float = 0.1
    """Which ones: those that are at least so probable, but for the last of them; above 0.5 none."""
    repeat_last_n: int = 64
    """Tokens that penalties look back on; 0 turns penalties off, -1 takes the whole context."""
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    """Penalty of a token that goes on with a repetition; 0 is off."""
    dry_base: float = 1.75
    """It is multiplied by this for each token of the repetition beyond `dry_allowed_length`."""
    dry_allowed_length: int = 2
    """Tokens that may be repeated without penalty."""
    dry_penalty_last_n: int = 64
    """Tokens in which repetitions are searched; 0 turns DRY off, -1 takes the whole context."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """Texts over which no repetition goes on."""
    mirostat: int = 0
    """1 or 2: that version of Mirostat, with `temp` before it, in place of all samplers; 0: off."""
    mirostat_tau: float = 5.0
    """Mirostat's target entropy."""
    mirostat_eta: float = 0.1
    """Mirostat's learning rate."""
    adaptive_target: float = -1.0
    """Of `adaptive_p`, which draws at the end of the samplers: tokens near this probability are preferred; below 0 it
    draws as always."""
    adaptive_decay: float = 0.9
    """How slowly `adaptive_p` adapts to what it has drawn."""
    min_keep: int = 0
    """Tokens that top-p, min-p, typical and XTC leave at least."""
    stop: tuple[str, ...] = ()
    """Stop strings: where one of them is generated, the text ends in front of it."""
    n_probs: int = 0
    """Tokens whose log-probabilities come with each token, beside its own: the most probable ones; 0: none come."""
    post_sampling_probs: bool = False
    """They are those that the draw had, and not those of the model."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to their logits; minus infinity: never drawn."""
    seed: int = -1
    """-1 draws a new seed for each request."""
    ignore_eos: bool = False
    """The model's end of text is never sampled."""
    grammar: str = ""
    """What the text must be, in GBNF; empty: any text."""
    reasoning_budget: int = -1
    """Tokens of each reasoning in an answer to a conversation; behind them its end is written. -1: no limit."""
    reasoning_budget_message: str = ""
    """Written in front of that end."""
    reasoning_marks: ReasoningMarks | None = None
    """Set for conversations with a budget."""

    def __post_init__(self) -> None:
        for name in (
            "temp", "dynatemp_range", "dynatemp_exponent", "top_p", "min_p", "top_n_sigma", "typical_p",
            "xtc_probability", "xtc_threshold", "repeat_penalty", "presence_penalty", "frequency_penalty",
            "dry_multiplier", "dry_base", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay",
        ):  # fmt: skip
            check_finite(name, getattr(self, name))
        for name in self.samplers:
            if name not in SAMPLERS:
                raise SettingError("samplers", f"has no {name}", f"name some of {', '.join(SAMPLERS)}")
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
            raise SettingError(
                "reasoning_budget_message", f"must be a text in UTF-8 of at most {_MOST_TEXT} characters"
            )
        check_range("n_probs", self.n_probs, 0, _MOST_PROBS, "a number of tokens")
        if len(self.samplers) > _MOST_SAMPLERS:
            raise SettingError("samplers", f"must name at most {_MOST_SAMPLERS}, got {len(self.samplers)}")
        for name in ("stop", "dry_sequence_breakers"):
            if len(texts := getattr(self, name)) > _MOST_TEXTS:
                raise SettingError(name, f"must be at most {_MOST_TEXTS} texts, got {len(texts)}")
            for text in texts:
                if len(text) > _MOST_TEXT:
                    raise SettingError(name, f"must be texts of at most {_MOST_TEXT} characters, got {len(text)}")
                if not text or any("\ud800" <= c <= "\udfff" for c in text):
                    raise SettingError(name, f"must be texts in UTF-8 that are not empty, got {text!r}")
        for token, bias in self.logit_bias:
            if token < 0 or math.isnan(bias) or bias == math.inf:
                raise SettingError(
                    "logit_bias",
                    f"must be tokens, from 0 on, with finite numbers or minus infinity, got {token} and {bias:g}",
                )

    @classmethod
    def of_model(cls, metadata: Mapping[str, str]) -> SamplingConfig:
        """The defaults for a model whose file says this of `MODEL_KEYS`. What cannot be read, or is out of bounds, is
        left out."""
        config = cls()
        for key, text in metadata.items():
            field = MODEL_KEYS[key]
            with contextlib.suppress(ValueError, OverflowError, SettingError):
                value: Any = _known(text.split(";")) if field == "samplers" else float(text)
                value = int(value) if isinstance(getattr(cls, field), int) else value
                config = replace(config, **{field: value})
        return config

    def is_on(self, sampler: str) -> bool:
        """A sampler of `samplers` does something."""
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
        """Those of `samplers` that do something."""
        return () if self.mirostat else tuple(name for name in self.samplers if self.is_on(name))

    @property
    def greedy(self) -> bool:
        """The token that is the most probable one after biases and penalties is always taken."""
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
                    if is_filtered:  # the best one of fewer
                        return False
                case _:
                    is_filtered = True
        return False

    @property
    def penalizes(self) -> bool:
        """Past tokens change the logits."""
        return not {"penalties", "dry"}.isdisjoint(self.active_samplers)

    @property
    def n_best(self) -> int | None:
        """How many of the best tokens are enough to draw one, where nothing changes their order; None: only all are."""
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
        """A penalty can raise a token, so the best tokens after penalties are not among the best before them."""
        own = self.active_samplers
        negative = self.repeat_penalty < 1 or self.presence_penalty < 0 or self.frequency_penalty < 0
        return ("penalties" in own and negative) or ("dry" in own and self.dry_multiplier < 0)

    @property
    def remembers_rows(self) -> bool:
        """What is drawn depends on the logits of the text so far, and not on its tokens alone."""
        own = {"xtc", "adaptive_p"}.intersection(self.active_samplers)
        return not self.greedy and (self.mirostat > 0 or bool(own))
