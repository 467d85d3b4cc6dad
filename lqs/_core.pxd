# What crosses between threads, and the worker's side of it.
#
# Three kinds of thread meet here. The event loop submits and polls, under the GIL. The
# scheduler's thread runs rounds, and each device slot's worker runs steps; neither ever
# takes the GIL. Nothing is locked. What crosses is a 64-bit message in a ring with one
# producer and one consumer; what it points at (an Entry of the table, an Attempt)
# belongs to whoever holds the message.
#
#   loop --submit--> scheduler --dispatch--> worker      one dispatch ring per device slot
#                    scheduler <--feedback-- worker      one feedback ring per device slot
#   loop <--events-- scheduler
#   loop <--events-- worker                              one event ring per device slot
#
# A ring's push is a release and its pop an acquire, so whatever a thread wrote before it
# pushed a message is visible to the thread that pops it, and so on down the path. That
# one rule orders every plain field below; fields that two threads touch at the same time
# say "atomic".

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy
from posix.unistd cimport write


cdef extern from "_atomics.h" nogil:
    const uint32_t NOWHERE "LQS_NOWHERE"
    const bint IS_DEBUG_BUILD "LQS_IS_DEBUG"

    void lqs_assert(bint condition)
    uint64_t load_relaxed(const uint64_t* word)
    uint64_t load_acquire(const uint64_t* word)
    void store_relaxed(uint64_t* word, uint64_t value)
    void store_release(uint64_t* word, uint64_t value)
    uint64_t add_relaxed(uint64_t* word, uint64_t value)
    bint claim_relaxed(uint64_t* word, uint64_t* expected, uint64_t desired)
    uint32_t load_relaxed32(const uint32_t* word)
    uint32_t load_acquire32(const uint32_t* word)
    void store_relaxed32(uint32_t* word, uint32_t value)
    void store_release32(uint32_t* word, uint32_t value)
    uint32_t exchange32(uint32_t* word, uint32_t value)
    void bump(uint64_t* counter, int64_t by)
    void prefetch(const void* address)


# --- messages ---------------------------------------------------------------------------

# What a message asks or tells. Comments say who sends it to whom.
cdef enum Op:
    OP_SUBMIT = 1       # loop -> scheduler: a request, its entry is filled
    OP_CANCEL = 2       # loop -> scheduler: the entry's cancel flag is up
    OP_LOST = 3         # scheduler -> loop: its device slot died; the entry is the loop's (core/failover.pxi)
    OP_FINISHED = 4     # worker -> scheduler: attempt.finish is set; the worker's last word
    OP_AGAIN = 5        # loop -> scheduler: it is to go on elsewhere from what was told of it
    OP_OUTPUT = 6       # worker -> loop: look at the attempt
    OP_STARTED = 7      # scheduler -> loop: it left the queue for a device slot
    OP_EXPIRED = 8      # scheduler -> loop: ended in the queue, nothing was computed ...
    OP_CANCELLED = 9    # ... and so did these; each of the three also settles it
    OP_NO_DEVICE = 10
    OP_SETTLED = 11     # scheduler -> loop: all is given back, the entry may be freed
    OP_NO_KV = 12       # scheduler -> loop: as OP_EXPIRED, and it was cells that it waited for
    OP_EVICT = 14       # loop -> scheduler: one below this class must leave; back: nobody can
    OP_EVICTED = 15     # scheduler -> loop: it had to; as OP_EXPIRED, and answers OP_EVICT

# Why an attempt ended. Python sees these too.
cpdef enum Finish:
    FINISH_NONE = 0
    FINISH_STOP = 1
    FINISH_LENGTH = 2
    FINISH_CANCELLED = 3
    FINISH_TIMEOUT = 4
    FINISH_ERROR = 5
    FINISH_DEVICE = 6

# Where a request stands, as its scheduler sees it. A filled entry still in state FREE is
# in the submit ring, or in the loop's hands because it was lost.
cdef enum State:
    FREE = 0
    WAITING = 1
    RUNNING = 2
    AGAIN = 3           # waits to go on, before all that wait

# Entry.lane where there are two.
cdef enum:
    LANE_SHORT = 0
    LANE_LONG = 1

# A message is op (4 bits), generation (28 bits), index (32 bits). A handle is a message
# without its op. Generations start at 1, so no handle is 0.
cdef inline uint64_t message(uint64_t op, uint64_t handle) noexcept nogil:
    return op << 60 | handle

