"""Endpoints about the server's state, its model and its slots."""

from __future__ import annotations

from typing import Any

import prometheus_client
from starlette.requests import Request
from starlette.responses import Response

from ggpipe.apis.decode import decode
from ggpipe.apis.llama_server import SlotBody, settings
from ggpipe.options.server import words_of
from ggpipe.server import metrics
from ggpipe.server.backend import Status
from ggpipe.server.endpoints.shared import BUILD, Server
from ggpipe.server.errors import ApiError
from ggpipe.server.json import JsonResponse
from ggpipe.text.chat.conversation import CHATML


class About:
    """The endpoints of a server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def health(self, _: Request) -> Response:
        """`/health`"""
        status = self._server.backend.status
        if status is Status.OK:
            return JsonResponse({"status": status.value})
        what = {
            Status.LOADING: "Loading model",
            Status.RESTARTING: "Restarting the ranks",
            Status.STOPPING: "Shutting down",
        }
        answer = {"status": status.value, **ApiError(503, what[status]).body}
        if status is not Status.STOPPING:
            answer["progress"] = self._server.backend.progress
        return JsonResponse(answer, 503)

    async def models(self, _: Request) -> Response:
        """`/v1/models`"""
        name = self._server.model
        as_in_ollama = {  # some clients expect it
            "name": name, "model": name, "modified_at": "", "size": "", "digest": "", "type": "model",
            "description": "", "tags": [], "capabilities": ["completion"], "parameters": "",
            "details": {
                "parent_model": "", "format": "gguf", "family": "", "families": [], "parameter_size": "",
                "quantization_level": "",
            },
        }  # fmt: skip
        return JsonResponse({"models": [as_in_ollama], "object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        """`/v1/models/{name}`"""
        model = self._model()
        if request.path_params["name"] not in model["aliases"]:
            raise ApiError(404, f"this server's only model is {model['id']}", "model")
        return JsonResponse(model)

    def _model(self) -> dict[str, Any]:
        server, about = self._server, self._server.backend.model
        meta: dict[str, Any] = {"n_ctx": server.backend.n_ctx}
        if about is not None:
            meta |= {
                "vocab_type": about.vocab_type, "n_vocab": about.n_vocab, "n_ctx_train": about.n_ctx_train,
                "n_embd": about.n_embd, "n_params": about.n_params, "size": about.n_bytes,
            }  # fmt: skip
        return {
            "id": server.model, "aliases": [*(server.config.aliases or (server.model,))],
            "tags": [*words_of(server.config.tags)], "object": "model",
            "created": int(server.backend.began), "owned_by": "ggpipe", "meta": meta,
        }  # fmt: skip

    async def props(self, _: Request) -> Response:
        """`/props`"""
        self._server.backend.check()
        sampling, about = self._server.backend.sampling, self._server.backend.model
        assert about is not None  # it is loaded
        return JsonResponse(
            {
                "default_generation_settings": {
                    "n_ctx": self._server.backend.n_ctx,
                    "params": settings(sampling, self._server.backend.n_predict),
                },
                "total_slots": self._server.backend.n_slots,
                "model_alias": self._server.model,
                "model_path": self._server.path,
                "modalities": {"vision": False, "audio": False, "video": False},
                "chat_template": self._server.chat.source or about.chat_template or CHATML,
                "bos_token": about.bos_token,
                "eos_token": about.eos_token,
                "ui": self._server.config.webui and self._server.config.static_path is None,
                "endpoint_slots": self._server.config.slots,
                "endpoint_metrics": self._server.config.metrics,
                "endpoint_props": False,
                "is_sleeping": False,
                "build_info": BUILD,
            }
        )

    async def metrics(self, _: Request) -> Response:
        """`/metrics`"""
        if not self._server.config.metrics:
            raise ApiError(501, "This server does not support metrics endpoint. Start it with `--metrics`")
        self._server.backend.measure()
        text = prometheus_client.generate_latest(metrics.registry(self._server.backend))
        headers = {"Process-Start-Time-Unix": f"{self._server.backend.began:.0f}"}  # as llama-server's
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST, headers=headers)

    async def slots(self, request: Request) -> Response:
        """`GET /slots`"""
        if not self._server.config.slots:
            raise ApiError(501, "This server does not support slots endpoint. Start it with `--slots`")
        self._server.backend.check()
        slots = self._server.backend.slots.all()
        if request.query_params.get("fail_on_no_slot") and all(slot.is_processing for slot in slots):
            raise ApiError(503, "no slot available")
        return JsonResponse([slot.figures(self._server.backend.n_ctx) for slot in slots])

    async def unsupported(self, request: Request) -> Response:
        """Endpoints of llama-server that do not exist here."""
        await self._server.bodies.read(request)  # a client that is still sending would not see the answer
        raise ApiError(501, f"{request.url.path} is not supported")

    async def slot_action(self, request: Request) -> Response:
        """`POST /slots/{id_slot}?action=...`"""
        action = request.query_params.get("action", "")
        body = await self._server.bodies.read(request)
        self._server.backend.check()
        name = decode(SlotBody, body).filename if action != "erase" else None
        return JsonResponse(await self._server.saved_slots.do(action, request.path_params["id_slot"], name))
