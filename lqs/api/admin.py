"""`/admin/...`: what only an admin key may see."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from lqs.api.errors import send_json
from lqs.api.middleware.auth import tenant_of
from lqs.api.services import Services
from lqs.errors import Forbidden


class AlertList:
    """`GET /admin/alerts`: every rule at every level, raised or not."""

    def __init__(self, services: Services) -> None:
        self._alerts = services.alerts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope)
        shown = list(self._alerts.shown(time.monotonic_ns()))
        await send_json(send, msgspec.json.encode({"object": "list", "data": shown}))


async def send_found(send: Send, shown: Sequence[dict[str, Any]], status: int = 200) -> None:
    """What a name in the path means: one thing, or a list where there are several."""
    answer = shown[0] if len(shown) == 1 else {"object": "list", "data": shown}
    await send_json(send, msgspec.json.encode(answer), status)


def check_admin(scope: Scope) -> None:
    """Raise Forbidden unless the key is an admin's; where no key is configured, everybody is one but web pages.

    A browser lets any page send such a call to this machine, and says where the page is from.
    """
    if not tenant_of(scope).is_admin:
        raise Forbidden("This path wants an admin key: lqs keys add --admin.")
    names = {name for name, _ in scope["headers"]}
    if b"origin" in names and b"authorization" not in names:
        raise Forbidden("A web page needs an admin key for this path.")
