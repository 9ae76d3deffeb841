"""A request as its front end states it. It travels whole from there to the head's scheduler."""

from __future__ import annotations

import msgspec

from ggpipe.config.embeddings import Pooling
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.prompt import Conversation, RequestPrompt
from ggpipe.errors import UsageError


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted, and how. A new attribute of requests is declared here, set by front ends, and read where it
    matters; nothing between them names it."""

    prompt: RequestPrompt
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn. The head adds a conversation's grammar and marks of reasoning."""
    n_predict: int = -1
    """Tokens to generate at most, those of `resumed` included; -1: until the text ends or the context is full."""
    t_max_predict_ms: int = 0
    """Milliseconds after the first token until the output ends with its next new line; 0: no limit."""
    speculation: SpeculationConfig = SpeculationConfig()
    """How draft tokens are drafted; the head turns it off where there is no draft model."""
    cache_prompt: bool = True
    """Whether to use the prefix cache: to skip the part of the prompt that it contains, and to keep the new cells."""
    resumed: tuple[int, ...] = ()
    """The first tokens of the output, which other ranks generated with the same settings and seed."""
    redrawn: tuple[int, ...] = ()
    """The places of those of them that were drawn at the second attempt (`Token.redrawn`)."""
    pooling: Pooling | None = None
    """How the prompt's embedding is made of its tokens'; None: a completion is wanted instead."""
    user: str = ""
    """Whom it is for: users take turns where requests wait."""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, bytes | tuple | Conversation):
            raise UsageError(
                "the prompt of a RequestSpec must be a text as bytes, a tuple of tokens, or a Conversation, "
                f"got {type(self.prompt).__name__}"
            )
