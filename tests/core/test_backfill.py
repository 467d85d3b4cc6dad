"""Who may pass a request that does not fit, how often, and what is held for it."""

import pytest

from lqs._core import EV_EXPIRED, EV_NO_KV, EV_SETTLED, EV_STARTED

from .test_scheduler import S, assert_empty, make, run, submit


def started(scheduler, now_ns=0):
    """Run a round: who started in it."""
    return [sink for kind, sink in run(scheduler, now_ns) if kind == EV_STARTED]


def one_running(scheduler, tokens):
    handle = submit(scheduler, "running", footprint_tokens=tokens)
    assert started(scheduler) == ["running"]
    scheduler.take(0)
    return handle


def test_small_requests_pass_a_head_that_does_not_fit_now():
    """B32: the head blocked the small ones behind it."""
    scheduler = make(slots=[(64, 8)])
    one_running(scheduler, 40)
    submit(scheduler, "large", footprint_tokens=60)
    for name in "abc":
        submit(scheduler, name, footprint_tokens=5)
    assert started(scheduler) == ["a", "b", "c"]


def test_a_head_is_passed_a_bounded_number_of_times_and_then_what_comes_free_is_its():
    """B32: skipping the head starved it."""
    scheduler = make(slots=[(64, 8)], bypass_max=3)
    running = one_running(scheduler, 40)
    large = submit(scheduler, "large", footprint_tokens=60)
    small = [submit(scheduler, name, footprint_tokens=5) for name in "abcde"]
    assert started(scheduler) == ["a", "b", "c"]
    assert scheduler.snapshot()["num_holding"] == 1
    for handle in (running, small[0], small[1]):
        scheduler.finish(handle)
        # 5 cells are taken, then none: not enough for the large one, and kept from the small.
        assert started(scheduler) == []
    scheduler.finish(small[2])
    assert started(scheduler) == ["large"]
    assert scheduler.snapshot()["num_holding"] == 0
    scheduler.finish(large)
    assert started(scheduler) == ["d", "e"]
    for handle in small[3:]:
        scheduler.finish(handle)
    run(scheduler)
    assert_empty(scheduler)


def test_a_steady_flow_of_small_requests_does_not_starve_the_large_one():
    """B32, with its numbers: 64 cells, 40 of them taken, a head of 60, ten of 5 cells a second."""
    scheduler = make(
        slots=[(64, 16)], bypass_max=16, bypass_ns=10 * S, table_capacity=1024, level_caps=[900], total_cap=900
    )
    running = {one_running(scheduler, 40): 30 * S}
    submit(scheduler, "large", footprint_tokens=60)
    names = {}
    large_at = None
    for tick in range(600):
        now_ns = tick * S // 10
        for handle in [handle for handle, end_ns in running.items() if end_ns <= now_ns]:
            scheduler.finish(handle)
            del running[handle]
        names[f"s{tick}"] = submit(scheduler, f"s{tick}", footprint_tokens=5, arrival_ns=now_ns)
        for name in started(scheduler, now_ns):
            if name == "large":
                large_at = now_ns
            else:
                running[names[name]] = now_ns + S
        scheduler.take(0)
    # Held after 16 passes; from then on it waits for the one that runs, and no longer.
    assert large_at == 30 * S


def test_the_hold_comes_after_a_time_too():
    scheduler = make(slots=[(64, 8)], bypass_max=1000, bypass_ns=10 * S)
    one_running(scheduler, 40)
    submit(scheduler, "large", footprint_tokens=60)
    submit(scheduler, "a", footprint_tokens=5)
    assert started(scheduler, 1) == ["a"]
    submit(scheduler, "b", footprint_tokens=5)
    assert started(scheduler, 10 * S) == ["b"]
    submit(scheduler, "c", footprint_tokens=5)
    assert started(scheduler, 10 * S + 1) == []


def test_without_a_bypass_the_head_blocks():
    scheduler = make(slots=[(64, 8)], bypass_max=0)
    one_running(scheduler, 40)
    submit(scheduler, "large", footprint_tokens=60)
    submit(scheduler, "a", footprint_tokens=5)
    assert started(scheduler) == []


