"""Says in the log when the queue fills up and when a class is closed, once each way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lqs._core import Breaker
from lqs.observe.log import Log


def door_log(log: Log, levels: Sequence[str]) -> Callable[[int | None, int], None]:
    """What the door's changes are told to: (None, whether the warning is up) and (class, state of its breaker)."""

    def tell(level: int | None, state: int) -> None:
        if level is None and state:
            log.warning("queue nearly full")
        elif level is None:
            log.info("queue has room again")
        elif state == Breaker.BREAKER_OPEN:
            log.warning("breaker open", level=levels[level])
        elif state == Breaker.BREAKER_HALF_OPEN:
            log.info("breaker half-open", level=levels[level])
        else:
            log.info("breaker closed", level=levels[level])

    return tell
