# Native threads' work, for stress tests and for measuring: what only a thread without the
# GIL can show. Nothing here is part of the server.
#
# Who waits yields, and gives up after PATIENCE yields in a row, so that a lost message
# ends a test instead of hanging it.

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef enum:
    PATIENCE = 20_000_000
    DRIVEN_MAX = 1024           # attempts that one driven worker runs at once
    SLEEP_NS_MAX = 20_000_000_000


def _push_many(SpscRing ring not None, uint64_t first, uint64_t n):
    """Push first, first + 1, ... without the GIL; how many."""
    cdef uint64_t done = 0, waited = 0
    with nogil:
        while done < n and waited < PATIENCE:
            if ring_try_push(ring.ring, first + done):
                done += 1
                waited = 0
            else:
                waited += 1
                sched_yield()
    return done


def _pop_many(SpscRing ring not None, uint64_t first, uint64_t n):
    """Pop n without the GIL; how many came, and each in its turn, from `first` on."""
    cdef uint64_t done = 0, waited = 0, cell
    with nogil:
        while done < n and waited < PATIENCE:
            if not ring_try_pop(ring.ring, &cell):
                waited += 1
                sched_yield()
            elif cell == first + done:
                done += 1
                waited = 0
            else:
                break
    return done


def _push_batches(SpscRing ring not None, uint64_t first, uint64_t n, uint64_t size):
    """As _push_many, `size` (at most 256) at a time."""
    cdef uint64_t[256] cells
    cdef uint64_t done = 0, waited = 0, pushed, i
    size = min(size, <uint64_t> 256)
    with nogil:
        while done < n and waited < PATIENCE:
            for i in range(size):
                cells[i] = first + done + i
            pushed = ring_push_batch(ring.ring, cells, min(size, n - done))
            done += pushed
            waited = 0 if pushed else waited + 1
            if not pushed:
                sched_yield()
    return done


def _pop_batches(SpscRing ring not None, uint64_t first, uint64_t n, uint64_t size):
    """As _pop_many, up to `size` (at most 256) at a time."""
    cdef uint64_t[256] cells
    cdef uint64_t done = 0, waited = 0, popped, i
    cdef bint is_right = True
    size = min(size, <uint64_t> 256)
    with nogil:
        while done < n and is_right and waited < PATIENCE:
            popped = ring_pop_batch(ring.ring, cells, min(size, n - done))
            waited = 0 if popped else waited + 1
            if not popped:
                sched_yield()
            for i in range(popped):
                is_right &= cells[i] == first + done + i
            done += popped
    return done if is_right else 0


def _push_shared(MpmcRing ring not None, uint64_t first, uint64_t n):
    """As _push_many, into a ring with many producers."""
    cdef uint64_t done = 0, waited = 0
    with nogil:
        while done < n and waited < PATIENCE:
            if mpmc_try_push(ring.ring, first + done):
                done += 1
                waited = 0
            else:
                waited += 1
                sched_yield()
    return done


def _pop_shared(MpmcRing ring not None, uint64_t n, bytearray seen not None):
    """Pop n without the GIL and count each in `seen[value]`; how many came."""
    cdef uint64_t done = 0, waited = 0, cell, size = len(seen)
    cdef char* counts = PyByteArray_AS_STRING(seen)
    with nogil:
        while done < n and waited < PATIENCE:
            if not mpmc_try_pop(ring.ring, &cell):
                waited += 1
                sched_yield()
            elif cell < size:
                counts[cell] += 1
                done += 1
                waited = 0
            else:
                break
    return done


def _wake_many(Scheduler scheduler not None, uint64_t n):
    """Push n starts to device slot 0, one at a time, each with its own wake; how many."""
    cdef SchedulerState* s = scheduler.state
    cdef uint64_t done = 0, waited = 0
    with nogil:
        while done < n and waited < PATIENCE:
            if ring_try_push(&s.slots[0].dispatch, done + 1):
                wake_worker(s, 0)
                done += 1
                waited = 0
            else:
                waited += 1
                sched_yield()
    return done


def _sleep_many(Scheduler scheduler not None, uint64_t n):
    """Take n starts on device slot 0, asleep between them; how many came.

    It stops short when it sleeps out its time: then a wake was lost.
    """
    cdef SchedulerState* s = scheduler.state
    cdef uint64_t done = 0, cell
    with nogil:
        while done < n:
            if ring_try_pop(&s.slots[0].dispatch, &cell):
                if cell != done + 1:
                    break
                done += 1
            elif not worker_sleep(s, 0, SLEEP_NS_MAX):
                break
    return done


