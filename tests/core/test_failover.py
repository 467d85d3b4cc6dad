"""What ran on a device slot that died goes on elsewhere, and its client hears nothing of it."""

import pytest

from lqs._core import EV_EXPIRED, EV_FINISHED, EV_OUTPUT, EV_SETTLED, EV_STARTED, Finish

from .test_scheduler import assert_empty, make, run, submit, told

TWO = [(1000, 2), (1000, 2)]


def outcome_of(events, sink):
    (outcome,) = [event[2] for event in events if event[:2] == (EV_FINISHED, sink)]
    return outcome


def lose(scheduler, slot, now_ns=1):
    """Its device slot dies; the scheduler sees it, then the loop, then the scheduler again."""
    scheduler.report_dead(slot)
    scheduler.round(now_ns)
    events = scheduler.poll()
    scheduler.round(now_ns)
    return events


def begun(scheduler, *, num_tokens=3, **options):
    """One that has made some tokens and told their text."""
    handle = submit(scheduler, "a", **options)
    scheduler.round(0)
    assert scheduler.take(0) == [handle]
    for token in range(num_tokens):
        scheduler.note_made(handle, 100 + token)
        scheduler.emit(handle, b"%d " % token)
    scheduler.poll()
    return handle


def test_it_goes_on_from_its_tokens_and_is_one_answer():
    scheduler = make(slots=TWO)
    handle = begun(scheduler)
    assert lose(scheduler, 0) == []
    assert scheduler.take(1) == [handle]
    assert scheduler.given(handle) == [100, 101, 102]
    assert scheduler.state_of(handle) == "running"
    scheduler.note_made(handle, 103)
    scheduler.emit(handle, b"3")
    scheduler.finish(handle, num_completion_tokens=4)
    scheduler.round(2)
    events = scheduler.poll()
    assert [event[:3] for event in events] == [
        (EV_OUTPUT, "a", b"3"),
        (EV_FINISHED, "a", outcome_of(events, "a")),
        (EV_SETTLED, "a", None),
    ]
    outcome = outcome_of(events, "a")
    assert (outcome.finish, outcome.num_completion_tokens, outcome.slot) == (Finish.FINISH_STOP, 4, 1)
    # Paid once, and as if nothing had been.
    assert scheduler.key_usage(0) == {"reserved": 0, "prompt_tokens": 10, "completion_tokens": 4}
    snapshot = scheduler.snapshot()
    assert (snapshot["num_lost"], snapshot["num_restarted"], snapshot["num_again"]) == (1, 1, 0)
    assert_empty(scheduler)


def test_what_came_out_until_the_loop_looks_is_told_and_what_comes_later_is_not():
    scheduler = make(slots=TWO)
    handle = begun(scheduler, num_tokens=1)
    scheduler.report_dead(0)
    scheduler.round(1)
    # It hung and wakes: the loop has not looked yet, so this is part of the answer.
    scheduler.note_made(handle, 101)
    scheduler.emit(handle, b"in time")
    assert [event[:4] for event in scheduler.poll()] == [(EV_OUTPUT, "a", b"in time", 1)]
    scheduler.note_made(handle, 102)
    scheduler.emit(handle, b"late")
    scheduler.finish(handle, num_completion_tokens=3)
    assert scheduler.poll() == []
    scheduler.round(2)
    assert scheduler.take(1) == [handle]
    assert scheduler.given(handle) == [100, 101]
    assert scheduler.poll() == []
    scheduler.finish(handle, num_completion_tokens=2)
    assert run(scheduler, 3) == [(EV_FINISHED, "a"), (EV_SETTLED, "a")]
    assert_empty(scheduler)


def test_one_that_had_said_its_last_word_is_over():
    scheduler = make(slots=TWO)
    handle = begun(scheduler)
    scheduler.report_dead(0)
    scheduler.round(1)
    scheduler.finish(handle, num_completion_tokens=3)
    assert told(scheduler) == [(EV_FINISHED, "a"), (EV_SETTLED, "a")]
    assert run(scheduler, 2) == []
    assert scheduler.take(1) == []
    assert_empty(scheduler)


def test_one_that_was_never_taken_by_its_worker_begins_elsewhere():
    scheduler = make(slots=TWO)
    handle = submit(scheduler, "a")
    scheduler.round(0)
    assert told(scheduler) == [(EV_STARTED, "a")]
    assert lose(scheduler, 0) == []
    assert (scheduler.take(1), scheduler.given(handle)) == ([handle], [])
    # A worker that wakes finds it in its ring, as it was, and may do to it what it likes.
    assert scheduler.take(0) == [handle]


def test_those_that_go_on_go_before_all_that_wait_and_in_the_order_of_their_classes():
    scheduler = make(slots=[(1000, 3), (1000, 1)])
    scheduler.drain_slot(1)
    lost = {level: submit(scheduler, level, level=level) for level in (3, 0, 1)}
    scheduler.round(0)
    assert len(scheduler.take(0)) == 3
    scheduler.undrain_slot(1)
    first, last = (submit(scheduler, sink, level=0) for sink in ("first", "last"))
    scheduler.report_dead(0)
    order = []
    for now_ns in range(1, 8):
        scheduler.round(now_ns)
        scheduler.poll()
        for handle in scheduler.take(1):
            order.append(handle)
            scheduler.finish(handle)
    # When there was a place for the first, the loop had not said yet who goes on.
    assert order == [first, lost[0], lost[1], lost[3], last]


