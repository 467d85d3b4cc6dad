# Going on with a request that ran elsewhere until its device slot died (core/failover.pxi).
#
# Its attempt comes with the tokens that were made, and with how much of their text the client
# has. Prompt and tokens are computed again; sampler, grammar, the rest of a character and the
# text that may become a stop string follow from the tokens, one after the other, as they did the
# first time. The draws are keyed by their positions. So the next token is the one that would
# have come, and the text goes on where it stopped: what it repeats is left out, by count.
#
# With logprobs only as many tokens are taken over as have had theirs told: those of the others
# are gone, and are computed with their tokens again.
#
# Owner: the worker thread.

cdef void go_on(WorkerData* w, Sequence* seq) noexcept nogil:
    """Bring a sequence that was just opened to where its request was."""
    cdef Attempt* attempt = seq.attempt
    cdef TextEnd end = TEXT_OPEN
    cdef TextRelease out
    cdef uint32_t i, num = min(attempt.num_given, w.seq_tokens_max - seq.num_prompt)
    if seq.work.params.num_logprobs >= 0:
        num = min(num, <uint32_t>attempt.num_logprobs_told)
    memcpy(seq.tokens + seq.num_prompt, attempt.made, num * sizeof(int32_t))
    store_release32(&attempt.num_made, num)
    seq.num_generated = num
    seq.num_fill = seq.num_prompt + num
    seq.bytes_told = attempt.num_bytes_told
    seq.tokens_told = attempt.num_tokens_told
    w.stats.num_taken_over += 1
    w.stats.recomputed_tokens += seq.num_fill
    for i in range(num):
        if end != TEXT_OPEN:
            break
        if sampler_accept(&seq.sampler, attempt.made[i], False) != 0:
            end_sequence(w, seq, FINISH_ERROR, ERROR_SAMPLING - DRAW_GRAMMAR)
            return
        end = text_feed(&seq.text, attempt.made[i], &out)
        deliver_text(w, seq, &out)
    # It may have been at its end, and only that was not told.
    if end != TEXT_OPEN:
        close_sequence(w, seq, FINISH_STOP, 0)
    elif num >= seq.work.max_tokens or seq.num_fill > w.seq_tokens_max:
        end_sequence(w, seq, FINISH_LENGTH, 0)


cdef void leave_out_told(Sequence* seq, TextRelease* out) noexcept nogil:
    """Take from the front of a release what the client has had from an earlier attempt."""
    cdef uint32_t num_bytes = <uint32_t>min(seq.bytes_told, <uint64_t>out.num_bytes)
    cdef uint32_t num_tokens = <uint32_t>min(seq.tokens_told, <uint64_t>out.num_tokens)
    out.bytes += num_bytes
    out.num_bytes -= num_bytes
    out.num_tokens -= num_tokens
    seq.bytes_told -= num_bytes
    seq.tokens_told -= num_tokens