@cython.final
cdef class _Drive:
    """Plays the scheduler's thread and one worker of a Scheduler, natively.

    The clock counts rounds. Owner: `schedule` one thread, the worker's half another.
    """

    cdef Scheduler scheduler
    cdef uint32_t slot
    cdef uint32_t is_stopping           # atomic
    cdef uint32_t num_running
    cdef (Attempt*)[DRIVEN_MAX] running
    cdef uint64_t num_wakes             # eventfd writes towards the loop
    cdef uint64_t num_steps
    cdef uint64_t num_starved
    cdef bint has_asked

    def __cinit__(self, Scheduler scheduler not None, uint32_t slot=0):
        scheduler.check_slot(slot)
        self.scheduler = scheduler
        self.slot = slot

    @property
    def figures(self):
        """(steps, eventfd writes towards the loop, times an out-buffer was full)."""
        return self.num_steps, self.num_wakes, self.num_starved

    def stop(self):
        """End both loops; from any thread."""
        store_relaxed32(&self.is_stopping, 1)
        wake(&self.scheduler.state.waker)
        wake(&self.scheduler.state.slots[self.slot].waker)

    def schedule(self):
        """Rounds until stopped; how many."""
        cdef SchedulerState* s = self.scheduler.state
        cdef int64_t now_ns = 0
        with nogil:
            while not load_relaxed32(&self.is_stopping):
                now_ns += 1
                if scheduler_round(s, now_ns) != now_ns:
                    scheduler_sleep(s, SLEEP_NS_MAX)
        return now_ns

    def work(self, uint32_t num_tokens):
        """Steps until stopped: each request gets `num_tokens` times one byte of text.

        Where promises grow, three in four get an eighth of that, so that the rest is not expected.
        """
        with nogil:
            while not load_relaxed32(&self.is_stopping):
                if not self.step(num_tokens, NULL, 1):
                    worker_sleep(self.scheduler.state, self.slot, SLEEP_NS_MAX)

    def begin(self):
        """Take new work; how many run now."""
        self.take_starts()
        return self.num_running

    def emit_steps(self, uint64_t n, bytes text not None):
        """n steps that send this text as one token of each that runs."""
        cdef const char* payload = PyBytes_AS_STRING(text)
        cdef uint32_t num_bytes = <uint32_t> len(text)
        with nogil:
            for _ in range(n):
                self.step(0xFFFFFFFF, payload, num_bytes)

    def decide(self, uint64_t n, int64_t now_ns):
        """n times: end what runs, and a round, which starts the next; how many starts."""
        cdef SchedulerState* s = self.scheduler.state
        cdef uint64_t num_starts = 0
        cdef Attempt* attempt
        with nogil:
            for _ in range(n):
                attempt = next_attempt(s, self.slot)
                while attempt != NULL:
                    finish_request(s, attempt, FINISH_STOP)
                    num_starts += 1
                    attempt = next_attempt(s, self.slot)
                scheduler_round(s, now_ns)
        return num_starts

    cdef void take_starts(self) noexcept nogil:
        cdef Attempt* attempt
        while self.num_running < DRIVEN_MAX:
            attempt = next_attempt(self.scheduler.state, self.slot)
            if attempt == NULL:
                break
            # Each token is a byte here. What a lost attempt made and nobody was told is told by this one.
            attempt.num_completion_tokens = <uint32_t> attempt.num_bytes_told
            self.running[self.num_running] = attempt
            self.num_running += 1

    # One step; False: nothing could be done. Without a payload each token is the next letter.
    cdef bint step(self, uint32_t num_tokens, const char* payload,
                   uint32_t num_bytes) noexcept nogil:
        cdef SchedulerState* s = self.scheduler.state
        cdef bint has_moved = False, has_finished = False
        cdef Attempt* attempt
        cdef const char* text
        cdef char letter
        cdef uint32_t i = 0
        self.take_starts()
        while i < self.num_running:
            if self.is_over(self.running[i], num_tokens):
                self.num_running -= 1
                self.running[i] = self.running[self.num_running]
                has_moved = has_finished = True
                continue
            if not self.has_cell(self.running[i]):
                i += 1
                continue
            attempt = self.running[i]
            letter = 97 + attempt.num_completion_tokens % 26
            if attempt.num_made == attempt.num_completion_tokens:
                note_made(attempt, letter)
            text = payload
            if payload == NULL:
                text = &letter
            if emit_output(s, attempt, RECORD_TEXT, 1, text, num_bytes):
                attempt.num_completion_tokens += 1
                has_moved = True
            else:
                self.num_starved += 1
            i += 1
        self.num_steps += 1
        self.num_wakes += wake(&s.loop_waker)
        if has_finished or self.has_asked:
            self.has_asked = False
            wake(&s.waker)
        return has_moved

    # Whether its next token is promised a cell; asks for more half a block before.
    cdef bint has_cell(self, Attempt* attempt) noexcept nogil:
        cdef SchedulerState* s = self.scheduler.state
        cdef uint32_t block = s.slots[self.slot].kv_block
        cdef uint32_t held = attempt.num_prompt_tokens + attempt.num_completion_tokens
        cdef uint32_t granted = granted_tokens(attempt)
        if block == 0:
            return True
        if granted and held + block // 2 >= granted and attempt.wanted <= granted:
            ask_growth(s, attempt, granted + block)
            self.has_asked = True
        return held < granted

    # End an attempt that has all its tokens, or whose client has left.
    cdef bint is_over(self, Attempt* attempt, uint32_t num_tokens) noexcept nogil:
        cdef SchedulerState* s = self.scheduler.state
        if s.slots[self.slot].kv_block and index_of(attempt.handle) % 4:
            num_tokens //= 8
        if wants_end(s, attempt):
            finish_request(s, attempt, FINISH_CANCELLED)
        elif attempt.num_completion_tokens >= num_tokens:
            finish_request(s, attempt, FINISH_LENGTH)
        else:
            return False
        return True
