# The prefix cache: what of a prompt is in the KV cache already.
#
# A finished sequence keeps its cells until somebody needs them. A new prompt looks for
# the sequence (finished or running, of the same scope) with which it shares the longest
# start. It takes a finished one over where it goes on from most of it, and otherwise
# shares the cells (llama_memory_seq_cp in a unified cache marks cells, it copies nothing).
#
# Shared cells are counted once. Each sequence owns cells [shared, num_kv) and borrows the
# first `shared` from `parent`, whose own first `shared` cells are the same ones. When an
# owner is cut or goes, its children inherit:
#
#     base   = max(what the owner keeps, what it had borrowed itself)
#     anchor = the owner if it keeps at least what it had borrowed, else its parent
#     heir   = the child that borrows most; it now borrows `base` from `anchor` and owns the rest
#     others = those that borrow at most `base` borrow from `anchor`, the rest from the heir
#
# so `cells_used` is exact after any order of finishes, cuts and evictions, and sum of
# promises <= cells means that evicting finished sequences always makes room.
#
# Owner: the worker thread.

cdef void set_kv(WorkerData* w, Sequence* seq, uint32_t num_kv) noexcept nogil:
    w.cells_used += num_kv
    w.cells_used -= seq.num_kv
    seq.num_kv = num_kv


cdef void set_shared(WorkerData* w, Sequence* seq, int32_t parent, uint32_t shared) noexcept nogil:
    w.cells_used += seq.shared
    w.cells_used -= shared
    seq.shared = shared
    seq.parent = parent if shared > 0 else -1


cdef Sequence* find_heir(WorkerData* w, int32_t owner, uint32_t keep) noexcept nogil:
    """The child of `owner` that borrows most beyond `keep`, NULL where none does."""
    cdef Sequence* heir = NULL
    cdef Sequence* child
    cdef int32_t i
    for i in range(w.num_ids):
        child = &w.seqs[i]
        if child.parent == owner and child.shared > keep and (heir == NULL or child.shared > heir.shared):
            heir = child
    return heir


cdef void hand_down(WorkerData* w, Sequence* owner, uint32_t keep) noexcept nogil:
    """Let the children of `owner` inherit what it is about to lose beyond `keep` cells."""
    cdef Sequence* heir = find_heir(w, owner.id, keep)
    if heir == NULL:
        return
    cdef uint32_t base = max(keep, owner.shared)
    cdef int32_t anchor = owner.id if keep >= owner.shared else owner.parent
    if keep == 0 and owner.shared == 0:
        anchor = -1
    cdef Sequence* child
    cdef int32_t i
    for i in range(w.num_ids):
        child = &w.seqs[i]
        if child.parent != owner.id or child.shared <= keep or child == heir:
            continue
        if child.shared <= base:
            set_shared(w, child, anchor, child.shared)
        else:
            set_shared(w, child, heir.id, child.shared)
    set_shared(w, heir, anchor, min(heir.shared, base))


cdef bint cut(WorkerData* w, Sequence* seq, uint32_t keep) noexcept nogil:
    """Keep the first `keep` cells of a sequence. False where this memory cannot be cut there."""
    if keep >= seq.num_kv:
        return True
    if lqs_seq_rm(w.ctx, seq.id, keep, -1) != 1:
        return False
    hand_down(w, seq, keep)
    set_kv(w, seq, keep)
    if seq.shared > keep:
        # What was borrowed beyond `keep` is not counted here any more.
        set_shared(w, seq, seq.parent, keep)
    return True


cdef void drop(WorkerData* w, Sequence* seq) noexcept nogil:
    """Give all cells of a sequence back; removing a whole sequence never fails in llama.cpp."""
    lqs_seq_rm(w.ctx, seq.id, -1, -1)
    hand_down(w, seq, 0)
    set_shared(w, seq, -1, 0)
    set_kv(w, seq, 0)
    if seq.phase == PHASE_CACHED:
        w.stats.num_cached_sequences -= 1
        seq.phase = PHASE_EMPTY


