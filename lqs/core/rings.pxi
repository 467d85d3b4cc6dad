# Waker, Ring and OutBuffer: what _core.pxd declares and is too long to inline.

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int initial, int flags)
    const int EFD_CLOEXEC
    const int EFD_NONBLOCK

cdef extern from "<poll.h>" nogil:
    cdef struct pollfd:
        int fd
        short events
        short revents
    int ppoll(pollfd* fds, unsigned long num_fds, const timespec* timeout, const void* sigmask)
    const short POLLIN

cdef extern from "<stdlib.h>" nogil:
    void* aligned_alloc(size_t alignment, size_t size)


cdef extern from "<sys/mman.h>" nogil:
    int madvise(void* address, size_t size, int advice)
    const int MADV_HUGEPAGE

cdef enum:
    LINE_BYTES = 64
    HUGE_PAGE_BYTES = 2 * 1024 * 1024

# Zeroed memory that begins a cache line, so that the pads in the structs mean what they
# say; NULL: no memory. What is larger than a huge page asks for huge pages: with many
# waiting, the walk of the page tables costs more than the miss it is for.
cdef void* new_lines(size_t num_bytes) noexcept nogil:
    cdef size_t unit = LINE_BYTES if num_bytes < HUGE_PAGE_BYTES else HUGE_PAGE_BYTES
    cdef size_t rounded = (num_bytes + unit - 1) & ~(unit - 1)
    cdef void* memory = aligned_alloc(unit, rounded)
    if memory != NULL:
        if unit == HUGE_PAGE_BYTES:
            madvise(memory, rounded, MADV_HUGEPAGE)
        memset(memory, 0, num_bytes)
    return memory


cdef int waker_init(Waker* waker) noexcept nogil:
    waker.signalled = AWAKE
    waker.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
    return 0 if waker.fd >= 0 else -1


cdef void waker_free(Waker* waker) noexcept nogil:
    if waker.fd >= 0:
        close(waker.fd)
    waker.fd = -1


# True: the eventfd was written to.
cdef bint wait_for_write(int fd, int64_t timeout_ns) noexcept nogil:
    cdef pollfd poller
    cdef timespec timeout
    cdef uint64_t count
    poller.fd = fd
    poller.events = POLLIN
    poller.revents = 0
    timeout.tv_sec = timeout_ns // 1_000_000_000
    timeout.tv_nsec = timeout_ns % 1_000_000_000
    if ppoll(&poller, 1, NULL if timeout_ns < 0 else &timeout, NULL) <= 0:
        return False
    read(fd, &count, sizeof(count))
    return True


cdef bint sleep_on(Waker* waker, int64_t timeout_ns) noexcept nogil:
    cdef bint is_called = exchange32(&waker.signalled, ASLEEP) == CALLED
    if not is_called:
        is_called = wait_for_write(waker.fd, timeout_ns)
    # A call that comes before this exchange is answered by it: its push is acquired here,
    # and the caller looks at everything next. Its write may end a later sleep early.
    exchange32(&waker.signalled, AWAKE)
    return is_called


cdef int ring_init(Ring* ring, uint64_t capacity) noexcept nogil:
    memset(ring, 0, sizeof(Ring))
    ring.capacity = capacity
    ring.cells = <uint64_t*> calloc(capacity, sizeof(uint64_t))
    return 0 if ring.cells != NULL else -1


cdef void ring_free(Ring* ring) noexcept nogil:
    free(ring.cells)
    ring.cells = NULL


cdef uint64_t ring_push_batch(Ring* ring, const uint64_t* cells, uint64_t n) noexcept nogil:
    cdef uint64_t tail = load_relaxed(&ring.tail)
    cdef uint64_t room = ring.capacity - (tail - ring.head_seen)
    cdef uint64_t until_wrap = ring.capacity - ring.tail_place
    if room < n:
        # Acquire: as in ring_try_push.
        ring.head_seen = load_acquire(&ring.head)
        room = ring.capacity - (tail - ring.head_seen)
        n = min(n, room)
    if n < until_wrap:
        memcpy(ring.cells + ring.tail_place, cells, n * sizeof(uint64_t))
        ring.tail_place += n
    else:
        memcpy(ring.cells + ring.tail_place, cells, until_wrap * sizeof(uint64_t))
        memcpy(ring.cells, cells + until_wrap, (n - until_wrap) * sizeof(uint64_t))
        ring.tail_place = n - until_wrap
    # Release: as in ring_try_push, once for all n.
    store_release(&ring.tail, tail + n)
    return n


cdef uint64_t ring_pop_batch(Ring* ring, uint64_t* cells, uint64_t n) noexcept nogil:
    cdef uint64_t head = load_relaxed(&ring.head)
    cdef uint64_t until_wrap = ring.capacity - ring.head_place
    if ring.tail_seen - head < n:
        # Acquire: as in ring_try_pop.
        ring.tail_seen = load_acquire(&ring.tail)
        n = min(n, ring.tail_seen - head)
    if n < until_wrap:
        memcpy(cells, ring.cells + ring.head_place, n * sizeof(uint64_t))
        ring.head_place += n
    else:
        memcpy(cells, ring.cells + ring.head_place, until_wrap * sizeof(uint64_t))
        memcpy(cells + until_wrap, ring.cells, (n - until_wrap) * sizeof(uint64_t))
        ring.head_place = n - until_wrap
    # Release: as in ring_try_pop, once for all n.
    store_release(&ring.head, head + n)
    return n


