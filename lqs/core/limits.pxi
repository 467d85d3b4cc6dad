# Limiters: who may pass now, and how long the others have to wait.
#
# A request charges several limiters at once, all or none. It is charged by the most it can
# cost when it comes, and settled by what it did cost when it ends. The rule for settling:
#
#     A limiter always stands as if every request that is settled had cost, from the moment it
#     came, what it did cost in the end; and every other one the most that it can cost.
#
# So what is given back is worth something only where time has not given it back already, a
# bucket is never fuller and a window never emptier than the real costs make them, and the
# order in which requests are settled does not matter. What a request cost beyond its charge
# is charged when it is known, whether there is room for it or not: a debt.
#
# The kinds:
#
#     token bucket     full at the start; `capacity` at once, then `amount` per period
#     leaky bucket     a line of `capacity` that moves on by `amount` per period; who finds
#                      room in it is told how long it is to its turn
#     fixed window     `capacity` in each period of the clock; twice that may pass around the
#                      border between two
#     sliding window   `capacity` in any period, wherever it begins
#     parallel         `capacity` at once; whoever ends makes room
#
# Arithmetic. A bucket is the time at which it will be empty again, `level`, in units of
# 1/amount ns: a nanosecond is `amount` units, one of what it counts is `period_ns` units. Both
# are whole numbers, so nothing is ever rounded and nothing drifts, in years no more than in
# seconds. Costs, capacities and rates are at most 2**40, times below 2**63 and periods at most
# 2**54, and a bucket fills up within 2**60 ns. So a time in a bucket's units is below 2**103,
# what is used of it at most 2**101 with all debts, and a level below 2**104: far from the 2**127
# of a wide. What a window counts would need 2**22 debts of the largest cost to reach 2**63.
#
# Time is what the caller says, added up while it grows: a clock that steps back stands still
# here until it moves again, and nothing has to be mended. That sum reaches 2**63 ns in 292
# years. No clock is read.
#
# Owner: one thread.

cdef extern from "_wide.h" nogil:
    ctypedef long long wide_t "lqs_wide"
    wide_t wide_product(int64_t a, int64_t b)
    int64_t wide_quotient_up(wide_t a, int64_t b)

cpdef enum LimitKind:
    TOKEN_BUCKET = 0
    LEAKY_BUCKET = 1
    FIXED_WINDOW = 2
    SLIDING_WINDOW = 3
    PARALLEL = 4

cpdef enum LimitSays:
    PASSED = 0      # charged; with leaky buckets, at its turn
    REFUSED = 1     # nothing was charged: not now
    NEVER = 2       # nothing was charged: it costs more than the limiter ever has

cdef enum:
    NUM_UNITS = 4           # what limiters may count; the caller gives them their meaning
    NUM_TOUCHED_MAX = 32    # limiters of one charge
    NUM_MARKS = 64          # moments that a limiter tells apart; a bucket gets more when it needs them
    NUM_MARKS_MAX = 4096
    WAIT_NEVER = -1
    WAIT_UNKNOWN = -2       # until somebody ends

cdef int64_t COST_MAX = 1LL << 40
cdef int64_t LIMIT_PERIOD_NS_MAX = 1LL << 54
# What a bucket takes to fill up, at most.
cdef int64_t FILL_MAX_NS = 1LL << 60
# Debts are bounded too: by more than any limiter holds.
cdef int64_t DEBT_MAX_NS = 1LL << 61

# A moment at which a limiter was charged.
#
# Of a bucket: giving back what was charged before `stamp` moves the level by at most `slack`
# beyond this moment; more would have made the bucket full by then. Marks stand in order, both
# numbers growing: one that a later, smaller slack hides is dropped.
#
# Of a sliding window: `amount` was charged up to `at_ns`, `stamp` being the last of it.
cdef struct Mark:
    wide_t slack
    uint64_t stamp
    int64_t at_ns
    int64_t amount

