# Model device slots: they play the worker's side of a Scheduler and compute nothing.
#
# A step puts into its batch what the engine's step would (engine/step.pxi): decodes first,
# one token each, those of lesser classes left out while a better prompt is open, the least of
# all stepping back for urgent ones; then prefill, the best class first, up to a budget that
# lanes share and that is steered towards a time. What it takes comes from a cost model:
#
#     fixed + decode x tokens drawn + prefill x other tokens
#           + context x (each token's own context, summed) + cells x tokens x filled cells
#
# While nothing comes and nothing ends, one step is like the next but for a context that
# grows evenly. So a slot plans a *run* of equal steps whose times are an arithmetic series:
# its end, or the step under way at any moment, is found without playing the steps one by one.
# A run ends where the batch would change, and is cut at the next step's end when the
# scheduler sends something or calls.
#
# Promises of KV grow as the worker's do (engine/swap.pxi); copying cells out and back is taken
# to cost nothing.
#
# Owner: whoever plays the virtual clock. Times are that clock's.

cdef enum:
    ANY_LANE = 255
    ANY_LEVEL = 255

cdef struct StepCost:
    double fixed_ns         # of a step, whatever is in it
    double decode_ns        # of each token drawn: a decode, or the last token of a prompt
    double prefill_ns       # of each other token of a prompt
    double context_ns       # of each token, for each token of its own context
    double cells_ns         # of each token, for each cell that is filled
    int32_t budget          # tokens of a step that decodes and prefill share, to begin with
    int32_t fine_budget     # of these, for long prompts
    int32_t batch_max       # tokens of a step at most
    int64_t target_ns       # of a full step: the budget is steered towards it; 0: it stays

cdef struct ModelSequence:
    Attempt* attempt
    uint64_t order          # of its start here
    uint64_t last_step      # the last step that had it in its batch
    uint32_t level
    uint32_t lane
    uint32_t num_prompt
    uint32_t num_kv         # cells filled
    uint32_t num_left       # tokens still to draw
    uint32_t num_in_batch   # its tokens in each step of the run
    uint32_t num_fill       # it was or will be filled up to here before it goes on
    uint32_t footprint      # KV tokens that it can come to hold
    uint32_t granted        # that it may hold
    uint32_t wanted         # that it has asked for
    int64_t stop_ns
    bint is_out             # it has given up its cells
    bint steps_back         # others are more urgent than it

cdef struct ModelSlot:
    StepCost cost
    ModelSequence* sequences    # the first num_active of them, in no order
    ModelSequence** opened      # of the step that is filled: see list_opened
    uint32_t num_opened
    uint32_t index
    uint32_t num_active
    uint32_t num_prefills       # of them: prompts still open
    uint32_t num_in_turn        # sequences that a step decodes; more only if urgent ones run
    int32_t budget              # as it has been steered
    int32_t num_fine            # what is left for long prompts in the step that is filled
    uint32_t fine_level         # prompts of this class and below go like long ones
    double short_share          # of the prefill, where both lanes have prompts open
    uint32_t kv_block           # promises grow by so many tokens; 0: they do not
    bint has_asked              # for one to grow; the scheduler hears of it after the step
    bint is_called              # a promise may have changed
    uint64_t num_started
    uint64_t step_no            # steps done
    uint64_t num_cells          # filled, all sequences together
    int64_t busy_ns
    # The run under way.
    int64_t began_ns
    int64_t ends_ns
    uint64_t num_steps          # 0: idle
    uint64_t num_tokens         # in each of them
    double first_ns             # of its first step ...
    double growth_ns            # ... and how much more each takes than the one before

# What the steps of a run have in common.
cdef struct StepLoad:
    uint64_t num_tokens
    uint64_t num_drawn
    double context              # in the first step: each token's own context, summed
    double context_growth       # from step to step
    uint64_t num_steps          # until the batch would change


cdef int model_slot_init(ModelSlot* m, SchedulerState* s, uint32_t index) noexcept nogil:
    cdef SlotAccount* account = &books_of(s).ledger.slots[index]
    memset(m, 0, sizeof(ModelSlot))
    m.index = index
    m.num_in_turn = <uint32_t> account.num_sequences
    m.short_share = s.short_share
    m.fine_level = s.fine_level
    m.kv_block = s.slots[index].kv_block
    m.sequences = <ModelSequence*> calloc(account.num_sequences + account.num_extra,
                                          sizeof(ModelSequence))
    m.opened = <ModelSequence**> calloc(account.num_sequences + account.num_extra,
                                        sizeof(ModelSequence*))
    return 0 if m.sequences != NULL and m.opened != NULL else -1


