"""Gives every request an id, writes its access log line, and answers for what nobody caught."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lqs.api.errors import send_error
from lqs.api.watch import ClientLeft
from lqs.errors import EngineFailed, LqsError
from lqs.observe.log import Log
from lqs.request import Tenant

STATUS_CLIENT_LEFT = 499
# What watches the server asks for these every second or so: their lines would bury the others.
PROBES = frozenset({"/livez", "/readyz", "/health"})
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


@dataclass(slots=True)
class Trace:
    """What is known of an HTTP request while it passes. Owner: the event loop."""

    request_id: str
    tenant: Tenant | None = None
    status: int | None = None  # None until a status line was sent.
    outcome: str | None = None  # How it failed; None if it did not. A stream's status cannot tell.

    def failed(self, error: LqsError) -> None:
        """Keep for the log how it ended: the name that the client was told."""
        self.outcome = error.reason or error.code or error.type


def trace_of(scope: Scope) -> Trace:
    """Return the trace of a request that came through the middleware."""
    trace: Trace = scope["lqs.trace"]
    return trace


class TraceMiddleware:
    """The outermost layer. What is not HTTP ends here.

    A client may name its request by `x-request-id` (letters, digits, `._-`, up to 64); any other
    value is replaced.
    """

    def __init__(self, app: ASGIApp, log: Log) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began_s = time.monotonic()
        trace = scope["lqs.trace"] = Trace(_request_id(scope))
        header = (b"x-request-id", trace.request_id.encode())

        async def send_traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        try:
            await self._app(scope, receive, send_traced)
        except ClientLeft:
            trace.status, trace.outcome = STATUS_CLIENT_LEFT, None
        except Exception as error:
            # The message may quote the prompt; the kind of the error does not.
            self._log.error("unexpected error", request_id=trace.request_id, error=type(error).__name__)
            if trace.status is not None:
                raise
            failure = EngineFailed("The server failed.", code="internal_error")
            trace.failed(failure)
            await send_error(send_traced, failure)
        finally:
            self._log_access(scope, trace, began_s)

    def _log_access(self, scope: Scope, trace: Trace, began_s: float) -> None:
        outcome = {"outcome": trace.outcome} if trace.outcome else {}
        self._log.access(
            is_probe=scope["path"] in PROBES,
            method=scope["method"],
            path=scope["path"],
            status=trace.status or STATUS_CLIENT_LEFT,
            duration_ms=(time.monotonic() - began_s) * 1000,
            request_id=trace.request_id,
            tenant=trace.tenant.name if trace.tenant else "-",
            **outcome,
        )


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _CLIENT_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(12)