cdef struct Limiter:
    wide_t level            # of a bucket: when it is empty again, in units of 1/amount ns
    int64_t capacity
    int64_t amount
    int64_t period_ns
    int64_t used            # of the others: what counts now
    int64_t window          # of a fixed window: its number
    int64_t charged_ns      # when it was charged last
    uint64_t gone           # of a sliding window: the last charge that has left it
    Mark* marks
    uint32_t num_marks
    uint32_t marks_capacity
    uint32_t generation     # how many limiters have stood at this index
    uint8_t kind
    uint8_t unit            # which of a request's costs it counts
    uint8_t is_clamped      # a cost above the capacity is taken as the capacity
    uint8_t is_live

# What one request was charged by one limiter.
cdef struct ChargeItem:
    int64_t amount
    uint64_t stamp          # its number; of a fixed window the window's
    uint32_t limiter
    uint32_t generation

cdef struct ChargeState:
    ChargeItem* items
    uint32_t num
    uint32_t capacity
    # What the last attempt came to.
    uint32_t binding        # which of the limiters given decided
    int64_t wait_ns         # refused: until it could pass; passed: until its turn

cdef struct LimitsState:
    Limiter* limiters
    uint32_t num            # numbers that were ever given
    uint32_t num_live
    uint32_t capacity
    uint64_t num_charges
    int64_t seen_ns         # what the caller said last
    int64_t now_ns          # the sum of all steps forward
    bint has_begun


# --- time and buckets -------------------------------------------------------------------

cdef int64_t limits_advance(LimitsState* s, int64_t now_ns) noexcept nogil:
    if not s.has_begun:
        s.has_begun = True
        s.now_ns = max(now_ns, <int64_t> 0)
    elif now_ns > s.seen_ns:
        s.now_ns += now_ns - s.seen_ns
    s.seen_ns = now_ns
    return s.now_ns


cdef inline bint is_bucket(const Limiter* limiter) noexcept nogil:
    return limiter.kind <= LEAKY_BUCKET


# What a bucket misses until it is full, in its units.
cdef inline wide_t bucket_used(const Limiter* limiter, int64_t now_ns) noexcept nogil:
    cdef wide_t used = limiter.level - wide_product(now_ns, limiter.amount)
    return used if used > 0 else 0


cdef inline void drop_mark(Limiter* limiter, uint32_t index) noexcept nogil:
    limiter.num_marks -= 1
    memmove(&limiter.marks[index], &limiter.marks[index + 1],
            (limiter.num_marks - index) * sizeof(Mark))


cdef bint more_marks(Limiter* limiter) noexcept nogil:
    cdef Mark* grown
    if limiter.marks_capacity >= NUM_MARKS_MAX:
        return False
    grown = <Mark*> realloc(limiter.marks, 2 * limiter.marks_capacity * sizeof(Mark))
    if grown == NULL:
        return False
    limiter.marks = grown
    limiter.marks_capacity *= 2
    return True


cdef void bucket_mark(Limiter* limiter, wide_t slack, uint64_t stamp) noexcept nogil:
    cdef uint32_t n = limiter.num_marks
    while n and limiter.marks[n - 1].slack >= slack:
        n -= 1
    if n == limiter.marks_capacity and not more_marks(limiter):
        # The newest stands for two moments, with the smaller slack of them: that is too little
        # for what came in between, never too much.
        n -= 1
        slack = limiter.marks[n].slack
    limiter.marks[n].slack = slack
    limiter.marks[n].stamp = stamp
    limiter.num_marks = n + 1


cdef void bucket_charge(Limiter* limiter, int64_t cost, int64_t now_ns,
                        uint64_t stamp) noexcept nogil:
    cdef wide_t used = bucket_used(limiter, now_ns)
    cdef wide_t used_max = wide_product(DEBT_MAX_NS, limiter.amount)
    if limiter.kind == LEAKY_BUCKET:
        # Whoever stands behind has been told its turn: nothing moves up past it.
        bucket_mark(limiter, 0, stamp)
    elif limiter.num_marks == 0 or now_ns != limiter.charged_ns:
        bucket_mark(limiter, used, stamp)
    limiter.charged_ns = now_ns
    used += wide_product(cost, limiter.period_ns)
    limiter.level = wide_product(now_ns, limiter.amount) + min(used, used_max)


