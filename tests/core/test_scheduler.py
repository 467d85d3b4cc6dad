"""The scheduler's round and the loop's side of it: one thread, every time passed in."""

import gc
import os
import select

import pytest

from lqs import _core
from lqs._core import (
    EV_ANSWERED,
    EV_CANCELLED,
    EV_EVICTED,
    EV_EXPIRED,
    EV_FINISHED,
    EV_NO_DEVICE,
    EV_OUTPUT,
    EV_SETTLED,
    EV_STARTED,
    Finish,
    Scheduler,
    TableFull,
    Work,
)

S = 10**9


def make(*, slots=((1000, 2),), **kwargs):
    scheduler = Scheduler(
        **{
            "table_capacity": 16,
            "level_caps": [8] * 8,
            "total_cap": 12,
            "num_keys": 2,
            "num_lanes": 1,
            "lane_weights": [1],
            **kwargs,
        }
    )
    for kv_tokens, num_sequences, *more in slots:
        scheduler.add_device_slot(
            kv_tokens=kv_tokens,
            num_sequences=num_sequences,
            model=more[0] if more else 0,
            weight=more[1] if more[1:] else 1.0,
        )
    return scheduler


def submit(scheduler, sink, **kwargs):
    level = kwargs.setdefault("level", 0)
    assert scheduler.try_enter(level)
    defaults = {"num_prompt_tokens": 10, "max_tokens": 20, "footprint_tokens": 30}
    return scheduler.submit(Work(), sink, **{**defaults, **kwargs})


def told(scheduler):
    return [event[:2] for event in scheduler.poll()]


def run(scheduler, now_ns=0):
    scheduler.round(now_ns)
    return told(scheduler)


def assert_empty(scheduler):
    snapshot = scheduler.snapshot()
    assert snapshot["num_live"] == snapshot["num_running"] == snapshot["num_entered"] == 0
    assert snapshot["num_broken"] == 0
    for slot in snapshot["slots"]:
        assert slot["reserved"] == slot["used"] == slot["num_running"] == 0
    for level in snapshot["levels"]:
        assert level["num_waiting"] == level["num_entered"] == level["oldest_arrival_ns"] == 0


# --- the path of a request --------------------------------------------------------------


def test_a_request_is_started_answered_finished_and_settled_in_this_order():
    scheduler = make()
    handle = submit(scheduler, "a", arrival_ns=5)
    assert scheduler.state_of(handle) == "submitted"
    assert scheduler.round(12) == -1
    assert scheduler.state_of(handle) == "running"
    assert scheduler.take(0) == [handle]
    assert scheduler.emit(handle, b"Hel")
    assert scheduler.emit(handle, b"lo", 2)
    scheduler.finish(
        handle,
        Finish.FINISH_LENGTH,
        num_completion_tokens=3,
        num_cached_tokens=4,
        error_code=-7,
        assigned_ns=13,
        prefill_done_ns=14,
        first_token_ns=15,
        finished_ns=16,
    )
    started, output, finished = scheduler.poll()
    assert started == (EV_STARTED, "a", 7)
    assert output == (EV_OUTPUT, "a", b"Hello", 3, None)
    assert finished[:2] == (EV_FINISHED, "a")
    outcome = finished[2]
    assert (outcome.finish, outcome.error_code, outcome.slot) == (Finish.FINISH_LENGTH, -7, 0)
    assert (outcome.num_completion_tokens, outcome.num_cached_tokens) == (3, 4)
    assert (outcome.started_ns, outcome.assigned_ns, outcome.prefill_done_ns) == (12, 13, 14)
    assert (outcome.first_token_ns, outcome.finished_ns) == (15, 16)
    scheduler.round(20)
    assert scheduler.poll() == [(EV_SETTLED, "a", None)]
    assert scheduler.state_of(handle) is None
    assert scheduler.key_usage(0) == {"reserved": 0, "prompt_tokens": 10, "completion_tokens": 3}
    assert_empty(scheduler)


def test_output_that_is_polled_late_is_still_told_before_settled():
    scheduler = make()
    handle = submit(scheduler, "a")
    scheduler.round(0)
    scheduler.emit(handle, b"x")
    scheduler.finish(handle)
    scheduler.round(1)
    assert told(scheduler) == [(EV_STARTED, "a"), (EV_OUTPUT, "a"), (EV_FINISHED, "a"), (EV_SETTLED, "a")]
    assert_empty(scheduler)


def test_logprobs_come_beside_the_text_of_the_same_poll():
    scheduler = make()
    handle = submit(scheduler, "a")
    scheduler.round(0)
    scheduler.poll()
    for token in (b"a", b"b"):
        scheduler.emit(handle, token)
        scheduler.emit(handle, token.upper(), 1, 2)
    assert scheduler.poll() == [(EV_OUTPUT, "a", b"ab", 2, b"AB")]
    scheduler.emit(handle, b"C", 1, 2)
    assert scheduler.poll() == [(EV_OUTPUT, "a", b"", 0, b"C")]
    scheduler.emit(handle, b"", 5)
    assert scheduler.poll() == [(EV_OUTPUT, "a", b"", 5, None)]
    assert scheduler.poll() == []


