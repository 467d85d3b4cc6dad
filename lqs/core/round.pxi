# The scheduler's round.
#
#     bury -> take submitted -> take feedback -> heed -> sweep -> expire -> grow -> restart
#     -> start -> publish -> watch
#
# Each is bounded, so a round stays short whatever has piled up; what is left over makes
# the next round due at once. Time is an argument: the same round runs in the server, in
# the tests, and under a virtual clock.
#
# Owner: the scheduler's thread. Counters are atomics with one writer, read by anyone.

cdef enum:
    SUBMITS_PER_ROUND = 1024
    EXPIRIES_PER_ROUND = 1024
    STARTS_PER_ROUND = 256
    SWEPT_PER_ROUND = 8192

# One class, over all lanes. All atomic, one writer, but for what Drain says.
cdef struct LevelBook:
    uint64_t num_enqueued
    uint64_t num_waiting
    uint64_t num_started
    uint64_t num_expired
    uint64_t num_cancelled
    uint64_t num_no_device
    uint64_t num_evicted            # had to leave for one of a better class
    uint64_t num_promoted           # whole aging steps that those who left had waited
    uint64_t num_aged_starts        # started because they were due
    uint64_t wait_ns_sum            # of those who started
    uint64_t oldest_arrival_ns      # 0: nobody waits
    Drain drain

# One lane, over all classes. Atomic, one writer.
cdef struct LaneBook:
    uint64_t num_waiting
    uint64_t num_running
    uint64_t num_started

# All that waits for one model. A device slot has one model, so who waits for different ones
# never waits for the same place: each model has a queue of its own, with its own order, aging,
# shares of lanes, counters of keys and holds, and none is ever in another's way.
cdef struct ModelQueue:
    BacklogState backlog
    BackfillState backfill
    QueueBook queues[MAX_LANES * MAX_LEVELS]    # lane-major
    AgainList again                             # who goes on, before all of them

# A bound that is counted at arrival: the loop adds, the scheduler takes away.
cdef struct Permit:
    uint64_t taken                  # atomic
    uint64_t cap
    char pad[48]

cdef struct Books:
    ModelQueue* models[MAX_MODELS]  # NULL: it has no device slot
    uint32_t num_models             # from there on all are NULL
    BacklogState* backlog           # the first model's; it is always there, and all have its shape
    Placement placement
    LedgerState ledger
    Lengths lengths
    Growth* growths                 # by device slot
    LanesState shares
    uint32_t running[MAX_DEVICE_SLOTS][MAX_LEVELS]  # by device slot and class
    TimeHeap expiry
    LevelBook levels[MAX_LEVELS]
    LaneBook lanes[MAX_LANES]
    Drain drain                     # of all classes together
    Permit permits[MAX_LEVELS]
    Permit total
    uint64_t kept                   # device slots, as bits, that are for nobody but who goes on
    FailoverBook failover
    uint64_t num_running            # atomic, one writer
    uint64_t num_started            # the source of Attempt.order
    uint64_t num_decisions          # atomic, one writer: requests looked at, fitting or not
    uint64_t num_rounds             # atomic, one writer
    uint64_t num_broken             # atomic, one writer: ledger or handle mismatches
    int64_t last_round_ns
    uint32_t sweep_next             # first entry not swept; at capacity: nothing to sweep
    bint has_told_loop


cdef inline Books* books_of(SchedulerState* s) noexcept nogil:
    return <Books*> s.own


# Where a request waits. Of a model without a device slot none waits for longer than it takes
# to say so.
cdef inline ModelQueue* model_queue(Books* books, const Entry* entry) noexcept nogil:
    cdef ModelQueue* queue = NULL
    if entry.model < MAX_MODELS:
        queue = books.models[entry.model]
    return queue if queue != NULL else books.models[0]


cdef inline QueueBook* queue_book(ModelQueue* queue, const Entry* entry) noexcept nogil:
    return &queue.queues[entry.lane * MAX_LEVELS + entry.level]


