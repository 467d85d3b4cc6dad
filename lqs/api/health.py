"""`/livez`, `/readyz`, `/health` and `/metrics`. They look at counters only, so they answer at once."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from lqs.api.errors import send_json
from lqs.api.services import Services

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_MESSAGES = {
    "model_loading": "Loading model",
    "draining": "All models are drained",
    "no_device": "No healthy device",
}


class Livez:
    """200 as long as the event loop turns."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, b'{"status":"ok"}')


class Readyz:
    """200 when requests are let in, else 503 with the reason."""

    def __init__(self, services: Services) -> None:
        self._gate = services.gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self._gate.closed_reason()
        status = 200 if reason is None else 503
        await send_json(send, msgspec.json.encode({"status": reason or "ok"}), status)


class Health:
    """The same in llama-server's shape."""

    def __init__(self, services: Services) -> None:
        self._gate = services.gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self._gate.closed_reason()
        if reason is None:
            await send_json(send, b'{"status":"ok"}')
            return
        message = _MESSAGES[reason] if self._gate.drained_at_ns is None else "Shutting down"
        error = {"code": 503, "message": message, "type": "unavailable_error"}
        await send_json(send, msgspec.json.encode({"error": error}), 503)


class MetricsPage:
    """The metrics as Prometheus reads them."""

    def __init__(self, services: Services) -> None:
        self._metrics = services.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._metrics.render()
        headers = [(b"content-type", METRICS_TYPE), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
