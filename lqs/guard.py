"""Looks after the load: reads the counters, has the alerts judge them, and lets them act."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lqs.config import Config
from lqs.observe.alerts import Alerts, Reading
from lqs.observe.counts import Counts
from lqs.request import NS_PER_S
from lqs.scheduling.desk import Desk


class Guard:
    """The periodic look at the load. Owner: the event loop."""

    def __init__(self, config: Config, alerts: Alerts, desk: Desk, counts: Counts) -> None:
        self._config = config
        self._alerts = alerts
        self._desk = desk
        self._counts = counts

    def look(self, now_ns: int) -> None:
        """Read once; `now_ns` is monotonic."""
        core = self._desk.scheduler.snapshot()
        self._alerts.look(reading_of(core, self._config, self._counts.num_too_many, now_ns), now_ns)


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
