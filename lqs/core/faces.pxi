# Python's view of the parts on their own, for tests, measuring and small tools.

IS_DEBUG = bool(IS_DEBUG_BUILD)
"""Whether broken invariants end the process (a debug build)."""


@cython.final
cdef class SpscRing:
    """A bounded ring of handles with one producer and one consumer.

    Owner: one thread pushes, one thread pops; the two may differ.
    """

    cdef Ring* ring

    def __cinit__(self, uint64_t capacity):
        if not 1 <= capacity <= 1U << 31:
            raise ValueError("capacity must be between 1 and 2**31")
        self.ring = <Ring*> new_lines(sizeof(Ring))
        if self.ring == NULL or ring_init(self.ring, capacity):
            raise MemoryError

    def __dealloc__(self):
        if self.ring != NULL:
            ring_free(self.ring)
            free(self.ring)

    def __len__(self):
        return ring_size(self.ring)

    @property
    def capacity(self):
        """Exactly as many as asked for."""
        return self.ring.capacity

    def try_push(self, uint64_t handle):
        """Push one; False: full."""
        return ring_try_push(self.ring, handle)

    def try_pop(self):
        """Pop one; None: empty."""
        cdef uint64_t handle
        return handle if ring_try_pop(self.ring, &handle) else None

    def push_batch(self, list handles not None):
        """Push from the front of the list what fits; how many that was."""
        cdef uint64_t[64] cells
        cdef Py_ssize_t done = 0, n, i
        cdef uint64_t pushed
        while done < len(handles):
            n = min(<Py_ssize_t> 64, len(handles) - done)
            for i in range(n):
                cells[i] = handles[done + i]
            pushed = ring_push_batch(self.ring, cells, n)
            done += pushed
            if pushed < <uint64_t> n:
                break
        return done

    def pop_batch(self, uint64_t num_max):
        """Pop up to `num_max`, oldest first."""
        cdef uint64_t[64] cells
        cdef uint64_t n = 1, i
        cdef list handles = []
        while num_max and n:
            n = ring_pop_batch(self.ring, cells, min(<uint64_t> 64, num_max))
            num_max -= n
            for i in range(n):
                handles.append(cells[i])
        return handles


@cython.final
cdef class MpmcRing:
    """A bounded ring of handles for any number of threads on both sides."""

    cdef MpmcState* ring

    def __cinit__(self, uint64_t capacity):
        if not 1 <= capacity <= 1U << 31:
            raise ValueError("capacity must be between 1 and 2**31")
        self.ring = <MpmcState*> new_lines(sizeof(MpmcState))
        if self.ring == NULL or mpmc_init(self.ring, capacity):
            raise MemoryError

    def __dealloc__(self):
        if self.ring != NULL:
            free(self.ring.places)
            free(self.ring)

    def __len__(self):
        return mpmc_size(self.ring)

    @property
    def capacity(self):
        """What was asked for, rounded up to a power of two, at least 2."""
        return self.ring.capacity

    def try_push(self, uint64_t handle):
        """Push one; False: full."""
        return mpmc_try_push(self.ring, handle)

    def try_pop(self):
        """Pop one; None: empty."""
        cdef uint64_t handle
        return handle if mpmc_try_pop(self.ring, &handle) else None


# The weights of lanes and keys, for whoever owns a backlog.
cdef int set_weights(BacklogState* b, object lane_weights, object key_weights) except -1:
    cdef uint32_t i
    cdef double weight
    if len(lane_weights) != b.num_lanes or len(key_weights) != b.num_keys:
        raise ValueError("one weight for each lane and for each key")
    b.lane_weight_sum = 0
    for i in range(b.num_lanes):
        weight = lane_weights[i]
        if not 0 < weight <= 1e6:
            raise ValueError("a lane's weight must be above 0 and at most 1e6")
        b.lane_weights[i] = weight
        b.lane_weight_sum += weight
    for i in range(b.num_keys):
        b.key_units[i] = key_units_of(key_weights[i])
    return 0