def test_text_survives_many_laps_of_a_small_out_buffer():
    scheduler = make(out_buffer_bytes=64)
    handle = submit(scheduler, "a")
    scheduler.round(0)
    sent, got = b"", b""
    for i in range(200):
        text = bytes(range(i % 45))
        while not scheduler.emit(handle, text):
            got += b"".join(event[2] for event in scheduler.poll() if event[0] == EV_OUTPUT)
        sent += text
    got += b"".join(event[2] for event in scheduler.poll() if event[0] == EV_OUTPUT)
    assert got == sent


def test_a_full_out_buffer_refuses_whole_records_and_the_loop_wakes_the_worker():
    scheduler = make(out_buffer_bytes=64)
    handle = submit(scheduler, "a")
    scheduler.round(0)
    assert scheduler.emit(handle, b"x" * 50)
    assert not scheduler.emit(handle, b"y")
    assert [event[2] for event in scheduler.poll() if event[0] == EV_OUTPUT] == [b"x" * 50]
    assert scheduler.emit(handle, b"y")
    assert [event[2] for event in scheduler.poll()] == [b"y"]


def test_sinks_and_work_are_let_go_when_a_request_is_settled():
    class Sink:
        pass

    class Marked(Work):
        pass

    scheduler = make()
    gc.collect()
    for _ in range(3):
        handle = scheduler.try_enter(0) and scheduler.submit(Marked(), Sink(), footprint_tokens=1)
        scheduler.round(0)
        scheduler.finish(handle)
        scheduler.round(0)
        scheduler.poll()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Sink | Marked)]


def test_a_scheduler_that_goes_away_lets_go_of_what_is_in_it():
    class Sink:
        pass

    scheduler = make()
    for _ in range(4):
        submit(scheduler, Sink())
    scheduler.round(0)
    del scheduler
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Sink)]


def test_an_entry_is_used_again_under_a_new_handle_and_the_old_one_names_nothing():
    scheduler = make(table_capacity=1)
    first = submit(scheduler, "a")
    scheduler.round(0)
    scheduler.finish(first)
    scheduler.round(0)
    scheduler.poll()
    second = submit(scheduler, "b")
    assert first != second
    assert first & 0xFFFFFFFF == second & 0xFFFFFFFF
    scheduler.cancel(first)
    assert run(scheduler) == [(EV_STARTED, "b")]
    with pytest.raises(ValueError, match="not running"):
        scheduler.emit(first, b"late")
    assert scheduler.position(first) is None


# --- permits ----------------------------------------------------------------------------


def test_permits_bound_each_class_and_the_total():
    scheduler = make(level_caps=[2, 2], total_cap=3)
    assert [scheduler.try_enter(0) for _ in range(3)] == [True, True, False]
    assert [scheduler.try_enter(1) for _ in range(2)] == [True, False]
    scheduler.leave(0)
    assert scheduler.try_enter(1)
    assert [scheduler.num_entered(level) for level in (0, 1)] == [1, 2]


def test_a_permit_comes_back_when_a_request_starts_expires_or_is_cancelled():
    scheduler = make(slots=[(1000, 1)], level_caps=[3], total_cap=3)
    submit(scheduler, "starts")
    submit(scheduler, "expires", expire_ns=10)
    handle = submit(scheduler, "leaves")
    assert not scheduler.try_enter(0)
    scheduler.round(1)
    assert scheduler.num_entered(0) == 2
    scheduler.round(10)
    assert scheduler.num_entered(0) == 1
    scheduler.cancel(handle)
    scheduler.round(11)
    assert scheduler.num_entered(0) == 0


def test_a_full_table_refuses_and_gives_the_permit_back():
    scheduler = make(table_capacity=2)
    submit(scheduler, "a")
    submit(scheduler, "b")
    assert scheduler.try_enter(0)
    with pytest.raises(TableFull):
        scheduler.submit(Work(), "c")
    assert scheduler.num_entered(0) == 2


@pytest.mark.parametrize("wrong", [{"key": 2}, {"lane": 1}])
def test_a_submit_to_nowhere_is_refused_and_gives_the_permit_back(wrong):
    scheduler = make()
    assert scheduler.try_enter(0)
    with pytest.raises(IndexError):
        scheduler.submit(Work(), "a", **wrong)
    assert_empty(scheduler)


# --- ends in the queue ------------------------------------------------------------------


def test_requests_expire_exactly_and_the_round_says_when_the_next_will():
    scheduler = make(slots=[(1000, 1)])
    submit(scheduler, "running")
    for sink, expire_ns in (("c", 30), ("a", 10), ("never", 0), ("b", 20)):
        submit(scheduler, sink, expire_ns=expire_ns)
    assert scheduler.round(0) == 10
    scheduler.poll()
    assert scheduler.round(9) == 10
    assert told(scheduler) == []
    assert scheduler.round(10) == 20
    assert told(scheduler) == [(EV_EXPIRED, "a"), (EV_SETTLED, "a")]
    assert scheduler.round(35) == -1
    assert told(scheduler) == [(EV_EXPIRED, "b"), (EV_SETTLED, "b"), (EV_EXPIRED, "c"), (EV_SETTLED, "c")]