cdef inline void tell_loop(SchedulerState* s, Op op, uint32_t index) noexcept nogil:
    cdef uint64_t generation = s.table[index].generation
    # Cannot be full: an entry has at most two cells here, and there are twice as many.
    ring_try_push(&s.events, message(op, generation << 32 | index))
    books_of(s).has_told_loop = True


cdef inline void give_back_permit(Books* books, uint32_t level) noexcept nogil:
    # Relaxed: a bound, no more; nothing is read because of it.
    add_relaxed(&books.permits[level].taken, <uint64_t> -1)
    add_relaxed(&books.total.taken, <uint64_t> -1)


# --- leaving the queue ------------------------------------------------------------------

cdef void leave_backlog(SchedulerState* s, uint32_t index, int64_t now_ns) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef Entry* entry = &s.table[index]
    cdef LevelBook* book = &books.levels[entry.level]
    cdef ModelQueue* queue = model_queue(books, entry)
    cdef int64_t steps
    if books.expiry.places[index] != NOWHERE:
        heap_remove(&books.expiry, s.table, index)
    forget_passed(&queue.backfill, index)
    if books.backlog.aging_step_ns > 0 and now_ns > entry.arrival_ns:
        steps = (now_ns - entry.arrival_ns) // books.backlog.aging_step_ns
        bump(&book.num_promoted, min(steps, <int64_t> entry.level))
    bump(&book.num_waiting, -1)
    bump(&books.lanes[entry.lane].num_waiting, -1)
    bump(&queue_book(queue, entry).num_waiting, -1)
    give_back_permit(books, entry.level)


# End one that waits: nothing was computed for it, and nothing is held.
cdef void end_waiting(SchedulerState* s, uint32_t index, Op op, int64_t now_ns) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef LevelBook* book = &books.levels[s.table[index].level]
    backlog_remove(&model_queue(books, &s.table[index]).backlog, index)
    leave_backlog(s, index, now_ns)
    if op == OP_EXPIRED or op == OP_NO_KV:
        bump(&book.num_expired, 1)
    elif op == OP_CANCELLED:
        bump(&book.num_cancelled, 1)
    elif op == OP_EVICTED:
        bump(&book.num_evicted, 1)
    else:
        bump(&book.num_no_device, 1)
    # Before the event: from then on the entry is the loop's.
    store_relaxed32(&s.table[index].state, FREE)
    tell_loop(s, op, index)


# --- placement --------------------------------------------------------------------------

# Whether it could ever hold it.
cdef inline bint serves(const DeviceSlot* slot, const Entry* entry) noexcept nogil:
    return (not slot.buried and slot.model == entry.model
            and slot.lanes_served >> entry.lane & 1
            and entry.footprint_tokens <= slot.kv_tokens)


# Whether a living device slot could ever hold it.
cdef bint is_servable(SchedulerState* s, const Entry* entry) noexcept nogil:
    cdef uint32_t i
    for i in range(s.num_slots):
        if serves(s.slots[i], entry):
            return True
    return False


# Whether anybody who asks now may start there.
cdef inline bint is_open(SchedulerState* s, uint32_t slot) noexcept nogil:
    return (not s.slots[slot].buried and not s.slots[slot].drained
            and not books_of(s).kept >> slot & 1)


# How many may run at once on a device slot, with one of this class among them. The extra
# sequences are for who is better than somebody that runs there: he need not wait until one
# of those ends, they step back for him. And for who is due, or the starts on extra
# sequences would come on top of those that the aged share lets go ahead of him.
cdef uint64_t sequence_limit(SchedulerState* s, uint32_t slot, uint32_t level,
                             bint is_aged) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef SlotAccount* account = &books.ledger.slots[slot]
    cdef uint32_t worse
    if s.slots[slot].limit:
        return min(<uint64_t> s.slots[slot].limit, account.num_sequences)
    if is_aged:
        return account.num_sequences + account.num_extra
    for worse in range(level + 1, books.backlog.num_levels):
        if books.running[slot][worse]:
            return account.num_sequences + account.num_extra
    return account.num_sequences


