"""The places of the device slots in the core, and what each is given by where its device stands on the list.

A seat is made at the start; workers come to it and go. What died is never used again: another seat takes its place
among those of its model, with the same weight and lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

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


class Seats:
    """The seats of all models. Owner: the event loop."""

    def __init__(self, config: Config, scheduler: Scheduler, machine: Machine) -> None:
        self._placement = config.placement
        self._scheduler = scheduler
        self._places = {name: place for place, name in enumerate(_names_of(machine.survey, config.engine.devices))}
        self._seats: dict[str, list[Seat]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._seats.values()))

    def of(self, served: Served) -> list[Seat]:
        """Those of a model, by their place among them."""
        return self._seats[served.name]

    def take(self, served: Served, plan: Plan) -> None:
        """A seat for each device slot of a model."""
        self._seats[served.name] = [self.add(served, plan, place) for place in range(len(plan.slots))]

    def add(self, served: Served, plan: Plan, place: int) -> Seat:
        """One more, where it rests until a worker runs there. Raises ValueError: there are as many as there may be."""
        engine, slot = served.whole_config.engine, plan.slots[place]
        number = self._scheduler.add_device_slot(
            model=served.index,
            kv_tokens=slot.kv_tokens,
            num_sequences=engine.parallel,
            num_extra=plan.num_extra,
            weight=self._placement.weight_of(self._place_of(slot.group)),
            lanes=self._placement.lanes_of(self._place_of(slot.group)),
            token_bytes=plan.kv_bytes_per_token,
            is_resting=True,
        )
        # The next worker may have more.
        if slot.num_sequences < engine.parallel:
            set_capacity(self._scheduler, number, slot.kv_tokens, 0, slot.num_sequences)
        # A device has a slot for each model.
        device = str(slot.group) if served.index == 0 else f"{slot.group}@{served.name}"
        return Seat(number, device, place, slot)

    def renew(self, served: Served, plan: Plan) -> None:
        """Plan those of a model anew; what died gets another seat. Raises DeviceError: there are as many as may be."""
        accounts = self._scheduler.slots()
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
        seats[new.place] = Seat(new.number, new.device, new.place, seats[new.place].plan)

    def set_weights(self, config: Config) -> None:
        """Give all of them, and those that come, the weights of a config that was read again."""
        self._placement = config.placement
        for seats in self._seats.values():
            for seat in seats:
                place = self._place_of(seat.plan.group)
                self._scheduler.set_weight(seat.number, self._placement.weight_of(place))

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
