"""`/admin/drain`, `/admin/reload`, `/admin/restart`: what else only a signal can ask of the process."""

from __future__ import annotations

import os

import msgspec
from starlette.types import Receive, Scope, Send

from lqs.api.admin import check_admin
from lqs.api.errors import send_json
from lqs.api.services import Services
from lqs.errors import BadRequest, Conflict


class ControlDrain:
    """`POST /admin/drain`: the whole server, as SIGTERM does. It ends when it has served what is in."""

    def __init__(self, services: Services) -> None:
        self._control = services.control
        self._desk = services.desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope)
        self._control.drain()
        await _say(send, 202, status="draining", requests=self._desk.num_inside)


class ControlReload:
    """`POST /admin/reload`: keys and limits again, as SIGHUP does; 400 with what is wrong changes nothing.

    The answer lists what was read and waits for a restart.
    """

    def __init__(self, services: Services) -> None:
        self._control = services.control
        self._keys = services.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope)
        reloaded = self._control.reload()
        if reloaded.problem:
            # It may name a file, but only who runs the server reads it.
            raise BadRequest(reloaded.problem, code="reload_failed")
        waiting = list(reloaded.waiting)
        await _say(send, 200, status="reloaded", keys=self._keys.num_keys, wait_for_restart=waiting)


class ControlRestart:
    """`POST /admin/restart`: have a successor take over; 409 with why there will be none. `GET`: what became of it."""

    def __init__(self, services: Services) -> None:
        self._control = services.control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope)
        if scope["method"] != "POST":
            successor, _, how = (await self._control.successor()).partition(": ")
            await _say(send, 200, pid=os.getpid(), successor=successor, how=how or None)
            return
        if reason := await self._control.restart():
            raise Conflict(f"No restart: {reason}.")
        await _say(send, 202, status="restarting", pid=os.getpid())


async def _say(send: Send, code: int, **shown: str | int | list[str] | None) -> None:
    await send_json(send, msgspec.json.encode(shown), code)
