# The backlog: who waits, and who is next.
#
# Waiting requests stand in lanes x levels. Inside a level stand keys, in a heap by their
# virtual token counter; inside a key first those with an explicit deadline, in a heap,
# then the rest in order of arrival. So a counter that moves moves one key and no request.
# Each level also links its requests in order of arrival, so that its oldest is known.
#
# Aging moves nothing. The virtual time of a request is arrival + level x aging_step, and
# the smaller one is ahead; compared between two requests it never changes, so no clock is
# needed. The oldest of a level is *due* when its virtual time is before that of the
# oldest of every better level. Two rules keep that from turning priority upside down:
#
#   1. A level chosen because its oldest is due serves that request, not its heap's top.
#   2. While a better class waits, due requests get at most one start in `aged_every`.
#
# Every comparison ends with the arrival number, so the order is total.
#
# Owner: the scheduler's thread. Nothing here fails except for want of memory in a heap of
# deadlines, and then the request stands by its arrival.

# --- a heap of times --------------------------------------------------------------------

cdef enum:
    HEAP_CAPACITY_MIN = 16

cdef struct Timed:
    int64_t time
    uint32_t index
    uint32_t unused

# A 4-ary heap: half as deep as a binary one, and laid out so that the four children share
# a cache line. `places` says for each entry where it stands, so any can be removed; it is
# an array of its own and not a field of Entry, because a sift writes one for each step and
# would fetch an entry for it. Grows by doubling, halves when a quarter full, but never
# below `capacity_min`.
cdef struct TimeHeap:
    Timed* nodes            # begins 48 bytes into a line: nodes[1] to [4] share the next
    char* memory
    uint32_t* places        # by entry, or NOWHERE; the owner's
    uint32_t size
    uint32_t capacity
    uint32_t capacity_min


cdef inline bint is_sooner(const Entry* table, const Timed* a, const Timed* b) noexcept nogil:
    if a.time != b.time:
        return a.time < b.time
    return table[a.index].arrival_no < table[b.index].arrival_no


cdef inline void heap_put(TimeHeap* heap, uint32_t place, Timed node) noexcept nogil:
    heap.nodes[place] = node
    heap.places[node.index] = place


cdef void heap_sift_up(TimeHeap* heap, Entry* table, uint32_t place, Timed node) noexcept nogil:
    cdef uint32_t parent
    while place:
        parent = (place - 1) >> 2
        if not is_sooner(table, &node, &heap.nodes[parent]):
            break
        heap_put(heap, place, heap.nodes[parent])
        place = parent
    heap_put(heap, place, node)


cdef void heap_sift_down(TimeHeap* heap, Entry* table, uint32_t place,
                         Timed node) noexcept nogil:
    cdef uint64_t child, best, end
    while True:
        child = (<uint64_t> place << 2) + 1
        if child >= heap.size:
            break
        end = min(child + 4, <uint64_t> heap.size)
        best = child
        child += 1
        while child < end:
            if is_sooner(table, &heap.nodes[child], &heap.nodes[best]):
                best = child
            child += 1
        if not is_sooner(table, &heap.nodes[best], &node):
            break
        heap_put(heap, place, heap.nodes[best])
        place = <uint32_t> best
    heap_put(heap, place, node)


# False: no memory, nothing changed.
cdef bint heap_resize(TimeHeap* heap, uint32_t capacity) noexcept nogil:
    cdef char* memory = NULL
    if capacity:
        memory = <char*> new_lines(capacity * sizeof(Timed) + 48)
        if memory == NULL:
            return False
        if heap.size:
            memcpy(memory + 48, heap.nodes, heap.size * sizeof(Timed))
    free(heap.memory)
    heap.memory = memory
    heap.nodes = <Timed*> (memory + 48) if capacity else NULL
    heap.capacity = capacity
    return True


# False: no memory, nothing changed.
cdef bint heap_push(TimeHeap* heap, Entry* table, uint32_t index, int64_t time) noexcept nogil:
    cdef Timed node
    if heap.size == heap.capacity:
        if not heap_resize(heap, max(<uint32_t> HEAP_CAPACITY_MIN, heap.capacity * 2)):
            return False
    node.time = time
    node.index = index
    node.unused = 0
    heap.size += 1
    heap_sift_up(heap, table, heap.size - 1, node)
    return True