cdef void model_slot_free(ModelSlot* m) noexcept nogil:
    free(m.sequences)
    free(m.opened)


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
    seq.lane = entry_of(s, attempt.handle).lane
    seq.num_prompt = max(attempt.num_prompt_tokens, <uint32_t> 1)
    seq.num_kv = 0
    seq.num_fill = seq.num_prompt
    seq.footprint = seq.num_prompt + attempt.max_tokens
    seq.granted = granted_tokens(attempt)
    seq.wanted = 0
    seq.stop_ns = attempt.stop_ns
    seq.is_out = False
    seq.num_left = max(min(<uint32_t> <size_t> attempt.work, attempt.max_tokens), <uint32_t> 1)
    m.num_started += 1
    m.num_active += 1
    m.num_prefills += 1


cdef void close_model_sequence(ModelSlot* m, SchedulerState* s, uint32_t place, uint32_t finish,
                               int64_t now_ns) noexcept nogil:
    cdef ModelSequence* seq = &m.sequences[place]
    m.num_cells -= 0 if seq.is_out else seq.num_kv
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
        stop_ns = m.sequences[place].stop_ns
        if stop_ns and now_ns >= stop_ns:
            close_model_sequence(m, s, place, FINISH_TIMEOUT, now_ns)
            has_ended = True
        else:
            place += 1
    return has_ended


# --- promises that grow -----------------------------------------------------------------

# Whether it has to ask for a block in a step that it begins with so many cells.
cdef inline bint is_near_end(const ModelSlot* m, const ModelSequence* seq,
                             uint32_t num_kv) noexcept nogil:
    return max(num_kv, seq.num_fill) + m.kv_block // 2 >= seq.granted


cdef inline bint may_grow(const ModelSequence* seq) noexcept nogil:
    return seq.granted < seq.footprint and seq.wanted <= seq.granted


cdef void ask_ahead(ModelSlot* m, SchedulerState* s, ModelSequence* seq) noexcept nogil:
    if may_grow(seq) and is_near_end(m, seq, seq.num_kv):
        seq.wanted = min(seq.granted + m.kv_block, seq.footprint)
        ask_growth(s, seq.attempt, seq.wanted)
        m.has_asked = True


# Ask for what will be needed, give up what was taken away, take back what was given back.
cdef void obey_promises(ModelSlot* m, SchedulerState* s) noexcept nogil:
    cdef ModelSequence* seq
    cdef uint32_t i
    if m.kv_block == 0:
        return
    for i in range(m.num_active):
        seq = &m.sequences[i]
        if m.is_called:
            seq.granted = granted_tokens(seq.attempt)
        if not seq.is_out and seq.granted == 0:
            seq.is_out = True
            m.num_cells -= seq.num_kv
            if not is_prefilling(seq):
                # Its last token was drawn and not computed yet.
                seq.num_fill = seq.num_kv + 1
        elif not seq.is_out:
            ask_ahead(m, s, seq)
        elif seq.granted:
            seq.is_out = False
            m.num_cells += seq.num_kv
    m.is_called = False


cdef inline bint may_compute(const ModelSequence* seq) noexcept nogil:
    return not seq.is_out and seq.num_kv < seq.granted


# Steps until what it is promised is full, or until it has to ask for more.
cdef inline uint64_t steps_to_promise(const ModelSlot* m, const ModelSequence* seq) noexcept nogil:
    cdef uint32_t num_steps = seq.granted - seq.num_kv
    if m.kv_block and may_grow(seq) and num_steps > m.kv_block // 2:
        num_steps -= m.kv_block // 2
    return num_steps


# --- what a step holds ------------------------------------------------------------------

cdef inline bint is_ahead(const ModelSequence* a, const ModelSequence* b) noexcept nogil:
    return a.level < b.level or (a.level == b.level and a.order < b.order)


# The open prompts in the order of class and start. They mostly lie so already.
cdef void list_opened(ModelSlot* m) noexcept nogil:
    cdef ModelSequence* seq
    cdef uint32_t i, place
    m.num_opened = 0
    if m.num_prefills == 0:
        return
    for i in range(m.num_active):
        seq = &m.sequences[i]
        if not is_prefilling(seq) or not may_compute(seq):
            continue
        place = m.num_opened
        while place and is_ahead(seq, m.opened[place - 1]):
            m.opened[place] = m.opened[place - 1]
            place -= 1
        m.opened[place] = seq
        m.num_opened += 1


