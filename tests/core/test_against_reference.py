"""The core and its plain-Python twin, fed alike by hypothesis, must never differ."""

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from lqs import _core

from . import reference
from .reference import Waiter

KEY_WEIGHTS = [1.0, 2.0, 0.5]
LANE_WEIGHTS = [3.0, 1.0]
NUM_LEVELS = 4
CAPACITY = 64
POLICIES = {
    "least_connections": _core.Placing.LEAST_CONNECTIONS,
    "vram": _core.Placing.VRAM,
    "weighted_round_robin": _core.Placing.WEIGHTED_ROUND_ROBIN,
    "load": _core.Placing.LOAD,
}


class RingsAgree(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 5))
    def begin(self, capacity):
        self.rings = [_core.SpscRing(capacity), _core.MpmcRing(capacity)]
        self.twins = [reference.Ring(ring.capacity) for ring in self.rings]
        self.next = 0

    @rule()
    def push(self):
        self.next += 1
        for ring, twin in zip(self.rings, self.twins, strict=True):
            assert ring.try_push(self.next) == twin.try_push(self.next)

    @rule()
    def pop(self):
        for ring, twin in zip(self.rings, self.twins, strict=True):
            assert ring.try_pop() == twin.try_pop()

    @rule(n=st.integers(0, 9))
    def push_batch(self, n):
        handles = list(range(self.next + 1, self.next + 1 + n))
        self.next += n
        assert self.rings[0].push_batch(handles) == sum(self.twins[0].try_push(h) for h in handles)

    @rule(n=st.integers(0, 9))
    def pop_batch(self, n):
        popped = [self.twins[0].try_pop() for _ in range(n)]
        assert self.rings[0].pop_batch(n) == [handle for handle in popped if handle is not None]

    @invariant()
    def sizes_agree(self):
        for ring, twin in zip(self.rings, self.twins, strict=True) if hasattr(self, "rings") else ():
            assert len(ring) == len(twin.items)


class BacklogsAgree(RuleBasedStateMachine):
    waiting = Bundle("waiting")

    @initialize(
        aging_step_ns=st.sampled_from([0, 1, 10]),
        aged_every=st.integers(1, 4),
        num_places=st.sampled_from([0, 4, 9]),
        num_tokens=st.sampled_from([0, 60, 200]),
        lane_caps=st.sampled_from([[0, 0], [0, 2], [3, 1]]),
        lane_token_caps=st.sampled_from([[0, 0], [0, 40]]),
    )
    def begin(self, **shape):
        self.backlog = _core.Backlog(
            num_lanes=2,
            num_levels=NUM_LEVELS,
            num_keys=3,
            capacity=CAPACITY,
            key_weights=KEY_WEIGHTS,
            lane_weights=LANE_WEIGHTS,
            **shape,
        )
        self.twin = reference.Backlog(
            num_lanes=2,
            num_levels=NUM_LEVELS,
            num_keys=3,
            key_weights=KEY_WEIGHTS,
            lane_weights=LANE_WEIGHTS,
            **shape,
        )
        self.now_ns = 0
        self.num_arrived = 0
        self.free = list(range(CAPACITY))
        self.running = {}

    @precondition(lambda self: self.free)
    @rule(
        target=waiting,
        lane=st.integers(0, 1),
        level=st.integers(0, NUM_LEVELS - 1),
        key=st.integers(0, 2),
        passed_ns=st.integers(0, 12),
        deadline_ns=st.one_of(st.just(0), st.integers(1, 6)),
        cost=st.integers(0, 50),
        footprint=st.integers(0, 50),
    )
    def push(self, passed_ns, footprint, **what):
        self.now_ns += passed_ns
        index = self.free.pop(0)
        self.backlog.push(index, arrival_ns=self.now_ns, footprint_tokens=footprint, **what)
        waiter = Waiter(
            index,
            arrival_ns=self.now_ns,
            arrival_no=self.num_arrived,
            state="waiting",
            footprint=footprint,
            **what,
        )
        self.num_arrived += 1
        self.twin.push(waiter)
        return waiter

    @rule()
    def pop(self):
        choice = self.twin.choose()
        assert self.backlog.peek() == (choice and (choice[0].index, choice[1]))
        assert self.backlog.pop() == (choice and choice[0].index)
        if choice:
            self.twin.take(*choice)
            choice[0].state = "running"
            self.running[choice[0].index] = choice[0]

    @rule(waiter=consumes(waiting))
    def remove(self, waiter):
        is_waiting = waiter.state == "waiting"
        if not is_waiting:
            return
        assert self.backlog.remove(waiter.index)
        self.twin.remove(waiter)
        waiter.state = "ended"
        self.free.append(waiter.index)

    @precondition(lambda self: self.running)
    @rule(cost=st.integers(0, 60))
    def settle(self, cost):
        index, waiter = self.running.popitem()
        self.backlog.settle(index, cost)
        self.twin.settle(waiter, cost)
        self.free.append(index)

    @invariant()
    def counts_and_counters_agree(self):
        if not hasattr(self, "backlog"):
            return
        assert len(self.backlog) == len(self.twin.waiting)
        for (lane, level), queues in self.twin.queues.items():
            for key, queue in enumerate(queues):
                assert self.backlog.counter(lane, level, key) == queue.counter


