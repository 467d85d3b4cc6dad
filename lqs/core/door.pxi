# The door: who comes in, who waits at it for a place, and who is sent away.
#
# A class has places to wait, and so have all classes together. Who can start at once needs
# none: a free sequence is room as well, even while the one that will take it is still having
# its prompt made. So six at once for one sequence and one place are one that runs, one that
# waits and four that find no room, whichever of them the scheduler sees first; and never
# more are inside than sequences and places. An arrival is judged in this order:
#
#   0. the breaker of its class is open              -> DOOR_BROKEN, until when; but one that
#      comes for a place that it was promised passes it
#   1. its class has room, and so has the total      -> DOOR_IN
#   2. it may be demoted, and a lower class has room -> DOOR_IN, in that class
#   3. only the total is full, and one of a lower
#      class waits, who can be made to leave         -> DOOR_EVICT, then door_answer
#   4. its class may wait for a place                -> DOOR_WAIT, then door_next
#   5. else                                          -> DOOR_FULL
#
# Who stands at the door (3 and 4) is a Guest: a number of the caller's, a class and a time
# after which it waits no more. Guests stand in one FIFO per class; nobody passes those of its
# class, and the best class gets the next place. Some have asked for an eviction besides; these
# stand in a second FIFO, in the order in which the scheduler answers, and no more of a class
# than it has places left. Who is still having its prompt made cannot be made to leave yet: a
# guest asks when one below it has come to the scheduler, and if its class may not wait for a
# place it stands here only while there is somebody to ask for.
#
# The breaker of a class:
#
#            the queue is full                     open_ns has passed
#   CLOSED ---------------------> OPEN ------------------------------> HALF_OPEN
#      ^                           ^                                    |     |
#      |                           +-- a probe finds it over the mark --+     |
#      +--------------- num_probes in a row find it below the mark -----------+
#
# The lowest class opens as soon as the queue is full, and one more for each further open_ns
# of the same overload, but never the best. The overload is over when the warning is. A probe
# is an arrival that goes on to 1; what it finds is how full the queue is then. The mark is
# the warning's of the total; the classes have warnings of their own, and no part in this.
#
# Times come in as `now_ns` and never go back. Owner: one thread, the event loop.

cdef enum:
    EVICTIONS_MAX = 1024    # evictions asked for and not answered

cpdef enum DoorSays:
    DOOR_IN = 0
    DOOR_EVICT = 1
    DOOR_WAIT = 2
    DOOR_FULL = 3
    DOOR_BROKEN = 4
    DOOR_NOBODY = 5         # an answer that nobody waits for any more

cpdef enum Breaker:
    BREAKER_CLOSED = 0
    BREAKER_HALF_OPEN = 1
    BREAKER_OPEN = 2

# What the living device slots have in all, taken or not.
cdef struct Seats:
    int64_t num_sequences
    int64_t kv_tokens
    int64_t kv_reserved

cdef struct Guest:
    uint64_t user               # the caller's
    int64_t until_ns            # it stands here no longer
    uint32_t before, behind     # in its class; behind also links the free ones
    uint32_t next_ask           # of those that asked
    uint32_t level
    bint has_patience           # its class may wait for a place
    bint is_here                # false: free, or gone
    bint asks                   # the answer is still to come; also of one that is gone

cdef struct GuestQueue:
    uint32_t head, tail

# Up from the moment that so many wait until fewer than `clear_at` do.
cdef struct Warned:
    int64_t raise_at        # 0: never
    int64_t clear_at
    bint is_up
    bint was_told           # what Door.changes() has told

# One class: its rules, who counts against them, its breaker, what happened.
cdef struct DoorLevel:
    int64_t cap
    int64_t place_wait_ns   # 0: it may not wait for a place
    bint demotes
    bint evicts
    int64_t num_pending     # inside and not started
    int64_t num_submitted   # of these, in the scheduler's hands
    int64_t num_asking      # guests that have asked for an eviction
    uint32_t num_here       # guests
    uint32_t num_taken      # places among the guests, of those gone as well
    GuestQueue waits
    Warned warned
    uint32_t breaker
    uint32_t told_breaker   # what Door.changes() has told
    uint32_t num_good       # probes in a row that found the queue below the mark
    int64_t open_until_ns
    uint64_t num_overflows  # found no room
    uint64_t num_demoted    # ... and came in with a lower class
    uint64_t num_evictions  # ... and came in for one that left
    uint64_t num_waits      # ... and stood at the door
    uint64_t num_waits_lost     # ... in vain
    uint64_t num_full       # ... and were refused at once
    uint64_t num_broken     # sent away by the breaker
    uint64_t num_opened

