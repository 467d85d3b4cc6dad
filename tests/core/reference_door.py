"""The door again, in plain Python and without any cleverness: the specification."""

from dataclasses import dataclass, field

IN, EVICT, WAIT, FULL, BROKEN, NOBODY = range(6)
CLOSED, HALF_OPEN, OPEN = range(3)
NEVER = 2**63 - 1


@dataclass
class Guest:
    """One that stands at the door."""

    user: int
    level: int
    until_ns: int
    has_patience: bool
    asks: bool = False
    is_gone: bool = False


@dataclass
class Breaker:
    """Closed, half-open or open, of one class."""

    state: int = CLOSED
    until_ns: int = 0
    num_good: int = 0


@dataclass
class Door:
    """Rules, who is inside, who stands at the door."""

    caps: list
    total: int
    demotes: list
    evicts: list
    place_waits_ns: list
    num_guests_max: int
    warns: list
    clears: list
    full: int
    open_ns: int
    num_probes: int
    num_sequences: int = 0
    kv_tokens: int = 0
    wanted: int = 0
    num_running: int = 0
    full_since: int | None = None
    guests: list = field(default_factory=list)  # In order of arrival.
    asks: list = field(default_factory=list)  # Guests, here or gone, in the order in which they asked.

    def __post_init__(self):
        self.pending = [0] * len(self.caps)
        self.submitted = [0] * len(self.caps)
        self.warned = [False] * (len(self.caps) + 1)
        self.breakers = [Breaker() for _ in self.caps]

    # How full it is.

    def startable(self):
        return max(self.num_sequences - self.num_running, 0) if self.wanted < self.kv_tokens else 0

    def stuck(self):
        return max(sum(self.pending) - self.startable(), 0)

    def stuck_of(self, level):
        at_once = max(self.startable() - sum(self.pending[:level]), 0)
        return max(self.pending[level] - at_once, 0)

    def has_room(self, level):
        at_once = max(self.startable() - sum(self.pending[:level]), 0)
        in_class = self.caps[level] - self.pending[level]
        in_all = self.total - sum(self.pending)
        return (in_class > 0 and in_all > 0) or (in_class + at_once > 0 and in_all + self.startable() > 0)

    def of_class(self, level):
        return [guest for guest in self.guests if guest.level == level]

    def could_evict(self, level, below):
        """Whether one of those below (who is submitted, or everybody) could leave for one more of this class."""
        num_asking = sum(guest.asks for guest in self.of_class(level))
        is_full = sum(self.pending) >= self.total and self.caps[level] - self.pending[level] - num_asking > 0
        return self.evicts[level] and is_full and sum(below[level + 1 :]) > len(self.asks)

    # Warning and breakers.

    def watch(self, now_ns):
        self.warned[-1] |= 0 < self.warns[-1] <= self.stuck()
        if not self.full or self.stuck() < self.full:
            return
        if self.full_since is None:
            self.full_since = now_ns
        self.trip(1 + (now_ns - self.full_since) // self.open_ns, now_ns)

    def trip(self, num, now_ns):
        for level in range(len(self.caps) - 1, 0, -1)[:num]:
            breaker = self.breakers[level]
            if breaker.state != OPEN or now_ns >= breaker.until_ns:
                breaker.state, breaker.until_ns = OPEN, now_ns + self.open_ns

    def ease(self):
        for level in range(len(self.caps)):
            self.warned[level] &= self.stuck_of(level) >= self.clears[level]
        if self.stuck() < self.clears[-1]:
            self.warned[-1], self.full_since = False, None

    def breaker_holds(self, level, now_ns):
        breaker = self.breakers[level]
        if breaker.state == CLOSED:
            return False
        if breaker.state == OPEN:
            if now_ns < breaker.until_ns:
                return True
            breaker.state, breaker.num_good = HALF_OPEN, 0
        if self.stuck() >= (self.warns[-1] or self.full or self.total):
            breaker.state, breaker.until_ns = OPEN, now_ns + self.open_ns
        else:
            breaker.num_good += 1
            if breaker.num_good >= self.num_probes:
                breaker.state = CLOSED
        return False

    # Arrivals.

    def let_in(self, level, now_ns):
        self.pending[level] += 1
        self.warned[level] |= 0 < self.warns[level] <= self.stuck_of(level)
        self.watch(now_ns)

    def enter(self, level, now_ns, expire_ns, user):
        """(what it says, the class)."""
        self.watch(now_ns)
        if self.breaker_holds(level, now_ns):
            return BROKEN, level
        if not self.of_class(level) and self.has_room(level):
            self.let_in(level, now_ns)
            return IN, level
        if self.demotes[level]:
            for lower in range(level + 1, len(self.caps)):
                if not self.of_class(lower) and self.has_room(lower) and not self.breaker_holds(lower, now_ns):
                    self.let_in(lower, now_ns)
                    return IN, lower
        return self.stand(level, now_ns, expire_ns, user), level

    def stand(self, level, now_ns, expire_ns, user):
        asks, wait_ns = self.could_evict(level, self.submitted), self.place_waits_ns[level]
        gone = [guest for guest in self.asks if guest.is_gone and guest.level == level]
        if (
            not (wait_ns or self.could_evict(level, self.pending))
            or len(self.of_class(level) + gone) >= self.num_guests_max
        ):
            return FULL
        until_ns = min(now_ns + wait_ns if wait_ns else NEVER, expire_ns or NEVER)
        guest = Guest(user, level, until_ns, has_patience=wait_ns > 0)
        self.guests.append(guest)
        if asks:
            self.ask(guest)
        return EVICT if asks else WAIT

    def ask(self, guest):
        guest.asks = True
        self.asks.append(guest)

    # Guests, later.

    def answer(self, was_evicted, now_ns):
        guest = self.asks.pop(0)
        guest.asks = False
        if guest.is_gone:
            return NOBODY, 0
        if (was_evicted or self.of_class(guest.level)[0] is guest) and self.has_room(guest.level):
            self.come_in(guest, now_ns)
            return IN, guest.user
        if guest.has_patience or self.could_evict(guest.level, self.pending):
            return WAIT, guest.user
        self.go(guest)
        return FULL, guest.user

    def come_in(self, guest, now_ns):
        self.guests.remove(guest)
        self.let_in(guest.level, now_ns)

    def go(self, guest):
        self.guests.remove(guest)
        guest.is_gone = True

    def give_up(self, user):
        self.go(next(guest for guest in self.guests if guest.user == user))

    def tend(self, now_ns):
        """Whose time is over; who gets a place, the best class first; for whom one could leave; who may not stay."""
        told = []
        by_class = [guest for level in range(len(self.caps)) for guest in self.of_class(level)]
        for guest in by_class:
            if guest.until_ns <= now_ns:
                self.go(guest)
                told.append((FULL, guest.user, guest.level))
        while (guest := self.next_in()) is not None:
            self.come_in(guest, now_ns)
            told.append((IN, guest.user, guest.level))
        for level in range(len(self.caps)):
            for guest in self.of_class(level):
                if not guest.asks and self.could_evict(level, self.submitted):
                    self.ask(guest)
                    told.append((EVICT, guest.user, guest.level))
        for level in range(len(self.caps)):
            while (guests := self.of_class(level)) and self.is_without_hope(guests[0]):
                self.go(guests[0])
                told.append((FULL, guests[0].user, level))
        return told

    def is_without_hope(self, guest):
        may_stay = guest.has_patience or guest.asks or self.could_evict(guest.level, self.pending)
        return not may_stay and not self.has_room(guest.level)

    def next_in(self):
        for level in range(len(self.caps)):
            for guest in self.of_class(level)[:1]:
                if guest.asks:
                    return None
                if self.has_room(level):
                    return guest
        return None

    # Inside.

    def submit(self, level, tokens):
        self.submitted[level] += 1
        self.wanted += tokens

    def start(self, level):
        self.submitted[level] -= 1
        self.pending[level] -= 1
        self.num_running += 1
        self.ease()

    def settle(self, level, tokens, *, has_run):
        self.wanted -= tokens
        if has_run:
            self.num_running -= 1
            self.ease()
        else:
            self.submitted[level] -= 1
            self.leave(level)

    def leave(self, level):
        self.pending[level] -= 1
        self.ease()
