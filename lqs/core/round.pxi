cdef class Work:
    pass


cdef class Scheduler:
    pass


cdef int64_t scheduler_round(SchedulerState* s, int64_t now_ns) noexcept nogil:
    return -1


cdef void scheduler_sleep(SchedulerState* s, int64_t timeout_ns) noexcept nogil:
    pass