def test_the_youngest_of_the_lowest_class_below_is_evicted_and_each_wish_is_answered_in_turn():
    scheduler = make(slots=[(1000, 1)], num_lanes=2, lane_weights=[1, 1])
    submit(scheduler, "running", level=7)
    scheduler.round(0)
    for sink, level, lane in (("a", 3, 0), ("b", 3, 1), ("c", 3, 0), ("d", 2, 0)):
        submit(scheduler, sink, level=level, lane=lane)
    scheduler.poll()
    for level in (0, 2, 2, 2, 0, 1, 2):
        assert scheduler.evict(level)
    scheduler.round(1)
    events = scheduler.poll()
    assert [sink for what, sink, _ in events if what == EV_EVICTED] == ["c", "b", "a", "d"]
    assert [was_evicted for what, _, was_evicted in events if what == EV_ANSWERED] == [True] * 3 + [False, True] + [
        False
    ] * 2
    # The answer comes when the one that left has been settled.
    assert [event[:2] for event in events[:3]] == [(EV_EVICTED, "c"), (EV_SETTLED, "c"), (EV_ANSWERED, None)]
    assert [level["num_evicted"] for level in scheduler.snapshot()["levels"]] == [0, 0, 1, 3, 0, 0, 0, 0]
    assert scheduler.num_running == 1


def test_one_that_is_cancelled_or_late_or_starts_in_the_same_round_is_told_one_end():
    scheduler = make(slots=[(1000, 1)])
    handle = submit(scheduler, "cancelled", level=1)
    scheduler.cancel(handle)
    scheduler.evict(0)
    assert run(scheduler) == [(EV_CANCELLED, "cancelled"), (EV_SETTLED, "cancelled"), (EV_ANSWERED, None)]
    handle = submit(scheduler, "evicted", level=1, expire_ns=1)
    scheduler.evict(0)
    scheduler.cancel(handle)
    assert run(scheduler, 5) == [(EV_EVICTED, "evicted"), (EV_SETTLED, "evicted"), (EV_ANSWERED, None)]
    submit(scheduler, "starts", level=1)
    assert run(scheduler, 6) == [(EV_STARTED, "starts")]
    scheduler.evict(0)
    assert run(scheduler, 7) == [(EV_ANSWERED, None)]


def test_evictions_under_way_are_bounded_and_fit_beside_all_requests():
    scheduler = make(table_capacity=4, level_caps=[4] * 8, total_cap=4)
    for number in range(4):
        scheduler.cancel(submit(scheduler, number, level=1))
    num_asked = 0
    while scheduler.evict(0):
        num_asked += 1
    assert num_asked == 1024
    while scheduler.round(0) == 0:
        pass
    assert not scheduler.evict(0)
    events = scheduler.poll()
    assert sum(what == EV_ANSWERED for what, *_ in events) == 1024
    assert sum(what == EV_SETTLED for what, *_ in events) == 4
    assert scheduler.evict(0)
    with pytest.raises(IndexError):
        scheduler.evict(8)


def test_a_request_that_is_late_already_does_not_start():
    scheduler = make()
    submit(scheduler, "a", expire_ns=10)
    assert run(scheduler, 10) == [(EV_EXPIRED, "a"), (EV_SETTLED, "a")]
    assert_empty(scheduler)


def test_expiries_leave_in_the_order_of_arrival_when_they_tie():
    scheduler = make(slots=[(1000, 1)])
    submit(scheduler, "running")
    for sink in "abcdef":
        submit(scheduler, sink, expire_ns=10)
    scheduler.round(0)
    scheduler.poll()
    assert [sink for what, sink in run(scheduler, 10) if what == EV_EXPIRED] == list("abcdef")


def test_a_cancelled_one_leaves_the_queue_at_once():
    scheduler = make(slots=[(1000, 1)])
    submit(scheduler, "running")
    handle = submit(scheduler, "waits")
    scheduler.round(0)
    scheduler.poll()
    scheduler.cancel(handle)
    scheduler.cancel(handle)
    assert run(scheduler) == [(EV_CANCELLED, "waits"), (EV_SETTLED, "waits")]
    scheduler.cancel(handle)
    assert run(scheduler) == []


def test_a_running_one_is_cancelled_by_its_flag_and_ended_by_its_worker():
    scheduler = make()
    handle = submit(scheduler, "a")
    scheduler.round(0)
    assert not scheduler.is_cancelled(handle)
    scheduler.cancel(handle)
    assert scheduler.is_cancelled(handle)
    scheduler.round(0)
    scheduler.finish(handle, Finish.FINISH_CANCELLED)
    assert run(scheduler)[-2:] == [(EV_FINISHED, "a"), (EV_SETTLED, "a")]
    assert_empty(scheduler)


def test_a_cancel_that_crosses_the_end_of_its_request_hits_nobody_else():
    scheduler = make(table_capacity=1)
    first = submit(scheduler, "a")
    scheduler.round(0)
    scheduler.finish(first)
    scheduler.round(0)
    scheduler.cancel(first)
    assert told(scheduler)[-1] == (EV_SETTLED, "a")
    submit(scheduler, "b")
    assert run(scheduler) == [(EV_STARTED, "b")]