# The first mark after a charge, by halving: stamps grow.
cdef uint32_t mark_after(const Limiter* limiter, uint64_t stamp) noexcept nogil:
    cdef uint32_t low = 0, high = limiter.num_marks, middle
    while low < high:
        middle = (low + high) // 2
        if limiter.marks[middle].stamp <= stamp:
            low = middle + 1
        else:
            high = middle
    return low


cdef void bucket_give_back(Limiter* limiter, int64_t amount, int64_t now_ns,
                           uint64_t stamp) noexcept nogil:
    cdef wide_t back = min(wide_product(amount, limiter.period_ns), bucket_used(limiter, now_ns))
    cdef uint32_t first = mark_after(limiter, stamp), i
    if first < limiter.num_marks:
        back = min(back, limiter.marks[first].slack)
    limiter.level -= back
    for i in range(first, limiter.num_marks):
        limiter.marks[i].slack -= back
    while 0 < first < limiter.num_marks and limiter.marks[first - 1].slack >= limiter.marks[first].slack:
        first -= 1
        drop_mark(limiter, first)


# --- windows ----------------------------------------------------------------------------

cdef void window_roll(Limiter* limiter, int64_t now_ns) noexcept nogil:
    cdef int64_t window
    cdef uint32_t gone = 0
    if limiter.kind == FIXED_WINDOW:
        window = now_ns // limiter.period_ns
        if window != limiter.window:
            limiter.window = window
            limiter.used = 0
    elif limiter.kind == SLIDING_WINDOW:
        while gone < limiter.num_marks and limiter.marks[gone].at_ns <= now_ns - limiter.period_ns:
            limiter.used -= limiter.marks[gone].amount
            limiter.gone = limiter.marks[gone].stamp
            gone += 1
        if gone:
            limiter.num_marks -= gone
            memmove(limiter.marks, &limiter.marks[gone], limiter.num_marks * sizeof(Mark))


