"""Placement over real device slots: each decision under a scripted load is the plain-Python reference's."""

import random
import select
import threading
import time
from collections import Counter

import pytest

from lqs import _core, _engine
from tests.core import reference

from .rig import LIMIT_S, Answer

NUM_TURNS = 4
# What a step may write takes more than half of it, so one that nobody reads runs on after a few tokens.
OUT_BUFFER_BYTES = 1024
NUM_TOKENS = 40


class Twins:
    """Device slots with real workers, whose scheduler's rounds the test plays, and the reference beside it."""

    def __init__(self, model, policy, num_slots):
        draw = random.Random(f"{policy} {num_slots}")
        self.model = model
        self.scheduler = _core.Scheduler(
            table_capacity=256,
            level_caps=[256] * 3,
            total_cap=256,
            num_lanes=2,
            out_buffer_bytes=OUT_BUFFER_BYTES,
            policy=_core.Placing[policy.upper()],
            prefix_margin=0.5,
        )
        slots, self.workers = [], []
        for number in range(num_slots):
            n_seq, n_ctx, weight = draw.choice([3, 4]), draw.choice([256, 512]), [2.0, 1.0][number % 2]
            slot = self.scheduler.add_device_slot(kv_tokens=n_ctx, num_sequences=n_seq, weight=weight)
            slots.append(reference.Slot(0, n_ctx, n_seq, weight))
            shape = {"n_ctx": n_ctx, "n_seq": n_seq, "threads": 1, "n_warm": 1}
            self.workers.append(_engine.Worker(self.scheduler, slot, model, **shape))
        rules = reference.Backlog(
            num_lanes=2, num_levels=3, num_keys=1, aging_step_ns=0, aged_every=4, key_weights=[1.0],
            lane_weights=[3.0, 1.0], num_places=0,
        )  # fmt: skip
        self.twin = reference.Scheduler(rules, slots, policy=policy, prefix_margin=0.5)
        self.poller = select.poll()
        self.poller.register(self.scheduler.loop_fd, select.POLLIN)
        self.now_ns = 0
        self.answers = {}  # Of all, by index in the table; no index comes twice, the table is large enough.
        self.waiters = {}
        self.started = []

    def __enter__(self):
        for worker in self.workers:
            worker.open()
        self.threads = [threading.Thread(target=worker.run, daemon=True) for worker in self.workers]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        for worker, thread in zip(self.workers, self.threads, strict=True):
            worker.stop()
            thread.join(LIMIT_S)
            worker.close()

    def submit(self, text, *, max_tokens=NUM_TOKENS, lane=0, level=1, prefixes=()):
        """Let one wait that nobody reads: it runs until it is told to end."""
        ids = self.model.tokenize(text.encode(), False, True)
        work = _engine.Completion(self.model, ids, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        answer, number = Answer(), len(self.waiters)
        shape = {"lane": lane, "level": level, "arrival_ns": self.now_ns, "prefixes": tuple(prefixes)}
        assert self.scheduler.try_enter(level)
        answer.handle = self.scheduler.submit(
            work, answer, num_prompt_tokens=len(ids), max_tokens=max_tokens, footprint_tokens=len(ids) + max_tokens,
            **shape,
        )  # fmt: skip
        self.scheduler.hold(answer.handle)
        waiter = reference.Waiter(
            number, arrival_no=number, prompt=len(ids), cost=len(ids) + 2 * max_tokens,
            footprint=len(ids) + max_tokens, **shape,
        )  # fmt: skip
        self.answers[number], self.waiters[number] = answer, waiter
        self.twin.messages.append(("submit", waiter))
        return number

    def round(self):
        """One round of both: what starts, in which order, and how much runs where must be the same."""
        self.now_ns += 1
        self.scheduler.round(self.now_ns)
        self.twin.round(self.now_ns)
        self.started += [index for what, index in self.twin.events if what == "started"]
        self.twin.events.clear()
        figures = self.scheduler.slots()
        assert [slot["num_running"] for slot in figures] == [len(slot.running) for slot in self.twin.slots]
        assert [slot["step_ns"] for slot in figures] == [slot.step_ns for slot in self.twin.slots]
        for worker in range(len(self.workers)):
            assert figures[worker]["reserved"] == self.twin.slots[worker].reserved

    def let_end(self, number):
        """Read on in one that runs until it has ended, and tell the reference."""
        answer, waiter = self.answers[number], self.waiters[number]
        self.scheduler.resume(answer.handle)
        until = time.monotonic() + LIMIT_S
        while answer.outcome is None:
            assert time.monotonic() < until, "its worker did not get there in time"
            self.poller.poll(100)
            for event in self.scheduler.poll():
                event[1].on(event)
        outcome = answer.outcome
        waiter.first_token_ns, waiter.finished_ns = outcome.first_token_ns, outcome.finished_ns
        self.twin.messages.append(("finish", waiter, outcome.num_completion_tokens))

    def running(self):
        return [number for number, waiter in self.waiters.items() if waiter.state == "running"]

    @property
    def is_idle(self):
        return all(waiter.state == "ended" for waiter in self.waiters.values())


def play(twins, draw):
    """Turns in which some come and some end, one by one; then all end."""
    for turn in range(1000):
        for _ in range(draw.randint(1, 4) if turn < NUM_TURNS else 0):
            twins.submit(
                "Once upon a time " * draw.randint(1, 6),
                lane=draw.randint(0, 1),
                level=draw.randint(0, 2),
                prefixes=[(draw.randrange(len(twins.workers)), 128)] if draw.random() < 0.3 else [],
            )
        twins.round()
        if turn >= NUM_TURNS and twins.is_idle:
            break
        for number in draw.sample(twins.running(), draw.randint(0, len(twins.running()))):
            twins.let_end(number)


@pytest.mark.parametrize("num_slots", [2, 4])
@pytest.mark.parametrize("policy", ["least_connections", "vram", "weighted_round_robin", "load"])
def test_every_decision_is_the_references(default_model, policy, num_slots):
    with Twins(default_model, policy, num_slots) as twins:
        play(twins, random.Random(7 * num_slots))
        placed = [(number, twins.answers[number].outcome.slot) for number in twins.started]
        assert placed == [(number, twins.waiters[number].slot) for number in twins.started]
        assert len(placed) == len(twins.waiters)
        assert len({slot for _, slot in placed}) == num_slots
        assert all(slot["reserved"] == slot["num_running"] == 0 for slot in twins.scheduler.slots())
        assert twins.scheduler.snapshot()["num_broken"] == 0


def test_a_split_of_two_to_one_lands_within_two_percent(default_model):
    with Twins(default_model, "weighted_round_robin", 2) as twins:
        for _ in range(5):
            numbers = [twins.submit("Once", max_tokens=20) for _ in range(6)]
            twins.round()
            for number in numbers:
                twins.let_end(number)
        twins.round()
        counts = Counter(answer.outcome.slot for answer in twins.answers.values())
    assert abs(counts[0] / 30 - 2 / 3) <= 0.02
