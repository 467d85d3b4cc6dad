"""A device slot as a seat: what it can hold changes between two workers, never under what runs."""

from __future__ import annotations

import pytest

from lqs._core import EV_NO_DEVICE, EV_STARTED, Finish, Scheduler, Work, set_capacity


def core() -> Scheduler:
    scheduler = Scheduler(table_capacity=64, level_caps=[64], total_cap=64, num_lanes=1, lane_weights=[1])
    scheduler.add_device_slot(kv_tokens=1000, num_sequences=4)
    return scheduler


def submit(scheduler: Scheduler, num_tokens: int) -> int:
    assert scheduler.try_enter(0)
    return scheduler.submit(
        Work(), object(), num_prompt_tokens=num_tokens - 10, max_tokens=10, footprint_tokens=num_tokens
    )


def kinds(scheduler: Scheduler) -> list[int]:
    return [event[0] for event in scheduler.poll()]


def capacity(scheduler: Scheduler) -> int:
    return scheduler.slots()[0]["capacity"]


def test_another_size_counts_from_the_next_round() -> None:
    scheduler = core()
    set_capacity(scheduler, 0, 300)
    assert capacity(scheduler) == 1000
    scheduler.round(1)
    assert (capacity(scheduler), scheduler.slots()[0]["headroom"]) == (300, 300)
    submit(scheduler, 301)
    submit(scheduler, 300)
    scheduler.round(2)
    assert kinds(scheduler).count(EV_STARTED) == 1
    assert len(scheduler.take(0)) == 1


def test_while_something_runs_there_the_size_stays() -> None:
    scheduler = core()
    submit(scheduler, 600)
    scheduler.round(1)
    (handle,) = scheduler.take(0)
    set_capacity(scheduler, 0, 300)
    scheduler.round(2)
    assert capacity(scheduler) == 1000
    scheduler.finish(handle, Finish.FINISH_STOP)
    # The round that takes its last word also gives the new size, and starts nobody in between.
    scheduler.round(3)
    assert capacity(scheduler) == 300


def test_who_waits_and_fits_nowhere_any_more_is_told() -> None:
    scheduler = core()
    scheduler.drain_slot(0)
    submit(scheduler, 600)
    scheduler.round(1)
    assert kinds(scheduler) == []
    set_capacity(scheduler, 0, 300)
    scheduler.round(2)
    assert EV_NO_DEVICE in kinds(scheduler)


def test_it_is_heeded_before_the_drain_ends_that_was_ended_after_it() -> None:
    scheduler = core()
    scheduler.drain_slot(0)
    scheduler.round(1)
    submit(scheduler, 600)
    set_capacity(scheduler, 0, 300)
    scheduler.undrain_slot(0)
    scheduler.round(2)
    assert kinds(scheduler)[0] == EV_NO_DEVICE
    assert scheduler.take(0) == []


def test_promises_grow_by_the_block_that_the_worker_came_with() -> None:
    scheduler = core()
    set_capacity(scheduler, 0, 1000, 32)
    submit(scheduler, 500)
    scheduler.round(1)
    assert scheduler.slots()[0]["reserved"] == 500
    scheduler.take(0)
    scheduler = core()
    set_capacity(scheduler, 0, 1000, 32)
    scheduler.round(1)
    assert scheduler.try_enter(0)
    scheduler.submit(Work(), object(), num_prompt_tokens=100, max_tokens=400, footprint_tokens=500)
    scheduler.round(2)
    assert scheduler.slots()[0]["reserved"] == 132


def test_the_worker_that_came_may_have_fewer_sequences_and_the_next_one_all() -> None:
    scheduler = core()
    set_capacity(scheduler, 0, 1000, num_sequences=2)
    assert scheduler.slots()[0]["num_sequences"] == 4
    for _ in range(4):
        submit(scheduler, 20)
    scheduler.round(1)
    assert scheduler.slots()[0]["num_sequences"] == 2
    running = scheduler.take(0)
    assert len(running) == 2
    # Not as long as anything runs there.
    set_capacity(scheduler, 0, 1000)
    scheduler.finish(running[0], Finish.FINISH_STOP)
    scheduler.round(2)
    (third,) = scheduler.take(0)
    assert scheduler.slots()[0]["num_sequences"] == 2
    scheduler.drain_slot(0)
    for handle in (running[1], third):
        scheduler.finish(handle, Finish.FINISH_STOP)
    scheduler.round(3)
    scheduler.undrain_slot(0)
    for _ in range(5):
        submit(scheduler, 20)
    scheduler.round(4)
    assert (scheduler.slots()[0]["num_sequences"], len(scheduler.take(0))) == (4, 4)


@pytest.mark.parametrize("num", [4, 8])
def test_the_lanes_share_the_sequences_that_there_are(num: int) -> None:
    """A quarter of them is the long lane's, where both wait."""
    scheduler = Scheduler(table_capacity=64, level_caps=[64], total_cap=64, num_lanes=2, lane_weights=[3, 1])
    scheduler.add_device_slot(kv_tokens=10_000, num_sequences=8)
    set_capacity(scheduler, 0, 10_000, num_sequences=num)
    scheduler.round(0)
    for number in range(32):
        assert scheduler.try_enter(0)
        scheduler.submit(Work(), object(), lane=number % 2, max_tokens=10, footprint_tokens=10 + number % 2)
    scheduler.round(1)
    account = scheduler.slots()[0]
    assert (account["num_running"], account["reserved"]) == (num, 10 * num + num // 4)


@pytest.mark.parametrize(("kv_tokens", "kv_block"), [(0, 0), (100, 2**20 + 1)])
def test_a_size_that_is_none_is_refused(kv_tokens: int, kv_block: int) -> None:
    with pytest.raises(ValueError, match="at least one KV token"):
        set_capacity(core(), 0, kv_tokens, kv_block)
    with pytest.raises(IndexError):
        set_capacity(core(), 1, 100)
    with pytest.raises(ValueError, match="made with 4 sequences"):
        set_capacity(core(), 0, 100, num_sequences=5)
