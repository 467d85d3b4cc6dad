"""Models on their device slots: seated in the core, loaded, started, watched, stopped.

A device slot is one model on one device with a worker thread of its own. `cpu:0`, `cpu:1`, ... share
the cores and the weights of the machine; each has a context, and so a KV budget, of its own.

    seat       at the start: the core has a place for the device slot, where it rests and nobody can start
    take up    a worker has been opened on it (engine/loading.py): its thread starts, requests come
    leave      it rests, runs empty, the worker is closed; the seat stays for the next one
    again      it died: another one is opened beside what is left of it (engine/keeper.py)
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lqs.config import Config
from lqs.engine.anew import Anew
from lqs.engine.catalog import Entry, check_limits
from lqs.engine.loading import Loader
from lqs.engine.opening import Seat
from lqs.engine.plan import Plan
from lqs.engine.routing import Routing
from lqs.engine.seats import Orders, Seats
from lqs.engine.served import Served
from lqs.engine.slot import NoWorker, Slot
from lqs.engine.weights import free_weights, weights_of

if TYPE_CHECKING:
    from pathlib import Path

    from lqs._core import Scheduler
    from lqs.engine.library import Model

# Runs a function in the thread that owns the device slots.
Tell = Callable[[Callable[[], None]], object]


class Models:
    """All that is served, under names.

    Owner: the event loop, but for `load_residents`, `load_one`, `open_again` and `leave`, which threads of their
    own run; what they open they hand over.
    """

    def __init__(
        self, config: Config, entries: Sequence[Entry], plans: Sequence[Plan], scheduler: Scheduler, loader: Loader
    ) -> None:
        self._config = config
        self._entries = entries
        self._is_starting = True
        self._came: Callable[[Served], None] = lambda served: None
        self._loaded: Callable[[Served], None] = lambda served: None
        self._scheduler = scheduler
        self._loader = loader
        self._served = {
            entry.name: Served(entry.config, entry.path, index, entry.name, entry.fallback)
            for index, entry in enumerate(entries)
        }
        self._routing = Routing([(entry.name, entry.model.share, entry.model.aliases) for entry in entries])
        self._plans = dict(zip(self._served, plans, strict=True))
        self._seats = Seats(config, scheduler, plans[0].machine)
        for served, plan in zip(self._served.values(), plans, strict=True):
            served.n_ctx = plan.request_tokens_max
            self._seats.take(served, plan)
        loader.check_drill(len(self._seats))
        self._anew = Anew()
        # Weights of earlier lives with the dead device slots that a thread may stand in, by model.
        self._kept: defaultdict[str, list[tuple[Model, list[Slot]]]] = defaultdict(list)

    @property
    def path(self) -> Path:
        """The file of the first model."""
        return next(iter(self._served.values())).path

    @property
    def load_progress(self) -> float:
        """Grows while a load gets on: what is read of the weights, and device slots that are open."""
        return sum(served.progress + len(served.slots) for served in self._served.values())

    @property
    def is_loading(self) -> bool:
        """Whether a device slot that is to be there from the start is not there yet."""
        return self._is_starting

    @property
    def has_healthy_device(self) -> bool:
        """Whether anything can run, or could if it were asked for."""
        return any(served.has_healthy_device or served.is_on_demand for served in self._served.values())

    @property
    def slots(self) -> Iterator[Slot]:
        """All device slots of models that are there."""
        return (slot for served in list(self._served.values()) if not served.is_absent for slot in list(served.slots))

    def when_there(self, came: Callable[[Served], None], loaded: Callable[[Served], None]) -> None:
        """While the server starts: `came` is called as a model's first device slot takes work, `loaded` at last."""
        self._came, self._loaded = came, loaded

    def obey(self, orders: Orders) -> None:
        """Heed what an operator has said of device slots, whatever becomes of these."""
        self._seats.orders = orders
        for served in self._served.values():
            served.is_closed = partial(orders.is_closed, served.index)

    def names(self) -> list[str]:
        """The names of all models."""
        return list(self._served)

    def all(self) -> list[Served]:
        """All models."""
        return list(self._served.values())

    def check_limits(self, config: Config) -> None:
        """Raises ConfigError for a limit of a model that is not served."""
        check_limits(config, self._entries)

    def seats_of(self, served: Served) -> list[Seat]:
        """Its device slots, there or not, by their places in the core."""
        return self._seats.of(served)

    def plan_of(self, served: Served) -> Plan:
        """What is planned for a model."""
        return self._plans[served.name]

    def find(self, name: str) -> Served | None:
        """The model of that name; nobody's turn."""
        found = self._routing.find(name)
        return None if found is None else self._served[found]

    def find_all(self, name: str) -> list[Served]:
        """The model of that name, or all versions that are behind it."""
        return [self._served[found] for found in self._routing.all_of(name)]

    def route(self, name: str | None, version: str) -> Served | None:
        """The model that is to answer a request for that name, or for none: of several versions whose turn it is."""
        found = self._routing.route(name or self._routing.first, version, self._can_serve)
        return None if found is None else self._served[found]

    def fallback_of(self, served: Served) -> Served | None:
        """The model that may answer in its place."""
        return self._served.get(served.fallback)

    # Coming.

    def load_residents(self, tell: Tell = lambda do: do()) -> Plan:
        """Load all that is not on demand; takes long. The first one's plan. Raises StartError."""
        residents = [served for served in self._served.values() if not served.is_on_demand]
        for served in residents:
            self.load_one(served, tell)
            tell(partial(self._loaded, served))
        tell(self._end_start)
        return self._plans[next(iter(self._served))]

    def load_one(self, served: Served, tell: Tell = lambda do: do()) -> None:
        """Load a model and open its device slots, each of which takes work at once. Raises StartError."""

        def hand_over(slot: Slot) -> None:
            tell(partial(self._take_up, served, slot))

        self._loader.load(served, self._seats.of(served), self._plans[served.name], hand_over)

    def replan(self, served: Served, plan: Plan) -> None:
        """Plan a model anew before it is loaded again, for the same devices; what died gets another seat.

        Raises DeviceError where there are as many seats as there may be.
        """
        # So many sequences have their places in the core.
        plan = replace(plan, num_extra=self._plans[served.name].num_extra)
        self._seats.renew(served, plan)
        self._plans[served.name] = plan

    # Going.

    def close_to_newcomers(self, served: Served) -> None:
        """Nobody starts on its device slots any more, and none of them is opened anew."""
        self._anew.close_off(served)
        for slot in served.slots:
            self._scheduler.rest_slot(slot.number)

    def is_empty(self, served: Served) -> bool:
        """Whether nothing runs on its device slots, and nothing will."""
        accounts = self._scheduler.slots()
        mine = [accounts[slot.number] for slot in served.slots]
        is_over = all(each["is_dead"] or (each["is_drained"] and not each["num_running"]) for each in mine)
        return is_over and not self._anew.is_opening(served, lambda number: bool(accounts[number]["is_dead"]))

    def leave(self, served: Served, limit_s: float) -> bool:
        """Close the workers of an empty model and free its weights; False if a thread stands in them. Blocks."""
        slots, served.slots = served.slots, []
        for slot in [*reversed(slots), *self._anew.pop_spare(served)]:
            if not slot.close(limit_s):
                self._anew.leave(served, slot)
        return self._free(served)

    # Again.

    def add_again(self, slot: Slot) -> int:
        """A place in the core for a device slot that is opened anew; nobody starts there yet.

        Raises ValueError when there are as many as there may be.
        """
        served = self._served_of(slot)
        return self._seats.add(served, self._plans[served.name], slot.place).number

    def open_again(self, slot: Slot, number: int) -> Slot:
        """Open it anew, beside what is left of it: a thread of its own calls this. Raises DeviceError."""
        served = self._served_of(slot)
        with self._anew.opening(served, number) as opened:
            plan = self._plans[served.name]
            seat = replace(self._seats.of(served)[slot.place], number=number, plan=plan.slots[slot.place])
            opened.append(self._loader.open_one(served, seat, plan))
        return opened[0]

    def replace(self, slot: Slot, new: Slot) -> None:
        """Let the new one stand for the old one, which is never freed, and start it."""
        served = self._served_of(slot)
        self._anew.take(served, new, slot)
        served.slots = [new if each is slot else each for each in served.slots]
        self._seats.hand_over(served, new)
        served.fit(self._plans[served.name])
        self._start(new)

    def snapshots(self) -> Mapping[str, Mapping[str, Any]]:
        """The published counters of every device slot, by device."""
        now_ns, stall_s = time.monotonic_ns(), self._config.engine.stall_s
        return {
            slot.device: {
                **slot.worker.snapshot(),
                "is_healthy": slot.is_healthy(now_ns, stall_s),
                "state": slot.state,
                "slot": slot.number,
            }
            for slot in self.slots
        }

    def set_weight(self, slot: int, weight: float) -> None:
        """Give a device slot, by its number for an operator, another weight. Raises ValueError."""
        self._seats.set_weight(slot, weight)

    def set_weights(self, config: Config) -> None:
        """Give the device slots the weights of a config that was read again."""
        self._seats.set_weights(config)

    def close(self, limit_s: float) -> bool:
        """Stop every worker, then free contexts and weights; False if a thread did not end."""
        # What does not end keeps nobody else from being closed.
        have_left = [self.leave(served, limit_s) for served in reversed(self._served.values())]
        return all(have_left) and not any(self._kept.values())

    def _free(self, served: Served) -> bool:
        """Free a model's weights, also of its earlier lives, but for those that somebody stands in.

        Each life had its own, so who died in one keeps none of another. False if any of this one are kept.
        """
        weights, served.weights = served.weights, {}
        served.forget()
        left, seats = self._anew.pop_left(served), self._seats.of(served)
        stands_in = {where: [slot for slot in left if weights_of(seats[slot.place]) == where] for where in weights}
        kept = [(model, slots) for model, slots in self._kept[served.name] if not free_weights(model, slots)]
        new = [(weights[where], slots) for where, slots in stands_in.items() if not free_weights(weights[where], slots)]
        self._kept[served.name] = kept + new
        return not new

    def _end_start(self) -> None:
        self._is_starting = False

    def _can_serve(self, name: str) -> bool:
        served = self._served[name]
        is_there = served.has_healthy_device or (served.is_on_demand and served.is_loading)
        return is_there and not served.is_closed()

    def _served_of(self, slot: Slot) -> Served:
        """The model that a device slot is for."""
        return next(served for served in self._served.values() if slot in served.slots)

    def _take_up(self, served: Served, slot: Slot) -> None:
        """A device slot is open, or stands there and says why it is not."""
        served.slots = sorted([*served.slots, slot], key=lambda each: each.place)
        if isinstance(slot.worker, NoWorker):
            return
        self._start(slot)
        served.fit(self._plans[served.name])
        is_first, served.is_loading, served.is_absent = served.is_loading, False, False
        # One on demand is there when all of it is, whenever it comes.
        if is_first and self._is_starting and not served.is_on_demand:
            self._came(served)

    def _start(self, slot: Slot) -> None:
        """Start its worker, and let requests come to it."""
        slot.start()
        self._scheduler.set_stall(slot.number, slot.stall_ns(self._config.engine.stall_s))
        self._scheduler.rest_slot(slot.number, False)