# Whether it can start there now: with a sequence and cells, beside what is held for another.
cdef bint has_room(SchedulerState* s, uint32_t slot, uint32_t index,
                   bint is_aged) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef SlotAccount* account = &books.ledger.slots[slot]
    cdef const Entry* entry = &s.table[index]
    cdef Passed* passed = holder_of(&model_queue(books, entry).backfill, slot)
    cdef const Entry* holder = NULL
    cdef uint64_t sequences = 1
    if passed != NULL and passed.index != index:
        holder = &s.table[passed.index]
        sequences += 1
    return (serves(s.slots[slot], entry) and is_open(s, slot)
            and account.num_running + sequences <= sequence_limit(s, slot, entry.level, is_aged)
            and has_cells(s, slot, entry, holder))


# Hold the device slot where it is nearest to fitting: with the most free cells, then the
# first. False: all that could take it are held.
cdef bint take_hold(SchedulerState* s, BackfillState* f, Passed* passed) noexcept nogil:
    cdef SlotAccount* slots = books_of(s).ledger.slots
    cdef uint32_t i
    for i in range(s.num_slots):
        if (not serves(s.slots[i], &s.table[passed.index]) or s.slots[i].drained
                or holder_of(f, i) != NULL):
            continue
        if passed.slot == NOWHERE or (headroom_of(&slots[i])
                                      > headroom_of(&slots[passed.slot])):
            passed.slot = i
    if passed.slot == NOWHERE:
        return False
    bump(&f.num_holds, 1)
    bump(&f.num_held, 1)
    return True


# Whether others may start ahead of one that does not fit now.
cdef bint may_be_passed(SchedulerState* s, BackfillState* f, uint32_t index,
                        int64_t now_ns) noexcept nogil:
    cdef Passed* passed = note_misfit(f, index, now_ns)
    if passed == NULL:
        return False
    return passed.slot != NOWHERE or not is_overdue(f, passed, now_ns) or take_hold(s, f, passed)


# A holder whose device slot has come free enough. It goes before all: what is kept for it is
# no use to anybody else.
cdef Choice choose_holder(SchedulerState* s, ModelQueue* queue, uint32_t* slot) noexcept nogil:
    cdef BackfillState* f = &queue.backfill
    cdef Choice choice
    cdef uint32_t i
    choice.index = NOWHERE
    choice.is_aged = False
    # Where it goes was chosen when it was held.
    books_of(s).placement.is_turn = False
    for i in range(f.num_passed):
        slot[0] = f.passed[i].slot
        if (slot[0] != NOWHERE and not is_at_cap(&queue.backlog, s.table[f.passed[i].index].lane)
                and has_room(s, slot[0], f.passed[i].index, False)):
            choice.index = f.passed[i].index
            break
    return choice


# The first of these lanes in order that fits somewhere, and where; those ahead are passed.
cdef Choice choose_fitting(SchedulerState* s, ModelQueue* queue, uint32_t lanes, int64_t now_ns,
                           uint32_t* slot) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef Aside[PASSED_MAX] asides
    cdef Choice choice
    cdef uint32_t i, num_aside = 0
    while True:
        choice = backlog_choose(&queue.backlog, lanes)
        if choice.index == NOWHERE:
            break
        bump(&books.num_decisions, 1)
        slot[0] = place(s, choice.index, choice.is_aged)
        if slot[0] != NOWHERE:
            break
        if num_aside == PASSED_MAX or (has_sequence_for(s, choice.index, choice.is_aged)
                                       and not may_be_passed(s, &queue.backfill, choice.index,
                                                             now_ns)):
            choice.index = NOWHERE
            break
        set_aside(&queue.backlog, choice.index, &asides[num_aside])
        num_aside += 1
    for i in range(num_aside):
        put_back(&queue.backlog, &asides[num_aside - 1 - i])
    if choice.index != NOWHERE:
        for i in range(num_aside):
            count_pass(s, &queue.backfill, asides[i].index, slot[0])
    return choice


