"""Sampling settings of a command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.command_lines import options

from ggpipe.config.sampling import SamplingConfig
from ggpipe.errors import UsageError
from ggpipe.options.option import Options
from ggpipe.options.sampling import sampling_config


def given(*arguments: str) -> Options:
    return options(["-m", "m.gguf", *arguments])


def config(*arguments: str) -> SamplingConfig:
    return sampling_config(given(*arguments))


def test_nothing_given() -> None:
    assert config() == SamplingConfig()


def test_what_the_model_recommends() -> None:
    of_model = SamplingConfig(temp=0.6, top_k=20, samplers=("top_k",), seed=5)
    assert sampling_config(given(), of_model) == replace(of_model, seed=-1)
    own = sampling_config(given("--temp", "0.8", "--sampling-seq", "kt"), of_model)
    assert (own.temp, own.top_k, own.samplers) == (0.8, 20, ("top_k", "temperature"))


def test_the_order_of_samplers() -> None:
    assert config("--samplers", "top_k;Temp; min-p").samplers == ("top_k", "temperature", "min_p")
    assert config("--samplers", "top_k,temperature").samplers == ("top_k", "temperature")
    assert config("--samplers", "").samplers == ()
    assert config("--sampling-seq", "kta").samplers == ("top_k", "temperature", "adaptive_p")
    assert config("--sampler-seq", "k", "--samplers", "top_p").samplers == ("top_k",)


def test_biases() -> None:
    assert config("-l", "5+1.5", "--logit-bias", "7-2").logit_bias == ((5, 1.5), (7, -2.0))
    assert config("-l", "5-inf").logit_bias == ((5, -math.inf),)


def test_breakers() -> None:
    assert config("--dry-sequence-breaker", "\\n", "--dry-sequence-breaker", "x").dry_sequence_breakers == ("\n", "x")
    assert config("--dry-sequence-breaker", "\\n", "--no-escape").dry_sequence_breakers == ("\\n",)
    assert config("--dry-sequence-breaker", "none").dry_sequence_breakers == ()
    assert config("--dry-sequence-breaker", "x", "--dry-sequence-breaker", "none").dry_sequence_breakers == ()


def test_stop_strings() -> None:
    assert config("-r", "a\\n", "--reverse-prompt", "-x").stop == ("a\n", "-x")
    assert config("-r", "a\\n", "--no-escape").stop == ("a\\n",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config("--samplers", "top_k;x"), "`samplers` has no x: choose from penalties, dry, "),
        (lambda: config("--sampling-seq", "kz"), "`sampling_seq` has no z: choose from e .penalties., "),
        (lambda: config("-l", "a+1"), "`logit_bias` a.1: write a token id and a signed bias"),
        (lambda: config("-l", "5"), "`logit_bias` 5: write a token id and a signed bias"),
        (lambda: config("-l", "5+x"), "`logit_bias` 5.x: write a token id and a signed bias"),
        (lambda: config("-l", "5+inf"), "`logit_bias` must be token ids .*, got 5 and inf"),
        (lambda: config("-r", ""), "`stop` must be strings in UTF-8 that are not empty, got ''"),
        (lambda: config("-r", "a\udcff"), "`stop` must be strings in UTF-8 that are not empty, got 'a.+dcff'"),
        (lambda: config("--mirostat", "3"), "`mirostat` must be a number from 0 to 2, got 3"),
        (lambda: config("--dry-base", "0.5"), "`dry_base` must be 1 or more, got 0.5"),
        (lambda: config("--adaptive-target", "1.5"), "`adaptive_target` must be below 0 .*, got 1.5"),
        (lambda: config("--adaptive-decay", "1"), "`adaptive_decay` must be a number from 0 to 0.99, got 1"),
        (lambda: config("--xtc-threshold", "nan"), "`xtc_threshold` must be a finite number, got nan"),
    ],
)
def test_bad_values_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
