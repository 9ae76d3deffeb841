"""OpenAI's `/v1/embeddings`: the body, which llama-server's endpoints share, and the reply."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from ggpipe.apis.bodies import BodyPrompt
from ggpipe.apis.completions import PromptField, prompts_of
from ggpipe.config.embeddings import MOST_NORM
from ggpipe.errors import BodyError
from ggpipe.text.embeddings import Vector

EMBEDDINGS = "/v1/embeddings"
MOST_TEXTS = 2048


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """Body of `/v1/embeddings` and `/embeddings`. `content` is llama-server's name for `input`."""

    input: PromptField | None = None
    content: PromptField | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    embd_normalize: Annotated[int, msgspec.Meta(ge=-1, le=MOST_NORM)] | None = None
    """Norm, as in `normalized`; None: the server's default."""

    @property
    def prompts(self) -> Sequence[BodyPrompt]:
        """The prompts, each of which gets its own embedding. Raises BodyError."""
        name, given = ("content", self.content) if self.input is None else ("input", self.input)
        if given is None:
            raise BodyError("`input` is missing", "input")
        found = prompts_of(given, name, MOST_TEXTS)
        if any(prompt == [] for prompt in found):
            raise BodyError(f"`{name}` is empty: give at least one token", name)
        return found

    def check(self, width: int) -> None:
        """Raises BodyError unless vectors of this many numbers are what was asked for."""
        if self.dimensions not in (None, width):
            raise BodyError(
                f"`dimensions` must be {width}, the width of the model's vectors, or omitted, got {self.dimensions}",
                "dimensions",
            )

    def norm(self, usual: int) -> int:
        """The norm to use, as for `normalized`. `usual`: the value if the body has none."""
        return usual if self.embd_normalize is None else self.embd_normalize

    def answer(self, model: str, vectors: Sequence[Vector], n_tokens: int) -> dict[str, Any]:
        """OpenAI's reply, with one vector per prompt. `n_tokens`: tokens of all prompts."""
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": i, "embedding": self._encoded(vector)}
                for i, vector in enumerate(vectors)
            ],
            "model": model,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    def _encoded(self, vector: Vector) -> list[float] | str:
        if self.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers
