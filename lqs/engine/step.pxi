# The worker's step: take new work -> fill the batch -> decode -> sample -> deliver -> release.
#
# One thread runs all of it and owns everything here; it never takes the GIL. What crosses
# to other threads goes through the rings of _core: a START comes in, output and an end go
# out, and at most one wake-up per step to each side.
#
# Decodes go first, one token each; the rest of the step's budget goes to prefill, the best
# class first and first come first served inside a class. While a prompt of a better class is
# open, decodes and prompts of lesser classes stay out of the batch (leaving a sequence out is
# free, and the step is shorter), but each of them is in one of DECODE_EVERY steps. core/model_slots.pxi plays the
# same step without a model; what changes here changes there.

cdef enum:
    FAILED_DECODES_MAX = 3      # whole-batch failures in a row before the device slot gives up
    PAUSE_POLL_NS = 20000000    # how often paused sequences and time limits are looked at


# ---- taking work --------------------------------------------------------------------

cdef void take_new_work(WorkerData* w) noexcept nogil:
    cdef Attempt* attempt = next_attempt(w.sched, w.slot)
    while attempt != NULL:
        start_request(w, attempt)
        attempt = next_attempt(w.sched, w.slot)


cdef void start_request(WorkerData* w, Attempt* attempt) noexcept nogil:
    cdef const WorkData* work = <const WorkData*>attempt.work
    cdef uint32_t reuse = 0
    cdef Sequence* seq
    if attempt.num_given == 0:
        attempt.assigned_ns = w.now_ns
    if wants_end(w.sched, attempt):
        end_unstarted(w, attempt, FINISH_CANCELLED, 0)
        return
    seq = place_sequence(w, work, &reuse)
    if seq == NULL:
        end_unstarted(w, attempt, FINISH_ERROR, ERROR_NO_SEQUENCE)
        return
    if not open_sequence(w, seq, attempt, work, reuse):
        drop(w, seq)
        end_unstarted(w, attempt, FINISH_ERROR, ERROR_NO_MEMORY)
    elif attempt.earlier != NULL:
        go_on(w, seq)


cdef bint open_sequence(WorkerData* w, Sequence* seq, Attempt* attempt, const WorkData* work,
                        uint32_t reuse) noexcept nogil:
    """Fill a placed sequence with its request. False where memory is short; nothing is held then."""
    if sampler_init(&seq.sampler, &work.params, work.prompt, work.num_prompt) != 0:
        return False
    if text_init(&seq.text, w.pieces, &work.stops) != 0:
        sampler_free(&seq.sampler)
        return False
    memcpy(seq.tokens + reuse, work.prompt + reuse, (work.num_prompt - reuse) * sizeof(int32_t))
    seq.attempt = attempt
    seq.work = work
    # Still this request's: a device slot has just been asked to start it.
    seq.level = entry_of(w.sched, attempt.handle).level
    seq.lane = entry_of(w.sched, attempt.handle).lane
    seq.scope = work.scope
    seq.phase = PHASE_PREFILL
    seq.num_prompt = work.num_prompt
    seq.num_fill = work.num_prompt
    seq.num_generated = 0
    seq.bytes_told = seq.tokens_told = 0
    seq.accused = 0
    seq.granted = granted_tokens(attempt)
    seq.order = w.num_started
    seq.last_step = w.step_no
    seq.in_batch = 0
    seq.room_needed = 2 * out_footprint(text_release_max(&seq.text))
    if work.params.num_logprobs >= 0:
        seq.room_needed += out_footprint(logprobs_bytes_max(w.pieces, work.params.num_logprobs))
    w.num_started += 1
    w.num_active += 1
    if attempt.num_given == 0:
        attempt.num_cached_tokens = reuse
    w.stats.prefix_queries += work.num_prompt
    w.stats.prefix_hits += reuse
    return True


