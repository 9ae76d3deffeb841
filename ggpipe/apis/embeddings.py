"""`/v1/embeddings`: its bodies, and what it answers."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ggpipe.apis.bodies import TokenId
from ggpipe.config.embeddings import MOST_NORM
from ggpipe.errors import BodyError
from ggpipe.text.embeddings import Vector

EMBEDDINGS = "/v1/embeddings"
MOST_TEXTS = 2048


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """Of OpenAI's endpoint, and of llama-server's own. `content` is llama-server's name of `input`."""

    input: str | list[TokenId | str | list[TokenId]] | None = None
    content: str | list[TokenId | str | list[TokenId]] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    embd_normalize: int | None = None
    """As `normalized`; None: as usual."""

    @property
    def prompts(self) -> Sequence[str | list[TokenId]]:
        """One or several. Raises BodyError."""
        name, given = ("content", self.content) if self.input is None else ("input", self.input)
        if given is None:
            raise BodyError("`input` is missing", "input")
        if isinstance(given, str):
            return [given]
        tokens = [one for one in given if isinstance(one, int)]
        texts = [one for one in given if not isinstance(one, int)]
        if (tokens and texts) or len(texts) > MOST_TEXTS:
            raise BodyError(f"`{name}` must be a text, a list of tokens, or at most {MOST_TEXTS} of these", name)
        if not given or any(text == [] for text in texts):
            raise BodyError(f"`{name}` is empty: give a text of one token or more", name)
        return texts or [tokens]

    def check(self, width: int) -> None:
        """Raises BodyError for what vectors of so many numbers cannot be."""
        if self.dimensions not in (None, width):
            raise BodyError(
                f"`dimensions` must be {width}, as the model's vectors are, or left out, got {self.dimensions}",
                "dimensions",
            )
        if self.embd_normalize is not None and not -1 <= self.embd_normalize <= MOST_NORM:
            raise BodyError(
                f"`embd_normalize` must be a number from -1 to {MOST_NORM}, got {self.embd_normalize}",
                "embd_normalize",
            )

    def norm(self, usual: int) -> int:
        """How vectors are normalized, as `embeddings.normalized` says."""
        return usual if self.embd_normalize is None else self.embd_normalize

    def answer(self, model: str, vectors: Sequence[Vector], n_tokens: int) -> dict[str, Any]:
        """OpenAI's object about one vector for each prompt; `n_tokens` of all of them."""
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
