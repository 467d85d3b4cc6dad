"""From settings to the rules of the door, and to where requests start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lqs._core import Door, DoorSays, Finish, Scheduler, Work
from lqs.scheduling.core import make_door, make_scheduler, set_rules
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


class Floor:
    """The scheduler of a config with device slots that the test describes."""

    def __init__(self, *slots: dict[str, Any], **placement: Any) -> None:
        config = load(None, None, {f"placement.{name}": value for name, value in placement.items()})
        self.core: Scheduler = make_scheduler(config, [1.0])
        for slot in slots:
            self.core.add_device_slot(**{"kv_tokens": 10_000, "num_sequences": 100} | slot)

    def start(self, num_prompt: int, *, ends: bool = False, prefixes: Sequence[tuple[int, int]] = ()) -> int:
        """Where the next request starts."""
        assert self.core.try_enter(0)
        handle = self.core.submit(
            Work(),
            object(),
            num_prompt_tokens=num_prompt,
            max_tokens=10,
            footprint_tokens=num_prompt + 10,
            prefixes=prefixes,
        )
        self.core.round(0)
        where = next(slot for slot in range(len(self.core.slots())) if handle in self.core.take(slot))
        if ends:
            self.core.finish(handle, Finish.FINISH_STOP)
            self.core.round(0)
        return where


@pytest.mark.parametrize(
    ("policy", "staying", "leaving"),
    [
        ("least_connections", [0, 1, 0, 0], [0, 0, 0]),
        ("vram", [1, 0, 1, 1], [1, 1, 1]),
        ("weighted_round_robin", [0, 1, 0, 0], [0, 1, 0]),
        ("load", [0, 1, 0, 1], [0, 0, 0]),
    ],
)
def test_the_policy_of_the_config_decides(policy: str, staying: list[int], leaving: list[int]) -> None:
    """S10: no two of them choose alike where requests stay, and where each ends before the next."""
    slots: tuple[dict[str, Any], ...] = ({"kv_tokens": 5000, "weight": 2.0}, {"weight": 1.0})
    floor = Floor(*slots, policy=policy)
    assert [floor.start(1000) for _ in staying] == staying
    floor = Floor(*slots, policy=policy)
    assert [floor.start(1000, ends=True) for _ in leaving] == leaving


@pytest.mark.parametrize(("margin", "num"), [(0.0, 1), (1.0, 2), (3.0, 4)])
def test_the_margin_of_the_config_is_how_many_more_may_run_for_a_prefix(margin: float, num: int) -> None:
    floor = Floor({}, {}, prefix_margin=margin)
    assert [floor.start(600, prefixes=[(1, 512)]) for _ in range(num + 1)] == [1] * num + [0]


@pytest.mark.parametrize(("least", "where"), [(512, 1), (1024, 0)])
def test_the_least_prefix_of_the_config_is_what_counts(least: int, where: int) -> None:
    assert Floor({}, {}, prefix_tokens_min=least).start(600, prefixes=[(1, 512)]) == where
