# How many threads a CPU device slot computes with.
#
# llama.cpp's threads wait for each other by spinning. While every one of them has a core
# that is the fastest way; as soon as anything else wants one of those cores, a step waits
# for whichever thread is off its core, and throughput falls many times over. With one
# thread less it hardly falls at all. So: all threads while steps take what they should,
# one less when they do not, all of them again for one try after a while.
#
# "What they should" is a moving mean per step size, learnt at full width. A step counts as
# disturbed when it took SLOW_FACTOR times that *and* the kernel took a core from one of
# this process's threads meanwhile: a long context alone makes a step slow, but takes no core.

cdef enum:
    NUM_SIZES = 16
    NUM_STRIKES = 2

cdef double SLOW_FACTOR = 1.6
cdef int64_t HOLD_NS_MIN = 1000000000
cdef int64_t HOLD_NS_MAX = 32000000000


cdef struct ThreadGovernor:
    int32_t width           # threads that the configuration allows
    int32_t current
    int32_t strikes         # disturbed steps in a row
    int64_t hold_ns         # how long to stay narrow; doubles while tries fail
    int64_t probe_at_ns     # when to try full width again; 0 while wide
    int64_t preemptions     # the kernel's count at the last look
    double expected_ns[NUM_SIZES]


cdef void governor_init(ThreadGovernor* g, int32_t width, int64_t preemptions) noexcept nogil:
    memset(g, 0, sizeof(ThreadGovernor))
    g.width = width
    g.current = width
    g.hold_ns = HOLD_NS_MIN
    g.preemptions = preemptions


cdef int32_t size_class(int32_t num_tokens) noexcept nogil:
    """Steps of about the same size share one expectation: 1, 2, 3-4, 5-8, ..."""
    cdef int32_t k = 0
    while (1 << k) < num_tokens and k < NUM_SIZES - 1:
        k += 1
    return k


cdef void learn_step(ThreadGovernor* g, int32_t k, double step_ns) noexcept nogil:
    if g.expected_ns[k] == 0:
        g.expected_ns[k] = step_ns
    else:
        g.expected_ns[k] += 0.1 * (step_ns - g.expected_ns[k])


cdef bint note_step(ThreadGovernor* g, int32_t num_tokens, int64_t step_ns, int64_t now_ns,
                    int64_t preemptions) noexcept nogil:
    """Take one step in; True where `current` has changed and is to be applied.

    `preemptions` is the kernel's count after the step: how often this process lost a core.
    """
    if g.width < 2:
        return False
    cdef bint lost_core = preemptions > g.preemptions
    cdef int32_t k = size_class(num_tokens)
    g.preemptions = preemptions
    if g.current < g.width:
        if now_ns < g.probe_at_ns:
            return False
        g.current = g.width
        g.strikes = NUM_STRIKES - 1
        return True
    if not (lost_core and g.expected_ns[k] > 0 and step_ns > SLOW_FACTOR * g.expected_ns[k]):
        learn_step(g, k, step_ns)
        if g.strikes > 0:
            g.strikes -= 1
            if g.strikes == 0:
                g.hold_ns = HOLD_NS_MIN
        return False
    g.strikes += 1
    if g.strikes < NUM_STRIKES:
        return False
    g.current = g.width - 1
    g.probe_at_ns = now_ns + g.hold_ns
    g.hold_ns = min(2 * g.hold_ns, HOLD_NS_MAX)
    g.strikes = 0
    return True


@cython.final
cdef class GovernorProbe:
    """One governor driven from Python: for tests."""

    cdef ThreadGovernor _governor

    def __cinit__(self, int32_t width):
        governor_init(&self._governor, width, 0)

    def note(self, int32_t num_tokens, int64_t step_ns, int64_t now_ns, int64_t preemptions) -> bool:
        """Take one step in; whether the number of threads has changed."""
        return note_step(&self._governor, num_tokens, step_ns, now_ns, preemptions)

    @property
    def current(self) -> int:
        """Threads that the next step computes with."""
        return self._governor.current