cdef uint64_t key_units_of(double weight) except 0:
    # The upper end keeps a unit above 0, the lower one keeps counters below 2**63.
    if not 1e-3 <= weight <= 1e4:
        raise ValueError("a key's weight must be between 0.001 and 10000")
    return <uint64_t> (TOKEN_UNIT / weight + 0.5)


# The same of one key, for the queues of all models, while a scheduler reads it. Relaxed: the word says all, and
# which charge is the first with it is nobody's concern. The queues are there for good once they are seen here:
# who adds one has the GIL, as has the caller.
cdef int set_key_units(Books* books, uint32_t key, uint64_t units) except -1:
    cdef uint32_t model
    if key >= books.backlog.num_keys:
        raise IndexError("no such key")
    for model in range(books.num_models):
        if books.models[model] != NULL:
            store_relaxed(&books.models[model].backlog.key_units[key], units)
    return 0


# The caps of lanes, in sequences and in KV tokens; 0: none.
cdef int set_caps(BacklogState* b, object lane_caps, object lane_token_caps) except -1:
    cdef uint32_t i
    if len(lane_caps) != b.num_lanes or len(lane_token_caps) != b.num_lanes:
        raise ValueError("one cap of either kind for each lane")
    for i in range(b.num_lanes):
        b.lane_caps[i] = lane_caps[i]
        b.lane_token_caps[i] = lane_token_caps[i]
    return 0


cdef int check_shape(Py_ssize_t num_lanes, Py_ssize_t num_levels, Py_ssize_t num_keys,
                     int64_t aging_step_ns, int64_t aged_every) except -1:
    if not (1 <= num_lanes <= MAX_LANES and 1 <= num_levels <= MAX_LEVELS
            and 1 <= num_keys <= 1 << 20):
        raise ValueError("1 to 4 lanes, 1 to 16 levels, 1 to 2**20 keys")
    if not (0 <= aging_step_ns <= 1LL << 58 and 1 <= aged_every <= 1 << 30):
        raise ValueError("aging_step_ns must not be negative, aged_every at least 1")
    return 0


