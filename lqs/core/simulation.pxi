# A trace played through a Scheduler under a virtual clock.
#
# Nothing here decides anything: arrivals go in through the submit ring, the very rounds of
# round.pxi order and place them, model slots play the workers. The clock jumps from event to
# event: an arrival, the end of a run, the time at which a round is due.
#
#     time moves -> runs that end -> requests that arrive -> a round -> slots take what was sent
#
# A worker goes on with its next step before the scheduler has heard of the last one's ends,
# as the real one does: what a round sends is taken when the step under way is over.
#
# Owner: one thread, which is the event loop, the scheduler and every worker in turn.

# What became of a request. Python sees these too.
cpdef enum Ending:
    ENDING_NONE = 0         # it has not ended
    ENDING_SERVED = 1
    ENDING_TIMED_OUT = 2    # it ran longer than it may
    ENDING_REFUSED = 3      # no place in the queue
    ENDING_EXPIRED = 4      # it waited longer than it may
    ENDING_NEVER_FITS = 5   # no device slot could ever hold it

cdef int64_t NEVER_NS = 0x7FFFFFFFFFFFFFFF


@cython.final
@cython.no_gc_clear
cdef class Simulation:
    """Plays requests through a scheduler whose device slots are models.

    `costs` has one (fixed_ns, decode_ns, prefill_ns, context_ns, cells_ns, budget, batch_max)
    for each device slot of `scheduler`; see core/model_slots.pxi. The columns describe the
    requests in the order of `arrival_ns`; the last four are written as each of them ends,
    with the clock's times, 0 for what did not come. `context_tokens` bounds prompt and answer
    together. Times are the virtual clock's nanoseconds, limits 0 for none.

    The scheduler is the simulation's own from then on. Owner: one thread.
    """

    cdef Scheduler scheduler
    cdef ModelSlot* slots
    cdef uint32_t* request_of       # by entry of the table
    cdef const int64_t[::1] arrival_ns
    cdef const uint32_t[::1] prompt_tokens, completion_tokens, max_tokens, key
    cdef const uint8_t[::1] level, lane
    cdef int64_t[::1] started_ns, first_token_ns, ended_ns
    cdef uint8_t[::1] ending
    cdef uint32_t context_tokens
    cdef int64_t queue_limit_ns, run_limit_ns
    cdef uint64_t num_requests
    cdef uint64_t num_arrived
    cdef uint64_t kv_tokens         # wanted by all that are inside
    cdef int64_t due_ns             # the next round that is due by itself

    def __cinit__(self, Scheduler scheduler not None, costs, *,
                  const int64_t[::1] arrival_ns, const uint32_t[::1] prompt_tokens,
                  const uint32_t[::1] completion_tokens, const uint32_t[::1] max_tokens,
                  const uint8_t[::1] level, const uint8_t[::1] lane, const uint32_t[::1] key,
                  int64_t[::1] started_ns, int64_t[::1] first_token_ns, int64_t[::1] ended_ns,
                  uint8_t[::1] ending, uint32_t context_tokens,
                  int64_t queue_limit_ns=0, int64_t run_limit_ns=0):
        self.scheduler = scheduler
        self.due_ns = NEVER_NS
        self.num_requests = len(arrival_ns)
        self.arrival_ns, self.prompt_tokens = arrival_ns, prompt_tokens
        self.completion_tokens, self.max_tokens = completion_tokens, max_tokens
        self.level, self.lane, self.key = level, lane, key
        self.started_ns, self.first_token_ns = started_ns, first_token_ns
        self.ended_ns, self.ending = ended_ns, ending
        self.context_tokens = context_tokens
        self.queue_limit_ns = queue_limit_ns
        self.run_limit_ns = run_limit_ns
        if not (len(arrival_ns) == len(prompt_tokens) == len(completion_tokens) == len(max_tokens)
                == len(level) == len(lane) == len(key) == len(started_ns) == len(first_token_ns)
                == len(ended_ns) == len(ending)):
            raise ValueError("every column has one value for each request")
        self.check_columns()
        self.make_slots(costs)

    def __dealloc__(self):
        # Before the scheduler goes: it does not know the attempts of what still runs.
        cdef uint32_t i
        if self.request_of != NULL:
            for i in range(self.scheduler.num_touched):
                free(self.scheduler.state.table[i].attempt)
                self.scheduler.state.table[i].attempt = NULL
        if self.slots != NULL:
            for i in range(self.scheduler.state.num_slots):
                free(self.slots[i].sequences)
        free(self.slots)
        free(self.request_of)

    # What a native loop will not look at again.
    cdef int check_columns(self) except -1:
        cdef BacklogState* backlog = &books_of(self.scheduler.state).backlog
        cdef uint64_t i
        for i in range(self.num_requests):
            if (self.level[i] >= backlog.num_levels or self.lane[i] >= backlog.num_lanes
                    or self.key[i] >= backlog.num_keys):
                raise IndexError(f"request {i}: no such class, lane or key")
            if self.arrival_ns[i] < 0 or (i and self.arrival_ns[i] < self.arrival_ns[i - 1]):
                raise ValueError(f"request {i}: arrivals are at least 0 and do not go back")
        if self.scheduler.num_touched:
            raise ValueError("the scheduler has had requests before")

    cdef int make_slots(self, costs) except -1:
        cdef SchedulerState* s = self.scheduler.state
        cdef StepCost* cost
        cdef uint32_t i
        if len(costs) != s.num_slots:
            raise ValueError("one cost for each device slot")
        self.request_of = <uint32_t*> calloc(s.capacity, sizeof(uint32_t))
        self.slots = <ModelSlot*> calloc(max(s.num_slots, <uint32_t> 1), sizeof(ModelSlot))
        if self.request_of == NULL or self.slots == NULL:
            raise MemoryError
        for i in range(s.num_slots):
            if model_slot_init(&self.slots[i], i, s.slots[i].num_sequences):
                raise MemoryError
            cost = &self.slots[i].cost
            (cost.fixed_ns, cost.decode_ns, cost.prefill_ns, cost.context_ns, cost.cells_ns,
             cost.budget, cost.batch_max) = costs[i]
            if min(costs[i]) < 0 or cost.batch_max < s.slots[i].num_sequences:
                raise ValueError("a cost is not below 0, and a step has room for every sequence")

    @property
    def num_left(self):
        """Requests that have not ended, those to come included."""
        return self.num_requests - self.num_arrived + self.scheduler.num_live

    @property
    def slot_figures(self):
        """For each device slot: steps done, and the nanoseconds that they took."""
        return [(self.slots[i].step_no, self.slots[i].busy_ns)
                for i in range(self.scheduler.state.num_slots)]

    def play(self, uint64_t num_arrivals):
        """Play on until so many more have arrived, or to the end; whether there is more."""
        cdef bint has_more
        with nogil:
            has_more = self.play_on(num_arrivals)
        return has_more

    cdef bint play_on(self, uint64_t num_arrivals) noexcept nogil:
        cdef uint64_t until = self.num_arrived + min(num_arrivals,
                                                     self.num_requests - self.num_arrived)
        cdef int64_t now_ns
        cdef bint has_news
        while self.num_arrived < until or until == self.num_requests:
            now_ns = self.next_event_ns()
            if now_ns == NEVER_NS:
                return False
            has_news = self.end_runs(now_ns)
            has_news |= self.take_arrivals(now_ns)
            if has_news or self.due_ns <= now_ns:
                self.schedule(now_ns)
        return True

    cdef int64_t next_event_ns(self) noexcept nogil:
        cdef int64_t next_ns = self.due_ns
        cdef uint32_t i
        if self.num_arrived < self.num_requests:
            next_ns = min(next_ns, self.arrival_ns[self.num_arrived])
        for i in range(self.scheduler.state.num_slots):
            if self.slots[i].num_steps:
                next_ns = min(next_ns, self.slots[i].ends_ns)
        return next_ns

    # The workers' turn. True: the scheduler has to hear of it.
    cdef bint end_runs(self, int64_t now_ns) noexcept nogil:
        cdef SchedulerState* s = self.scheduler.state
        cdef bint has_news = False
        cdef uint32_t i
        for i in range(s.num_slots):
            if self.slots[i].num_steps and self.slots[i].ends_ns <= now_ns:
                has_news |= end_run(&self.slots[i], s, now_ns)
                has_news |= begin_run(&self.slots[i], s, now_ns)
        return has_news

    # --- the event loop's turn ----------------------------------------------------------

    cdef bint take_arrivals(self, int64_t now_ns) noexcept nogil:
        cdef bint has_news = False
        while (self.num_arrived < self.num_requests
               and self.arrival_ns[self.num_arrived] <= now_ns):
            has_news |= self.take_arrival(self.num_arrived)
            self.num_arrived += 1
        return has_news

    # True: it is in.
    cdef bint take_arrival(self, uint64_t request) noexcept nogil:
        cdef uint32_t index
        if self.prompt_tokens[request] >= self.context_tokens:
            self.end_request(request, ENDING_NEVER_FITS, self.arrival_ns[request])
            return False
        index = NOWHERE
        if self.has_room(self.level[request]):
            index = self.scheduler.take_entry()
        if index == NOWHERE:
            self.end_request(request, ENDING_REFUSED, self.arrival_ns[request])
            return False
        self.submit(request, index)
        return True

    # As scheduling/places.py has it: a place in the class and in all, or a sequence that
    # nobody who is inside needs.
    cdef bint has_room(self, uint32_t level) noexcept nogil:
        cdef SchedulerState* s = self.scheduler.state
        cdef Books* books = books_of(s)
        cdef int64_t free_level = <int64_t> (books.permits[level].cap - books.permits[level].taken)
        cdef int64_t free_total = <int64_t> (books.total.cap - books.total.taken)
        cdef int64_t num_free = -<int64_t> books.num_running
        cdef int64_t num_better = 0
        cdef uint64_t kv_tokens = 0
        cdef uint32_t i
        if free_level > 0 and free_total > 0:
            return True
        for i in range(s.num_slots):
            num_free += s.slots[i].num_sequences
            kv_tokens += s.slots[i].kv_tokens
        if self.kv_tokens >= kv_tokens:
            return False
        for i in range(level):
            num_better += <int64_t> books.permits[i].taken
        return (free_level + max(num_free - num_better, <int64_t> 0) > 0
                and free_total + num_free > 0)

    # Scheduler.submit without what belongs to Python: no Work, no sink, no wake.
    cdef void submit(self, uint64_t request, uint32_t index) noexcept nogil:
        cdef SchedulerState* s = self.scheduler.state
        cdef Books* books = books_of(s)
        cdef Entry* entry = &s.table[index]
        cdef int64_t arrival_ns = self.arrival_ns[request]
        entry.key = self.key[request]
        entry.arrival_no = self.scheduler.num_arrived
        entry.arrival_ns = arrival_ns
        entry.expire_ns = arrival_ns + self.queue_limit_ns if self.queue_limit_ns else 0
        entry.stop_ns = arrival_ns + self.run_limit_ns if self.run_limit_ns else 0
        entry.deadline_ns = 0
        entry.num_prompt_tokens = self.prompt_tokens[request]
        entry.max_tokens = min(self.max_tokens[request],
                               self.context_tokens - entry.num_prompt_tokens)
        entry.footprint_tokens = entry.num_prompt_tokens + entry.max_tokens
        entry.model = 0
        entry.level = self.level[request]
        entry.lane = self.lane[request]
        entry.work = <void*> <size_t> self.completion_tokens[request]
        entry.cancel = 0
        self.scheduler.num_arrived += 1
        self.request_of[index] = <uint32_t> request
        self.kv_tokens += entry.footprint_tokens
        add_relaxed(&books.permits[entry.level].taken, 1)
        add_relaxed(&books.total.taken, 1)
        # Cannot be full: see state_init.
        ring_try_push(&s.submit, message(OP_SUBMIT, self.scheduler.handle(index)))

    cdef void end_request(self, uint64_t request, Ending ending, int64_t now_ns) noexcept nogil:
        self.ending[request] = ending
        self.ended_ns[request] = now_ns

    # --- the scheduler's turn -----------------------------------------------------------

    cdef void schedule(self, int64_t now_ns) noexcept nogil:
        cdef bint has_more = True
        while has_more:
            self.due_ns = scheduler_round(self.scheduler.state, now_ns)
            has_more = self.due_ns == now_ns
            self.collect(now_ns)
            has_more |= self.hand_over(now_ns)
        if self.due_ns < 0:
            self.due_ns = NEVER_NS

    # Slots that sleep begin with what was sent, the others take it after the step under way.
    # True: something ended meanwhile.
    cdef bint hand_over(self, int64_t now_ns) noexcept nogil:
        cdef SchedulerState* s = self.scheduler.state
        cdef bint has_ended = False
        cdef uint32_t i
        for i in range(s.num_slots):
            if not ring_size(&s.slots[i].dispatch):
                continue
            if self.slots[i].num_steps:
                cut_run(&self.slots[i], now_ns + 1)
            else:
                has_ended |= begin_run(&self.slots[i], s, now_ns)
        return has_ended

    # What poll() does for the server: take every event, note it, free what is settled.
    cdef void collect(self, int64_t now_ns) noexcept nogil:
        cdef SchedulerState* s = self.scheduler.state
        cdef uint64_t cell
        cdef uint32_t i
        for i in range(s.num_slots):
            while ring_try_pop(&s.slots[i].events, &cell):
                s.table[index_of(cell)].attempt.notified = 0
        while ring_try_pop(&s.events, &cell):
            self.note(op_of(cell), index_of(cell), now_ns)

    cdef void note(self, uint32_t op, uint32_t index, int64_t now_ns) noexcept nogil:
        cdef Entry* entry = &self.scheduler.state.table[index]
        cdef uint64_t request = self.request_of[index]
        cdef Attempt* attempt = entry.attempt
        cdef bint is_late
        if op == OP_STARTED:
            self.started_ns[request] = attempt.started_ns
            return
        if op == OP_SETTLED:
            self.first_token_ns[request] = attempt.first_token_ns
            is_late = attempt.finish == FINISH_TIMEOUT
            self.end_request(request, ENDING_TIMED_OUT if is_late else ENDING_SERVED,
                             attempt.finished_ns)
        elif op == OP_EXPIRED:
            self.end_request(request, ENDING_EXPIRED, now_ns)
        else:
            self.end_request(request, ENDING_NEVER_FITS, now_ns)
        self.kv_tokens -= entry.footprint_tokens
        free(attempt)
        entry.attempt = NULL
        self.scheduler.recycle(index)