# One place per entry, all NOWHERE; NULL: no memory.
cdef uint32_t* new_places(uint32_t capacity) noexcept nogil:
    cdef uint32_t* places = <uint32_t*> new_lines(capacity * sizeof(uint32_t))
    if places != NULL:
        memset(places, 0xFF, capacity * sizeof(uint32_t))
    return places


# Take the entry out; it must be in.
cdef void heap_remove(TimeHeap* heap, Entry* table, uint32_t index) noexcept nogil:
    cdef uint32_t place = heap.places[index]
    cdef Timed last
    lqs_assert(place < heap.size and heap.nodes[place].index == index)
    heap.places[index] = NOWHERE
    heap.size -= 1
    last = heap.nodes[heap.size]
    if place < heap.size:
        if place and is_sooner(table, &last, &heap.nodes[(place - 1) >> 2]):
            heap_sift_up(heap, table, place, last)
        else:
            heap_sift_down(heap, table, place, last)
    if heap.size < heap.capacity >> 2 and heap.capacity > heap.capacity_min:
        heap_resize(heap, max(heap.capacity_min, heap.capacity >> 1))
    elif heap.size == 0 and heap.capacity_min == 0:
        heap_resize(heap, 0)


# --- keys, levels, lanes ----------------------------------------------------------------

cdef enum:
    MAX_LANES = 4
    ALL_LANES = 0xF         # as bits
    MAX_LEVELS = 16
    PREFETCH_HOPS = 8
    # A counter counts in tokens / 2**16 at weight 1, so that refunds are exact.
    TOKEN_UNIT = 65536

# An entry's neighbours while it waits. Apart from the entries, because a removal writes to
# both neighbours in both lists: in a dense array those are mostly in a cache.
cdef struct Links:
    uint32_t older, younger     # in its level's order of arrival
    uint32_t before, behind     # in its key's FIFO

# What waits of one key in one level.
cdef struct KeyQueue:
    int64_t counter         # virtual tokens: what was started, over the key's weight
    uint64_t since          # arrival number that made it active; breaks ties
    TimeHeap deadlines
    uint32_t head, tail     # FIFO of those without a deadline
    uint32_t place          # in the level's heap of keys, or NOWHERE: nothing waits
    uint32_t unused

cdef struct Level:
    KeyQueue* queues        # one per key
    uint32_t* keys          # 4-ary heap of the active ones
    uint32_t num_active
    uint32_t num_waiting
    uint32_t oldest, youngest
    int64_t floor           # counter of the key that was last to leave

cdef struct BacklogState:
    Entry* table            # the caller's
    Links* links            # of each entry
    uint32_t* places        # of each entry in its key's heap of deadlines, or NOWHERE
    Level* levels           # lane-major
    uint64_t* key_units     # virtual tokens per token; written by any thread, see set_key_units
    bint borrows            # links and places are another's, over the same table
    uint32_t num_lanes
    uint32_t num_levels
    uint32_t num_keys
    uint32_t aged_every
    uint32_t since_aged     # starts since the last aged one, saturated at aged_every
    uint32_t num_waiting
    int64_t aging_step_ns   # 0: no aging
    double lane_weights[MAX_LANES]
    double lane_weight_sum
    uint64_t lane_running[MAX_LANES]
    uint64_t lane_caps[MAX_LANES]           # running of a lane at most, lent places too; 0: none
    uint64_t lane_token_caps[MAX_LANES]     # no more of it start once they are promised so many
    uint64_t lane_tokens[MAX_LANES]         # KV tokens promised to what runs of a lane
    uint64_t lane_waiting_tokens[MAX_LANES]  # ... and wanted by what waits
    uint64_t far_above_tokens       # who wants more than that ...
    uint64_t far_waiting_tokens     # ... and waits: what those want together
    uint64_t num_places     # sequences that the lanes share; 0: no shares
    uint64_t num_tokens     # KV tokens that they share; 0: no shares

# Who is next, and whether it is because it is due.
cdef struct Choice:
    uint32_t index          # NOWHERE: nobody waits
    bint is_aged


cdef inline Level* level_of(BacklogState* b, uint32_t lane, uint32_t level) noexcept nogil:
    return &b.levels[lane * b.num_levels + level]


