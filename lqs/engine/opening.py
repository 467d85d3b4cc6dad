"""Opens the device slots of a model that is loaded, each in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lqs.engine.fitting import SlotPlan
from lqs.engine.slot import NoWorker, Slot
from lqs.errors import reason_of
from lqs.observe.log import Log

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a device slot in the core, and what is planned for it."""

    number: int
    device: str  # Its name, with that of the model where the model is not the first.
    place: int  # Among those of its model.
    plan: SlotPlan
    slot: int  # The device slot's number for an operator: that of its first seat.

    @property
    def cards(self) -> tuple[str, ...]:
        """The UUIDs of its GPUs."""
        return tuple(gpu.uuid for gpu in self.plan.group.gpus)


class Opening:
    """Opens the device slots of one model. `failed` are those that could not be opened.

    `open_one` opens one, `tell` hears of each that is open, `is_dead` tells what the core says of a seat.
    Owner: the thread that loads.
    """

    def __init__(
        self,
        open_one: Callable[[Seat], Slot],
        tell: Callable[[Slot], None],
        log: Log,
        is_dead: Callable[[int], bool],
    ) -> None:
        self.failed: list[Slot] = []
        self._is_dead = is_dead
        self._open_one = open_one
        self._tell = tell
        self._log = log
        self._counted: dict[str, int] = {}

    def open_all(self, seats: Sequence[Seat]) -> None:
        """Those on GPUs at the same time, those on cores one after another: they would measure each other."""
        on_gpus = [seat for seat in seats if not seat.plan.group.is_cpu]
        on_cores = [seat for seat in seats if seat.plan.group.is_cpu]
        for group in (on_gpus, *([seat] for seat in on_cores)):
            threads = [
                threading.Thread(target=self._open, args=(seat,), name="lqs-open", daemon=True) for seat in group
            ]
            for thread in threads:
                thread.start()
            for seat, thread in zip(group, threads, strict=True):
                self._wait(seat, thread)
        for slot in self.failed:
            # It counts nothing, under the same names as the others.
            slot.worker = NoWorker(slot.death, self._counted, is_parked=slot.worker.is_parked)

    def _wait(self, seat: Seat, thread: threading.Thread) -> None:
        """Until it is open, or libllama gave up in it: then its thread is parked, and so is that seat."""
        while thread.is_alive():
            thread.join(_LOOK_S)
            if thread.is_alive() and self._is_dead(seat.number):
                self._fail(seat, "libllama gave up while it was opened", is_parked=True)
                return

    def _fail(self, seat: Seat, reason: str, *, is_parked: bool = False) -> None:
        self._log.error("device slot does not open", device=seat.device, reason=reason)
        worker = NoWorker(reason, is_parked=is_parked)
        self.failed.append(Slot(seat.device, worker, seat.plan.kv_tokens, seat.number, seat.place, cards=seat.cards))

    def _open(self, seat: Seat) -> None:
        began_s = time.monotonic()
        try:
            slot = self._open_one(seat)
        except Exception as error:
            # Whatever it is: a device slot that is not told counts as one that is still to come.
            self._fail(seat, reason_of(error))
        else:
            seconds = round(time.monotonic() - began_s, 2)
            self._log.info(
                "device slot opened",
                device=seat.device,
                kv_tokens=slot.kv_tokens,
                sequences=slot.num_sequences,
                seconds=seconds,
            )
            self._counted = dict.fromkeys(slot.worker.snapshot(), 0)
            self._tell(slot)
