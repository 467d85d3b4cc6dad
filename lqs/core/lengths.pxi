# How long answers come out: what a request will probably need of its max_tokens.
#
# Each (key, model) and each model has a histogram of the lengths of its last answers. A
# prediction is the median of those that got as far as this one; so one that has outgrown its
# prediction is predicted again from the tail. Past all that was ever seen it is the double of
# what is there. Not a safer quantile: predictions are added up over many that run, where too
# high a guess for each leaves memory idle, and one that was too low costs a swap.
#
# Bounded whatever the number of keys: a key's row is found by its hash, and changes hands
# when strangers have asked for it many times in a row. Whoever has no row, or too few
# answers, is predicted by the model.
#
# Owner: the scheduler's thread writes. Any thread may read a figure: counts are atomics, and
# a row that changes hands meanwhile makes it a guess about another key, not worse.

cdef enum:
    LENGTH_BUCKETS = 80         # 16 of one token, then 4 for each doubling, up to 2**20
    KEY_ROWS = 512
    MODEL_ROWS = 64
    SAMPLES_MIN = 16            # fewer say nothing
    SAMPLES_MAX = 512           # all counts are halved then, so that old answers fade
    STRANGERS_MAX = 16
    LENGTH_UNKNOWN = 256        # tokens expected while nothing is known
    NEARLY_ALL = 95             # percent of the answers of a key
    FAR_OFF = 4                 # a max_tokens of more than so many times what nearly all have says nothing

cdef struct LengthRow:
    uint64_t owner                      # 1 + model and key; 0: nobody. Atomic
    uint32_t num_samples                # atomic
    uint32_t num_strangers              # that came in a row
    uint32_t[LENGTH_BUCKETS] counts     # atomic

cdef struct Lengths:
    LengthRow* keys
    LengthRow* models


cdef int lengths_init(Lengths* lengths) noexcept nogil:
    lengths.keys = <LengthRow*> calloc(KEY_ROWS, sizeof(LengthRow))
    lengths.models = <LengthRow*> calloc(MODEL_ROWS, sizeof(LengthRow))
    return 0 if lengths.keys != NULL and lengths.models != NULL else -1


cdef void lengths_free(Lengths* lengths) noexcept nogil:
    free(lengths.keys)
    free(lengths.models)
    lengths.keys = NULL
    lengths.models = NULL


cdef inline uint32_t length_bucket(uint32_t length) noexcept nogil:
    cdef uint32_t doubling = 4
    if length < 16:
        return length
    while length >> (doubling + 1):
        doubling += 1
    return min(16 + (doubling - 4) * 4 + (length >> (doubling - 2) & 3),
               <uint32_t> LENGTH_BUCKETS - 1)


