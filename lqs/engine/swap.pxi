# Cells that are given up and come back: what the worker does about promises that grow.
#
# The scheduler decides (core/growth.pxi); the worker asks, and does as it is told between two
# steps. What a sequence may hold stands in its attempt:
#
#     more than it has    it is computed as ever; half a block before the end it asks
#     all that it has     it is left out of the batch: a pause that costs nothing
#     0                   it gives its cells up
#     more again          it comes back
#
# A sequence that is out keeps its id, its tokens, its sampler with grammar and penalties, and
# the text it holds back; only its cells are gone. So it can be cancelled, run out of time or
# end with its device slot like any other, and its client sees a pause. Its cells come back
# in one of two ways: from a copy of their state in host memory, bit for bit; or, where there
# is no copy (host memory is bounded, and some devices compute faster than they copy), by
# computing prompt and answer again. Either way its next draw is keyed by the same position,
# so its text is the same.
#
# A copy holds borrowed cells too; what comes back are cells of its own, behind all others, in
# the order of its positions (prefix.pxi).
#
# Owner: the worker thread.

cdef void obey(WorkerData* w) noexcept nogil:
    """Ask for what will be needed, give up what was taken away, take back what was given back."""
    cdef Sequence* seq
    cdef int32_t i
    if w.kv_block == 0 and w.num_out == 0:
        return
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if not is_active(seq):
            continue
        seq.granted = granted_tokens(seq.attempt)
        if seq.is_out:
            continue
        if seq.granted == 0:
            give_up_cells(w, seq)
        elif w.kv_block > 0:
            ask_ahead(w, seq)
    seq = next_back(w)
    while seq != NULL and bring_back(w, seq):
        seq = next_back(w)


cdef void ask_ahead(WorkerData* w, Sequence* seq) noexcept nogil:
    """Ask for a further block half a block before it is needed, once."""
    cdef uint32_t needed = max(seq.num_kv, seq.num_fill) + w.kv_block // 2
    cdef uint32_t most = seq.num_prompt + seq.work.max_tokens
    if needed < seq.granted or seq.granted >= most or seq.attempt.wanted > seq.granted:
        return
    ask_growth(w.sched, seq.attempt, min(seq.granted + w.kv_block, most))
    w.has_asked = True


# ---- out ----------------------------------------------------------------------------

cdef void give_up_cells(WorkerData* w, Sequence* seq) noexcept nogil:
    """Free all cells of a running sequence; it comes back when it may."""
    seq.num_held = seq.num_kv
    if seq.phase == PHASE_DECODE:
        # Its last token was drawn and not computed yet.
        seq.num_fill = seq.num_kv + 1
    keep_state(w, seq)
    drop(w, seq)
    set_suspect(w, seq, False)
    seq.is_out = True
    seq.out_since = NEVER
    w.num_out += 1
    w.stats.num_preemptions += 1


cdef void keep_state(WorkerData* w, Sequence* seq) noexcept nogil:
    """Copy its cells to host memory, if there is room and it is worth it."""
    cdef size_t size
    cdef int64_t began = lqs_now_ns()
    if w.recomputes or seq.num_kv == 0:
        return
    size = lqs_state_size(w.ctx, seq.id)
    if size == 0 or size > w.kept_bytes_max - w.kept_bytes:
        return
    seq.kept = <char*>malloc(size)
    if seq.kept == NULL:
        return
    seq.kept_bytes = lqs_state_get(w.ctx, seq.kept, seq.id)
    w.kept_bytes += seq.kept_bytes
    if seq.kept_bytes == 0:
        forget_state(w, seq)
        return
    w.stats.num_swaps_out += 1
    w.stats.swapped_bytes += seq.kept_bytes
    w.stats.swap_ns += lqs_now_ns() - began


cdef void forget_state(WorkerData* w, Sequence* seq) noexcept nogil:
    free(seq.kept)
    w.kept_bytes -= seq.kept_bytes
    seq.kept = NULL
    seq.kept_bytes = 0


cdef void leave_out(WorkerData* w, Sequence* seq) noexcept nogil:
    """It is not to come back, or is back."""
    forget_state(w, seq)
    w.num_out -= seq.is_out
    seq.is_out = False


# ---- back ---------------------------------------------------------------------------

cdef Sequence* next_back(WorkerData* w) noexcept nogil:
    """The best of those that are out and may come back, NULL where there is none."""
    cdef Sequence* found = NULL
    cdef Sequence* seq
    cdef int32_t i
    if w.num_out == 0:
        return NULL
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if not seq.is_out or seq.granted == 0:
            continue
        if seq.out_since == w.num_succeeded and not w.was_idle:
            # llama_decode found no cells for it; those that are left are tried first.
            continue
        if found == NULL or comes_before(seq, found):
            found = seq
    return found


cdef bint bring_back(WorkerData* w, Sequence* seq) noexcept nogil:
    """Let it go on where it was; False where its cells are not free yet."""
    cdef int64_t began
    if not make_room(w, seq.num_held):
        return False
    if seq.kept != NULL:
        began = lqs_now_ns()
        if lqs_state_set(w.ctx, seq.kept, seq.kept_bytes, seq.id):
            set_kv(w, seq, seq.num_held)
            w.stats.num_swaps_in += 1
            w.stats.swapped_bytes += seq.kept_bytes
        else:
            lqs_seq_rm(w.ctx, seq.id, -1, -1)
        w.stats.swap_ns += lqs_now_ns() - began
    if seq.num_kv < seq.num_held:
        seq.phase = PHASE_PREFILL
        w.stats.recomputed_tokens += seq.num_held
    leave_out(w, seq)
    return True
