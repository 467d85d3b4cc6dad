"""`POST /admin/models/{name}/drain?wait=SECONDS` and `.../undrain`: all device slots of one model."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from lqs.api.admin import check_admin
from lqs.api.devices import DeviceSlot, DeviceSlots
from lqs.api.errors import send_json
from lqs.api.services import Services
from lqs.errors import NotFound


class ModelDrain:
    """Lets nobody start on any device slot of a model, or lets them again."""

    def __init__(self, services: Services, *, undrain: bool = False) -> None:
        self._models = services.models
        self._slots = DeviceSlots(services)
        self._undrain = undrain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope)
        served = self._models.find(scope["path_params"]["model"])
        if served is None:
            raise NotFound("There is no such model; GET /v1/models lists them.", code="model_not_found")
        slots = [DeviceSlot(served, slot) for slot in served.slots]
        shown = await self._slots.set_drained(slots, scope, undrain=self._undrain)
        await send_json(send, msgspec.json.encode({"object": "list", "model": served.name, "data": shown}))