cdef void end_unstarted(WorkerData* w, Attempt* attempt, uint32_t finish, int32_t code) noexcept nogil:
    attempt.finished_ns = w.now_ns
    attempt.error_code = code
    finish_request(w.sched, attempt, finish)
    w.has_news = True


# ---- ending -------------------------------------------------------------------------

cdef void end_sequence(WorkerData* w, Sequence* seq, uint32_t finish, int32_t code) noexcept nogil:
    """Flush what was held back, tell both sides, keep or give back the cells."""
    cdef TextRelease rest
    text_flush(&seq.text, &rest)
    deliver_text(w, seq, &rest)
    close_sequence(w, seq, finish, code)


cdef void close_sequence(WorkerData* w, Sequence* seq, uint32_t finish, int32_t code) noexcept nogil:
    cdef Attempt* attempt = seq.attempt
    attempt.num_completion_tokens = seq.num_generated
    attempt.error_code = code
    attempt.finished_ns = w.now_ns
    finish_request(w.sched, attempt, finish)
    w.has_news = True
    w.num_active -= 1
    set_suspect(w, seq, False)
    acquit(w, seq)
    leave_out(w, seq)
    sampler_free(&seq.sampler)
    text_free(&seq.text)
    keep_or_drop(w, seq, finish)


cdef void keep_or_drop(WorkerData* w, Sequence* seq, uint32_t finish) noexcept nogil:
    cdef bint keep = (w.prefix_cache and seq.work.cache_prompt and seq.num_kv > 0
                      and finish != FINISH_ERROR)
    seq.lost = False
    seq.attempt = NULL
    seq.work = NULL
    if not keep:
        drop(w, seq)
        seq.phase = PHASE_EMPTY
        return
    seq.phase = PHASE_CACHED
    seq.last_used = w.clock
    w.stats.num_cached_sequences += 1


cdef void end_the_overdue(WorkerData* w) noexcept nogil:
    """Cancelled, timed-out and lost requests leave between two steps."""
    cdef Sequence* seq
    cdef int32_t i
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if not is_active(seq):
            continue
        if seq.lost:
            end_sequence(w, seq, FINISH_ERROR, ERROR_LOST)
        elif wants_end(w.sched, seq.attempt):
            end_sequence(w, seq, FINISH_CANCELLED, 0)
        elif seq.attempt.stop_ns != 0 and w.now_ns >= seq.attempt.stop_ns:
            end_sequence(w, seq, FINISH_TIMEOUT, 0)


# ---- filling the batch --------------------------------------------------------------

cdef inline bint is_active(const Sequence* seq) noexcept nogil:
    return seq.phase == PHASE_PREFILL or seq.phase == PHASE_DECODE


cdef inline bint may_compute(const Sequence* seq) noexcept nogil:
    """It has its cells, and the next one is promised; and it is not to blame for a failure, as far as is known."""
    return not seq.is_out and seq.num_kv < seq.granted and seq.accused == 0


cdef bint is_paused(WorkerData* w, Sequence* seq) noexcept nogil:
    """Its reader is behind: the next token's text might not fit its out-buffer."""
    if out_free(&seq.attempt.out) >= seq.room_needed:
        return False
    # Before the announcement: the loop that sees it sees the flag, makes room and wakes us.
    store_relaxed32(&seq.attempt.starved, 1)
    announce(w.sched, seq.attempt)
    w.has_news = True
    return True


cdef void batch_add(WorkerData* w, Sequence* seq, int32_t token, uint32_t pos, bint want_logits) noexcept nogil:
    cdef int32_t i = w.batch.n_tokens
    w.batch.token[i] = token
    w.batch.pos[i] = pos
    w.batch.n_seq_id[i] = 1
    w.batch.seq_id[i][0] = seq.id
    w.batch.logits[i] = want_logits
    w.batch.n_tokens = i + 1
    seq.in_batch += 1
    if want_logits:
        seq.logits_at = i


cdef void add_decode(WorkerData* w, Sequence* seq) noexcept nogil:
    batch_add(w, seq, seq.tokens[seq.num_kv], seq.num_kv, True)


