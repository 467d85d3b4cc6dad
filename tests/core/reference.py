"""The core again, in plain Python and without any cleverness: the specification.

Every choice is a search through a list. Where this and the core differ, one of them is
wrong, and this one is easier to read.
"""

from collections import deque
from dataclasses import dataclass, field

TOKEN_UNIT = 65536
PASSED_MAX = 32


class Ring:
    """A bounded FIFO."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.items = deque()

    def try_push(self, item):
        if len(self.items) == self.capacity:
            return False
        self.items.append(item)
        return True

    def try_pop(self):
        return self.items.popleft() if self.items else None


@dataclass
class Waiter:
    """One request, as the backlog and the round see it."""

    index: int
    lane: int = 0
    level: int = 0
    key: int = 0
    arrival_ns: int = 0
    deadline_ns: int = 0
    cost: int = 0
    arrival_no: int = 0
    model: int = 0
    expire_ns: int = 0
    footprint: int = 0
    prompt: int = 0
    state: str = "submitted"
    slot: int = -1


@dataclass
class KeyQueue:
    """A key in one level of one lane."""

    counter: int = 0
    since: int | None = None  # None: nothing of it waits


class Backlog:
    """Lanes x levels x keys x (deadline, arrival), with aging."""

    def __init__(
        self,
        *,
        num_lanes,
        num_levels,
        num_keys,
        aging_step_ns,
        aged_every,
        key_weights,
        lane_weights,
        num_places,
        num_tokens=0,
        lane_caps=None,
        lane_token_caps=None,
    ):
        self.num_levels = num_levels
        self.aging_step_ns = aging_step_ns
        self.aged_every = aged_every
        self.since_aged = aged_every
        self.units = [int(TOKEN_UNIT / weight + 0.5) for weight in key_weights]
        self.lane_weights = lane_weights
        self.num_places = num_places
        self.num_tokens = num_tokens
        self.lane_caps = lane_caps or [0] * num_lanes
        self.lane_token_caps = lane_token_caps or [0] * num_lanes
        self.lane_running = [0] * num_lanes
        self.lane_tokens = [0] * num_lanes
        self.waiting = []  # in order of arrival
        self.queues = {
            (lane, level): [KeyQueue() for _ in range(num_keys)]
            for lane in range(num_lanes)
            for level in range(num_levels)
        }
        self.floors = dict.fromkeys(self.queues, 0)

    def queue_of(self, waiter):
        return self.queues[waiter.lane, waiter.level][waiter.key]

    def push(self, waiter):
        queue = self.queue_of(waiter)
        if queue.since is None:
            active = [q.counter for q in self.queues[waiter.lane, waiter.level] if q.since is not None]
            least = min(active) if active else self.floors[waiter.lane, waiter.level]
            queue.counter = max(queue.counter, least)
            queue.since = waiter.arrival_no
        self.waiting.append(waiter)

    def remove(self, waiter):
        self.waiting.remove(waiter)
        place = waiter.lane, waiter.level
        if not any((w.lane, w.level, w.key) == (*place, waiter.key) for w in self.waiting):
            self.queue_of(waiter).since = None
            if all(queue.since is None for queue in self.queues[place]):
                self.floors[place] = self.queue_of(waiter).counter

    def charge(self, waiter, tokens):
        self.queue_of(waiter).counter += tokens * self.units[waiter.key]

    def has_share(self, lane):
        total = float(sum(self.lane_weights))
        has_places = self.lane_running[lane] * total < self.lane_weights[lane] * self.num_places
        has_tokens = self.lane_tokens[lane] * total < self.lane_weights[lane] * self.num_tokens
        return (has_places or not self.num_places) and (has_tokens or not self.num_tokens)

    def is_at_cap(self, lane):
        cap, token_cap = self.lane_caps[lane], self.lane_token_caps[lane]
        return 0 < cap <= self.lane_running[lane] or 0 < token_cap <= self.lane_tokens[lane]

    def in_turn(self, passed):
        """The waiting of the lanes that may start one now."""
        waiting = [w for w in self.waiting if w not in passed and not self.is_at_cap(w.lane)]
        with_share = [w for w in waiting if self.has_share(w.lane)]
        return with_share or waiting

    def virtual_time(self, waiter):
        return waiter.arrival_ns + waiter.level * self.aging_step_ns

    def choose(self, passed=()):
        """(who is next after those that are passed, whether because it is due), or None."""
        candidates = self.in_turn(passed)
        if not candidates:
            return None
        best = min(w.level for w in candidates)
        oldest = {}
        for waiter in candidates:
            oldest.setdefault(waiter.level, waiter)
        due = min(oldest.values(), key=lambda w: (self.virtual_time(w), w.level))
        if due.level != best and self.aging_step_ns and self.since_aged + 1 >= self.aged_every:
            return due, True
        return self.first_of([w for w in candidates if w.level == best]), False

    def first_of(self, candidates):
        lanes = {w.lane for w in candidates}
        lane = min(lanes, key=lambda i: (self.lane_running[i] / self.lane_weights[i], i))
        candidates = [w for w in candidates if w.lane == lane]
        return min(candidates, key=self.rank)

    def rank(self, waiter):
        queue = self.queue_of(waiter)
        deadline = (waiter.deadline_ns == 0, waiter.deadline_ns)
        return queue.counter, queue.since, deadline, waiter.arrival_no

    def take(self, waiter, is_aged):
        self.since_aged = 0 if is_aged else self.since_aged + 1
        self.remove(waiter)
        self.charge(waiter, waiter.cost)
        self.lane_running[waiter.lane] += 1
        self.lane_tokens[waiter.lane] += waiter.footprint

    def settle(self, waiter, cost):
        self.charge(waiter, cost - waiter.cost)
        self.lane_running[waiter.lane] -= 1
        self.lane_tokens[waiter.lane] -= waiter.footprint


class Ledger:
    """What each device slot has promised, and what each key was given."""

    def __init__(self, *, capacities, num_sequences, num_keys):
        self.capacities = capacities
        self.num_sequences = num_sequences
        self.held = [[] for _ in capacities]  # [key, reserved, used] of each that runs
        self.booked = [[0, 0] for _ in range(num_keys)]

    def reserved(self, slot):
        return sum(one[1] for one in self.held[slot])

    def used(self, slot):
        return sum(one[2] for one in self.held[slot])

    def key_reserved(self, key):
        return sum(one[1] for held in self.held for one in held if one[0] == key)

    def fits(self, slot, tokens):
        return self.reserved(slot) + tokens <= self.capacities[slot]

    def reserve(self, slot, key, tokens):
        if len(self.held[slot]) == self.num_sequences[slot] or not self.fits(slot, tokens):
            return None
        one = [key, tokens, 0]
        self.held[slot].append(one)
        return one

    def grow(self, slot, one, tokens):
        if not self.fits(slot, tokens):
            return False
        one[1] += tokens
        return True

    def shrink(self, one, reserved, used):
        one[1] -= reserved
        one[2] -= used

    def release(self, slot, one):
        self.held[slot] = [other for other in self.held[slot] if other is not one]

    def settle(self, slot, one, prompt_tokens, completion_tokens):
        self.release(slot, one)
        self.booked[one[0]][0] += prompt_tokens
        self.booked[one[0]][1] += completion_tokens


@dataclass
class Slot:
    """One model on one device."""

    model: int
    kv_tokens: int
    num_sequences: int
    weight: float
    num_extra: int = 0
    is_dead: bool = False
    is_buried: bool = False
    running: list = field(default_factory=list)

    def serves(self, waiter):
        return not self.is_buried and self.model == waiter.model and waiter.footprint <= self.kv_tokens

    @property
    def num_free(self):
        return self.kv_tokens - sum(w.footprint for w in self.running)

    def limit_for(self, level, is_aged=False):
        is_urgent = is_aged or any(w.level > level for w in self.running)
        return self.num_sequences + self.num_extra * is_urgent

    def has_sequence(self, level, is_aged=False):
        return not self.is_buried and len(self.running) < self.limit_for(level, is_aged)

    def has_room(self, waiters, is_aged=False):
        num_tokens = sum(w.footprint for w in waiters)
        return (
            len(self.running) + len(waiters) <= self.limit_for(waiters[0].level, is_aged)
            and num_tokens <= self.num_free
        )


@dataclass
class Passed:
    """One that does not fit, for as long as it waits."""

    waiter: Waiter
    since_ns: int
    num_passes: int = 0
    slot: int | None = None  # Held for it.


class Scheduler:
    """The round: what ends, in which order the rest starts, and where."""

    def __init__(self, backlog, slots, *, bypass_max=16, bypass_ns=10**10):
        self.backlog = backlog
        self.slots = slots
        self.bypass_max = bypass_max
        self.bypass_ns = bypass_ns
        self.passed = []
        self.messages = deque()  # ("submit" | "cancel", waiter), ("evict", level), ("finish", waiter, tokens)
        self.events = []  # (what, index)
        self.answers = []  # To each "evict", in order.

    def round(self, now_ns):
        self.bury()
        for message in [m for m in self.messages if m[0] != "finish"]:
            {"submit": self.enqueue, "cancel": self.cancel, "evict": self.evict}[message[0]](message[1])
        for message in [m for m in self.messages if m[0] == "finish"]:
            self.settle(message[1], message[2])
        self.messages.clear()
        self.sweep()
        self.expire(now_ns)
        self.tend_promises()
        self.start_waiting(now_ns)

    def tend_promises(self):
        """Here each promise is for all that a request may need (growth_reference.py has the other kind)."""

    def bury(self):
        for slot in self.slots:
            if slot.is_dead and not slot.is_buried:
                finished = [m for m in self.messages if m[0] == "finish" and m[1] in slot.running]
                for message in finished:
                    self.settle(message[1], message[2])
                    self.messages.remove(message)
                slot.is_buried = True
                self.backlog.num_places -= slot.num_sequences
                self.backlog.num_tokens -= slot.kv_tokens
                for one in self.passed:
                    if one.slot is not None and self.slots[one.slot] is slot:
                        one.slot = None

    def end_waiting(self, waiter, what):
        self.forget(waiter)
        self.backlog.remove(waiter)
        waiter.state = "ended"
        self.events.append((what, waiter.index))

    def is_servable(self, waiter):
        return any(slot.serves(waiter) for slot in self.slots)

    def enqueue(self, waiter):
        waiter.state = "waiting"
        self.backlog.push(waiter)
        if not self.is_servable(waiter):
            self.end_waiting(waiter, "no_device")

    def cancel(self, waiter):
        if waiter.state == "waiting":
            self.end_waiting(waiter, "cancelled")

    def evict(self, level):
        """The youngest of the lowest class below this one leaves; `answers` says whether there was one."""
        below = [w for w in self.backlog.waiting if w.level > level]
        if below:
            self.end_waiting(max(below, key=lambda w: (w.level, w.arrival_no)), "evicted")
        self.answers.append(bool(below))

    def settle(self, waiter, completion_tokens):
        self.slots[waiter.slot].running.remove(waiter)
        cost = 0 if completion_tokens is None else waiter.prompt + 2 * completion_tokens
        self.backlog.settle(waiter, cost)
        waiter.state = "ended"
        self.events.append(("settled", waiter.index))

    def sweep(self):
        """End what dead device slots ran and what nobody can serve, by place in the table."""
        lost = [w for slot in self.slots if slot.is_buried for w in slot.running]
        unserved = [w for w in self.backlog.waiting if not self.is_servable(w)]
        for waiter in sorted(lost + unserved, key=lambda w: w.index):
            if waiter.state == "running":
                self.settle(waiter, None)
            else:
                self.end_waiting(waiter, "no_device")

    def expire(self, now_ns):
        late = [w for w in self.backlog.waiting if w.expire_ns and w.expire_ns <= now_ns]
        for waiter in sorted(late, key=lambda w: (w.expire_ns, w.arrival_no)):
            self.end_waiting(waiter, "expired" if self.record_of(waiter) is None else "no_kv")

    def fits(self, waiter, i, is_aged=False):
        """Whether it can start there beside what is held for another."""
        held = [one.waiter for one in self.passed if one.slot == i and one.waiter is not waiter]
        return self.slots[i].serves(waiter) and self.slots[i].has_room([waiter, *held], is_aged)

    def place(self, waiter, is_aged=False):
        able = [
            (len(slot.running) / slot.weight, i) for i, slot in enumerate(self.slots) if self.fits(waiter, i, is_aged)
        ]
        return min(able)[1] if able else None

    def record_of(self, waiter):
        return next((one for one in self.passed if one.waiter is waiter), None)

    def forget(self, waiter):
        """The last record takes the place of the one that goes."""
        one = self.record_of(waiter)
        if one is not None:
            last = self.passed.pop()
            if last is not one:
                self.passed[self.passed.index(one)] = last

    def may_be_passed(self, waiter, now_ns):
        one = self.record_of(waiter)
        if one is None and len(self.passed) < PASSED_MAX:
            one = Passed(waiter, now_ns)
            self.passed.append(one)
        if one is None:
            return False
        is_overdue = one.num_passes >= self.bypass_max or now_ns - one.since_ns >= self.bypass_ns
        if is_overdue and one.slot is None:
            held = {other.slot for other in self.passed}
            free = [(-slot.num_free, i) for i, slot in enumerate(self.slots) if slot.serves(waiter) and i not in held]
            one.slot = min(free)[1] if free else None
        return one.slot is not None or not is_overdue

    def choose_fitting(self, now_ns):
        """(who starts, whether because it is due, where), or None."""
        for one in self.passed:
            at_cap = self.backlog.is_at_cap(one.waiter.lane)
            if one.slot is not None and not at_cap and self.fits(one.waiter, one.slot):
                return one.waiter, False, one.slot
        misfits = []
        while (choice := self.backlog.choose(misfits)) is not None:
            slot = self.place(*choice)
            if slot is not None:
                for one in filter(None, map(self.record_of, misfits)):
                    one.num_passes += self.slots[slot].serves(one.waiter)
                return *choice, slot
            waiter, is_aged = choice
            lacks_cells = any(slot.has_sequence(waiter.level, is_aged) and slot.serves(waiter) for slot in self.slots)
            if len(misfits) == PASSED_MAX or (lacks_cells and not self.may_be_passed(choice[0], now_ns)):
                return None
            misfits.append(choice[0])
        return None

    def has_sequence(self):
        best = min((w.level for w in self.backlog.waiting), default=None)
        return best is not None and any(slot.has_sequence(best) for slot in self.slots)

    def start_waiting(self, now_ns):
        while self.has_sequence() and (choice := self.choose_fitting(now_ns)) is not None:
            waiter, is_aged, slot = choice
            self.forget(waiter)
            self.backlog.take(waiter, is_aged)
            self.slots[slot].running.append(waiter)
            waiter.slot = slot
            waiter.state = "running"
            self.events.append(("started", waiter.index))