cdef inline uint32_t op_of(uint64_t cell) noexcept nogil:
    return <uint32_t> (cell >> 60)

cdef inline uint64_t handle_of(uint64_t cell) noexcept nogil:
    return cell & 0x0FFFFFFFFFFFFFFFULL

cdef inline uint32_t index_of(uint64_t cell) noexcept nogil:
    return <uint32_t> cell

cdef inline uint32_t generation_of(uint64_t cell) noexcept nogil:
    return <uint32_t> (cell >> 32) & 0x0FFFFFFF


# --- waking -----------------------------------------------------------------------------

# Sleeping on an eventfd without losing a wake-up, and without a write while the sleeper is
# awake anyway. `signalled` is exchanged by both sides:
#
#     ASLEEP   a wake must write
#     AWAKE    nobody has called since it awoke
#     CALLED   somebody has, or a write is under way: a wake need not write
#
#     waker     push or set what it is about; exchange(CALLED); write if that was ASLEEP
#     sleeper   look at everything; exchange(ASLEEP); if that was CALLED, look again,
#               else poll the eventfd
#
# The two exchanges have an order. If the waker's comes first, the sleeper's finds CALLED
# and acquires what was released before, so it does not sleep and its next look finds it.
# If the sleeper's comes first, the waker's finds ASLEEP and writes, and the poll returns.
# There is no third way, whatever the call is about: a message, room in a buffer, the end.
cdef enum Sleep:
    ASLEEP = 0
    AWAKE = 1
    CALLED = 2

cdef struct Waker:
    int fd
    uint32_t signalled      # atomic Sleep

cdef int waker_init(Waker* waker) noexcept nogil        # 0, or -1 with errno
cdef void waker_free(Waker* waker) noexcept nogil

# True when it wrote to the eventfd.
cdef inline bint wake(Waker* waker) noexcept nogil:
    cdef uint64_t one = 1
    # Release: what was pushed or set before. Pairs with the sleeper's exchange.
    if exchange32(&waker.signalled, CALLED) != ASLEEP:
        return False
    write(waker.fd, &one, sizeof(one))
    return True

# Sleep until called or until `timeout_ns` has passed (below 0: no limit); at once if there
# was a call since it last awoke. False: the time has passed. May return True early.
cdef bint sleep_on(Waker* waker, int64_t timeout_ns) noexcept nogil


# --- the ring ---------------------------------------------------------------------------

# A bounded ring with one producer and one consumer. `tail` and `head` are tickets: they
# count messages pushed and popped, only grow, and never wrap in practice. The producer
# owns the tail, the consumer the head; each reads the other's only when its own copy of
# it says full or empty, so in a steady flow the two cache lines stay where they are.
# Places are counted apart from tickets, so any capacity from 1 on is exact.
cdef struct Ring:
    uint64_t* cells
    uint64_t capacity
    char pad_shared[48]
    # The producer's line.
    uint64_t tail           # atomic; written by the producer
    uint64_t head_seen      # the producer's copy of head, never ahead of it
    uint64_t tail_place     # tail % capacity
    char pad_producer[40]
    # The consumer's line.
    uint64_t head           # atomic; written by the consumer
    uint64_t tail_seen      # the consumer's copy of tail, never ahead of it
    uint64_t head_place     # head % capacity
    char pad_consumer[40]

cdef int ring_init(Ring* ring, uint64_t capacity) noexcept nogil    # 0, or -1: no memory
cdef void ring_free(Ring* ring) noexcept nogil

# The producer's. False: full.
cdef inline bint ring_try_push(Ring* ring, uint64_t cell) noexcept nogil:
    cdef uint64_t tail = load_relaxed(&ring.tail)
    if tail - ring.head_seen >= ring.capacity:
        # Acquire: pairs with the release in ring_try_pop; the old cell has been read
        # before it is written over.
        ring.head_seen = load_acquire(&ring.head)
        if tail - ring.head_seen >= ring.capacity:
            return False
    ring.cells[ring.tail_place] = cell
    ring.tail_place += 1
    if ring.tail_place == ring.capacity:
        ring.tail_place = 0
    # Release: pairs with the acquire in ring_try_pop; the cell and all before it.
    store_release(&ring.tail, tail + 1)
    return True