# Somebody starts at a device slot ahead of this one; no matter where it could not run.
cdef void count_pass(SchedulerState* s, BackfillState* f, uint32_t index,
                     uint32_t slot) noexcept nogil:
    cdef Passed* passed = passed_of(f, index)
    if passed != NULL and serves(s.slots[slot], &s.table[index]):
        passed.num_passes += 1
        bump(&f.num_passes, 1)


cdef inline bint has_sequence(SchedulerState* s, uint32_t slot, uint32_t level,
                              bint is_aged) noexcept nogil:
    return (is_open(s, slot)
            and books_of(s).ledger.slots[slot].num_running
            < sequence_limit(s, slot, level, is_aged))


# The lanes of a model that anybody could start of, as bits: a device slot without a sequence
# for the best class that waits for it is no use to anybody, and nobody is passed for it,
# because all wait for the same thing.
cdef inline uint32_t lanes_with_sequence(SchedulerState* s, ModelQueue* queue,
                                         uint32_t model) noexcept nogil:
    cdef uint32_t i, level, lanes = 0
    if queue.backlog.num_waiting == 0:
        return 0
    for i in range(s.num_slots):
        if s.slots[i].model != model or not s.slots[i].lanes_served & ~lanes:
            continue
        level = best_waiting(&queue.backlog, s.slots[i].lanes_served)
        if level != NOWHERE and has_sequence(s, i, level, False):
            lanes |= s.slots[i].lanes_served
    return lanes


# Whether it is for want of cells that it does not start: if not, nothing need be held.
cdef bint has_sequence_for(SchedulerState* s, uint32_t index, bint is_aged) noexcept nogil:
    cdef uint32_t i
    for i in range(s.num_slots):
        if has_sequence(s, i, s.table[index].level, is_aged) and serves(s.slots[i], &s.table[index]):
            return True
    return False


# --- starting and finishing -------------------------------------------------------------

# A fresh attempt with its out-buffer and room for so many tokens behind it, or NULL for want of
# memory.
cdef Attempt* attempt_new(uint64_t out_buffer_bytes, uint32_t num_tokens) noexcept nogil:
    cdef size_t made_bytes = (num_tokens * sizeof(int32_t) + LINE_BYTES - 1) & ~<size_t> (LINE_BYTES - 1)
    cdef Attempt* attempt = <Attempt*> aligned_alloc(
        LINE_BYTES, sizeof(Attempt) + out_buffer_bytes + made_bytes)
    if attempt != NULL:
        # Not what is behind it: that is read only where it was written.
        memset(attempt, 0, sizeof(Attempt))
        attempt.out.bytes = <char*> (attempt + 1)
        attempt.out.capacity = out_buffer_bytes
        attempt.made = <int32_t*> (attempt.out.bytes + out_buffer_bytes)
        attempt.made_max = num_tokens
    return attempt


