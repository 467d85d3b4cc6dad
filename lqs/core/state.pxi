# How the scheduler's state begins and ends, and its figures for Python.

cdef int state_init(SchedulerState* s, uint32_t capacity) noexcept nogil:
    s.capacity = capacity
    s.table = <Entry*> new_lines(capacity * sizeof(Entry))
    # An entry has one OP_SUBMIT and one OP_CANCEL under way, and an OP_CANCEL of its life
    # before; towards the loop OP_STARTED and OP_SETTLED. An OP_EVICT belongs to no entry:
    # there are EVICTIONS_MAX at most, each in one of the two rings.
    if (s.table == NULL or ring_init(&s.submit, 3 * <uint64_t> capacity + EVICTIONS_MAX)
            or ring_init(&s.events, 2 * <uint64_t> capacity + EVICTIONS_MAX)):
        return -1
    if waker_init(&s.waker) or waker_init(&s.loop_waker):
        return -1
    # The loop does not doze by itself: it counts as asleep from the start.
    s.loop_waker.signalled = ASLEEP
    return 0


cdef int models_init(Books* books, SchedulerState* s, uint32_t num_lanes, uint32_t num_levels,
                     uint32_t num_keys) noexcept nogil:
    books.models[0] = <ModelQueue*> calloc(1, sizeof(ModelQueue))
    books.num_models = 1
    if books.models[0] == NULL or again_init(&books.models[0].again, s.capacity):
        return -1
    books.backlog = &books.models[0].backlog
    return backlog_init(books.backlog, s.table, s.capacity, num_lanes, num_levels, num_keys, NULL)


# A queue for a model that gets its first device slot; the rules are the first one's.
cdef int model_init(Books* books, uint32_t model, uint32_t capacity) noexcept nogil:
    cdef ModelQueue* queue = books.models[model]
    if queue != NULL:
        return 0
    queue = <ModelQueue*> calloc(1, sizeof(ModelQueue))
    if queue == NULL:
        return -1
    if backlog_init_like(&queue.backlog, books.backlog):
        backlog_free(&queue.backlog)
        free(queue)
        return -1
    queue.backfill.bypass_max = books.models[0].backfill.bypass_max
    queue.backfill.bypass_ns = books.models[0].backfill.bypass_ns
    if again_init(&queue.again, capacity):
        backlog_free(&queue.backlog)
        free(queue)
        return -1
    books.models[model] = queue
    books.num_models = max(books.num_models, model + 1)
    return 0


cdef int books_init(Books* books, SchedulerState* s, uint32_t num_lanes, uint32_t num_levels,
                    uint32_t num_keys) noexcept nogil:
    books.sweep_next = s.capacity
    books.growths = <Growth*> calloc(MAX_DEVICE_SLOTS, sizeof(Growth))
    books.expiry.capacity_min = s.capacity
    books.expiry.places = new_places(s.capacity)
    if (books.expiry.places == NULL or books.growths == NULL or lengths_init(&books.lengths)
            or models_init(books, s, num_lanes, num_levels, num_keys)
            or ledger_init(&books.ledger, MAX_DEVICE_SLOTS, num_keys)):
        return -1
    return 0 if heap_resize(&books.expiry, s.capacity) else -1


cdef void slot_free(DeviceSlot* slot) noexcept nogil:
    ring_free(&slot.dispatch)
    ring_free(&slot.feedback)
    ring_free(&slot.events)
    waker_free(&slot.waker)
    free(slot)


cdef void state_free(SchedulerState* s) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef uint32_t i
    for i in range(s.num_added):
        slot_free(s.slots[i])
    if books != NULL:
        for i in range(s.num_added):
            growth_free(&books.growths[i])
        free(books.growths)
        lengths_free(&books.lengths)
        for i in range(books.num_models):
            # The first one lends to the others.
            if books.models[books.num_models - 1 - i] != NULL:
                backlog_free(&books.models[books.num_models - 1 - i].backlog)
                again_free(&books.models[books.num_models - 1 - i].again)
                free(books.models[books.num_models - 1 - i])
        ledger_free(&books.ledger)
        free(books.expiry.memory)
        free(books.expiry.places)
        free(books)
    ring_free(&s.submit)
    ring_free(&s.events)
    waker_free(&s.waker)
    waker_free(&s.loop_waker)
    free(s.table)
    free(s)


# --- figures ----------------------------------------------------------------------------

cdef tuple ring_figures(Ring* ring):
    return ring_size(ring), ring.capacity


# Of one model, whatever the class and the lane.
cdef uint64_t num_waiting_for(Books* books, uint32_t model) noexcept nogil:
    cdef uint64_t num_waiting = 0
    cdef uint32_t i, k
    for i in range(books.backlog.num_lanes):
        for k in range(books.backlog.num_levels):
            num_waiting += load_relaxed(&books.models[model].queues[i * MAX_LEVELS + k].num_waiting)
    return num_waiting


