# A device slot as a seat: it is made at the start, and a worker comes to it and goes again.
#
#     absent      drained, nothing runs, no worker
#     loading     the same, and a worker is being opened on it
#     ready       undrained
#     draining    drained, what runs there goes on
#
# The core knows two of these apart, drained or not; the rest is for whoever brings the workers.
# A worker goes when nothing runs there any more, so its rings are empty and the next one finds
# them so. What it can hold may differ from worker to worker.

def set_capacity(Scheduler scheduler not None, uint32_t slot, uint32_t kv_tokens, uint32_t kv_block=0,
                 uint32_t num_sequences=0):
    """Let a device slot have so many KV tokens, and promises grow by `kv_block`, from now on. From any thread.

    And so many sequences; 0: as many as it was made with. It is heeded in the first round in which nothing runs
    there; `slots()` says so. Who waits and fits nowhere any more is then told. Raises IndexError, and ValueError
    for 0 tokens, too large a block, or more sequences than it was made with.
    """
    cdef DeviceSlot* target
    scheduler.check_slot(slot)
    if kv_tokens == 0 or kv_block > 1U << 20:
        raise ValueError("a device slot has at least one KV token, kv_block is at most 2**20 tokens")
    target = scheduler.state.slots[slot]
    if num_sequences > target.num_sequences_max:
        raise ValueError(f"it was made with {target.num_sequences_max} sequences")
    store_relaxed32(&target.wants_sequences, num_sequences or target.num_sequences_max)
    store_relaxed32(&target.wants_block, kv_block)
    exchange32(&target.wants_capacity, kv_tokens)
    wake(&scheduler.state.waker)
