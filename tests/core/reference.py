"""The core again, in plain Python and without any cleverness: the specification.

Every choice is a search through a list. Where this and the core differ, one of them is
wrong, and this one is easier to read.
"""

from collections import deque
from dataclasses import dataclass, field

TOKEN_UNIT = 65536
PASSED_MAX = 32
ALL_LANES = 15
LANE_SHORT = 0
WEIGHT_UNIT = 1024
HINT_UNIT = 64
HINTS_MAX = 2
STEP_UNKNOWN_NS = 50_000_000
ATTEMPTS_MAX = 3


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
    prefixes: tuple = ()  # (device slot, tokens of its prompt that it holds)
    first_token_ns: int = 0
    finished_ns: int = 0
    state: str = "submitted"
    slot: int = -1
    num_lost: int = 0  # Device slots that died under it.
    is_cancelled: bool = False

    def prefix_at(self, slot):
        """How much of the prompt is there already, by the longest hints; an earlier one stays before one as long."""
        units = [(min(tokens // HINT_UNIT, 1023), i) for i, tokens in self.prefixes]
        longest = sorted(units, key=lambda one: -one[0])[:HINTS_MAX]
        return max((num for num, i in longest if i == slot), default=0)


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
        self.shape = {
            "num_lanes": num_lanes,
            "num_levels": num_levels,
            "num_keys": num_keys,
            "aging_step_ns": aging_step_ns,
            "aged_every": aged_every,
            "key_weights": key_weights,
            "lane_weights": lane_weights,
            "lane_caps": lane_caps,
            "lane_token_caps": lane_token_caps,
        }
        self.num_lanes = num_lanes
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

    def in_turn(self, passed, lanes):
        """The waiting of those of these lanes that may start one now."""
        waiting = [w for w in self.waiting if w not in passed and lanes >> w.lane & 1 and not self.is_at_cap(w.lane)]
        with_share = [w for w in waiting if self.has_share(w.lane)]
        return with_share or waiting

    def virtual_time(self, waiter):
        return waiter.arrival_ns + waiter.level * self.aging_step_ns

    def choose(self, passed=(), lanes=ALL_LANES):
        """(who is next of these lanes after those that are passed, whether because it is due), or None."""
        candidates = self.in_turn(passed, lanes)
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
        self.run(waiter)

    def run(self, waiter):
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
    lanes: int = ALL_LANES
    token_bytes: int = 1
    wants_drain: bool = False
    wants_weight: float | None = None
    wants_headroom: list = field(default_factory=list)  # What was asked for since the last round; None: no bound.
    use_percent: int = 0
    is_drained: bool = False
    is_dead: bool = False
    is_buried: bool = False
    is_kept: bool = False  # For who goes on after a loss.
    turn: int = 0
    step_ns: int = 0
    running: list = field(default_factory=list)

    def __post_init__(self):
        self.ceiling = self.kv_tokens
        self.lanes_served = self.lanes

    def serves(self, waiter):
        return (
            not self.is_buried
            and self.model == waiter.model
            and bool(self.lanes_served >> waiter.lane & 1)
            and waiter.footprint <= self.kv_tokens
        )

    @property
    def units(self):
        return max(int(self.weight * WEIGHT_UNIT + 0.5), 1)

    @property
    def reserved(self):
        return sum(w.footprint for w in self.running)

    @property
    def num_free(self):
        """For who starts."""
        return max(self.ceiling - self.reserved, 0)

    def limit_for(self, level, is_aged=False):
        is_urgent = is_aged or any(w.level > level for w in self.running)
        return self.num_sequences + self.num_extra * is_urgent

    def has_sequence(self, level, is_aged=False):
        takes = not self.is_buried and not self.is_drained and not self.is_kept
        return takes and len(self.running) < self.limit_for(level, is_aged)

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


class ModelQueue:
    """All that waits for one model."""

    def __init__(self, backlog, slots):
        self.backlog = Backlog(
            num_places=sum(slot.num_sequences for slot in slots),
            num_tokens=sum(slot.kv_tokens for slot in slots),
            **backlog.shape,
        )
        self.passed = []

    def record_of(self, waiter):
        return next((one for one in self.passed if one.waiter is waiter), None)

    def forget(self, waiter):
        """The last record takes the place of the one that goes."""
        one = self.record_of(waiter)
        if one is not None:
            last = self.passed.pop()
            if last is not one:
                self.passed[self.passed.index(one)] = last


class Scheduler:
    """The round: what ends, in which order the rest starts, and where.

    `backlog` says by which rules each model's requests are ordered.
    """

    def __init__(
        self,
        backlog,
        slots,
        *,
        bypass_max=16,
        bypass_ns=10**10,
        policy="least_connections",
        prefix_margin=0,
        prefix_tokens_min=HINT_UNIT,
    ):
        self.slots = slots
        self.queues = {
            model: ModelQueue(backlog, [slot for slot in slots if slot.model == model])
            for model in sorted({0, *(slot.model for slot in slots)})
        }
        self.bypass_max = bypass_max
        self.bypass_ns = bypass_ns
        self.policy = policy
        self.prefix_margin = prefix_margin
        self.prefix_units_min = -(-prefix_tokens_min // HINT_UNIT)
        self.num_lanes = backlog.num_lanes
        self.turn_of = ()  # Who could have had the last choice, where it was the turn's.
        self.share_lanes()
        self.messages = deque()  # ("submit" | "cancel" | "again", waiter), ("evict", level), ("finish", waiter, tokens)
        self.lost = []  # What ran on device slots that died, until the loop takes it back.
        self.again = []  # Who goes on as soon as it can.
        self.events = []  # (what, index)
        self.answers = []  # To each "evict", in order.

    def queue_of(self, waiter):
        return self.queues.get(waiter.model, self.queues[0])

    @property
    def waiting(self):
        return [w for queue in self.queues.values() for w in queue.backlog.waiting]

    @property
    def passed(self):
        return [one for queue in self.queues.values() for one in queue.passed]

    def round(self, now_ns):
        self.bury()
        for message in [m for m in self.messages if m[0] != "finish"]:
            what = {"submit": self.enqueue, "cancel": self.cancel, "evict": self.evict, "again": self.requeue}
            what[message[0]](message[1])
        for message in [m for m in self.messages if m[0] == "finish"]:
            self.settle(message[1], message[2])
        self.messages.clear()
        self.heed()
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
                if not slot.is_drained:
                    self.set_drained(slot, True)
                slot.is_buried = True
                self.share_lanes()

    def share_lanes(self):
        """A lane that no device slot of a model is for may use them all."""
        for slot in self.slots:
            lanes = 0
            for other in self.slots:
                lanes |= other.lanes * (other.model == slot.model and not other.is_buried)
            slot.lanes_served = slot.lanes | (ALL_LANES & ~lanes)

    def heed(self):
        """What is wanted of the device slots."""
        for slot in self.slots:
            if slot.is_buried:
                continue
            slot.weight = slot.wants_weight or slot.weight
            if slot.wants_drain != slot.is_drained:
                self.set_drained(slot, slot.wants_drain)
            if slot.wants_headroom:
                wanted = slot.wants_headroom[-1]
                slot.ceiling = slot.kv_tokens if wanted is None else min(slot.kv_tokens, slot.reserved + wanted)
                slot.wants_headroom.clear()

    def set_drained(self, slot, is_drained):
        slot.is_drained = is_drained
        queue = self.queues[slot.model]
        sign = -1 if is_drained else 1
        queue.backlog.num_places += sign * slot.num_sequences
        queue.backlog.num_tokens += sign * slot.kv_tokens
        for one in queue.passed:
            if is_drained and one.slot is not None and self.slots[one.slot] is slot:
                one.slot = None

    def end_waiting(self, waiter, what):
        self.queue_of(waiter).forget(waiter)
        self.queue_of(waiter).backlog.remove(waiter)
        waiter.state = "ended"
        self.events.append((what, waiter.index))

    def is_servable(self, waiter):
        return any(slot.serves(waiter) for slot in self.slots)

    def enqueue(self, waiter):
        waiter.state = "waiting"
        self.queue_of(waiter).backlog.push(waiter)
        if not self.is_servable(waiter):
            self.end_waiting(waiter, "no_device")

    def cancel(self, waiter):
        waiter.is_cancelled = True
        if waiter.state == "waiting":
            self.end_waiting(waiter, "cancelled")
        elif waiter.state == "again":
            self.end_again(waiter)

    def evict(self, level):
        """The youngest of the lowest class below this one leaves; `answers` says whether there was one."""
        below = [w for w in self.waiting if w.level > level]
        if below:
            self.end_waiting(max(below, key=lambda w: (w.level, w.arrival_no)), "evicted")
        self.answers.append(bool(below))

    def settle(self, waiter, completion_tokens):
        self.slots[waiter.slot].running.remove(waiter)
        cost = 0 if completion_tokens is None else waiter.prompt + 2 * completion_tokens
        self.queue_of(waiter).backlog.settle(waiter, cost)
        if waiter.num_lost == 0 and (completion_tokens or 0) > 1 and 0 < waiter.first_token_ns < waiter.finished_ns:
            self.note_pace(
                self.slots[waiter.slot], (waiter.finished_ns - waiter.first_token_ns) // (completion_tokens - 1)
            )
        waiter.num_lost += completion_tokens is None
        if completion_tokens is None and waiter.num_lost < ATTEMPTS_MAX and self.is_servable(waiter):
            waiter.state = "lost"
            self.lost.append(waiter)
        else:
            waiter.state = "ended"
            self.events.append(("settled", waiter.index))

    def note_pace(self, slot, step_ns):
        slot.step_ns = (7 * slot.step_ns + step_ns) // 8 if slot.step_ns else max(step_ns, 1)

    def sweep(self):
        """End what dead device slots ran and what nobody can serve, by place in the table."""
        lost = [w for slot in self.slots if slot.is_buried for w in slot.running]
        unserved = [w for w in self.waiting if not self.is_servable(w)]
        unserved += [w for w in self.again if not self.is_servable(w)]
        for waiter in sorted(lost + unserved, key=lambda w: w.index):
            if waiter.state == "running":
                self.settle(waiter, None)
            elif waiter.state == "again":
                self.end_again(waiter)
            else:
                self.end_waiting(waiter, "no_device")

    # --- going on elsewhere -------------------------------------------------------------------

    def take_back(self, is_held=lambda waiter: False):
        """The loop's part: who is lost and not held goes on. Those that end instead, because their clients left."""
        taken = [w for w in self.lost if not is_held(w)]
        self.lost = [w for w in self.lost if is_held(w)]
        for waiter in taken:
            if waiter.is_cancelled:
                waiter.state = "ended"
            else:
                self.messages.append(("again", waiter))
        return [w for w in taken if w.is_cancelled]

    def requeue(self, waiter):
        if self.is_servable(waiter):
            waiter.state = "again"
            self.again.append(waiter)
        else:
            waiter.state = "ended"
            self.events.append(("settled", waiter.index))

    def end_again(self, waiter):
        self.again.remove(waiter)
        waiter.state = "ended"
        self.events.append(("settled", waiter.index))

    def restart(self, queue):
        """Who can goes on; what the others could have is kept for them."""
        kept = []
        for waiter in sorted(self.again, key=lambda w: (w.level, w.arrival_no)):
            if self.queue_of(waiter) is not queue or queue.backlog.is_at_cap(waiter.lane):
                continue
            slot = self.place(waiter)
            if slot is None:
                kept += [one for one in self.slots if one.serves(waiter)]
                continue
            self.again.remove(waiter)
            self.take_turn(slot)
            queue.backlog.run(waiter)
            self.run_at(slot, waiter)
            self.events.append(("restarted", waiter.index))
        for slot in kept:
            slot.is_kept = True

    # --- what else a round does ---------------------------------------------------------------

    def expire(self, now_ns):
        late = [w for w in self.waiting if w.expire_ns and w.expire_ns <= now_ns]
        for waiter in sorted(late, key=lambda w: (w.expire_ns, w.arrival_no)):
            self.end_waiting(waiter, "expired" if self.queue_of(waiter).record_of(waiter) is None else "no_kv")

    def fits(self, waiter, i, is_aged=False):
        """Whether it can start there beside what is held for another."""
        slot = self.slots[i]
        held = [one.waiter for one in self.passed if one.slot == i and one.waiter is not waiter]
        return (
            slot.serves(waiter) and not slot.is_drained and not slot.is_kept and slot.has_room([waiter, *held], is_aged)
        )

    # --- where ------------------------------------------------------------------------------

    def connections(self, i):
        return len(self.slots[i].running) * WEIGHT_UNIT / self.slots[i].units

    def cost(self, waiter, i):
        slot = self.slots[i]
        if self.policy == "vram":
            return -(slot.num_free - waiter.footprint) * slot.token_bytes
        if self.policy == "weighted_round_robin":
            return -(slot.turn + slot.units)
        if self.policy == "load":
            work = slot.reserved + waiter.footprint
            fill = 1024 * work // slot.kv_tokens
            product = float(work) * float(slot.step_ns or STEP_UNKNOWN_NS)
            return product * (100 + slot.use_percent) * (1024 + fill) / slot.units
        return self.connections(i)

    def prefix(self, waiter, i):
        units = waiter.prefix_at(i)
        return units if units >= self.prefix_units_min else 0

    def rank(self, waiter, i):
        """The least one is the best place."""
        prefers_idle = waiter.lane == LANE_SHORT and self.num_lanes > 1 and self.policy in ("vram", "load")
        is_busy = prefers_idle and bool(self.slots[i].running)
        return is_busy, self.cost(waiter, i), -self.prefix(waiter, i), i

    def place(self, waiter, is_aged=False):
        able = [i for i in range(len(self.slots)) if self.fits(waiter, i, is_aged)]
        if not able:
            return None
        best = min(able, key=lambda i: self.rank(waiter, i))
        bound = self.connections(best) + self.prefix_margin
        with_more = [i for i in able if self.prefix(waiter, i) > self.prefix(waiter, best)]
        within = [i for i in with_more if self.prefix_margin > 0 and self.connections(i) <= bound]
        self.turn_of = () if within else able
        return min(within, key=lambda i: (-self.prefix(waiter, i), self.rank(waiter, i)), default=best)

    def take_turn(self, i):
        """Whoever could have had it gains its weight, and who has it pays for all."""
        if self.policy == "weighted_round_robin":
            for other in self.turn_of:
                self.slots[other].turn += self.slots[other].units
                self.slots[i].turn -= self.slots[other].units

    # --- who --------------------------------------------------------------------------------

    def may_be_passed(self, queue, waiter, now_ns):
        one = queue.record_of(waiter)
        if one is None and len(queue.passed) < PASSED_MAX:
            one = Passed(waiter, now_ns)
            queue.passed.append(one)
        if one is None:
            return False
        is_overdue = one.num_passes >= self.bypass_max or now_ns - one.since_ns >= self.bypass_ns
        if is_overdue and one.slot is None:
            held = {other.slot for other in queue.passed}
            free = [
                (-slot.num_free, i)
                for i, slot in enumerate(self.slots)
                if slot.serves(waiter) and not slot.is_drained and i not in held
            ]
            one.slot = min(free)[1] if free else None
        return one.slot is not None or not is_overdue

    def choose_fitting(self, queue, lanes, now_ns):
        """(who starts, whether because it is due, where), or None."""
        self.turn_of = ()
        for one in queue.passed:
            at_cap = queue.backlog.is_at_cap(one.waiter.lane)
            if one.slot is not None and not at_cap and self.fits(one.waiter, one.slot):
                return one.waiter, False, one.slot
        misfits = []
        while (choice := queue.backlog.choose(misfits, lanes)) is not None:
            slot = self.place(*choice)
            if slot is not None:
                for one in filter(None, map(queue.record_of, misfits)):
                    one.num_passes += self.slots[slot].serves(one.waiter)
                return *choice, slot
            waiter, is_aged = choice
            lacks_cells = any(slot.has_sequence(waiter.level, is_aged) and slot.serves(waiter) for slot in self.slots)
            if len(misfits) == PASSED_MAX or (lacks_cells and not self.may_be_passed(queue, choice[0], now_ns)):
                return None
            misfits.append(choice[0])
        return None

    def lanes_with_sequence(self, queue, model):
        """The lanes of a model for which a device slot has a sequence, for the best class that waits for it."""
        lanes = 0
        for slot in self.slots:
            levels = [w.level for w in queue.backlog.waiting if slot.lanes_served >> w.lane & 1]
            if slot.model == model and levels and slot.has_sequence(min(levels)):
                lanes |= slot.lanes_served
        return lanes

    def start_waiting(self, now_ns):
        for model, queue in self.queues.items():
            self.restart(queue)
            while lanes := self.lanes_with_sequence(queue, model):
                choice = self.choose_fitting(queue, lanes, now_ns)
                if choice is None:
                    break
                self.start(queue, *choice)
            for slot in self.slots:
                slot.is_kept = False

    def start(self, queue, waiter, is_aged, slot):
        queue.forget(waiter)
        self.take_turn(slot)
        queue.backlog.take(waiter, is_aged)
        self.run_at(slot, waiter)
        self.events.append(("started", waiter.index))

    def run_at(self, slot, waiter):
        self.slots[slot].running.append(waiter)
        waiter.slot = slot
        waiter.state = "running"
