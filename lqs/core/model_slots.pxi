# Model device slots: they play the worker's side of a Scheduler and compute nothing.
#
# A step puts into its batch what the engine's step would (engine/step.pxi): decodes first,
# one token each, those of lesser classes left out while a better prompt is open; then
# prefill, the best class first, up to the budget. What it takes comes from a cost model:
#
#     fixed + decode x tokens drawn + prefill x other tokens
#           + context x (each token's own context, summed) + cells x tokens x filled cells
#
# While nothing comes and nothing ends, one step is like the next but for a context that
# grows evenly. So a slot plans a *run* of equal steps whose times are an arithmetic series:
# its end, or the step under way at any moment, is found without playing the steps one by one.
# A run ends where the batch would change, and is cut at the next step's end when the
# scheduler sends something.
#
# Owner: whoever plays the virtual clock. Times are that clock's.

cdef struct StepCost:
    double fixed_ns         # of a step, whatever is in it
    double decode_ns        # of each token drawn: a decode, or the last token of a prompt
    double prefill_ns       # of each other token of a prompt
    double context_ns       # of each token, for each token of its own context
    double cells_ns         # of each token, for each cell that is filled
    uint32_t budget         # tokens of a step that decodes and prefill share
    uint32_t batch_max      # tokens of a step at most

cdef struct ModelSequence:
    Attempt* attempt
    uint64_t order          # of its start here
    uint64_t last_step      # the last step that had it in its batch
    uint32_t level
    uint32_t num_prompt
    uint32_t num_kv         # cells filled
    uint32_t num_left       # tokens still to draw
    uint32_t num_in_batch   # its tokens in each step of the run

cdef struct ModelSlot:
    StepCost cost
    ModelSequence* sequences    # the first num_active of them, in no order
    uint32_t index
    uint32_t num_active
    uint32_t num_prefills       # of them: prompts still open
    uint64_t num_started
    uint64_t step_no            # steps done
    uint64_t num_cells          # filled, all sequences together
    int64_t busy_ns
    # The run under way.
    int64_t began_ns
    int64_t ends_ns
    uint64_t num_steps          # 0: idle
    double first_ns             # of its first step ...
    double growth_ns            # ... and how much more each takes than the one before

# What the steps of a run have in common.
cdef struct StepLoad:
    uint64_t num_tokens
    uint64_t num_drawn
    double context              # in the first step: each token's own context, summed
    double context_growth       # from step to step
    uint64_t num_steps          # until the batch would change


cdef int model_slot_init(ModelSlot* m, uint32_t index, uint32_t num_sequences) noexcept nogil:
    memset(m, 0, sizeof(ModelSlot))
    m.index = index
    m.sequences = <ModelSequence*> calloc(num_sequences, sizeof(ModelSequence))
    return 0 if m.sequences != NULL else -1


# --- taking work, and ending it ---------------------------------------------------------

cdef inline bint is_prefilling(const ModelSequence* seq) noexcept nogil:
    return seq.num_kv < seq.num_prompt


# How long the answer will be travels where the engine keeps what it has to know.
cdef void open_model_sequence(ModelSlot* m, SchedulerState* s, Attempt* attempt,
                              int64_t now_ns) noexcept nogil:
    cdef ModelSequence* seq = &m.sequences[m.num_active]
    attempt.assigned_ns = now_ns
    seq.attempt = attempt
    seq.order = m.num_started
    seq.last_step = m.step_no
    seq.level = entry_of(s, attempt.handle).level
    seq.num_prompt = max(attempt.num_prompt_tokens, <uint32_t> 1)
    seq.num_kv = 0
    seq.num_left = max(min(<uint32_t> <size_t> attempt.work, attempt.max_tokens), <uint32_t> 1)
    m.num_started += 1
    m.num_active += 1
    m.num_prefills += 1