# Put together what was charged within the same part of the period. It then leaves with the
# last of it, so up to a 31st of a period late; at most 32 of 64 marks are left.
cdef void window_compact(Limiter* limiter) noexcept nogil:
    cdef int64_t part_ns = max(limiter.period_ns // (NUM_MARKS // 2 - 1), <int64_t> 1)
    cdef Mark* marks = limiter.marks
    cdef uint32_t kept = 0, i
    for i in range(1, limiter.num_marks):
        if marks[i].at_ns // part_ns == marks[kept].at_ns // part_ns:
            marks[i].amount += marks[kept].amount
        else:
            kept += 1
        marks[kept] = marks[i]
    limiter.num_marks = kept + 1


cdef void window_charge(Limiter* limiter, int64_t cost, int64_t now_ns,
                        uint64_t stamp) noexcept nogil:
    cdef Mark* mark
    window_roll(limiter, now_ns)
    limiter.used += cost
    if limiter.kind != SLIDING_WINDOW:
        return
    if limiter.num_marks == 0 or limiter.charged_ns != now_ns:
        if limiter.num_marks == NUM_MARKS:
            window_compact(limiter)
        limiter.num_marks += 1
        mark = &limiter.marks[limiter.num_marks - 1]
        mark.at_ns = limiter.charged_ns = now_ns
        mark.amount = 0
    mark = &limiter.marks[limiter.num_marks - 1]
    mark.amount += cost
    mark.stamp = stamp


cdef void window_give_back(Limiter* limiter, int64_t amount, int64_t now_ns,
                           uint64_t stamp) noexcept nogil:
    cdef uint32_t i
    window_roll(limiter, now_ns)
    if limiter.kind == FIXED_WINDOW:
        if stamp == <uint64_t> limiter.window:
            limiter.used -= amount
    elif limiter.kind == PARALLEL:
        limiter.used -= amount
    elif stamp > limiter.gone:
        i = mark_after(limiter, stamp - 1)
        limiter.marks[i].amount -= amount
        limiter.used -= amount


# When a sliding window will have room: when enough of the oldest has left it.
cdef int64_t window_wait(const Limiter* limiter, int64_t cost, int64_t now_ns) noexcept nogil:
    cdef int64_t missing = limiter.used + cost - limiter.capacity
    cdef uint32_t i = 0
    while missing > limiter.marks[i].amount:
        missing -= limiter.marks[i].amount
        i += 1
    return limiter.marks[i].at_ns + limiter.period_ns - now_ns


# --- one limiter ------------------------------------------------------------------------

cdef inline int64_t limiter_cost(const Limiter* limiter, const int64_t* costs) noexcept nogil:
    cdef int64_t cost = costs[limiter.unit]
    return min(cost, limiter.capacity) if limiter.is_clamped else cost


# Nanoseconds until `cost` could pass if nothing else came: 0 for now, WAIT_NEVER, WAIT_UNKNOWN.
cdef int64_t limiter_wait(Limiter* limiter, int64_t cost, int64_t now_ns) noexcept nogil:
    cdef wide_t excess
    if cost > limiter.capacity:
        return WAIT_NEVER
    if is_bucket(limiter):
        excess = bucket_used(limiter, now_ns) - wide_product(limiter.capacity - cost, limiter.period_ns)
        return wide_quotient_up(excess, limiter.amount) if excess > 0 else 0
    window_roll(limiter, now_ns)
    if limiter.used + cost <= limiter.capacity:
        return 0
    if limiter.kind == FIXED_WINDOW:
        return (limiter.window + 1) * limiter.period_ns - now_ns
    return window_wait(limiter, cost, now_ns) if limiter.kind == SLIDING_WINDOW else WAIT_UNKNOWN


# Charge without a question; how long it is until its turn.
cdef int64_t limiter_charge(Limiter* limiter, int64_t cost, int64_t now_ns,
                            uint64_t stamp) noexcept nogil:
    cdef int64_t turn_ns = 0
    if limiter.kind == LEAKY_BUCKET:
        turn_ns = wide_quotient_up(bucket_used(limiter, now_ns), limiter.amount)
    if is_bucket(limiter):
        bucket_charge(limiter, cost, now_ns, stamp)
    else:
        window_charge(limiter, cost, now_ns, stamp)
    return turn_ns


cdef inline void limiter_give_back(Limiter* limiter, int64_t amount, int64_t now_ns,
                                   uint64_t stamp) noexcept nogil:
    if is_bucket(limiter):
        bucket_give_back(limiter, amount, now_ns, stamp)
    else:
        window_give_back(limiter, amount, now_ns, stamp)


# What could be charged now, at most.
cdef int64_t limiter_remaining(Limiter* limiter, int64_t now_ns) noexcept nogil:
    cdef int64_t used
    if is_bucket(limiter):
        used = wide_quotient_up(bucket_used(limiter, now_ns), limiter.period_ns)
    else:
        window_roll(limiter, now_ns)
        used = limiter.used
    return max(limiter.capacity - used, <int64_t> 0)


# Until it stands as at the start, if nothing else comes; of `parallel` that is not known: 0.
cdef int64_t limiter_reset_ns(Limiter* limiter, int64_t now_ns) noexcept nogil:
    cdef uint32_t last = limiter.num_marks - 1
    if is_bucket(limiter):
        return wide_quotient_up(bucket_used(limiter, now_ns), limiter.amount)
    window_roll(limiter, now_ns)
    if limiter.used == 0 or limiter.kind == PARALLEL:
        return 0
    if limiter.kind == FIXED_WINDOW:
        return (limiter.window + 1) * limiter.period_ns - now_ns
    while limiter.marks[last].amount == 0:
        last -= 1
    return limiter.marks[last].at_ns + limiter.period_ns - now_ns


# --- several at once --------------------------------------------------------------------

# Whether all of them let `costs` pass. The one that binds is the one with the longest wait; one
# that never lets it pass goes before all.
cdef int limits_ask(LimitsState* s, ChargeState* charge, const uint32_t* limiters, uint32_t num,
                    const int64_t* costs, int64_t now_ns) noexcept nogil:
    cdef uint32_t i
    cdef int64_t wait_ns
    cdef Limiter* limiter
    cdef int verdict = PASSED
    charge.wait_ns = 0
    for i in range(num):
        limiter = &s.limiters[limiters[i]]
        wait_ns = limiter_wait(limiter, limiter_cost(limiter, costs), now_ns)
        if wait_ns == 0:
            continue
        if wait_ns == WAIT_NEVER:
            charge.binding = limiters[i]
            return NEVER
        if verdict == PASSED or wait_ns > charge.wait_ns:
            charge.wait_ns = wait_ns
            charge.binding = limiters[i]
        verdict = REFUSED
    return verdict


# Ask all `num` limiters, and if all agree charge the first `num_charged` of them.
cdef int limits_reserve(LimitsState* s, ChargeState* charge, const uint32_t* limiters,
                        uint32_t num, uint32_t num_charged, const int64_t* costs,
                        int64_t caller_ns) noexcept nogil:
    cdef int64_t now_ns = limits_advance(s, caller_ns)
    cdef int verdict = limits_ask(s, charge, limiters, num, costs, now_ns)
    cdef uint32_t i
    cdef int64_t turn_ns
    cdef Limiter* limiter
    cdef ChargeItem* item
    if verdict != PASSED:
        return verdict
    for i in range(num_charged):
        limiter = &s.limiters[limiters[i]]
        s.num_charges += 1
        item = &charge.items[charge.num]
        charge.num += 1
        item.limiter = limiters[i]
        item.generation = limiter.generation
        item.amount = limiter_cost(limiter, costs)
        turn_ns = limiter_charge(limiter, item.amount, now_ns, s.num_charges)
        item.stamp = s.num_charges if limiter.kind != FIXED_WINDOW else <uint64_t> limiter.window
        if turn_ns > charge.wait_ns:
            charge.wait_ns = turn_ns
            charge.binding = limiters[i]
    return PASSED


# Whether the limiter that an item was charged by has been removed, or another stands in its place.
cdef inline bint is_gone(const LimitsState* s, const ChargeItem* item) noexcept nogil:
    cdef const Limiter* limiter = &s.limiters[item.limiter]
    return not limiter.is_live or limiter.generation != item.generation


# End a charge: every limiter it touched counts `costs` instead. Limiters that are gone meanwhile
# are left alone. May be repeated: the second time there is nothing to end.
cdef void limits_settle(LimitsState* s, ChargeState* charge, const int64_t* costs,
                        int64_t caller_ns) noexcept nogil:
    cdef int64_t now_ns = limits_advance(s, caller_ns)
    cdef int64_t excess
    cdef uint32_t i
    cdef Limiter* limiter
    cdef ChargeItem* item
    for i in range(charge.num):
        item = &charge.items[i]
        if is_gone(s, item):
            continue
        limiter = &s.limiters[item.limiter]
        excess = costs[limiter.unit] - item.amount
        if excess > 0:
            s.num_charges += 1
            limiter_charge(limiter, excess, now_ns, s.num_charges)
        elif excess < 0:
            limiter_give_back(limiter, -excess, now_ns, item.stamp)
    charge.num = 0


# Forget what limiters were charged that are gone: nothing of it will ever be settled.
cdef void charge_forget_gone(const LimitsState* s, ChargeState* charge) noexcept nogil:
    cdef uint32_t i, num = 0
    for i in range(charge.num):
        if not is_gone(s, &charge.items[i]):
            charge.items[num] = charge.items[i]
            num += 1
    charge.num = num


# --- making and ending limiters ---------------------------------------------------------

# A limiter, unused, its shape checked before: its number, or NOWHERE when there is no memory.
cdef uint32_t limits_add(LimitsState* s, const Limiter* shape) noexcept nogil:
    cdef uint32_t index = 0 if s.num_live < s.num else s.num
    cdef uint32_t capacity
    cdef Limiter* grown
    cdef Limiter kept
    while index < s.num and s.limiters[index].is_live:
        index += 1
    if index == s.capacity:
        capacity = 2 * s.capacity if s.capacity else 16
        grown = <Limiter*> realloc(s.limiters, capacity * sizeof(Limiter))
        if grown == NULL:
            return NOWHERE
        memset(&grown[s.capacity], 0, (capacity - s.capacity) * sizeof(Limiter))
        s.limiters = grown
        s.capacity = capacity
    if s.limiters[index].marks == NULL:
        s.limiters[index].marks = <Mark*> calloc(NUM_MARKS, sizeof(Mark))
        if s.limiters[index].marks == NULL:
            return NOWHERE
        s.limiters[index].marks_capacity = NUM_MARKS
    kept = s.limiters[index]
    s.limiters[index] = shape[0]
    s.limiters[index].marks = kept.marks
    s.limiters[index].marks_capacity = kept.marks_capacity
    s.limiters[index].generation = kept.generation
    s.limiters[index].is_live = True
    s.num = max(s.num, index + 1)
    s.num_live += 1
    return index


cdef void limits_remove(LimitsState* s, uint32_t index) noexcept nogil:
    s.limiters[index].is_live = False
    s.limiters[index].generation += 1
    s.num_live -= 1


cdef void limits_free(LimitsState* s) noexcept nogil:
    cdef uint32_t i
    for i in range(s.capacity):
        free(s.limiters[i].marks)
    free(s.limiters)
    s.limiters = NULL
    s.num = s.capacity = 0


# --- Python's view ----------------------------------------------------------------------

# One is made for each request; with a list of free ones and room for a few items inside, that
# takes half the time.
@cython.freelist(64)
@cython.final
cdef class Charge:
    """What one request was charged. Whoever drops it without settling it leaves its cost in the
    limiters. `plan` is the caller's own.

    Owner: the thread of its Limits.
    """

    cdef ChargeState charge
    cdef ChargeItem[6] few
    # When its turn is, on the caller's clock: leaky buckets let nobody pass before.
    cdef readonly int64_t turn_ns
    cdef public object plan

    def __cinit__(self, plan=None):
        self.charge.items = self.few
        self.charge.capacity = 6
        self.plan = plan

    def __dealloc__(self):
        if self.charge.items != self.few:
            free(self.charge.items)

    cdef int make_room(self, uint32_t num) except -1:
        cdef ChargeItem* grown
        if num > self.charge.capacity:
            grown = <ChargeItem*> malloc(NUM_TOUCHED_MAX * sizeof(ChargeItem))
            if grown == NULL:
                raise MemoryError
            memcpy(grown, self.few, self.charge.num * sizeof(ChargeItem))
            self.charge.items = grown
            self.charge.capacity = NUM_TOUCHED_MAX
        return 0

    def __len__(self):
        return self.charge.num

    @property
    def binding(self):
        """The limiter that decided last."""
        return self.charge.binding

    @property
    def wait_ns(self):
        """Refused: until it could pass if nothing else came, -2 for not known. Passed: until
        its turn."""
        return self.charge.wait_ns


@cython.final
cdef class Limits:
    """Limiters by number, and the requests that charge them.

    A request has one cost for each of four units, and a limiter counts one unit. Times are the
    caller's, in nanoseconds.

    Owner: one thread.
    """

    cdef LimitsState limits

    def __dealloc__(self):
        limits_free(&self.limits)

    def __len__(self):
        return self.limits.num_live

    cdef Limiter* limiter(self, uint32_t index) except NULL:
        if index >= self.limits.num or not self.limits.limiters[index].is_live:
            raise IndexError("no such limiter")
        return &self.limits.limiters[index]

    def add(self, int kind, *, int64_t capacity, int64_t amount=1, int64_t period_ns=1, uint8_t unit=0,
            bint is_clamped=False):
        """Make a limiter, unused; its number.

        `amount` per `period_ns` is its rate, which a window and `parallel` do not have: they
        know only capacity, and a window its period. `is_clamped`: a cost above the capacity is
        taken as the capacity, for costs that are only guessed.
        """
        cdef uint32_t index
        cdef Limiter shape
        if not 0 <= kind <= PARALLEL or unit >= NUM_UNITS:
            raise ValueError("no such kind or unit")
        if not (1 <= capacity <= COST_MAX and 1 <= amount <= COST_MAX
                and 1 <= period_ns <= LIMIT_PERIOD_NS_MAX):
            raise ValueError("capacity and amount must be 1 to 2**40, period_ns 1 to 2**54")
        if kind <= LEAKY_BUCKET and wide_product(capacity, period_ns) > wide_product(FILL_MAX_NS, amount):
            raise ValueError("a bucket must fill up within 2**60 ns")
        memset(&shape, 0, sizeof(Limiter))
        shape.kind = kind
        shape.unit = unit
        shape.capacity = capacity
        shape.amount = amount
        shape.period_ns = period_ns
        shape.is_clamped = is_clamped
        index = limits_add(&self.limits, &shape)
        if index == NOWHERE:
            raise MemoryError
        return index

    def remove(self, uint32_t index):
        """End a limiter; charges that touched it leave it alone from now on."""
        self.limiter(index)
        limits_remove(&self.limits, index)

    def resize(self, uint32_t index, int64_t capacity):
        """Give a limiter another capacity; what was charged still counts."""
        cdef Limiter* limiter = self.limiter(index)
        if not 1 <= capacity <= COST_MAX:
            raise ValueError("capacity must be 1 to 2**40")
        limiter.capacity = capacity

    cdef int take_costs(self, tuple given, int64_t* costs) except -1:
        cdef Py_ssize_t i
        if len(given) != NUM_UNITS:
            raise ValueError("one cost for each unit")
        for i in range(NUM_UNITS):
            costs[i] = given[i]
            if not 0 <= costs[i] <= COST_MAX:
                raise ValueError("a cost must be 0 to 2**40")
        return 0

    def reserve(self, Charge charge not None, tuple limiters not None, tuple costs not None, int64_t now_ns,
                Py_ssize_t num_charged=-1):
        """Charge all limiters, or none: a LimitSays. `charge` tells which one bound, and how long.

        With `num_charged` only so many of them are charged, from the first on; the others are
        asked all the same.
        """
        cdef int64_t[NUM_UNITS] units
        cdef uint32_t[NUM_TOUCHED_MAX] indices
        cdef Py_ssize_t num = len(limiters), i
        cdef int verdict
        if num_charged < 0:
            num_charged = num
        if charge.charge.num + num_charged > NUM_TOUCHED_MAX:
            charge_forget_gone(&self.limits, &charge.charge)
        if num > NUM_TOUCHED_MAX or num_charged > num or charge.charge.num + num_charged > NUM_TOUCHED_MAX:
            raise ValueError("a charge touches at most 32 limiters")
        charge.make_room(charge.charge.num + num_charged)
        self.take_costs(costs, units)
        for i in range(num):
            indices[i] = limiters[i]
            self.limiter(indices[i])
        verdict = limits_reserve(&self.limits, &charge.charge, indices, num, num_charged, units, now_ns)
        if verdict == PASSED:
            charge.turn_ns = max(charge.turn_ns, now_ns + charge.charge.wait_ns)
        return verdict

    def settle(self, Charge charge not None, tuple costs not None, int64_t now_ns):
        """End a charge by what the request did cost; all zeros refund it. May be repeated."""
        cdef int64_t[NUM_UNITS] units
        self.take_costs(costs, units)
        limits_settle(&self.limits, &charge.charge, units, now_ns)

    def state(self, uint32_t index, int64_t now_ns):
        """(capacity, what remains of it, nanoseconds until all of it is back) of a limiter."""
        cdef Limiter* limiter = self.limiter(index)
        cdef int64_t own_ns = limits_advance(&self.limits, now_ns)
        return limiter.capacity, limiter_remaining(limiter, own_ns), limiter_reset_ns(limiter, own_ns)