# Promise a device slot's cells to an attempt, and fill in what its worker reads of it.
cdef void bind(SchedulerState* s, Attempt* attempt, uint32_t index, uint32_t slot,
               int64_t now_ns) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef Entry* entry = &s.table[index]
    attempt.reserved = first_promise(s.slots[slot], entry)
    attempt.used = min(entry.num_prompt_tokens, attempt.reserved)
    ledger_reserve(&books.ledger, slot, entry.key, attempt.reserved)
    ledger_use(&books.ledger, slot, attempt.used)
    take_turn(s, slot)
    standing_start(&books.placement, slot, entry)
    entry.epoch += 1
    attempt.handle = <uint64_t> entry.generation << 32 | index
    attempt.epoch = entry.epoch
    attempt.slot = slot
    attempt.started_ns = now_ns
    attempt.queue_ns = now_ns - entry.arrival_ns
    attempt.work = entry.work
    attempt.stop_ns = entry.stop_ns
    attempt.key = entry.key
    attempt.num_prompt_tokens = entry.num_prompt_tokens
    attempt.max_tokens = entry.max_tokens
    attempt.footprint_tokens = entry.footprint_tokens
    attempt.level = entry.level
    attempt.granted = attempt.reserved
    attempt.order = books.num_started
    books.num_started += 1
    expect(&books.lengths, s.slots[slot], attempt)
    growth_add(&books.growths[slot], attempt)
    entry.attempt = attempt
    store_relaxed32(&entry.state, RUNNING)
    bump(&books.num_running, 1)
    books.running[slot][entry.level] += 1
    bump(&books.lanes[entry.lane].num_running, 1)


# Its worker may have it.
cdef void dispatch(SchedulerState* s, Attempt* attempt) noexcept nogil:
    # Cannot be full of a worker that takes before it finishes: as many places as sequences,
    # and the ledger counted this one.
    if not ring_try_push(&s.slots[attempt.slot].dispatch, <uint64_t> <size_t> attempt):
        bump(&books_of(s).num_broken, 1)
    s.slots[attempt.slot].has_news = True


cdef bint start(SchedulerState* s, Choice choice, uint32_t slot, int64_t now_ns) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef Entry* entry = &s.table[choice.index]
    cdef LevelBook* book = &books.levels[entry.level]
    cdef ModelQueue* queue = model_queue(books, entry)
    cdef Attempt* attempt = attempt_new(s.out_buffer_bytes,
                                        min(entry.max_tokens, entry.footprint_tokens))
    if attempt == NULL:
        return False
    attempt.key_units = backlog_take(&queue.backlog, choice)
    leave_backlog(s, choice.index, now_ns)
    bind(s, attempt, choice.index, slot, now_ns)
    bump(&book.num_started, 1)
    bump(&book.num_aged_starts, choice.is_aged)
    bump(&book.wait_ns_sum, max(<int64_t> 0, attempt.queue_ns))
    bump(&queue_book(queue, entry).num_started, 1)
    bump(&queue_book(queue, entry).wait_ns_sum, max(<int64_t> 0, attempt.queue_ns))
    bump(&books.lanes[entry.lane].num_started, 1)
    tell_loop(s, OP_STARTED, choice.index)
    dispatch(s, attempt)
    return True


# The last of an attempt: give back what it held, correct what its key was charged to what it
# cost, and hand the entry to the loop, which lets one that is lost go on if another device slot
# could have it.
cdef void settle(SchedulerState* s, uint32_t index, bint is_lost) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef Entry* entry = &s.table[index]
    cdef Attempt* attempt = entry.attempt
    cdef int64_t cost = 0
    cdef uint32_t num_prompt = entry.num_prompt_tokens - attempt.num_given
    cdef int rc
    growth_remove(&books.growths[attempt.slot], attempt)
    if is_lost:
        # A worker that may still write: its figures are not ours to read.
        rc = ledger_release(&books.ledger, attempt.slot, entry.key, attempt.reserved,
                            attempt.used)
    else:
        cost = <int64_t> num_prompt + 2 * <int64_t> attempt.num_completion_tokens
        rc = ledger_settle(&books.ledger, attempt.slot, entry.key, attempt.reserved,
                           attempt.used, num_prompt, attempt.num_completion_tokens)
        # Relaxed: the feedback ring has brought it.
        if load_relaxed32(&attempt.finish) in (FINISH_STOP, FINISH_LENGTH):
            note_length(&books.lengths, entry.key, entry.model, attempt.num_completion_tokens)
    if rc != LEDGER_OK:
        bump(&books.num_broken, 1)
    standing_end(&books.placement, attempt, entry, is_lost)
    backlog_settle(&model_queue(books, entry).backlog, entry, cost, attempt.key_units)
    bump(&books.num_running, -1)
    books.running[attempt.slot][entry.level] -= 1
    bump(&books.lanes[entry.lane].num_running, -1)
    store_relaxed32(&entry.state, FREE)
    bump(&books.failover.num_lost, is_lost)
    tell_loop(s, OP_LOST if is_lost and may_go_on(s, entry) else OP_SETTLED, index)