# The consumer's. False: empty.
cdef inline bint ring_try_pop(Ring* ring, uint64_t* cell) noexcept nogil:
    cdef uint64_t head = load_relaxed(&ring.head)
    if ring.tail_seen == head:
        # Acquire: pairs with the release in ring_try_push; the cell is there.
        ring.tail_seen = load_acquire(&ring.tail)
        if ring.tail_seen == head:
            return False
    cell[0] = ring.cells[ring.head_place]
    ring.head_place += 1
    if ring.head_place == ring.capacity:
        ring.head_place = 0
    # Release: pairs with the acquire in ring_try_push; the cell may be written over.
    store_release(&ring.head, head + 1)
    return True

# The number pushed or popped, at most n; one release for all of them.
cdef uint64_t ring_push_batch(Ring* ring, const uint64_t* cells, uint64_t n) noexcept nogil
cdef uint64_t ring_pop_batch(Ring* ring, uint64_t* cells, uint64_t n) noexcept nogil

# Exact for a side that stands still, a guess otherwise. From any thread.
cdef inline uint64_t ring_size(Ring* ring) noexcept nogil:
    # Head first: read the other way round, the head could have passed the tail.
    cdef uint64_t head = load_acquire(&ring.head)
    return load_acquire(&ring.tail) - head


# --- the out-buffer ---------------------------------------------------------------------

cdef enum RecordKind:
    RECORD_TEXT = 1         # payload: UTF-8
    RECORD_LOGPROBS = 2     # payload: see lqs/_engine.pyx

cdef struct Record:         # 8 bytes, then the payload, then padding to 8
    uint8_t kind
    uint8_t unused
    uint16_t num_tokens     # sampled tokens that this text accounts for
    uint32_t num_bytes

# The text of one attempt on its way from the worker to the loop: a ring of bytes, ordered
# like Ring. Its capacity is a power of two; a record starts at a multiple of 8, so a
# header never wraps, a payload may.
cdef struct OutBuffer:
    char* bytes
    uint64_t capacity
    char pad_shared[48]
    # The worker's line.
    uint64_t tail           # atomic; written by the worker, in bytes
    uint64_t head_seen
    char pad_worker[48]
    # The loop's line.
    uint64_t head           # atomic; written by the loop, in bytes
    char pad_loop[56]

# Bytes that a write may take now, its header and padding among them. The worker's.
cdef inline uint64_t out_free(OutBuffer* out) noexcept nogil:
    # Acquire: pairs with the loop's release of head; those bytes have been copied out.
    out.head_seen = load_acquire(&out.head)
    return out.capacity - (load_relaxed(&out.tail) - out.head_seen)

# What a payload of n bytes takes in the buffer.
cdef inline uint64_t out_footprint(uint64_t num_bytes) noexcept nogil:
    return sizeof(Record) + ((num_bytes + 7) & ~<uint64_t> 7)

# The worker's. False: no room, nothing written.
cdef bint out_write(OutBuffer* out, uint8_t kind, uint16_t num_tokens, const char* payload,
                    uint32_t num_bytes) noexcept nogil


# --- the table --------------------------------------------------------------------------

