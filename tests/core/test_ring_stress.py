"""Rings and wakers between native threads that hold no GIL.

The invariants: every handle arrives once, in its turn where there is one producer, and no
sleeper sleeps while there is something for it. This is case B42 (a ring without ordering): stress
with a checksum, capacities from 1 on, several producers, a consumer that falls asleep just as an
item arrives; `make tsan` runs the same under ThreadSanitizer.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from lqs import _core
from lqs._core import MpmcRing, Scheduler, SpscRing

# A build that is traced line by line takes the GIL for each.
SHARE = 1000 if os.environ.get("LQS_COVERAGE") else 1
NUM_ITEMS = [10**7 // SHARE, pytest.param(10**8, marks=pytest.mark.stress)]


def side_by_side(*calls):
    """Run each call in a thread of its own; their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(*call) for call in calls]]


@pytest.mark.parametrize(("capacity", "share"), [(1024, 1), (7, 20), (1, 100)])
@pytest.mark.parametrize("num_items", NUM_ITEMS)
def test_every_handle_crosses_once_and_in_its_turn(capacity, share, num_items):
    ring, n = SpscRing(capacity), num_items // share
    assert side_by_side((_core._push_many, ring, 3, n), (_core._pop_many, ring, 3, n)) == [n, n]
    assert len(ring) == 0


@pytest.mark.parametrize(("capacity", "push", "pop"), [(1000, 64, 256), (5, 3, 4)])
@pytest.mark.parametrize("num_items", NUM_ITEMS)
def test_batches_cross_whole_and_in_their_turn(capacity, push, pop, num_items):
    ring, n = SpscRing(capacity), num_items // (1 if capacity > 100 else 10)
    done = side_by_side((_core._push_batches, ring, 7, n, push), (_core._pop_batches, ring, 7, n, pop))
    assert done == [n, n]


@pytest.mark.parametrize(("capacity", "share"), [(1024, 1), (2, 20)])
@pytest.mark.parametrize("num_items", NUM_ITEMS)
def test_many_producers_and_consumers_see_every_handle_once(capacity, share, num_items):
    ring, half = MpmcRing(capacity), num_items // share // 2
    seen = [bytearray(2 * half), bytearray(2 * half)]
    done = side_by_side(
        (_core._push_shared, ring, 0, half),
        (_core._push_shared, ring, half, half),
        (_core._pop_shared, ring, half, seen[0]),
        (_core._pop_shared, ring, half, seen[1]),
    )
    assert done == [half] * 4
    # As many came as went, so if none is missing none came twice.
    assert all(
        int.from_bytes(a, "big") + int.from_bytes(b, "big") == int.from_bytes(b"\x01" * len(a), "big")
        for a, b in [(seen[0][i : i + 4096], seen[1][i : i + 4096]) for i in range(0, 2 * half, 4096)]
    )


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("num_wakes", [3 * 10**5 // SHARE, pytest.param(3 * 10**6, marks=pytest.mark.stress)])
def test_no_wake_up_is_lost_between_a_waker_and_a_sleeper(num_sequences, num_wakes):
    scheduler = Scheduler(table_capacity=8, level_caps=[8], total_cap=8)
    scheduler.add_device_slot(kv_tokens=1, num_sequences=num_sequences)
    calls = (_core._wake_many, scheduler, num_wakes), (_core._sleep_many, scheduler, num_wakes)
    assert side_by_side(*calls) == [num_wakes, num_wakes]


def test_a_sleeper_that_nobody_wakes_says_so():
    ring = SpscRing(1)
    assert _core._pop_many(ring, 0, 0) == 0
    ring.try_push(5)
    assert _core._pop_many(ring, 0, 1) == 0
    ring.push_batch([5])
    assert _core._pop_batches(ring, 0, 1, 8) == 0
