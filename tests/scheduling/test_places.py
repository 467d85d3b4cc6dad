"""Who comes in: exactly as many as there are sequences and places, whatever the order of things."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lqs.request import Request, Tenant
from lqs.scheduling.places import Places, Seats


def a_request(level: int = 0, num_tokens: int = 10) -> Request:
    request = Request(id="r", tenant=Tenant("t", "normal", 0, 0, 0), model="m", arrival_ns=0, level=level)
    request.prompt = array("i", [0] * num_tokens)
    return request


def places(caps: list[int], total: int, num_sequences: int, kv_tokens: int = 1000) -> Places:
    return Places(caps, total, lambda: Seats(num_sequences, kv_tokens))


def let_in(door: Places, level: int, num: int) -> int:
    """How many of `num` come in."""
    num_in = 0
    for _ in range(num):
        if door.has_room(level):
            door.enter(level)
            num_in += 1
    return num_in


@pytest.mark.parametrize("num_started", [0, 1])
def test_six_at_once_for_one_sequence_and_one_place_are_two(num_started: int) -> None:
    """B37: the same whether the first has started when the others come or not."""
    door = places([1], 1, 1)
    num_in = let_in(door, 0, num_started)
    for _ in range(num_started):
        door.submit(a_request())
        door.start(0)
    assert num_in + let_in(door, 0, 6 - num_started) == 2
    assert door.num_inside == 2


def test_a_class_without_places_lets_in_who_can_start_at_once() -> None:
    door = places([0], 1, 2)
    assert let_in(door, 0, 5) == 2


def test_a_free_sequence_is_spoken_for_by_the_better_classes() -> None:
    door = places([5, 0], 10, 1)
    assert let_in(door, 0, 1) == 1
    assert let_in(door, 1, 1) == 0


def test_the_total_holds_for_all_classes() -> None:
    door = places([2, 2], 3, 0)
    assert (let_in(door, 0, 9), let_in(door, 1, 9)) == (2, 1)


def test_a_free_sequence_is_no_room_while_somebody_waits_for_cells() -> None:
    door = places([1], 1, 2, kv_tokens=100)
    big = a_request(num_tokens=100)
    door.enter(0)
    door.submit(big)
    door.start(0)
    assert let_in(door, 0, 3) == 1
    door.settle(big, has_run=True)
    assert let_in(door, 0, 3) == 2


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(0, 3), st.integers(0, 3))
def test_no_more_are_inside_than_sequences_and_places_and_all_come_out(
    deeds: list[int], num_places: int, num_sequences: int
) -> None:
    door = places([num_places], num_places, num_sequences)
    entering, waiting, running = [], [], []
    for deed in deeds:
        if deed == 0 and door.has_room(0):
            door.enter(0)
            entering.append(a_request())
        elif deed == 0:
            assert len(entering) + len(waiting) + len(running) >= num_places + num_sequences
        elif deed == 1 and entering:
            door.leave(0)
            entering.pop()
        elif deed == 2 and entering:
            waiting.append(entering.pop())
            door.submit(waiting[-1])
        elif deed == 3 and waiting and len(running) < num_sequences:
            running.append(waiting.pop())
            door.start(0)
        elif deed == 4 and (running or waiting):
            has_run = bool(running)
            door.settle(running.pop() if has_run else waiting.pop(), has_run=has_run)
        assert door.num_inside == len(entering) + len(waiting) + len(running) <= num_places + num_sequences