# One dispatch of one request. The scheduler makes it, the worker fills it, the loop frees
# it when the request is settled. A worker that wakes late, after its device slot was
# declared dead, still has its own attempt to write into, and nobody looks at it: the
# attempts of a dead device slot are kept until the process ends.
cdef struct Attempt:
    # Written by the scheduler before it is dispatched, constant afterwards.
    uint64_t handle
    uint32_t epoch              # counts the dispatches of this request
    uint32_t slot
    int64_t started_ns
    int64_t queue_ns            # how long it waited
    void* work                  # the engine's
    int64_t stop_ns             # end it then with FINISH_TIMEOUT; 0: never
    uint32_t key
    uint32_t num_prompt_tokens
    uint32_t max_tokens
    uint32_t num_given          # tokens of the answer that `earlier` has made
    uint64_t key_units          # the scheduler's own: what the key was charged for a token
    # Scheduler and worker, while it runs (core/growth.pxi).
    uint32_t granted            # atomic, the scheduler's: KV tokens it may hold; 0: give up its cells
    uint32_t wanted             # atomic, the worker's: KV tokens it will soon need; 0: enough
    # The scheduler's own.
    uint64_t order              # the order of starts
    uint32_t place              # among those that run on its device slot
    uint32_t level
    uint32_t footprint_tokens   # the most it can come to hold
    uint32_t reserved           # promised in the ledger; 0: it is out
    uint32_t used               # of these, noted as filled
    uint32_t end_tokens         # what it is expected to hold at its end
    uint32_t out_tokens         # what it held when it was put out
    uint32_t is_short           # it waits for a growth that did not fit
    # The same request's before this one, on a device slot that died; constant, and never freed.
    Attempt* earlier
    int32_t* made               # the worker's: all tokens of the answer so far, those given included
    # Worker and loop.
    uint32_t notified           # atomic, exchanged: a cell for this is in the event ring
    uint32_t starved            # atomic: the worker waits for room in `out`
    uint32_t finish             # atomic Finish; the worker's release, after the fields below
    # Written by the worker before `finish`.
    int32_t error_code          # llama_decode's, or the engine's own
    uint32_t num_cached_tokens
    uint32_t num_completion_tokens
    int64_t assigned_ns
    int64_t prefill_done_ns
    int64_t first_token_ns
    int64_t finished_ns
    uint32_t num_made           # atomic; the worker's release, after each token and before its text
    uint32_t made_max           # places in `made`; constant
    OutBuffer out
    # The loop's own.
    uint32_t told_started
    uint32_t told_finished
    uint64_t num_tokens_told    # these three of all its attempts
    uint64_t num_bytes_told
    uint64_t num_logprobs_told
    uint32_t is_cut             # nothing of it is looked at any more
    uint32_t num_cut            # tokens of `made` from which the next one goes on
    uint32_t ended_as           # Finish, where no worker said one; whoever holds the entry then
    char pad_loop[12]

# A request whose reader is slow may be held: its worker's words stay untold, so its
# out-buffer fills and pauses its sequence, and no other. The bits of Entry.hold, the loop's.
cdef enum Hold:
    HOLD_ON = 1             # asked for and not lifted
    HOLD_WORD = 2           # the worker's cell was taken and not told; none lies in its ring
    HOLD_END = 4            # OP_SETTLED was taken and not told
    HOLD_LISTED = 8         # lifted: the next poll() looks at it
    HOLD_LOST = 16          # OP_LOST was taken and not acted on

# Where some of a prompt is computed already: a device slot, and how many tokens of it, in
# units and rounded down. The loop's guess, so that a request may go where it has least to do.
cdef enum:
    HINTS_MAX = 2           # of each request: the longest
    HINT_UNIT = 64          # tokens
    HINT_UNITS_MAX = 1023

# No hint, and none of 0 tokens, is 0 units whatever the device slot.
cdef inline uint16_t hint_of(uint32_t slot, uint64_t tokens) noexcept nogil:
    cdef uint64_t units = tokens // HINT_UNIT
    return <uint16_t> (slot << 10 | (units if units < HINT_UNITS_MAX else HINT_UNITS_MAX))

cdef inline uint32_t hint_slot(uint16_t hint) noexcept nogil:
    return hint >> 10

cdef inline uint32_t hint_units(uint16_t hint) noexcept nogil:
    return hint & HINT_UNITS_MAX

# One request in the table: two cache lines. The backlog looks only at the first.
cdef struct Entry:
    # Written by the loop before OP_SUBMIT, constant until it is settled or lost. When it goes on after
    # a loss, what was made counts to the prompt.
    uint32_t generation
    uint32_t key                # who pays: an index into the fair shares
    uint64_t arrival_no         # the order of arrival, and the end of every tie
    int64_t arrival_ns
    uint32_t num_prompt_tokens
    uint32_t max_tokens
    uint32_t footprint_tokens   # KV tokens promised at start
    uint16_t model
    uint8_t level
    uint8_t lane
    int64_t expire_ns           # leaves the queue unserved then; 0: never
    int64_t deadline_ns         # orders inside a key; 0: none
    # The scheduler's.
    uint32_t state              # atomic State
    uint32_t share_tokens       # its part in what its lane takes
    # --- the second line
    Attempt* attempt            # the scheduler's; set before it is dispatched; while it waits, the lost one
    uint32_t epoch              # the scheduler's
    uint32_t cancel             # atomic; set by the loop
    # The loop's.
    int64_t stop_ns             # the worker ends it then with FINISH_TIMEOUT; 0: never
    void* work                  # the engine's
    void* sink                  # Python objects, kept alive until settled
    void* owner                 # of `work`
    uint32_t next               # in the list of free entries; while it lives, of the lifted ones
    uint16_t[HINTS_MAX] hints   # where its prompt has begun before; see hint_of
    uint32_t hold               # bits of Hold
    uint32_t rank               # the scheduler's: how many came to its queue before it; wraps

