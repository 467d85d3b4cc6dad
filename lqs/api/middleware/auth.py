"""Asks for the key before anything else of a request is looked at, its body least of all."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from lqs.admission.keys import KeyRing
from lqs.api.middleware.trace import PROBES, trace_of
from lqs.errors import Unauthorized
from lqs.request import Tenant

# Exactly these paths, as the server decoded them; whatever is spelt otherwise wants a key.
PUBLIC_PATHS = PROBES
_SCHEME = b"bearer"


class AuthMiddleware:
    """Finds the tenant, or raises Unauthorized.

    Only `Authorization: Bearer KEY` counts, once; a key in the query string is not looked at.
    `is_metrics_open` lets `/metrics` be read without a key.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, *, is_metrics_open: bool) -> None:
        self._app = app
        self._keys = keys
        self._public = PUBLIC_PATHS | {"/metrics"} if is_metrics_open else PUBLIC_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in self._public:
            trace_of(scope).tenant = self._keys.find(_token(scope))
        await self._app(scope, receive, send)


def tenant_of(scope: Scope) -> Tenant:
    """Return who asks; only behind a path that wants a key."""
    tenant = trace_of(scope).tenant
    assert tenant is not None
    return tenant


def _token(scope: Scope) -> bytes | None:
    """Return the key's bytes as they came, None if there is none or more than one."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) > 1:
        raise Unauthorized
    scheme, _, token = values[0].partition(b" ") if values else (b"", b"", b"")
    return token if scheme.lower() == _SCHEME and token else None