cdef struct DoorState:
    DoorLevel levels[MAX_LEVELS]
    uint32_t num_levels
    uint32_t num_probes
    int64_t total
    Warned warned
    int64_t full            # so many waiting open the breaker; 0: never
    int64_t open_ns
    Seats seats             # as the owner last saw them
    int64_t num_pending
    int64_t num_running
    int64_t kv_tokens       # promised to the running, and wanted by those who wait
    # Of the arrival that is judged; 0 between arrivals.
    int64_t num_held        # places that it may not have
    bint is_promised        # it was promised one
    bint is_overrun         # the queue was full, and the warning has not been cleared since
    int64_t overrun_ns      # since then
    Guest* guests
    uint32_t num_guests_max     # of each class
    uint32_t capacity           # of `guests`
    uint32_t free_head
    uint32_t num_asks       # evictions asked for and not answered
    GuestQueue asks
    int64_t due_ns          # no guest's time is over before that

cdef struct Verdict:
    uint32_t say
    uint32_t level          # in which it came in, or stands
    uint32_t guest          # for door_give_up; NOWHERE: it is no guest
    uint64_t user
    int64_t at_ns           # until when it waits, or when its breaker half-opens


cdef void door_init(DoorState* d, uint32_t num_levels) noexcept nogil:
    cdef uint32_t level
    memset(d, 0, sizeof(DoorState))
    d.num_levels = num_levels
    d.free_head = d.asks.head = d.asks.tail = NOWHERE
    d.due_ns = INT64_MAX
    for level in range(num_levels):
        d.levels[level].waits.head = d.levels[level].waits.tail = NOWHERE


# Room for as many guests of each class; who is here stays. False: no memory.
cdef bint door_make_room(DoorState* d, uint32_t num_guests_max) noexcept nogil:
    cdef uint32_t capacity = num_guests_max * d.num_levels
    cdef uint32_t i
    cdef Guest* guests
    if capacity > d.capacity:
        guests = <Guest*> realloc(d.guests, capacity * sizeof(Guest))
        if guests == NULL:
            return False
        d.guests = guests
        for i in range(d.capacity, capacity):
            guests[i].is_here = guests[i].asks = False
            guests[i].behind = d.free_head
            d.free_head = i
        d.capacity = capacity
    d.num_guests_max = num_guests_max
    return True


# --- guests -----------------------------------------------------------------------------

cdef inline void guests_append(DoorState* d, GuestQueue* queue, uint32_t index) noexcept nogil:
    d.guests[index].before = queue.tail
    d.guests[index].behind = NOWHERE
    if queue.tail == NOWHERE:
        queue.head = index
    else:
        d.guests[queue.tail].behind = index
    queue.tail = index


cdef inline void guests_unlink(DoorState* d, GuestQueue* queue, uint32_t index) noexcept nogil:
    cdef uint32_t before = d.guests[index].before, behind = d.guests[index].behind
    if before == NOWHERE:
        queue.head = behind
    else:
        d.guests[before].behind = behind
    if behind == NOWHERE:
        queue.tail = before
    else:
        d.guests[behind].before = before


# A new guest at the end of its class, or NOWHERE: there are as many as there may be. Its time
# at the door is a part of its time in the queue, which ends with `expire_ns` (0: never).
cdef uint32_t guest_new(DoorState* d, Verdict* verdict, int64_t now_ns,
                        int64_t expire_ns) noexcept nogil:
    cdef DoorLevel* own = &d.levels[verdict.level]
    cdef uint32_t index = d.free_head
    cdef Guest* guest
    if own.num_taken >= d.num_guests_max or index == NOWHERE:
        return NOWHERE
    guest = &d.guests[index]
    d.free_head = guest.behind
    guest.user = verdict.user
    guest.level = verdict.level
    guest.is_here = True
    guest.asks = False
    guest.has_patience = own.place_wait_ns != 0
    guest.until_ns = expire_ns if expire_ns else INT64_MAX
    if guest.has_patience:
        guest.until_ns = min(guest.until_ns, now_ns + own.place_wait_ns)
    d.due_ns = min(d.due_ns, guest.until_ns)
    guests_append(d, &own.waits, index)
    own.num_here += 1
    own.num_taken += 1
    own.num_waits += 1
    return index