cdef void add_prefill(WorkerData* w, Sequence* seq, uint32_t n) noexcept nogil:
    """The next `n` tokens of what is to be filled; only its last one needs logits."""
    cdef uint32_t pos, first = seq.num_kv + seq.in_batch
    for pos in range(first, first + n):
        batch_add(w, seq, seq.tokens[pos], pos, pos + 1 == seq.num_fill)


cdef int32_t best_prefill_level(WorkerData* w) noexcept nogil:
    cdef int32_t best = LEVEL_NONE
    cdef int32_t i
    for i in range(w.num_ids):
        if w.seqs[i].phase == PHASE_PREFILL and may_compute(&w.seqs[i]) and w.seqs[i].level < best:
            best = w.seqs[i].level
    return best


cdef inline bint is_left_out(WorkerData* w, const Sequence* seq, int32_t best) noexcept nogil:
    """A prompt of a better class is open, and this one was in a step not long ago."""
    return seq.level > best and w.step_no - seq.last_step < DECODE_EVERY


cdef Sequence* next_prefill(WorkerData* w, const Sequence* after, int32_t best) noexcept nogil:
    """Prefills in the order (level, start): the first one behind `after`. The best level is known."""
    cdef Sequence* found = NULL
    cdef Sequence* seq
    cdef int32_t i
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if seq.phase != PHASE_PREFILL or not may_compute(seq) or is_left_out(w, seq, best):
            continue
        if after != NULL and not comes_before(after, seq):
            continue
        if found == NULL or comes_before(seq, found):
            found = seq
    return found


cdef inline bint comes_before(const Sequence* a, const Sequence* b) noexcept nogil:
    if a.level != b.level:
        return a.level < b.level
    return a.order < b.order


cdef void step_back(WorkerData* w) noexcept nogil:
    """With urgent requests running there are more than a step is to decode: the least step back."""
    cdef Sequence* least
    cdef int32_t i, num_over = <int32_t>w.num_active - w.num_in_turn
    for i in range(w.num_ids):
        w.seqs[i].steps_back = False
    while num_over > 0:
        least = NULL
        for i in range(w.num_ids):
            if is_active(&w.seqs[i]) and not w.seqs[i].steps_back and (
                    least == NULL or comes_before(least, &w.seqs[i])):
                least = &w.seqs[i]
        least.steps_back = True
        num_over -= 1


cdef void fill_decodes(WorkerData* w) noexcept nogil:
    cdef int32_t urgent = best_prefill_level(w)
    cdef Sequence* seq
    cdef int32_t i
    step_back(w)
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if seq.phase != PHASE_DECODE or not may_compute(seq) or is_paused(w, seq):
            continue
        if is_left_out(w, seq, urgent) or (seq.steps_back and w.step_no - seq.last_step < DECODE_EVERY):
            continue
        if make_room(w, w.batch.n_tokens + 1):
            add_decode(w, seq)


cdef bint has_prefill(WorkerData* w, int32_t level, uint8_t lane) noexcept nogil:
    cdef int32_t i
    for i in range(w.num_ids):
        if (w.seqs[i].phase == PHASE_PREFILL and may_compute(&w.seqs[i]) and w.seqs[i].level == level
                and w.seqs[i].lane == lane):
            return True
    return False


cdef inline bint is_fine(WorkerData* w, const Sequence* seq) noexcept nogil:
    return seq.lane == LANE_LONG or seq.level >= w.sched.fine_level


