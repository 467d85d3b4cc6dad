"""The simulation again, in plain Python: one step after the other, nothing skipped.

The scheduler is the core's own plain twin. A worker fills each step by the rules that the engine's
worker has; what a step takes, the cost model says.
"""

from dataclasses import dataclass, field

from tests.core.reference import Backlog, Scheduler, Slot, Waiter

DECODE_EVERY = 4
PREFILL_MIN = 16
FINE_MIN = 8


@dataclass
class Ask:
    """A request of a trace; times in nanoseconds."""

    arrival_ns: int
    prompt: int
    answer: int
    level: int = 0
    key: int = 0
    lane: int = 0
    started_ns: int = 0
    start_no: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0
    ending: str = ""


@dataclass
class Sequence:
    """A request on a worker."""

    ask: Ask
    waiter: Waiter
    last_step: int
    order: int
    filled: int = 0
    made: int = 0

    @property
    def is_open(self):
        return self.filled < self.ask.prompt


@dataclass
class Worker:
    """One device slot. A step holds `in_turn` decodes, and a full one is steered towards `target_ns`."""

    cost: tuple
    budget: int
    fine_budget: int
    fine_level: int
    batch_max: int
    target_ns: int
    short_share: float
    in_turn: int
    sent: list = field(default_factory=list)
    sequences: list = field(default_factory=list)
    batch: list = field(default_factory=list)
    num_started: int = 0
    step_no: int = 0
    ends_ns: int | None = None
    took_ns: int = 0

    def begin(self, now_ns):
        """Take what was sent and fill a step; the requests that ran too long end first."""
        for ask, waiter in self.sent:
            self.sequences.append(Sequence(ask, waiter, self.step_no, self.num_started))
            self.num_started += 1
        self.sent.clear()
        self.batch = self.fill()
        self.took_ns = self.time_of(self.batch)
        self.ends_ns = now_ns + self.took_ns if self.batch else None

    def fill(self):
        """(sequence, tokens) of the next step."""
        opened = sorted((s for s in self.sequences if s.is_open), key=self.rank)
        urgent = opened[0].ask.level if opened else 99
        over = max(len(self.sequences) - self.in_turn, 0)
        back = sorted(self.sequences, key=self.rank)[len(self.sequences) - over :]
        opened = [s for s in opened if s.ask.level == urgent or self.step_no - s.last_step >= DECODE_EVERY]
        decodes = [s for s in self.sequences if not s.is_open and not self.is_left_out(s, urgent, back)]
        budget = min(max(self.budget - len(decodes), PREFILL_MIN), self.batch_max - len(decodes))
        return [(s, 1) for s in decodes] + self.prefills(opened, urgent, budget, len(decodes))

    def rank(self, sequence):
        return sequence.ask.level, sequence.order

    def is_left_out(self, sequence, urgent, back):
        is_least = sequence.ask.level > urgent or sequence in back
        return is_least and self.step_no - sequence.last_step < DECODE_EVERY

    def prefills(self, opened, urgent, budget, num_decodes):
        taken = [0] * len(opened)
        fine = max(self.fine_budget, PREFILL_MIN)
        if num_decodes and fine == PREFILL_MIN:
            fine = min(max(num_decodes, FINE_MIN), PREFILL_MIN)
        room = self.batch_max - num_decodes

        def take(budget, is_meant):
            nonlocal fine, room
            for i, sequence in enumerate(opened):
                if budget > 0 and is_meant(sequence.ask):
                    rest = sequence.ask.prompt - sequence.filled - taken[i]
                    is_fine = sequence.ask.lane or sequence.ask.level >= self.fine_level
                    tokens = min(budget, rest, fine if is_fine else rest)
                    if not is_fine and rest - tokens < PREFILL_MIN and rest <= room:
                        tokens = rest
                    taken[i] += tokens
                    room -= tokens
                    budget -= tokens
                    fine -= tokens * bool(is_fine)
            return budget

        lanes = {s.ask.lane for s in opened if s.ask.level == urgent}
        if lanes == {0, 1}:
            part = int(budget * self.short_share + 0.5)
            budget -= part
            budget += take(part, lambda ask: ask.level == urgent and not ask.lane)
            budget = take(budget, lambda ask: ask.level == urgent and ask.lane)
        take(budget, lambda ask: True)
        return [(s, tokens) for s, tokens in zip(opened, taken, strict=True) if tokens]

    def steer(self):
        """After a step as large as the budget: down to what would have met the target, or up by an eighth."""
        tokens = sum(n for _, n in self.batch)
        if not self.target_ns or tokens < self.budget:
            return
        if self.took_ns > self.target_ns:
            self.budget = max(int(tokens * (self.target_ns / self.took_ns)), 1)
        elif self.took_ns < self.target_ns - self.target_ns // 4:
            self.budget = min(self.budget + max(self.budget // 8, 1), self.batch_max)

    def time_of(self, batch):
        fixed, decode, prefill, context, cells = self.cost
        tokens = sum(n for _, n in batch)
        drawn = sum(s.filled + n >= s.ask.prompt for s, n in batch)
        seen = sum(s.filled + i for s, n in batch for i in range(1, n + 1))
        filled = sum(s.filled for s in self.sequences) + tokens
        return fixed + decode * drawn + prefill * (tokens - drawn) + context * seen + cells * tokens * filled

    def end(self, now_ns):
        """The step is over; who ended with it."""
        self.step_no += 1
        self.steer()
        for sequence, tokens in self.batch:
            sequence.filled += tokens
            sequence.last_step = self.step_no
            if not sequence.is_open:
                sequence.made += 1
                if sequence.made == 1:
                    sequence.ask.first_token_ns = now_ns
        ended = [s for s in self.sequences if s.made == s.ask.answer]
        self.sequences = [s for s in self.sequences if s.made < s.ask.answer]
        return ended


def simulate(
    asks,
    *,
    slots,
    costs,
    budget,
    fine_budget,
    batch_max,
    target_ns,
    border,
    fine_level=255,
    num_extra=0,
    queue_limit_ns=0,
    **backlog,
):
    """Fill in what becomes of each request. `slots` are (kv_tokens, num_sequences)."""
    weights = backlog["lane_weights"]
    short_share = weights[0] / sum(weights)
    kv_tokens, places = (sum(column) for column in zip(*slots, strict=True))
    rules = Backlog(num_places=places, num_tokens=kv_tokens, **backlog)
    scheduler = Scheduler(rules, [Slot(0, kv_tokens, num, 1.0, num_extra) for kv_tokens, num in slots])
    workers = [
        Worker(cost, budget, fine_budget, fine_level, batch_max, target_ns, short_share, num)
        for cost, (_, num) in zip(costs, slots, strict=True)
    ]
    for ask in asks:
        ask.lane = int(ask.prompt + ask.answer > border)
    waiters = [
        Waiter(
            index,
            ask.lane,
            ask.level,
            ask.key,
            ask.arrival_ns,
            cost=ask.prompt + 2 * ask.answer,
            arrival_no=index,
            expire_ns=ask.arrival_ns + queue_limit_ns if queue_limit_ns else 0,
            footprint=ask.prompt + ask.answer,
            prompt=ask.prompt,
        )
        for index, ask in enumerate(asks)
    ]
    coming = list(zip(asks, waiters, strict=True))
    while True:
        due = [w.expire_ns for w in scheduler.waiting if w.expire_ns]
        times = [*due, *(w.ends_ns for w in workers if w.ends_ns is not None), *(a.arrival_ns for a, _ in coming[:1])]
        if not times:
            return
        now_ns = min(times)
        for worker in workers:
            if worker.ends_ns == now_ns:
                for sequence in worker.end(now_ns):
                    sequence.ask.ended_ns, sequence.ask.ending = now_ns, "served"
                    scheduler.messages.append(("finish", sequence.waiter, sequence.made))
                worker.begin(now_ns)
        while coming and coming[0][0].arrival_ns == now_ns:
            scheduler.messages.append(("submit", coming.pop(0)[1]))
        scheduler.round(now_ns)
        hear(scheduler, asks, waiters, workers, now_ns)
        for worker in workers:
            if worker.ends_ns is None and worker.sent:
                worker.begin(now_ns)


def hear(scheduler, asks, waiters, workers, now_ns):
    """Take the round's events."""
    for what, index in scheduler.events:
        ask = asks[index]
        if what == "started":
            ask.started_ns = now_ns
            ask.start_no = 1 + max(other.start_no for other in asks)
            workers[waiters[index].slot].sent.append((ask, waiters[index]))
        elif what in ("expired", "no_kv", "no_device"):
            # Why it did not start in time is nothing that a simulation tells.
            ask.ended_ns, ask.ending = now_ns, "expired" if what == "no_kv" else what
    scheduler.events.clear()
