"""What the rules look at, read from the real core."""

from __future__ import annotations

import io

import pytest

from lqs._core import Work
from lqs.config import LogConfig
from lqs.guard import Guard, make_actions, reading_of
from lqs.observe.alerts import Alerts, Level, Switch
from lqs.observe.counts import Counts
from lqs.observe.log import Log
from lqs.request import NS_PER_S
from lqs.scheduling.core import make_door, make_scheduler
from lqs.scheduling.desk import Desk
from lqs.scheduling.outlook import make_outlook
from lqs.settings import load

S = NS_PER_S


def test_a_reading_is_what_the_core_has_counted() -> None:
    config = load(None, None, {"queue.caps": [10, 10, 2, 10, 10], "queue.total": 20, "engine.parallel": 1})
    core = make_scheduler(config, [1.0])
    core.add_device_slot(kv_tokens=100, num_sequences=1)
    for level, arrival_ns in ((2, 1 * S), (2, 2 * S), (3, 3 * S), (2, 4 * S)):
        core.try_enter(level)
        core.submit(Work(), "sink", level=level, arrival_ns=arrival_ns)
    core.round(5 * S)
    reading = reading_of(core.snapshot(), config, 7, 6 * S)
    assert (reading.depth, reading.num_started, reading.num_too_many) == (3, 1, 7)
    # A class that is full by itself takes no place from another.
    assert reading.fill == pytest.approx(3 / 20)
    assert reading.oldest_wait_s == pytest.approx(4)
    assert reading.wait_ns_sum == 4 * S


def test_each_level_acts_and_a_breaker_is_tripped_only_where_there_are_breakers() -> None:
    config = load(None, None, {})
    core = make_scheduler(config, [1.0])
    for flags, is_open in (({}, True), ({"queue.break_at": 0.0}, False)):
        config = load(None, None, flags)
        desk = Desk(core, Counts(5, 2), door=make_door(config), outlook=make_outlook(config, core))
        tighten, degrade = Switch(), Switch()
        actions = make_actions(lambda config=config: config, tighten=tighten, degrade=degrade, desk=desk)
        for level in (Level.TIGHTEN, Level.DEGRADE, Level.BREAK):
            actions[level](True)
        assert (tighten.is_on, degrade.is_on) == (True, True)
        breakers = [level["breaker"] for level in desk.entrance.figures()["levels"]]
        assert breakers == [0, 0, 0, 0, 2 if is_open else 0]
        for level in (Level.TIGHTEN, Level.DEGRADE, Level.BREAK):
            actions[level](False)
        assert (tighten.is_on, degrade.is_on) == (False, False)


def test_the_guard_raises_what_it_sees() -> None:
    config = load(None, None, {"queue.total": 2})
    core = make_scheduler(config, [1.0])
    counts, text = Counts(5, 2), io.StringIO()
    alerts = Alerts(config.alerts, Log(LogConfig(), text), {})
    desk = Desk(core, counts, door=make_door(config), outlook=make_outlook(config, core))
    core.add_device_slot(kv_tokens=100, num_sequences=1)
    for _ in range(3):
        core.try_enter(2)
        core.submit(Work(), "sink", level=2)
    core.round(1)
    Guard(lambda: config, alerts, desk, counts, num_out=lambda: 3).look(2)
    assert "alert raised rule=fill level=break value=1" in text.getvalue()
    assert "alert raised rule=devices_out level=warn value=3" in text.getvalue()