# Copy to or from the byte ring at `position`, in two parts where it wraps.
cdef inline void out_copy_in(OutBuffer* out, uint64_t position, const char* source,
                             uint64_t n) noexcept nogil:
    cdef uint64_t place = position & (out.capacity - 1)
    cdef uint64_t first = min(n, out.capacity - place)
    memcpy(out.bytes + place, source, first)
    memcpy(out.bytes, source + first, n - first)


cdef inline void out_copy_out(const OutBuffer* out, uint64_t position, char* target,
                              uint64_t n) noexcept nogil:
    cdef uint64_t place = position & (out.capacity - 1)
    cdef uint64_t first = min(n, out.capacity - place)
    memcpy(target, out.bytes + place, first)
    memcpy(target + first, out.bytes, n - first)


cdef bint out_write(OutBuffer* out, uint8_t kind, uint16_t num_tokens, const char* payload,
                    uint32_t num_bytes) noexcept nogil:
    cdef uint64_t tail = load_relaxed(&out.tail)
    cdef uint64_t needed = out_footprint(num_bytes)
    cdef Record record
    if out.capacity - (tail - out.head_seen) < needed and out_free(out) < needed:
        return False
    record.kind = kind
    record.unused = 0
    record.num_tokens = num_tokens
    record.num_bytes = num_bytes
    out_copy_in(out, tail, <const char*> &record, sizeof(Record))
    out_copy_in(out, tail + sizeof(Record), payload, num_bytes)
    # Release: pairs with the loop's acquire of tail; the record is whole.
    store_release(&out.tail, tail + needed)
    return True


# --- many producers, many consumers -----------------------------------------------------

# Dmitry Vyukov's bounded MPMC queue. A position in the ring is a ticket: it only grows,
# and names place `ticket & mask`. Each place carries a turn that says whose move it is:
#
#     turn == ticket               empty, the producer holding `ticket` may write
#     turn == ticket + 1           full, the consumer holding `ticket` may read
#     turn == ticket + capacity    empty again, one lap on
#
# A thread claims a ticket first and touches the place second, so the place itself is
# never contended. The two claims are relaxed; the order between a producer and its
# consumer is carried by `turn` alone. With one place "full" and "empty again" would be the
# same turn, so there are at least two.
cdef struct TurnPlace:
    uint64_t turn           # atomic
    uint64_t cell

cdef struct MpmcState:
    TurnPlace* places
    uint64_t capacity       # a power of two
    char pad_shared[48]
    uint64_t tail           # atomic; the next ticket to push with
    char pad_producers[56]
    uint64_t head           # atomic; the next ticket to pop with
    char pad_consumers[56]


cdef int mpmc_init(MpmcState* ring, uint64_t capacity) noexcept nogil:
    cdef uint64_t ticket
    ring.capacity = 2
    while ring.capacity < capacity:
        ring.capacity *= 2
    ring.places = <TurnPlace*> calloc(ring.capacity, sizeof(TurnPlace))
    if ring.places == NULL:
        return -1
    for ticket in range(ring.capacity):
        ring.places[ticket].turn = ticket
    return 0


cdef bint mpmc_try_push(MpmcState* ring, uint64_t cell) noexcept nogil:
    cdef uint64_t ticket = load_relaxed(&ring.tail)
    cdef TurnPlace* place
    cdef int64_t lead
    while True:
        place = &ring.places[ticket & (ring.capacity - 1)]
        # Acquire: pairs with the release in mpmc_try_pop, so the old cell has been read
        # before it is written over.
        lead = <int64_t> (load_acquire(&place.turn) - ticket)
        if lead == 0:
            if claim_relaxed(&ring.tail, &ticket, ticket + 1):
                place.cell = cell
                # Release: pairs with the acquire in mpmc_try_pop; the cell.
                store_release(&place.turn, ticket + 1)
                return True
        elif lead < 0:
            return False                # A lap behind: the ring is full.
        else:
            ticket = load_relaxed(&ring.tail)


cdef bint mpmc_try_pop(MpmcState* ring, uint64_t* cell) noexcept nogil:
    cdef uint64_t ticket = load_relaxed(&ring.head)
    cdef TurnPlace* place
    cdef int64_t lead
    while True:
        place = &ring.places[ticket & (ring.capacity - 1)]
        # Acquire: pairs with the release in mpmc_try_push; the cell is there.
        lead = <int64_t> (load_acquire(&place.turn) - (ticket + 1))
        if lead == 0:
            if claim_relaxed(&ring.head, &ticket, ticket + 1):
                cell[0] = place.cell
                # Release: pairs with the acquire in mpmc_try_push; the place is free.
                store_release(&place.turn, ticket + ring.capacity)
                return True
        elif lead < 0:
            return False                # Its producer has not come yet: empty.
        else:
            ticket = load_relaxed(&ring.head)


# A guess while others push and pop, exact when they do not.
cdef uint64_t mpmc_size(MpmcState* ring) noexcept nogil:
    cdef int64_t size = <int64_t> (load_relaxed(&ring.tail) - load_relaxed(&ring.head))
    return <uint64_t> max(<int64_t> 0, size)