# `lender`: a backlog over the same table, where no entry is in both at a time, or NULL.
cdef int backlog_init(BacklogState* b, Entry* table, uint32_t capacity, uint32_t num_lanes,
                      uint32_t num_levels, uint32_t num_keys,
                      const BacklogState* lender) noexcept nogil:
    cdef uint32_t i, k
    memset(b, 0, sizeof(BacklogState))
    b.table = table
    b.borrows = lender != NULL
    b.num_lanes = num_lanes
    b.num_levels = num_levels
    b.num_keys = num_keys
    b.aged_every = 1
    b.key_units = <uint64_t*> calloc(num_keys, sizeof(uint64_t))
    b.levels = <Level*> calloc(num_lanes * num_levels, sizeof(Level))
    b.places = lender.places if b.borrows else new_places(capacity)
    b.links = lender.links if b.borrows else <Links*> new_lines(capacity * sizeof(Links))
    if b.levels == NULL or b.key_units == NULL or b.places == NULL or b.links == NULL:
        return -1
    for k in range(num_keys):
        b.key_units[k] = TOKEN_UNIT
    for i in range(num_lanes):
        b.lane_weights[i] = 1
    b.lane_weight_sum = num_lanes
    for i in range(num_lanes * num_levels):
        b.levels[i].oldest = b.levels[i].youngest = NOWHERE
        b.levels[i].keys = <uint32_t*> calloc(num_keys, sizeof(uint32_t))
        b.levels[i].queues = <KeyQueue*> calloc(num_keys, sizeof(KeyQueue))
        if b.levels[i].keys == NULL or b.levels[i].queues == NULL:
            return -1
        for k in range(num_keys):
            b.levels[i].queues[k].head = b.levels[i].queues[k].tail = NOWHERE
            b.levels[i].queues[k].place = NOWHERE
            b.levels[i].queues[k].deadlines.places = b.places
    return 0


cdef void backlog_free(BacklogState* b) noexcept nogil:
    cdef uint32_t i, k
    if b.levels != NULL:
        for i in range(b.num_lanes * b.num_levels):
            if b.levels[i].queues != NULL:
                for k in range(b.num_keys):
                    free(b.levels[i].queues[k].deadlines.memory)
            free(b.levels[i].queues)
            free(b.levels[i].keys)
    free(b.levels)
    free(b.key_units)
    if not b.borrows:
        free(b.places)
        free(b.links)
    b.places = NULL
    b.links = NULL
    b.levels = NULL
    b.key_units = NULL


# Another over the same table that orders by the same rules, with the same weights and caps.
cdef int backlog_init_like(BacklogState* b, const BacklogState* other) noexcept nogil:
    cdef uint32_t i
    if backlog_init(b, other.table, 0, other.num_lanes, other.num_levels, other.num_keys, other):
        return -1
    b.aging_step_ns = other.aging_step_ns
    b.aged_every = b.since_aged = other.aged_every
    b.lane_weight_sum = other.lane_weight_sum
    b.far_above_tokens = other.far_above_tokens
    for i in range(other.num_lanes):
        b.lane_weights[i] = other.lane_weights[i]
        b.lane_caps[i] = other.lane_caps[i]
        b.lane_token_caps[i] = other.lane_token_caps[i]
    memcpy(b.key_units, other.key_units, other.num_keys * sizeof(uint64_t))
    return 0


# --- fair share: the heap of keys -------------------------------------------------------

cdef inline bint is_poorer(const Level* level, uint32_t a, uint32_t b) noexcept nogil:
    cdef const KeyQueue* left = &level.queues[a]
    cdef const KeyQueue* right = &level.queues[b]
    if left.counter != right.counter:
        return left.counter < right.counter
    return left.since < right.since


cdef inline void keys_put(Level* level, uint32_t place, uint32_t key) noexcept nogil:
    level.keys[place] = key
    level.queues[key].place = place


# Move the key to where its counter belongs, from a free place.
cdef void keys_settle(Level* level, uint32_t place, uint32_t key) noexcept nogil:
    cdef uint32_t parent, child, best, end
    while place:
        parent = (place - 1) >> 2
        if not is_poorer(level, key, level.keys[parent]):
            break
        keys_put(level, place, level.keys[parent])
        place = parent
    while True:
        child = (place << 2) + 1
        if child >= level.num_active:
            break
        end = min(child + 4, level.num_active)
        best = child
        for child in range(best + 1, end):
            if is_poorer(level, level.keys[child], level.keys[best]):
                best = child
        if not is_poorer(level, level.keys[best], key):
            break
        keys_put(level, place, level.keys[best])
        place = best
    keys_put(level, place, key)


