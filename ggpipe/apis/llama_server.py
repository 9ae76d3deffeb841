"""Bodies of llama-server's own endpoints."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ggpipe.apis.bodies import BodyPrompt, GenerationBody, PromptField, prompts_of
from ggpipe.apis.sampling import TokenId


class NativeBody(GenerationBody, kw_only=True):
    """`/completion`."""

    prompt: PromptField
    response_fields: list[str] | None = None
    """Those that the answer has; none: all."""

    @property
    def prompts(self) -> Sequence[BodyPrompt]:
        return prompts_of(self.prompt)


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`/tokenize`."""

    content: str
    add_special: bool = False
    with_pieces: bool = False


class SlotBody(msgspec.Struct, kw_only=True):
    """Of `/slots/{id_slot}`."""

    filename: str = ""


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`/detokenize`."""

    tokens: list[TokenId]
