"""Promises that grow: exact sums, one total order, and progress whatever is asked for."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lqs import _core

from . import growth_reference, reference
from .reference import Waiter

NUM_LEVELS = 3
CAPACITY = 48


@dataclass
class Grower(Waiter):
    """A request whose promise grows."""

    max_tokens: int = 0
    reserved: int = 0
    wanted: int = 0
    out_tokens: int = 0
    is_short: bool = False
    end: int = 0
    order: int = 0


def make(*slots, **shape):
    """A scheduler with device slots of (KV tokens, sequences, block)."""
    scheduler = _core.Scheduler(
        **{
            "table_capacity": CAPACITY,
            "level_caps": [CAPACITY] * NUM_LEVELS,
            "total_cap": CAPACITY,
            "num_lanes": 1,
            "lane_weights": [1],
            "num_keys": 2,
            **shape,
        }
    )
    for kv_tokens, num_sequences, block in slots:
        scheduler.add_device_slot(kv_tokens=kv_tokens, num_sequences=num_sequences, kv_block=block)
    return scheduler


def submit(scheduler, sink, *, prompt, max_tokens, level=0, key=0, arrival_ns=0):
    assert scheduler.try_enter(level)
    return scheduler.submit(
        _core.Work(),
        sink,
        key=key,
        level=level,
        arrival_ns=arrival_ns,
        num_prompt_tokens=prompt,
        max_tokens=max_tokens,
        footprint_tokens=prompt + max_tokens,
    )


def figures(scheduler, *names, slot=0):
    found = scheduler.snapshot()["slots"][slot]
    return tuple(found[name] for name in names)


class GrowthsAgree(RuleBasedStateMachine):
    """Requests start, ask for more, end, leave, and device slots die; promises must be the same."""

    @initialize(
        slots=st.lists(
            st.tuples(st.sampled_from([40, 80, 160]), st.integers(1, 6), st.sampled_from([0, 4, 8])),
            min_size=1,
            max_size=2,
        ),
        history=st.lists(st.integers(0, 40), max_size=40),
    )
    def begin(self, slots, history):
        self.scheduler = make(*slots)
        self.twin = growth_reference.Scheduler(
            reference.Backlog(
                num_lanes=1,
                num_levels=NUM_LEVELS,
                num_keys=2,
                aging_step_ns=0,
                aged_every=4,
                key_weights=[1.0, 1.0],
                lane_weights=[1.0],
                num_places=sum(num_sequences for _, num_sequences, _ in slots),
            ),
            [reference.Slot(0, kv_tokens, num_sequences, 1.0) for kv_tokens, num_sequences, _ in slots],
            [block for _, _, block in slots],
        )
        self.handles = {}
        self.live = {}
        self.finished = set()
        self.num_arrived = 0
        for length in history:
            self.submit(level=0, key=length % 2, prompt=1, max_tokens=4)
            self.round()
            self.end(next(iter(self.live.values())), length)
            self.round()

    @precondition(lambda self: len(self.live) < CAPACITY)
    @rule(
        level=st.integers(0, NUM_LEVELS - 1),
        key=st.integers(0, 1),
        prompt=st.integers(1, 20),
        max_tokens=st.integers(1, 60),
    )
    def submit(self, level, key, prompt, max_tokens):
        name = self.num_arrived
        self.num_arrived += 1
        handle = submit(self.scheduler, name, level=level, key=key, prompt=prompt, max_tokens=max_tokens)
        waiter = Grower(
            handle & 0xFFFFFFFF,
            level=level,
            key=key,
            arrival_no=name,
            prompt=prompt,
            max_tokens=max_tokens,
            cost=prompt + 2 * max_tokens,
            footprint=prompt + max_tokens,
        )
        self.handles[waiter.index] = handle
        self.live[waiter.index] = waiter
        self.twin.messages.append(("submit", waiter))

    def running(self):
        return [
            waiter
            for waiter in self.live.values()
            if waiter.state == "running"
            and waiter.index not in self.finished
            and not self.twin.slots[waiter.slot].is_dead
        ]

    @precondition(lambda self: self.running())
    @rule(pick=st.integers(0, CAPACITY), more=st.integers(1, 20))
    def ask(self, pick, more):
        running = self.running()
        waiter = running[pick % len(running)]
        waiter.wanted = max(waiter.wanted, waiter.reserved + more)
        self.scheduler.ask_growth(self.handles[waiter.index], waiter.wanted)

    @precondition(lambda self: self.running())
    @rule(more=st.integers(1, 9))
    def ask_for_all(self, more):
        for waiter in self.running():
            waiter.wanted = max(waiter.wanted, waiter.reserved + more)
            self.scheduler.ask_growth(self.handles[waiter.index], waiter.wanted)

    @precondition(lambda self: self.running())
    @rule(pick=st.integers(0, CAPACITY), num_tokens=st.integers(0, 60))
    def finish(self, pick, num_tokens):
        running = self.running()
        self.end(running[pick % len(running)], num_tokens)

    def end(self, waiter, num_tokens):
        self.scheduler.finish(self.handles[waiter.index], num_completion_tokens=num_tokens)
        self.finished.add(waiter.index)
        self.twin.messages.append(("finish", waiter, num_tokens))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, CAPACITY))
    def cancel(self, pick):
        waiter = sorted(self.live.values(), key=lambda w: w.arrival_no)[pick % len(self.live)]
        self.scheduler.cancel(self.handles[waiter.index])
        self.twin.messages.append(("cancel", waiter))

    @rule(pick=st.integers(0, 30))
    def die(self, pick):
        if pick < len(self.twin.slots):
            self.scheduler.report_dead(pick)
            self.twin.slots[pick].is_dead = True

    @rule()
    def round(self):
        self.scheduler.round(0)
        self.twin.round(0)
        for slot in range(len(self.twin.slots)):
            self.scheduler.take(slot)
        self.scheduler.poll()
        self.twin.take_back()
        self.twin.events.clear()
        self.finished &= {index for index, waiter in self.live.items() if waiter.state != "ended"}
        self.live = {index: waiter for index, waiter in self.live.items() if waiter.state != "ended"}
        self.check_promises()

    def check_promises(self):
        """What each may hold, and what is counted."""
        for waiter in self.running():
            assert self.scheduler.granted(self.handles[waiter.index]) == waiter.reserved
        snapshot = self.scheduler.snapshot()
        assert snapshot["num_broken"] == 0
        for slot, twin in zip(snapshot["slots"], self.twin.slots, strict=True):
            assert slot["num_running"] == len(twin.running)
            assert slot["reserved"] == sum(w.reserved for w in twin.running) <= slot["capacity"]
            assert slot["used"] <= slot["reserved"]
            assert slot["num_out"] == sum(w.out_tokens > 0 for w in twin.running)
            assert slot["num_short"] == sum(w.is_short for w in twin.running)

    @invariant()
    def whoever_is_out_is_behind_and_the_first_is_never_short(self):
        for slot in self.twin.slots if hasattr(self, "twin") else ():
            holding = [growth_reference.standing(w) for w in slot.running if w.reserved]
            out = [growth_reference.standing(w) for w in slot.running if w.out_tokens]
            assert not out or not holding or max(holding) < min(out)
            assert not any(w.is_short for w in slot.running if growth_reference.standing(w) == min(holding, default=0))


GrowthsAgree.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestGrowths = GrowthsAgree.TestCase


# --- a worker that makes a token a step -----------------------------------------------------


class Device:
    """Runs what one device slot is given as the real worker does, a token of each a step."""

    def __init__(self, scheduler, block):
        self.scheduler = scheduler
        self.block = block
        self.running = {}  # handle: [prompt, length, held, wanted]

    def step(self, lengths):
        """One round and one step; who ended."""
        self.scheduler.round(0)
        for handle in self.scheduler.take(0):
            prompt, length = lengths[handle]
            self.running[handle] = [prompt, length, prompt, 0]
        ended = []
        for handle, one in list(self.running.items()):
            granted = self.scheduler.granted(handle)
            prompt, length, held, wanted = one
            if granted and held == prompt + length:
                self.scheduler.finish(handle, num_completion_tokens=length)
                del self.running[handle]
                ended.append(handle)
                continue
            if granted and held + self.block // 2 >= granted and wanted <= granted:
                one[3] = granted + self.block
                self.scheduler.ask_growth(handle, one[3])
            one[2] += held < granted
        return ended


@settings(max_examples=150, deadline=None)
@given(
    kv_tokens=st.integers(90, 400),
    num_sequences=st.integers(1, 8),
    block=st.sampled_from([4, 8, 16]),
    requests=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 70)), min_size=1, max_size=24),
)
def test_all_come_to_their_end_however_little_kv_there_is(kv_tokens, num_sequences, block, requests):
    """Case B33, B35: bounded, nobody is put out for ever, nothing is killed, and nothing stays behind."""
    scheduler = make((kv_tokens, num_sequences, block))
    device = Device(scheduler, block)
    lengths = {}
    for i, (level, prompt, length) in enumerate(requests):
        handle = submit(scheduler, i, level=level, prompt=prompt, max_tokens=70)
        lengths[handle] = prompt, length
    num_steps, num_ended = 0, 0
    while num_ended < len(requests):
        num_ended += len(device.step(lengths))
        num_steps += 1
        # The first of all makes a token a step; a wish takes a step to be answered.
        assert num_steps <= 3 * sum(length + 3 for _, length in lengths.values())
        assert figures(scheduler, "reserved") <= figures(scheduler, "capacity")
    scheduler.round(0)
    assert figures(scheduler, "reserved", "used", "num_running", "num_out", "num_short") == (0, 0, 0, 0, 0)
    assert scheduler.snapshot()["num_broken"] == 0
    assert scheduler.key_usage(0)["completion_tokens"] == sum(length for _, length in lengths.values())


# --- by example -----------------------------------------------------------------------------


def started(scheduler):
    """Names of those that one round started."""
    scheduler.round(0)
    scheduler.take(0)
    return [event[1] for event in scheduler.poll() if event[0] == _core.EV_STARTED]


def test_a_start_is_promised_its_prompt_and_a_block():
    scheduler = make((1000, 4, 16))
    handle = submit(scheduler, "a", prompt=30, max_tokens=100)
    started(scheduler)
    assert scheduler.granted(handle) == 46
    assert figures(scheduler, "reserved", "used") == (46, 30)
    scheduler.ask_growth(handle, 62)
    scheduler.round(0)
    assert scheduler.granted(handle) == 62
    # Never beyond the longest that it can come to.
    scheduler.ask_growth(handle, 500)
    scheduler.round(0)
    assert scheduler.granted(handle) == 130


def test_without_a_block_all_is_promised_at_once():
    scheduler = make((1000, 4, 0))
    handle = submit(scheduler, "a", prompt=30, max_tokens=100)
    started(scheduler)
    assert scheduler.granted(handle) == 130


def test_the_peak_decides_who_starts_and_not_the_sum_of_the_longest():
    """Ends that come one after the other fit where their sum does not."""
    scheduler = make((150, 8, 8))
    early = submit(scheduler, "early", prompt=10, max_tokens=70)
    assert started(scheduler) == ["early"]
    # 80 and 80 at their longest are more than 150, and so is their peak now ...
    submit(scheduler, "late", prompt=10, max_tokens=70)
    assert started(scheduler) == []
    # ... but when 24 of the first one's tokens are left it holds 56, and the other has 34 then.
    scheduler.ask_growth(early, 64)
    assert started(scheduler) == ["late"]


def test_what_answers_really_come_to_decides_how_many_start():
    scheduler = make((400, 16, 8))
    for _ in range(16):
        handle = submit(scheduler, "first", prompt=4, max_tokens=300)
        started(scheduler)
        scheduler.finish(handle, num_completion_tokens=9)
        scheduler.round(0)
        scheduler.poll()
    assert scheduler.expected_completion(0, 0, 0, 300) == 9
    for i in range(12):
        submit(scheduler, i, prompt=4, max_tokens=300)
    assert len(started(scheduler)) == 12


def test_the_last_and_lowest_gives_way_and_comes_back_before_new_ones_of_its_class():
    scheduler = make((100, 4, 10))
    low, high = (
        submit(scheduler, name, prompt=20, max_tokens=20, level=level) for name, level in (("low", 2), ("high", 0))
    )
    assert sorted(started(scheduler)) == ["high", "low"]
    other = submit(scheduler, "other", prompt=5, max_tokens=15, level=1)
    assert started(scheduler) == ["other"]
    scheduler.ask_growth(high, 40)
    scheduler.round(0)
    scheduler.ask_growth(other, 20)
    scheduler.round(0)
    assert figures(scheduler, "reserved") == (40 + 20 + 30,)
    long = submit(scheduler, "long", prompt=9, max_tokens=1, level=0)
    assert started(scheduler) == ["long"]
    # 100 of 100 are promised now. The low one asks and pauses; the class above it takes from it.
    scheduler.ask_growth(low, 40)
    scheduler.round(0)
    assert figures(scheduler, "num_short", "num_out") == (1, 0)
    assert scheduler.granted(low) == 30
    scheduler.finish(long)
    scheduler.round(0)
    assert figures(scheduler, "num_short") == (0,)
    assert scheduler.granted(low) == 40


def fill(scheduler, *levels, max_tokens=24):
    """One of each level, each with a prompt of 8 and a block of 8, and nobody expects more to be needed."""
    for _ in range(16):
        handle = submit(scheduler, "first", prompt=1, max_tokens=24)
        started(scheduler)
        scheduler.finish(handle, num_completion_tokens=2)
        scheduler.round(0)
    handles = [
        submit(scheduler, f"{i}", prompt=8, max_tokens=max_tokens, level=level) for i, level in enumerate(levels)
    ]
    assert len(started(scheduler)) == len(levels)
    assert figures(scheduler, "num_running") == (len(levels),)
    return handles


def grow_to(scheduler, handle, tokens):
    scheduler.ask_growth(handle, tokens)
    scheduler.round(0)
    return scheduler.granted(handle)


def test_a_growth_that_does_not_fit_takes_from_the_lowest_and_youngest_only():
    scheduler = make((64, 4, 8))
    high, old, young, low = fill(scheduler, 0, 1, 1, 2, max_tokens=42)
    assert grow_to(scheduler, old, 24) == 24
    assert [scheduler.granted(h) for h in (high, young, low)] == [16, 16, 0]
    assert grow_to(scheduler, high, 48) == 48
    assert [scheduler.granted(h) for h in (old, young, low)] == [0, 0, 0]
    # They come back in their order, the first one as soon as it fits.
    scheduler.finish(high)
    scheduler.round(0)
    assert [scheduler.granted(h) for h in (old, young, low)] == [24, 16, 16]
    assert figures(scheduler, "num_put_out", "num_resumed") == (3, 3)


def test_nobody_takes_from_a_better_class_or_an_older_one_of_its_own():
    """Case B33: equal ones never put each other out in turns."""
    scheduler = make((32, 4, 8))
    old, young = fill(scheduler, 1, 1)
    assert grow_to(scheduler, young, 24) == 16
    assert scheduler.granted(old) == 16
    assert figures(scheduler, "num_short", "num_out", "num_growths_refused") == (1, 0, 1)
    # The young one waits with what it holds, until the old one needs that.
    assert grow_to(scheduler, old, 24) == 24
    assert scheduler.granted(young) == 0
    scheduler.finish(old)
    scheduler.round(0)
    assert scheduler.granted(young) == 24
    assert figures(scheduler, "num_short", "num_out") == (0, 0)


def test_new_requests_wait_for_those_of_their_class_that_are_out_and_better_ones_do_not():
    scheduler = make((40, 4, 8))
    old, young = fill(scheduler, 1, 1)
    assert grow_to(scheduler, old, 32) == 32
    assert scheduler.granted(young) == 0
    for name, level in (("same", 1), ("lower", 2)):
        submit(scheduler, name, prompt=1, max_tokens=2, level=level)
        assert started(scheduler) == []
    submit(scheduler, "better", prompt=1, max_tokens=2, level=0)
    assert started(scheduler) == ["better"]


def test_better_ones_pass_one_that_is_out_only_so_often():
    """Case B33: under a flood of a better class the one that gave way is served within a bound."""
    scheduler = make((64, 4, 8))
    old, young = fill(scheduler, 1, 1, max_tokens=56)
    assert grow_to(scheduler, old, 56) == 56
    assert scheduler.granted(young) == 0
    num_passes = 0
    while True:
        handle = submit(scheduler, num_passes, prompt=2, max_tokens=2, level=0)
        if not started(scheduler):
            break
        num_passes += 1
        scheduler.finish(handle)
    assert num_passes == 16
    # The slot goes on with the one that was passed, and then with those that wait.
    scheduler.finish(old)
    assert started(scheduler) == [16]
    assert scheduler.granted(young) == 16


def test_one_that_is_out_can_be_cancelled_and_its_device_slot_can_die():
    scheduler = make((32, 4, 8))
    old, young = fill(scheduler, 1, 1)
    grow_to(scheduler, old, 24)
    scheduler.cancel(young)
    assert scheduler.is_cancelled(young)
    scheduler.finish(young, _core.Finish.FINISH_CANCELLED)
    scheduler.round(0)
    assert figures(scheduler, "reserved", "num_running", "num_out") == (24, 1, 0)
    scheduler.report_dead(0)
    scheduler.round(0)
    assert figures(scheduler, "reserved", "used", "num_running", "num_out") == (0, 0, 0, 0)
    assert scheduler.snapshot()["num_broken"] == 0


# --- how long answers come out ----------------------------------------------------------------


def answer(scheduler, length, *, key=0, times=1):
    for _ in range(times):
        handle = submit(scheduler, "one", prompt=1, max_tokens=1, key=key)
        started(scheduler)
        scheduler.finish(handle, num_completion_tokens=length)
        scheduler.round(0)
        scheduler.poll()


def test_nothing_is_predicted_from_a_few_answers():
    scheduler = make((1000, 4, 8))
    answer(scheduler, 10, times=15)
    assert scheduler.expected_completion(0, 0, 0, 9999) == 256
    assert scheduler.expected_completion(0, 0, 0, 100) == 100
    answer(scheduler, 10)
    assert scheduler.expected_completion(0, 0, 0, 9999) == 10
    assert scheduler.expected_completion(0, 0, 0, 3) == 3


def test_a_key_is_predicted_by_its_own_answers_and_others_by_the_models():
    scheduler = make((1000, 4, 8), num_keys=3)
    answer(scheduler, 5, key=0, times=20)
    answer(scheduler, 11, key=1, times=40)
    assert [scheduler.expected_completion(key, 0, 0, 9999) for key in (0, 1, 2)] == [5, 11, 11]


def test_old_answers_fade():
    scheduler = make((1000, 4, 8))
    answer(scheduler, 5, times=600)
    answer(scheduler, 14, times=600)
    assert scheduler.expected_completion(0, 0, 0, 9999) == 14


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 1000, 5000, 100_000])
def test_a_length_is_known_to_a_quarter(length):
    scheduler = make((1000, 4, 8))
    answer(scheduler, length, times=16)
    assert length <= scheduler.expected_completion(0, 0, 0, 1 << 30) <= length * 1.25


def test_the_table_of_lengths_is_bounded_and_a_new_key_finds_its_place():
    scheduler = make((1000, 4, 8), num_keys=2000)
    for key in range(2000):
        answer(scheduler, 3, key=key)
    answer(scheduler, 12, key=1999, times=40)
    assert scheduler.expected_completion(1999, 0, 0, 9999) == 12


@pytest.mark.parametrize(
    ("asked", "granted", "expected"),
    [(0, 8000, 9), (0, 5, 5), (200, 200, 200), (1020, 1020, 1020), (1021, 1021, 9), (4000, 100, 100)],
)
def test_an_answer_is_taken_to_be_as_long_as_it_may_be_unless_that_is_far_off(asked, granted, expected):
    """Nine of ten answers are short, yet one in ten has 255 tokens: asking for as many is to be believed."""
    scheduler = make((1000, 4, 8))
    for _ in range(4):
        answer(scheduler, 9, times=9)
        answer(scheduler, 255)
    assert scheduler.expected_completion(0, 0, asked, granted) == expected


def test_what_is_asked_for_counts_while_nothing_is_known():
    scheduler = make((1000, 4, 8))
    assert scheduler.expected_completion(0, 0, 2000, 2000) == 2000
    assert scheduler.expected_completion(0, 0, 0, 2000) == 256