# The longest of a bucket.
cdef inline uint32_t bucket_end(uint32_t bucket) noexcept nogil:
    if bucket < 16:
        return bucket
    return ((5 + (bucket - 16) % 4) << (2 + (bucket - 16) // 4)) - 1


cdef inline uint64_t row_owner(uint32_t key, uint32_t model) noexcept nogil:
    return 1 + (<uint64_t> model << 32 | key)


cdef inline LengthRow* key_row(Lengths* lengths, uint32_t key, uint32_t model) noexcept nogil:
    # Fibonacci hashing: neighbouring numbers land far apart.
    return &lengths.keys[row_owner(key, model) * 0x9E3779B97F4A7C15ULL >> 55]


cdef void row_add(LengthRow* row, uint32_t length) noexcept nogil:
    cdef uint32_t bucket = length_bucket(length)
    cdef uint32_t i, num_left = 0
    store_relaxed32(&row.counts[bucket], row.counts[bucket] + 1)
    store_relaxed32(&row.num_samples, row.num_samples + 1)
    if row.num_samples < SAMPLES_MAX:
        return
    for i in range(<uint32_t> LENGTH_BUCKETS):
        store_relaxed32(&row.counts[i], row.counts[i] // 2)
        num_left += row.counts[i]
    store_relaxed32(&row.num_samples, num_left)


# Whether the row is this owner's, or has become it.
cdef bint row_claim(LengthRow* row, uint64_t owner) noexcept nogil:
    cdef uint32_t i
    if row.owner == owner:
        row.num_strangers = 0
        return True
    row.num_strangers += 1
    if row.owner != 0 and row.num_strangers < STRANGERS_MAX:
        return False
    store_relaxed(&row.owner, owner)
    store_relaxed32(&row.num_samples, 0)
    row.num_strangers = 0
    for i in range(<uint32_t> LENGTH_BUCKETS):
        store_relaxed32(&row.counts[i], 0)
    return True


# An answer has come to its own end, or to its max_tokens.
cdef void note_length(Lengths* lengths, uint32_t key, uint32_t model,
                      uint32_t length) noexcept nogil:
    cdef LengthRow* row = key_row(lengths, key, model)
    row_add(&lengths.models[model % MODEL_ROWS], length)
    if row_claim(row, row_owner(key, model)):
        row_add(row, length)


# So many percent of the answers longer than `made` are not longer than this; 0: none is longer.
cdef uint32_t tail_share(LengthRow* row, uint32_t made, uint32_t percent) noexcept nogil:
    cdef uint32_t first = length_bucket(made)
    cdef uint32_t bucket, num = 0, num_seen = 0
    if load_relaxed32(&row.num_samples) < SAMPLES_MIN:
        return 0
    if bucket_end(first) <= made:
        first += 1
    for bucket in range(first, <uint32_t> LENGTH_BUCKETS):
        num += load_relaxed32(&row.counts[bucket])
    if num == 0:
        return 0
    for bucket in range(first, <uint32_t> LENGTH_BUCKETS):
        num_seen += load_relaxed32(&row.counts[bucket])
        if 100 * num_seen >= percent * num:
            return bucket_end(bucket)
    return 0


# What so many percent of the answers of a key that are longer than `made` do not exceed; of the
# model's, while the key has too few. 0: too few are known.
cdef uint32_t seen_completion(Lengths* lengths, uint32_t key, uint32_t model,
                              uint32_t made, uint32_t percent) noexcept nogil:
    cdef LengthRow* row = key_row(lengths, key, model)
    cdef uint32_t length = 0
    if load_relaxed(&row.owner) == row_owner(key, model):
        length = tail_share(row, made, percent)
    return length if length else tail_share(&lengths.models[model % MODEL_ROWS], made, percent)


# How long an answer is taken to be at the door, which sorts it into a lane. A max_tokens counts
# unless it is far above what nearly all answers had: short answers of the same key beside it, be
# they many, do not make a long one short. 0 for max_tokens: none was given; `granted` is what there is.
cdef uint32_t expected_completion(Lengths* lengths, uint32_t key, uint32_t model,
                                  uint32_t max_tokens, uint32_t granted) noexcept nogil:
    cdef uint64_t most
    cdef uint32_t length
    if max_tokens != 0:
        most = seen_completion(lengths, key, model, 0, NEARLY_ALL)
        if most == 0 or most * FAR_OFF >= granted:
            return granted
    length = seen_completion(lengths, key, model, 0, 50)
    return min(length if length else LENGTH_UNKNOWN, granted)


# The tokens that an answer of which `made` are there will probably have in the end: more
# than that, but never more than max_tokens. For the scheduler's thread and, as a guess, any.
cdef uint32_t predicted_completion(Lengths* lengths, uint32_t key, uint32_t model,
                                   uint32_t max_tokens, uint32_t made) noexcept nogil:
    cdef uint64_t length = seen_completion(lengths, key, model, made, 50)
    if length == 0:
        length = LENGTH_UNKNOWN if made < LENGTH_UNKNOWN else 2 * <uint64_t> made
    return <uint32_t> min(length, <uint64_t> max_tokens)
