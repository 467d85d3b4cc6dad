# Placement: on which of the device slots that could start it now a request starts.
#
# A device slot *serves* a request if it lives, has its model, takes its lane, and could hold it
# at its longest; it *could start* it if besides it is not drained and has a sequence and cells
# for it now (round.pxi). Among those the policy gives each a cost, and the least one wins:
#
#     least_connections     running / weight
#     vram                  - bytes of KV left after placing it
#     weighted_round_robin  - (turn + weight)
#     load                  (work there + its own) x step time x (1 + use) x (1 + fill) / weight
#
# Before the cost: with `vram` and `load` a short request prefers device slots on which nothing
# runs, as least_connections does anyway; the turn is for nobody's convenience. After it: the
# longest of the prompt that is there already, then the first. And a device slot that holds
# more of the prompt than the winner has it all the same if, by running / weight, it runs at
# most `prefix_margin` more.
#
# weighted_round_robin is nginx's smooth kind. Each start gives every device slot that could
# have had it its weight, and takes the sum of those from the one that gets it. So with weights
# of 2 and 1 it goes A B A, A B A, and every three starts are split exactly. What never was a
# choice leaves no trace: a full one gains no turns to be showered with later, and neither does
# one that lost to a prefix or a hold.
#
# load is the time until a slot has done all that it has, if it goes on as it did lately. Work
# is tokens: prompt and expected answer of each that runs, and of the one that is placed. On a
# device slot all sequences get a token a step, so a token costs it a step's time; that is
# measured where it is felt, between the first token and the last of each answer that ended,
# and so holds the batch, the contexts and whoever else uses the device. Use (what NVML says,
# 0 to 1) and fill (the part of the KV that is promised once it is placed) are of the moment,
# and the other two of the past, but both are coarse: NVML counts the time in which any kernel
# ran, and a half full cache is not half as fast. So each at most doubles the cost. A device
# slot of which nothing is known counts as STEP_UNKNOWN_NS a step.
#
# What the loop may change of a device slot while it runs: it writes a word and wakes the
# scheduler, which reads all of these words in each round, after the submit ring. One word each
# and the last one counts, so no order between them is needed and none is promised, but for
# one: who drains a device slot and submits afterwards finds it drained. The word was written
# before the push, the push is a release and the pop an acquire, and the word is read after
# the pop. The headroom is taken out of its word as it is read (exchanged), since it is meant
# from the moment it is read on, and to say the same again means something.
#
# Owner: the scheduler's thread.

cdef struct ModelQueue      # round.pxi

# Python sees these too.
cpdef enum Placing:
    LEAST_CONNECTIONS = 0
    VRAM = 1
    WEIGHTED_ROUND_ROBIN = 2
    LOAD = 3

cdef enum:
    STEP_UNKNOWN_NS = 50_000_000

# One device slot, as the policies know it.
cdef struct Standing:
    int64_t turn                # weighted_round_robin; they sum up to 0
    uint64_t num_work           # tokens: prompts and expected answers of what runs
    uint64_t step_ns            # of late; 0: unknown. Atomic

cdef struct Placement:
    uint32_t policy
    uint32_t prefix_units_min   # of a prompt, or a hint says nothing
    double prefix_margin        # starts, for a weight of 1
    bint is_turn                # the last choice was the turn's
    uint64_t able               # who could have had it then, as bits
    Standing slots[MAX_DEVICE_SLOTS]


# --- as Python says it ------------------------------------------------------------------

cdef int placement_init(Placement* p, uint32_t policy, double prefix_margin,
                        uint32_t prefix_tokens_min) except -1:
    if policy > LOAD or not 0 <= prefix_margin <= 1e6:
        raise ValueError("no such policy, or prefix_margin is not between 0 and 1e6")
    p.policy = policy
    p.prefix_margin = prefix_margin
    p.prefix_units_min = min(prefix_tokens_min // HINT_UNIT + (prefix_tokens_min % HINT_UNIT != 0),
                             <uint32_t> HINT_UNITS_MAX)
    return 0


cdef inline uint32_t weight_units(double weight) noexcept nogil:
    return max(<uint32_t> (weight * WEIGHT_UNIT + 0.5), <uint32_t> 1)


cdef uint32_t headroom_word(object kv_tokens) except 0:
    if kv_tokens is None:
        return NOWHERE
    if kv_tokens < 0:
        raise ValueError("a headroom is at least 0 tokens")
    # More than anything has is no bound.
    return 1 + <uint32_t> min(kv_tokens, NOWHERE - 1)