class LedgersAgree(RuleBasedStateMachine):
    held = Bundle("held")

    @initialize()
    def begin(self):
        shape = {"capacities": [100, 60], "num_sequences": [3, 2], "num_keys": 2}
        self.ledger = _core.Ledger(**shape)
        self.twin = reference.Ledger(**shape)

    @rule(target=held, slot=st.integers(0, 1), key=st.integers(0, 1), tokens=st.integers(0, 70))
    def reserve(self, slot, key, tokens):
        one = self.twin.reserve(slot, key, tokens)
        assert self.ledger.reserve(slot, key, tokens) == (one is not None)
        return slot, one

    @rule(held=held, tokens=st.integers(0, 40))
    def grow(self, held, tokens):
        slot, one = held
        if one in self.twin.held[slot]:
            assert self.ledger.grow(slot, one[0], tokens) == self.twin.grow(slot, one, tokens)

    @rule(held=held, share=st.floats(0, 1))
    def use(self, held, share):
        slot, one = held
        if one in self.twin.held[slot]:
            tokens = int((one[1] - one[2]) * share)
            self.ledger.use(slot, tokens)
            one[2] += tokens

    @rule(held=held, share=st.integers(0, 4), filled=st.integers(0, 4))
    def shrink(self, held, share, filled):
        slot, one = held
        if any(one is other for other in self.twin.held[slot]):
            used = one[2] * filled // 4
            reserved = used + (one[1] - one[2]) * share // 4
            self.ledger.shrink(slot, one[0], reserved, used)
            self.twin.shrink(one, reserved, used)

    @rule(held=consumes(held), prompt=st.integers(0, 99), completion=st.integers(0, 99))
    def settle(self, held, prompt, completion):
        slot, one = held
        if any(one is other for other in self.twin.held[slot]):
            self.ledger.settle(slot, *one, prompt, completion)
            self.twin.settle(slot, one, prompt, completion)

    @rule(held=consumes(held))
    def release(self, held):
        slot, one = held
        if any(one is other for other in self.twin.held[slot]):
            self.ledger.release(slot, *one)
            self.twin.release(slot, one)

    @invariant()
    def figures_agree(self):
        if not hasattr(self, "ledger"):
            return
        for slot in range(2):
            figures = self.ledger.slot(slot)
            assert figures["reserved"] == self.twin.reserved(slot) <= figures["capacity"]
            assert figures["used"] == self.twin.used(slot) <= figures["reserved"]
            assert figures["num_running"] == len(self.twin.held[slot])
        for key in range(2):
            prompt_tokens, completion_tokens = self.twin.booked[key]
            assert self.ledger.key(key) == {
                "reserved": self.twin.key_reserved(key),
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
            }


EVENTS = {
    _core.EV_STARTED: "started",
    _core.EV_EXPIRED: "expired",
    _core.EV_NO_KV: "no_kv",
    _core.EV_CANCELLED: "cancelled",
    _core.EV_NO_DEVICE: "no_device",
    _core.EV_EVICTED: "evicted",
    _core.EV_SETTLED: "settled",
}
ENDS = {"expired", "no_kv", "cancelled", "no_device", "evicted"}


