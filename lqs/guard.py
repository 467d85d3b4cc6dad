"""Looks after the device slots, and after the load: reads the counters, has the alerts judge them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lqs.config import Config
from lqs.observe.alerts import Alerts, Level, Reading
from lqs.observe.counts import Counts
from lqs.observe.log import Log
from lqs.request import NS_PER_S
from lqs.scheduling.desk import Desk

if TYPE_CHECKING:
    from lqs.engine.slot import Slot


# Classes whose entry is closed when an alert says break, the lowest first.
_NUM_TRIPPED = 1


class Health:
    """Says in the log when a device slot stops working, and when it works again. Owner: the event loop."""

    def __init__(self, stall_s: float, log: Log) -> None:
        self._stall_s = stall_s
        self._log = log
        self._healthy: dict[str, bool] = {}

    def look(self, slots: Iterable[Slot], now_ns: int) -> None:
        """Compare their health with what it was."""
        for slot in slots:
            is_healthy = slot.is_healthy(now_ns, self._stall_s)
            if self._healthy.get(slot.device, True) != is_healthy:
                self._tell(slot.device, is_healthy, slot.worker.death)
            self._healthy[slot.device] = is_healthy

    def _tell(self, device: str, is_healthy: bool, death: str) -> None:
        if is_healthy:
            self._log.info("device slot works again", device=device)
        else:
            reason = death or "its step does not end"
            self._log.error("device slot does not work", device=device, reason=reason)


class Guard:
    """The periodic look at the load; `config` is the one that holds then. Owner: the event loop."""

    def __init__(self, config: Callable[[], Config], alerts: Alerts, desk: Desk, counts: Counts) -> None:
        self._config = config
        self._alerts = alerts
        self._desk = desk
        self._counts = counts

    def look(self, now_ns: int) -> None:
        """Read once; `now_ns` is monotonic."""
        core = self._desk.scheduler.snapshot()
        self._alerts.look(reading_of(core, self._config(), self._counts.num_too_many, now_ns), now_ns)


def make_actions(
    config: Callable[[], Config], *, tighten: Callable[[bool], None], degrade: Callable[[bool], None], desk: Desk
) -> dict[Level, Callable[[bool], None]]:
    """What each level does. A breaker that is tripped recovers by its own rules; without breakers none is."""

    def trip(is_on: bool) -> None:
        if is_on and config().queue.break_at > 0:
            desk.entrance.trip(_NUM_TRIPPED)

    return {Level.TIGHTEN: tighten, Level.DEGRADE: degrade, Level.BREAK: trip}


def reading_of(core: Mapping[str, Any], config: Config, num_too_many: int, now_ns: int) -> Reading:
    """What the rules look at, from the core's snapshot."""
    levels: Sequence[Mapping[str, Any]] = core["levels"]
    depth = sum(level["num_waiting"] for level in levels)
    fills = [level["num_waiting"] / cap for level, cap in zip(levels, config.level_caps, strict=True) if cap]
    oldest_ns = [level["oldest_arrival_ns"] for level in levels if level["num_waiting"]]
    return Reading(
        depth=depth,
        fill=max([depth / config.queue.total, *fills]),
        oldest_wait_s=max(now_ns - min(oldest_ns), 0) / NS_PER_S if oldest_ns else 0.0,
        num_started=sum(level["num_started"] for level in levels),
        wait_ns_sum=sum(level["wait_ns_sum"] for level in levels),
        num_too_many=num_too_many,
    )
