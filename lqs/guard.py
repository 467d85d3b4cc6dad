"""Looks after the load: reads the counters, has the alerts judge them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lqs.config import Config
from lqs.observe.alerts import Alerts, Level, Reading
from lqs.observe.counts import Counts
from lqs.request import NS_PER_S
from lqs.scheduling.desk import Desk

# Classes whose entry is closed when an alert says break, the lowest first.
_NUM_TRIPPED = 1


class Guard:
    """The periodic look at the load, and at how many device slots do not work: `num_out`.

    `config` is the one that holds then. Owner: the event loop.
    """

    def __init__(
        self,
        config: Callable[[], Config],
        alerts: Alerts,
        desk: Desk,
        counts: Counts,
        *,
        num_out: Callable[[], int],
    ) -> None:
        self._config = config
        self._alerts = alerts
        self._desk = desk
        self._counts = counts
        self._num_out = num_out

    def look(self, now_ns: int) -> None:
        """Read once; `now_ns` is monotonic."""
        core = self._desk.scheduler.snapshot()
        reading = reading_of(core, self._config(), self._counts.num_too_many, now_ns)
        self._alerts.look(reading._replace(num_out=self._num_out()), now_ns)


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
    oldest_ns = [level["oldest_arrival_ns"] for level in levels if level["num_waiting"]]
    return Reading(
        depth=depth,
        fill=depth / config.queue.total,
        oldest_wait_s=max(now_ns - min(oldest_ns), 0) / NS_PER_S if oldest_ns else 0.0,
        num_started=sum(level["num_started"] for level in levels),
        wait_ns_sum=sum(level["wait_ns_sum"] for level in levels),
        num_too_many=num_too_many,
    )