cdef void close_model_sequence(ModelSlot* m, SchedulerState* s, uint32_t place, uint32_t finish,
                               int64_t now_ns) noexcept nogil:
    cdef ModelSequence* seq = &m.sequences[place]
    m.num_cells -= seq.num_kv
    if is_prefilling(seq):
        m.num_prefills -= 1
    seq.attempt.finished_ns = now_ns
    finish_request(s, seq.attempt, finish)
    m.num_active -= 1
    seq[0] = m.sequences[m.num_active]


# True: something ended.
cdef bint end_overdue(ModelSlot* m, SchedulerState* s, int64_t now_ns) noexcept nogil:
    cdef bint has_ended = False
    cdef uint32_t place = 0
    cdef int64_t stop_ns
    while place < m.num_active:
        stop_ns = m.sequences[place].attempt.stop_ns
        if stop_ns and now_ns >= stop_ns:
            close_model_sequence(m, s, place, FINISH_TIMEOUT, now_ns)
            has_ended = True
        else:
            place += 1
    return has_ended


# --- what a step holds ------------------------------------------------------------------

cdef inline bint is_ahead(const ModelSequence* a, const ModelSequence* b) noexcept nogil:
    return a.level < b.level or (a.level == b.level and a.order < b.order)


# The first prefill behind `after` (NULL: the first of all) in the order of class and start.
cdef ModelSequence* prefill_behind(ModelSlot* m, const ModelSequence* after) noexcept nogil:
    cdef ModelSequence* found = NULL
    cdef ModelSequence* seq
    cdef uint32_t i
    if not m.num_prefills:
        return NULL
    for i in range(m.num_active):
        seq = &m.sequences[i]
        if not is_prefilling(seq) or (after != NULL and not is_ahead(after, seq)):
            continue
        if found == NULL or is_ahead(seq, found):
            found = seq
    return found


cdef void load_decodes(ModelSlot* m, StepLoad* load, const ModelSequence* urgent) noexcept nogil:
    cdef ModelSequence* seq
    cdef uint64_t num_missed
    cdef uint32_t i
    for i in range(m.num_active):
        seq = &m.sequences[i]
        seq.num_in_batch = 0
        if is_prefilling(seq):
            continue
        if urgent != NULL and seq.level > urgent.level:
            num_missed = m.step_no - seq.last_step
            if num_missed < DECODE_EVERY:
                load.num_steps = min(load.num_steps, DECODE_EVERY - num_missed)
                continue
            load.num_steps = 1
        seq.num_in_batch = 1
        load.num_tokens += 1
        load.num_drawn += 1
        load.context += seq.num_kv + 1
        load.context_growth += 1
        load.num_steps = min(load.num_steps, <uint64_t> seq.num_left)