# A key comes back: it may not cash in the time in which it asked for nothing, so its
# counter is lifted to the least active one, or to that of the last key that left.
cdef void key_join(Level* level, uint32_t key, uint64_t arrival_no) noexcept nogil:
    cdef KeyQueue* queue = &level.queues[key]
    cdef int64_t least = level.floor
    if level.num_active:
        least = level.queues[level.keys[0]].counter
    queue.counter = max(queue.counter, least)
    queue.since = arrival_no
    level.num_active += 1
    keys_settle(level, level.num_active - 1, key)


cdef void key_leave(Level* level, uint32_t key) noexcept nogil:
    cdef uint32_t place = level.queues[key].place
    level.queues[key].place = NOWHERE
    level.num_active -= 1
    if place < level.num_active:
        keys_settle(level, place, level.keys[level.num_active])
    elif level.num_active == 0:
        level.floor = level.queues[key].counter


# Charge a key, or give back with tokens below 0, at so many virtual tokens for each.
cdef void backlog_charge(BacklogState* b, uint32_t lane, uint32_t level_no, uint32_t key,
                         int64_t tokens, uint64_t units) noexcept nogil:
    cdef Level* level = level_of(b, lane, level_no)
    cdef KeyQueue* queue = &level.queues[key]
    queue.counter += tokens * <int64_t> units
    if queue.place != NOWHERE:
        keys_settle(level, queue.place, key)


# --- entries: in and out ----------------------------------------------------------------

cdef inline void fifo_append(Links* links, KeyQueue* queue, uint32_t index) noexcept nogil:
    links[index].before = queue.tail
    links[index].behind = NOWHERE
    if queue.tail == NOWHERE:
        queue.head = index
    else:
        links[queue.tail].behind = index
    queue.tail = index


cdef inline void fifo_unlink(Links* links, KeyQueue* queue, uint32_t index) noexcept nogil:
    cdef Links own = links[index]
    if own.before == NOWHERE:
        queue.head = own.behind
    else:
        links[own.before].behind = own.behind
    if own.behind == NOWHERE:
        queue.tail = own.before
    else:
        links[own.behind].before = own.before


cdef inline void age_append(Links* links, Level* level, uint32_t index) noexcept nogil:
    links[index].older = level.youngest
    links[index].younger = NOWHERE
    if level.youngest == NOWHERE:
        level.oldest = index
    else:
        links[level.youngest].younger = index
    level.youngest = index


cdef inline void age_unlink(Links* links, Level* level, uint32_t index) noexcept nogil:
    cdef Links own = links[index]
    if own.older == NOWHERE:
        level.oldest = own.younger
    else:
        links[own.older].younger = own.younger
    if own.younger == NOWHERE:
        level.youngest = own.older
    else:
        links[own.younger].older = own.older


# With many waiting, an entry is in no cache when its turn comes, unless it was asked for
# before. So ask for the one that is a few turns from being the oldest, with its links, which
# lead on next time, and for the next of the heap.
cdef void prefetch_next(BacklogState* b, const Level* level,
                        const KeyQueue* queue) noexcept nogil:
    cdef uint32_t index = level.oldest
    cdef int hops = 0
    while index != NOWHERE and hops < PREFETCH_HOPS:
        index = b.links[index].younger
        hops += 1
    if index != NOWHERE:
        prefetch(&b.table[index])
        prefetch(&b.links[index])
    if queue.deadlines.size:
        prefetch(&b.table[queue.deadlines.nodes[0].index])
        prefetch(&b.links[queue.deadlines.nodes[0].index])


# Arrival numbers must grow from push to push.
cdef void backlog_push(BacklogState* b, uint32_t index) noexcept nogil:
    cdef Entry* entry = &b.table[index]
    cdef Level* level = level_of(b, entry.lane, entry.level)
    cdef KeyQueue* queue = &level.queues[entry.key]
    age_append(b.links, level, index)
    if entry.deadline_ns == 0 or not heap_push(&queue.deadlines, b.table, index,
                                               entry.deadline_ns):
        fifo_append(b.links, queue, index)
    if queue.place == NOWHERE:
        key_join(level, entry.key, entry.arrival_no)
    level.num_waiting += 1
    b.num_waiting += 1
    b.lane_waiting_tokens[entry.lane] += entry.share_tokens
    if entry.share_tokens > b.far_above_tokens:
        b.far_waiting_tokens += entry.share_tokens


