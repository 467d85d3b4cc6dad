# The event loop's side of the scheduler, and the one place where Python objects are held.
#
# The loop owns the free entries. It fills one and submits it; from then on the entry is
# the scheduler's and the worker's, until poll() has told OP_SETTLED (or one of the ends in
# the queue, which settle too). Only then is it free again, under the next generation, so
# that an old handle names nothing.
#
# Owner: the event loop's thread, under the GIL, but for what says otherwise.

class TableFull(Exception):
    """Every entry of the request table is taken; come back later."""


cdef class Work:
    """What a worker needs to know about one request."""


@cython.final
cdef class Scheduler:
    """The queue of requests, from submit to settled.

    Three threads meet in it: the event loop (every method without another word), the
    scheduler's thread (`round`), and one worker per device slot (`take`, `emit`,
    `finish`, `end_step`, or their C twins). Counters may be read from any thread.

    Bounds: `table_capacity` requests at once, `level_caps` and `total_cap` of them waiting.
    A request that does not fit is passed by at most `bypass_max` others and for at most
    `bypass_ns`. `lane_share_mins` are the parts of the whole that the short and the long
    lane keep whatever the backlogs are, `borders` the bounds, in tokens, between which the
    border of the two moves; with the defaults nothing moves. A lane starts no more once
    `lane_caps` of it run, or once those are promised `lane_token_caps` tokens (0: no cap). From class `fine_level` on
    prompts are computed in the finest chunks, as long ones are. All of that holds for each model
    by itself.

    `policy` says on which device slot a request starts (core/placement.pxi). One that holds at
    least `prefix_tokens_min` tokens of its prompt may run `prefix_margin` requests more, for its
    weight, than the one that the policy would take.
    """

    def __cinit__(self, *, uint32_t table_capacity, level_caps, uint64_t total_cap,
                  num_lanes=2, num_keys=1, key_weights=None, int64_t aging_step_ns=0,
                  aged_every=4, lane_weights=(3, 1), lane_share_mins=(1, 1), lane_caps=None,
                  lane_token_caps=None, borders=(0, 0), uint32_t fine_level=255, uint32_t bypass_max=16,
                  int64_t bypass_ns=10_000_000_000, uint64_t out_buffer_bytes=65536, uint32_t policy=LEAST_CONNECTIONS,
                  double prefix_margin=0.0, uint32_t prefix_tokens_min=HINT_UNIT):
        cdef Books* books
        cdef uint32_t i
        check_shape(num_lanes, len(level_caps), num_keys, aging_step_ns, aged_every)
        if not 1 <= table_capacity <= 1U << 30:
            raise ValueError("table_capacity must be between 1 and 2**30")
        if not 64 <= out_buffer_bytes <= 1U << 30 or out_buffer_bytes & (out_buffer_bytes - 1):
            raise ValueError("out_buffer_bytes must be a power of two, at least 64")
        self.state = <SchedulerState*> new_lines(sizeof(SchedulerState))
        if self.state == NULL:
            raise MemoryError
        self.state.waker.fd = self.state.loop_waker.fd = -1
        books = <Books*> new_lines(sizeof(Books))
        self.state.own = books
        if (books == NULL or state_init(self.state, table_capacity)
                or books_init(books, self.state, num_lanes, len(level_caps), num_keys)):
            raise MemoryError
        self.state.out_buffer_bytes = out_buffer_bytes
        self.free_head = self.lifted_head = NOWHERE
        books.backlog.aging_step_ns = aging_step_ns
        books.backlog.aged_every = books.backlog.since_aged = aged_every
        set_weights(books.backlog, lane_weights, key_weights or [1] * num_keys)
        set_caps(books.backlog, lane_caps or [0] * num_lanes, lane_token_caps or [0] * num_lanes)
        if not (0 <= lane_share_mins[0] <= 1 and 0 <= lane_share_mins[1] <= 1):
            raise ValueError("lane_share_mins are parts of 1")
        if not 0 <= bypass_ns <= 1LL << 58:
            raise ValueError("bypass_ns must not be negative")
        lanes_init(&books.shares, books.backlog, lane_share_mins[0], lane_share_mins[1],
                   borders[0], borders[1])
        self.state.short_share = books.shares.share
        self.state.fine_level = fine_level
        books.models[0].backfill.bypass_max = bypass_max
        books.models[0].backfill.bypass_ns = bypass_ns
        placement_init(&books.placement, policy, prefix_margin, prefix_tokens_min)
        for i in range(books.backlog.num_levels):
            books.permits[i].cap = level_caps[i]
        books.total.cap = total_cap

    def __dealloc__(self):
        # The threads have stopped, but for parked ones: those may wake up some day, so
        # what a worker can reach is left to them.
        cdef bint is_parked = False
        cdef uint32_t i
        cdef Entry* entry
        if self.state == NULL:
            return
        for i in range(self.state.num_added):
            is_parked |= is_dead(self.state, i)
        if is_parked:
            return
        for i in range(self.num_touched):
            entry = &self.state.table[i]
            if entry.sink != NULL:
                free(entry.attempt)
                Py_DECREF(<object> entry.owner)
                Py_DECREF(<object> entry.sink)
        state_free(self.state)

    def add_device_slot(self, *, uint16_t model=0, uint64_t kv_tokens, uint32_t num_sequences,
                        uint32_t num_extra=0, double weight=1.0, uint32_t kv_block=0,
                        uint32_t lanes=ALL_LANES, uint32_t token_bytes=1, bint is_resting=False):
        """Add one model on one device: its number. After the first request only for models that have one.

        `num_extra` sequences are there beside the others for who is of a better class than
        somebody that runs there. With a `kv_block` a request is promised its prompt and grows
        by so many tokens (see core/growth.pxi); without one it is promised all that it may need.
        `lanes` are those that it is for, as bits; a lane that no device slot of the model is for may
        use them all. `token_bytes` is what the KV of a token takes there.
        """
        cdef SchedulerState* s = self.state
        cdef DeviceSlot* slot
        if self.has_begun and (model >= MAX_MODELS or books_of(s).models[model] == NULL):
            raise RuntimeError("the first device slot of a model is added before the first request")
        if s.num_added == MAX_DEVICE_SLOTS:
            raise ValueError("too many device slots")
        if not 1 <= num_sequences <= 65536 or num_extra > 65536 or not 0 < weight <= 1e6:
            raise ValueError("num_sequences at least 1, weight above 0")
        if kv_block > 1U << 20:
            raise ValueError("kv_block must be at most 2**20 tokens")
        if model >= MAX_MODELS or not lanes & ((1U << books_of(s).backlog.num_lanes) - 1):
            raise ValueError("at most 64 models, and a device slot is for one lane at least")
        slot = <DeviceSlot*> new_lines(sizeof(DeviceSlot))
        if slot == NULL:
            raise MemoryError
        slot.waker.fd = -1
        if (ring_init(&slot.dispatch, num_sequences + num_extra)
                or ring_init(&slot.feedback, num_sequences + num_extra)
                or ring_init(&slot.events, s.capacity) or waker_init(&slot.waker)
                or model_init(books_of(s), model, s.capacity)
                or growth_init(&books_of(s).growths[s.num_added], num_sequences + num_extra)):
            slot_free(slot)
            raise MemoryError
        slot.index = s.num_added
        slot.model = model
        slot.kv_tokens = kv_tokens
        slot.num_sequences = slot.num_sequences_max = num_sequences
        slot.weight = slot.wants_weight = weight_units(weight)
        slot.kv_block = kv_block
        slot.lanes = lanes
        slot.token_bytes = token_bytes
        books_of(s).ledger.slots[slot.index].capacity = kv_tokens
        books_of(s).ledger.slots[slot.index].ceiling = kv_tokens
        books_of(s).ledger.slots[slot.index].num_sequences = num_sequences
        books_of(s).ledger.slots[slot.index].num_extra = num_extra
        # Its places count from when the scheduler lets it take requests; see heed().
        slot.wants_rest = is_resting
        slot.drained = True
        s.slots[slot.index] = slot
        # Release: pairs with the acquire in adopt; all of the above.
        store_release32(&s.num_added, slot.index + 1)
        if not self.has_begun:
            adopt(s)
            heed(s)
        return slot.index

    # --- device slots at run time: from any thread, see core/placement.pxi -----------------

    def drain_slot(self, uint32_t slot):
        """Let nobody start there any more; what runs goes on. `slots()` says when it is so."""
        self.check_slot(slot)
        store_relaxed32(&self.state.slots[slot].wants_drain, 1)
        wake(&self.state.waker)

    def undrain_slot(self, uint32_t slot):
        """Let requests start there again."""
        self.check_slot(slot)
        store_release32(&self.state.slots[slot].wants_drain, 0)
        wake(&self.state.waker)

    def set_weight(self, uint32_t slot, double weight):
        """Give it another weight, above 0 and at most 1e6, in steps of 1/1024."""
        self.check_slot(slot)
        if not 0 < weight <= 1e6:
            raise ValueError("a device slot's weight is above 0 and at most 1e6")
        store_relaxed32(&self.state.slots[slot].wants_weight, weight_units(weight))
        wake(&self.state.waker)

    def set_headroom(self, uint32_t slot, kv_tokens):
        """Promise who starts there at most so many KV tokens more from now on; None: all that it has.

        Nothing that is promised is taken away, and what runs may still grow.
        """
        self.check_slot(slot)
        exchange32(&self.state.slots[slot].wants_headroom, headroom_word(kv_tokens))
        wake(&self.state.waker)

    def rest_slot(self, uint32_t slot, bint is_resting=True):
        """As drain_slot and undrain_slot, for who looks after its health; either of the two drains it."""
        self.check_slot(slot)
        store_release32(&self.state.slots[slot].wants_rest, is_resting)
        wake(&self.state.waker)

    def limit_slot(self, uint32_t slot, uint32_t num_running=0):
        """Let no more than so many run there at once from now on; 0: as many as it has sequences."""
        self.check_slot(slot)
        store_relaxed32(&self.state.slots[slot].wants_limit, num_running)
        wake(&self.state.waker)

    def set_stall(self, uint32_t slot, int64_t stall_ns):
        """Take a step that lasts so long for one that never ends; 0: none is."""
        self.check_slot(slot)
        store_relaxed(&self.state.slots[slot].stall_ns, max(stall_ns, 0))

    def set_use(self, uint32_t slot, uint32_t percent):
        """Tell how busy its device is, in percent, whoever keeps it so."""
        self.check_slot(slot)
        store_relaxed32(&self.state.slots[slot].use_percent, min(percent, <uint32_t> 100))

    def set_key_weight(self, uint32_t key, double weight):
        """Give a key another weight, 0.001 to 10000, for what it is charged from now on. From any thread."""
        set_key_units(books_of(self.state), key, key_units_of(weight))

    # --- in -----------------------------------------------------------------------------

    cdef int check_level(self, uint32_t level) except -1:
        if level >= books_of(self.state).backlog.num_levels:
            raise IndexError("no such level")
        return 0

    def try_enter(self, uint32_t level):
        """Take a permit to wait, of the class and of the total; False: full."""
        cdef Books* books = books_of(self.state)
        self.check_level(level)
        # Only the loop adds, so what is free now cannot be gone before the add.
        if (load_relaxed(&books.permits[level].taken) >= books.permits[level].cap
                or load_relaxed(&books.total.taken) >= books.total.cap):
            return False
        add_relaxed(&books.permits[level].taken, 1)
        add_relaxed(&books.total.taken, 1)
        return True

    def leave(self, uint32_t level):
        """Give back a permit that was not used for submit()."""
        self.check_level(level)
        give_back_permit(books_of(self.state), level)

    def submit(self, Work work not None, object sink not None, *, uint32_t key=0, uint16_t model=0, uint8_t level=0,
               uint8_t lane=0, int64_t arrival_ns=0, int64_t expire_ns=0, int64_t stop_ns=0, int64_t deadline_ns=0,
               uint32_t num_prompt_tokens=0, uint32_t max_tokens=0, uint32_t footprint_tokens=0, prefixes=()):
        """Let a request wait, on a permit of its level: its handle.

        `sink` comes back with each event; it and `work` are kept alive until settled.
        Times are monotonic nanoseconds, 0 for none. `prefixes` are pairs of a device slot and the
        tokens of its prompt that this holds already; the two longest count. Raises TableFull; the
        permit is then given back.
        """
        cdef SchedulerState* s = self.state
        cdef Books* books = books_of(s)
        cdef uint32_t index
        cdef Entry* entry
        cdef uint16_t[HINTS_MAX] hints
        hints[0] = hints[1] = 0
        for slot, num_tokens in prefixes:
            note_hint(hints, slot, num_tokens)
        self.check_level(level)
        if key >= books.backlog.num_keys or lane >= books.backlog.num_lanes:
            give_back_permit(books, level)
            raise IndexError("no such key or lane")
        index = self.take_entry()
        if index == NOWHERE:
            give_back_permit(books, level)
            raise TableFull
        entry = &s.table[index]
        entry.key = key
        entry.arrival_no = self.num_arrived
        entry.arrival_ns = arrival_ns
        entry.expire_ns = expire_ns
        entry.stop_ns = stop_ns
        entry.deadline_ns = deadline_ns
        entry.num_prompt_tokens = num_prompt_tokens
        entry.max_tokens = max_tokens
        entry.footprint_tokens = footprint_tokens
        entry.model = model
        entry.level = level
        entry.lane = lane
        entry.work = work.data
        entry.hints[0], entry.hints[1] = hints[0], hints[1]
        store_relaxed32(&entry.cancel, 0)
        Py_INCREF(work)
        Py_INCREF(sink)
        entry.owner = <void*> work
        entry.sink = <void*> sink
        self.num_arrived += 1
        # Cannot be full: see state_init.
        ring_try_push(&s.submit, message(OP_SUBMIT, self.handle(index)))
        wake(&s.waker)
        return self.handle(index)

    cdef inline uint64_t handle(self, uint32_t index) noexcept nogil:
        return <uint64_t> self.state.table[index].generation << 32 | index

    # A free entry, or NOWHERE.
    cdef inline uint32_t take_entry(self) noexcept nogil:
        cdef uint32_t index = self.free_head
        self.has_begun = True
        if index != NOWHERE:
            self.free_head = self.state.table[index].next
        elif self.num_touched < self.state.capacity:
            index = self.num_touched
            self.num_touched += 1
            self.state.table[index].generation = 1
        else:
            return NOWHERE
        self.num_live += 1
        return index

    # The entry of a handle that is not settled, or NULL.
    cdef inline Entry* live(self, uint64_t handle) noexcept:
        cdef uint32_t index = index_of(handle)
        if (index >= self.num_touched or self.state.table[index].sink == NULL
                or self.handle(index) != handle):
            return NULL
        return &self.state.table[index]

    def cancel(self, uint64_t handle):
        """Ask for an early end; its events still come. Again, or too late: nothing."""
        cdef Entry* entry = self.live(handle)
        if entry == NULL or load_relaxed32(&entry.cancel):
            return
        # Relaxed: whoever sees it ends the request and reads nothing because of it.
        store_relaxed32(&entry.cancel, 1)
        ring_try_push(&self.state.submit, message(OP_CANCEL, handle))
        wake(&self.state.waker)
        self.lift(index_of(handle))

    def evict(self, uint32_t level):
        """Ask for the youngest that waits in the lowest class below this one to leave.

        EV_ANSWERED tells whether one did, in the order of these calls. False: too many are
        not answered yet.
        """
        self.check_level(level)
        if self.num_evicting >= EVICTIONS_MAX:
            return False
        self.num_evicting += 1
        # Cannot be full: see state_init.
        ring_try_push(&self.state.submit, message(OP_EVICT, level))
        wake(&self.state.waker)
        return True

    def hold(self, uint64_t handle):
        """Let its output, its finish and what follows stay untold until resume() or cancel().

        Its out-buffer then fills, and the worker pauses this sequence and no other. Ends in
        the queue are told all the same. One that was cancelled, whose finish was told or
        that is settled cannot be held: nothing happens.
        """
        cdef Entry* entry = self.live(handle)
        if entry != NULL and not load_relaxed32(&entry.cancel) and not entry.hold & HOLD_ON:
            entry.hold |= HOLD_ON
            self.num_held += 1

    def resume(self, uint64_t handle):
        """Tell what was held back, with the next poll(); the loop is woken for it."""
        if self.live(handle) != NULL:
            self.lift(index_of(handle))

    # What was taken while it was held is told by the next poll(). A word that still lies in
    # the worker's ring brings itself to notice.
    cdef void lift(self, uint32_t index) noexcept:
        cdef Entry* entry = &self.state.table[index]
        self.count_out(entry)
        entry.hold &= ~<uint32_t> HOLD_ON
        if entry.hold & (HOLD_WORD | HOLD_END | HOLD_LOST) and not entry.hold & HOLD_LISTED:
            entry.hold |= HOLD_LISTED
            entry.next = self.lifted_head
            self.lifted_head = index
            wake(&self.state.loop_waker)

    cdef inline void count_out(self, const Entry* entry) noexcept:
        if entry.hold & HOLD_ON:
            self.num_held -= 1

    # --- out ----------------------------------------------------------------------------

    @property
    def loop_fd(self):
        """Readable when poll() has something to tell."""
        return self.state.loop_waker.fd

    def poll(self):
        """Tell all that has happened, in order for each request.

        (EV_STARTED, sink, queue_ns)
        (EV_OUTPUT, sink, text, num_tokens, logprobs or None)   all that came since the last
        (EV_FINISHED, sink, Outcome)                            after the last output
        (EV_EXPIRED | EV_NO_KV | EV_CANCELLED | EV_NO_DEVICE | EV_EVICTED, sink, None)  ended in the queue
        (EV_SETTLED, sink, None)                                always the last one
        (EV_ANSWERED, None, was_evicted)                        to an evict(); after the settling
        """
        cdef SchedulerState* s = self.state
        cdef list out = []
        cdef uint64_t count, num_cells
        cdef uint32_t i
        # Read first, reset second: the other way round, a wake between the two would be
        # read away with its flag left up, and the next one would not be written.
        if load_relaxed32(&s.loop_waker.signalled) != ASLEEP:
            read(s.loop_waker.fd, &count, sizeof(count))
        exchange32(&s.loop_waker.signalled, ASLEEP)
        # Workers before the scheduler, and of the scheduler only what was there before:
        # then every word of a worker about an attempt has been taken when its OP_SETTLED
        # is, and an entry has at most one cell in an event ring.
        num_cells = ring_size(&s.events)
        for i in range(s.num_added):
            self.poll_worker(out, s.slots[i])
        # Before the scheduler: what is settled there leaves no word behind.
        self.poll_lifted(out)
        self.poll_scheduler(out, num_cells)
        return out

    cdef int poll_worker(self, list out, DeviceSlot* slot) except -1:
        cdef uint64_t cell
        cdef uint64_t num_cells = 0 if slot.is_closed else ring_size(&slot.events)
        cdef Entry* entry
        while num_cells and ring_try_pop(&slot.events, &cell):
            num_cells -= 1
            entry = &self.state.table[index_of(cell)]
            # A late worker of a dead device slot may name one that is settled.
            if entry.generation != generation_of(cell) or entry.attempt == NULL:
                continue
            if is_held(entry):
                # `notified` stays up, so no second cell comes before this one is told.
                entry.hold |= HOLD_WORD
            else:
                self.tell(out, index_of(cell), entry.attempt)

    cdef int poll_lifted(self, list out) except -1:
        cdef uint32_t index
        cdef Entry* entry
        while self.lifted_head != NOWHERE:
            index = self.lifted_head
            entry = &self.state.table[index]
            self.lifted_head = entry.next
            entry.hold &= ~<uint32_t> HOLD_LISTED
            if is_held(entry):
                continue
            if entry.hold & HOLD_END:
                self.tell_settled(out, index, entry.attempt)
            elif entry.hold & HOLD_LOST:
                self.take_back(out, index, entry.attempt)
            elif entry.hold & HOLD_WORD:
                self.tell(out, index, entry.attempt)

    cdef int poll_scheduler(self, list out, uint64_t num_cells) except -1:
        cdef uint64_t cell
        cdef uint32_t index, op
        cdef Attempt* attempt
        while num_cells and ring_try_pop(&self.state.events, &cell):
            num_cells -= 1
            op = op_of(cell)
            index = index_of(cell)
            if op == OP_EVICT:
                self.num_evicting -= 1
                out.append((op, None, False))
                continue
            sink = <object> self.state.table[index].sink
            attempt = self.state.table[index].attempt
            if op == OP_STARTED:
                self.tell_started(out, index, attempt)
                continue
            if op == OP_LOST:
                self.take_back(out, index, attempt)
            elif op != OP_SETTLED:
                out.append((op, sink, None))
                out.append((OP_SETTLED, sink, None))
                self.release(index)
                if op == OP_EVICTED:
                    self.num_evicting -= 1
                    out.append((OP_EVICT, None, True))
            elif is_held(&self.state.table[index]):
                self.state.table[index].hold |= HOLD_END
            else:
                self.tell_settled(out, index, attempt)

    # The last of one that ran.
    cdef int tell_settled(self, list out, uint32_t index, Attempt* attempt) except -1:
        sink = <object> self.state.table[index].sink
        if not attempt.is_cut:
            self.tell(out, index, attempt)
        if not attempt.told_finished:
            out.append((OP_FINISHED, sink, outcome_of(attempt, FINISH_NONE)))
        out.append((OP_SETTLED, sink, None))
        self.release(index)

    # Its device slot is dead: read for the last time what came out, and let it go on from there.
    cdef int take_back(self, list out, uint32_t index, Attempt* attempt) except -1:
        cdef Entry* entry = &self.state.table[index]
        # Whatever still comes in that ring is about attempts that are cut.
        self.state.slots[attempt.slot].is_closed = True
        if is_held(entry):
            entry.hold |= HOLD_LOST
            return 0
        entry.hold &= ~<uint32_t> HOLD_LOST
        self.tell(out, index, attempt)
        # Acquire: pairs with note_made. After the text, so that it is none without its token.
        attempt.num_cut = load_acquire32(&attempt.num_made)
        attempt.is_cut = True
        self.num_kept += 1
        if load_relaxed32(&entry.cancel):
            attempt.ended_as = FINISH_CANCELLED
        if attempt.told_finished or attempt.ended_as:
            return self.tell_settled(out, index, attempt)
        # What was made before is counted to the prompt already.
        entry.num_prompt_tokens += attempt.num_cut - attempt.num_given
        entry.max_tokens -= min(entry.max_tokens, attempt.num_cut - attempt.num_given)
        # Cannot be full: see state_init. What it was submitted with has long been taken.
        ring_try_push(&self.state.submit, message(OP_AGAIN, self.handle(index)))
        wake(&self.state.waker)

    cdef inline int tell_started(self, list out, uint32_t index, Attempt* attempt) except -1:
        # A worker's first word may be read before the scheduler's OP_STARTED.
        if not attempt.told_started:
            attempt.told_started = True
            out.append((OP_STARTED, <object> self.state.table[index].sink, attempt.queue_ns))

    # What is new about an attempt.
    cdef int tell(self, list out, uint32_t index, Attempt* attempt) except -1:
        cdef void* sink = self.state.table[index].sink
        cdef uint32_t finish
        self.tell_started(out, index, attempt)
        self.state.table[index].hold &= ~<uint32_t> HOLD_WORD
        # Before the reading: see announce().
        exchange32(&attempt.notified, 0)
        # Acquire: pairs with the release in finish_request. Before the output is read, so
        # that an attempt seen as finished has shown all its output.
        finish = load_acquire32(&attempt.finish)
        self.tell_output(out, sink, attempt)
        if load_relaxed32(&attempt.starved):
            self.num_starved += 1
            store_relaxed32(&attempt.starved, 0)
            wake(&self.state.slots[attempt.slot].waker)
        if finish != FINISH_NONE and not attempt.told_finished:
            attempt.told_finished = True
            out.append((OP_FINISHED, <object> sink, outcome_of(attempt, finish)))

    cdef int tell_output(self, list out, void* sink, Attempt* attempt) except -1:
        cdef OutBuffer* buffer = &attempt.out
        # Acquire: pairs with the release in out_write; whole records.
        cdef uint64_t tail = load_acquire(&buffer.tail)
        cdef uint64_t position = buffer.head
        cdef uint64_t num_text_bytes = 0, num_other_bytes = 0, num_tokens = 0, num_logprobs = 0
        cdef Record* record
        if position == tail:
            return 0
        while position != tail:
            record = <Record*> (buffer.bytes + (position & (buffer.capacity - 1)))
            if record.kind == RECORD_TEXT:
                num_text_bytes += record.num_bytes
                num_tokens += record.num_tokens
            else:
                num_other_bytes += record.num_bytes
                num_logprobs += 1
            position += out_footprint(record.num_bytes)
        text = PyBytes_FromStringAndSize(NULL, num_text_bytes)
        gather(buffer, tail, True, PyBytes_AS_STRING(text))
        logprobs = None
        if num_other_bytes:
            logprobs = PyBytes_FromStringAndSize(NULL, num_other_bytes)
            gather(buffer, tail, False, PyBytes_AS_STRING(logprobs))
        attempt.num_tokens_told += num_tokens
        attempt.num_bytes_told += num_text_bytes
        attempt.num_logprobs_told += num_logprobs
        # Release: pairs with the acquire in out_free; those bytes are copied.
        store_release(&buffer.head, tail)
        out.append((OP_OUTPUT, <object> sink, text, num_tokens, logprobs))

    # The entry is settled and its last event told.
    cdef void release(self, uint32_t index) noexcept:
        cdef Entry* entry = &self.state.table[index]
        cdef void* owner = entry.owner
        cdef void* sink = entry.sink
        cdef bint is_kept = (entry.attempt != NULL
                             and is_dead(self.state, entry.attempt.slot))
        # Its worker may hang and wake up, even in the middle of finish_request, so the attempt
        # and the work stay with it; no more than the device slot ran.
        if entry.attempt == NULL or not (is_kept or entry.attempt.earlier != NULL):
            Py_DECREF(<object> owner)
        entry.owner = entry.sink = NULL
        if is_kept:
            self.num_kept += not entry.attempt.is_cut
        else:
            free(entry.attempt)
        entry.attempt = NULL
        self.count_out(entry)
        entry.hold = 0
        self.recycle(index)
        Py_DECREF(<object> sink)

    # Its next life has another generation, so that an old handle names nothing.
    cdef void recycle(self, uint32_t index) noexcept nogil:
        cdef Entry* entry = &self.state.table[index]
        entry.generation = entry.generation % 0x0FFFFFFFU + 1
        entry.next = self.free_head
        self.free_head = index
        self.num_live -= 1

    # --- figures ------------------------------------------------------------------------

    def state_of(self, uint64_t handle):
        """submitted, waiting or running; None once settled."""
        cdef Entry* entry = self.live(handle)
        if entry == NULL:
            return None
        if entry.hold & (HOLD_END | HOLD_LOST):
            return "running"
        return ("submitted", "waiting", "running", "running")[load_relaxed32(&entry.state)]

    def position(self, uint64_t handle):
        """The place in its model's lane, from 1, while it waits; else None.

        The better classes of the lane are ahead, and who came earlier to its own class. From
        counts: exact where a class is served in order of arrival and nobody behind leaves
        early, an estimate otherwise.
        """
        cdef Books* books = books_of(self.state)
        cdef Entry* entry = self.live(handle)
        cdef QueueBook* lane
        cdef uint64_t better = 0
        cdef uint32_t level
        # Acquire: pairs with the release in enqueue; the rank.
        if entry == NULL or load_acquire32(&entry.state) != WAITING:
            return None
        lane = &model_queue(books, entry).queues[entry.lane * MAX_LEVELS]
        for level in range(entry.level):
            better += load_relaxed(&lane[level].num_waiting)
        return 1 + better + num_ahead(&lane[entry.level], entry.rank)

    def is_lost(self, uint64_t handle):
        """Whether it ran on a device slot that died, and waits to go on at another."""
        cdef Entry* entry = self.live(handle)
        return entry != NULL and load_relaxed32(&entry.state) == AGAIN

    def num_waiting(self, uint32_t level):
        """How many of this class wait, those in the submit ring not counted."""
        self.check_level(level)
        return load_relaxed(&books_of(self.state).levels[level].num_waiting)

    def num_entered(self, uint32_t level):
        """Permits taken of this class."""
        self.check_level(level)
        return load_relaxed(&books_of(self.state).permits[level].taken)

    @property
    def border_tokens(self):
        """Up to that a request is short, where nothing else decides; follows the backlogs."""
        return load_relaxed(&books_of(self.state).shares.border_tokens)

    def drain_rate(self, uint32_t level):
        """Starts per second of this class while it had a queue; 0.0: not known yet."""
        self.check_level(level)
        return load_relaxed(&books_of(self.state).levels[level].drain.per_gs) / 1e9

    @property
    def drain_rate_all(self):
        """Starts per second of all classes together while anybody waited; 0.0: not known yet."""
        return load_relaxed(&books_of(self.state).drain.per_gs) / 1e9

    def key_usage(self, uint32_t key):
        """What a key holds and has been given, in tokens."""
        if key >= books_of(self.state).backlog.num_keys:
            raise IndexError("no such key")
        return key_figures(&books_of(self.state).ledger.keys[key])

    def expected_completion(self, uint32_t key, uint16_t model, uint32_t max_tokens, uint32_t granted):
        """Tokens that an answer is taken to have: its `granted`, unless `max_tokens` is 0 or far off."""
        return expected_completion(&books_of(self.state).lengths, key, model, max_tokens, granted)

    @property
    def num_running(self):
        """Requests that hold a sequence."""
        return load_relaxed(&books_of(self.state).num_running)

    @property
    def table_capacity(self):
        """The most requests between submit and settled."""
        return self.state.capacity

    @property
    def bytes_per_waiting(self):
        """Memory of the core per entry of its table, all rings and heaps counted.

        A heap of deadlines is counted at its fullest. What does not grow with the table
        (keys, device slots) and what runs (out-buffers) is not in it.
        """
        # The cells: 3 to submit, 2 to be told by the scheduler, 1 by each worker.
        cdef uint64_t num_cells = 3 + 2 + self.state.num_added
        return (sizeof(Entry) + num_cells * sizeof(uint64_t) + sizeof(Timed) + 2 * sizeof(Timed)
                + 2 * sizeof(uint32_t) + sizeof(Links))

    def slots(self):
        """What each device slot has and has promised."""
        cdef uint32_t i
        return [device_figures(self.state, i) for i in range(self.state.num_added)]

    def snapshot(self):
        """All counters, each exact, not all of one moment."""
        return {
            **core_figures(self.state),
            "num_live": self.num_live,
            "num_kept": self.num_kept,
            "num_held": self.num_held,
            "num_starved": self.num_starved,
            "table_capacity": self.state.capacity,
        }

    # --- the scheduler's thread ---------------------------------------------------------

    def round(self, int64_t now_ns):
        """One round: when the next is due (now: at once; -1: when woken)."""
        cdef int64_t due_ns
        with nogil:
            due_ns = scheduler_round(self.state, now_ns)
        return due_ns

    # --- a worker's thread --------------------------------------------------------------

    cdef int check_slot(self, uint32_t slot) except -1:
        if slot >= self.state.num_added:
            raise IndexError("no such device slot")
        return 0

    cdef Attempt* running_attempt(self, uint64_t handle) except NULL:
        cdef Entry* entry = self.live(handle)
        if (entry == NULL or entry.attempt == NULL
                or load_relaxed32(&entry.attempt.finish) != FINISH_NONE):
            raise ValueError("not running")
        return entry.attempt

    def take(self, uint32_t slot):
        """The handles that this device slot is to start."""
        cdef Attempt* attempt
        cdef list handles = []
        self.check_slot(slot)
        while True:
            attempt = next_attempt(self.state, slot)
            if attempt == NULL:
                return handles
            handles.append(attempt.handle)

    def emit(self, uint64_t handle, bytes payload not None, uint16_t num_tokens=1, uint8_t kind=RECORD_TEXT):
        """Write one record; False: no room. Raises ValueError if it does not run."""
        return emit_output(self.state, self.running_attempt(handle), kind, num_tokens,
                           PyBytes_AS_STRING(payload), <uint32_t> len(payload))

    def finish(self, uint64_t handle, uint32_t finish=FINISH_STOP, *,
               uint32_t num_completion_tokens=0, uint32_t num_cached_tokens=0,
               int32_t error_code=0, int64_t assigned_ns=0, int64_t prefill_done_ns=0,
               int64_t first_token_ns=0, int64_t finished_ns=0):
        """End an attempt. Raises ValueError if it does not run."""
        cdef Attempt* attempt = self.running_attempt(handle)
        if not FINISH_NONE < finish <= FINISH_DEVICE:
            raise ValueError("no such finish")
        attempt.num_completion_tokens = num_completion_tokens
        attempt.num_cached_tokens = num_cached_tokens
        attempt.error_code = error_code
        attempt.assigned_ns = assigned_ns
        attempt.prefill_done_ns = prefill_done_ns
        attempt.first_token_ns = first_token_ns
        attempt.finished_ns = finished_ns
        finish_request(self.state, attempt, finish)

    def note_made(self, uint64_t handle, int32_t token):
        """Note a token of the answer, before its text. Raises ValueError if it does not run."""
        note_made(self.running_attempt(handle), token)

    def given(self, uint64_t handle):
        """The tokens from which it is to go on. Raises ValueError if it does not run."""
        cdef Attempt* attempt = self.running_attempt(handle)
        return [attempt.made[i] for i in range(attempt.num_given)]

    def is_cancelled(self, uint64_t handle):
        """Whether its client wants it ended. Raises ValueError if it does not run."""
        return bool(wants_end(self.state, self.running_attempt(handle)))

    def ask_growth(self, uint64_t handle, uint32_t tokens):
        """Ask for a promise of so many KV tokens in all. Raises ValueError if it does not run."""
        ask_growth(self.state, self.running_attempt(handle), tokens)

    def granted(self, uint64_t handle):
        """KV tokens it may hold; 0: it is to give up its cells. Raises ValueError if it does not run."""
        return granted_tokens(self.running_attempt(handle))

    def begin_step(self, uint32_t slot, int64_t now_ns):
        """Note when the step began that is under way; 0: none is."""
        self.check_slot(slot)
        store_relaxed(&self.state.slots[slot].step_began_ns, now_ns)

    def end_step(self):
        """Wake who sleeps, loop and scheduler; how many eventfd writes that took."""
        return wake(&self.state.loop_waker) + wake(&self.state.waker)

    def report_dead(self, uint32_t slot):
        """Declare a device slot dead, from any thread; there is no way back."""
        self.check_slot(slot)
        report_dead(self.state, slot)
