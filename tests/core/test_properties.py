"""What the order promises, over random traces of the very scheduler that serves."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from lqs._core import EV_STARTED, Scheduler, Work

S = 10**9
STEP_NS = 10 * S
AGED_EVERY = 4
NUM_LEVELS = 4

LEVELS = st.integers(0, NUM_LEVELS - 1)
# What happens, each after a pause in seconds: a request of a class comes, or one that runs ends.
TRACES = st.lists(st.tuples(st.integers(0, 4), st.one_of(st.none(), LEVELS)), min_size=20, max_size=200)


@dataclass
class Seen:
    """One request: when it came and, once it has started, as which start and when."""

    level: int
    arrival_ns: int
    start_no: int | None = None
    started_ns: int = 0
    waiting: tuple[int, ...] = ()  # Who waited as it was started, by number.

    @property
    def virtual_ns(self):
        return self.arrival_ns + self.level * STEP_NS


class Played:
    """A scheduler with one device slot, whose worker is played."""

    def __init__(self, *, num_sequences=2, num_keys=1, **settings):
        self.scheduler = Scheduler(
            table_capacity=1024,
            level_caps=[1000] * NUM_LEVELS,
            total_cap=1000,
            num_lanes=1,
            lane_weights=[1],
            num_keys=num_keys,
            aging_step_ns=STEP_NS,
            aged_every=AGED_EVERY,
            **settings,
        )
        self.scheduler.add_device_slot(kv_tokens=10**6, num_sequences=num_sequences)
        self.now_ns = 0
        self.seen = []
        self.handles = []
        self.running = []
        self.num_starts = 0

    def arrive(self, level, **what):
        number = len(self.seen)
        assert self.scheduler.try_enter(level)
        self.handles.append(
            self.scheduler.submit(
                Work(), number, level=level, arrival_ns=self.now_ns,
                **{"num_prompt_tokens": 10, "max_tokens": 10, "footprint_tokens": 20, **what},
            )
        )  # fmt: skip
        self.seen.append(Seen(level, self.now_ns))
        self.round()

    def finish(self, num_tokens=10):
        self.scheduler.finish(self.handles[self.running.pop(0)], num_completion_tokens=num_tokens)
        self.round()

    def round(self):
        self.scheduler.round(self.now_ns)
        self.scheduler.take(0)
        for kind, number, *_ in self.scheduler.poll():
            if kind == EV_STARTED:
                one = self.seen[number]
                one.start_no, one.started_ns = self.num_starts, self.now_ns
                one.waiting = tuple(i for i, other in enumerate(self.seen) if other.start_no is None)
                self.num_starts += 1
                self.running.append(number)

    def play(self, trace):
        for pause_s, level in trace:
            self.now_ns += pause_s * S
            if level is not None:
                self.arrive(level)
            elif self.running:
                self.finish()
        while self.running:
            self.now_ns += S
            self.finish()

    @property
    def in_order(self):
        return sorted(self.seen, key=lambda one: one.start_no)


@given(TRACES, st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_class_order_is_broken_only_by_the_aged_share(trace, num_sequences):
    played = Played(num_sequences=num_sequences)
    played.play(trace)
    since_aged = AGED_EVERY
    for one in played.in_order:
        waiting = [played.seen[i] for i in one.waiting]
        if any(other.level < one.level for other in waiting):
            # Out of order: then it is the oldest of all by virtual time, and its turn has come.
            assert all(one.virtual_ns <= other.virtual_ns for other in waiting)
            assert since_aged + 1 >= AGED_EVERY
            since_aged = 0
        else:
            since_aged = min(since_aged + 1, AGED_EVERY)
            same = [other for other in waiting if other.level == one.level]
            assert all(one.arrival_ns <= other.arrival_ns for other in same)


@given(TRACES, st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_nobody_waits_longer_than_its_bound(trace, num_sequences):
    """From arrival + level x step on it starts after at most aged_every x the starts due before it."""
    played = Played(num_sequences=num_sequences)
    played.play(trace)
    for one in played.seen:
        if one.started_ns <= one.virtual_ns:
            continue
        before = [other for other in played.seen if other is not one and other.virtual_ns <= one.virtual_ns]
        num_due = sum(other.start_no > _starts_until(played, one.virtual_ns) for other in before)
        num_since = one.start_no - _starts_until(played, one.virtual_ns)
        assert num_since <= AGED_EVERY * (num_due + 1)


def _starts_until(played, time_ns):
    """The number of the last start that was not after this time; -1 for none."""
    return max((one.start_no for one in played.seen if one.started_ns <= time_ns), default=-1)


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=5),
    st.lists(st.integers(5, 60), min_size=5, max_size=5),
    LEVELS,
)
@settings(max_examples=40, deadline=None)
def test_backlogged_keys_share_by_their_weights(weights, lengths, level):
    """G16: whatever the lengths of their answers are, and however many requests each has waiting."""
    played = Played(num_sequences=4, num_keys=len(weights), key_weights=weights)
    served = Counter()
    keys = {}

    def refill():
        waiting = Counter(keys[i] for i, one in enumerate(played.seen) if one.start_no is None)
        for key in range(len(weights)):
            for _ in range(waiting[key], 3 + 7 * (key == 0)):
                keys[len(played.seen)] = key
                played.arrive(level, key=key, max_tokens=64)

    for _ in range(600 * len(weights)):
        refill()
        key = keys[played.running[0]]
        served[key] += 10 + 2 * lengths[key]
        played.finish(num_tokens=lengths[key])
        if len(played.seen) > 900:
            break
    # What was served of each, over its weight; one request more or less may be under way.
    shares = [served[key] / weight for key, weight in enumerate(weights)]
    mean = sum(shares) / len(shares)
    slack = max((10 + 2 * 64) * 4 / weight for weight in weights)
    assert all(abs(share - mean) <= 0.05 * mean + slack for share in shares)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 8)), min_size=10, max_size=120),
    st.integers(0, 6),
)
@settings(max_examples=100, deadline=None)
def test_the_head_is_held_for_and_starts_once_what_runs_has_ended(requests, bypass_max):
    """No request is passed more often than allowed, and one that is held for waits for the running only."""
    scheduler = Scheduler(
        table_capacity=1024, level_caps=[1000], total_cap=1000, num_lanes=1, lane_weights=[1], bypass_max=bypass_max,
    )  # fmt: skip
    scheduler.add_device_slot(kv_tokens=64, num_sequences=8)
    handles, ends, order = {}, {}, []
    passes = Counter()
    held_at = {}
    for now in range(400):
        for number in [number for number, end in ends.items() if end <= now]:
            scheduler.finish(handles[number])
            del ends[number]
        if now < len(requests):
            assert scheduler.try_enter(0)
            handles[now] = scheduler.submit(
                Work(), now, arrival_ns=now, num_prompt_tokens=1, footprint_tokens=requests[now][0]
            )
        scheduler.round(now)
        scheduler.take(0)
        for kind, number, *_ in scheduler.poll():
            if kind == EV_STARTED:
                order.append(number)
                ends[number] = now + requests[number][1]
                for other in handles:
                    if other < number and other not in order:
                        passes[other] += 1
                        if passes[other] >= bypass_max:
                            held_at.setdefault(other, now)
        for number, since in held_at.items():
            # The longest that anything runs is 8; behind other holders it waits for those too.
            num_before = sum(other < number for other in held_at)
            assert number in order or now - since <= 9 * (num_before + 1)
    assert len(order) == len(requests)
    assert max(passes.values(), default=0) <= bypass_max