def test_what_one_of_them_could_have_is_kept_for_it():
    """The large one waits for the whole of the other device slot, and no small one gets in its way."""
    scheduler = make(slots=[(1000, 2), (1000, 2)])
    large = submit(scheduler, "large", num_prompt_tokens=900, max_tokens=100, footprint_tokens=1000)
    small = [submit(scheduler, f"s{i}") for i in range(2)]
    scheduler.round(0)
    assert (scheduler.take(0), scheduler.take(1)) == ([large], small)
    scheduler.poll()
    lose(scheduler, 0)
    submit(scheduler, "new", level=0)
    scheduler.finish(small[0])
    assert run(scheduler, 2) == [(EV_FINISHED, "s0"), (EV_SETTLED, "s0")]
    scheduler.finish(small[1])
    assert run(scheduler, 3) == [(EV_FINISHED, "s1"), (EV_SETTLED, "s1")]
    assert scheduler.take(1) == [large]
    scheduler.finish(large)
    assert (EV_STARTED, "new") in run(scheduler, 4)


def test_another_models_device_slots_are_kept_for_nobody_of_this_one():
    scheduler = make(slots=[(1000, 1), (1000, 1), (1000, 1, 1)])
    for sink in "ab":
        submit(scheduler, sink)
    scheduler.round(0)
    scheduler.poll()
    lose(scheduler, 0)
    submit(scheduler, "other", model=1)
    assert (EV_STARTED, "other") in run(scheduler, 2)
    assert scheduler.snapshot()["num_again"] == 1


@pytest.mark.parametrize("when", ["before the loop looks", "after"])
def test_a_client_that_leaves_meanwhile_leaves_nothing_behind(when):
    scheduler = make(slots=[(1000, 1), (1000, 1)])
    handle = begun(scheduler)
    other = submit(scheduler, "b")
    scheduler.round(0)
    scheduler.poll()
    if when == "after":
        lose(scheduler, 0)
        scheduler.cancel(handle)
        scheduler.round(2)
    else:
        scheduler.report_dead(0)
        scheduler.round(1)
        scheduler.cancel(handle)
    events = scheduler.poll()
    assert [event[0] for event in events] == [EV_FINISHED, EV_SETTLED]
    outcome = outcome_of(events, "a")
    assert (outcome.finish, outcome.num_completion_tokens) == (Finish.FINISH_CANCELLED, 3)
    scheduler.finish(other)
    run(scheduler, 3)
    assert_empty(scheduler)


def test_its_own_time_limit_ends_it_and_the_queues_does_not():
    scheduler = make(slots=[(1000, 1), (1000, 1)])
    begun(scheduler, expire_ns=50, stop_ns=100)
    submit(scheduler, "b")
    scheduler.round(0)
    scheduler.poll()
    lose(scheduler, 0)
    submit(scheduler, "c", expire_ns=60)
    assert scheduler.round(49) == 60
    assert run(scheduler, 60) == [(EV_EXPIRED, "c"), (EV_SETTLED, "c")]
    assert scheduler.round(99) == 100
    scheduler.round(100)
    events = scheduler.poll()
    assert outcome_of(events, "a").finish == Finish.FINISH_TIMEOUT


def test_with_nowhere_to_go_it_ends_and_so_it_does_when_the_last_one_dies_meanwhile():
    scheduler = make(slots=[(1000, 1), (1000, 1)])
    begun(scheduler)
    submit(scheduler, "b")
    scheduler.round(0)
    scheduler.poll()
    lose(scheduler, 0)
    scheduler.report_dead(1)
    scheduler.round(2)
    events = scheduler.poll()
    assert [outcome_of(events, sink).finish for sink in "ab"] == [Finish.FINISH_DEVICE] * 2
    assert outcome_of(events, "a").num_completion_tokens == 3
    assert_empty(scheduler)


def test_one_that_cannot_be_held_by_what_is_left_ends():
    scheduler = make(slots=[(1000, 1), (100, 1)])
    submit(scheduler, "large", footprint_tokens=500)
    scheduler.round(0)
    scheduler.poll()
    events = lose(scheduler, 0)
    assert outcome_of(events, "large").finish == Finish.FINISH_DEVICE
    assert_empty(scheduler)


def test_a_request_that_was_there_each_time_is_not_tried_everywhere():
    scheduler = make(slots=[(1000, 1)] * 5)
    handle = submit(scheduler, "a")
    scheduler.round(0)
    scheduler.poll()
    for slot in range(2):
        assert lose(scheduler, slot) == []
        assert scheduler.take(slot + 1) == [handle]
    events = lose(scheduler, 2)
    assert outcome_of(events, "a").finish == Finish.FINISH_DEVICE
    assert not scheduler.snapshot()["slots"][3]["num_running"]
    assert_empty(scheduler)