cdef Sequence* least_recent(WorkerData* w, Sequence* but) noexcept nogil:
    """The finished sequence that was used longest ago, NULL where there is none."""
    cdef Sequence* found = NULL
    cdef Sequence* seq
    cdef int32_t i
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if seq.phase == PHASE_CACHED and seq != but and (found == NULL or seq.last_used < found.last_used):
            found = seq
    return found


cdef bint make_room(WorkerData* w, uint32_t num_cells) noexcept nogil:
    """Evict finished sequences until `num_cells` more fit; False where running ones hold the rest."""
    cdef Sequence* victim
    if not w.unified:
        return True
    while w.cells_used + num_cells > w.num_cells:
        victim = least_recent(w, NULL)
        if victim == NULL:
            return False
        drop(w, victim)
        w.stats.num_cache_evictions += 1
    return True


cdef uint32_t common_start(const int32_t* a, const int32_t* b, uint32_t n) noexcept nogil:
    cdef uint32_t i = 0
    while i < n and a[i] == b[i]:
        i += 1
    return i


cdef Sequence* find_donor(WorkerData* w, const WorkData* work, uint32_t* reuse) noexcept nogil:
    """The sequence that shares the longest start with the prompt; its length goes to `reuse`.

    The last prompt token is always computed: its logits are what the first draw needs.
    """
    cdef Sequence* best = NULL
    cdef Sequence* seq
    cdef uint32_t n
    cdef int32_t i
    reuse[0] = 0
    if not w.prefix_cache or not work.cache_prompt:
        return NULL
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if seq.phase == PHASE_EMPTY or seq.scope != work.scope or seq.num_kv <= reuse[0]:
            continue
        if not w.unified and seq.phase != PHASE_CACHED:
            continue
        n = common_start(seq.tokens, work.prompt, min(seq.num_kv, work.num_prompt - 1))
        if n > reuse[0]:
            reuse[0] = n
            best = seq
    return best


cdef Sequence* free_sequence(WorkerData* w, Sequence* but) noexcept nogil:
    """A sequence id with no cells, evicting the least recently used finished one if need be."""
    cdef Sequence* seq
    cdef int32_t i
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if seq.phase == PHASE_EMPTY:
            return seq
    seq = least_recent(w, but)
    if seq != NULL:
        drop(w, seq)
        w.stats.num_cache_evictions += 1
    return seq


cdef Sequence* take_over(WorkerData* w, Sequence* donor, uint32_t* reuse) noexcept nogil:
    """Go on in a finished sequence, cut to what is shared."""
    if not cut(w, donor, reuse[0]):
        drop(w, donor)
        reuse[0] = 0
        return donor
    w.stats.num_cached_sequences -= 1
    donor.phase = PHASE_EMPTY
    return donor


cdef Sequence* place_sequence(WorkerData* w, const WorkData* work, uint32_t* reuse) noexcept nogil:
    """A sequence for a prompt, with its first `reuse` tokens in the cache; NULL where none is free."""
    cdef Sequence* donor = find_donor(w, work, reuse)
    cdef Sequence* seq
    if donor == NULL:
        reuse[0] = 0
        return free_sequence(w, NULL)
    # A cached conversation that the prompt mostly continues is taken over; one that it
    # merely starts like (a system prompt) stays for its own next turn.
    if donor.phase == PHASE_CACHED and (not w.unified or 2 * reuse[0] >= donor.num_kv):
        return take_over(w, donor, reuse)
    seq = free_sequence(w, donor)
    if seq == NULL:
        if donor.phase == PHASE_CACHED:
            return take_over(w, donor, reuse)
        reuse[0] = 0
        return NULL
    if lqs_seq_cp(w.ctx, donor.id, seq.id, reuse[0]) != 1:
        reuse[0] = 0
        return seq
    donor.last_used = w.clock
    memcpy(seq.tokens, donor.tokens, reuse[0] * sizeof(int32_t))
    set_kv(w, seq, reuse[0])
    set_shared(w, seq, donor.id, reuse[0])
    return seq
