"""The door again, in plain Python and without any cleverness: the specification."""

from dataclasses import dataclass, field

IN, EVICT, WAIT, FULL, BROKEN, NOBODY = range(6)
CLOSED, HALF_OPEN, OPEN = range(3)


@dataclass
class Guest:
    """One that stands at the door: an "ask" for an eviction or a "wait" for a place."""

    user: int
    level: int
    kind: str
    until_ns: int
    expire_ns: int
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
    warn: int
    clear: int
    full: int
    open_ns: int
    num_probes: int
    num_sequences: int = 0
    kv_tokens: int = 0
    wanted: int = 0
    num_running: int = 0
    is_warned: bool = False
    full_since: int | None = None
    waits: list = field(default_factory=list)
    asks: list = field(default_factory=list)

    def __post_init__(self):
        self.pending = [0] * len(self.caps)
        self.breakers = [Breaker() for _ in self.caps]

    # How full it is.

    def startable(self):
        return max(self.num_sequences - self.num_running, 0) if self.wanted < self.kv_tokens else 0

    def stuck(self):
        return max(sum(self.pending) - self.startable(), 0)

    def claims(self, level):
        return sum(guest.level == level and not guest.is_gone for guest in self.asks)

    def has_room(self, level):
        better = sum(self.pending[:level])
        at_once = max(self.startable() - better, 0)
        in_class = self.caps[level] - self.pending[level] - self.claims(level)
        in_all = self.total - sum(self.pending)
        return (in_class > 0 and in_all > 0) or (in_class + at_once > 0 and in_all + self.startable() > 0)

    def is_passed_by_nobody(self, level):
        return not any(guest.level == level for guest in self.waits)

    # Warning and breakers.

    def watch(self, now_ns):
        if self.warn and self.stuck() >= self.warn:
            self.is_warned = True
        if not self.full or self.stuck() < self.full:
            return
        if self.full_since is None:
            self.full_since = now_ns
        num = 1 + (now_ns - self.full_since) // self.open_ns
        for level in range(len(self.caps) - 1, 0, -1)[:num]:
            breaker = self.breakers[level]
            if breaker.state != OPEN or now_ns >= breaker.until_ns:
                breaker.state, breaker.until_ns = OPEN, now_ns + self.open_ns

    def ease(self):
        if self.stuck() < self.clear:
            self.is_warned, self.full_since = False, None

    def breaker_holds(self, level, now_ns):
        breaker = self.breakers[level]
        if breaker.state == CLOSED:
            return False
        if breaker.state == OPEN:
            if now_ns < breaker.until_ns:
                return True
            breaker.state, breaker.num_good = HALF_OPEN, 0
        if self.stuck() >= (self.warn or self.full):
            breaker.state, breaker.until_ns = OPEN, now_ns + self.open_ns
        else:
            breaker.num_good += 1
            if breaker.num_good >= self.num_probes:
                breaker.state = CLOSED
        return False

    # Arrivals.

    def let_in(self, level, now_ns):
        self.pending[level] += 1
        self.watch(now_ns)

    def enter(self, level, now_ns, expire_ns, user):
        """(what it says, the class)."""
        self.watch(now_ns)
        if self.breaker_holds(level, now_ns):
            return BROKEN, level
        if self.is_passed_by_nobody(level) and self.has_room(level):
            self.let_in(level, now_ns)
            return IN, level
        if self.demotes[level]:
            for lower in range(level + 1, len(self.caps)):
                is_open = self.is_passed_by_nobody(lower) and self.has_room(lower)
                if is_open and not self.breaker_holds(lower, now_ns):
                    self.let_in(lower, now_ns)
                    return IN, lower
        if sum(guest.level == level for guest in self.waits + self.asks) >= self.num_guests_max:
            return FULL, level
        is_in_class = self.caps[level] - self.pending[level] - self.claims(level) > 0
        if self.evicts[level] and is_in_class and sum(self.pending[level + 1 :]) > len(self.asks):
            self.asks.append(Guest(user, level, "ask", expire_ns or 2**63 - 1, expire_ns))
            return EVICT, level
        return self.wait(Guest(user, level, "wait", 0, expire_ns), now_ns), level

    def wait(self, guest, now_ns):
        wait_ns = self.place_waits_ns[guest.level]
        if not wait_ns:
            return FULL
        guest.kind = "wait"
        guest.until_ns = min(now_ns + wait_ns, guest.expire_ns or 2**63 - 1)
        self.waits.append(guest)
        return WAIT

    # Guests, later.

    def answer(self, was_evicted, now_ns):
        guest = self.asks.pop(0)
        if guest.is_gone:
            return NOBODY, 0
        if (was_evicted or self.is_passed_by_nobody(guest.level)) and self.has_room(guest.level):
            self.let_in(guest.level, now_ns)
            return IN, guest.user
        return self.wait(guest, now_ns), guest.user

    def give_up(self, user):
        for guest in self.asks:
            guest.is_gone |= guest.user == user
        self.waits = [guest for guest in self.waits if guest.user != user]

    def tend(self, now_ns):
        """Whose time is over, those that asked first; and who gets a place, the best class first."""
        late = [guest for guest in self.asks if not guest.is_gone and guest.until_ns <= now_ns]
        late += sorted((guest for guest in self.waits if guest.until_ns <= now_ns), key=lambda guest: guest.level)
        for guest in late:
            self.give_up(guest.user)
        told = [(FULL, guest.user, guest.level) for guest in late]
        while able := [guest for guest in self.waits if self.has_room(guest.level)]:
            guest = min(able, key=lambda guest: guest.level)
            self.waits.remove(guest)
            self.let_in(guest.level, now_ns)
            told.append((IN, guest.user, guest.level))
        return told

    # Inside.

    def start(self, level):
        self.pending[level] -= 1
        self.num_running += 1
        self.ease()

    def settle(self, level, tokens, *, has_run):
        self.wanted -= tokens
        if has_run:
            self.num_running -= 1
        else:
            self.pending[level] -= 1
        self.ease()

    def leave(self, level):
        self.settle(level, 0, has_run=False)
