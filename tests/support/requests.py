"""Requests: as front ends state them, and as the scheduler serves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from ggpipe.config.embeddings import Pooling
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import Adjustments, Drawing, Dry, Penalties
from ggpipe.core.prompt import RequestPrompt
from ggpipe.core.request import Request
from ggpipe.core.request_spec import RequestSpec

ITERATIVE = SpeculationConfig(mode="iterative")
DRAWN = Drawing(seed=7, samplers=(("top_k", 40.0), ("min_p", 0.05), ("temperature", 0.8)))
"""How the tokens of a request are drawn that is not greedy."""
ADJUSTED = Adjustments(
    biases=((3, 1.5), (4, -1.5)),
    penalties=Penalties(n_last=6, repeat=1.1, frequency=0.2, presence=0.5),
    dry=Dry(n_last=12, multiplier=0.8, base=1.75, allowed_length=1, breakers=(5,)),
)
"""How the logits of a request are adjusted that has penalties."""
_REMEMBERING = SamplingConfig(mirostat=2)


def asked(
    prompt: RequestPrompt,
    sampling: SamplingConfig | None = None,
    n_predict: int = -1,
    speculation: SpeculationConfig | None = None,
    resumed: Sequence[int] = (),
    **more: Any,
) -> RequestSpec:
    """A request as a front end states it."""
    return RequestSpec(
        prompt=prompt,
        sampling=sampling or SamplingConfig(),
        n_predict=n_predict,
        speculation=speculation or SpeculationConfig(),
        resumed=tuple(resumed),
        **more,
    )


def core_request(
    *,
    id: int,
    prompt: tuple[int, ...],
    n_predict: int = -1,
    speculation: SpeculationConfig = ITERATIVE,
    cache_prompt: bool = True,
    remembers_rows: bool = False,
    pooling: Pooling | None = None,
    user: str = "",
    **derived: Any,
) -> Request:
    """A request as the scheduler serves it.

    `remembers_rows`: its sampler needs the rows that it drew from.
    """
    spec = RequestSpec(
        prompt=prompt,
        sampling=_REMEMBERING if remembers_rows else SamplingConfig(),
        n_predict=n_predict,
        speculation=speculation,
        cache_prompt=cache_prompt,
        pooling=pooling,
        user=user,
    )
    return Request(id=id, spec=spec, prompt=prompt, **derived)


def changed(request: Request, **stated: Any) -> Request:
    """The same request, with something else stated by its front end."""
    return dataclasses.replace(request, spec=msgspec.structs.replace(request.spec, **stated))
