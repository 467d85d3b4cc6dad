"""The whole core between three threads: event loop, scheduler, worker.

The invariants: each request is told its events in order and is settled once, its text is
whole, and in the end nothing is held: no permit, no promise, no entry, no object.
"""

import os
import random
import select
import string
import threading
from collections import deque
from contextlib import ExitStack, contextmanager

import pytest

from lqs import _core
from lqs._core import (
    EV_ANSWERED,
    EV_CANCELLED,
    EV_EVICTED,
    EV_FINISHED,
    EV_OUTPUT,
    EV_SETTLED,
    EV_STARTED,
    Scheduler,
    Work,
)

# A build that is traced line by line takes the GIL for each.
SHARE = 20 if os.environ.get("LQS_COVERAGE") else 1
NUM_REQUESTS = [20_000 // SHARE, pytest.param(1_000_000, marks=pytest.mark.stress)]
NUM_TOKENS = 40


class Sink:
    """Checks one request's events as they come."""

    def __init__(self):
        self.told = []
        self.text = b""

    def take(self, what, *rest):
        assert EV_SETTLED not in self.told
        if what == EV_OUTPUT:
            assert EV_STARTED in self.told
            assert EV_FINISHED not in self.told
            self.text += rest[0]
            return
        assert what not in self.told
        self.told.append(what)
        if what == EV_FINISHED:
            self.outcome = rest[0]


@contextmanager
def threads(scheduler, drive, is_scheduler=True):
    started = [threading.Thread(target=drive.work, args=(NUM_TOKENS,), daemon=True)]
    if is_scheduler:
        started.append(threading.Thread(target=drive.schedule, daemon=True))
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        drive.stop()
        for thread in started:
            thread.join(60)
    assert not any(thread.is_alive() for thread in started)


def poll(scheduler):
    """Sleep until something is told, and tell it; how many were settled."""
    sleeper = select.poll()
    sleeper.register(scheduler.loop_fd, select.POLLIN)
    assert sleeper.poll(60_000), "the loop was not woken"
    num_settled = 0
    for what, sink, *rest in scheduler.poll():
        if what != EV_ANSWERED:
            sink.take(what, *rest)
        num_settled += what == EV_SETTLED
    return num_settled


@pytest.mark.parametrize("out_buffer_bytes", [64, 4096])
@pytest.mark.parametrize("num_requests", NUM_REQUESTS)
def test_every_request_is_told_in_order_and_nothing_is_left(out_buffer_bytes, num_requests):
    draw = random.Random(out_buffer_bytes)
    scheduler = Scheduler(
        table_capacity=256,
        level_caps=[64] * 4,
        total_cap=200,
        aging_step_ns=50,
        num_keys=3,
        out_buffer_bytes=out_buffer_bytes,
    )
    scheduler.add_device_slot(kv_tokens=4000, num_sequences=32)
    drive = _core._Drive(scheduler)
    sinks, live, held = [], [], deque()
    num_settled = num_evicts = 0
    # One eviction that nothing can come before: in between the threads it may hit nobody.
    assert scheduler.try_enter(3)
    sinks.append(Sink())
    live.append(scheduler.submit(Work(), sinks[0], level=3, max_tokens=NUM_TOKENS, footprint_tokens=50))
    num_evicts += scheduler.evict(0)
    with threads(scheduler, drive):
        while num_settled < num_requests:
            while len(sinks) < num_requests and scheduler.try_enter(level := draw.randrange(4)):
                try:
                    handle = scheduler.submit(
                        Work(),
                        sink := Sink(),
                        key=draw.randrange(3),
                        level=level,
                        lane=draw.randrange(2),
                        deadline_ns=draw.choice((0, 0, draw.randrange(1, 99))),
                        expire_ns=draw.choice((0, 0, 0, 1)),
                        num_prompt_tokens=10,
                        max_tokens=NUM_TOKENS,
                        footprint_tokens=draw.randrange(50, 300),
                    )
                except _core.TableFull:
                    break
                sinks.append(sink)
                live.append(handle)
            if draw.random() < 0.5:
                scheduler.cancel(live.pop(draw.randrange(len(live))))
            live = live[-256:] or live
            if draw.random() < 0.3:
                # Who is picked may be cancelled, expire or start in the same moment.
                num_evicts += scheduler.evict(draw.randrange(4))
            # A few readers are slow; the last ones would wait for each other.
            while held and (len(held) > 4 or len(sinks) == num_requests):
                scheduler.resume(held.popleft())
            if len(sinks) < num_requests:
                held.append(draw.choice(live))
                scheduler.hold(held[-1])
            num_settled += poll(scheduler)
    assert num_evicts > 0
    assert any(EV_EVICTED in sink.told for sink in sinks)
    assert_whole(scheduler, sinks)


@pytest.mark.parametrize("num_requests", [4_000 // SHARE, pytest.param(400_000, marks=pytest.mark.stress)])
def test_promises_that_grow_between_threads_are_all_kept_and_given_back(num_requests):
    """A quarter is eight times as long as expected, in a tenth of the KV for all at their longest."""
    draw = random.Random(1)
    scheduler = Scheduler(table_capacity=4096, level_caps=[64] * 4, total_cap=64, num_keys=3)
    scheduler.add_device_slot(kv_tokens=300, num_sequences=32, kv_block=8)
    drive = _core._Drive(scheduler)
    sinks, live = [], deque(maxlen=64)
    num_settled = 0
    with threads(scheduler, drive):
        while num_settled < num_requests:
            while len(sinks) < num_requests and scheduler.try_enter(level := draw.randrange(4)):
                sinks.append(Sink())
                live.append(
                    scheduler.submit(
                        Work(),
                        sinks[-1],
                        key=draw.randrange(3),
                        level=level,
                        num_prompt_tokens=draw.randrange(1, 30),
                        max_tokens=60,
                        footprint_tokens=90,
                    )
                )
            if draw.random() < 0.2:
                scheduler.cancel(draw.choice(live))
            num_settled += poll(scheduler)
    assert_whole(scheduler, sinks, {NUM_TOKENS, NUM_TOKENS // 8})
    slot = scheduler.snapshot()["slots"][0]
    assert slot["num_put_out"] > 0
    assert slot["num_resumed"] > 0
    assert (slot["num_out"], slot["num_short"]) == (0, 0)


@pytest.mark.parametrize("num_requests", [6_000 // SHARE, pytest.param(400_000, marks=pytest.mark.stress)])
def test_device_slots_that_die_between_threads_cost_no_letter(num_requests):
    """Their workers go on as if nothing had been: they are late from then on, and write into what is dead."""
    draw = random.Random(64)
    # Small buffers: all stand still again and again, so each death hits some in the middle.
    scheduler = Scheduler(table_capacity=4096, level_caps=[64] * 4, total_cap=64, num_keys=3, out_buffer_bytes=64)
    for _ in range(5):
        scheduler.add_device_slot(kv_tokens=4000, num_sequences=16)
    drives = [_core._Drive(scheduler, slot) for slot in range(5)]
    sinks, live, held = [], deque(maxlen=256), deque()
    num_settled = 0
    deaths = [num_requests * share // 10 for share in (1, 3, 5, 7)]
    with ExitStack() as stack:
        for drive in drives:
            stack.enter_context(threads(scheduler, drive, is_scheduler=drive is drives[0]))
        while num_settled < num_requests:
            while len(sinks) < num_requests and scheduler.try_enter(level := draw.randrange(4)):
                sinks.append(Sink())
                live.append(
                    scheduler.submit(
                        Work(),
                        sinks[-1],
                        key=draw.randrange(3),
                        level=level,
                        num_prompt_tokens=10,
                        max_tokens=NUM_TOKENS,
                        footprint_tokens=draw.randrange(50, 300),
                    )
                )
            if deaths and num_settled >= deaths[0]:
                deaths.pop(0)
                scheduler.report_dead(len(deaths))
            if draw.random() < 0.2:
                scheduler.cancel(draw.choice(live))
            while held and (len(held) > 4 or len(sinks) == num_requests):
                scheduler.resume(held.popleft())
            if len(sinks) < num_requests:
                held.append(draw.choice(live))
                scheduler.hold(held[-1])
            num_settled += poll(scheduler)
    snapshot = scheduler.snapshot()
    assert snapshot["num_restarted"] > 0
    assert snapshot["num_kept"] > 0
    assert snapshot["num_live"] == snapshot["num_running"] == snapshot["num_entered"] == snapshot["num_again"] == 0
    assert snapshot["num_broken"] == 0
    assert [slot["is_dead"] for slot in snapshot["slots"]] == [True, True, True, True, False]
    assert {slot[name] for slot in snapshot["slots"] for name in ("reserved", "used", "num_running")} == {0}
    letters = (string.ascii_lowercase * 2)[:NUM_TOKENS].encode()
    for sink in sinks:
        ran = EV_FINISHED in sink.told
        assert sink.told == ([EV_STARTED, EV_FINISHED, EV_SETTLED] if ran else [EV_CANCELLED, EV_SETTLED])
        assert letters.startswith(sink.text)
        assert not ran or len(sink.text) == sink.outcome.num_completion_tokens
        is_cut = not ran or sink.outcome.finish == _core.Finish.FINISH_CANCELLED
        assert is_cut or sink.text == letters


def assert_whole(scheduler, sinks, lengths=(NUM_TOKENS,)):
    num_tokens = 0
    for sink in sinks:
        assert sink.told[-1] == EV_SETTLED
        if EV_FINISHED in sink.told:
            assert sink.told == [EV_STARTED, EV_FINISHED, EV_SETTLED]
            assert len(sink.text) == sink.outcome.num_completion_tokens
            assert sink.outcome.finish == _core.Finish.FINISH_CANCELLED or len(sink.text) in lengths
            num_tokens += len(sink.text)
        else:
            assert sink.text == b""
            assert len(sink.told) == 2
    snapshot = scheduler.snapshot()
    assert snapshot["num_live"] == snapshot["num_running"] == snapshot["num_entered"] == 0
    assert snapshot["num_broken"] == snapshot["num_kept"] == 0
    slot = snapshot["slots"][0]
    assert slot["reserved"] == slot["used"] == slot["num_running"] == 0
    assert sum(scheduler.key_usage(key)["completion_tokens"] for key in range(3)) == num_tokens


@pytest.mark.parametrize("num_deaths", [30, pytest.param(300, marks=pytest.mark.stress)])
def test_a_device_slot_that_dies_under_load_ends_every_request(num_deaths):
    for _ in range(num_deaths):
        scheduler = Scheduler(table_capacity=64, level_caps=[64], total_cap=64, lane_weights=[1], num_lanes=1)
        scheduler.add_device_slot(kv_tokens=10**6, num_sequences=16)
        drive = _core._Drive(scheduler)
        sinks = [Sink() for _ in range(64)]
        num_settled = 0
        with threads(scheduler, drive):
            for sink in sinks:
                assert scheduler.try_enter(0)
                scheduler.submit(Work(), sink, num_prompt_tokens=1, max_tokens=9, footprint_tokens=10)
            num_settled += poll(scheduler)
            # The worker goes on: it is one that was taken for dead and is not.
            scheduler.report_dead(0)
            while num_settled < len(sinks):
                num_settled += poll(scheduler)
        snapshot = scheduler.snapshot()
        assert snapshot["num_live"] == snapshot["num_running"] == snapshot["num_entered"] == 0
        assert snapshot["slots"][0]["reserved"] == 0
        assert all(sink.told[-1] == EV_SETTLED for sink in sinks)


def test_a_step_of_many_sequences_costs_at_most_one_wake():
    scheduler = Scheduler(table_capacity=64, level_caps=[64], total_cap=64, lane_weights=[1], num_lanes=1)
    scheduler.add_device_slot(kv_tokens=10**6, num_sequences=32)
    for _ in range(32):
        assert scheduler.try_enter(0)
        scheduler.submit(Work(), Sink(), footprint_tokens=1)
    scheduler.round(0)
    scheduler.poll()
    drive = _core._Drive(scheduler)
    assert drive.begin() == 32
    for _ in range(50):
        drive.emit_steps(1, b"x")
        assert [event[2] for event in scheduler.poll()] == [b"x"] * 32
    assert drive.figures == (50, 50, 0)
    drive.emit_steps(20, b"x")
    assert drive.figures == (70, 51, 0)


def test_each_start_is_a_decision_and_each_end_makes_room_for_one():
    scheduler = Scheduler(table_capacity=64, level_caps=[64], total_cap=64, lane_weights=[1], num_lanes=1)
    scheduler.add_device_slot(kv_tokens=10**6, num_sequences=2)
    drive = _core._Drive(scheduler)
    for _ in range(10):
        assert scheduler.try_enter(0)
        scheduler.submit(Work(), Sink(), footprint_tokens=1)
    # The first round starts two, and each one after it ends those and starts the next two.
    assert drive.decide(6, 1) == 10
    assert sum(event[0] == EV_SETTLED for event in scheduler.poll()) == 10
    # With both sequences taken nobody is looked at.
    assert scheduler.snapshot()["num_decisions"] == 10


@pytest.mark.parametrize("num_requests", NUM_REQUESTS)
def test_device_slots_drain_and_change_while_all_threads_run(num_requests):
    """Who has seen that a device slot is drained never sees another start there, until it is undrained."""
    draw = random.Random(num_requests)
    scheduler = Scheduler(
        table_capacity=256,
        level_caps=[200],
        total_cap=200,
        policy=_core.Placing.WEIGHTED_ROUND_ROBIN,
    )
    for lanes in (1, 3):
        scheduler.add_device_slot(kv_tokens=4000, num_sequences=16, lanes=lanes)
    drive, other = _core._Drive(scheduler), _core._Drive(scheduler, 1)
    worker = threading.Thread(target=other.work, args=(NUM_TOKENS,), daemon=True)
    worker.start()
    sleeper = select.poll()
    sleeper.register(scheduler.loop_fd, select.POLLIN)
    num_sent = num_settled = 0
    num_promises = None  # Of device slot 1, since it was seen drained.
    is_stale = False  # What is seen may be from before it was last undrained.
    with threads(scheduler, drive):
        while num_settled < num_requests:
            while num_sent < num_requests and scheduler.try_enter(0):
                try:
                    scheduler.submit(
                        Work(), Sink(), lane=draw.randrange(2), max_tokens=NUM_TOKENS,
                        footprint_tokens=draw.randrange(50, 300), prefixes=[(draw.randrange(2), 640)],
                    )  # fmt: skip
                except _core.TableFull:
                    break
                num_sent += 1
            scheduler.set_weight(draw.randrange(2), draw.choice((0.5, 1, 3)))
            scheduler.set_headroom(draw.randrange(2), draw.choice((None, None, 0, 500)))
            figures = scheduler.slots()[1]
            is_stale = is_stale and figures["is_drained"]
            if num_promises is not None:
                assert figures["num_promises"] == num_promises
            elif figures["is_drained"] and not is_stale:
                num_promises = scheduler.slots()[1]["num_promises"]
            if draw.random() < 0.2:
                scheduler.drain_slot(1)
            else:
                num_promises, is_stale = None, True
                scheduler.undrain_slot(1)
                scheduler.set_headroom(draw.randrange(2), None)
            # Not for longer: it may be that nothing can run until the next change.
            sleeper.poll(1)
            for what, sink, *rest in scheduler.poll():
                sink.take(what, *rest)
                num_settled += what == EV_SETTLED
    other.stop()
    worker.join(60)
    assert not worker.is_alive()
    snapshot = scheduler.snapshot()
    assert snapshot["num_broken"] == snapshot["num_live"] == snapshot["num_entered"] == 0
    assert all(slot["reserved"] == slot["num_running"] == 0 for slot in snapshot["slots"])
    assert all(slot["num_promises"] for slot in snapshot["slots"])