cdef class Work:
    """What a worker needs to know about a request; the engine derives from it."""
    cdef void* data


# --- device slots and the scheduler's face ----------------------------------------------

cdef enum:
    MAX_DEVICE_SLOTS = 64
    MAX_MODELS = 64
    WEIGHT_UNIT = 1024      # of a device slot's weight of 1

# One model on one device. The pads keep what three threads write apart.
cdef struct DeviceSlot:
    Ring dispatch           # scheduler -> worker, Attempt*; a place for each sequence
    Ring feedback           # worker -> scheduler; a place for each sequence
    Ring events             # worker -> loop; as large as the table
    Waker waker             # the worker sleeps on it
    char pad_waker[56]
    uint32_t asks           # atomic, exchanged: an attempt's `wanted` was raised
    uint32_t unused
    uint64_t step_began_ns  # atomic, the worker's: its heartbeat; 0 between steps
    char pad_asks[48]
    # What the loop wants of the scheduler; core/placement.pxi says how it is read.
    uint32_t wants_drain    # atomic
    uint32_t wants_weight   # atomic; in units
    uint32_t wants_headroom  # atomic, exchanged: KV tokens + 1; NOWHERE: no bound; 0: no news
    uint32_t use_percent    # atomic: how busy the device is, whoever keeps it so
    uint32_t wants_block    # atomic; counts once wants_capacity says so
    uint32_t wants_capacity  # atomic, exchanged: KV tokens that it shall have; 0: no news
    uint32_t wants_rest     # atomic: as wants_drain, by who looks after its health
    uint32_t wants_limit    # atomic: no more than so many run there; 0: no limit but its own
    uint64_t stall_ns       # atomic: a step that takes longer is taken for dead; 0: none is
    uint32_t wants_sequences  # atomic; counts once wants_capacity says so
    char pad_wants[20]
    uint32_t dead           # atomic; set by any thread, never cleared
    uint32_t index
    uint32_t model
    uint32_t num_sequences  # at most as many as its rings have places for
    uint32_t num_sequences_max  # constant
    uint64_t kv_tokens
    uint32_t token_bytes    # what the KV of a token takes
    uint32_t kv_block       # promises grow by so many tokens; 0: each is for all it may need
    uint32_t lanes          # that it is for, as bits
    # The scheduler's own.
    uint32_t lanes_served   # with those that no device slot is for
    uint32_t weight         # in units
    uint32_t drained        # it takes no new requests
    uint32_t buried         # the scheduler has seen `dead`
    uint32_t has_news       # a start or a cancel since the worker was last woken
    uint32_t limit          # of how many run there; 0: its own only
    uint32_t is_stalled     # atomic: it is dead because a step did not end
    int64_t watch_ns        # when its heartbeat is looked at next
    # The loop's own.
    uint32_t is_closed      # dead, and known to be: its event ring is not read any more

# What the three sides share. `own` is the scheduler's: backlog, ledger, counters.
cdef struct SchedulerState:
    Entry* table
    uint32_t capacity
    uint32_t num_slots      # those that the scheduler has seen
    DeviceSlot* slots[MAX_DEVICE_SLOTS]
    void* own
    uint64_t out_buffer_bytes
    double short_share      # of prefill, where short and long prompts are open; constant
    uint32_t fine_level     # from this class on prompts go in the finest chunks; constant
    uint32_t num_added      # atomic, the loop's: those that there are
    char pad[16]
    Waker waker             # the scheduler sleeps on it
    char pad_waker[56]
    Waker loop_waker        # the loop sleeps on it
    char pad_loop_waker[56]
    Ring submit             # loop -> scheduler
    Ring events             # scheduler -> loop


# --- the worker's side ------------------------------------------------------------------
#
# A step of a worker, in these words:
#
#     while (attempt := next_attempt(s, slot)) != NULL: ...            take new work
#     emit_output(s, attempt, ...)                                     any number of times
#     finish_request(s, attempt, finish)                               once per attempt
#     wake_loop(s); wake_scheduler(s)                                  once per step, if told
#     if nothing runs: worker_sleep(s, slot, timeout_ns)

