"""Lets pages of other origins call the API, if the config names them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_EXPOSED = (
    b"x-request-id, x-lqs-reason, x-lqs-queue-ms, x-lqs-priority, retry-after, retry-after-ms, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    (b"access-control-allow-headers", b"*, authorization"),
    (b"access-control-max-age", b"600"),
    (b"content-length", b"0"),
]


class CorsMiddleware:
    """Answers preflights and marks answers for the origins that may read them.

    Cookies are never used, so credentials are not allowed and "*" is safe to offer.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = self._allowed(scope)
        if origin is None:
            await self._app(scope, receive, send)
            return
        headers = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS" and _asks_first(scope):
            await send({"type": "http.response.start", "status": 204, "headers": headers + _PREFLIGHT})
            await send({"type": "http.response.body", "body": b""})
            return
        headers.append((b"access-control-expose-headers", _EXPOSED))

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        await self._app(scope, receive, send_marked)

    def _allowed(self, scope: Scope) -> bytes | None:
        """Return the request's origin if it has one that may call."""
        origin: bytes | None = dict(scope["headers"]).get(b"origin")
        is_allowed = origin in self._origins or b"*" in self._origins
        return origin if origin is not None and is_allowed else None


def _asks_first(scope: Scope) -> bool:
    return any(name == b"access-control-request-method" for name, _ in scope["headers"])
