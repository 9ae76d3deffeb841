"""Tokens of the long prompt for the bundled target, and what libllama alone says after some of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ggpipe.config.sampling import SamplingConfig
from support.commands import TARGET
from support.reference import Reference

SAMPLING = SamplingConfig(temp=0.8, seed=1, ignore_eos=True)
Tokens = tuple[int, ...]

_LONG = Path(__file__).parents[2] / "prompts" / "long.txt"
_N_CTX = 1024


@cache
def words() -> Tokens:
    """The prompt's tokens."""
    with Reference(TARGET, _N_CTX, exact=True) as reference:
        return tuple(reference.tokenize(_LONG.read_text()))


@cache
def alone(prompt: Tokens, n: int) -> list[int]:
    """`n` tokens after this prompt, sampled with `SAMPLING` from exact logits."""
    with Reference(TARGET, _N_CTX, exact=True) as reference:
        return reference.generate(prompt, SAMPLING, n)