cdef int32_t fill_prefills_of(WorkerData* w, uint8_t lane, int32_t level, int32_t best,
                              int32_t budget) noexcept nogil:
    """Prefill of one lane (LANE_ANY: all) down to a class, within the budget: what is left of that.

    A rest of less than PREFILL_MIN goes along, as it would cost more in a step of its own;
    but for those that go in small chunks.
    """
    cdef Sequence* seq = next_prefill(w, NULL, best)
    cdef int32_t n, rest
    while seq != NULL and budget > 0 and seq.level <= level:
        if lane == LANE_ANY or seq.lane == lane:
            rest = <int32_t>(min(seq.num_fill, seq.granted) - seq.num_kv - seq.in_batch)
            n = min(budget, rest)
            if is_fine(w, seq):
                n = min(n, w.num_fine)
            elif rest - n < PREFILL_MIN and rest <= w.batch_max - w.batch.n_tokens:
                n = rest
            if n > 0 and not make_room(w, w.batch.n_tokens + n):
                return 0
            add_prefill(w, seq, n)
            budget -= n
            if is_fine(w, seq):
                w.num_fine -= n
        seq = next_prefill(w, seq, best)
    return budget


cdef void fill_prefills(WorkerData* w) noexcept nogil:
    """Best class first. Where short and long prompts of it are open they share the budget as their
    lanes do, so that a long one does not stand in front of the short ones; what a lane does not
    need is lent. Long prompts, and those of low classes, go in the smallest chunks that are not
    dearer: whoever comes meanwhile waits for a short step."""
    cdef int32_t budget = min(max(w.budget - w.batch.n_tokens, PREFILL_MIN), w.batch_max - w.batch.n_tokens)
    cdef int32_t best = best_prefill_level(w)
    cdef int32_t part
    w.num_fine = fine_chunk(w.fine_budget, w.batch.n_tokens)
    if has_prefill(w, best, LANE_SHORT) and has_prefill(w, best, LANE_LONG):
        part = <int32_t>(budget * w.sched.short_share + 0.5)
        budget -= part
        budget += fill_prefills_of(w, LANE_SHORT, best, best, part)
        budget = fill_prefills_of(w, LANE_LONG, best, best, budget)
    fill_prefills_of(w, LANE_ANY, LEVEL_NONE, best, budget)


cdef void fill_alone(WorkerData* w) noexcept nogil:
    """After a failed batch: one suspect at a time, so that the one to blame fails alone."""
    cdef Sequence* seq
    cdef int32_t i
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if not seq.suspect:
            continue
        if not may_compute(seq):
            # It waits for others, so they must not wait for it. If it is to blame, the next
            # batch that it is in fails too.
            set_suspect(w, seq, False)
            continue
        if seq.phase == PHASE_DECODE:
            add_decode(w, seq)
        else:
            add_prefill(w, seq, min(<uint32_t>PREFILL_MIN, seq.num_fill - seq.num_kv))
        return


cdef uint32_t step_tokens_max(WorkerData* w) noexcept nogil:
    """Cells that the coming step may take at most: no more is evicted for it than it needs."""
    cdef uint32_t num_decodes = 0, num_prefill = 0
    cdef int32_t i
    for i in range(w.num_ids):
        if not may_compute(&w.seqs[i]):
            continue
        if w.seqs[i].phase == PHASE_DECODE:
            num_decodes += 1
        elif w.seqs[i].phase == PHASE_PREFILL:
            num_prefill += w.seqs[i].num_fill - w.seqs[i].num_kv
    # Each of the three fillings may take one rest along.
    return num_decodes + min(num_prefill, <uint32_t>(max(w.budget, PREFILL_MIN) + 3 * PREFILL_MIN))


cdef void order_by_id(WorkerData* w) noexcept nogil:
    """Lay the step's tokens out anew, sequence by sequence.

    A split cache computes a token of each sequence at once as long as the ids follow one another in
    the batch: a prompt behind all decodes would part those before its id from those behind it.
    """
    cdef Sequence* seq
    cdef int32_t i
    cdef uint32_t n
    w.batch.n_tokens = 0
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        n = seq.in_batch
        seq.in_batch = 0
        if n > 0 and seq.phase == PHASE_DECODE:
            add_decode(w, seq)
        elif n > 0:
            add_prefill(w, seq, n)


