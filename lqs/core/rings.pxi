# Waker, Ring and OutBuffer: what _core.pxd declares and is too long to inline.

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int initial, int flags)
    const int EFD_CLOEXEC
    const int EFD_NONBLOCK

from posix.unistd cimport close


cdef int waker_init(Waker* waker) noexcept nogil:
    waker.signalled = 1
    waker.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
    return 0 if waker.fd >= 0 else -1


cdef void waker_free(Waker* waker) noexcept nogil:
    if waker.fd >= 0:
        close(waker.fd)
    waker.fd = -1


cdef void wait_on(Waker* waker, int64_t timeout_ns) noexcept nogil:
    cdef pollfd poller
    cdef timespec timeout
    cdef uint64_t count
    poller.fd = waker.fd
    poller.events = POLLIN
    poller.revents = 0
    timeout.tv_sec = timeout_ns // 1_000_000_000
    timeout.tv_nsec = timeout_ns % 1_000_000_000
    if ppoll(&poller, 1, NULL if timeout_ns < 0 else &timeout, NULL) > 0:
        read(waker.fd, &count, sizeof(count))
    stay_awake(waker)


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
