# Promises that grow: how a device slot with `kv_block` starts more than it could hold at
# their longest, and what happens when too many of them become long.
#
# A request starts with its prompt and one block, and its worker asks for the next block half
# a block before it needs it. What may start is decided by the peak that is to come (Gong et
# al. 2025, "Past-Future Scheduler for LLM Serving under SLA Guarantees", LightLLM's): all
# that run grow by a token a step, and each frees what it holds when it ends. So with those
# that run sorted by what they have left, most first,
#
#     peak = max over i of (held[0] + ... + held[i]) + (i + 1) x left[i]
#
# and a request starts where the peak with it is within the capacity.
#
# Predictions fail, so a growth may find no room. All that run on a device slot stand in one
# total order, by class and then by start, which never changes while they run:
#
#     grow     the best first. One that does not fit takes the promises of those behind it,
#              the last of all first: they are *out*, their worker gives up their cells.
#              With nobody behind it, it waits with what it holds: it is *short*, and so are
#              all behind it that ask.
#     resume   the best of those that are out comes back when the peak with it fits, or when
#              nothing else is left. Those that are short go first.
#     start    nobody starts beside one of the same or a better class that is out or short; of
#              a better class than all of those at most PASSES_MAX do, then one of them is next.
#
# Three things follow. Whoever is out stands behind all that hold something, so no two can
# put each other out in turns. The first of all is never short, since everything behind it
# and the capacity suffice for the longest request that a device slot takes; so there is
# always progress, and each time that one is put out somebody better got a block further.
# And nothing that runs is ever ended for want of memory.
#
# One that is out keeps its sequence in the ledger: to its client it runs, its tokens and
# sampler stay where they are, and the rings need no more places than there are sequences.
#
# The ledger moves at once; the worker follows before its next step. It looks at all that it
# was granted before it takes a cell, so it may find one for which the room is not there yet
# and leaves that one out of a step, but never takes a cell that another still counts on.
#
# Owner: the scheduler's thread. Counters are atomics with one writer.

cdef struct Books           # round.pxi

cdef enum:
    PASSES_MAX = 16             # as the head of the queue may be passed

# One that holds cells, as the peak sees it.
cdef struct Ahead:
    uint32_t left               # tokens to its expected end
    uint32_t held               # tokens promised

# What runs on one device slot.
cdef struct Growth:
    Attempt** running           # all of them, in no order
    Attempt** asking            # room for a sorted part of them
    Ahead* ahead                # those that hold something, most left first; while is_sorted
    uint32_t num_running
    uint32_t num_ahead
    bint is_sorted
    uint32_t num_passes         # starts since one that is out or short got on
    uint64_t num_out            # atomic
    uint64_t num_short          # atomic
    uint64_t num_starts         # atomic: first promises made
    uint64_t num_growths        # atomic: further ones made
    uint64_t num_refused        # atomic: asked for and not made at once
    uint64_t num_put_out        # atomic
    uint64_t num_resumed        # atomic


cdef int growth_init(Growth* growth, uint32_t num_sequences) noexcept nogil:
    growth.running = <Attempt**> calloc(num_sequences, sizeof(Attempt*))
    growth.asking = <Attempt**> calloc(num_sequences, sizeof(Attempt*))
    growth.ahead = <Ahead*> calloc(num_sequences, sizeof(Ahead))
    if growth.running == NULL or growth.asking == NULL or growth.ahead == NULL:
        growth_free(growth)
        return -1
    return 0


cdef void growth_free(Growth* growth) noexcept nogil:
    free(growth.running)
    free(growth.asking)
    free(growth.ahead)
    memset(growth, 0, sizeof(Growth))


# --- what is promised first, and what is expected in the end ----------------------------

cdef inline uint32_t first_promise(const DeviceSlot* slot, const Entry* entry) noexcept nogil:
    if slot.kv_block == 0:
        return entry.footprint_tokens
    return <uint32_t> min(<uint64_t> entry.num_prompt_tokens + slot.kv_block,
                          <uint64_t> entry.footprint_tokens)


