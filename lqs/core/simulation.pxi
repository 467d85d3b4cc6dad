# A trace played through a Scheduler under a virtual clock.
#
# Nothing here decides anything: arrivals are judged by the door of door.pxi and go in through
# the submit ring, the very rounds of round.pxi order and place them, model slots play the
# workers. The clock jumps from event to event: an arrival, the end of a run, the time at which
# a round is due or somebody at the door loses patience.
#
#     time moves -> runs that end -> requests that arrive -> a round -> its events and who
#     stands at the door -> slots take what was sent
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
    ENDING_BREAKER = 4      # the breaker of its class was open
    ENDING_EVICTED = 5      # it had to leave the queue for one of a better class
    ENDING_EXPIRED = 6      # it waited longer than it may
    ENDING_NEVER_FITS = 7   # no device slot could ever hold it

cdef int64_t NEVER_NS = 0x7FFFFFFFFFFFFFFF


@cython.final
@cython.no_gc_clear
cdef class Simulation:
    """Plays requests through a door and a scheduler whose device slots are models.

    `costs` has one (fixed_ns, decode_ns, prefill_ns, context_ns, cells_ns, budget, fine_budget,
    batch_max, target_ns) for each device slot of `scheduler`; see core/model_slots.pxi. The
    columns describe the requests in the order of `arrival_ns`; the last five are written as they
    start and end: the clock's times, 0 for what did not come, and in `start_no` the order of the
    starts, from 1 on. With `has_lanes` those above the scheduler's border stand in the long lane.
    `context_tokens` bounds prompt and answer together. Above a load of `high_load_at` all but the
    best class come in one class lower. Times are the virtual clock's nanoseconds, limits 0 for
    none.

    Scheduler and door are the simulation's own from then on; the scheduler's permits must bind
    nobody. Owner: one thread.
    """

    cdef Scheduler scheduler
    cdef Door door
    cdef ModelSlot* slots
    cdef uint32_t* request_of       # by entry of the table
    cdef const int64_t[::1] arrival_ns
    cdef const uint32_t[::1] prompt_tokens, completion_tokens, max_tokens, key
    cdef const uint8_t[::1] level
    cdef int64_t[::1] started_ns, first_token_ns, ended_ns
    cdef uint32_t[::1] start_no
    cdef uint8_t[::1] ending
    cdef bint has_lanes
    cdef uint32_t context_tokens
    cdef int64_t queue_limit_ns, run_limit_ns
    cdef double high_load_at
    cdef uint64_t num_requests
    cdef uint64_t num_arrived
    cdef uint64_t num_ended
    cdef uint32_t num_started
    cdef int64_t due_ns             # the next round that is due by itself

    def __cinit__(self, Scheduler scheduler not None, Door door not None, costs, *,
                  const int64_t[::1] arrival_ns, const uint32_t[::1] prompt_tokens,
                  const uint32_t[::1] completion_tokens, const uint32_t[::1] max_tokens,
                  const uint8_t[::1] level, const uint32_t[::1] key,
                  int64_t[::1] started_ns, int64_t[::1] first_token_ns, int64_t[::1] ended_ns,
                  uint32_t[::1] start_no, uint8_t[::1] ending, bint has_lanes, uint32_t context_tokens,
                  int64_t queue_limit_ns=0, int64_t run_limit_ns=0, double high_load_at=1.0):
        self.scheduler = scheduler
        self.door = door
        self.due_ns = NEVER_NS
        self.num_requests = len(arrival_ns)
        self.arrival_ns, self.prompt_tokens = arrival_ns, prompt_tokens
        self.completion_tokens, self.max_tokens = completion_tokens, max_tokens
        self.level, self.key = level, key
        self.started_ns, self.first_token_ns = started_ns, first_token_ns
        self.ended_ns, self.start_no, self.ending = ended_ns, start_no, ending
        self.has_lanes = has_lanes
        self.context_tokens = context_tokens
        self.queue_limit_ns = queue_limit_ns
        self.run_limit_ns = run_limit_ns
        self.high_load_at = high_load_at
        if not (len(arrival_ns) == len(prompt_tokens) == len(completion_tokens) == len(max_tokens)
                == len(level) == len(key) == len(started_ns) == len(first_token_ns)
                == len(ended_ns) == len(start_no) == len(ending)):
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
                model_slot_free(&self.slots[i])
        free(self.slots)
        free(self.request_of)

    # What a native loop will not look at again.
    cdef int check_columns(self) except -1:
        cdef BacklogState* backlog = books_of(self.scheduler.state).backlog
        cdef uint64_t i
        for i in range(self.num_requests):
            if self.level[i] >= backlog.num_levels or self.key[i] >= backlog.num_keys:
                raise IndexError(f"request {i}: no such class or key")
            if self.arrival_ns[i] < 0 or (i and self.arrival_ns[i] < self.arrival_ns[i - 1]):
                raise ValueError(f"request {i}: arrivals are at least 0 and do not go back")
        if self.scheduler.num_touched or self.door.num_inside or self.door.num_guests:
            raise ValueError("the scheduler or the door has had requests before")
        if self.has_lanes and backlog.num_lanes < 2:
            raise ValueError("the scheduler has one lane only")
        if self.door.door.num_levels != backlog.num_levels:
            raise ValueError("scheduler and door have other classes")

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
            if model_slot_init(&self.slots[i], s, i):
                raise MemoryError
            cost = &self.slots[i].cost
            (cost.fixed_ns, cost.decode_ns, cost.prefill_ns, cost.context_ns, cost.cells_ns,
             cost.budget, cost.fine_budget, cost.batch_max, cost.target_ns) = costs[i]
            self.slots[i].budget = cost.budget
            if min(costs[i]) < 0 or cost.batch_max < <int64_t> s.slots[i].num_sequences:
                raise ValueError("a cost is not below 0, and a step has room for every sequence")

    @property
    def num_left(self):
        """Requests that have not ended, those to come included."""
        return self.num_requests - self.num_ended

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
            if has_news or self.due_ns <= now_ns or self.door.door.due_ns <= now_ns:
                self.schedule(now_ns)
        return True

    cdef int64_t next_event_ns(self) noexcept nogil:
        cdef int64_t next_ns = min(self.due_ns, self.door.door.due_ns)
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

    # True: the scheduler has to hear of it.
    cdef bint take_arrival(self, uint64_t request) noexcept nogil:
        cdef DoorState* d = &self.door.door
        cdef int64_t now_ns = self.arrival_ns[request]
        cdef int64_t expire_ns = now_ns + self.queue_limit_ns if self.queue_limit_ns else 0
        cdef uint32_t level = self.level[request]
        cdef Verdict verdict
        if self.prompt_tokens[request] >= self.context_tokens:
            self.end_request(request, ENDING_NEVER_FITS, now_ns)
            return False
        door_look(d, self.scheduler.state)
        if 0 < level < d.num_levels - 1 and door_load(d) > self.high_load_at:
            level += 1
        door_enter(d, level, now_ns, expire_ns, request, &verdict)
        return self.obey(&verdict, now_ns)

    # Do what the door says of a request. True: the scheduler has to hear of it.
    cdef bint obey(self, const Verdict* verdict, int64_t now_ns) noexcept nogil:
        if verdict.say == DOOR_IN:
            return self.submit(verdict.user, verdict.level, now_ns)
        if verdict.say == DOOR_EVICT:
            self.scheduler.num_evicting += 1
            # Cannot be full, and the door asks for no more than the scheduler takes.
            ring_try_push(&self.scheduler.state.submit, message(OP_EVICT, verdict.level))
            return True
        if verdict.say == DOOR_FULL:
            self.end_request(verdict.user, ENDING_REFUSED, now_ns)
        elif verdict.say == DOOR_BROKEN:
            self.end_request(verdict.user, ENDING_BREAKER, now_ns)
        return False

    # Scheduler.submit without what belongs to Python: no Work, no sink, no wake. False: the
    # table is full, and the request is refused.
    cdef bint submit(self, uint64_t request, uint32_t level, int64_t now_ns) noexcept nogil:
        cdef SchedulerState* s = self.scheduler.state
        cdef uint32_t index = self.scheduler.take_entry()
        if index == NOWHERE:
            door_leave(&self.door.door, level)
            self.end_request(request, ENDING_REFUSED, now_ns)
            return False
        self.request_of[index] = <uint32_t> request
        self.fill(&s.table[index], request, level)
        door_submit(&self.door.door, level, s.table[index].footprint_tokens)
        add_relaxed(&books_of(s).permits[level].taken, 1)
        add_relaxed(&books_of(s).total.taken, 1)
        # Cannot be full: see state_init.
        ring_try_push(&s.submit, message(OP_SUBMIT, self.scheduler.handle(index)))
        return True

    cdef void fill(self, Entry* entry, uint64_t request, uint32_t level) noexcept nogil:
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
        entry.level = <uint8_t> level
        entry.lane = LANE_SHORT
        if self.has_lanes and (entry.footprint_tokens
                               > books_of(self.scheduler.state).shares.border_tokens):
            entry.lane = LANE_LONG
        entry.work = <void*> <size_t> self.completion_tokens[request]
        entry.cancel = 0
        self.scheduler.num_arrived += 1

    cdef void end_request(self, uint64_t request, Ending ending, int64_t now_ns) noexcept nogil:
        self.ending[request] = ending
        self.ended_ns[request] = now_ns
        self.num_ended += 1

    # --- the scheduler's turn -----------------------------------------------------------

    cdef void schedule(self, int64_t now_ns) noexcept nogil:
        cdef bint has_more = True
        while has_more:
            self.due_ns = scheduler_round(self.scheduler.state, now_ns)
            has_more = self.due_ns == now_ns
            has_more |= self.collect(now_ns)
            has_more |= self.tend_door(now_ns)
            has_more |= self.hand_over(now_ns)
        if self.due_ns < 0:
            self.due_ns = NEVER_NS

    # Slots that sleep begin with what was sent or promised, the others look after the step
    # under way. True: the scheduler has to hear of something.
    cdef bint hand_over(self, int64_t now_ns) noexcept nogil:
        cdef SchedulerState* s = self.scheduler.state
        cdef bint has_ended = False
        cdef uint32_t i
        for i in range(s.num_slots):
            if s.slots[i].waker.signalled != CALLED:
                continue
            # As one that is awake: nobody sleeps here, so nothing is ever written.
            s.slots[i].waker.signalled = AWAKE
            self.slots[i].is_called = True
            if self.slots[i].num_steps:
                cut_run(&self.slots[i], now_ns + 1)
            else:
                has_ended |= begin_run(&self.slots[i], s, now_ns)
        return has_ended

    # Those at the door for whom there is a place now, or whose time is over. True: one is in.
    cdef bint tend_door(self, int64_t now_ns) noexcept nogil:
        cdef bint has_news = False
        cdef Verdict verdict
        door_look(&self.door.door, self.scheduler.state)
        while door_next(&self.door.door, now_ns, &verdict):
            has_news |= self.obey(&verdict, now_ns)
        return has_news

    # What poll() does for the server: take every event, note it, free what is settled. True:
    # one came in for another that was evicted.
    cdef bint collect(self, int64_t now_ns) noexcept nogil:
        cdef SchedulerState* s = self.scheduler.state
        cdef bint has_news = False
        cdef uint64_t cell
        cdef uint32_t op, i
        for i in range(s.num_slots):
            while ring_try_pop(&s.slots[i].events, &cell):
                s.table[index_of(cell)].attempt.notified = 0
        while ring_try_pop(&s.events, &cell):
            op = op_of(cell)
            if op != OP_EVICT:
                self.note(op, index_of(cell), now_ns)
            if op == OP_EVICT or op == OP_EVICTED:
                has_news |= self.answer(op == OP_EVICTED, now_ns)
        return has_news

    cdef bint answer(self, bint was_evicted, int64_t now_ns) noexcept nogil:
        cdef Verdict verdict
        self.scheduler.num_evicting -= 1
        door_look(&self.door.door, self.scheduler.state)
        door_answer(&self.door.door, was_evicted, now_ns, &verdict)
        return self.obey(&verdict, now_ns)

    cdef void note(self, uint32_t op, uint32_t index, int64_t now_ns) noexcept nogil:
        cdef Entry* entry = &self.scheduler.state.table[index]
        cdef uint64_t request = self.request_of[index]
        cdef Attempt* attempt = entry.attempt
        if op == OP_STARTED:
            self.started_ns[request] = attempt.started_ns
            self.num_started += 1
            self.start_no[request] = self.num_started
            door_start(&self.door.door, entry.level)
            return
        if op == OP_SETTLED:
            self.first_token_ns[request] = attempt.first_token_ns
            now_ns = attempt.finished_ns
        self.end_request(request, ending_of(op, attempt), now_ns)
        door_settle(&self.door.door, entry.level, entry.footprint_tokens, op == OP_SETTLED)
        free(attempt)
        entry.attempt = NULL
        self.scheduler.recycle(index)


# What the scheduler's last word about a request means.
cdef Ending ending_of(uint32_t op, const Attempt* attempt) noexcept nogil:
    if op == OP_SETTLED:
        return ENDING_TIMED_OUT if attempt.finish == FINISH_TIMEOUT else ENDING_SERVED
    if op == OP_EXPIRED or op == OP_NO_KV:
        return ENDING_EXPIRED
    if op == OP_EVICTED:
        return ENDING_EVICTED
    return ENDING_NEVER_FITS