# The acquire comes first: who sees that a device slot is drained sees all that it started.
cdef dict device_figures(SchedulerState* s, uint32_t i):
    cdef Books* books = books_of(s)
    cdef bint is_drained = load_acquire32(&s.slots[i].drained) != 0
    return {
        **slot_figures(&books.ledger.slots[i]),
        **growth_figures(&books.growths[i]),
        "model": s.slots[i].model,
        "num_extra": books.ledger.slots[i].num_extra,
        "is_dead": bool(is_dead(s, i)),
        "is_stalled": bool(load_relaxed32(&s.slots[i].is_stalled)),
        "is_drained": is_drained,
        "headroom": headroom_seen(&books.ledger.slots[i]),
        "lanes": load_relaxed32(&s.slots[i].lanes_served) & ((1U << books.backlog.num_lanes) - 1),
        "weight": load_relaxed32(&s.slots[i].wants_weight) / <double> WEIGHT_UNIT,
        "step_ns": load_relaxed(&books.placement.slots[i].step_ns),
        "use_percent": load_relaxed32(&s.slots[i].use_percent),
        # Of its model, whichever device slot will have them.
        "num_waiting": num_waiting_for(books, s.slots[i].model),
    }


# Of all models together.
cdef dict backfill_figures(Books* books):
    cdef uint64_t num_passes = 0, num_holds = 0, num_held = 0
    cdef BackfillState* f
    cdef uint32_t i
    for i in range(books.num_models):
        if books.models[i] != NULL:
            f = &books.models[i].backfill
            num_passes += load_relaxed(&f.num_passes)
            num_holds += load_relaxed(&f.num_holds)
            num_held += load_relaxed(&f.num_held)
    return {"num_passes": num_passes, "num_holds": num_holds, "num_holding": num_held}


cdef dict lane_figures(LaneBook* book):
    return {
        "num_waiting": load_relaxed(&book.num_waiting),
        "num_running": load_relaxed(&book.num_running),
        "num_started": load_relaxed(&book.num_started),
    }


# One class of one lane, of all models together.
cdef dict queue_figures(Books* books, uint32_t place):
    cdef uint64_t num_waiting = 0, num_started = 0, wait_ns_sum = 0, per_gs = 0
    cdef QueueBook* queue
    cdef uint32_t i
    for i in range(books.num_models):
        if books.models[i] != NULL:
            queue = &books.models[i].queues[place]
            num_waiting += load_relaxed(&queue.num_waiting)
            num_started += load_relaxed(&queue.num_started)
            wait_ns_sum += load_relaxed(&queue.wait_ns_sum)
            per_gs += load_relaxed(&queue.drain.per_gs)
    return {
        "num_waiting": num_waiting,
        "num_started": num_started,
        "wait_ns_sum": wait_ns_sum,
        "drain_rate": per_gs / 1e9,
    }


cdef dict level_figures(LevelBook* book, Permit* permit):
    return {
        "num_entered": load_relaxed(&permit.taken),
        "num_waiting": load_relaxed(&book.num_waiting),
        "num_enqueued": load_relaxed(&book.num_enqueued),
        "num_started": load_relaxed(&book.num_started),
        "num_expired": load_relaxed(&book.num_expired),
        "num_cancelled": load_relaxed(&book.num_cancelled),
        "num_no_device": load_relaxed(&book.num_no_device),
        "num_evicted": load_relaxed(&book.num_evicted),
        "num_promoted": load_relaxed(&book.num_promoted),
        "num_aged_starts": load_relaxed(&book.num_aged_starts),
        "wait_ns_sum": load_relaxed(&book.wait_ns_sum),
        "oldest_arrival_ns": load_relaxed(&book.oldest_arrival_ns),
        "drain_rate": load_relaxed(&book.drain.per_gs) / 1e9,
    }


# All counters, each exact, not all of one moment.
cdef dict core_figures(SchedulerState* s):
    cdef Books* books = books_of(s)
    cdef uint32_t i, k
    return {
        "levels": [level_figures(&books.levels[i], &books.permits[i])
                   for i in range(books.backlog.num_levels)],
        "slots": [device_figures(s, i) for i in range(s.num_added)],
        "lanes": [{**lane_figures(&books.lanes[i]),
                   "share": books.backlog.lane_weights[i] / books.backlog.lane_weight_sum}
                  for i in range(books.backlog.num_lanes)],
        # By lane, then by class.
        "queues": [[queue_figures(books, i * MAX_LEVELS + k)
                    for k in range(books.backlog.num_levels)]
                   for i in range(books.backlog.num_lanes)],
        "border_tokens": load_relaxed(&books.shares.border_tokens),
        **backfill_figures(books),
        # By name: what lies in it, and what fits. Nobody reads that of a dead one any more.
        "rings": {"submit": ring_figures(&s.submit),
                  "events": ring_figures(&s.events),
                  **{f"events_{i}": ring_figures(&s.slots[i].events)
                     for i in range(s.num_added) if not load_relaxed32(&s.slots[i].dead)}},
        "num_entered": load_relaxed(&books.total.taken),
        "num_running": load_relaxed(&books.num_running),
        **failover_figures(&books.failover),
        "num_decisions": load_relaxed(&books.num_decisions),
        "num_rounds": load_relaxed(&books.num_rounds),
        "num_broken": load_relaxed(&books.num_broken),
    }
