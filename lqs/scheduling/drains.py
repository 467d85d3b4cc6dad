"""Which device slots take nobody for now, and what becomes of a model that has no other.

A device slot may be held back for several reasons at once: an operator drains it, its health is in
doubt. It takes requests again when the last who held it has let go. The core knows one word for
each device slot, so this is the only module that writes it.

A device slot goes by the number of its first seat in the core. One that died, or whose model has left and
come back, may have another seat: who held it back holds that one too.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lqs.request import NS_PER_S
from lqs.scheduling.desk import Desk

# Who holds a device slot back that was drained by hand.
OPERATOR = "operator"
_LOOK_S = 0.02


class Drains:
    """Holds device slots back from new requests.

    A model is closed while no device slot takes requests for it and at least one that could is held by
    the operator. Nobody comes in for it then. Who waits for it goes on waiting for `limit_s` seconds, in
    case it is opened again, and is then told.

    Owner: the event loop.
    """

    def __init__(self, desk: Desk, limit_s: float) -> None:
        self._desk = desk
        self._scheduler = desk.scheduler
        self._limit_ns = int(limit_s * NS_PER_S)
        self._holders: defaultdict[int, set[str]] = defaultdict(set)
        # Of device slots that have another seat than their first; and back.
        self._seats: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        # Model -> since when it is closed.
        self._closed: dict[int, int] = {}

    def hold(self, slot: int, now_ns: int, holder: str = OPERATOR) -> None:
        """Let nobody start on a device slot; what runs there goes on. May be repeated."""
        self._scheduler.drain_slot(self._seat_of(slot))
        self._holders[slot].add(holder)
        self.look(now_ns)

    def release(self, slot: int, now_ns: int, holder: str = OPERATOR) -> None:
        """Let go of it; if nobody else holds it, it takes requests again. May be repeated."""
        self._holders[slot].discard(holder)
        if not self._holders[slot]:
            self._scheduler.undrain_slot(self._seat_of(slot))
        self.look(now_ns)

    def moved(self, slot: int, seat: int) -> None:
        """From now on a device slot has that seat in the core, on which nobody can start yet."""
        self._seats[slot], self._slots[seat] = seat, slot
        if self.holders(slot):
            self._scheduler.drain_slot(seat)

    def holders(self, slot: int) -> list[str]:
        """Who holds a device slot back."""
        return sorted(self._holders.get(slot, ()))

    @property
    def has_closed(self) -> bool:
        """Whether any model is closed."""
        return bool(self._closed)

    def is_closed(self, model: int) -> bool:
        """Whether nobody may come in for the model of that number."""
        return model in self._closed

    def look(self, now_ns: int) -> None:
        """Open and close models by how their device slots are now, and tell those who waited for long enough."""
        if not any(self._holders.values()):
            self._closed.clear()
            return
        closed = set(self._without_takers())
        self._closed = {model: self._closed.get(model, now_ns) for model in closed}
        for model, since_ns in self._closed.items():
            if now_ns - since_ns >= self._limit_ns:
                self._desk.cancel_all("draining", waiting_for=model)

    def _without_takers(self) -> Iterator[int]:
        """The models that no device slot takes requests for because of the operator."""
        living: defaultdict[int, list[set[str]]] = defaultdict(list)
        for number, figures in enumerate(self._scheduler.slots()):
            if not figures["is_dead"]:
                living[figures["model"]].append(self._holders.get(self._slots.get(number, number), set()))
        for model, held in living.items():
            if all(held) and any(OPERATOR in holders for holders in held):
                yield model

    async def wait_empty(self, slots: Collection[int], limit_s: float) -> bool:
        """Wait until nothing runs on these and nothing can start there; False if the limit came first."""
        try:
            async with asyncio.timeout(limit_s):
                # The scheduler has no event for that, and who asks is a person.
                while not all(is_empty(self._scheduler.slots()[self._seat_of(slot)]) for slot in slots):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            return False
        return True

    def _seat_of(self, slot: int) -> int:
        return self._seats.get(slot, slot)


def is_empty(figures: Mapping[str, Any]) -> bool:
    """Whether nothing runs on a device slot and nothing can start there, by the core's figures of it."""
    return bool(figures["is_dead"] or (figures["is_drained"] and not figures["num_running"]))
