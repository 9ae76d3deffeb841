"""Endpoints for embeddings: OpenAI's and llama-server's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ggpipe.apis.embeddings import EmbeddingBody
from ggpipe.config.embeddings import Pooling
from ggpipe.core.prompt import as_prompt
from ggpipe.core.request_spec import RequestSpec
from ggpipe.errors import SettingError
from ggpipe.server.backend import Generation
from ggpipe.server.endpoints.shared import Server
from ggpipe.server.errors import ApiError
from ggpipe.server.json import JsonResponse
from ggpipe.server.keys import user_of
from ggpipe.server.log import note_outputs
from ggpipe.server.stream import whole
from ggpipe.text.embeddings import Vector, chosen, normalized


class Embeddings:
    """The endpoints of a server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def openai(self, request: Request) -> Response:
        """`/v1/embeddings`"""
        body = await self._server.body(request, EmbeddingBody)
        if body.input is None and body.content is not None:
            return await self._native(request, body)
        pooling = self._pooling()
        if pooling == "none":
            raise ApiError(
                400,
                "without pooling each token has a vector, which this API cannot return: start the server with "
                "`--pooling` mean or last, or use /embeddings",
            )
        generations = await self._embed(request, body, pooling)
        vectors = [vector for one in generations for vector in self._vectors(body, pooling, one)]
        return JsonResponse(body.answer(self._server.model, vectors, sum(one.stats.n_prompt for one in generations)))

    async def native(self, request: Request) -> Response:
        """`/embedding`, `/embeddings`"""
        return await self._native(request, await self._server.body(request, EmbeddingBody))

    async def _native(self, request: Request, body: EmbeddingBody) -> Response:
        pooling = self._pooling()
        generations = await self._embed(request, body, pooling)
        found = ([vector.tolist() for vector in self._vectors(body, pooling, one)] for one in generations)
        return JsonResponse([{"index": i, "embedding": vectors} for i, vectors in enumerate(found)])

    def _pooling(self) -> Pooling:
        """The server's pooling, or else the model's. Raises ApiError for models that rank documents."""
        model = self._server.backend.model
        assert model is not None  # it is loaded
        try:
            return chosen(self._server.embeddings.pooling, model.pooling or "none")
        except SettingError as e:
            raise ApiError(501, "This model ranks documents: its embeddings need `--pooling`") from e

    def _vectors(self, body: EmbeddingBody, pooling: Pooling, one: Generation) -> Sequence[Vector]:
        """The vectors of a prompt; normalized if it has only one."""
        norm = body.norm(self._server.embeddings.embd_normalize)
        vectors = [np.frombuffer(data, np.float32) for data in one.feed.embedding]
        return vectors if pooling == "none" else [normalized(vector, norm) for vector in vectors]

    async def _embed(self, request: Request, body: EmbeddingBody, pooling: Pooling) -> list[Generation]:
        """Run all prompts, only a few at a time so that other clients get a turn. Raises ApiError."""
        backend, user = self._server.backend, user_of(request)
        assert backend.model is not None  # it is loaded
        body.check(backend.model.n_embd)
        specs = [RequestSpec(prompt=as_prompt(one), pooling=pooling, user=user) for one in body.prompts]
        found: list[Generation] = []
        for at in range(0, len(specs), backend.n_fair):
            found += (new := await backend.begin(specs[at : at + backend.n_fair]))
            note_outputs(request.scope, found)
            await whole(request, backend, new)
        return found
