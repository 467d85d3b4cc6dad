"""Alerts: what is worth waking somebody for, raised once, cleared with hysteresis; the higher levels act.

Each rule is one figure with a threshold for each level. (rule, level) is an alert of its own:

    figure     _____/~~~~~~~~~~~\\________     threshold ------------
                                 \\__________  clear_share of it -----
    alert           [ raised            |..|  cleared, after clear_s below
    log             1 line                 1 line

While any alert of a level is raised, the level's action is on: tighten the entry, degrade, break.
Figures and time come in; nothing here reads a clock.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lqs.protection import AlertsConfig
from lqs.request import NS_PER_S

# A window with fewer refusals is no sudden rise, whatever came before it.
_JUMP_MIN = 10
# Looks that are kept: two windows, however often it looks.
_LOOKS_MAX = 4096


class Level(enum.StrEnum):
    """How far the protection goes, step by step."""

    WARN = "warn"
    TIGHTEN = "tighten"
    DEGRADE = "degrade"
    BREAK = "break"


class Reading(NamedTuple):
    """What the rules look at; `num_started`, `wait_ns_sum` and `num_too_many` only grow."""

    depth: int
    fill: float  # Waiting over places, all classes together: one that is full by itself takes nothing from others.
    oldest_wait_s: float
    num_started: int
    wait_ns_sum: int  # Of those who started.
    num_too_many: int  # Refusals with 429, but for those of a limit: they say nothing about the load.
    num_out: int = 0  # Device slots that do not work.


class Switch:
    """An action that somebody else looks at. Owner: the event loop."""

    def __init__(self) -> None:
        self.is_on = False

    def __call__(self, is_on: bool) -> None:
        self.is_on = is_on


class Teller(Protocol):
    """Where the lines go."""

    def warning(self, event: str, **fields: object) -> None: ...
    def info(self, event: str, **fields: object) -> None: ...


@dataclass(slots=True)
class Alert:
    """One rule at one level. Times are monotonic nanoseconds, 0 for never."""

    rule: str
    level: Level
    threshold: float
    value: float = 0.0
    is_raised: bool = False
    changed_ns: int = 0
    below_ns: int = 0  # Since when it has been low enough to be cleared.

    def look(self, value: float, now_ns: int, clear_share: float, clear_ns: int) -> bool:
        """Take the figure's new value; True if the alert was raised or cleared by it."""
        self.value = value
        if not self.is_raised:
            return self._turn(value >= self.threshold, now_ns)
        if value >= self.threshold * clear_share:
            self.below_ns = 0
            return False
        self.below_ns = self.below_ns or now_ns
        return self._turn(now_ns - self.below_ns >= clear_ns, now_ns)

    def _turn(self, is_due: bool, now_ns: int) -> bool:
        if is_due:
            self.is_raised = not self.is_raised
            self.changed_ns, self.below_ns = now_ns, 0
        return is_due


class Alerts:
    """All rules, looked at again and again.

    `actions` are told when their level is reached, and when it is not any more: each is called with
    True and False in turn. A level without an action is shown and does nothing.

    Owner: the event loop.
    """

    def __init__(self, config: AlertsConfig, log: Teller, actions: Mapping[Level, Callable[[bool], None]]) -> None:
        self._config = config
        self._log = log
        self._actions = actions
        self._trend = _Trend(int(config.window_s * NS_PER_S))
        steps = {
            "fill": config.fill,
            "mean_wait": config.mean_wait_s,
            "depth_growing": config.depth_growing_s,
            "refusals": config.refusals_per_s,
            "refusals_jump": config.refusals_jump,
            "devices_out": config.devices_out,
        }
        self.alerts = [
            Alert(rule, level, threshold)
            for rule, thresholds in steps.items()
            for level, threshold in zip(Level, thresholds, strict=True)
            if threshold > 0
        ]
        self.values = dict.fromkeys(steps, 0.0)

    def look(self, reading: Reading, now_ns: int) -> None:
        """Take a reading: raise, clear, tell, act."""
        if not self._config.enabled:
            return
        config, before = self._config, self.levels
        self.values = self._trend.values(reading, now_ns)
        for alert in self.alerts:
            if alert.look(self.values[alert.rule], now_ns, config.clear_share, int(config.clear_s * NS_PER_S)):
                self._tell(alert)
        for level in before ^ self.levels:
            if level in self._actions:
                self._actions[level](level in self.levels)

    @property
    def levels(self) -> set[Level]:
        """The levels of which any alert is raised."""
        return {alert.level for alert in self.alerts if alert.is_raised}

    def shown(self, now_ns: int) -> Iterator[dict[str, object]]:
        """Every alert as `/admin/alerts` tells it."""
        for alert in self.alerts:
            since_s = (now_ns - alert.changed_ns) / NS_PER_S if alert.changed_ns else None
            yield {
                "rule": alert.rule,
                "level": str(alert.level),
                "state": "raised" if alert.is_raised else "clear",
                "value": round(alert.value, 3),
                "threshold": alert.threshold,
                "since_s": since_s,
            }

    def _tell(self, alert: Alert) -> None:
        tell = self._log.warning if alert.is_raised else self._log.info
        event = "alert raised" if alert.is_raised else "alert cleared"
        shown = {"rule": alert.rule, "level": str(alert.level), "value": f"{alert.value:.3g}"}
        tell(event, **shown, threshold=f"{alert.threshold:g}")


class _Trend:
    """Turns readings into the rules' figures: rates and means over the last window, and the one before."""

    def __init__(self, window_ns: int) -> None:
        self._window_ns = window_ns
        self._looks: deque[tuple[int, Reading]] = deque(maxlen=_LOOKS_MAX)
        self._growing_ns = 0  # Since when the queue grows.

    def values(self, reading: Reading, now_ns: int) -> dict[str, float]:
        """The figure of each rule."""
        then, before = self._at(now_ns - self._window_ns), self._at(now_ns - 2 * self._window_ns)
        self._looks.append((now_ns, reading))
        while self._looks[0][0] < now_ns - 3 * self._window_ns:
            self._looks.popleft()
        num_refused = reading.num_too_many - then.num_too_many if then else 0
        num_before = then.num_too_many - before.num_too_many if then and before else num_refused
        is_jump = num_refused >= _JUMP_MIN
        return {
            "fill": reading.fill,
            "mean_wait": _mean_wait_s(reading, then),
            "depth_growing": self._growing_s(reading, then, now_ns),
            "refusals": num_refused / (self._window_ns / NS_PER_S),
            "refusals_jump": num_refused / max(num_before, 1) if is_jump else 0.0,
            "devices_out": float(reading.num_out),
        }

    def _at(self, when_ns: int) -> Reading | None:
        """The last reading of that time or before, else the first; None before any."""
        found = self._looks[0][1] if self._looks else None
        for look_ns, reading in self._looks:
            if look_ns > when_ns:
                break
            found = reading
        return found

    def _growing_s(self, reading: Reading, then: Reading | None, now_ns: int) -> float:
        if then is None or reading.depth <= then.depth:
            self._growing_ns = 0
            return 0.0
        self._growing_ns = self._growing_ns or now_ns
        return (now_ns - self._growing_ns) / NS_PER_S


def _mean_wait_s(reading: Reading, then: Reading | None) -> float:
    """The mean wait of those who started since; where nobody did, how long the oldest has waited so far."""
    num_started = reading.num_started - then.num_started if then else 0
    if not num_started or then is None:
        return reading.oldest_wait_s
    return (reading.wait_ns_sum - then.wait_ns_sum) / num_started / NS_PER_S