class SchedulersAgree(RuleBasedStateMachine):
    """Requests come, run, leave, expire, device slots drain, change and die; all must end the same."""

    @initialize(
        aging_step_ns=st.sampled_from([0, 5]),
        aged_every=st.integers(1, 3),
        bypass_max=st.integers(0, 3),
        bypass_ns=st.sampled_from([5, 10**6]),
        lane_caps=st.sampled_from([[0, 0], [0, 1], [2, 0]]),
        lane_token_caps=st.sampled_from([[0, 0], [40, 0]]),
        slots=st.lists(
            st.tuples(
                st.integers(0, 1),
                st.sampled_from([40, 100]),
                st.integers(1, 3),
                st.sampled_from([0.5, 1.0, 2.0, 3.0]),
                st.integers(0, 2),
                st.sampled_from([1, 2, 3, 3, 15]),
                st.sampled_from([1, 3]),
            ),
            min_size=1,
            max_size=4,
        ),
        policy=st.sampled_from(list(POLICIES)),
        prefix_margin=st.sampled_from([0.0, 0.5, 1.0]),
        prefix_tokens_min=st.sampled_from([0, 64, 130]),
    )
    def begin(
        self,
        aging_step_ns,
        aged_every,
        bypass_max,
        bypass_ns,
        slots,
        policy,
        prefix_margin,
        prefix_tokens_min,
        **caps,
    ):
        self.scheduler = _core.Scheduler(
            table_capacity=CAPACITY,
            level_caps=[CAPACITY] * NUM_LEVELS,
            total_cap=CAPACITY,
            num_lanes=2,
            num_keys=3,
            key_weights=KEY_WEIGHTS,
            lane_weights=LANE_WEIGHTS,
            aging_step_ns=aging_step_ns,
            aged_every=aged_every,
            bypass_max=bypass_max,
            bypass_ns=bypass_ns,
            policy=POLICIES[policy],
            prefix_margin=prefix_margin,
            prefix_tokens_min=prefix_tokens_min,
            **caps,
        )
        for model, kv_tokens, num_sequences, weight, num_extra, lanes, token_bytes in slots:
            self.scheduler.add_device_slot(
                model=model,
                kv_tokens=kv_tokens,
                num_sequences=num_sequences,
                num_extra=num_extra,
                weight=weight,
                lanes=lanes,
                token_bytes=token_bytes,
            )
        self.twin = reference.Scheduler(
            reference.Backlog(
                num_lanes=2,
                num_levels=NUM_LEVELS,
                num_keys=3,
                aging_step_ns=aging_step_ns,
                aged_every=aged_every,
                key_weights=KEY_WEIGHTS,
                lane_weights=LANE_WEIGHTS,
                num_places=0,
                **caps,
            ),
            [reference.Slot(*slot) for slot in slots],
            bypass_max=bypass_max,
            bypass_ns=bypass_ns,
            policy=policy,
            prefix_margin=prefix_margin,
            prefix_tokens_min=prefix_tokens_min,
        )
        self.now_ns = 0
        self.num_arrived = 0
        self.handles = {}
        self.live = {}
        self.finished = set()
        # Names: whose events are held, who settled in silence, who cannot be held.
        self.held = set()
        self.kept = []
        self.cancelled = set()

    @precondition(lambda self: len(self.live) + len(self.kept) < CAPACITY)
    @rule(
        lane=st.integers(0, 1),
        level=st.integers(0, NUM_LEVELS - 1),
        key=st.integers(0, 2),
        model=st.integers(0, 1),
        deadline_ns=st.one_of(st.just(0), st.integers(1, 6)),
        expire_in_ns=st.one_of(st.just(0), st.integers(1, 20)),
        prompt=st.integers(1, 20),
        max_tokens=st.integers(1, 25),
        prefixes=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 64, 100, 128, 200])), max_size=3),
    )
    def submit(self, expire_in_ns, prompt, max_tokens, **what):
        assert self.scheduler.try_enter(what["level"])
        expire_ns = self.now_ns + expire_in_ns if expire_in_ns else 0
        name = self.num_arrived
        handle = self.scheduler.submit(
            _core.Work(),
            name,
            arrival_ns=self.now_ns,
            expire_ns=expire_ns,
            num_prompt_tokens=prompt,
            max_tokens=max_tokens,
            footprint_tokens=prompt + max_tokens,
            **what,
        )
        waiter = Waiter(
            handle & 0xFFFFFFFF,
            arrival_ns=self.now_ns,
            arrival_no=name,
            expire_ns=expire_ns,
            prompt=prompt,
            cost=prompt + 2 * max_tokens,
            footprint=prompt + max_tokens,
            **what,
        )
        self.num_arrived += 1
        self.handles[name] = handle
        self.live[waiter.index] = name, waiter
        self.twin.messages.append(("submit", waiter))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, CAPACITY))
    def cancel(self, pick):
        name, waiter = sorted(self.live.values(), key=lambda item: item[0])[pick % len(self.live)]
        self.scheduler.cancel(self.handles[name])
        self.twin.messages.append(("cancel", waiter))
        self.cancelled.add(name)
        self.held.discard(name)

    @rule(level=st.integers(0, NUM_LEVELS - 1))
    def evict(self, level):
        assert self.scheduler.evict(level)
        self.twin.messages.append(("evict", level))

    @precondition(lambda self: self.handles)
    @rule(pick=st.integers(0, 10**6), is_on=st.booleans())
    def hold_or_resume(self, pick, is_on):
        name = pick % self.num_arrived
        if is_on:
            self.scheduler.hold(self.handles[name])
            if name not in self.cancelled:
                self.held.add(name)
        else:
            self.scheduler.resume(self.handles[name])
            self.held.discard(name)

    @precondition(lambda self: self.live)
    @rule(
        pick=st.integers(0, CAPACITY),
        num_tokens=st.integers(0, 25),
        first_token_ns=st.integers(0, 50),
        took_ns=st.sampled_from([0, 7, 100, 10**9]),
    )
    def finish(self, pick, num_tokens, first_token_ns, took_ns):
        running = [
            (name, waiter)
            for name, waiter in self.live.values()
            if waiter.state == "running" and name not in self.finished and not self.twin.slots[waiter.slot].is_dead
        ]
        if not running:
            return
        name, waiter = running[pick % len(running)]
        waiter.first_token_ns, waiter.finished_ns = first_token_ns, first_token_ns + took_ns
        self.scheduler.finish(
            self.handles[name],
            num_completion_tokens=num_tokens,
            first_token_ns=waiter.first_token_ns,
            finished_ns=waiter.finished_ns,
        )
        self.finished.add(name)
        self.twin.messages.append(("finish", waiter, num_tokens))

    @rule(pick=st.integers(0, 20))
    def die(self, pick):
        if pick < len(self.twin.slots):
            self.scheduler.report_dead(pick)
            self.twin.slots[pick].is_dead = True

    @rule(pick=st.integers(0, 3), is_drained=st.booleans())
    def drain(self, pick, is_drained):
        if pick < len(self.twin.slots):
            (self.scheduler.drain_slot if is_drained else self.scheduler.undrain_slot)(pick)
            self.twin.slots[pick].wants_drain = is_drained

    @rule(
        pick=st.integers(0, 3),
        weight=st.sampled_from([0.5, 1.0, 2.0, 3.0]),
        headroom=st.one_of(st.none(), st.integers(0, 60)),
        percent=st.sampled_from([0, 30, 100]),
    )
    def change(self, pick, weight, headroom, percent):
        if pick < len(self.twin.slots):
            self.scheduler.set_weight(pick, weight)
            self.scheduler.set_headroom(pick, headroom)
            self.scheduler.set_use(pick, percent)
            self.twin.slots[pick].wants_weight = weight
            self.twin.slots[pick].wants_headroom.append(headroom)
            self.twin.slots[pick].use_percent = percent

    @rule(passed_ns=st.integers(0, 7))
    def round(self, passed_ns):
        self.now_ns += passed_ns
        due_ns = self.scheduler.round(self.now_ns)
        self.twin.round(self.now_ns)
        expiries = [w.expire_ns for w in self.twin.waiting if w.expire_ns]
        assert due_ns == min(expiries, default=-1)
        started = [self.live[index] for what, index in self.twin.events if what in ("started", "restarted")]
        for slot in range(len(self.twin.slots)):
            handles = [self.handles[name] for name, waiter in started if waiter.slot == slot]
            assert self.scheduler.take(slot) == handles
        polled = self.scheduler.poll()
        assert [was_evicted for what, _, was_evicted in polled if what == _core.EV_ANSWERED] == self.twin.answers
        self.twin.answers.clear()
        events = [(EVENTS[what], sink) for what, sink, _ in polled if what in EVENTS]
        # That one goes on is told to nobody.
        twins = [(what, self.live[index][0]) for what, index in self.twin.events if what != "restarted"]
        self.twin.events.clear()
        left = self.twin.take_back(lambda waiter: self.live[waiter.index][0] in self.held)
        twins += [("settled", self.live[waiter.index][0]) for waiter in left]
        for ordered in ("started", "expired", "evicted"):
            assert [e for e in events if e[0] == ordered] == [e for e in twins if e[0] == ordered]
        # One that ran and is held is settled in silence, until it is held no more.
        ran = [name for what, name in twins if what == "settled"] + self.kept
        self.kept = [name for name in ran if name in self.held]
        twins = [event for event in twins if event[0] != "settled"]
        twins += [("settled", name) for name in ran if name not in self.held]
        twins += [("settled", name) for what, name in twins if what in ENDS]
        assert Counter(events) == Counter(twins)
        self.live = {i: item for i, item in self.live.items() if item[1].state != "ended"}

    @invariant()
    def figures_agree(self):
        if not hasattr(self, "scheduler"):
            return
        snapshot = self.scheduler.snapshot()
        assert snapshot["num_broken"] == 0
        assert snapshot["num_passes"] >= sum(one.num_passes for one in self.twin.passed)
        assert snapshot["num_holding"] == sum(one.slot is not None for one in self.twin.passed)
        assert snapshot["num_live"] == len(self.live) + len(self.kept)
        assert snapshot["num_again"] == len(self.twin.again)
        assert snapshot["num_running"] == sum(len(slot.running) for slot in self.twin.slots)
        for figures, slot in zip(snapshot["slots"], self.twin.slots, strict=True):
            assert figures["num_running"] == len(slot.running)
            assert figures["reserved"] == slot.reserved
            assert slot.is_buried or figures["headroom"] == slot.num_free
            assert figures["is_drained"] == slot.is_drained
            assert slot.is_buried or figures["lanes"] == slot.lanes_served & 3
            assert figures["step_ns"] == slot.step_ns
        for level, figures in enumerate(snapshot["levels"]):
            waiting = [w for w in self.twin.waiting if w.level == level]
            assert figures["num_waiting"] == len(waiting)
            submitted = [w for m, w, *_ in self.twin.messages if m == "submit" and w.level == level]
            assert figures["num_entered"] == len(waiting) + len(submitted)


