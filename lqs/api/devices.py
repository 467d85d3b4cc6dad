"""`/admin/devices`: the device slots, each drained, opened again and weighted by hand.

A device slot goes by its number, which it keeps whatever becomes of it, or by its name: `cpu:1@NAME` is what that
model has on the device. A device alone means all that is on it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs

import msgspec
from starlette.types import Receive, Scope, Send

from lqs.api.admin import check_admin, send_found
from lqs.api.errors import send_json
from lqs.api.intake import read_body
from lqs.api.services import Services
from lqs.api.wire import read
from lqs.engine.care import SOUND, Standing
from lqs.errors import BadRequest, NotFound
from lqs.request import NS_PER_S
from lqs.scheduling.drains import is_empty

if TYPE_CHECKING:
    from lqs.engine.opening import Seat
    from lqs.engine.served import Served
    from lqs.engine.slot import Slot

# How long a call may wait until a device slot is empty.
_WAIT_S_MAX = 3600.0
# The scheduler hears of a drain in its next round; one that is idle shows as drained at once.
_HEARD_S = 0.1
_WEIGHT_MAX = 1e6


class DeviceSlot(NamedTuple):
    """A device slot, the model that it serves, and what runs there; None while that is not there."""

    served: Served
    seat: Seat
    slot: Slot | None

    @property
    def number(self) -> int:
        """Its number in the core just now."""
        return self.seat.number if self.slot is None else self.slot.number


class DeviceSlots:
    """The device slots as an admin sees them. Owner: the event loop."""

    def __init__(self, services: Services) -> None:
        self._models = services.models
        self._scheduler = services.desk.scheduler
        self._drains = services.gate.drains
        self._keeper = services.keeper

    def all(self) -> list[DeviceSlot]:
        """Every device slot, models in their order, whether they are in memory or not."""
        return [each for served in self._models.all() for each in self.of(served)]

    def of(self, served: Served) -> Iterator[DeviceSlot]:
        """Those of a model."""
        there = {slot.place: slot for slot in served.slots}
        for seat in self._models.seats_of(served):
            yield DeviceSlot(served, seat, there.get(seat.place))

    def find(self, name: str) -> list[DeviceSlot]:
        """The one of that number or name, or all on that device. Raises NotFound."""
        found = [each for each in self.all() if name in (str(each.seat.slot), str(each.seat.plan.group))]
        found = found or [each for each in self.all() if name == f"{each.seat.plan.group}@{each.served.name}"]
        if not found:
            raise NotFound("There is no such device slot; GET /admin/devices lists them.", code="device_not_found")
        return found

    def shown(self, slots: Sequence[DeviceSlot]) -> list[dict[str, Any]]:
        """How they are now."""
        figures = self._scheduler.slots()
        return [self._shown(each, figures[each.number]) for each in slots]

    def _shown(self, each: DeviceSlot, figures: Mapping[str, Any]) -> dict[str, Any]:
        standing = SOUND if each.slot is None else self._keeper.standing_of(each.slot)
        return {
            "object": "device_slot",
            "slot": each.seat.slot,
            "device": each.seat.device,
            "model": each.served.name,
            "state": self._state(each, standing, figures),
            "health": _health(standing),
            "held_by": self._drains.holders(each.seat.slot),
            "running": figures["num_running"],
            "waiting": figures["num_waiting"],
            "sequences": figures["num_sequences"],
            "kv_tokens": {"used": figures["used"], "reserved": figures["reserved"], "total": figures["capacity"]},
            "weight": figures["weight"],
            "use_percent": figures["use_percent"],
            "steps": 0 if each.slot is None else each.slot.worker.snapshot()["num_steps"],
        }

    def _state(self, each: DeviceSlot, standing: Standing, figures: Mapping[str, Any]) -> str:
        if standing.stage.is_out:
            return standing.stage.value
        # What died has another seat when its model comes back.
        if figures["is_dead"] and each.slot is not None:
            return "dead"
        if self._drains.holders(each.seat.slot):
            return "drained" if is_empty(figures) else "draining"
        if each.served.is_absent:
            return "absent" if each.slot is None else "leaving"
        return "loading" if each.slot is None or each.served.is_loading else standing.state(each.slot)

    async def set_drained(self, slots: Sequence[DeviceSlot], scope: Scope, *, undrain: bool) -> list[dict[str, Any]]:
        """Drain or open them, wait for as long as the caller wants, and say how they are then."""
        check_admin(scope)
        wait_s = _wait_s(scope)
        change = self._drains.release if undrain else self._drains.hold
        numbers = [each.seat.slot for each in slots]
        for number in numbers:
            change(number, time.monotonic_ns())
        if not undrain:
            await self._drains.wait_empty(numbers, max(wait_s, _HEARD_S))
        return self.shown(slots)


def _health(standing: Standing) -> dict[str, Any]:
    """Why it is not as the others, and what is done about it; what does not apply is null."""
    is_out = standing.stage.is_out
    left_s = max(standing.due_ns - time.monotonic_ns(), 0) / NS_PER_S if standing.due_ns else None
    return {
        "stage": standing.stage.value,
        "reason": standing.reason or None,
        "attempts": standing.num_attempts if is_out else None,
        "attempts_left": standing.num_left if is_out else None,
        "next_attempt_s": None if left_s is None else round(left_s, 1),
    }


class DeviceList:
    """`GET /admin/devices`."""

    def __init__(self, services: Services) -> None:
        self._slots = DeviceSlots(services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope)
        shown = self._slots.shown(self._slots.all())
        await send_json(send, msgspec.json.encode({"object": "list", "pid": os.getpid(), "data": shown}))


class DeviceDrain:
    """`POST /admin/devices/{slot}/drain?wait=SECONDS` and `.../undrain`."""

    def __init__(self, services: Services, *, undrain: bool = False) -> None:
        self._slots = DeviceSlots(services)
        self._undrain = undrain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope)
        found = self._slots.find(scope["path_params"]["slot"])
        await send_found(send, await self._slots.set_drained(found, scope, undrain=self._undrain))


class Weight(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a call that gives a device slot another weight."""

    weight: float


class DeviceWeight:
    """`POST /admin/devices/{slot}/weight`; until the config is read again."""

    def __init__(self, services: Services) -> None:
        self._slots = DeviceSlots(services)
        self._models = services.models
        self._log = services.log
        self._decoder = msgspec.json.Decoder(Weight)
        self._depth_max = services.config.server.body_depth_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope)
        found = self._slots.find(scope["path_params"]["slot"])
        weight = (await read(self._decoder, await read_body(receive), self._depth_max)).weight
        if not 0 < weight <= _WEIGHT_MAX:
            raise BadRequest(f"A weight is above 0 and at most {_WEIGHT_MAX:.0f}.", param="weight")
        for each in found:
            self._models.set_weight(each.seat.slot, weight)
            self._log.info("device slot has another weight", slot=each.seat.slot, model=each.served.name, weight=weight)
        await send_found(send, self._slots.shown(found))


def _wait_s(scope: Scope) -> float:
    """How long the caller wants to wait, in seconds."""
    (text, *_) = parse_qs(scope["query_string"].decode("ascii", "replace")).get("wait", ["0"])
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= _WAIT_S_MAX:
        raise BadRequest(f"wait is a number of seconds, at most {_WAIT_S_MAX:.0f}.", param="wait")
    return wait_s