# Take a waiting entry out of its level and its key's queue. True: it was the last of its
# key there, so the key has left too. O(log n): the entry knows its places.
cdef inline bint unlink(BacklogState* b, Level* level, KeyQueue* queue,
                        uint32_t index) noexcept nogil:
    age_unlink(b.links, level, index)
    if b.places[index] != NOWHERE:
        heap_remove(&queue.deadlines, b.table, index)
    else:
        fifo_unlink(b.links, queue, index)
    level.num_waiting -= 1
    if queue.head != NOWHERE or queue.deadlines.size:
        return False
    key_leave(level, b.table[index].key)
    return True


cdef void backlog_remove(BacklogState* b, uint32_t index) noexcept nogil:
    cdef Entry* entry = &b.table[index]
    cdef Level* level = level_of(b, entry.lane, entry.level)
    cdef KeyQueue* queue = &level.queues[entry.key]
    unlink(b, level, queue, index)
    b.num_waiting -= 1
    b.lane_waiting_tokens[entry.lane] -= entry.share_tokens
    if entry.share_tokens > b.far_above_tokens:
        b.far_waiting_tokens -= entry.share_tokens
    prefetch_next(b, level, queue)


# --- the order --------------------------------------------------------------------------

cdef inline bint lane_waits(const BacklogState* b, uint32_t lane) noexcept nogil:
    cdef uint32_t level
    for level in range(b.num_levels):
        if b.levels[lane * b.num_levels + level].num_waiting:
            return True
    return False


# The best class that anybody waits in over these lanes, or NOWHERE.
cdef inline uint32_t best_waiting(const BacklogState* b, uint32_t lanes) noexcept nogil:
    cdef uint32_t level, lane
    for level in range(b.num_levels):
        for lane in range(b.num_lanes):
            if lanes >> lane & 1 and b.levels[lane * b.num_levels + level].num_waiting:
                return level
    return NOWHERE


# Of sequences and of KV tokens: a lane that has all its part of either waits.
cdef inline bint has_share(const BacklogState* b, uint32_t lane) noexcept nogil:
    cdef double weight = b.lane_weights[lane]
    return ((b.num_places == 0
             or b.lane_running[lane] * b.lane_weight_sum < weight * b.num_places)
            and (b.num_tokens == 0
                 or b.lane_tokens[lane] * b.lane_weight_sum < weight * b.num_tokens))


# A lane that may not start one however much is free. One of it may always run.
cdef inline bint is_at_cap(const BacklogState* b, uint32_t lane) noexcept nogil:
    return ((b.lane_caps[lane] and b.lane_running[lane] >= b.lane_caps[lane])
            or (b.lane_token_caps[lane] and b.lane_tokens[lane] >= b.lane_token_caps[lane]))


# Which of these lanes may start one now, as bits: those that wait with a free share or, when
# there are none, all that wait; never one at its cap. So an unused share is lent, and comes
# back as places do.
cdef uint32_t lanes_in_turn(const BacklogState* b, uint32_t lanes) noexcept nogil:
    cdef uint32_t lane, waiting = 0, with_share = 0
    for lane in range(b.num_lanes):
        if lanes >> lane & 1 and lane_waits(b, lane) and not is_at_cap(b, lane):
            waiting |= 1U << lane
            if has_share(b, lane):
                with_share |= 1U << lane
    return with_share if with_share else waiting


# The oldest of a class over these lanes, or NOWHERE.
cdef uint32_t oldest_of(const BacklogState* b, uint32_t level, uint32_t lanes) noexcept nogil:
    cdef uint32_t lane, candidate, oldest = NOWHERE
    for lane in range(b.num_lanes):
        candidate = b.levels[lane * b.num_levels + level].oldest
        if not lanes >> lane & 1 or candidate == NOWHERE:
            continue
        if oldest == NOWHERE or b.table[candidate].arrival_no < b.table[oldest].arrival_no:
            oldest = candidate
    return oldest


