# Failover: how a dead device slot is found, and how what it ran goes on elsewhere.
#
# A device slot is dead when somebody says so: ggml's abort callback in its worker, the worker
# itself when llama_decode keeps failing, or watch() here, when a step does not end. There is no
# way back, and its worker may be anywhere: parked for good, or hanging and about to wake up.
#
#     scheduler   bury    what it finished before counts; nothing of it is read after that
#                 sweep   what it ran is found in the table, not in its rings; each gives back
#                         what it held and is the loop's, with OP_LOST
#     loop        take_back    reads what came out of the attempt once more, and cuts it: from here
#                         on nobody looks at it, whoever writes into it. Then OP_AGAIN, with the
#                         tokens made so far as part of the prompt
#     scheduler   requeue, restart    it goes before all that wait for its model. Its next attempt
#                         begins with the tokens of the lost one
#     worker      brings sampler, grammar and text to where they were, and leaves out what was
#                 told (engine/again.pxi)
#
# So the cut is one moment, and of the one thread that has told the client what it has: nothing
# is told twice, and nothing is left out. A worker that wakes up late finds its own attempt, its
# rings and its request's options where they were: those are never freed. There are no more of
# them than the device slot ran.
#
# Who goes on stands in a list of its own, by class and arrival: it is charged for no place, is
# not evicted, does not expire (but for its own time limit). A device slot that one of them could
# have is kept for them: nobody else starts there before they do.
#
# The heartbeat is one word: when the step that is under way began. It is looked at once in the
# time that a step may take, so it costs a worker's cache line nothing.
#
# A request that was there each time is not let loose on all of them: after ATTEMPTS_MAX it ends.
#
# Owner: the scheduler's thread. Counters are atomics with one writer.

cdef enum:
    ATTEMPTS_MAX = 3

# Who goes on, in order.
cdef struct AgainList:
    uint32_t* indices
    uint32_t num
    uint32_t capacity

# All atomic.
cdef struct FailoverBook:
    uint64_t num_lost           # attempts that ended with their device slot
    uint64_t num_restarted      # of these, gone on elsewhere
    uint64_t num_again          # waiting for that now
    uint64_t num_stalled        # device slots of which a step did not end


cdef int again_init(AgainList* again, uint32_t capacity) noexcept nogil:
    # Untouched memory until somebody dies.
    again.indices = <uint32_t*> calloc(capacity, sizeof(uint32_t))
    again.num = 0
    again.capacity = capacity
    return 0 if again.indices != NULL else -1


cdef void again_free(AgainList* again) noexcept nogil:
    free(again.indices)
    again.indices = NULL


cdef void again_insert(AgainList* again, const Entry* table, uint32_t index) noexcept nogil:
    cdef uint32_t place = again.num
    cdef const Entry* entry = &table[index]
    cdef const Entry* other
    while place:
        other = &table[again.indices[place - 1]]
        if other.level < entry.level or (other.level == entry.level
                                         and other.arrival_no < entry.arrival_no):
            break
        again.indices[place] = again.indices[place - 1]
        place -= 1
    again.indices[place] = index
    again.num += 1


cdef void again_remove_at(AgainList* again, uint32_t place) noexcept nogil:
    again.num -= 1
    memmove(&again.indices[place], &again.indices[place + 1],
            (again.num - place) * sizeof(uint32_t))


# Whether one that is lost may go on, as far as can be seen.
cdef inline bint may_go_on(SchedulerState* s, const Entry* entry) noexcept nogil:
    return entry.epoch < ATTEMPTS_MAX and is_servable(s, entry)


# --- waiting to go on -------------------------------------------------------------------

# It is over before it could go on; its last attempt is cut, so this is what is told of its end.
cdef void end_cut(SchedulerState* s, uint32_t index, uint32_t finish) noexcept nogil:
    s.table[index].attempt.ended_as = finish
    # Before the event: from then on the entry is the loop's.
    store_relaxed32(&s.table[index].state, FREE)
    tell_loop(s, OP_SETTLED, index)


cdef void leave_again(SchedulerState* s, uint32_t index, uint32_t place) noexcept nogil:
    cdef Books* books = books_of(s)
    again_remove_at(&model_queue(books, &s.table[index]).again, place)
    if books.expiry.places[index] != NOWHERE:
        heap_remove(&books.expiry, s.table, index)
    bump(&books.failover.num_again, -1)


cdef void end_again(SchedulerState* s, uint32_t index, uint32_t finish) noexcept nogil:
    cdef AgainList* again = &model_queue(books_of(s), &s.table[index]).again
    cdef uint32_t place = 0
    while again.indices[place] != index:
        place += 1
    leave_again(s, index, place)
    end_cut(s, index, finish)


