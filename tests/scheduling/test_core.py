"""From settings to the rules of the door."""

from __future__ import annotations

from typing import Any

import pytest

from lqs._core import Door, DoorSays
from lqs.scheduling.core import make_door, set_rules
from lqs.settings import load

S = 10**9


def a_door(**flags: Any) -> Door:
    return make_door(load(None, None, flags))


def num_in_before(door: Door, sign: str) -> int:
    """How many come in until the figures show it."""
    num_in = 0
    while not door.figures(0)[sign]:
        assert door.enter(num_in % 5, 0)[0] == DoorSays.DOOR_IN
        num_in += 1
    return num_in


@pytest.mark.parametrize(
    ("total", "share", "num"), [(30, 0.8, 24), (10, 0.7, 7), (10, 0.71, 8), (1, 0.8, 1), (100, 0.29, 29), (7, 1.0, 7)]
)
def test_a_share_of_the_total_is_the_least_number_that_is_as_much(total: int, share: float, num: int) -> None:
    door = a_door(**{"queue.total": total, "queue.warn_at": share, "queue.warn_clear_at": 0.0})
    assert num_in_before(door, "is_warned") == num


def test_without_a_warning_and_without_a_breaker_nothing_is_said() -> None:
    door = a_door(**{"queue.total": 3, "queue.warn_at": 0.0, "queue.break_at": 0.0})
    assert [door.enter(4, 0)[0] for _ in range(4)] == [DoorSays.DOOR_IN] * 3 + [DoorSays.DOOR_FULL]
    assert door.changes() == []


def test_the_last_value_of_a_rule_stands_for_the_classes_that_are_left() -> None:
    door = a_door(**{"queue.total": 1, "queue.evict": [False]})
    assert door.enter(1, 0)[0] == DoorSays.DOOR_IN
    # Only the best class may wait for a place, 5 s.
    assert [door.enter(level, 0)[::3] for level in (0, 1, 2)] == [
        (DoorSays.DOOR_WAIT, 5 * S),
        (DoorSays.DOOR_FULL, 0),
        (DoorSays.DOOR_FULL, 0),
    ]


def test_a_breaker_that_is_turned_off_lets_everybody_in_again() -> None:
    door = a_door(**{"queue.total": 1})
    assert door.enter(4, 0)[0] == DoorSays.DOOR_IN
    assert door.enter(4, 0)[0] == DoorSays.DOOR_BROKEN
    set_rules(door, load(None, None, {"queue.total": 2, "queue.break_at": 0.0}))
    assert door.enter(4, 0)[0] == DoorSays.DOOR_IN
