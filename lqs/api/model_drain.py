"""`POST /admin/models/{name}/drain?wait=SECONDS` and `.../undrain`: all device slots of a model, or of its versions."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from lqs.api.admin import check_admin
from lqs.api.devices import DeviceSlots
from lqs.api.errors import send_json
from lqs.api.intake import find_models
from lqs.api.services import Services


class ModelDrain:
    """Lets nobody start on any device slot of a model, in memory or not, or lets them again.

    A name without its version means all versions; the answer says which model each device slot serves.
    """

    def __init__(self, services: Services, *, undrain: bool = False) -> None:
        self._models = services.models
        self._slots = DeviceSlots(services)
        self._undrain = undrain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope)
        name = scope["path_params"]["model"]
        found = find_models(self._models, name)
        slots = [each for served in found for each in self._slots.of(served)]
        shown = await self._slots.set_drained(slots, scope, undrain=self._undrain)
        await send_json(send, msgspec.json.encode({"object": "list", "model": name, "data": shown}))