# The next attempt to start on this device slot, or NULL. It is the worker's until it calls
# finish_request, and stays whole even if the device slot is declared dead meanwhile.
cdef inline Attempt* next_attempt(SchedulerState* s, uint32_t slot) noexcept nogil:
    cdef uint64_t cell
    if not ring_try_pop(&s.slots[slot].dispatch, &cell):
        return NULL
    return <Attempt*> <size_t> cell

# What was submitted. Once a device slot is dead its entries go to other requests: a worker
# reads only the cancel flag here, and the attempt for the rest.
cdef inline Entry* entry_of(SchedulerState* s, uint64_t handle) noexcept nogil:
    return &s.table[index_of(handle)]

cdef inline bint is_cancelled(const Entry* entry) noexcept nogil:
    return load_relaxed32(&entry.cancel) != 0

cdef inline bint wants_end(SchedulerState* s, const Attempt* attempt) noexcept nogil:
    return is_cancelled(entry_of(s, attempt.handle))

# Leave word in the event ring, unless one still lies there.
cdef inline void announce(SchedulerState* s, Attempt* attempt) noexcept nogil:
    # The loop exchanges it back to 0 before it reads the attempt. If ours comes first, its
    # acquire sees what we wrote; if its comes first, we find 0 and push another cell.
    if exchange32(&attempt.notified, 1) == 0:
        # Cannot be full: one cell per attempt, and as many places as the table has.
        ring_try_push(&s.slots[attempt.slot].events, message(OP_OUTPUT, attempt.handle))

# One record for the loop; wakes nobody. False: no room, nothing written, and the loop will
# wake this worker once it has made some. A record must be smaller than the out-buffer.
cdef inline bint emit_output(SchedulerState* s, Attempt* attempt, uint8_t kind,
                             uint16_t num_tokens, const char* payload,
                             uint32_t num_bytes) noexcept nogil:
    cdef bint written = out_write(&attempt.out, kind, num_tokens, payload, num_bytes)
    if not written:
        # Before the exchange in announce: the loop that sees the exchange sees this.
        store_relaxed32(&attempt.starved, 1)
    announce(s, attempt)
    return written

# Ask for a promise of so many KV tokens in all; answered by Attempt.granted. wake_scheduler
# at the end of the step.
cdef inline void ask_growth(SchedulerState* s, Attempt* attempt, uint32_t tokens) noexcept nogil:
    store_relaxed32(&attempt.wanted, tokens)
    # Release: pairs with the scheduler's exchange, which comes before it reads `wanted`.
    exchange32(&s.slots[attempt.slot].asks, 1)

# What it may hold. What others gave up for a larger promise was ordered before it was made.
cdef inline uint32_t granted_tokens(const Attempt* attempt) noexcept nogil:
    # Acquire: pairs with the scheduler's release.
    return load_acquire32(&attempt.granted)

# One more token of the answer. Before its text: who sees the text sees the token.
cdef inline void note_made(Attempt* attempt, int32_t token) noexcept nogil:
    cdef uint32_t num = attempt.num_made
    if num < attempt.made_max:
        attempt.made[num] = token
        # Release: pairs with the loop's acquire in take_back.
        store_release32(&attempt.num_made, num + 1)

# The end of an attempt: fill the worker's fields first. Nothing of it may be touched
# afterwards; wakes nobody.
cdef inline void finish_request(SchedulerState* s, Attempt* attempt,
                                uint32_t finish) noexcept nogil:
    cdef Ring* feedback = &s.slots[attempt.slot].feedback
    cdef uint64_t handle = attempt.handle
    # Release: pairs with the loop's acquire of finish; the fields above it.
    store_release32(&attempt.finish, finish)
    announce(s, attempt)
    # Cannot be full: one per running sequence, and as many places.
    ring_try_push(feedback, message(OP_FINISHED, handle))

cdef inline void wake_loop(SchedulerState* s) noexcept nogil:
    wake(&s.loop_waker)

cdef inline void wake_scheduler(SchedulerState* s) noexcept nogil:
    wake(&s.waker)

cdef inline void wake_worker(SchedulerState* s, uint32_t slot) noexcept nogil:
    wake(&s.slots[slot].waker)

