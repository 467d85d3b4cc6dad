"""Writes down what an admin has done with the running server, and who it was."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from lqs.api.admin import check_admin
from lqs.api.middleware.auth import tenant_of
from lqs.api.middleware.trace import trace_of
from lqs.errors import LqsError
from lqs.observe.log import Log

_ADMIN = "/admin/"
_LOOKS = ("GET", "HEAD", "OPTIONS")


class ActsMiddleware:
    """A line for each call under /admin that changes something, when it comes; another one if it is refused.

    Raises Forbidden for who is no admin.
    """

    def __init__(self, app: ASGIApp, log: Log) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(_ADMIN) or scope["method"] in _LOOKS:
            await self._app(scope, receive, send)
            return
        check_admin(scope)
        said = {"call": scope["path"], "by": tenant_of(scope).name, "request_id": trace_of(scope).request_id}
        # Before it is done: a drain may be waited for.
        self._log.info("an admin asks", **said)
        try:
            await self._app(scope, receive, send)
        except LqsError as error:
            self._log.info("an admin is refused", **said, code=error.code)
            raise