def test_a_request_that_no_device_slot_can_ever_hold_ends_at_once():
    scheduler = make(slots=[(100, 1, 7)])
    submit(scheduler, "too long", model=7, footprint_tokens=101)
    submit(scheduler, "no such model", model=8)
    assert run(scheduler) == [
        (EV_NO_DEVICE, "too long"),
        (EV_SETTLED, "too long"),
        (EV_NO_DEVICE, "no such model"),
        (EV_SETTLED, "no such model"),
    ]
    assert_empty(scheduler)


# --- placement --------------------------------------------------------------------------


@pytest.mark.parametrize("model", [0, 1])
def test_a_key_is_charged_by_the_weight_that_it_has_now_with_every_model(model):
    def run_all():
        """Who starts, of ten of either key that wait, one at a time."""
        sinks = {submit(scheduler, key, key=key, model=model): key for key in (0, 1) for _ in range(5)}
        order = []
        while sinks:
            scheduler.round(0)
            (handle,) = scheduler.take(model)
            order.append(sinks.pop(handle))
            scheduler.finish(handle, num_completion_tokens=20)
            scheduler.end_step()
            scheduler.round(0)
            scheduler.poll()
        return order

    scheduler = make(slots=[(1000, 1), (1000, 1, 1)], level_caps=[12] * 8)
    assert run_all()[:6].count(1) == 3
    scheduler.set_key_weight(1, 4.0)
    assert run_all()[:6].count(1) >= 4
    scheduler.set_key_weight(1, 0.25)
    assert run_all()[:6].count(1) <= 2
    for key, weight, error in ((2, 1.0, IndexError), (0, 0.0, ValueError), (0, 1e5, ValueError)):
        with pytest.raises(error):
            scheduler.set_key_weight(key, weight)


@pytest.mark.parametrize(("before", "after"), [(0.1, 10.0), (10.0, 0.1)])
def test_a_key_gets_back_what_it_was_charged_though_its_weight_is_another_now(before, after):
    scheduler = make(slots=[(1000, 1)], level_caps=[12] * 8)
    scheduler.set_key_weight(1, before)
    handle = submit(scheduler, "long", key=1, num_prompt_tokens=1, max_tokens=400, footprint_tokens=500)
    scheduler.round(0)
    assert scheduler.take(0) == [handle]
    scheduler.set_key_weight(1, after)
    scheduler.finish(handle, num_completion_tokens=0)
    scheduler.end_step()
    scheduler.round(0)
    scheduler.set_key_weight(1, 1.0)
    sinks = {submit(scheduler, key, key=key): key for key in (0, 1) for _ in range(5)}
    order = []
    while sinks:
        scheduler.round(0)
        (handle,) = scheduler.take(0)
        order.append(sinks.pop(handle))
        scheduler.finish(handle, num_completion_tokens=1)
        scheduler.end_step()
        scheduler.round(0)
        scheduler.poll()
    # Neither a debt nor a credit of hundreds of tokens is left.
    assert 2 <= order[:6].count(1) <= 4


def test_the_device_slot_that_runs_least_for_its_weight_is_taken():
    scheduler = make(slots=[(1000, 4), (1000, 4, 0, 2.0)])
    for sink in range(6):
        submit(scheduler, sink)
    scheduler.round(0)
    assert [len(scheduler.take(slot)) for slot in (0, 1)] == [2, 4]


def test_a_request_goes_only_where_its_model_is():
    scheduler = make(slots=[(1000, 4, 1), (1000, 4, 2)])
    first = submit(scheduler, "a", model=2)
    second = submit(scheduler, "b", model=1)
    scheduler.round(0)
    assert [scheduler.take(slot) for slot in (0, 1)] == [[second], [first]]


def test_kv_tokens_are_promised_in_full_before_a_start():
    scheduler = make(slots=[(100, 8)])
    handles = [submit(scheduler, sink, footprint_tokens=40) for sink in range(3)]
    scheduler.round(0)
    assert scheduler.take(0) == handles[:2]
    assert scheduler.snapshot()["slots"][0]["reserved"] == 80
    assert scheduler.key_usage(0)["reserved"] == 80
    scheduler.finish(handles[1])
    scheduler.round(1)
    assert scheduler.take(0) == handles[2:]


def test_a_round_is_bounded_and_says_that_there_is_more():
    scheduler = make(table_capacity=3000, level_caps=[3000], total_cap=3000, slots=[(10**6, 3000)])
    for sink in range(2000):
        submit(scheduler, sink)
    assert scheduler.round(5) == 5
    assert scheduler.num_running == 256
    while scheduler.round(5) == 5:
        pass
    assert scheduler.num_running == 2000
    assert [event[1] for event in scheduler.poll()] == list(range(2000))


def test_many_expiries_are_spread_over_rounds():
    scheduler = make(table_capacity=3000, level_caps=[3000], total_cap=3000, slots=[(30, 1)])
    submit(scheduler, "runs")
    for sink in range(2500):
        submit(scheduler, sink, expire_ns=9)
    while scheduler.round(0) == 0:
        pass
    rounds = 1
    while scheduler.round(9) == 9:
        rounds += 1
    assert rounds == 3
    assert scheduler.num_waiting(0) == 0


