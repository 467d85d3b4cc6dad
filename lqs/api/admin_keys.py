"""`/admin/keys`: the API keys, made and revoked while the server runs, in the file that `lqs keys` writes.

Where no key file is configured there is nothing to hold, and nobody who could be asked for a key: the first
one is made by `lqs keys add --admin`.
"""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from lqs.admission.key_file import KeyRecord, check_name
from lqs.admission.keys import weight_of
from lqs.api.admin import check_admin
from lqs.api.errors import send_json
from lqs.api.intake import read_body
from lqs.api.middleware.auth import tenant_of
from lqs.api.services import Services
from lqs.api.wire import read
from lqs.errors import BadRequest, ConfigError, Conflict, NotFound


def admin_key_routes(services: Services) -> list[BaseRoute]:
    """Return the paths."""
    return [
        Route("/admin/keys", KeyList(services), methods=["GET"]),
        Route("/admin/keys", KeyAdd(services), methods=["POST"]),
        Route("/admin/keys/{name:path}", KeyRevoke(services), methods=["DELETE"]),
    ]


class NewKey(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a call that makes a key."""

    name: str
    tier: str = "normal"
    admin: bool = False


class _Keys:
    """What the calls share. Owner: the event loop."""

    def __init__(self, services: Services) -> None:
        self._ring = services.keys
        self._gate = services.gate
        self._log = services.log

    def _check(self, scope: Scope) -> None:
        """Raises Forbidden, or Conflict where there are no keys to look after."""
        check_admin(scope)
        if not self._ring.is_guarded:
            raise Conflict(
                "No key file is configured: set keys.file, make the first key with `lqs keys add --admin`, restart.",
                code="keys_not_configured",
            )

    def _shown(self, record: KeyRecord) -> dict[str, Any]:
        """What may be known of a key: neither it nor its digest."""
        config = self._gate.config
        limits = [name for name, limit in config.limits.items() if not limit.tiers or record.tier in limit.tiers]
        tier = config.tiers.get(record.tier)
        weight = record.weight if tier is None else weight_of(record, tier)
        return {
            "object": "key",
            "name": record.name,
            "prefix": record.prefix or None,
            "tier": record.tier,
            "admin": record.is_admin,
            "weight": weight,
            "limits": limits,
            "created": record.created or None,
        }


class KeyList(_Keys):
    """`GET /admin/keys`: those in force."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check(scope)
        data = [self._shown(record) for record in self._ring.records]
        await send_json(send, msgspec.json.encode({"object": "list", "data": data}))


class KeyAdd(_Keys):
    """`POST /admin/keys`: makes one, in force at once; the answer alone has the key itself."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._decoder = msgspec.json.Decoder(NewKey)
        self._depth_max = services.config.server.body_depth_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check(scope)
        wanted = await read(self._decoder, await read_body(receive), self._depth_max)
        config = self._gate.config
        try:
            check_name(wanted.name)
        except ConfigError as error:
            raise BadRequest(str(error), param="name") from None
        if wanted.tier not in config.tiers:
            raise BadRequest(f"There is no such tier; there are {', '.join(config.tiers)}.", param="tier")
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        try:
            key = self._ring.add(config, wanted.name, wanted.tier, is_admin=wanted.admin, created=today)
        except ConfigError as error:
            # It may name the file, but only who runs the server reads it.
            raise Conflict(str(error)) from None
        self._log.info("key added", name=wanted.name, tier=wanted.tier, by=tenant_of(scope).name)
        (record,) = [each for each in self._ring.records if each.name == wanted.name]
        shown = msgspec.json.encode(self._shown(record) | {"key": key})
        await send_json(send, shown, 201, [(b"cache-control", b"no-store")])


class KeyRevoke(_Keys):
    """`DELETE /admin/keys/NAME`: nobody comes in with it any more; what is inside is served."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check(scope)
        name = scope["path_params"]["name"]
        try:
            was_there = self._ring.revoke(self._gate.config, name)
        except ConfigError as error:
            raise Conflict(str(error)) from None
        if not was_there:
            raise NotFound("There is no such key; GET /admin/keys lists them.", code="key_not_found")
        self._log.info("key revoked", name=name, by=tenant_of(scope).name)
        await send_json(send, msgspec.json.encode({"object": "key", "name": name, "deleted": True}))
