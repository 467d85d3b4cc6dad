"""When the load counts as high."""

from __future__ import annotations

from typing import Any

import pytest

from lqs.scheduling.load import Load


def core(reserved: int = 0, num_waiting: int = 0, is_dead: bool = False) -> dict[str, Any]:
    other = {"capacity": 100, "reserved": 100, "is_dead": True}
    slots = [{"capacity": 1000, "reserved": reserved, "is_dead": is_dead}, other]
    return {"slots": slots, "levels": [{"num_waiting": num_waiting}, {"num_waiting": 1}]}


@pytest.mark.parametrize(
    ("seen", "is_high"),
    [
        (core(), False),
        (core(reserved=800), False),
        (core(reserved=801), True),
        (core(num_waiting=79), False),
        (core(num_waiting=80), True),
        (core(is_dead=True), False),
    ],
)
def test_it_is_high_above_four_fifths_of_the_memory_or_of_the_queue(seen: dict[str, Any], is_high: bool) -> None:
    assert Load(lambda: seen, 100, lambda: 0).is_high() is is_high


def test_a_look_serves_for_a_moment() -> None:
    looks = []
    now_ns = 0

    def snapshot() -> dict[str, Any]:
        looks.append(now_ns)
        return core(reserved=900 if len(looks) > 1 else 0)

    load = Load(snapshot, 100, lambda: now_ns)
    assert [load.is_high() for _ in range(10)] == [False] * 10
    assert len(looks) == 1
    now_ns = 50_000_000
    assert load.is_high()
    assert len(looks) == 2