# One more device slot that holds some of its prompt. The longest stay, of equals the first.
cdef inline void note_hint(uint16_t* hints, uint32_t slot, uint64_t num_tokens) noexcept:
    cdef uint16_t hint = hint_of(slot, num_tokens)
    if slot >= MAX_DEVICE_SLOTS:
        return
    if hint_units(hint) > hint_units(hints[0]):
        hints[1] = hints[0]
        hints[0] = hint
    elif hint_units(hint) > hint_units(hints[1]):
        hints[1] = hint


# --- what the loop wants ----------------------------------------------------------------

# KV tokens that may still be promised to who starts. What runs may go beyond that.
cdef inline uint64_t headroom_of(const SlotAccount* account) noexcept nogil:
    return account.ceiling - account.reserved if account.ceiling > account.reserved else 0


# The same from any thread: a figure.
cdef inline uint64_t headroom_seen(const SlotAccount* account) noexcept nogil:
    cdef uint64_t ceiling = load_relaxed(&account.ceiling)
    cdef uint64_t reserved = load_relaxed(&account.reserved)
    return ceiling - reserved if ceiling > reserved else 0


# From now on at most so many tokens more are promised to who starts; what is promised stays.
cdef inline void bound_headroom(SlotAccount* account, uint32_t wanted) noexcept nogil:
    cdef uint64_t ceiling = account.capacity
    if wanted != NOWHERE:
        ceiling = min(ceiling, account.reserved + wanted - 1)
    store_relaxed(&account.ceiling, ceiling)


# The lanes share the places of who takes requests. Held for nobody: it may be for long.
cdef void set_drained(SchedulerState* s, DeviceSlot* slot, bint is_drained) noexcept nogil:
    cdef ModelQueue* queue = books_of(s).models[slot.model]
    # Release: pairs with the acquire in device_figures; what has started there.
    store_release32(&slot.drained, is_drained)
    if is_drained:
        queue.backlog.num_places -= slot.num_sequences
        queue.backlog.num_tokens -= slot.kv_tokens
        release_hold(&queue.backfill, slot.index)
    else:
        queue.backlog.num_places += slot.num_sequences
        queue.backlog.num_tokens += slot.kv_tokens


# Another context was made there than was planned. Not before all that ran there has settled. Who
# waits may fit nowhere now: the sweep looks.
cdef void resize(SchedulerState* s, DeviceSlot* slot) noexcept nogil:
    cdef SlotAccount* account = &books_of(s).ledger.slots[slot.index]
    cdef BacklogState* backlog = &books_of(s).models[slot.model].backlog
    if account.num_running:
        return
    if not slot.drained:
        backlog.num_places -= slot.num_sequences
        backlog.num_tokens -= slot.kv_tokens
    slot.kv_tokens = exchange32(&slot.wants_capacity, 0)
    # The exchange has brought both.
    slot.kv_block = load_relaxed32(&slot.wants_block)
    slot.num_sequences = load_relaxed32(&slot.wants_sequences)
    if not slot.drained:
        backlog.num_places += slot.num_sequences
        backlog.num_tokens += slot.kv_tokens
    store_relaxed(&account.num_sequences, slot.num_sequences)
    store_relaxed(&account.capacity, slot.kv_tokens)
    store_relaxed(&account.ceiling, slot.kv_tokens)
    books_of(s).sweep_next = 0


# Take over those that were added since; they take requests as soon as nothing is wanted of them.
cdef inline void adopt(SchedulerState* s) noexcept nogil:
    # Acquire: pairs with the release in add_device_slot.
    cdef uint32_t num = load_acquire32(&s.num_added)
    while s.num_slots < num:
        s.num_slots += 1
        share_lanes(s, s.slots[s.num_slots - 1].model)


cdef void heed(SchedulerState* s) noexcept nogil:
    cdef DeviceSlot* slot
    cdef uint32_t i, wants_drain
    for i in range(s.num_slots):
        slot = s.slots[i]
        if slot.buried:
            continue
        # Acquire: pairs with the releases in undrain_slot and rest_slot. Who gives a device slot
        # another size and then opens it finds nothing started there before it has that size.
        wants_drain = load_acquire32(&slot.wants_drain) or load_acquire32(&slot.wants_rest)
        if load_relaxed32(&slot.wants_capacity):
            resize(s, slot)
        # Relaxed: see above.
        slot.weight = load_relaxed32(&slot.wants_weight)
        slot.limit = load_relaxed32(&slot.wants_limit)
        if (wants_drain != 0) != slot.drained:
            set_drained(s, slot, not slot.drained)
        if load_relaxed32(&slot.wants_headroom):
            bound_headroom(&books_of(s).ledger.slots[i], exchange32(&slot.wants_headroom, 0))