@cython.final
cdef class Backlog:
    """The multi-level heap alone, over a table of its own.

    Owner: one thread.
    """

    cdef BacklogState backlog
    cdef Entry* table
    cdef uint32_t capacity
    cdef uint64_t num_arrived

    def __cinit__(self, *, num_lanes=1, num_levels=8, num_keys=1, uint32_t capacity,
                  int64_t aging_step_ns=0, aged_every=4, key_weights=None, lane_weights=None,
                  lane_caps=None, lane_token_caps=None, uint64_t num_places=0, uint64_t num_tokens=0):
        check_shape(num_lanes, num_levels, num_keys, aging_step_ns, aged_every)
        if not 1 <= capacity < NOWHERE:
            raise ValueError("capacity must be between 1 and 2**32 - 2")
        self.table = <Entry*> new_lines(capacity * sizeof(Entry))
        if self.table == NULL or backlog_init(&self.backlog, self.table, capacity, num_lanes,
                                              num_levels, num_keys, NULL):
            raise MemoryError
        self.capacity = capacity
        self.backlog.aging_step_ns = aging_step_ns
        self.backlog.aged_every = self.backlog.since_aged = aged_every
        self.backlog.num_places = num_places
        self.backlog.num_tokens = num_tokens
        set_weights(&self.backlog, lane_weights or [1] * num_lanes, key_weights or [1] * num_keys)
        set_caps(&self.backlog, lane_caps or [0] * num_lanes, lane_token_caps or [0] * num_lanes)

    def __dealloc__(self):
        backlog_free(&self.backlog)
        free(self.table)

    def __len__(self):
        return self.backlog.num_waiting

    cdef Entry* entry(self, uint32_t index, uint32_t state) except NULL:
        if index >= self.capacity or self.table[index].state != state:
            raise ValueError("no such entry in this state")
        return &self.table[index]

    def push(self, uint32_t index, *, uint8_t lane=0, uint8_t level=0, uint32_t key=0,
             int64_t arrival_ns=0, int64_t deadline_ns=0, uint32_t cost=0,
             uint32_t footprint_tokens=0):
        """Let a free entry wait; arrivals are numbered in the order of these calls."""
        cdef Entry* entry = self.entry(index, FREE)
        if (lane >= self.backlog.num_lanes or level >= self.backlog.num_levels
                or key >= self.backlog.num_keys):
            raise ValueError("no such lane, level or key")
        entry.lane = lane
        entry.level = level
        entry.key = key
        entry.arrival_ns = arrival_ns
        entry.arrival_no = self.num_arrived
        entry.deadline_ns = deadline_ns
        entry.num_prompt_tokens = cost
        entry.share_tokens = footprint_tokens
        entry.state = WAITING
        self.num_arrived += 1
        backlog_push(&self.backlog, index)

    def peek(self):
        """Who is next, as (index, whether it is because it is due), or None."""
        cdef Choice choice = backlog_choose(&self.backlog, ALL_LANES)
        return None if choice.index == NOWHERE else (choice.index, bool(choice.is_aged))

    def pop(self):
        """Start who is next: its index, or None."""
        cdef Choice choice = backlog_choose(&self.backlog, ALL_LANES)
        if choice.index == NOWHERE:
            return None
        backlog_take(&self.backlog, choice)
        self.table[choice.index].state = RUNNING
        return choice.index

    def remove(self, uint32_t index):
        """Take out one that waits; False: it does not."""
        if index >= self.capacity or self.table[index].state != WAITING:
            return False
        backlog_remove(&self.backlog, index)
        self.table[index].state = FREE
        return True

    def settle(self, uint32_t index, uint32_t cost):
        """End one that runs: its key pays `cost` instead of what it was charged."""
        cdef Entry* entry = self.entry(index, RUNNING)
        entry.state = FREE
        backlog_settle(&self.backlog, entry, cost, self.backlog.key_units[entry.key])

    def counter(self, uint8_t lane, uint8_t level, uint32_t key):
        """A key's virtual tokens in one level, in units of 2**-16."""
        if (lane >= self.backlog.num_lanes or level >= self.backlog.num_levels
                or key >= self.backlog.num_keys):
            raise ValueError("no such lane, level or key")
        return level_of(&self.backlog, lane, level).queues[key].counter

    def cycle(self, uint64_t n, int64_t spread_ns=0):
        """Pop and push again n times, natively; for measuring.

        With a spread each comes back with a deadline drawn from it, so the heap's order
        is exercised; without one it comes back last.
        """
        cdef Choice choice
        cdef Entry* entry
        cdef uint64_t units, draw = 88172645463325252ULL
        with nogil:
            for _ in range(n):
                choice = backlog_choose(&self.backlog, ALL_LANES)
                if choice.index == NOWHERE:
                    break
                units = backlog_take(&self.backlog, choice)
                entry = &self.table[choice.index]
                backlog_settle(&self.backlog, entry, cost_of(entry), units)
                entry.arrival_no = self.num_arrived
                entry.arrival_ns = self.num_arrived
                self.num_arrived += 1
                if spread_ns:
                    draw ^= draw << 13
                    draw ^= draw >> 7
                    draw ^= draw << 17
                    entry.deadline_ns += 1 + draw % <uint64_t> spread_ns
                backlog_push(&self.backlog, choice.index)


class LedgerBroken(Exception):
    """More was given back than is held: a bug of the caller."""


