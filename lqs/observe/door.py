"""Says in the log when the queue fills up and when a class is closed, once each way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lqs._core import Breaker
from lqs.observe.log import Log


def door_log(log: Log, levels: Sequence[str]) -> Callable[[str, int | None, int], None]:
    """What is to be told of the door's changes, see `Door.changes`."""

    def tell(what: str, level: int | None, state: int) -> None:
        name = "all" if level is None else levels[level]
        if what == "warning" and state:
            log.warning("queue nearly full", level=name)
        elif what == "warning":
            log.info("queue has room again", level=name)
        elif state == Breaker.BREAKER_OPEN:
            log.warning("breaker open", level=name)
        elif state == Breaker.BREAKER_HALF_OPEN:
            log.info("breaker half-open", level=name)
        else:
            log.info("breaker closed", level=name)

    return tell