# Tokens that one with so long a prompt, of whose answer `made` are promised, is expected to
# be promised in the end: whole blocks, asked for half a block ahead.
cdef uint32_t expected_end(Lengths* lengths, const DeviceSlot* slot, uint32_t key,
                           uint32_t num_prompt, uint32_t max_tokens, uint32_t footprint,
                           uint32_t made) noexcept nogil:
    cdef uint64_t completion = predicted_completion(lengths, key, slot.model, max_tokens, made)
    cdef uint64_t num_blocks = (completion + slot.kv_block // 2) // slot.kv_block + 1
    return <uint32_t> min(num_prompt + num_blocks * slot.kv_block, <uint64_t> footprint)


cdef inline uint32_t expected_end_of(Lengths* lengths, const DeviceSlot* slot,
                                     const Entry* entry) noexcept nogil:
    return expected_end(lengths, slot, entry.key, entry.num_prompt_tokens, entry.max_tokens,
                        entry.footprint_tokens, 0)


cdef inline void expect(Lengths* lengths, const DeviceSlot* slot,
                        Attempt* attempt) noexcept nogil:
    cdef uint32_t made = attempt.reserved - min(attempt.reserved, attempt.num_prompt_tokens)
    if slot.kv_block:
        # A block less: the last one is only begun.
        made -= min(made, slot.kv_block)
        attempt.end_tokens = expected_end(lengths, slot, attempt.key, attempt.num_prompt_tokens,
                                          attempt.max_tokens, attempt.footprint_tokens, made)


# --- the peak ---------------------------------------------------------------------------

cdef void sort_ahead(Growth* growth) noexcept nogil:
    cdef uint32_t i, place, num = 0
    cdef Attempt* attempt
    cdef Ahead one
    for i in range(growth.num_running):
        attempt = growth.running[i]
        if attempt.reserved == 0:
            continue
        one.held = attempt.reserved
        one.left = attempt.end_tokens - min(attempt.end_tokens, attempt.reserved)
        place = num
        while place and growth.ahead[place - 1].left < one.left:
            growth.ahead[place] = growth.ahead[place - 1]
            place -= 1
        growth.ahead[place] = one
        num += 1
    growth.num_ahead = num
    growth.is_sorted = True


# The most that will be promised at once if one more comes that holds `held` of `end`.
cdef uint64_t peak_with(Growth* growth, uint32_t held, uint32_t end) noexcept nogil:
    cdef uint32_t left = end - min(end, held)
    cdef uint64_t total = 0, peak = 0, num = 0
    cdef uint32_t i
    cdef bint is_in = False
    if not growth.is_sorted:
        sort_ahead(growth)
    for i in range(growth.num_ahead):
        if not is_in and left >= growth.ahead[i].left:
            is_in = True
            total += held
            num += 1
            peak = max(peak, total + num * left)
        total += growth.ahead[i].held
        num += 1
        peak = max(peak, total + num * growth.ahead[i].left)
    if not is_in:
        peak = max(peak, total + held + (num + 1) * left)
    return peak


# --- who runs ---------------------------------------------------------------------------

cdef void growth_add(Growth* growth, Attempt* attempt) noexcept nogil:
    attempt.place = growth.num_running
    growth.running[growth.num_running] = attempt
    growth.num_running += 1
    growth.num_passes = growth.num_passes + 1 if growth.num_out + growth.num_short else 0
    growth.is_sorted = False
    bump(&growth.num_starts, 1)


cdef void growth_remove(Growth* growth, Attempt* attempt) noexcept nogil:
    growth.num_running -= 1
    growth.running[attempt.place] = growth.running[growth.num_running]
    growth.running[attempt.place].place = attempt.place
    growth.is_sorted = False
    if attempt.out_tokens or attempt.is_short:
        growth.num_passes = 0
    bump(&growth.num_out, -<int64_t> (attempt.out_tokens != 0))
    bump(&growth.num_short, -<int64_t> attempt.is_short)


# Whether a stands behind b.
cdef inline bint is_behind(const Attempt* a, const Attempt* b) noexcept nogil:
    return a.level > b.level if a.level != b.level else a.order > b.order


# The first of those that are out, or the last of those that are not; NULL: none.
cdef Attempt* first_out(Growth* growth) noexcept nogil:
    cdef Attempt* found = NULL
    cdef uint32_t i
    for i in range(growth.num_running):
        if growth.running[i].out_tokens and (found == NULL
                                             or is_behind(found, growth.running[i])):
            found = growth.running[i]
    return found


cdef Attempt* last_in(Growth* growth) noexcept nogil:
    cdef Attempt* found = NULL
    cdef uint32_t i
    for i in range(growth.num_running):
        if growth.running[i].reserved and (found == NULL
                                           or is_behind(growth.running[i], found)):
            found = growth.running[i]
    return found


# Whether one of this or a better class is out or short, or one that was passed too often.
cdef bint somebody_waits(Growth* growth, uint32_t level) noexcept nogil:
    cdef uint32_t i
    if growth.num_out + growth.num_short == 0:
        return False
    if growth.num_passes >= PASSES_MAX:
        return True
    for i in range(growth.num_running):
        if ((growth.running[i].out_tokens or growth.running[i].is_short)
                and growth.running[i].level <= level):
            return True
    return False


# Whether a device slot has the KV to start it now, beside what is held there for another
# (NULL: nothing is).
cdef bint has_cells(SchedulerState* s, uint32_t slot, const Entry* entry,
                    const Entry* holder) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef SlotAccount* account = &books.ledger.slots[slot]
    cdef uint32_t tokens = first_promise(s.slots[slot], entry)
    cdef uint64_t kept = 0
    if holder != NULL:
        kept = first_promise(s.slots[slot], holder)
    if tokens + kept > headroom_of(account):
        return False
    if s.slots[slot].kv_block == 0:
        return True
    if somebody_waits(&books.growths[slot], entry.level):
        return False
    if holder != NULL:
        kept = expected_end_of(&books.lengths, s.slots[slot], holder)
    return peak_with(&books.growths[slot], tokens,
                     expected_end_of(&books.lengths, s.slots[slot], entry)) + kept <= account.ceiling


# --- growing ----------------------------------------------------------------------------

cdef inline void set_short(Growth* growth, Attempt* attempt, bint is_short) noexcept nogil:
    bump(&growth.num_short, <int64_t> is_short - <int64_t> attempt.is_short)
    attempt.is_short = is_short


# Promise it more, up to `tokens` in all; False: no room.
cdef bint promise(SchedulerState* s, Attempt* attempt, uint32_t tokens) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef Growth* growth = &books.growths[attempt.slot]
    if ledger_grow(&books.ledger, attempt.slot, attempt.key,
                   tokens - attempt.reserved) != LEDGER_OK:
        return False
    attempt.reserved = tokens
    expect(&books.lengths, s.slots[attempt.slot], attempt)
    if attempt.out_tokens or attempt.is_short:
        growth.num_passes = 0
    set_short(growth, attempt, False)
    growth.is_sorted = False
    # Release: pairs with the acquire in granted_tokens; what others were ordered to give up.
    store_release32(&attempt.granted, tokens)
    s.slots[attempt.slot].has_news = True
    return True


# Take its promise away; its sequence stays its own.
cdef void put_out(SchedulerState* s, Attempt* attempt) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef Growth* growth = &books.growths[attempt.slot]
    if ledger_shrink(&books.ledger, attempt.slot, attempt.key, attempt.reserved,
                     attempt.used) != LEDGER_OK:
        bump(&books.num_broken, 1)
    set_short(growth, attempt, False)
    attempt.out_tokens = attempt.reserved
    attempt.reserved = attempt.used = 0
    growth.is_sorted = False
    bump(&growth.num_out, 1)
    bump(&growth.num_put_out, 1)
    store_release32(&attempt.granted, 0)
    s.slots[attempt.slot].has_news = True


# Free `tokens` for one that grows, from those behind it; False: they have not so much, and
# nothing was taken.
cdef bint make_way(SchedulerState* s, Attempt* grower, uint32_t tokens) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef Growth* growth = &books.growths[grower.slot]
    cdef SlotAccount* account = &books.ledger.slots[grower.slot]
    cdef uint64_t gain = account.capacity - account.reserved
    cdef uint32_t i
    for i in range(growth.num_running):
        if is_behind(growth.running[i], grower):
            gain += growth.running[i].reserved
    if gain < tokens:
        return False
    while account.capacity - account.reserved < tokens:
        put_out(s, last_in(growth))
    return True


# Those that ask for more than they have, the best first; how many.
cdef uint32_t find_asking(Growth* growth) noexcept nogil:
    cdef Attempt* attempt
    cdef uint32_t i, place, num = 0
    for i in range(growth.num_running):
        attempt = growth.running[i]
        if (attempt.reserved == 0 or attempt.reserved >= attempt.footprint_tokens
                or load_relaxed32(&attempt.wanted) <= attempt.reserved):
            continue
        place = num
        while place and is_behind(growth.asking[place - 1], attempt):
            growth.asking[place] = growth.asking[place - 1]
            place -= 1
        growth.asking[place] = attempt
        num += 1
    return num


cdef inline uint32_t wish_of(const Attempt* attempt) noexcept nogil:
    return min(load_relaxed32(&attempt.wanted), attempt.footprint_tokens)


cdef void grow(SchedulerState* s, uint32_t slot) noexcept nogil:
    cdef Growth* growth = &books_of(s).growths[slot]
    cdef uint32_t num_asking = find_asking(growth)
    cdef uint32_t i, wish
    cdef bint is_full = False
    cdef Attempt* attempt
    for i in range(num_asking):
        attempt = growth.asking[i]
        if attempt.reserved == 0:
            # Put out for one before it.
            continue
        wish = wish_of(attempt)
        # Once one is short, those behind it are too, or they would take what it waits for.
        if not is_full and (promise(s, attempt, wish)
                            or (make_way(s, attempt, wish - attempt.reserved)
                                and promise(s, attempt, wish))):
            bump(&growth.num_growths, 1)
            continue
        is_full = True
        bump(&growth.num_refused, not attempt.is_short)
        set_short(growth, attempt, True)


# --- coming back ------------------------------------------------------------------------

cdef bint resume_first(SchedulerState* s, uint32_t slot) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef Growth* growth = &books.growths[slot]
    cdef Attempt* attempt = first_out(growth)
    cdef uint32_t tokens = max(attempt.out_tokens, wish_of(attempt))
    cdef bint is_alone = growth.num_out == growth.num_running
    if not is_alone and peak_with(growth, tokens, max(attempt.end_tokens, tokens)) > (
            books.ledger.slots[slot].capacity):
        return False
    if not promise(s, attempt, tokens):
        return False
    attempt.out_tokens = 0
    growth.is_sorted = False
    attempt.used = min(attempt.num_prompt_tokens, tokens)
    ledger_use(&books.ledger, slot, attempt.used)
    bump(&growth.num_out, -1)
    bump(&growth.num_resumed, 1)
    return True


# All of it, for every device slot whose promises grow.
cdef void tend_promises(SchedulerState* s) noexcept nogil:
    cdef Growth* growth
    cdef bint is_asked
    cdef uint32_t i
    for i in range(s.num_slots):
        if s.slots[i].kv_block == 0 or s.slots[i].buried:
            continue
        growth = &books_of(s).growths[i]
        # Acquire: pairs with ask_growth; the wishes.
        is_asked = load_relaxed32(&s.slots[i].asks) != 0 and exchange32(&s.slots[i].asks, 0) != 0
        if is_asked or growth.num_short:
            grow(s, i)
        while growth.num_out and not growth.num_short and resume_first(s, i):
            pass


cdef dict growth_figures(Growth* growth):
    return {
        "num_out": load_relaxed(&growth.num_out),
        "num_short": load_relaxed(&growth.num_short),
        "num_promises": load_relaxed(&growth.num_starts) + load_relaxed(&growth.num_growths),
        "num_growths": load_relaxed(&growth.num_growths),
        "num_growths_refused": load_relaxed(&growth.num_refused),
        "num_put_out": load_relaxed(&growth.num_put_out),
        "num_resumed": load_relaxed(&growth.num_resumed),
    }