def suite(machine):
    case = machine.TestCase
    case.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
    return case


TestRings = suite(RingsAgree)
TestBacklogs = suite(BacklogsAgree)
TestLedgers = suite(LedgersAgree)
TestSchedulers = suite(SchedulersAgree)


def crowd(draw, machine):
    """One turn of a load under which there mostly is a choice: some come, change, end."""
    for _ in range(draw.randrange(6)):
        if len(machine.live) + len(machine.kept) < CAPACITY:
            machine.submit(
                lane=draw.randrange(2),
                level=draw.randrange(NUM_LEVELS),
                key=draw.randrange(3),
                model=int(draw.random() < 0.2),
                deadline_ns=0,
                expire_in_ns=draw.choice((0, 0, 40)),
                prompt=draw.randint(1, 20),
                max_tokens=draw.randint(1, 25),
                prefixes=[(draw.randrange(4), draw.choice((64, 100, 128, 200))) for _ in range(draw.randrange(4))],
            )
    if draw.random() < 0.1:
        machine.drain(draw.randrange(4), draw.random() < 0.5)
    if draw.random() < 0.2:
        machine.change(
            draw.randrange(4), draw.choice((0.5, 1, 2, 3)), draw.choice((None, None, 10, 60)), draw.choice((0, 100))
        )
    for _ in range(draw.randrange(5)):
        if machine.live:
            machine.finish(draw.randrange(CAPACITY), draw.randint(1, 25), draw.randint(1, 50), draw.choice((7, 900)))
    machine.round(draw.randint(1, 5))
    machine.figures_agree()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("policy", POLICIES)
def test_each_choice_in_a_crowd_is_the_references(policy, seed):
    draw = random.Random(f"{policy} {seed}")
    machine = SchedulersAgree()
    machine.begin(
        aging_step_ns=5,
        aged_every=2,
        bypass_max=3,
        bypass_ns=50,
        # The first is for short ones only, sometimes the only one for them.
        slots=[
            (0, 100, 3, draw.choice((1.0, 2.0)), 1, 1, 3),
            (0, 100, 4, draw.choice((1.0, 3.0)), 0, draw.choice((2, 3)), 1),
            (0, draw.choice((80, 150)), 3, 1.0, 0, draw.choice((2, 3)), 2),
            (1, 100, 3, 1.0, 0, 15, 1),
        ],
        policy=policy,
        prefix_margin=draw.choice((0.0, 0.5, 1.0)),
        prefix_tokens_min=draw.choice((0, 64, 130)),
        lane_caps=[0, 0],
        lane_token_caps=[0, 0],
    )
    for turn in range(120):
        if turn == 90:
            machine.die(0)
        crowd(draw, machine)
