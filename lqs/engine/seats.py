"""The places of the device slots in the core, and what each is given by where its device stands on the list.

A seat is made at the start; workers come to it and go. What died is never used again: another seat takes its place
among those of its model, with the same weight and lanes, and held back if an operator holds it back. For an operator
the device slot is the same as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from lqs._core import set_capacity
from lqs.config import Config
from lqs.engine.opening import Seat
from lqs.engine.plan import Machine, Plan
from lqs.engine.served import Served
from lqs.engine.slot import Slot
from lqs.errors import DeviceError, StartError
from lqs.placement.survey import Group, Survey

if TYPE_CHECKING:
    from lqs._core import Scheduler


class Orders(Protocol):
    """What an operator has said of device slots; see `Drains`."""

    def moved(self, slot: int, seat: int) -> None: ...
    def is_closed(self, model: int) -> bool: ...


class Seats:
    """The seats of all models. `orders` hears of seats that are not the first of their device slot.

    Owner: the event loop.
    """

    def __init__(self, config: Config, scheduler: Scheduler, machine: Machine) -> None:
        self._placement = config.placement
        self._scheduler = scheduler
        self.orders: Orders | None = None
        self._places = {name: place for place, name in enumerate(_names_of(machine.survey, config.engine.devices))}
        self._seats: dict[str, list[Seat]] = {}
        # By device slot: the seat that was made last, and the weight that an operator gave it.
        self._latest: dict[int, int] = {}
        self._weights: dict[int, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._seats.values()))

    def of(self, served: Served) -> list[Seat]:
        """Those of a model, by their place among them."""
        return self._seats[served.name]

    def take(self, served: Served, plan: Plan) -> None:
        """A seat for each device slot of a model."""
        self._seats[served.name] = [self._make(served, plan, place) for place in range(len(plan.slots))]

    def add(self, served: Served, plan: Plan, place: int) -> Seat:
        """Another one for a device slot. Raises ValueError: there are as many as there may be."""
        seat = self._make(served, plan, place, self.of(served)[place].slot)
        if self.orders is not None:
            self.orders.moved(seat.slot, seat.number)
        return seat

    def renew(self, served: Served, plan: Plan) -> None:
        """Plan those of a model anew; what died gets another seat. Raises DeviceError: there are as many as may be."""
        accounts = self._scheduler.slots()
        if len(plan.slots) != len(self.of(served)):
            raise DeviceError(f"{served.name}: its devices are others than at the start; restart lqs.")
        try:
            self._seats[served.name] = [
                self.add(served, plan, seat.place) if accounts[seat.number]["is_dead"] else replace(seat, plan=slot)
                for seat, slot in zip(self.of(served), plan.slots, strict=True)
            ]
        except ValueError:
            raise DeviceError(f"{served.name}: too many device slots have died; restart lqs.") from None

    def hand_over(self, served: Served, new: Slot) -> None:
        """The seat of a device slot that was opened anew stands for the one that died."""
        seats = self.of(served)
        seats[new.place] = replace(seats[new.place], number=new.number)

    def set_weight(self, slot: int, weight: float) -> None:
        """Give a device slot a weight, whatever seats it has, until the config is read again. Raises ValueError."""
        self._scheduler.set_weight(self._latest[slot], weight)
        self._weights[slot] = weight

    def set_weights(self, config: Config) -> None:
        """Give all of them, and those that come, the weights of a config that was read again."""
        self._placement = config.placement
        self._weights.clear()
        for seats in self._seats.values():
            for seat in seats:
                place = self._place_of(seat.plan.group)
                self._scheduler.set_weight(self._latest[seat.slot], self._placement.weight_of(place))

    def _make(self, served: Served, plan: Plan, place: int, slot: int = -1) -> Seat:
        """A seat for a device slot, or for one that has none yet. It rests there until a worker runs."""
        engine, planned = served.whole_config.engine, plan.slots[place]
        at = self._place_of(planned.group)
        number = self._scheduler.add_device_slot(
            model=served.index,
            kv_tokens=planned.kv_tokens,
            num_sequences=engine.parallel,
            num_extra=plan.num_extra,
            weight=self._weights.get(slot, self._placement.weight_of(at)),
            lanes=self._placement.lanes_of(at),
            token_bytes=plan.kv_bytes_per_token,
            is_resting=True,
        )
        # The next worker may have more.
        if planned.num_sequences < engine.parallel:
            set_capacity(self._scheduler, number, planned.kv_tokens, 0, planned.num_sequences)
        slot = number if slot < 0 else slot
        self._latest[slot] = number
        # A device has a slot for each model.
        device = str(planned.group) if served.index == 0 else f"{planned.group}@{served.name}"
        return Seat(number, device, place, planned, slot)

    def _place_of(self, group: Group) -> int:
        """Where its device stands in `engine.devices`, -1 where it does not."""
        return self._places.get(str(group), -1)


def _names_of(survey: Survey, listed: Sequence[str]) -> Iterator[str]:
    """What the names on a list mean: a device may have several, and models name theirs by themselves.

    One that is not here has its place nevertheless; where it matters, the plan has refused it.
    """
    for name in listed:
        try:
            yield from map(str, survey.groups([name]))
        except StartError:
            yield name