# --- the parts of a round ---------------------------------------------------------------

cdef void take_feedback_of(SchedulerState* s, DeviceSlot* slot) noexcept nogil:
    cdef uint64_t cell
    cdef Entry* entry
    while ring_try_pop(&slot.feedback, &cell):
        entry = &s.table[index_of(cell)]
        if entry.state != RUNNING or entry.generation != generation_of(cell):
            bump(&books_of(s).num_broken, 1)
            continue
        settle(s, index_of(cell), False)


cdef void take_feedback(SchedulerState* s) noexcept nogil:
    cdef uint32_t i
    for i in range(s.num_slots):
        if not s.slots[i].buried:
            take_feedback_of(s, s.slots[i])


# Notice the device slots that were reported dead since. What they finished before counts;
# after this their feedback is not read any more, and the sweep ends what they ran.
cdef void bury(SchedulerState* s) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef uint32_t i
    for i in range(s.num_slots):
        # Acquire: pairs with the release in report_dead.
        if s.slots[i].buried or not load_acquire32(&s.slots[i].dead):
            continue
        take_feedback_of(s, s.slots[i])
        if not s.slots[i].drained:
            set_drained(s, s.slots[i], True)
        s.slots[i].buried = True
        share_lanes(s, s.slots[i].model)
        books.sweep_next = 0


# What it counts for in the share of its lane, from now on until it is settled: what it will
# probably hold in the end.
cdef uint32_t expected_share(SchedulerState* s, const Entry* entry) noexcept nogil:
    cdef uint32_t i
    for i in range(s.num_slots):
        if serves(s.slots[i], entry) and s.slots[i].kv_block:
            return expected_end_of(&books_of(s).lengths, s.slots[i], entry)
    return entry.footprint_tokens


cdef void enqueue(SchedulerState* s, uint32_t index) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef Entry* entry = &s.table[index]
    cdef LevelBook* book = &books.levels[entry.level]
    cdef ModelQueue* queue = model_queue(books, entry)
    entry.epoch = 0
    entry.share_tokens = expected_share(s, entry)
    entry.rank = queue_join(queue_book(queue, entry))
    bump(&book.num_enqueued, 1)
    bump(&book.num_waiting, 1)
    bump(&books.lanes[entry.lane].num_waiting, 1)
    backlog_push(&queue.backlog, index)
    if entry.expire_ns:
        # Cannot fail: the heap is as large as the table.
        heap_push(&books.expiry, s.table, index, entry.expire_ns)
    # Release: pairs with the acquire in Scheduler.position; the rank.
    store_release32(&entry.state, WAITING)
    if not is_servable(s, entry):
        end_waiting(s, index, OP_NO_DEVICE, entry.arrival_ns)


cdef void cancel_one(SchedulerState* s, uint32_t index, int64_t now_ns) noexcept nogil:
    cdef Entry* entry = &s.table[index]
    if entry.state == WAITING:
        end_waiting(s, index, OP_CANCELLED, now_ns)
    elif entry.state == AGAIN:
        end_again(s, index, FINISH_CANCELLED)
    elif entry.state == RUNNING:
        # Its worker looks at the flag between steps, but may sleep: all its sequences
        # may be waiting for room in their out-buffers.
        s.slots[entry.attempt.slot].has_news = True
    # Else it has ended since. The message cannot mean a later request in the same entry:
    # that one's OP_SUBMIT would have come after it.