# A lane that no living device slot of a model is for is served by all of them rather than by
# none: a reservation is worth less than an answer. When one has come or gone.
cdef void share_lanes(SchedulerState* s, uint32_t model) noexcept nogil:
    cdef uint32_t i, lanes = 0
    for i in range(s.num_slots):
        if s.slots[i].model == model and not s.slots[i].buried:
            lanes |= s.slots[i].lanes
    for i in range(s.num_slots):
        if s.slots[i].model == model:
            store_relaxed32(&s.slots[i].lanes_served, s.slots[i].lanes | ~lanes)


# --- the policies -----------------------------------------------------------------------

cdef inline double connections_of(SchedulerState* s, uint32_t slot) noexcept nogil:
    return (books_of(s).ledger.slots[slot].num_running * <double> WEIGHT_UNIT
            / s.slots[slot].weight)


# Integers first, then products from left to right: the same to the last bit wherever it runs.
cdef double load_of(SchedulerState* s, uint32_t slot, const Entry* entry) noexcept nogil:
    cdef Standing* own = &books_of(s).placement.slots[slot]
    cdef SlotAccount* account = &books_of(s).ledger.slots[slot]
    cdef uint64_t reserved = account.reserved + first_promise(s.slots[slot], entry)
    cdef uint64_t fill = 1024 * reserved // max(account.capacity, <uint64_t> 1)
    cdef uint64_t use = 100 + min(load_relaxed32(&s.slots[slot].use_percent), <uint32_t> 100)
    cdef uint64_t work = own.num_work + entry.share_tokens
    return (<double> work * <double> (own.step_ns if own.step_ns else STEP_UNKNOWN_NS)
            * <double> use * <double> (1024 + fill) / <double> s.slots[slot].weight)


# The lower the better.
cdef double cost_at(SchedulerState* s, uint32_t slot, const Entry* entry) noexcept nogil:
    cdef Placement* p = &books_of(s).placement
    cdef uint64_t left
    if p.policy == VRAM:
        left = (headroom_of(&books_of(s).ledger.slots[slot])
                - first_promise(s.slots[slot], entry))
        return -(<double> left * <double> s.slots[slot].token_bytes)
    if p.policy == WEIGHTED_ROUND_ROBIN:
        return -<double> (p.slots[slot].turn + s.slots[slot].weight)
    if p.policy == LOAD:
        return load_of(s, slot, entry)
    return connections_of(s, slot)


# How much of its prompt the device slot holds already; 0 where it is too little to count.
cdef inline uint32_t prefix_at(SchedulerState* s, uint32_t slot, const Entry* entry) noexcept nogil:
    cdef uint32_t i, units = 0
    for i in range(<uint32_t> HINTS_MAX):
        if hint_slot(entry.hints[i]) == slot:
            units = max(units, hint_units(entry.hints[i]))
    return units if units >= books_of(s).placement.prefix_units_min else 0


# What is compared, the first difference deciding.
cdef struct Rank:
    bint is_busy                # where that counts
    double cost
    uint32_t prefix_units       # of its prompt, there already
    uint32_t slot


cdef Rank rank_at(SchedulerState* s, uint32_t slot, const Entry* entry) noexcept nogil:
    cdef Books* books = books_of(s)
    cdef Rank rank
    rank.is_busy = (entry.lane == LANE_SHORT and books.backlog.num_lanes > 1
                    and books.placement.policy in (VRAM, LOAD)
                    and books.ledger.slots[slot].num_running != 0)
    rank.cost = cost_at(s, slot, entry)
    rank.prefix_units = prefix_at(s, slot, entry)
    rank.slot = slot
    return rank


cdef inline bint is_better(const Rank* a, const Rank* b) noexcept nogil:
    if a.is_busy != b.is_busy:
        return b.is_busy
    if a.cost != b.cost:
        return a.cost < b.cost
    if a.prefix_units != b.prefix_units:
        return a.prefix_units > b.prefix_units
    return a.slot < b.slot