@cython.final
cdef class Ledger:
    """The token ledger alone.

    Owner: one thread writes; figures may be read from any.
    """

    cdef LedgerState ledger

    def __cinit__(self, *, list capacities not None, list num_sequences not None,
                  uint32_t num_keys=1):
        cdef uint32_t i
        if not capacities or len(capacities) != len(num_sequences) or num_keys == 0:
            raise ValueError("one capacity and one number of sequences per device slot")
        if ledger_init(&self.ledger, len(capacities), num_keys):
            raise MemoryError
        for i in range(self.ledger.num_slots):
            self.ledger.slots[i].capacity = self.ledger.slots[i].ceiling = capacities[i]
            self.ledger.slots[i].num_sequences = num_sequences[i]

    def __dealloc__(self):
        ledger_free(&self.ledger)

    cdef int check(self, uint32_t slot, uint32_t key) except -1:
        if slot >= self.ledger.num_slots or key >= self.ledger.num_keys:
            raise IndexError("no such device slot or key")
        return 0

    def reserve(self, uint32_t slot, uint32_t key, uint32_t tokens):
        """Promise tokens and a sequence; False: not now."""
        self.check(slot, key)
        return ledger_reserve(&self.ledger, slot, key, tokens) == LEDGER_OK

    def grow(self, uint32_t slot, uint32_t key, uint32_t tokens):
        """Promise more tokens; False: not now."""
        self.check(slot, key)
        return ledger_grow(&self.ledger, slot, key, tokens) == LEDGER_OK

    def use(self, uint32_t slot, uint32_t tokens):
        """Note that promised tokens are filled. Raises LedgerBroken."""
        self.check(slot, 0)
        if ledger_use(&self.ledger, slot, tokens):
            raise LedgerBroken

    def shrink(self, uint32_t slot, uint32_t key, uint32_t reserved, uint32_t used):
        """Give part of a promise back and keep the sequence. Raises LedgerBroken."""
        self.check(slot, key)
        if ledger_shrink(&self.ledger, slot, key, reserved, used):
            raise LedgerBroken

    def release(self, uint32_t slot, uint32_t key, uint32_t reserved, uint32_t used):
        """Give a promise back, and its sequence. Raises LedgerBroken."""
        self.check(slot, key)
        if ledger_release(&self.ledger, slot, key, reserved, used):
            raise LedgerBroken

    def settle(self, uint32_t slot, uint32_t key, uint32_t reserved, uint32_t used,
               uint32_t prompt_tokens, uint32_t completion_tokens):
        """Release, and book what was computed. Raises LedgerBroken."""
        self.check(slot, key)
        if ledger_settle(&self.ledger, slot, key, reserved, used, prompt_tokens,
                         completion_tokens):
            raise LedgerBroken

    def slot(self, uint32_t slot):
        """The figures of a device slot."""
        self.check(slot, 0)
        return slot_figures(&self.ledger.slots[slot])

    def key(self, uint32_t key):
        """The figures of a key."""
        self.check(0, key)
        return key_figures(&self.ledger.keys[key])

    def cycle(self, uint64_t n):
        """Reserve, grow and settle n times on device slot 0, natively; for measuring."""
        with nogil:
            for _ in range(n):
                if ledger_reserve(&self.ledger, 0, 0, 512) == LEDGER_OK:
                    ledger_grow(&self.ledger, 0, 0, 16)
                    ledger_settle(&self.ledger, 0, 0, 528, 0, 256, 64)


cdef dict slot_figures(SlotAccount* account):
    return {
        "capacity": load_relaxed(&account.capacity),
        "reserved": load_relaxed(&account.reserved),
        "used": load_relaxed(&account.used),
        "num_sequences": load_relaxed(&account.num_sequences),
        "num_running": load_relaxed(&account.num_running),
    }


cdef dict key_figures(KeyAccount* account):
    return {
        "reserved": load_relaxed(&account.reserved),
        "prompt_tokens": load_relaxed(&account.prompt_tokens),
        "completion_tokens": load_relaxed(&account.completion_tokens),
    }
