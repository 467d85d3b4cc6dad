# Python's view of the door.

cdef dict door_figures(const DoorLevel* own, int64_t now_ns):
    cdef uint32_t breaker = own.breaker
    if breaker == BREAKER_OPEN and now_ns >= own.open_until_ns:
        # The next that arrives is a probe.
        breaker = BREAKER_HALF_OPEN
    return {
        "cap": own.cap,
        "num_pending": own.num_pending,
        "num_asking": own.num_asking,
        "num_place_waiting": own.num_here,
        "is_warned": bool(own.warned.is_up),
        "breaker": breaker,
        "num_overflows": own.num_overflows,
        "num_demoted": own.num_demoted,
        "num_evictions": own.num_evictions,
        "num_place_waits": own.num_waits,
        "num_place_waits_lost": own.num_waits_lost,
        "num_full": own.num_full,
        "num_broken": own.num_broken,
        "num_breaker_openings": own.num_opened,
    }


@cython.final
cdef class Door:
    """Who comes in, who waits for a place, and who is sent away.

    Without rules there are no places: call set_rules first. A request that came in is told of here
    when it is submitted, when it has started, and when it is gone. Times are monotonic
    nanoseconds. Bounds: the caps and the total of the rules, `num_guests_max` guests per class.

    Owner: the event loop.
    """

    cdef DoorState door

    def __cinit__(self, uint32_t num_levels):
        if not 1 <= num_levels <= MAX_LEVELS:
            raise ValueError("1 to 16 levels")
        door_init(&self.door, num_levels)

    def __dealloc__(self):
        free(self.door.guests)

    def set_rules(self, *, caps, int64_t total, demotes, evicts, place_waits_ns,
                  uint32_t num_guests_max, warns, clears, int64_t full, int64_t open_ns,
                  uint32_t num_probes):
        """Set all rules; who is inside or waits for a place keeps its own, so call tend().

        One of `caps`, `demotes`, `evicts` and `place_waits_ns` for each class, the best first;
        one more of `warns` and `clears`, for the total. These and `full` are numbers of waiting
        requests, 0 for never; without `full` all breakers are closed. Raises ValueError.
        """
        cdef DoorState* d = &self.door
        cdef uint32_t i
        if not (len(caps) == len(demotes) == len(evicts) == len(place_waits_ns) == d.num_levels
                and len(warns) == len(clears) == d.num_levels + 1):
            raise ValueError("one of each for every class")
        if (min(total, full, *caps, *place_waits_ns, *warns, *clears) < 0
                or open_ns < 1 or num_probes < 1 or num_guests_max > 1 << 16):
            raise ValueError("bounds and times are not negative, open_ns and num_probes at least 1")
        if not door_make_room(d, num_guests_max):
            raise MemoryError
        for i in range(d.num_levels):
            d.levels[i].cap = caps[i]
            d.levels[i].demotes = demotes[i]
            d.levels[i].evicts = evicts[i]
            d.levels[i].place_wait_ns = place_waits_ns[i]
            d.levels[i].warned.raise_at = warns[i]
            d.levels[i].warned.clear_at = clears[i]
            if full == 0:
                d.levels[i].breaker = BREAKER_CLOSED
        d.warned.raise_at = warns[d.num_levels]
        d.warned.clear_at = clears[d.num_levels]
        d.total = total
        d.full = full
        d.open_ns = open_ns
        d.num_probes = num_probes
        door_ease(d)

    cdef int check_level(self, uint32_t level) except -1:
        if level >= self.door.num_levels:
            raise IndexError("no such level")
        return 0

    # --- how it stands ------------------------------------------------------------------

    def look(self, Scheduler scheduler not None):
        """See what the living device slots have; before anything that depends on it."""
        door_look(&self.door, scheduler.state)

    def see(self, *, int64_t num_sequences, int64_t kv_tokens, int64_t kv_reserved=0):
        """As look(), without a scheduler."""
        self.door.seats.num_sequences = num_sequences
        self.door.seats.kv_tokens = kv_tokens
        self.door.seats.kv_reserved = kv_reserved

    @property
    def num_inside(self):
        """All that came in and are not gone."""
        return self.door.num_pending + self.door.num_running

    @property
    def num_guests(self):
        """Those at the door that were not told yet."""
        cdef uint32_t i, num = 0
        for i in range(self.door.num_levels):
            num += self.door.levels[i].num_here
        return num

    @property
    def due_ns(self):
        """When tend() is due without anything happening; None: never."""
        return None if self.door.due_ns == INT64_MAX else self.door.due_ns

    @property
    def load(self):
        """From 0 to 1: of the KV that runs, or of the queue; the larger one."""
        return door_load(&self.door)

    def figures(self, int64_t now_ns):
        """Everything that it counts, by class and in all."""
        cdef DoorState* d = &self.door
        cdef uint32_t i
        return {
            "levels": [door_figures(&d.levels[i], now_ns) for i in range(d.num_levels)],
            "total": d.total,
            "num_pending": d.num_pending,
            "num_running": d.num_running,
            "num_stuck": num_stuck(d),
            "is_warned": bool(d.warned.is_up),
            "num_asks": d.num_asks,
            "num_guests": self.num_guests,
            "num_guests_max": <uint64_t> d.num_guests_max * d.num_levels,
            "load": self.load,
        }

    def changes(self):
        """What has changed since this was last asked, as a list of (what, class, state).

        ("warning", class or None for the total, whether it is up), ("breaker", class, Breaker)
        """
        cdef DoorState* d = &self.door
        cdef list changes = []
        cdef uint32_t i
        if d.warned.is_up != d.warned.was_told:
            d.warned.was_told = d.warned.is_up
            changes.append(("warning", None, int(d.warned.is_up)))
        for i in range(d.num_levels):
            if d.levels[i].warned.is_up != d.levels[i].warned.was_told:
                d.levels[i].warned.was_told = d.levels[i].warned.is_up
                changes.append(("warning", i, int(d.levels[i].warned.is_up)))
            if d.levels[i].breaker != d.levels[i].told_breaker:
                d.levels[i].told_breaker = d.levels[i].breaker
                changes.append(("breaker", i, d.levels[i].breaker))
        return changes

    def trip(self, num_classes, int64_t now_ns):
        """Open the breakers of so many of the lowest classes, but never of the best."""
        door_trip(&self.door, num_classes, now_ns)

    # --- at the door --------------------------------------------------------------------

    def num_free(self, uint32_t level):
        """Places to wait that are free for a class."""
        cdef DoorLevel* own = &self.door.levels[level]
        self.check_level(level)
        return max(min(own.cap - own.num_pending - own.num_asking,
                       self.door.total - self.door.num_pending), <int64_t> 0)

    def enter(self, uint32_t level, int64_t now_ns, *, int64_t expire_ns=0, uint64_t user=0,
              int64_t num_held=0, bint is_promised=False):
        """One arrives: (DoorSays, its class, its guest or None, when).

        `num_held` places are held for others. One that was promised a place passes a breaker.

        DOOR_IN: it is in, in that class. DOOR_EVICT: ask the scheduler, then answer(). It and
        DOOR_WAIT: tend() tells, at the latest when `at_ns` has come. DOOR_FULL: no. DOOR_BROKEN:
        not before `at_ns`.
        """
        cdef Verdict verdict
        self.check_level(level)
        self.door.num_held = num_held
        self.door.is_promised = is_promised
        door_enter(&self.door, level, now_ns, expire_ns, user, &verdict)
        self.door.num_held = self.door.is_promised = 0
        guest = None if verdict.guest == NOWHERE else verdict.guest
        return verdict.say, verdict.level, guest, verdict.at_ns

    def answer(self, bint was_evicted, int64_t now_ns):
        """The scheduler's answer to the first that asked: (DoorSays, its user, its class).

        DOOR_IN, DOOR_WAIT, DOOR_FULL, or DOOR_NOBODY: it has gone. One that was made to leave
        is settled before.
        """
        cdef Verdict verdict
        verdict.user = verdict.level = 0
        door_answer(&self.door, was_evicted, now_ns, &verdict)
        return verdict.say, verdict.user, verdict.level

    def tend(self, int64_t now_ns):
        """What became of guests meanwhile: a list of (DoorSays, user, class).

        DOOR_IN and DOOR_FULL are the last of a guest. DOOR_EVICT: ask the scheduler, it waits on.
        """
        cdef Verdict verdict
        cdef list told = []
        while door_next(&self.door, now_ns, &verdict):
            told.append((verdict.say, verdict.user, verdict.level))
        return told

    def give_up(self, uint32_t guest):
        """A guest that was not told yet goes away. Raises IndexError if it is none."""
        cdef DoorState* d = &self.door
        if guest >= d.capacity or not d.guests[guest].is_here:
            raise IndexError("no such guest")
        door_give_up(d, guest)

    # --- inside -------------------------------------------------------------------------

    def submit(self, uint32_t level, int64_t footprint_tokens):
        """One that came in is in the scheduler's hands."""
        self.check_level(level)
        door_submit(&self.door, level, footprint_tokens)

    def start(self, uint32_t level):
        """It got a sequence."""
        self.check_level(level)
        door_start(&self.door, level)

    def leave(self, uint32_t level):
        """It is gone before it was submitted."""
        self.check_level(level)
        door_leave(&self.door, level)

    def settle(self, uint32_t level, int64_t footprint_tokens, *, bint has_run):
        """It is gone after that."""
        self.check_level(level)
        door_settle(&self.door, level, footprint_tokens, has_run)
