# What can be told to those who wait: where they stand and how fast their queue moves.
#
# A request waits for one model, in one lane and one class. Starts are counted there, so a long request
# hears of the pace of long requests and not of the short ones that pass it.
#
# Owner: the scheduler's thread. Counters are atomics with one writer, read by anyone.

cdef enum:
    DRAIN_PERIOD_NS = 250_000_000       # a drain rate is looked at this often ...
    DRAIN_MEMORY_NS = 5_000_000_000     # ... and forgets at this pace

# How fast a queue is left.
cdef struct Drain:
    uint64_t per_gs                 # atomic: starts per 10**9 s while somebody waited; 0: unknown
    # The scheduler's own.
    uint64_t num_started_before
    int64_t busy_ns
    bint was_waiting

# One class in one lane of one model. Atomic, one writer, but for what Drain says.
cdef struct QueueBook:
    uint64_t num_enqueued           # also the source of Entry.rank
    uint64_t num_waiting
    uint64_t num_started
    uint64_t wait_ns_sum            # of those who started
    Drain drain


# One more waits; its rank, which is how many came to its queue before it. Wraps.
cdef inline uint32_t queue_join(QueueBook* queue) noexcept nogil:
    cdef uint32_t rank = <uint32_t> queue.num_enqueued
    bump(&queue.num_enqueued, 1)
    bump(&queue.num_waiting, 1)
    return rank


# How many of its own queue are ahead of a rank: exact while its queue is left in order of
# arrival, never more than wait beside it.
cdef inline uint32_t num_ahead(QueueBook* queue, uint32_t rank) noexcept nogil:
    cdef uint32_t waiting = <uint32_t> load_relaxed(&queue.num_waiting)
    cdef uint32_t first = <uint32_t> load_relaxed(&queue.num_enqueued) - waiting
    cdef int32_t ahead = <int32_t> (rank - first)
    return min(max(ahead, 0), max(<int32_t> waiting - 1, 0))


# Over the time in which the queue had anybody: starts while nobody waits say how many
# come, not how many can be served.
cdef void note_drain(Drain* drain, uint64_t num_started, uint64_t num_waiting,
                     int64_t passed_ns) noexcept nogil:
    cdef double rate, share
    if drain.was_waiting:
        drain.busy_ns += passed_ns
    else:
        drain.num_started_before = num_started
        drain.busy_ns = 0
    drain.was_waiting = num_waiting != 0
    if drain.busy_ns < DRAIN_PERIOD_NS:
        return
    rate = 1e18 * (num_started - drain.num_started_before) / drain.busy_ns
    if drain.per_gs:
        share = drain.busy_ns / <double> (drain.busy_ns + DRAIN_MEMORY_NS)
        rate = drain.per_gs + share * (rate - drain.per_gs)
    # 0 says unknown; a queue that waits and does not start at all is as good as that.
    store_relaxed(&drain.per_gs, <uint64_t> rate)
    drain.num_started_before = num_started
    drain.busy_ns = 0


cdef inline void note_queue(QueueBook* queue, int64_t passed_ns) noexcept nogil:
    note_drain(&queue.drain, queue.num_started, queue.num_waiting, passed_ns)