# The youngest of the lowest class below this one over all models, or NOWHERE.
cdef uint32_t last_of_all_below(SchedulerState* s, uint32_t level) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef uint32_t i, candidate, last = NOWHERE
    for i in range(books.num_models):
        candidate = (NOWHERE if books.models[i] == NULL
                     else last_below(&books.models[i].backlog, level))
        if candidate == NOWHERE:
            continue
        if (last == NOWHERE or s.table[candidate].level > s.table[last].level
                or (s.table[candidate].level == s.table[last].level
                    and s.table[candidate].arrival_no > s.table[last].arrival_no)):
            last = candidate
    return last


# Make room for one of this class, or send the wish back.
cdef void evict_below(SchedulerState* s, uint32_t level, int64_t now_ns) noexcept nogil:
    cdef uint32_t index = last_of_all_below(s, level)
    if index != NOWHERE:
        end_waiting(s, index, OP_EVICTED, now_ns)
        return
    # Cannot be full: see state_init.
    ring_try_push(&s.events, message(OP_EVICT, level))
    books_of(s).has_told_loop = True


# True: there was more.
cdef bint take_submitted(SchedulerState* s, int64_t now_ns) noexcept nogil:
    cdef uint64_t cell
    cdef int n
    for n in range(SUBMITS_PER_ROUND):
        if not ring_try_pop(&s.submit, &cell):
            return False
        if op_of(cell) == OP_SUBMIT:
            enqueue(s, index_of(cell))
        elif op_of(cell) == OP_EVICT:
            evict_below(s, index_of(cell), now_ns)
        elif op_of(cell) == OP_AGAIN:
            requeue(s, index_of(cell))
        else:
            cancel_one(s, index_of(cell), now_ns)
    return ring_size(&s.submit) != 0


# After a death: end what it ran, and what waits for nobody. True: there is more.
cdef bint sweep(SchedulerState* s, int64_t now_ns) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef uint32_t end = <uint32_t> min(<uint64_t> books.sweep_next + SWEPT_PER_ROUND,
                                       <uint64_t> s.capacity)
    cdef Entry* entry
    while books.sweep_next < end:
        entry = &s.table[books.sweep_next]
        if entry.state == RUNNING and s.slots[entry.attempt.slot].buried:
            settle(s, books.sweep_next, True)
        elif entry.state == WAITING and not is_servable(s, entry):
            end_waiting(s, books.sweep_next, OP_NO_DEVICE, now_ns)
        elif entry.state == AGAIN and not is_servable(s, entry):
            end_again(s, books.sweep_next, FINISH_DEVICE)
        books.sweep_next += 1
    return books.sweep_next < s.capacity


# True: there was more.
cdef bint expire(SchedulerState* s, int64_t now_ns) noexcept nogil:
    cdef TimeHeap* expiry = &books_of(s).expiry
    cdef ModelQueue* queue
    cdef uint32_t index
    cdef int n
    for n in range(EXPIRIES_PER_ROUND):
        if expiry.size == 0 or expiry.nodes[0].time > now_ns:
            return False
        index = expiry.nodes[0].index
        if s.table[index].state == AGAIN:
            end_again(s, index, FINISH_TIMEOUT)
            continue
        # Who has a record had a sequence and did not fit.
        queue = model_queue(books_of(s), &s.table[index])
        end_waiting(s, index, OP_EXPIRED if passed_of(&queue.backfill, index) == NULL
                    else OP_NO_KV, now_ns)
    return expiry.size != 0 and expiry.nodes[0].time <= now_ns


# Start what fits of a model, in order. True: there was more.
cdef bint start_waiting_for(SchedulerState* s, uint32_t model, int num_max,
                            int64_t now_ns) noexcept nogil:
    cdef ModelQueue* queue = books_of(s).models[model]
    cdef Choice choice
    cdef uint32_t slot, lanes
    cdef int n
    for n in range(num_max):
        lanes = lanes_with_sequence(s, queue, model)
        if lanes == 0:
            return False
        choice = choose_holder(s, queue, &slot)
        if choice.index == NOWHERE:
            choice = choose_fitting(s, queue, lanes, now_ns, &slot)
        if choice.index == NOWHERE:
            return False
        if not start(s, choice, slot, now_ns):
            return False
    return True


