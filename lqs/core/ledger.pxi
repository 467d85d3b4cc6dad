# The token ledger: what each device slot has promised, and what each key was given.
#
# KV is promised, not hoped for: a request holds no cell that was not promised to it, and the
# promises never exceed the device slot, so nothing that runs ever has to end for want of
# memory. A promise covers all that a request may need, or grows with it (growth.pxi).
# Integers throughout; every amount that is given back is the amount that was taken, so the
# sums are exact whatever the order.
#
# Owner: the scheduler's thread writes, any thread may read a single figure.

cdef enum:
    LEDGER_OK = 0
    LEDGER_NO_SEQUENCE = -1     # a normal answer: wait
    LEDGER_NO_ROOM = -2         # a normal answer: wait
    LEDGER_BROKEN = -3          # more was given back than is held: a bug; nothing changed

cdef struct SlotAccount:        # all atomic, one writer
    uint64_t capacity           # KV tokens
    uint64_t ceiling            # of these: nobody starts beyond that
    uint64_t reserved           # promised, never above capacity
    uint64_t used               # of the reserved: known to be filled
    uint64_t num_sequences
    uint64_t num_extra          # beside those, for who is urgent; constant
    uint64_t num_running        # never above the two together

cdef struct KeyAccount:         # all atomic, one writer
    uint64_t reserved           # KV tokens promised to what runs
    uint64_t prompt_tokens      # of all that is settled
    uint64_t completion_tokens

cdef struct LedgerState:
    SlotAccount* slots
    KeyAccount* keys
    uint32_t num_slots
    uint32_t num_keys


cdef int ledger_init(LedgerState* ledger, uint32_t num_slots, uint32_t num_keys) noexcept nogil:
    ledger.num_slots = num_slots
    ledger.num_keys = num_keys
    ledger.slots = <SlotAccount*> calloc(num_slots, sizeof(SlotAccount))
    ledger.keys = <KeyAccount*> calloc(num_keys, sizeof(KeyAccount))
    return 0 if ledger.slots != NULL and ledger.keys != NULL else -1


cdef void ledger_free(LedgerState* ledger) noexcept nogil:
    free(ledger.slots)
    free(ledger.keys)
    ledger.slots = NULL
    ledger.keys = NULL


# Promise `tokens` and take a sequence.
cdef int ledger_reserve(LedgerState* ledger, uint32_t slot, uint32_t key,
                        uint64_t tokens) noexcept nogil:
    cdef SlotAccount* account = &ledger.slots[slot]
    if account.num_running >= account.num_sequences + account.num_extra:
        return LEDGER_NO_SEQUENCE
    if tokens > account.capacity - account.reserved:
        return LEDGER_NO_ROOM
    bump(&account.reserved, tokens)
    bump(&account.num_running, 1)
    bump(&ledger.keys[key].reserved, tokens)
    return LEDGER_OK


# Promise more to one that runs.
cdef int ledger_grow(LedgerState* ledger, uint32_t slot, uint32_t key,
                     uint64_t tokens) noexcept nogil:
    cdef SlotAccount* account = &ledger.slots[slot]
    if tokens > account.capacity - account.reserved:
        return LEDGER_NO_ROOM
    bump(&account.reserved, tokens)
    bump(&ledger.keys[key].reserved, tokens)
    return LEDGER_OK


# Note that part of what is promised is filled.
cdef int ledger_use(LedgerState* ledger, uint32_t slot, uint64_t tokens) noexcept nogil:
    cdef SlotAccount* account = &ledger.slots[slot]
    if tokens > account.reserved - account.used:
        lqs_assert(False)
        return LEDGER_BROKEN
    bump(&account.used, tokens)
    return LEDGER_OK


# Give back part of a promise; its sequence stays taken.
cdef int ledger_shrink(LedgerState* ledger, uint32_t slot, uint32_t key, uint64_t reserved,
                       uint64_t used) noexcept nogil:
    cdef SlotAccount* account = &ledger.slots[slot]
    cdef KeyAccount* payer = &ledger.keys[key]
    if (reserved > account.reserved or reserved > payer.reserved or used > account.used
            or account.used - used > account.reserved - reserved):
        lqs_assert(False)
        return LEDGER_BROKEN
    bump(&account.used, -<int64_t> used)
    bump(&account.reserved, -<int64_t> reserved)
    bump(&payer.reserved, -<int64_t> reserved)
    return LEDGER_OK


# Give back a promise of `reserved` tokens of which `used` were filled, and the sequence.
cdef int ledger_release(LedgerState* ledger, uint32_t slot, uint32_t key, uint64_t reserved,
                        uint64_t used) noexcept nogil:
    cdef int rc
    if ledger.slots[slot].num_running == 0:
        lqs_assert(False)
        return LEDGER_BROKEN
    rc = ledger_shrink(ledger, slot, key, reserved, used)
    if rc == LEDGER_OK:
        bump(&ledger.slots[slot].num_running, -1)
    return rc


# Release, and book what was really computed.
cdef int ledger_settle(LedgerState* ledger, uint32_t slot, uint32_t key, uint64_t reserved,
                       uint64_t used, uint64_t prompt_tokens,
                       uint64_t completion_tokens) noexcept nogil:
    cdef int rc = ledger_release(ledger, slot, key, reserved, used)
    if rc == LEDGER_OK:
        bump(&ledger.keys[key].prompt_tokens, prompt_tokens)
        bump(&ledger.keys[key].completion_tokens, completion_tokens)
    return rc