def test_tokens_survive_a_second_loss_before_the_next_worker_has_looked():
    scheduler = make(slots=[(1000, 1)] * 3)
    handle = begun(scheduler)
    lose(scheduler, 0)
    lose(scheduler, 1)
    assert scheduler.take(2) == [handle]
    assert scheduler.given(handle) == [100, 101, 102]
    scheduler.finish(handle, num_completion_tokens=3)
    run(scheduler, 5)
    assert scheduler.key_usage(0) == {"reserved": 0, "prompt_tokens": 10, "completion_tokens": 3}
    assert_empty(scheduler)


def test_one_whose_reader_is_slow_goes_on_when_that_reads_again():
    scheduler = make(slots=TWO)
    handle = begun(scheduler, num_tokens=1)
    scheduler.hold(handle)
    scheduler.note_made(handle, 101)
    scheduler.emit(handle, b"held")
    assert lose(scheduler, 0) == []
    assert scheduler.take(1) == []
    assert scheduler.state_of(handle) == "running"
    scheduler.resume(handle)
    assert told(scheduler) == [(EV_OUTPUT, "a")]
    scheduler.round(3)
    assert scheduler.take(1) == [handle]
    assert scheduler.given(handle) == [100, 101]


def test_with_promises_that_grow_it_is_promised_what_it_has_made():
    scheduler = make(slots=())
    for _ in range(2):
        scheduler.add_device_slot(kv_tokens=1000, num_sequences=2, kv_block=8)
    handle = begun(scheduler, num_tokens=5, num_prompt_tokens=10, max_tokens=50, footprint_tokens=60)
    assert scheduler.granted(handle) == 18
    lose(scheduler, 0)
    assert scheduler.granted(handle) == 23
    assert scheduler.snapshot()["slots"][1]["reserved"] == 23


# --- the watchdog -----------------------------------------------------------------------


def test_a_step_that_does_not_end_is_found_in_its_time(step_of):
    scheduler = make(slots=TWO)
    scheduler.set_stall(0, 100)
    assert scheduler.round(0) == -1
    handle = submit(scheduler, "a")
    step_of(scheduler, 0, 5)
    assert scheduler.round(10) == 105
    assert scheduler.round(104) == 105
    # It ended, and the next one began.
    step_of(scheduler, 0, 90)
    assert scheduler.round(105) == 190
    assert not scheduler.snapshot()["slots"][0]["is_dead"]
    # Between two steps nothing is late.
    step_of(scheduler, 0, 0)
    assert scheduler.round(190) == 290
    step_of(scheduler, 0, 200)
    scheduler.poll()
    assert scheduler.round(300) == 300
    assert scheduler.round(300) == -1
    figures = scheduler.snapshot()
    assert figures["slots"][0]["is_dead"]
    assert figures["slots"][0]["is_stalled"]
    assert figures["num_stalled"] == 1
    scheduler.poll()
    scheduler.round(301)
    assert scheduler.take(1) == [handle]


@pytest.fixture
def step_of():
    """A worker's step of that device slot began then; 0: it has ended."""
    return lambda scheduler, slot, now_ns: scheduler.begin_step(slot, now_ns)


# --- a device slot that comes later ------------------------------------------------------


def test_one_that_is_added_while_others_run_takes_its_part_when_it_is_let():
    scheduler = make(slots=[(1000, 1)])
    handles = [submit(scheduler, sink) for sink in "abc"]
    assert run(scheduler) == [(EV_STARTED, "a")]
    scheduler.report_dead(0)
    scheduler.cancel(handles[0])
    number = scheduler.add_device_slot(kv_tokens=1000, num_sequences=1, is_resting=True)
    assert number == 1
    assert run(scheduler, 1)[-1:] == [(EV_SETTLED, "a")]
    assert scheduler.slots()[1]["is_drained"]
    scheduler.rest_slot(1, False)
    assert run(scheduler, 2) == [(EV_STARTED, "b")]
    assert scheduler.take(1) == [handles[1]]
    scheduler.emit(handles[1], b"x")
    scheduler.finish(handles[1])
    assert run(scheduler, 3)[:2] == [(EV_OUTPUT, "b"), (EV_FINISHED, "b")]


# --- what health asks for ---------------------------------------------------------------


def test_one_that_rests_takes_nobody_and_a_drain_is_not_its_business():
    scheduler = make(slots=[(1000, 2)])
    scheduler.rest_slot(0)
    submit(scheduler, "a")
    assert run(scheduler) == []
    assert scheduler.slots()[0]["is_drained"]
    scheduler.drain_slot(0)
    scheduler.rest_slot(0, False)
    assert run(scheduler) == []
    scheduler.undrain_slot(0)
    assert run(scheduler) == [(EV_STARTED, "a")]


def test_one_on_probation_takes_no_more_than_it_may():
    scheduler = make(slots=[(1000, 2)])
    scheduler.limit_slot(0, 1)
    for sink in "ab":
        submit(scheduler, sink)
    assert run(scheduler) == [(EV_STARTED, "a")]
    scheduler.limit_slot(0)
    assert run(scheduler) == [(EV_STARTED, "b")]
