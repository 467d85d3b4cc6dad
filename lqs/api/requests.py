"""`GET` and `DELETE /v1/requests/{id}`: how far a request is, and ending it.

Only the key that sent it finds it, and only until it is answered.
"""

from __future__ import annotations

import time

import msgspec
from starlette.types import Receive, Scope, Send

from lqs.api.errors import send_json
from lqs.api.live import Live
from lqs.api.middleware.auth import tenant_of
from lqs.api.replies import NS_PER_MS
from lqs.api.services import Services
from lqs.errors import NotFound, RequestCancelled
from lqs.request import Request, RequestState


class RequestInfo:
    """Shows a request, or cancels it."""

    def __init__(self, services: Services, live: Live) -> None:
        self._desk, self._gate = services.desk, services.gate
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry = self._live.find(tenant_of(scope), scope["path_params"]["id"])
        if entry is None:
            raise NotFound("There is no such request, or it is answered.", code="request_not_found")
        request = entry.request
        state = str(request.state)
        if scope["method"] == "DELETE":
            state = "cancelled"
            if request.handle is None:
                # Its prompt is still being made, so the core does not know it.
                entry.watch.interrupt(RequestCancelled("The request was cancelled."))
            self._desk.cancel(request)
        shape = {
            "id": request.id,
            "object": "request",
            "model": request.model,
            "state": state,
            "level": request.level,
            "position": self._position(request) if state == RequestState.WAITING else None,
            "eta_s": self._desk.eta_s(request) if state == RequestState.WAITING else None,
            "age_ms": (time.monotonic_ns() - request.arrival_ns) // NS_PER_MS,
            "prompt_tokens": request.num_prompt_tokens,
        }
        await send_json(send, msgspec.json.encode(shape))

    def _position(self, request: Request) -> int | None:
        """Its place in its lane, or among those that wait for the same model to be loaded."""
        return self._gate.place_for_model(request) or self._desk.position(request)