# While a prompt of a better class is open, the lesser ones stay out but for one step of
# DECODE_EVERY.
cdef void leave_out_lesser(ModelSlot* m, StepLoad* load) noexcept nogil:
    cdef uint32_t i, num_in = 0
    cdef uint64_t num_missed
    for i in range(m.num_opened):
        if m.opened[i].level > m.opened[0].level:
            num_missed = m.step_no - m.opened[i].last_step
            if num_missed < DECODE_EVERY:
                load.num_steps = min(load.num_steps, DECODE_EVERY - num_missed)
                continue
            load.num_steps = 1
        m.opened[num_in] = m.opened[i]
        num_in += 1
    m.num_opened = num_in


# The last in the order of class and start that does not step back yet.
cdef ModelSequence* least_in_turn(ModelSlot* m) noexcept nogil:
    cdef ModelSequence* least = NULL
    cdef uint32_t i
    for i in range(m.num_active):
        if not m.sequences[i].steps_back and (least == NULL or is_ahead(least, &m.sequences[i])):
            least = &m.sequences[i]
    return least


cdef void let_step_back(ModelSlot* m) noexcept nogil:
    cdef uint32_t i, num_over = max(m.num_active, m.num_in_turn) - m.num_in_turn
    for i in range(m.num_active):
        m.sequences[i].steps_back = False
    for i in range(num_over):
        least_in_turn(m).steps_back = True


cdef void load_decodes(ModelSlot* m, StepLoad* load) noexcept nogil:
    cdef uint32_t urgent = m.opened[0].level if m.num_opened else <uint32_t> ANY_LEVEL
    cdef ModelSequence* seq
    cdef uint64_t num_missed
    cdef uint32_t i
    for i in range(m.num_active):
        seq = &m.sequences[i]
        seq.num_in_batch = 0
        if is_prefilling(seq) or not may_compute(seq):
            continue
        if seq.steps_back or seq.level > urgent:
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
        load.num_steps = min(load.num_steps, steps_to_promise(m, seq))


# Whether a prompt of the best class is open in this lane.
cdef bint has_best_prefill(ModelSlot* m, uint32_t lane) noexcept nogil:
    cdef uint32_t i
    for i in range(m.num_opened):
        if m.opened[i].level != m.opened[0].level:
            break
        if m.opened[i].lane == lane:
            return True
    return False


# Prefill of one lane (ANY_LANE: all) down to a class, within the budget: what is left of that,
# and of what the batch holds. A rest of less than PREFILL_MIN goes along, but for a fine one.
cdef int64_t put_prefills(ModelSlot* m, uint32_t lane, uint32_t level, int64_t budget,
                          int64_t* room) noexcept nogil:
    cdef ModelSequence* seq
    cdef uint32_t i
    cdef int64_t n, rest
    for i in range(m.num_opened):
        seq = m.opened[i]
        if budget <= 0 or seq.level > level:
            break
        if lane != ANY_LANE and seq.lane != lane:
            continue
        rest = <int64_t> (min(seq.num_prompt, seq.granted) - seq.num_kv - seq.num_in_batch)
        n = min(budget, rest)
        if seq.lane == LANE_LONG or seq.level >= m.fine_level:
            n = min(n, <int64_t> m.num_fine)
            m.num_fine -= <int32_t> n
        elif rest - n < PREFILL_MIN and rest <= room[0]:
            n = rest
        seq.num_in_batch += <uint32_t> n
        budget -= n
        room[0] -= n
    return budget


cdef void put_all_prefills(ModelSlot* m, int64_t num_decodes) noexcept nogil:
    cdef int64_t room = m.cost.batch_max - num_decodes
    cdef int64_t budget = min(max(m.budget - num_decodes, <int64_t> PREFILL_MIN), room)
    cdef uint32_t best = m.opened[0].level
    cdef int64_t part
    m.num_fine = fine_chunk(m.cost.fine_budget, <int32_t> num_decodes)
    if has_best_prefill(m, LANE_SHORT) and has_best_prefill(m, LANE_LONG):
        part = <int64_t> (budget * m.short_share + 0.5)
        budget -= part
        budget += put_prefills(m, LANE_SHORT, best, part, &room)
        budget = put_prefills(m, LANE_LONG, best, budget, &room)
    put_prefills(m, ANY_LANE, ANY_LEVEL, budget, &room)