cdef inline void guest_free(DoorState* d, uint32_t index) noexcept nogil:
    d.levels[d.guests[index].level].num_taken -= 1
    d.guests[index].behind = d.free_head
    d.free_head = index


# It stands at the door no more, whatever has come of it.
cdef void guest_leave(DoorState* d, uint32_t index) noexcept nogil:
    cdef Guest* guest = &d.guests[index]
    cdef DoorLevel* own = &d.levels[guest.level]
    guests_unlink(d, &own.waits, index)
    guest.is_here = False
    own.num_here -= 1
    if guest.asks:
        # Its place in the order of answers stays.
        own.num_asking -= 1
    else:
        guest_free(d, index)


cdef void guest_ask(DoorState* d, uint32_t index) noexcept nogil:
    d.guests[index].asks = True
    d.guests[index].next_ask = NOWHERE
    if d.asks.tail == NOWHERE:
        d.asks.head = index
    else:
        d.guests[d.asks.tail].next_ask = index
    d.asks.tail = index
    d.num_asks += 1
    d.levels[d.guests[index].level].num_asking += 1


# The first that asked, here or gone, or NOWHERE. It asks no more.
cdef uint32_t guest_answered(DoorState* d) noexcept nogil:
    cdef uint32_t index = d.asks.head
    if index == NOWHERE:
        return NOWHERE
    d.asks.head = d.guests[index].next_ask
    if d.asks.head == NOWHERE:
        d.asks.tail = NOWHERE
    d.num_asks -= 1
    d.guests[index].asks = False
    if d.guests[index].is_here:
        d.levels[d.guests[index].level].num_asking -= 1
    return index


# --- how full it is ---------------------------------------------------------------------

# Sequences that those who have not started can count on.
cdef inline int64_t num_startable(const DoorState* d) noexcept nogil:
    if d.kv_tokens >= d.seats.kv_tokens:
        # Free sequences are no use where somebody waits for cells.
        return 0
    return max(d.seats.num_sequences - d.num_running, <int64_t> 0)


# Who is inside and cannot start at once: what counts for the warning and the breaker.
cdef inline int64_t num_stuck(const DoorState* d) noexcept nogil:
    return max(d.num_pending - num_startable(d), <int64_t> 0)


# Of one class; the better ones start first.
cdef int64_t num_stuck_of(const DoorState* d, uint32_t level) noexcept nogil:
    cdef int64_t startable = num_startable(d)
    cdef uint32_t better
    for better in range(level):
        startable -= d.levels[better].num_pending
    return max(d.levels[level].num_pending - max(startable, <int64_t> 0), <int64_t> 0)


cdef bint door_has_room(const DoorState* d, uint32_t level) noexcept nogil:
    cdef const DoorLevel* own = &d.levels[level]
    cdef int64_t free_level = own.cap - own.num_pending - d.num_held
    cdef int64_t free_total = d.total - d.num_pending - d.num_held
    cdef int64_t startable
    cdef uint32_t better
    if free_level > 0 and free_total > 0:
        return True
    startable = num_startable(d)
    free_total += startable
    # The better classes start first.
    for better in range(level):
        startable -= d.levels[better].num_pending
    return free_level + max(startable, <int64_t> 0) > 0 and free_total > 0


# --- warning and breaker ----------------------------------------------------------------

cdef void breaker_open(DoorState* d, DoorLevel* own, int64_t now_ns) noexcept nogil:
    own.breaker = BREAKER_OPEN
    own.open_until_ns = now_ns + d.open_ns
    own.num_opened += 1


# A probe that finds less than that has found room.
cdef inline int64_t mark_of(const DoorState* d) noexcept nogil:
    if d.warned.raise_at:
        return d.warned.raise_at
    return d.full if d.full else d.total


# Whether the breaker of this class sends an arrival away. Lets one through as a probe.
cdef bint breaker_holds(DoorState* d, uint32_t level, int64_t now_ns) noexcept nogil:
    cdef DoorLevel* own = &d.levels[level]
    if own.breaker == BREAKER_CLOSED:
        return False
    if own.breaker == BREAKER_OPEN:
        if now_ns < own.open_until_ns:
            return True
        own.breaker = BREAKER_HALF_OPEN
        own.num_good = 0
    if num_stuck(d) >= mark_of(d):
        breaker_open(d, own, now_ns)
        return False
    own.num_good += 1
    if own.num_good >= d.num_probes:
        own.breaker = BREAKER_CLOSED
    return False