cdef bint fill_batch(WorkerData* w) noexcept nogil:
    """Put the step's tokens into the batch; False where there is nothing to compute."""
    w.batch.n_tokens = 0
    if w.num_suspects > 0:
        fill_alone(w)
    if w.num_suspects == 0:
        fill_decodes(w)
        fill_prefills(w)
        if not w.unified:
            order_by_id(w)
    return w.batch.n_tokens > 0


# ---- decoding -----------------------------------------------------------------------

cdef int32_t decode(WorkerData* w) noexcept nogil:
    cdef int64_t began = lqs_now_ns()
    cdef int32_t rc = chaos_or_decode(w)
    w.now_ns = lqs_now_ns()
    w.stats.decode_ns += w.now_ns - began
    w.stats.num_decodes += 1
    if rc == 0:
        steer_budget(w, w.now_ns - began)
    if rc == 0 and note_step(&w.governor, w.batch.n_tokens, w.now_ns - began, w.now_ns, lqs_preemptions()):
        llama_set_n_threads(w.ctx, w.governor.current, w.governor.current)
    return rc


cdef void steer_budget(WorkerData* w, int64_t took_ns) noexcept nogil:
    """Long contexts and a busy box make tokens dearer than they were when the budget was measured.

    Only a full step tells. Too slow: at once down to what would have met the target; quick: up by an
    eighth, so that a device on which a larger step costs no more finds its way up.
    """
    if w.step_target_ns == 0 or w.batch.n_tokens < w.budget:
        return
    if took_ns > w.step_target_ns:
        w.budget = max(<int32_t>(w.batch.n_tokens * (w.step_target_ns / <double>took_ns)), 1)
    elif took_ns < w.step_target_ns - w.step_target_ns // 4:
        w.budget = min(w.budget + max(w.budget // 8, 1), w.batch_max)


cdef void advance(WorkerData* w) noexcept nogil:
    """The batch is in the cache: move every sequence that was in it on."""
    cdef Sequence* seq
    cdef int32_t i
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if seq.in_batch == 0:
            continue
        if seq.phase == PHASE_PREFILL:
            w.stats.prefill_tokens += seq.in_batch
        set_kv(w, seq, seq.num_kv + seq.in_batch)
        seq.last_used = w.clock
        seq.last_step = w.step_no
        set_suspect(w, seq, False)
        if seq.phase == PHASE_PREFILL and seq.num_kv == seq.num_fill:
            seq.phase = PHASE_DECODE
            if seq.num_fill == seq.num_prompt:
                seq.attempt.prefill_done_ns = w.now_ns


cdef void roll_back(WorkerData* w) noexcept nogil:
    """Take what a failed or broken-off decode left behind out of the cache again."""
    cdef Sequence* seq
    cdef int32_t i
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if seq.in_batch == 0:
            continue
        seq.in_batch = 0
        if lqs_seq_rm(w.ctx, seq.id, seq.num_kv, -1) != 1:
            # A memory that cannot be cut: its sequence is lost, and only that.
            end_sequence(w, seq, FINISH_ERROR, ERROR_NOT_CUT)


cdef void fail_batch(WorkerData* w, int32_t rc) noexcept nogil:
    """llama_decode did not take the batch.

    1: no cells. With promises kept that is a bug: finished sequences are evicted, then the
    least and youngest request of the batch gives up its cells until the others have got on,
    and who finds none alone fails; so it never loops. 2: broken off, tried
    again as it is. Below 0: each request of the batch is tried alone. Who fails alone is ended as
    soon as another one has got on; when nobody gets on any more the device slot gives up, and all
    of them go on elsewhere. One that has nobody beside it is tried again, until it is known whether
    a token of nobody would be computed.
    """
    w.stats.num_failed_decodes += 1
    if rc == 2:
        roll_back(w)
        return
    if rc == 1 and evict_all(w):
        roll_back(w)
        return
    if rc == 1:
        w.stats.num_kv_failures += 1
        yield_least(w, rc)
        return
    w.failed_in_a_row += 1
    if w.failed_in_a_row > FAILED_DECODES_MAX:
        give_up(w, b"llama_decode kept failing")
    else:
        blame(w, rc)


cdef bint evict_all(WorkerData* w) noexcept nogil:
    cdef bint any_gone = False
    while evict(w, NULL) != NULL:
        any_gone = True
    return any_gone


cdef void yield_least(WorkerData* w, int32_t rc) noexcept nogil:
    """Of the batch, the worst class and inside it the latest start gives up its cells; alone it ends."""
    cdef Sequence* worst = NULL
    cdef Sequence* seq
    cdef int32_t i, num = 0
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if seq.in_batch == 0:
            continue
        num += 1
        if worst == NULL or comes_before(worst, seq):
            worst = seq
    roll_back(w)
    if not is_active(worst):
        return
    if num == 1:
        end_sequence(w, worst, FINISH_ERROR, rc)
    else:
        give_up_cells(w, worst)
        worst.out_since = w.num_succeeded


cdef void set_suspect(WorkerData* w, Sequence* seq, bint suspect) noexcept nogil:
    """Only requests that run are suspects: an end of any kind clears it."""
    w.num_suspects += suspect - seq.suspect
    seq.suspect = suspect


cdef void accuse(WorkerData* w, Sequence* seq, int32_t rc) noexcept nogil:
    """It failed alone: it waits until it is known whether anybody else gets on."""
    cdef bint was_suspect = seq.suspect
    roll_back(w)
    if not is_active(seq):
        return
    set_suspect(w, seq, False)
    w.num_accused += seq.accused == 0
    seq.accused = rc
    if w.num_suspects > 0:
        return
    if w.num_accused == 1 and w.failed_in_a_row == 1 and not was_suspect:
        # The first failure of a suspect is its second: others have got on in between.
        acquit(w, seq)
    elif works(w, seq.tokens[0]):
        convict(w)
    elif w.num_accused > 1:
        give_up(w, b"llama_decode kept failing, whoever was in the batch")
    else:
        acquit(w, seq)


cdef Sequence* spare_sequence(WorkerData* w) noexcept nogil:
    """One that nobody has and that holds nothing; NULL where there is none."""
    cdef int32_t i
    for i in range(w.num_ids):
        if not is_active(&w.seqs[i]) and w.seqs[i].num_kv == 0:
            return &w.seqs[i]
    return evict(w, NULL)


cdef bint works(WorkerData* w, int32_t token) noexcept nogil:
    """Whether the device computes a token that is nobody's. True where it cannot be tried, for want of a cell too."""
    cdef Sequence* seq = spare_sequence(w)
    cdef int32_t rc
    if seq == NULL:
        return True
    w.batch.n_tokens = 0
    batch_add(w, seq, token, 0, False)
    rc = chaos_or_decode(w)
    seq.in_batch = 0
    lqs_seq_rm(w.ctx, seq.id, -1, -1)
    if rc == 0:
        w.failed_in_a_row = 0
    return rc in (0, 1)


cdef void acquit(WorkerData* w, Sequence* seq) noexcept nogil:
    w.num_accused -= seq.accused != 0
    seq.accused = 0


cdef void convict(WorkerData* w) noexcept nogil:
    """Others get on, or there are none: it was their own fault."""
    cdef Sequence* seq
    cdef int32_t i
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if is_active(seq) and seq.accused != 0:
            end_sequence(w, seq, FINISH_ERROR, seq.accused)


cdef void blame(WorkerData* w, int32_t rc) noexcept nogil:
    """After a code below 0: whoever was alone in the batch is accused, several become suspects."""
    cdef Sequence* last = NULL
    cdef Sequence* seq
    cdef int32_t i, num = 0
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if seq.in_batch > 0:
            num += 1
            last = seq
    if num == 1:
        accuse(w, last, rc)
        return
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if seq.in_batch > 0:
            set_suspect(w, seq, True)
    roll_back(w)


# ---- sampling and delivering --------------------------------------------------------

cdef void sample_and_deliver(WorkerData* w) noexcept nogil:
    cdef Sequence* seq
    cdef int32_t i
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if seq.in_batch > 0 and seq.phase == PHASE_DECODE:
            seq.in_batch = 0
            sample_one(w, seq)
            if w.chaos_kind == CHAOS_HANG:
                maybe_hang(w)
        else:
            seq.in_batch = 0


cdef void sample_one(WorkerData* w, Sequence* seq) noexcept nogil:
    cdef float* logits = lqs_logits(w.ctx, seq.logits_at)
    cdef DrawResult draw
    cdef int32_t code = DRAW_NOT_FINITE
    cdef bint is_eog
    if logits != NULL:
        code = sampler_draw(&seq.sampler, &w.scratch, logits, w.n_vocab, seq.num_generated, &draw)
    if code != DRAW_OK:
        end_sequence(w, seq, FINISH_ERROR, ERROR_SAMPLING - code)
        return
    is_eog = pieces_is_eog(w.pieces, draw.token)
    if sampler_accept(&seq.sampler, draw.token, is_eog) != 0:
        end_sequence(w, seq, FINISH_ERROR, ERROR_SAMPLING - DRAW_GRAMMAR)
        return
    if seq.num_generated == 0:
        seq.attempt.first_token_ns = w.now_ns
    if not is_eog:
        note_token(w, seq, draw.token, logits)
    deliver_token(w, seq, draw.token)


cdef void note_token(WorkerData* w, Sequence* seq, int32_t token, const float* logits) noexcept nogil:
    """Remember a drawn token as the next input and, if asked for, write its logprobs."""
    cdef int64_t n
    seq.num_generated += 1
    w.stats.generated_tokens += 1
    if seq.num_kv < w.seq_tokens_max:
        seq.tokens[seq.num_kv] = token
    # Before anything is told of it.
    note_made(seq.attempt, token)
    if seq.work.params.num_logprobs >= 0:
        n = logprobs_write(&w.scratch, w.pieces, logits, w.n_vocab, token, seq.work.params.num_logprobs,
                           w.logprobs_buf, w.logprobs_room)
        if n > 0:
            emit_output(w.sched, seq.attempt, RECORD_LOGPROBS, 0, w.logprobs_buf, <uint32_t>n)
            w.has_news = True


cdef void deliver_token(WorkerData* w, Sequence* seq, int32_t token) noexcept nogil:
    cdef TextRelease out
    cdef TextEnd end = text_feed(&seq.text, token, &out)
    deliver_text(w, seq, &out)
    if end == TEXT_STOP_STRING or end == TEXT_END_OF_TURN:
        close_sequence(w, seq, FINISH_STOP, 0)
    elif seq.num_generated >= seq.work.max_tokens or seq.num_kv >= w.seq_tokens_max:
        end_sequence(w, seq, FINISH_LENGTH, 0)


cdef void deliver_text(WorkerData* w, Sequence* seq, TextRelease* out) noexcept nogil:
    if seq.bytes_told + seq.tokens_told > 0:
        leave_out_told(seq, out)
    if out.num_bytes > 0 or out.num_tokens > 0:
        emit_output(w.sched, seq.attempt, RECORD_TEXT, <uint16_t>out.num_tokens, out.bytes, out.num_bytes)
        w.has_news = True


# ---- the step and the loop ----------------------------------------------------------

cdef bint watched_step(WorkerData* w) noexcept nogil:
    """A step that whoever watches can see the beginning of: sampling can get stuck as well."""
    cdef bint computed
    cdef uint64_t* heartbeat = &w.sched.slots[w.slot].step_began_ns
    store_relaxed(heartbeat, lqs_now_ns())
    computed = step(w)
    store_relaxed(heartbeat, 0)
    return computed


cdef bint step(WorkerData* w) noexcept nogil:
    """One step; False where there was nothing to compute."""
    cdef int32_t rc
    w.now_ns = lqs_now_ns()
    cdef int64_t began = w.now_ns
    w.clock += 1
    take_new_work(w)
    obey(w)
    # Before the batch is filled, and before the lost are ended: no compaction in between.
    if not make_room(w, step_tokens_max(w)) and w.garbage > 0:
        compact(w)
    end_the_overdue(w)
    w.was_idle = not fill_batch(w)
    if w.was_idle and w.num_accused > 0:
        convict(w)
    if w.was_idle:
        tell(w)
        return False
    w.step_no += 1
    rc = decode(w)
    if is_dead(w.sched, w.slot):
        # Given up on while it hung: its requests run elsewhere by now.
        store_release32(&w.stopping, 1)
        return True
    if rc == 0:
        w.failed_in_a_row = 0
        w.num_succeeded += 1
        advance(w)
        sample_and_deliver(w)
        if w.num_accused > 0:
            convict(w)
    else:
        fail_batch(w, rc)
    w.stats.step_ns += lqs_now_ns() - began
    w.stats.num_steps += 1
    publish(w)
    tell(w)
    return True


cdef void tell(WorkerData* w) noexcept nogil:
    """At most one wake-up to each side per step."""
    if w.has_news:
        wake_loop(w.sched)
    if w.has_news or w.has_asked:
        wake_scheduler(w.sched)
    w.has_news = w.has_asked = False


cdef void publish(WorkerData* w) noexcept nogil:
    w.stats.cells_used = w.cells_used
    w.stats.cells_garbage = w.garbage
    w.stats.num_active = w.num_active
    w.stats.num_out = w.num_out
    w.stats.kept_bytes = w.kept_bytes
    w.stats.threads = w.governor.current


cdef void worker_loop(WorkerData* w) noexcept nogil:
    lqs_bind_worker(w)
    while not load_acquire32(&w.stopping) and not is_dead(w.sched, w.slot):
        if watched_step(w):
            continue
        publish(w)
        # Time limits of paused sequences are looked at now and then; otherwise only a START,
        # room in an out-buffer or the end wakes this thread.
        worker_sleep(w.sched, w.slot, PAUSE_POLL_NS if w.num_active > 0 else -1)
    if load_acquire32(&w.state) == WORKER_DEAD:
        # What it ran is not ended: it goes on elsewhere.
        tell_death(w)
    elif not is_dead(w.sched, w.slot):
        end_all(w)
    lqs_bind_worker(NULL)


cdef void end_all(WorkerData* w) noexcept nogil:
    """The worker is told to stop: whatever still runs ends, and the cells are given back."""
    cdef Sequence* seq
    cdef int32_t i
    w.now_ns = lqs_now_ns()
    take_new_work(w)
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if is_active(seq):
            end_sequence(w, seq, FINISH_DEVICE, ERROR_STOPPED)
    evict_all(w)
    publish(w)
    tell(w)


# ---- giving up ----------------------------------------------------------------------

cdef void note_death(WorkerData* w, const char* message) noexcept nogil:
    strncpy(w.death, message, sizeof(w.death) - 1)
    store_release32(&w.state, WORKER_DEAD)
    lqs_say(b"lqs: device slot is dead: ")
    lqs_say(w.death)
    lqs_say(b"\n")


cdef void tell_death(WorkerData* w) noexcept nogil:
    report_dead(w.sched, w.slot)
    wake_loop(w.sched)


cdef void give_up(WorkerData* w, const char* message) noexcept nogil:
    """The thread is sound but the device is not: end the loop, then report the slot dead."""
    note_death(w, message)
    store_release32(&w.stopping, 1)


cdef void on_death(void* worker, const char* message) noexcept nogil:
    """ggml gave up inside this worker's step; the caller parks the thread for good."""
    cdef WorkerData* w = <WorkerData*>worker
    store_release32(&w.parked, 1)
    note_death(w, message)
    tell_death(w)
