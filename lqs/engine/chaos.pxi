# What a drill breaks, and how: each as it breaks by itself.
#
#     assert   a real assert of llama.cpp, on the worker's own thread
#     helper   one on a thread that ggml computes with; the worker then waits for it, and for ever
#     hang     the worker stands still in the middle of a step, with the tokens of some told and of
#              others not, and goes on after a while as if nothing had been
#     rc       llama_decode says so
#     lost     its card is lost: given up from outside in the middle of a step, as whoever watches the
#              cards does it
#
# Owner: the worker thread, but for what is set before a drill begins.

cdef int32_t chaos_or_decode(WorkerData* w) noexcept nogil:
    """llama_decode, or what a drill ordered for this step."""
    if w.chaos_kind in (CHAOS_NONE, CHAOS_HANG) or w.step_no < w.chaos_step or w.batch.n_tokens < w.chaos_tokens:
        return lqs_decode(w.ctx, w.batch)
    if w.chaos_kind == CHAOS_ASSERT:
        # There is no sequence below 0.
        lqs_seq_cp(w.ctx, -1, 0, 0, -1)
    if w.chaos_kind == CHAOS_HELPER:
        lqs_abort_on_helper()
    if w.chaos_kind == CHAOS_LOST:
        report_dead(w.sched, w.slot)
        return w.chaos_rc
    if w.chaos_times > 0:
        w.chaos_times -= 1
        if w.chaos_times == 0:
            w.chaos_kind = CHAOS_NONE
    return w.chaos_rc


cdef void maybe_hang(WorkerData* w) noexcept nogil:
    """Stand still here, once."""
    if w.step_no >= w.chaos_step:
        w.chaos_kind = CHAOS_NONE
        lqs_sleep(w.chaos_ns)
