"""Loads the weights of a model to where its device slots have them, and frees them.

Once for all CPU device slots, which share the mapped file; once for each group of GPUs. The first are read from
the disk. The system keeps the file then, so those on further GPUs load at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lqs.engine.opening import Seat
from lqs.engine.served import Served
from lqs.engine.slot import Slot
from lqs.observe.log import Log

if TYPE_CHECKING:
    from pathlib import Path

    from lqs.engine.library import Model

_CPU = "cpu"


def weights_of(seat: Seat) -> str:
    """Where the weights of a device slot lie: the same for those that share them."""
    return _CPU if seat.plan.group.is_cpu else str(seat.plan.group)


def load_weights(served: Served, seats: Sequence[Seat], make_model: Callable[[Path], Model], log: Log) -> None:
    """Load all; takes long. The first are the model's own, which know its vocabulary. Raises StartError."""
    first_of = {weights_of(seat): seat for seat in reversed(seats)}
    places = list(dict.fromkeys(map(weights_of, seats)))
    weights = {where: make_model(served.path) for where in places}
    errors: list[Exception] = []

    def load(where: str) -> None:
        log.info("loading weights", model=served.name, onto=where)
        try:
            _load_onto(weights[where], first_of[where])
        # Whatever it is: what is not loaded does not count as loaded.
        except Exception as error:
            errors.append(error)

    served.renew(weights[places[0]])
    load(places[0])
    others = [] if errors else places[1:]
    threads = [threading.Thread(target=load, args=(where,), name="lqs-weights", daemon=True) for where in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    served.weights = weights


def free_weights(model: Model, slots: Sequence[Slot]) -> bool:
    """Free these weights, unless one of the dead device slots may still stand in them."""
    # All of them: one that hung may have come to its end by now.
    are_closed = [slot.close(0) for slot in slots]
    return all(are_closed) and model.close()


def _load_onto(model: Model, seat: Seat) -> None:
    group = seat.plan.group
    if group.is_cpu:
        model.load()
    else:
        model.load([device.number for device in group.devices], seat.plan.parts)
