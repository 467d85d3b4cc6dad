# Backfill: who may pass a request that does not fit, how often, and what is held for it.
#
# The first in order may need more KV cells than any device slot has free. Letting it block
# wastes what is free; letting others pass for ever starves it. So others pass it, each pass
# is counted, and after `bypass_max` of them or `bypass_ns` the device slot where it is
# nearest to fitting is *held*: what comes free there is kept for it, and others start there
# only beside what it needs. One hold per device slot, so a hold costs one request's worth.
#
# The walk past those that do not fit sets them aside and asks the backlog again, so whoever
# starts is the first in order among those that fit. They are put back before the start, in
# reverse: a node that was unlinked still knows its neighbours, so as long as nothing else
# has changed in between, putting back is exact (Knuth's dancing links). At most
# PASSED_MAX are ever passed at a time, and each of those has a record; whoever has none is
# not passed.
#
# Owner: the scheduler's thread.

cdef enum:
    PASSED_MAX = 32

# One request while it is set aside.
cdef struct Aside:
    uint32_t index
    bint has_left               # nothing else of its key waited in its level
    bint by_deadline
    int64_t floor               # its level's, before

# One request that was passed, until it leaves the queue.
cdef struct Passed:
    uint32_t index
    uint32_t num_passes
    uint32_t slot               # held for it, or NOWHERE
    int64_t since_ns            # when it did not fit first

cdef struct BackfillState:
    Passed passed[PASSED_MAX]
    uint32_t num_passed
    uint32_t bypass_max
    int64_t bypass_ns
    uint64_t num_passes         # atomic, one writer: starts ahead of one that did not fit
    uint64_t num_holds          # atomic, one writer: taken
    uint64_t num_held           # atomic, one writer: device slots held now


# --- set aside and put back -------------------------------------------------------------

cdef void set_aside(BacklogState* b, uint32_t index, Aside* aside) noexcept nogil:
    cdef Entry* entry = &b.table[index]
    cdef Level* level = level_of(b, entry.lane, entry.level)
    cdef KeyQueue* queue = &level.queues[entry.key]
    aside.index = index
    aside.floor = level.floor
    aside.by_deadline = b.places[index] != NOWHERE
    aside.has_left = unlink(b, level, queue, index)


cdef inline void age_relink(Links* links, Level* level, uint32_t index) noexcept nogil:
    cdef Links own = links[index]
    if own.older == NOWHERE:
        level.oldest = index
    else:
        links[own.older].younger = index
    if own.younger == NOWHERE:
        level.youngest = index
    else:
        links[own.younger].older = index


cdef inline void fifo_relink(Links* links, KeyQueue* queue, uint32_t index) noexcept nogil:
    cdef Links own = links[index]
    if own.before == NOWHERE:
        queue.head = index
    else:
        links[own.before].behind = index
    if own.behind == NOWHERE:
        queue.tail = index
    else:
        links[own.behind].before = index


# In reverse order of set_aside, with nothing changed in between.
cdef void put_back(BacklogState* b, const Aside* aside) noexcept nogil:
    cdef Entry* entry = &b.table[aside.index]
    cdef Level* level = level_of(b, entry.lane, entry.level)
    cdef KeyQueue* queue = &level.queues[entry.key]
    age_relink(b.links, level, aside.index)
    if not aside.by_deadline:
        fifo_relink(b.links, queue, aside.index)
    elif not heap_push(&queue.deadlines, b.table, aside.index, entry.deadline_ns):
        # A heap that shrank and has no memory to grow: it stands by its arrival, as in
        # backlog_push.
        fifo_append(b.links, queue, aside.index)
    if aside.has_left:
        # Its counter stands: it was never away.
        level.num_active += 1
        keys_settle(level, level.num_active - 1, entry.key)
        level.floor = aside.floor
    level.num_waiting += 1


# --- records ----------------------------------------------------------------------------

cdef Passed* passed_of(BackfillState* f, uint32_t index) noexcept nogil:
    cdef uint32_t i
    for i in range(f.num_passed):
        if f.passed[i].index == index:
            return &f.passed[i]
    return NULL


# The record of one that does not fit now, or NULL: as many as may be are passed already.
cdef Passed* note_misfit(BackfillState* f, uint32_t index, int64_t now_ns) noexcept nogil:
    cdef Passed* passed = passed_of(f, index)
    if passed != NULL or f.num_passed == PASSED_MAX:
        return passed
    passed = &f.passed[f.num_passed]
    f.num_passed += 1
    passed.index = index
    passed.num_passes = 0
    passed.slot = NOWHERE
    passed.since_ns = now_ns
    return passed


# It has left the queue.
cdef void forget_passed(BackfillState* f, uint32_t index) noexcept nogil:
    cdef Passed* passed = passed_of(f, index)
    if passed == NULL:
        return
    if passed.slot != NOWHERE:
        bump(&f.num_held, -1)
    f.num_passed -= 1
    passed[0] = f.passed[f.num_passed]


# The device slot has died: whoever it was held for may find another.
cdef void release_hold(BackfillState* f, uint32_t slot) noexcept nogil:
    cdef Passed* holder = holder_of(f, slot)
    if holder != NULL:
        holder.slot = NOWHERE
        bump(&f.num_held, -1)


cdef inline bint is_overdue(const BackfillState* f, const Passed* passed,
                            int64_t now_ns) noexcept nogil:
    return passed.num_passes >= f.bypass_max or now_ns - passed.since_ns >= f.bypass_ns


# For whom the device slot is held, or NULL.
cdef Passed* holder_of(BackfillState* f, uint32_t slot) noexcept nogil:
    cdef uint32_t i
    for i in range(f.num_passed):
        if f.passed[i].slot == slot:
            return &f.passed[i]
    return NULL