cdef void load_prefills(ModelSlot* m, StepLoad* load, ModelSequence* first) noexcept nogil:
    cdef int64_t budget = max(<int64_t> m.cost.budget - <int64_t> load.num_tokens,
                              <int64_t> PREFILL_MIN)
    cdef ModelSequence* seq = first
    cdef uint32_t n, rest
    budget = min(budget, <int64_t> m.cost.batch_max - <int64_t> load.num_tokens)
    while seq != NULL and budget > 0:
        rest = seq.num_prompt - seq.num_kv
        n = <uint32_t> min(budget, <int64_t> rest)
        seq.num_in_batch = n
        load.num_tokens += n
        load.context += <double> n * seq.num_kv + <double> n * (n + 1) / 2
        load.context_growth += <double> n * n
        if n == rest:
            load.num_drawn += 1
            load.num_steps = 1
        else:
            # Its last piece is another step: it is shorter, or draws a token.
            load.num_steps = min(load.num_steps, <uint64_t> (rest - 1) // n)
        budget -= n
        seq = prefill_behind(m, seq)


# --- runs -------------------------------------------------------------------------------

# How long the first n steps of the run take; each at least 1 ns, so that time moves.
cdef inline int64_t duration_of(const ModelSlot* m, uint64_t n) noexcept nogil:
    cdef double steps = <double> n
    return <int64_t> (steps * m.first_ns + m.growth_ns * steps * (steps - 1) / 2 + 0.5)


# The least n >= 1 whose steps end at `at_ns` or later, at most all of the run.
cdef uint64_t steps_until(const ModelSlot* m, int64_t at_ns) noexcept nogil:
    cdef uint64_t low = 1, high = m.num_steps, middle
    while low < high:
        middle = (low + high) // 2
        if m.began_ns + duration_of(m, middle) >= at_ns:
            high = middle
        else:
            low = middle + 1
    return low


# End the run with the first step that ends at `at_ns` or later.
cdef void cut_run(ModelSlot* m, int64_t at_ns) noexcept nogil:
    m.num_steps = steps_until(m, at_ns)
    m.ends_ns = m.began_ns + duration_of(m, m.num_steps)


# Take what was sent, and go on; idle where there is nothing. True: something ended.
cdef bint begin_run(ModelSlot* m, SchedulerState* s, int64_t now_ns) noexcept nogil:
    cdef Attempt* attempt = next_attempt(s, m.index)
    cdef StepLoad load
    cdef ModelSequence* urgent
    cdef bint has_ended
    cdef uint32_t i
    while attempt != NULL:
        open_model_sequence(m, s, attempt, now_ns)
        attempt = next_attempt(s, m.index)
    has_ended = end_overdue(m, s, now_ns)
    m.num_steps = 0
    if m.num_active == 0:
        return has_ended
    memset(&load, 0, sizeof(StepLoad))
    load.num_steps = <uint64_t> 1 << 32
    urgent = prefill_behind(m, NULL)
    load_decodes(m, &load, urgent)
    load_prefills(m, &load, urgent)
    m.began_ns = now_ns
    m.first_ns = max(1.0, m.cost.fixed_ns + m.cost.decode_ns * load.num_drawn
                     + m.cost.prefill_ns * (load.num_tokens - load.num_drawn)
                     + m.cost.context_ns * load.context
                     + m.cost.cells_ns * load.num_tokens * (m.num_cells + load.num_tokens))
    m.growth_ns = (m.cost.context_ns * load.context_growth
                   + m.cost.cells_ns * <double> load.num_tokens * load.num_tokens)
    m.num_steps = load.num_steps
    m.ends_ns = now_ns + duration_of(m, m.num_steps)
    for i in range(m.num_active):
        if m.sequences[i].attempt.stop_ns and m.sequences[i].attempt.stop_ns < m.ends_ns:
            cut_run(m, m.sequences[i].attempt.stop_ns)
    return has_ended


# Draw the tokens of the run's steps for one sequence; True: that was its last.
cdef bint advance_model_sequence(ModelSlot* m, ModelSequence* seq, int64_t now_ns) noexcept nogil:
    cdef bint was_prefilling = is_prefilling(seq)
    cdef uint32_t num_tokens = <uint32_t> (seq.num_in_batch * m.num_steps)
    cdef uint32_t num_drawn = 0 if was_prefilling else num_tokens
    seq.num_kv += num_tokens
    m.num_cells += num_tokens
    seq.last_step = m.step_no
    if was_prefilling and not is_prefilling(seq):
        m.num_prefills -= 1
        seq.attempt.prefill_done_ns = seq.attempt.first_token_ns = now_ns
        num_drawn = 1
    seq.num_left -= num_drawn
    seq.attempt.num_completion_tokens += num_drawn
    return seq.num_left == 0


# The run's steps are done. True: something ended.
cdef bint end_run(ModelSlot* m, SchedulerState* s, int64_t now_ns) noexcept nogil:
    cdef bint has_ended = False
    cdef uint32_t place = 0
    m.step_no += m.num_steps
    m.busy_ns += now_ns - m.began_ns
    while place < m.num_active:
        if (m.sequences[place].num_in_batch
                and advance_model_sequence(m, &m.sequences[place], now_ns)):
            close_model_sequence(m, s, place, FINISH_LENGTH, now_ns)
            has_ended = True
        else:
            place += 1
    return has_ended