cdef void load_prefills(ModelSlot* m, StepLoad* load) noexcept nogil:
    cdef ModelSequence* seq
    cdef uint32_t i, n, rest
    if m.num_opened == 0:
        return
    put_all_prefills(m, <int64_t> load.num_tokens)
    for i in range(m.num_opened):
        seq = m.opened[i]
        n = seq.num_in_batch
        if n == 0:
            continue
        rest = seq.num_prompt - seq.num_kv
        load.num_tokens += n
        load.context += <double> n * seq.num_kv + <double> n * (n + 1) / 2
        load.context_growth += <double> n * n
        if n == rest:
            load.num_drawn += 1
            load.num_steps = 1
        else:
            # Its last piece is another step: it is shorter, or takes a rest along, or draws a token.
            load.num_steps = min(load.num_steps, <uint64_t> max((<int64_t> rest - PREFILL_MIN) // n, 1))
            load.num_steps = min(load.num_steps, <uint64_t> (seq.granted - seq.num_kv) // n)


# --- runs -------------------------------------------------------------------------------

# What the budget is after a step that took so long.
cdef int32_t steered(const ModelSlot* m, uint64_t num_tokens, double took_ns) noexcept nogil:
    cdef double target_ns = <double> m.cost.target_ns
    if target_ns == 0 or <int64_t> num_tokens < m.budget:
        return m.budget
    if took_ns > target_ns:
        return max(<int32_t> (num_tokens * (target_ns / took_ns)), 1)
    if took_ns < target_ns - m.cost.target_ns // 4:
        return min(m.budget + max(m.budget // 8, 1), m.cost.batch_max)
    return m.budget


# The steps of a run may grow past the target, but only the last may change the budget.
cdef void end_at_target(ModelSlot* m) noexcept nogil:
    cdef double room_ns = m.cost.target_ns - m.first_ns
    if m.cost.target_ns == 0 or <int64_t> m.num_tokens < m.budget:
        return
    if steered(m, m.num_tokens, m.first_ns) != m.budget:
        m.num_steps = 1
    elif m.growth_ns > 0 and 0 <= room_ns < m.growth_ns * m.num_steps:
        m.num_steps = min(m.num_steps, <uint64_t> (room_ns / m.growth_ns) + 2)


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


# Take what was sent, and go on; idle where there is nothing. True: something ended, or was
# asked for with nothing else to do.
cdef bint begin_run(ModelSlot* m, SchedulerState* s, int64_t now_ns) noexcept nogil:
    cdef Attempt* attempt = next_attempt(s, m.index)
    cdef StepLoad load
    cdef bint has_ended
    cdef uint32_t i
    while attempt != NULL:
        open_model_sequence(m, s, attempt, now_ns)
        attempt = next_attempt(s, m.index)
    obey_promises(m, s)
    has_ended = end_overdue(m, s, now_ns)
    m.num_steps = 0
    memset(&load, 0, sizeof(StepLoad))
    load.num_steps = <uint64_t> 1 << 32
    list_opened(m)
    leave_out_lesser(m, &load)
    let_step_back(m)
    load_decodes(m, &load)
    load_prefills(m, &load)
    if load.num_tokens == 0:
        return has_ended or took_word(m)
    m.began_ns = now_ns
    m.first_ns = max(1.0, m.cost.fixed_ns + m.cost.decode_ns * load.num_drawn
                     + m.cost.prefill_ns * (load.num_tokens - load.num_drawn)
                     + m.cost.context_ns * load.context
                     + m.cost.cells_ns * load.num_tokens * (m.num_cells + load.num_tokens))
    m.growth_ns = (m.cost.context_ns * load.context_growth
                   + m.cost.cells_ns * <double> load.num_tokens * load.num_tokens)
    m.num_tokens = load.num_tokens
    m.num_steps = 1 if m.has_asked else load.num_steps
    end_at_target(m)
    m.ends_ns = now_ns + duration_of(m, m.num_steps)
    for i in range(m.num_active):
        if m.sequences[i].stop_ns and m.sequences[i].stop_ns < m.ends_ns:
            cut_run(m, m.sequences[i].stop_ns)
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


# Whether it has asked for something since this was last looked at.
cdef inline bint took_word(ModelSlot* m) noexcept nogil:
    cdef bint has_asked = m.has_asked
    m.has_asked = False
    return has_asked


# The run's steps are done. True: something ended or was asked for.
cdef bint end_run(ModelSlot* m, SchedulerState* s, int64_t now_ns) noexcept nogil:
    cdef bint has_ended = took_word(m)
    cdef uint32_t place = 0
    m.step_no += m.num_steps
    m.busy_ns += now_ns - m.began_ns
    m.budget = steered(m, m.num_tokens, m.first_ns + m.growth_ns * (m.num_steps - 1))
    while place < m.num_active:
        if (m.sequences[place].num_in_batch
                and advance_model_sequence(m, &m.sequences[place], now_ns)):
            close_model_sequence(m, s, place, FINISH_LENGTH, now_ns)
            has_ended = True
        else:
            place += 1
    return has_ended