# --- holding back -----------------------------------------------------------------------


def starved(scheduler, handle):
    """Emit until there is no more room; what was taken."""
    taken = b""
    while scheduler.emit(handle, b"x" * 8):
        taken += b"x" * 8
    return taken


def test_a_held_request_is_told_nothing_and_its_worker_finds_its_buffer_full():
    scheduler = make(out_buffer_bytes=64)
    slow, fast = submit(scheduler, "slow"), submit(scheduler, "fast")
    run(scheduler)
    scheduler.hold(slow)
    taken = starved(scheduler, slow)
    assert len(taken) <= 64
    for _ in range(5):
        assert starved(scheduler, fast)
        assert {sink for _, sink in told(scheduler)} == {"fast"}
        assert not scheduler.emit(slow, b"y")
    scheduler.resume(slow)
    assert scheduler.poll() == [(EV_OUTPUT, "slow", taken, len(taken) // 8, None)]
    assert scheduler.emit(slow, b"y")
    assert scheduler.poll() == [(EV_OUTPUT, "slow", b"y", 1, None)]


def test_a_resume_wakes_the_loop_though_the_worker_has_nothing_new():
    scheduler = make()
    handle = submit(scheduler, "a")
    run(scheduler)
    scheduler.hold(handle)
    scheduler.emit(handle, b"x")
    scheduler.end_step()
    assert told(scheduler) == []
    assert not readable(scheduler.loop_fd)
    scheduler.resume(handle)
    assert readable(scheduler.loop_fd)
    assert told(scheduler) == [(EV_OUTPUT, "a")]
    scheduler.resume(handle)
    assert not readable(scheduler.loop_fd)
    assert told(scheduler) == []


def test_what_settled_while_it_was_held_is_kept_back_whole_until_it_is_resumed():
    scheduler = make(table_capacity=1)
    handle = submit(scheduler, "a")
    scheduler.hold(handle)
    assert run(scheduler) == [(EV_STARTED, "a")]
    scheduler.emit(handle, b"x")
    scheduler.finish(handle)
    assert run(scheduler) == []
    assert (scheduler.state_of(handle), scheduler.snapshot()["num_live"]) == ("running", 1)
    scheduler.resume(handle)
    assert told(scheduler) == [(EV_OUTPUT, "a"), (EV_FINISHED, "a"), (EV_SETTLED, "a")]
    assert_empty(scheduler)


def test_a_hold_and_its_resume_between_two_polls_lose_and_repeat_nothing():
    scheduler = make(table_capacity=1)
    handle = submit(scheduler, "a")
    run(scheduler)
    for text in (b"1", b"2"):
        scheduler.emit(handle, text)
        scheduler.hold(handle)
        scheduler.resume(handle)
    assert [event[2] for event in scheduler.poll()] == [b"12"]
    scheduler.hold(handle)
    scheduler.emit(handle, b"3")
    assert told(scheduler) == []
    # Looked at again, and held again before it could be.
    scheduler.resume(handle)
    scheduler.hold(handle)
    assert told(scheduler) == []
    scheduler.resume(handle)
    scheduler.hold(handle)
    scheduler.resume(handle)
    scheduler.emit(handle, b"4")
    assert [event[2] for event in scheduler.poll()] == [b"34"]
    scheduler.finish(handle)
    assert run(scheduler) == [(EV_FINISHED, "a"), (EV_SETTLED, "a")]


def test_a_held_request_that_is_cancelled_comes_to_its_end():
    scheduler = make()
    runs, settled = submit(scheduler, "runs"), submit(scheduler, "settled")
    run(scheduler)
    for handle in (runs, settled):
        scheduler.hold(handle)
        scheduler.emit(handle, b"x")
    scheduler.finish(settled)
    assert run(scheduler) == []
    for handle in (runs, settled):
        scheduler.cancel(handle)
        # Its reader has left: there is nobody to wait for.
        scheduler.hold(handle)
    scheduler.finish(runs, Finish.FINISH_CANCELLED)
    assert sorted(run(scheduler)) == [
        (what, sink) for what in (EV_FINISHED, EV_OUTPUT, EV_SETTLED) for sink in ("runs", "settled")
    ]
    assert_empty(scheduler)


def test_a_hold_ends_with_the_finish_and_the_end_in_a_queue_needs_no_resume():
    scheduler = make(slots=[(1000, 1)])
    runs, waits = submit(scheduler, "runs"), submit(scheduler, "waits", expire_ns=5)
    scheduler.hold(waits)
    run(scheduler)
    scheduler.finish(runs)
    assert told(scheduler) == [(EV_FINISHED, "runs")]
    scheduler.hold(runs)
    assert run(scheduler, 5) == [(EV_SETTLED, "runs"), (EV_EXPIRED, "waits"), (EV_SETTLED, "waits")]
    for handle in (runs, waits):
        scheduler.hold(handle)
        scheduler.resume(handle)
    assert told(scheduler) == []
    assert_empty(scheduler)


def test_a_held_request_whose_device_slot_dies_keeps_what_came_out():
    scheduler = make()
    handle = submit(scheduler, "a")
    run(scheduler)
    scheduler.hold(handle)
    scheduler.emit(handle, b"x", 2)
    scheduler.report_dead(0)
    assert run(scheduler) == []
    scheduler.resume(handle)
    output, finished, settled = scheduler.poll()
    assert output == (EV_OUTPUT, "a", b"x", 2, None)
    assert (finished[2].finish, finished[2].num_completion_tokens) == (Finish.FINISH_DEVICE, 2)
    assert settled[0] == EV_SETTLED


def test_a_hold_is_not_inherited_by_the_next_request_in_the_same_entry():
    scheduler = make(table_capacity=1)
    first = submit(scheduler, "a")
    run(scheduler)
    scheduler.finish(first)
    told(scheduler)
    scheduler.hold(first)
    run(scheduler)
    second = submit(scheduler, "b")
    scheduler.hold(first)
    run(scheduler)
    scheduler.emit(second, b"x")
    assert told(scheduler) == [(EV_OUTPUT, "b")]


# --- death of a device slot -------------------------------------------------------------


def test_a_dead_device_slot_ends_what_it_ran_and_what_only_it_could_serve():
    scheduler = make(slots=[(1000, 2)])
    handles = [submit(scheduler, sink) for sink in "abc"]
    scheduler.round(0)
    scheduler.emit(handles[0], b"part", 2)
    scheduler.finish(handles[1], num_completion_tokens=4)
    scheduler.poll()
    scheduler.report_dead(0)
    scheduler.round(1)
    events = {}
    for what, sink, *rest in scheduler.poll():
        events.setdefault(sink, []).append((what, *rest))
    assert [event[0] for event in events["a"]] == [EV_FINISHED, EV_SETTLED]
    outcome = events["a"][0][1]
    assert (outcome.finish, outcome.num_completion_tokens) == (Finish.FINISH_DEVICE, 2)
    assert events["b"] == [(EV_SETTLED, None)]
    assert events["c"] == [(EV_NO_DEVICE, None), (EV_SETTLED, None)]
    assert scheduler.snapshot()["slots"][0]["is_dead"]
    assert scheduler.key_usage(0) == {"reserved": 0, "prompt_tokens": 10, "completion_tokens": 4}
    assert_empty(scheduler)
    submit(scheduler, "d")
    assert run(scheduler, 2) == [(EV_NO_DEVICE, "d"), (EV_SETTLED, "d")]


def test_a_key_pays_nothing_for_what_died_with_its_device_slot():
    scheduler = make(slots=[(10**4, 1), (10**4, 1)])
    lost = submit(scheduler, "lost", key=0, max_tokens=1000, footprint_tokens=1010)
    handle = submit(scheduler, "runs", key=1, max_tokens=10)
    submit(scheduler, "a", key=0)
    submit(scheduler, "b", key=1)
    scheduler.round(0)
    scheduler.take(1)
    scheduler.report_dead(0)
    scheduler.cancel(lost)
    scheduler.round(1)
    scheduler.poll()
    scheduler.finish(handle, num_completion_tokens=10)
    assert run(scheduler, 2)[-1] == (EV_STARTED, "a")


def test_the_living_go_on_when_another_device_slot_dies():
    scheduler = make(slots=[(1000, 1), (1000, 1)])
    handles = [submit(scheduler, sink) for sink in "abc"]
    scheduler.round(0)
    scheduler.poll()
    scheduler.report_dead(0)
    assert run(scheduler, 1) == []
    assert scheduler.take(1) == [handles[1]]
    scheduler.finish(handles[1])
    # Who ran before goes first, and starts only once.
    assert run(scheduler, 2) == [(EV_FINISHED, "b"), (EV_SETTLED, "b")]
    assert scheduler.take(1) == [handles[0]]
    scheduler.finish(handles[0])
    assert run(scheduler, 3) == [(EV_FINISHED, "a"), (EV_SETTLED, "a"), (EV_STARTED, "c")]
    assert scheduler.take(1) == [handles[2]]


def test_what_a_late_worker_says_of_a_settled_request_is_not_heard():
    scheduler = make(table_capacity=2, slots=[(1000, 1), (1000, 1, 1)])
    handle = submit(scheduler, "a")
    scheduler.round(0)
    scheduler.poll()
    scheduler.report_dead(0)
    scheduler.round(1)
    # The worker wakes up: the request is settled, the loop does not know it yet.
    scheduler.emit(handle, b"late")
    scheduler.finish(handle)
    assert told(scheduler)[-1] == (EV_SETTLED, "a")
    submit(scheduler, "b", model=1)
    scheduler.round(2)
    assert told(scheduler) == [(EV_STARTED, "b")]
    assert scheduler.snapshot()["num_kept"] == 1
    assert scheduler.snapshot()["num_broken"] == 0


# --- lanes, aging, shares ---------------------------------------------------------------


def test_lanes_share_the_sequences_of_all_living_device_slots():
    scheduler = make(slots=[(10**4, 4), (10**4, 4)], num_lanes=2, lane_weights=[3, 1])
    for sink in range(8):
        submit(scheduler, sink, lane=0, level=0)
    for sink in range(10, 14):
        submit(scheduler, sink, lane=1, level=7)
    assert [sink for _, sink in run(scheduler)] == [0, 1, 2, 3, 4, 5, 10, 11]


def test_aging_and_promotions_are_counted():
    scheduler = make(slots=[(1000, 1)], aging_step_ns=10, aged_every=1)
    handle = submit(scheduler, "runs", level=0)
    scheduler.round(0)
    submit(scheduler, "old", level=3, arrival_ns=0)
    submit(scheduler, "new", level=0, arrival_ns=31)
    scheduler.round(31)
    scheduler.finish(handle)
    scheduler.round(34)
    assert [sink for what, sink in told(scheduler) if what == EV_STARTED] == ["runs", "old"]
    level = scheduler.snapshot()["levels"][3]
    assert (level["num_promoted"], level["num_aged_starts"], level["num_started"]) == (3, 1, 1)
    assert level["wait_ns_sum"] == 34


def test_a_key_is_charged_what_it_used_and_not_what_it_asked_for():
    scheduler = make(slots=[(10**4, 1)])
    handle = submit(scheduler, "a0", key=0, max_tokens=1000, footprint_tokens=1010)
    submit(scheduler, "a1", key=0)
    submit(scheduler, "b0", key=1)
    submit(scheduler, "b1", key=1)
    order = []
    for now_ns in range(5):
        started = [sink for what, sink in run(scheduler, now_ns) if what == EV_STARTED]
        order += started
        for handle in scheduler.take(0):
            scheduler.finish(handle, num_completion_tokens=1)
    # a0 cost 12 in the end, so a1 is next to b0, which came to a counter of 0.
    assert order == ["a0", "b0", "a1", "b1"]


# --- figures ----------------------------------------------------------------------------


def test_positions_count_down_in_a_fifo_level():
    scheduler = make(slots=[(1000, 1)])
    running = submit(scheduler, "runs", level=1)
    scheduler.round(0)
    handles = [submit(scheduler, sink, level=1) for sink in range(3)]
    better = submit(scheduler, "better", level=0)
    assert scheduler.position(handles[0]) is None
    scheduler.round(0)
    assert scheduler.position(running) is None
    assert [scheduler.position(handle) for handle in (*handles, better)] == [2, 3, 4, 1]
    scheduler.cancel(better)
    scheduler.finish(running)
    scheduler.round(1)
    assert [scheduler.position(handle) for handle in handles] == [None, 1, 2]


def test_a_position_is_that_in_its_lane():
    scheduler = make(slots=[(1000, 1)], num_lanes=2, lane_weights=(3, 1))
    submit(scheduler, "runs")
    scheduler.round(0)
    short = [submit(scheduler, sink, level=1, lane=0) for sink in range(2)]
    long = [submit(scheduler, sink, level=1, lane=1) for sink in range(2)]
    worse = submit(scheduler, "worse", level=2, lane=1)
    better = submit(scheduler, "better", level=0, lane=0)
    scheduler.round(1)
    places = [scheduler.position(handle) for handle in (*short, *long, worse, better)]
    assert places == [2, 3, 1, 2, 3, 1]
    queues = scheduler.snapshot()["queues"]
    assert [level["num_waiting"] for level in queues[0][:3]] == [1, 2, 0]
    assert [level["num_waiting"] for level in queues[1][:3]] == [0, 2, 1]


def test_starts_and_waits_are_counted_by_lane_and_class():
    """One of four sequences comes free every tenth of a second."""
    caps = {"table_capacity": 1000, "level_caps": [1000] * 3, "total_cap": 1000}
    scheduler = make(slots=[(10**6, 4)], num_lanes=2, lane_weights=(3, 1), **caps)
    for sink in range(200):
        submit(scheduler, sink, level=1, lane=sink % 2)
    running = []
    for tick in range(100):
        scheduler.round(tick * S // 10)
        running += scheduler.take(0)
        scheduler.finish(running.pop(0))
    queues = scheduler.snapshot()["queues"]
    short, long = queues[0][1], queues[1][1]
    assert short["num_started"] + long["num_started"] == 103
    assert short["wait_ns_sum"] + long["wait_ns_sum"] == sum(range(100)) * S // 10
    # Three short for one long.
    assert short["drain_rate"] == pytest.approx(7.5, rel=0.2)
    assert long["drain_rate"] == pytest.approx(2.5, rel=0.2)
    assert queues[0][0]["drain_rate"] == 0


def test_the_oldest_waiting_and_the_counts_are_published_per_class():
    scheduler = make(slots=[(1000, 1)])
    submit(scheduler, "runs", level=2, arrival_ns=3)
    submit(scheduler, "waits", level=2, arrival_ns=4, expire_ns=99)
    submit(scheduler, "waits too", level=2, arrival_ns=5)
    scheduler.round(6)
    level = scheduler.snapshot()["levels"][2]
    assert (level["num_waiting"], level["num_enqueued"], level["num_started"]) == (2, 3, 1)
    assert level["oldest_arrival_ns"] == 4
    assert scheduler.num_waiting(2) == 2
    assert scheduler.num_running == 1
    scheduler.round(99)
    level = scheduler.snapshot()["levels"][2]
    assert (level["num_expired"], level["oldest_arrival_ns"]) == (1, 5)
    # The others were not looked at: there was no sequence to give.
    assert scheduler.snapshot()["num_decisions"] == 1
    assert scheduler.snapshot()["num_rounds"] == 2


def test_the_drain_rate_follows_the_starts_of_a_class_that_waits():
    scheduler = make(table_capacity=1000, level_caps=[1000] * 2, total_cap=1000, slots=[(10**6, 1)])
    for sink in range(300):
        submit(scheduler, sink)
    assert scheduler.drain_rate(0) == 0.0
    for tick in range(200):
        scheduler.round(tick * S // 10)
        for handle in scheduler.take(0):
            scheduler.finish(handle)
    assert scheduler.drain_rate(0) == pytest.approx(10, rel=0.02)
    assert scheduler.drain_rate(1) == 0.0
    assert scheduler.drain_rate_all == scheduler.drain_rate(0)


def test_idle_time_does_not_lower_the_drain_rate():
    scheduler = make(slots=[(1000, 1)])
    now_ns = 0
    for _ in range(20):
        for sink in range(4):
            submit(scheduler, sink, arrival_ns=now_ns)
        for _ in range(5):
            scheduler.round(now_ns)
            for handle in scheduler.take(0):
                scheduler.finish(handle)
            now_ns += S // 10
        scheduler.poll()
        now_ns += 3600 * S
    assert scheduler.drain_rate(0) == pytest.approx(10, rel=0.35)


def test_a_waiting_request_costs_at_most_256_bytes():
    scheduler = make()
    assert scheduler.bytes_per_waiting <= 256
    assert scheduler.table_capacity == 16


# --- waking -----------------------------------------------------------------------------


def readable(fd):
    return bool(select.select([fd], [], [], 0)[0])


def test_the_loop_is_woken_once_per_poll_however_much_there_is():
    scheduler = make()
    handles = [submit(scheduler, sink) for sink in "ab"]
    scheduler.round(0)
    assert readable(scheduler.loop_fd)
    scheduler.poll()
    assert not readable(scheduler.loop_fd)
    for handle in handles:
        scheduler.emit(handle, b"x")
    assert not readable(scheduler.loop_fd)
    assert [scheduler.end_step() for _ in range(3)] == [1, 0, 0]
    assert int.from_bytes(os.read(scheduler.loop_fd, 8), "little") == 1
    assert told(scheduler) == [(EV_OUTPUT, "a"), (EV_OUTPUT, "b")]
    assert scheduler.end_step() == 1


def test_a_round_with_no_news_wakes_nobody():
    scheduler = make()
    scheduler.round(0)
    assert not readable(scheduler.loop_fd)


# --- what is refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"table_capacity": 0},
        {"level_caps": []},
        {"level_caps": [1] * 17},
        {"num_keys": 0},
        {"out_buffer_bytes": 100},
        {"out_buffer_bytes": 32},
        {"key_weights": [1, 0]},
        {"key_weights": [1]},
        {"lane_weights": [1, 1]},
        {"aging_step_ns": -1},
    ],
)
def test_a_scheduler_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=r"."):
        make(**wrong)


@pytest.mark.parametrize("wrong", [{"num_sequences": 0}, {"weight": 0.0}])
def test_a_device_slot_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=r"."):
        make().add_device_slot(**{"kv_tokens": 1, "num_sequences": 1, **wrong})


