"""Rules, levels, hysteresis and actions under a clock of the test's own, with the sources' figures."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest

from lqs.config import LogConfig
from lqs.observe.alerts import Alerts, Level, Reading
from lqs.observe.log import Log
from lqs.protection import AlertsConfig
from lqs.request import NS_PER_S

S = NS_PER_S


class Watch:
    """Alerts that are looked at once a second."""

    def __init__(self, **settings: Any) -> None:
        self.text = io.StringIO()
        self.acts: list[tuple[str, bool]] = []
        actions = {level: lambda is_on, level=level: self.acts.append((str(level), is_on)) for level in Level}
        config = msgspec.convert(settings, AlertsConfig)
        self.alerts = Alerts(config, Log(LogConfig(), self.text), actions)  # type: ignore[arg-type]
        self.second = 0
        self.reading = Reading(0, 0.0, 0.0, 0, 0, 0)

    def look(self, seconds: int = 1, **changed: Any) -> set[tuple[str, str]]:
        """Let so many seconds pass with these figures; what is raised then."""
        for _ in range(seconds):
            self.second += 1
            self.reading = self.reading._replace(**changed)
            self.alerts.look(self.reading, self.second * S)
        return {(alert.rule, str(alert.level)) for alert in self.alerts.alerts if alert.is_raised}

    def serve(self, seconds: int, *, starts: int, wait_s: float, **changed: Any) -> set[tuple[str, str]]:
        """Let requests start, so many a second after that wait."""
        raised: set[tuple[str, str]] = set()
        for _ in range(seconds):
            num_started = self.reading.num_started + starts
            wait_ns_sum = self.reading.wait_ns_sum + int(starts * wait_s * S)
            raised = self.look(num_started=num_started, wait_ns_sum=wait_ns_sum, **changed)
        return raised

    @property
    def lines(self) -> list[str]:
        return self.text.getvalue().splitlines()


@pytest.mark.parametrize(
    ("fill", "levels"),
    [
        (0.79, set()),
        (0.80, {"warn"}),
        (24 / 30, {"warn"}),
        (0.9, {"warn", "tighten"}),
        (1.0, {"warn", "tighten", "degrade", "break"}),
    ],
)
def test_a_queue_warns_at_80_percent_and_breaks_at_100(fill: float, levels: set[str]) -> None:
    """24 of 30 warns, all of them break; exactly at the threshold counts."""
    watch = Watch()
    assert {level for rule, level in watch.look(fill=fill) if rule == "fill"} == levels
    assert {name for name, is_on in watch.acts if is_on} == levels


@pytest.mark.parametrize(("wait_s", "is_raised"), [(4.9, False), (5.1, True)])
def test_a_mean_wait_over_5_s_is_an_alert(wait_s: float, is_raised: bool) -> None:
    raised = Watch().serve(10, starts=2, wait_s=wait_s)
    assert (("mean_wait", "warn") in raised) is is_raised


def test_where_nothing_starts_the_oldest_wait_counts() -> None:
    watch = Watch()
    assert ("mean_wait", "warn") not in watch.look(oldest_wait_s=4.0)
    assert ("mean_wait", "warn") in watch.look(oldest_wait_s=6.0)


def test_an_alert_is_told_once_and_cleared_with_hysteresis() -> None:
    watch = Watch(clear_s=10.0, clear_share=0.8)
    assert watch.look(30, fill=0.85) == {("fill", "warn")}
    assert [line.split()[0] for line in watch.lines] == ["warning"]
    assert "rule=fill level=warn value=0.85 threshold=0.8" in watch.lines[0]
    # Below the threshold, and not below 0.8 of it: it stays.
    assert watch.look(60, fill=0.65) == {("fill", "warn")}
    # Low enough, but not for long enough; then high again: it begins anew.
    assert watch.look(9, fill=0.5) == {("fill", "warn")}
    watch.look(fill=0.65)
    assert watch.look(10, fill=0.5) == {("fill", "warn")}
    assert watch.look(fill=0.5) == set()
    assert [line.split()[1:3] for line in watch.lines] == [["alert", "raised"], ["alert", "cleared"]]
    assert watch.acts == [("warn", True), ("warn", False)]


def test_a_figure_at_the_border_does_not_flap() -> None:
    watch = Watch()
    for _ in range(100):
        watch.look(fill=0.81)
        watch.look(fill=0.79)
    assert len(watch.lines) == 1


def test_levels_are_reached_and_left_step_by_step() -> None:
    watch = Watch(clear_s=0.0)
    for fill in (0.8, 0.9, 0.95, 1.0, 0.79, 0.75, 0.71, 0.63):
        watch.look(fill=fill)
    assert watch.acts == [
        ("warn", True), ("tighten", True), ("degrade", True), ("break", True),
        ("break", False), ("degrade", False), ("tighten", False), ("warn", False),
    ]  # fmt: skip


def test_a_level_acts_as_long_as_any_rule_has_reached_it() -> None:
    watch = Watch(clear_s=0.0)
    watch.serve(11, starts=1, wait_s=6.0, fill=0.85)
    assert watch.acts == [("warn", True)]
    watch.look(fill=0.1)
    assert watch.acts == [("warn", True)]
    watch.serve(11, starts=1, wait_s=0.0)
    assert watch.acts == [("warn", True), ("warn", False)]


def test_a_queue_that_keeps_growing_is_an_alert() -> None:
    watch = Watch(window_s=5.0, depth_growing_s=[10, 0, 0, 0])
    for depth in range(40):
        watch.look(depth=depth)
    assert watch.alerts.levels == {Level.WARN}
    # It stands still: it is no longer growing.
    assert watch.look(20) == set()
    # Up and down by turns is no growth.
    for depth in [3, 4, 3, 5] * 20:
        watch.look(depth=40 + depth)
    assert watch.alerts.levels == set()


def test_a_device_slot_that_is_out_is_an_alert_until_it_is_back_for_a_while() -> None:
    watch = Watch(clear_s=3.0)
    assert watch.look(num_out=0) == set()
    assert watch.look(num_out=1) == {("devices_out", "warn")}
    assert watch.look(3, num_out=0) == {("devices_out", "warn")}
    assert watch.look() == set()
    assert watch.acts == [("warn", True), ("warn", False)]


def test_refusals_that_shoot_up_are_an_alert_and_steady_ones_are_not() -> None:
    watch = Watch(window_s=10.0, refusals_per_s=[100, 0, 0, 0], refusals_jump=[5, 0, 0, 0])
    for _ in range(60):
        watch.look(num_too_many=watch.reading.num_too_many + 1)
    assert watch.alerts.levels == set()
    for _ in range(10):
        watch.look(num_too_many=watch.reading.num_too_many + 8)
    assert ("refusals_jump", "warn") in watch.look()
    # It stays so high: no jump any more, but cleared only after a while.
    for _ in range(40):
        watch.look(num_too_many=watch.reading.num_too_many + 8)
    assert watch.alerts.levels == set()


def test_a_few_refusals_after_none_are_no_jump() -> None:
    watch = Watch(refusals_per_s=[100, 0, 0, 0])
    watch.look(30)
    assert watch.look(5, num_too_many=9) == set()


def test_refusals_a_second_are_an_alert() -> None:
    watch = Watch(window_s=10.0, refusals_per_s=[2, 5, 0, 0])
    for _ in range(20):
        watch.look(num_too_many=watch.reading.num_too_many + 3)
    assert {level for rule, level in watch.look() if rule == "refusals"} == {"warn"}


def test_a_threshold_of_0_is_never_reached_and_rules_can_be_off() -> None:
    watch = Watch(fill=[0, 0, 0, 0])
    assert watch.look(fill=1.0) == set()
    assert "fill" not in {alert.rule for alert in watch.alerts.alerts}
    off = Watch(enabled=False)
    assert off.look(5, fill=1.0) == set()
    assert (off.acts, off.lines) == ([], [])


def test_what_is_shown_says_since_when() -> None:
    watch = Watch()
    watch.look(3, fill=0.85)
    shown = {(each["rule"], each["level"]): each for each in watch.alerts.shown(5 * S)}
    assert shown["fill", "warn"] == {
        "rule": "fill", "level": "warn", "state": "raised", "value": 0.85, "threshold": 0.8, "since_s": 4.0,
    }  # fmt: skip
    assert (shown["fill", "break"]["state"], shown["fill", "break"]["since_s"]) == ("clear", None)