# The youngest of the lowest class below `level` over all lanes, or NOWHERE: who leaves first
# when one of `level` needs a place.
cdef uint32_t last_below(const BacklogState* b, uint32_t level) noexcept nogil:
    cdef uint32_t lower, lane, candidate, youngest = NOWHERE
    for lower in range(b.num_levels - 1, level, -1):
        for lane in range(b.num_lanes):
            candidate = b.levels[lane * b.num_levels + lower].youngest
            if candidate != NOWHERE and (youngest == NOWHERE or b.table[candidate].arrival_no
                                         > b.table[youngest].arrival_no):
                youngest = candidate
        if youngest != NOWHERE:
            break
    return youngest


cdef inline int64_t virtual_time(const BacklogState* b, uint32_t index) noexcept nogil:
    return b.table[index].arrival_ns + b.table[index].level * b.aging_step_ns


# The first of this level in its own order: poorest key, then deadline, then arrival.
cdef uint32_t first_of(BacklogState* b, uint32_t lane, uint32_t level_no) noexcept nogil:
    cdef Level* level = level_of(b, lane, level_no)
    cdef KeyQueue* queue = &level.queues[level.keys[0]]
    if queue.deadlines.size:
        return queue.deadlines.nodes[0].index
    return queue.head


# Of the lanes where this class waits, the one that has least of its share; then the first.
cdef uint32_t neediest_lane(const BacklogState* b, uint32_t level, uint32_t lanes) noexcept nogil:
    cdef uint32_t lane, best = NOWHERE
    for lane in range(b.num_lanes):
        if not lanes >> lane & 1 or not b.levels[lane * b.num_levels + level].num_waiting:
            continue
        if best == NOWHERE or (b.lane_running[lane] * b.lane_weights[best]
                               < b.lane_running[best] * b.lane_weights[lane]):
            best = lane
    return best


# Who of these lanes is next; changes nothing. Of several due requests it is the one with the
# least virtual time of all, so a level is passed over only for one that waits even longer.
cdef Choice backlog_choose(BacklogState* b, uint32_t lanes) noexcept nogil:
    cdef Choice choice
    cdef uint32_t level, oldest, due = NOWHERE, best = NOWHERE
    lanes = lanes_in_turn(b, lanes)
    choice.index = NOWHERE
    choice.is_aged = False
    for level in range(b.num_levels):
        oldest = oldest_of(b, level, lanes)
        if oldest == NOWHERE:
            continue
        if best == NOWHERE:
            best = level
            due = oldest
        elif virtual_time(b, oldest) < virtual_time(b, due):
            due = oldest
    if best == NOWHERE:
        return choice
    if b.table[due].level != best and b.aging_step_ns > 0 and b.since_aged + 1 >= b.aged_every:
        choice.index = due
        choice.is_aged = True
    else:
        choice.index = first_of(b, neediest_lane(b, best, lanes), best)
    return choice


cdef inline int64_t cost_of(const Entry* entry) noexcept nogil:
    return <int64_t> entry.num_prompt_tokens + 2 * <int64_t> entry.max_tokens


# Start a chosen one: it leaves, its key is charged for all that it may cost, its lane has
# one more running. What it was charged for a token.
cdef uint64_t backlog_take(BacklogState* b, Choice choice) noexcept nogil:
    cdef Entry* entry = &b.table[choice.index]
    if choice.is_aged:
        b.since_aged = 0
    elif b.since_aged < b.aged_every:
        b.since_aged += 1
    backlog_remove(b, choice.index)
    return backlog_run(b, entry)


# One that does not stand in it starts all the same.
cdef uint64_t backlog_run(BacklogState* b, const Entry* entry) noexcept nogil:
    cdef uint64_t units = load_relaxed(&b.key_units[entry.key])
    backlog_charge(b, entry.lane, entry.level, entry.key, cost_of(entry), units)
    b.lane_running[entry.lane] += 1
    b.lane_tokens[entry.lane] += entry.share_tokens
    return units


# One that was started has ended: its lane has its part again, and its key pays `cost`
# instead of what it was charged, for a token as much as then: its weight may be another now.
cdef void backlog_settle(BacklogState* b, const Entry* entry, int64_t cost, uint64_t units) noexcept nogil:
    b.lane_running[entry.lane] -= 1
    b.lane_tokens[entry.lane] -= entry.share_tokens
    backlog_charge(b, entry.lane, entry.level, entry.key, cost - cost_of(entry), units)