def test_device_slots_are_bounded_and_the_first_of_a_model_comes_before_requests():
    scheduler = make()
    submit(scheduler, "a")
    for model in (1, 64):
        with pytest.raises(RuntimeError):
            scheduler.add_device_slot(kv_tokens=1, num_sequences=1, model=model)
    scheduler = make(slots=[(1, 1)] * 64)
    with pytest.raises(ValueError, match="too many"):
        scheduler.add_device_slot(kv_tokens=1, num_sequences=1)


def test_names_of_nothing_are_errors():
    scheduler = make()
    for call in (
        lambda: scheduler.try_enter(8),
        lambda: scheduler.leave(8),
        lambda: scheduler.num_waiting(8),
        lambda: scheduler.num_entered(8),
        lambda: scheduler.drain_rate(8),
        lambda: scheduler.key_usage(2),
        lambda: scheduler.take(1),
        lambda: scheduler.report_dead(1),
    ):
        with pytest.raises(IndexError):
            call()
    for call in (scheduler.emit, scheduler.finish):
        with pytest.raises(ValueError, match="not running"):
            call(1 << 32, *([b""] if call == scheduler.emit else []))
    handle = submit(scheduler, "a")
    scheduler.round(0)
    with pytest.raises(ValueError, match="no such finish"):
        scheduler.finish(handle, 9)
    with pytest.raises(TypeError):
        scheduler.submit(None, "sink")
    assert issubclass(_core.LedgerBroken, Exception)