# The same for every model, none of which keeps another from its turn. True: there was more.
cdef bint start_waiting(SchedulerState* s, int64_t now_ns) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef int num_max = STARTS_PER_ROUND // <int> books.num_models
    cdef bint has_more = False
    cdef uint32_t model
    for model in range(books.num_models):
        if books.models[model] != NULL:
            restart_waiting(s, books.models[model], now_ns)
            has_more |= start_waiting_for(s, model, num_max, now_ns)
            books.kept = 0
    return has_more


# --- what others read -------------------------------------------------------------------

# The oldest of a class over all models, or NOWHERE.
cdef uint32_t oldest_of_all(SchedulerState* s, uint32_t level) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef uint32_t i, candidate, oldest = oldest_of(books.backlog, level, ALL_LANES)
    for i in range(1, books.num_models):
        candidate = (NOWHERE if books.models[i] == NULL
                     else oldest_of(&books.models[i].backlog, level, ALL_LANES))
        if candidate != NOWHERE and (oldest == NOWHERE or s.table[candidate].arrival_no
                                     < s.table[oldest].arrival_no):
            oldest = candidate
    return oldest


cdef void note_queues(ModelQueue* queue, int64_t passed_ns) noexcept nogil:
    cdef uint32_t level, lane
    for lane in range(queue.backlog.num_lanes):
        for level in range(queue.backlog.num_levels):
            note_queue(&queue.queues[lane * MAX_LEVELS + level], passed_ns)


cdef void publish(SchedulerState* s, int64_t now_ns) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef uint32_t level, oldest
    cdef int64_t passed_ns = now_ns - books.last_round_ns
    cdef uint64_t num_started = 0, num_waiting = 0
    cdef uint32_t model
    cdef LevelBook* book
    for level in range(books.backlog.num_levels):
        book = &books.levels[level]
        note_drain(&book.drain, book.num_started, book.num_waiting, passed_ns)
        num_started += book.num_started
        num_waiting += book.num_waiting
        oldest = oldest_of_all(s, level)
        store_relaxed(&books.levels[level].oldest_arrival_ns,
                      0 if oldest == NOWHERE else <uint64_t> s.table[oldest].arrival_ns)
    for model in range(books.num_models):
        if books.models[model] != NULL:
            note_queues(books.models[model], passed_ns)
    lanes_follow(s, now_ns)
    note_drain(&books.drain, num_started, num_waiting, passed_ns)
    books.last_round_ns = now_ns
    bump(&books.num_rounds, 1)


# One wake per sleeper and round, after everything is pushed.
cdef void wake_others(SchedulerState* s) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef uint32_t i
    for i in range(s.num_slots):
        if s.slots[i].has_news:
            s.slots[i].has_news = False
            wake(&s.slots[i].waker)
    if books.has_told_loop:
        books.has_told_loop = False
        wake(&s.loop_waker)


cdef int64_t scheduler_round(SchedulerState* s, int64_t now_ns) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef int64_t watch_due_ns
    cdef bint has_more
    adopt(s)
    bury(s)
    has_more = take_submitted(s, now_ns)
    take_feedback(s)
    heed(s)
    has_more |= sweep(s, now_ns)
    has_more |= expire(s, now_ns)
    tend_promises(s)
    has_more |= start_waiting(s, now_ns)
    publish(s, now_ns)
    watch_due_ns = watch(s, now_ns)
    wake_others(s)
    if has_more or watch_due_ns == now_ns:
        return now_ns
    if books.expiry.size and (watch_due_ns < 0 or books.expiry.nodes[0].time < watch_due_ns):
        return books.expiry.nodes[0].time
    return watch_due_ns