# One that was lost comes back, cut.
cdef void requeue(SchedulerState* s, uint32_t index) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef Entry* entry = &s.table[index]
    if not is_servable(s, entry):
        # Another one has died meanwhile.
        end_cut(s, index, FINISH_DEVICE)
        return
    again_insert(&model_queue(books, entry).again, s.table, index)
    if entry.stop_ns:
        # Cannot fail: the heap is as large as the table.
        heap_push(&books.expiry, s.table, index, entry.stop_ns)
    bump(&books.failover.num_again, 1)
    store_relaxed32(&entry.state, AGAIN)


# --- going on ---------------------------------------------------------------------------

cdef bint restart(SchedulerState* s, uint32_t index, uint32_t slot, int64_t now_ns) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef Entry* entry = &s.table[index]
    cdef Attempt* earlier = entry.attempt
    cdef Attempt* attempt = attempt_new(s.out_buffer_bytes, earlier.num_cut
                                        + min(entry.max_tokens, entry.footprint_tokens))
    if attempt == NULL:
        return False
    attempt.key_units = backlog_run(&model_queue(books, entry).backlog, entry)
    bind(s, attempt, index, slot, now_ns)
    # To its client it has run all the time.
    attempt.started_ns = earlier.started_ns
    attempt.queue_ns = earlier.queue_ns
    attempt.earlier = earlier
    attempt.num_given = attempt.num_made = earlier.num_cut
    memcpy(attempt.made, earlier.made, earlier.num_cut * sizeof(int32_t))
    if earlier.num_cut:
        # Written before the first token was, and never again: no late worker is in the way.
        attempt.assigned_ns = earlier.assigned_ns
        attempt.prefill_done_ns = earlier.prefill_done_ns
        attempt.first_token_ns = earlier.first_token_ns
        attempt.num_cached_tokens = earlier.num_cached_tokens
    attempt.told_started = True
    attempt.num_tokens_told = earlier.num_tokens_told
    attempt.num_bytes_told = earlier.num_bytes_told
    attempt.num_logprobs_told = earlier.num_logprobs_told
    bump(&books.failover.num_restarted, 1)
    dispatch(s, attempt)
    return True


# The device slots that could ever have it, as bits.
cdef uint64_t serving(SchedulerState* s, const Entry* entry) noexcept nogil:
    cdef uint64_t slots = 0
    cdef uint32_t i
    for i in range(s.num_slots):
        if serves(s.slots[i], entry):
            slots |= <uint64_t> 1 << i
    return slots


# Let go on who can, in order, and keep for the others what they could have.
cdef void restart_waiting(SchedulerState* s, ModelQueue* queue, int64_t now_ns) noexcept nogil:
    cdef AgainList* again = &queue.again
    cdef uint64_t kept = 0
    cdef uint32_t index, slot, place_no = 0
    while place_no < again.num:
        index = again.indices[place_no]
        slot = NOWHERE
        if is_at_cap(&queue.backlog, s.table[index].lane):
            # Of its lane nobody starts, and it keeps nothing from the others.
            place_no += 1
            continue
        slot = place(s, index, False)
        if slot == NOWHERE or not restart(s, index, slot, now_ns):
            kept |= serving(s, &s.table[index])
            place_no += 1
            continue
        leave_again(s, index, place_no)
    books_of(s).kept = kept


# --- the watchdog -----------------------------------------------------------------------

# Declare those dead of which a step has not ended in its time. The next time at which one
# could be: now_ns when one was found, -1 for never.
cdef int64_t watch(SchedulerState* s, int64_t now_ns) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef DeviceSlot* slot
    cdef int64_t stall_ns, began_ns, due_ns = -1
    cdef uint32_t i
    for i in range(s.num_slots):
        slot = s.slots[i]
        stall_ns = <int64_t> load_relaxed(&slot.stall_ns)
        if stall_ns == 0 or slot.buried or books.ledger.slots[i].num_running == 0:
            continue
        if now_ns >= slot.watch_ns:
            # Relaxed: one word, and nothing is read because of it.
            began_ns = <int64_t> load_relaxed(&slot.step_began_ns)
            if began_ns and now_ns - began_ns >= stall_ns:
                store_relaxed32(&slot.is_stalled, 1)
                bump(&books.failover.num_stalled, 1)
                report_dead(s, i)
                return now_ns
            # A step that begins later is due later.
            slot.watch_ns = (began_ns if began_ns else now_ns) + stall_ns
        if due_ns < 0 or slot.watch_ns < due_ns:
            due_ns = slot.watch_ns
    return due_ns


cdef dict failover_figures(FailoverBook* book):
    return {
        "num_lost": load_relaxed(&book.num_lost),
        "num_restarted": load_relaxed(&book.num_restarted),
        "num_again": load_relaxed(&book.num_again),
        "num_stalled": load_relaxed(&book.num_stalled),
    }
