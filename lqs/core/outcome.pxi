# What comes out: events, and what an attempt came to.
#
# Owner: the event loop's thread, under the GIL.

# What poll() tells, as the first item of each tuple.
EV_FINISHED = int(OP_FINISHED)
EV_OUTPUT = int(OP_OUTPUT)
EV_STARTED = int(OP_STARTED)
EV_EXPIRED = int(OP_EXPIRED)
EV_NO_KV = int(OP_NO_KV)
EV_CANCELLED = int(OP_CANCELLED)
EV_NO_DEVICE = int(OP_NO_DEVICE)
EV_SETTLED = int(OP_SETTLED)
EV_EVICTED = int(OP_EVICTED)
EV_ANSWERED = int(OP_EVICT)


@cython.final
cdef class Outcome:
    """How an attempt ended. Times are the worker's `now_ns`, 0 where it did not get there."""

    cdef readonly uint32_t finish
    cdef readonly int32_t error_code
    cdef readonly uint32_t num_cached_tokens
    cdef readonly uint32_t num_completion_tokens
    cdef readonly int64_t started_ns
    cdef readonly int64_t assigned_ns
    cdef readonly int64_t prefill_done_ns
    cdef readonly int64_t first_token_ns
    cdef readonly int64_t finished_ns
    cdef readonly uint32_t slot


cdef Outcome outcome_of(Attempt* attempt, uint32_t finish):
    cdef Outcome outcome = Outcome.__new__(Outcome)
    outcome.slot = attempt.slot
    outcome.started_ns = attempt.started_ns
    if finish == FINISH_NONE:
        # The worker is dead or hangs and may still write: only what came out is known.
        outcome.finish = attempt.ended_as if attempt.ended_as else FINISH_DEVICE
        outcome.num_completion_tokens = <uint32_t> attempt.num_tokens_told
        return outcome
    outcome.finish = finish
    outcome.error_code = attempt.error_code
    outcome.num_cached_tokens = attempt.num_cached_tokens
    outcome.num_completion_tokens = attempt.num_completion_tokens
    outcome.assigned_ns = attempt.assigned_ns
    outcome.prefill_done_ns = attempt.prefill_done_ns
    outcome.first_token_ns = attempt.first_token_ns
    outcome.finished_ns = attempt.finished_ns
    return outcome


# Copy the payloads of one kind, or of all but text, from head to tail.
cdef void gather(OutBuffer* out, uint64_t tail, bint is_text, char* target) noexcept nogil:
    cdef uint64_t position = out.head
    cdef Record* record
    while position != tail:
        record = <Record*> (out.bytes + (position & (out.capacity - 1)))
        if (record.kind == RECORD_TEXT) == is_text:
            out_copy_out(out, position + sizeof(Record), target, record.num_bytes)
            target += record.num_bytes
        position += out_footprint(record.num_bytes)


# Whether what its worker says is to stay untold. Its finish is the last of that.
cdef inline bint is_held(const Entry* entry) noexcept nogil:
    return entry.hold & HOLD_ON and not entry.attempt.told_finished