# The first of these bits, or NOWHERE.
cdef inline uint32_t first_of_bits(uint64_t bits) noexcept nogil:
    cdef uint32_t i = 0
    if bits == 0:
        return NOWHERE
    while not bits >> i & 1:
        i += 1
    return i


# Who could start it now, as bits.
cdef uint64_t able_slots(SchedulerState* s, uint32_t index, bint is_aged) noexcept nogil:
    cdef uint64_t able = 0
    cdef uint32_t i
    for i in range(s.num_slots):
        if has_room(s, i, index, is_aged):
            able |= <uint64_t> 1 << i
    return able


# Which of them the policy takes; there is one at least.
cdef Rank best_of(SchedulerState* s, uint64_t able, const Entry* entry) noexcept nogil:
    cdef Rank best, rank
    cdef uint32_t i
    memset(&best, 0, sizeof(Rank))
    best.slot = NOWHERE
    for i in range(s.num_slots):
        if able >> i & 1:
            rank = rank_at(s, i, entry)
            if best.slot == NOWHERE or is_better(&rank, &best):
                best = rank
    return best


# Which of them has it instead because it holds more of the prompt; the best itself where none.
cdef Rank prefix_winner(SchedulerState* s, uint64_t able, const Rank* best,
                        const Entry* entry) noexcept nogil:
    cdef double margin = books_of(s).placement.prefix_margin
    cdef double bound = connections_of(s, best.slot) + margin
    cdef Rank winner = best[0], rank
    cdef uint32_t i, slot
    if margin <= 0:
        return winner
    for i in range(<uint32_t> HINTS_MAX):
        slot = hint_slot(entry.hints[i])
        if (hint_units(entry.hints[i]) == 0 or not able >> slot & 1
                or connections_of(s, slot) > bound):
            continue
        rank = rank_at(s, slot, entry)
        if rank.prefix_units > winner.prefix_units or (
                rank.prefix_units == winner.prefix_units and winner.slot != best.slot
                and is_better(&rank, &winner)):
            winner = rank
    return winner


# Where it starts, of all that can start it now. NOWHERE: none can. Where there is no choice the
# entry's second line is not looked at.
cdef uint32_t place(SchedulerState* s, uint32_t index, bint is_aged) noexcept nogil:
    cdef Placement* p = &books_of(s).placement
    cdef const Entry* entry = &s.table[index]
    cdef Rank best, winner
    p.able = able_slots(s, index, is_aged)
    p.is_turn = False
    if p.able & (p.able - 1) == 0:
        return first_of_bits(p.able)
    best = best_of(s, p.able, entry)
    winner = prefix_winner(s, p.able, &best, entry)
    p.is_turn = winner.slot == best.slot
    return winner.slot


# --- what the policies remember ---------------------------------------------------------

# The last choice is carried out.
cdef void take_turn(SchedulerState* s, uint32_t slot) noexcept nogil:
    cdef Placement* p = &books_of(s).placement
    cdef uint32_t i
    if not p.is_turn or p.policy != WEIGHTED_ROUND_ROBIN:
        return
    for i in range(s.num_slots):
        if p.able >> i & 1:
            p.slots[i].turn += s.slots[i].weight
            p.slots[slot].turn -= s.slots[i].weight


cdef inline void standing_start(Placement* p, uint32_t slot, const Entry* entry) noexcept nogil:
    p.slots[slot].num_work += entry.share_tokens


# What it tells of the pace: the mean time of a step, over the steps in which it decoded.
cdef void note_pace(Standing* own, const Attempt* attempt) noexcept nogil:
    cdef uint64_t step_ns
    if (attempt.num_completion_tokens < 2 or attempt.first_token_ns <= 0
            or attempt.finished_ns <= attempt.first_token_ns):
        return
    step_ns = (<uint64_t> (attempt.finished_ns - attempt.first_token_ns)
               // (attempt.num_completion_tokens - 1))
    store_relaxed(&own.step_ns,
                  (7 * own.step_ns + step_ns) // 8 if own.step_ns else max(step_ns, <uint64_t> 1))


cdef inline void standing_end(Placement* p, const Attempt* attempt, const Entry* entry,
                              bint is_lost) noexcept nogil:
    p.slots[attempt.slot].num_work -= entry.share_tokens
    # What went on after a loss had a pause between two of its tokens.
    if not is_lost and attempt.earlier == NULL:
        note_pace(&p.slots[attempt.slot], attempt)