def test_a_better_class_uses_a_held_device_slot_only_beside_the_hold():
    scheduler = make(slots=[(100, 8)], bypass_max=0)
    running = one_running(scheduler, 60)
    submit(scheduler, "large", level=3, footprint_tokens=50)
    assert started(scheduler) == []
    submit(scheduler, "urgent", level=0, footprint_tokens=40)
    assert started(scheduler) == []
    scheduler.finish(running)
    assert started(scheduler) == ["large", "urgent"]


def test_each_device_slot_is_held_for_one():
    scheduler = make(slots=[(100, 4), (100, 4)], bypass_max=0)
    first, second = submit(scheduler, "x", footprint_tokens=80), submit(scheduler, "y", footprint_tokens=70)
    assert started(scheduler) == ["x", "y"]
    for name in "abc":
        submit(scheduler, name, footprint_tokens=60)
    submit(scheduler, "small", footprint_tokens=1)
    assert started(scheduler) == []
    assert scheduler.snapshot()["num_holding"] == 2
    scheduler.finish(second)
    # The first in line held the second device slot: it had the most free.
    assert started(scheduler) == ["a"]
    scheduler.finish(first)
    # The third holds the second, so the first is free for others again.
    assert started(scheduler) == ["b", "small"]


def test_a_hold_ends_with_its_holder_and_with_its_device_slot():
    scheduler = make(slots=[(100, 4), (90, 4)], bypass_max=0)
    running = one_running(scheduler, 60)
    submit(scheduler, "y", footprint_tokens=60)
    assert started(scheduler) == ["y"]
    large = submit(scheduler, "large", footprint_tokens=50)
    assert started(scheduler) == []
    assert scheduler.snapshot()["num_holding"] == 1
    # It would go on at the other one, before all that wait.
    scheduler.cancel(running)
    scheduler.report_dead(0)
    assert started(scheduler) == []
    assert scheduler.snapshot()["num_holding"] == 1
    scheduler.cancel(large)
    submit(scheduler, "a", footprint_tokens=30)
    assert started(scheduler) == ["a"]
    assert scheduler.snapshot()["num_holding"] == 0


@pytest.mark.parametrize("num_waiting", [31, 32, 33])
def test_as_many_are_passed_as_there_are_records(num_waiting):
    scheduler = make(slots=[(64, 8)], table_capacity=64, level_caps=[60], total_cap=60)
    one_running(scheduler, 40)
    for number in range(num_waiting):
        submit(scheduler, number, footprint_tokens=60)
    submit(scheduler, "small", footprint_tokens=5)
    assert started(scheduler) == (["small"] if num_waiting <= 32 else [])


def order_of_four(slot):
    """Four of two keys, some with deadlines, one after the other: their order."""
    scheduler = make(slots=[slot], key_weights=[1, 1])
    running = one_running(scheduler, 40)
    for name, key, deadline_ns in [("a", 0, 9), ("b", 1, 0), ("c", 0, 3), ("d", 1, 7)]:
        submit(scheduler, name, key=key, deadline_ns=deadline_ns, footprint_tokens=60)
    order = []
    while len(order) < 4:
        for _ in range(3):
            assert started(scheduler) == []
        scheduler.finish(running, num_completion_tokens=5)
        (name,) = started(scheduler)
        order.append(name)
        (running,) = scheduler.take(0)
    return order


def test_looking_past_misfits_changes_neither_fair_share_nor_deadlines():
    """As if there were one sequence: then nobody is looked past."""
    assert order_of_four((64, 8)) == order_of_four((10**6, 1))


def test_who_waits_too_long_is_told_whether_it_was_for_want_of_cells():
    scheduler = make(slots=[(64, 2)])
    one_running(scheduler, 40)
    submit(scheduler, "large", footprint_tokens=60, expire_ns=5 * S)
    submit(scheduler, "small", footprint_tokens=5)
    assert started(scheduler) == ["small"]
    # Both sequences are taken now, and nobody has looked whether this one fits.
    submit(scheduler, "behind", footprint_tokens=60, expire_ns=5 * S)
    assert run(scheduler, 5 * S) == [
        (EV_NO_KV, "large"),
        (EV_SETTLED, "large"),
        (EV_EXPIRED, "behind"),
        (EV_SETTLED, "behind"),
    ]
    assert scheduler.snapshot()["levels"][0]["num_expired"] == 2