# Close the entry for so many of the lowest classes, but never for the best.
cdef void door_trip(DoorState* d, int64_t num_classes, int64_t now_ns) noexcept nogil:
    cdef DoorLevel* own
    cdef int64_t i
    for i in range(min(num_classes, <int64_t> d.num_levels - 1)):
        own = &d.levels[d.num_levels - 1 - i]
        if own.breaker != BREAKER_OPEN or now_ns >= own.open_until_ns:
            breaker_open(d, own, now_ns)


cdef inline void raise_warning(Warned* warned, int64_t stuck) noexcept nogil:
    if warned.raise_at and stuck >= warned.raise_at:
        warned.is_up = True


cdef inline void clear_warning(Warned* warned, int64_t stuck) noexcept nogil:
    if stuck < warned.clear_at:
        warned.is_up = False


# After anything that may have filled it.
cdef void door_watch(DoorState* d, int64_t now_ns) noexcept nogil:
    cdef int64_t stuck = num_stuck(d)
    raise_warning(&d.warned, stuck)
    if d.full == 0 or stuck < d.full:
        return
    if not d.is_overrun:
        d.is_overrun = True
        d.overrun_ns = now_ns
    door_trip(d, 1 + (now_ns - d.overrun_ns) // d.open_ns, now_ns)


# After anything that may have emptied it.
cdef void door_ease(DoorState* d) noexcept nogil:
    cdef int64_t stuck = num_stuck(d)
    cdef uint32_t level
    clear_warning(&d.warned, stuck)
    if stuck < d.warned.clear_at:
        d.is_overrun = False
    for level in range(d.num_levels):
        if d.levels[level].warned.is_up:
            clear_warning(&d.levels[level].warned, num_stuck_of(d, level))


# --- arrivals ---------------------------------------------------------------------------

cdef void door_let_in(DoorState* d, uint32_t level, int64_t now_ns) noexcept nogil:
    d.levels[level].num_pending += 1
    d.num_pending += 1
    raise_warning(&d.levels[level].warned, num_stuck_of(d, level))
    door_watch(d, now_ns)


# The next lower class that takes it, or NOWHERE. Nobody passes those who wait for a place.
cdef uint32_t class_below(DoorState* d, uint32_t level, int64_t now_ns) noexcept nogil:
    cdef uint32_t lower
    for lower in range(level + 1, d.num_levels):
        if (d.levels[lower].waits.head == NOWHERE and door_has_room(d, lower)
                and not breaker_holds(d, lower, now_ns)):
            return lower
    return NOWHERE


# Whether somebody could be made to leave for one more of this class: at once, or when its
# prompt is made. As far as is known here: only the scheduler knows who of them still waits.
cdef bint could_evict(const DoorState* d, uint32_t level, bint at_once) noexcept nogil:
    cdef const DoorLevel* own = &d.levels[level]
    cdef int64_t num_lower = 0
    cdef uint32_t lower
    if (not own.evicts or own.cap - own.num_pending - own.num_asking <= 0
            or d.num_pending < d.total or d.num_asks >= EVICTIONS_MAX):
        return False
    for lower in range(level + 1, d.num_levels):
        num_lower += d.levels[lower].num_submitted if at_once else d.levels[lower].num_pending
    # Those who asked before take theirs first.
    return num_lower > d.num_asks


# One arrives. `user` comes back in what is told of it later; `expire_ns` (0: none) ends its
# time in the queue. After DOOR_EVICT the scheduler is asked, and its answer is for the one
# that asked first.
cdef void door_enter(DoorState* d, uint32_t level, int64_t now_ns, int64_t expire_ns,
                     uint64_t user, Verdict* verdict) noexcept nogil:
    cdef DoorLevel* own = &d.levels[level]
    cdef uint32_t lower
    verdict.user = user
    verdict.level = level
    verdict.guest = NOWHERE
    verdict.at_ns = 0
    door_watch(d, now_ns)
    if not d.is_promised and breaker_holds(d, level, now_ns):
        own.num_broken += 1
        verdict.say = DOOR_BROKEN
        verdict.at_ns = own.open_until_ns
        return
    verdict.say = DOOR_IN
    if own.waits.head == NOWHERE and door_has_room(d, level):
        door_let_in(d, level, now_ns)
        return
    own.num_overflows += 1
    lower = class_below(d, level, now_ns) if own.demotes else <uint32_t> NOWHERE
    if lower != NOWHERE:
        own.num_demoted += 1
        verdict.level = lower
        door_let_in(d, lower, now_ns)
        return
    door_stand(d, now_ns, expire_ns, verdict)


# There is no room: 3, 4 and 5 of the order above.
cdef void door_stand(DoorState* d, int64_t now_ns, int64_t expire_ns,
                     Verdict* verdict) noexcept nogil:
    cdef DoorLevel* own = &d.levels[verdict.level]
    if own.place_wait_ns or could_evict(d, verdict.level, False):
        verdict.guest = guest_new(d, verdict, now_ns, expire_ns)
    if verdict.guest == NOWHERE:
        own.num_full += 1
        verdict.say = DOOR_FULL
        return
    verdict.at_ns = d.guests[verdict.guest].until_ns
    verdict.say = DOOR_WAIT
    if could_evict(d, verdict.level, True):
        guest_ask(d, verdict.guest)
        verdict.say = DOOR_EVICT


# --- guests, later ----------------------------------------------------------------------

cdef inline void verdict_of(const DoorState* d, uint32_t index, Verdict* verdict,
                            DoorSays say) noexcept nogil:
    verdict.say = say
    verdict.user = d.guests[index].user
    verdict.level = d.guests[index].level
    verdict.guest = index
    verdict.at_ns = d.guests[index].until_ns


cdef void guest_come_in(DoorState* d, uint32_t index, int64_t now_ns,
                        Verdict* verdict) noexcept nogil:
    verdict_of(d, index, verdict, DOOR_IN)
    guest_leave(d, index)
    door_let_in(d, verdict.level, now_ns)


# A guest goes away, by itself or because its time is over.
cdef void door_give_up(DoorState* d, uint32_t index) noexcept nogil:
    d.levels[d.guests[index].level].num_waits_lost += 1
    guest_leave(d, index)


# The scheduler's answer to the first that asked. Who left for it has been counted out before.
# Its place goes to the one that asked; where nobody left, that one goes on to 4.
cdef void door_answer(DoorState* d, bint was_evicted, int64_t now_ns,
                      Verdict* verdict) noexcept nogil:
    cdef uint32_t index = guest_answered(d)
    cdef DoorLevel* own
    verdict.say = DOOR_NOBODY
    if index == NOWHERE:
        return
    if not d.guests[index].is_here:
        guest_free(d, index)
        return
    own = &d.levels[d.guests[index].level]
    if (was_evicted or own.waits.head == index) and door_has_room(d, d.guests[index].level):
        own.num_evictions += was_evicted
        guest_come_in(d, index, now_ns, verdict)
    elif d.guests[index].has_patience or could_evict(d, d.guests[index].level, False):
        verdict_of(d, index, verdict, DOOR_WAIT)
    else:
        verdict_of(d, index, verdict, DOOR_FULL)
        door_give_up(d, index)


cdef uint32_t first_late(DoorState* d, const DoorLevel* own, int64_t now_ns) noexcept nogil:
    cdef uint32_t index = own.waits.head
    while index != NOWHERE and d.guests[index].until_ns > now_ns:
        d.due_ns = min(d.due_ns, d.guests[index].until_ns)
        index = d.guests[index].behind
    return index


# A guest whose time is over, or NOWHERE. Looks at all of them only when one may be late.
cdef uint32_t late_guest(DoorState* d, int64_t now_ns) noexcept nogil:
    cdef uint32_t level, index = NOWHERE
    if now_ns < d.due_ns:
        return NOWHERE
    d.due_ns = INT64_MAX
    for level in range(d.num_levels):
        if index == NOWHERE:
            index = first_late(d, &d.levels[level], now_ns)
    if index != NOWHERE:
        # There may be more.
        d.due_ns = now_ns
    return index


# The guest that there is a place for, or NOWHERE.
cdef uint32_t guest_with_room(const DoorState* d) noexcept nogil:
    cdef uint32_t level, index
    for level in range(d.num_levels):
        index = d.levels[level].waits.head
        if index == NOWHERE:
            continue
        if d.guests[index].asks:
            # It has a place coming, or takes this one when it hears that it has not.
            return NOWHERE
        if door_has_room(d, level):
            return index
    return NOWHERE


# A guest for whom somebody could be made to leave by now, or NOWHERE.
cdef uint32_t guest_to_ask(const DoorState* d) noexcept nogil:
    cdef uint32_t level, index
    for level in range(d.num_levels):
        if d.levels[level].num_here > d.levels[level].num_asking and could_evict(d, level, True):
            index = d.levels[level].waits.head
            while d.guests[index].asks:
                index = d.guests[index].behind
            return index
    return NOWHERE


# A guest that may not wait for a place and has nobody left to ask for, or NOWHERE.
cdef uint32_t guest_without_hope(const DoorState* d) noexcept nogil:
    cdef uint32_t level, index
    for level in range(d.num_levels):
        index = d.levels[level].waits.head
        if (index != NOWHERE and not d.guests[index].has_patience and not d.guests[index].asks
                and not could_evict(d, level, False) and not door_has_room(d, level)):
            return index
    return NOWHERE


# What became of a guest meanwhile: DOOR_FULL, its time is over; DOOR_IN, there is a place for
# it; or DOOR_EVICT, the scheduler is to be asked for it, and it still waits. False: nothing to
# tell. To be asked until then, whenever somebody was submitted or may have left, and whenever
# `due_ns` has come.
cdef bint door_next(DoorState* d, int64_t now_ns, Verdict* verdict) noexcept nogil:
    cdef uint32_t index = late_guest(d, now_ns)
    if index != NOWHERE:
        verdict_of(d, index, verdict, DOOR_FULL)
        door_give_up(d, index)
        return True
    index = guest_with_room(d)
    if index != NOWHERE:
        guest_come_in(d, index, now_ns, verdict)
        return True
    index = guest_to_ask(d)
    if index != NOWHERE:
        guest_ask(d, index)
        verdict_of(d, index, verdict, DOOR_EVICT)
        return True
    index = guest_without_hope(d)
    if index != NOWHERE:
        verdict_of(d, index, verdict, DOOR_FULL)
        door_give_up(d, index)
        return True
    return False


# --- what happens to those inside -------------------------------------------------------

# It is in the scheduler's hands; its prompt is known.
cdef inline void door_submit(DoorState* d, uint32_t level,
                             int64_t footprint_tokens) noexcept nogil:
    d.levels[level].num_submitted += 1
    d.kv_tokens += footprint_tokens


# It got a sequence.
cdef inline void door_start(DoorState* d, uint32_t level) noexcept nogil:
    d.levels[level].num_submitted -= 1
    d.levels[level].num_pending -= 1
    d.num_pending -= 1
    d.num_running += 1
    door_ease(d)


# It is gone before it was submitted.
cdef inline void door_leave(DoorState* d, uint32_t level) noexcept nogil:
    d.levels[level].num_pending -= 1
    d.num_pending -= 1
    door_ease(d)


# It is gone after that.
cdef inline void door_settle(DoorState* d, uint32_t level, int64_t footprint_tokens,
                             bint has_run) noexcept nogil:
    d.kv_tokens -= footprint_tokens
    if has_run:
        d.num_running -= 1
        door_ease(d)
    else:
        d.levels[level].num_submitted -= 1
        door_leave(d, level)


# From 0 to 1: of the KV that runs, or of the queue; the larger one.
cdef double door_load(const DoorState* d) noexcept nogil:
    cdef double kv = d.seats.kv_reserved / <double> max(d.seats.kv_tokens, <int64_t> 1)
    return max(kv, num_stuck(d) / <double> max(d.total, <int64_t> 1))


# The seats of the device slots that live.
cdef void door_look(DoorState* d, SchedulerState* s) noexcept nogil:
    cdef SlotAccount* account
    cdef uint32_t i
    memset(&d.seats, 0, sizeof(Seats))
    for i in range(s.num_slots):
        if is_dead(s, i):
            continue
        account = &books_of(s).ledger.slots[i]
        d.seats.kv_reserved += <int64_t> load_relaxed(&account.reserved)
        if load_relaxed32(&s.slots[i].wants_drain) or load_relaxed32(&s.slots[i].wants_rest):
            # No more than what runs there has.
            d.seats.num_sequences += <int64_t> load_relaxed(&account.num_running)
            d.seats.kv_tokens += <int64_t> load_relaxed(&account.reserved)
        else:
            d.seats.num_sequences += <int64_t> load_relaxed(&account.num_sequences)
            d.seats.kv_tokens += <int64_t> load_relaxed(&account.capacity)
