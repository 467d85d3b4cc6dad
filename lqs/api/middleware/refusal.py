"""Turns the errors that a route raises into answers."""

from __future__ import annotations

from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from lqs.api.errors import error_body, send_error
from lqs.api.middleware.trace import trace_of
from lqs.api.watch import ClientLeftEarly
from lqs.errors import LqsError, MethodNotAllowed, RequestCancelled
from lqs.streaming.sse import error_frame


class RefusalMiddleware:
    """Answers with the error's status and JSON; a stream that is open already ends with the error.

    `count` is told the reason of each, so that every request that does not reach the desk is counted
    here, once; of a cancelled request its end was counted there.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientLeftEarly:
            self._count("client_left")
            raise
        except (LqsError, HTTPException) as error:
            refusal = error if isinstance(error, LqsError) else _of_router(error)
            trace = trace_of(scope)
            trace.failed(refusal)
            if not isinstance(refusal, RequestCancelled):
                self._count(refusal.reason or refusal.code or refusal.type)
            if trace.status is not None:
                await send({"type": "http.response.body", "body": error_frame(error_body(refusal))})
                return
            await send_error(send, refusal)


def _of_router(error: HTTPException) -> LqsError:
    """Return our form of the one error that the router raises: it knows the path, not the method."""
    return MethodNotAllowed("This path does not take that method.", headers=dict(error.headers or {}))