# From any thread, also from an abort callback: the worker of this device slot will not
# answer any more. Its requests run elsewhere, or end with FINISH_DEVICE.
cdef inline void report_dead(SchedulerState* s, uint32_t slot) noexcept nogil:
    # Release: pairs with the acquire in the scheduler's round.
    store_release32(&s.slots[slot].dead, 1)
    wake(&s.waker)

# A worker that wakes up dead must touch nothing more and return.
cdef inline bint is_dead(SchedulerState* s, uint32_t slot) noexcept nogil:
    return load_acquire32(&s.slots[slot].dead) != 0

# How a step is filled; the worker and the model of it in core/model_slots.pxi share these.
cdef enum:
    DECODE_EVERY = 4        # decodes that are left out for a better prefill advance so often
    PREFILL_MIN = 16        # tokens of prefill in a step however many decodes there are
    FINE_MIN = 8            # below that a step's own cost shows

# The most tokens of fine prefill in a step with so many decodes. Where a small chunk is not dearer
# than a large one there are no more of them than decodes, so that these are not much slower for it.
cdef inline int32_t fine_chunk(int32_t fine_budget, int32_t num_decodes) noexcept nogil:
    if num_decodes == 0 or fine_budget > PREFILL_MIN:
        return max(fine_budget, <int32_t>PREFILL_MIN)
    return min(max(num_decodes, <int32_t>FINE_MIN), <int32_t>PREFILL_MIN)

# Sleep until someone wakes this worker (for a start, a cancel, room in an out-buffer, the
# end), or the time has passed (below 0: no limit). False: it has passed. Look at
# everything before: what came since is not slept over.
cdef inline bint worker_sleep(SchedulerState* s, uint32_t slot,
                              int64_t timeout_ns) noexcept nogil:
    return sleep_on(&s.slots[slot].waker, timeout_ns)


# --- the scheduler's side ---------------------------------------------------------------

# One round. The next time at which one is due without being woken: now_ns when work was
# left over, -1 for never.
cdef int64_t scheduler_round(SchedulerState* s, int64_t now_ns) noexcept nogil

# As worker_sleep, for the scheduler's thread.
cdef inline bint scheduler_sleep(SchedulerState* s, int64_t timeout_ns) noexcept nogil:
    return sleep_on(&s.waker, timeout_ns)


cdef class Scheduler:
    cdef SchedulerState* state
    # The loop's own.
    cdef uint32_t free_head         # entries that were used and are free
    cdef uint32_t num_touched       # entries from here on were never used
    cdef uint32_t lifted_head       # entries that were held and are not any more
    cdef uint32_t num_live
    cdef uint64_t num_arrived
    cdef uint64_t num_held          # entries whose HOLD_ON is up
    cdef uint64_t num_starved       # times a worker was found to wait for room in `out`
    cdef uint64_t num_kept          # attempts left to the workers of dead device slots
    cdef uint32_t num_evicting      # OP_EVICT under way
    cdef bint has_begun             # no more device slots may be added
    cdef object __weakref__

    cdef int tell(self, list out, uint32_t index, Attempt* attempt) except -1
    cdef int tell_started(self, list out, uint32_t index, Attempt* attempt) except -1
    cdef int tell_output(self, list out, void* sink, Attempt* attempt) except -1
    cdef int tell_settled(self, list out, uint32_t index, Attempt* attempt) except -1
    cdef int take_back(self, list out, uint32_t index, Attempt* attempt) except -1
    cdef void lift(self, uint32_t index) noexcept
    cdef void count_out(self, const Entry* entry) noexcept
    cdef int poll_worker(self, list out, DeviceSlot* slot) except -1
    cdef int poll_lifted(self, list out) except -1
    cdef int poll_scheduler(self, list out, uint64_t num_cells) except -1
    cdef void release(self, uint32_t index) noexcept
    cdef uint64_t handle(self, uint32_t index) noexcept nogil
    cdef uint32_t take_entry(self) noexcept nogil
    cdef void recycle(self, uint32_t index) noexcept nogil
    cdef Entry* live(self, uint64_t handle) noexcept
    cdef int check_level(self, uint32_t level) except -1
    cdef int check_slot(self, uint32_t slot) except -1
    cdef Attempt* running_attempt(self, uint64_t handle) except NULL
