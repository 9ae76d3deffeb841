"""One prompt, continued: by libllama, and by a session with drafters."""

from __future__ import annotations

from functools import cache

from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.engine.session import Session
from ggpipe.stats.records import RequestStats
from support.commands import ROOT, TARGET
from support.reference import Reference
from support.requests import asked

N_CTX, N_TOKENS = 512, 60
GREEDY = SamplingConfig(temp=0, ignore_eos=True)
DRAWN = SamplingConfig(temp=0.8, seed=5, ignore_eos=True)


@cache
def prompt() -> tuple[int, ...]:
    """Tokens of the beginning of a tale."""
    with Reference(TARGET, 64) as reference:
        return reference.tokenize((ROOT / "prompts" / "tale.txt").read_text())[:60]


@cache
def plain(sampling: SamplingConfig, tokens: tuple[int, ...]) -> list[int]:
    """The `N_TOKENS` tokens that libllama itself generates after a prompt, with reference kernels."""
    with Reference(TARGET, N_CTX, exact=True) as reference:
        return reference.generate(tokens, sampling, N_TOKENS, [])


def generate(
    session: Session, sampling: SamplingConfig, speculation: SpeculationConfig, tokens: tuple[int, ...] | None = None
) -> tuple[list[int], RequestStats]:
    """The `N_TOKENS` tokens that a session generates, after `prompt()` if not told otherwise."""
    stats = RequestStats()
    request = asked(tokens or prompt(), sampling, N_TOKENS, speculation)
    return [token.id for token in session.stream(request, stats) if token.id >= 0], stats
