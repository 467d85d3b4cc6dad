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
# Order. llama.cpp's CPU attention adds a sequence's cells up in the order in which they lie
# in the cache, and rounds as it goes. A cell that was freed and used again by a sequence
# that has cells above it turns that order round, and a text at temperature 0 then depends on
# who came and went. So nothing is freed one by one: what is dropped goes to a sequence of
# its own, the garbage, and stays marked as used. llama.cpp then always takes the next cell
# above the last one, and every sequence lies in the order of its positions. When garbage
# outgrows an eighth of what lives, or the end of the cache is reached, `compact` lays the
# living out from the start again (their states go to host memory and come back, bit for
# bit). That copies some eight cells for one that was freed; but attention walks over all
# cells up to the last one, and an eighth is where the sum of both is least (the default
# model, 32 sequences, one thread). Most of what a copy costs are the first touches of fresh
# memory, so the buffer stays.
# A split cache has this order by itself, a GPU's attention does not round by cell order:
# both free at once.
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


cdef bint forget(WorkerData* w, Sequence* seq, uint32_t keep) noexcept nogil:
    """Take a sequence's cells from `keep` on out of it; False where this memory cannot be cut there."""
    cdef uint32_t start = max(keep, seq.shared)
    cdef Sequence* heir
    if w.compacting:
        heir = find_heir(w, seq.id, keep)
        if heir != NULL:
            # What a child has borrowed lives on in it.
            start = max(start, heir.shared)
        if start < seq.num_kv:
            lqs_seq_cp(w.ctx, seq.id, w.garbage_id, start, -1)
            w.garbage += seq.num_kv - start
    return lqs_seq_rm(w.ctx, seq.id, keep if keep > 0 else -1, -1) == 1


cdef bint cut(WorkerData* w, Sequence* seq, uint32_t keep) noexcept nogil:
    """Keep the first `keep` cells of a sequence. False where this memory cannot be cut there."""
    if keep >= seq.num_kv:
        return True
    if not forget(w, seq, keep):
        return False
    hand_down(w, seq, keep)
    set_kv(w, seq, keep)
    if seq.shared > keep:
        # What was borrowed beyond `keep` is not counted here any more.
        set_shared(w, seq, seq.parent, keep)
    return True


cdef void drop(WorkerData* w, Sequence* seq) noexcept nogil:
    """Give all cells of a sequence back; removing a whole sequence never fails in llama.cpp."""
    forget(w, seq, 0)
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


cdef Sequence* evict(WorkerData* w, Sequence* but) noexcept nogil:
    """Give the cells of the least recently used finished sequence back; NULL where there is none."""
    cdef Sequence* victim = least_recent(w, but)
    if victim != NULL:
        drop(w, victim)
        w.stats.num_cache_evictions += 1
    return victim


cdef bint make_room(WorkerData* w, uint32_t num_cells) noexcept nogil:
    """Evict finished sequences until `num_cells` more fit; False where running ones hold the rest."""
    if not w.unified:
        return True
    while w.cells_used + num_cells > w.num_cells:
        if evict(w, NULL) == NULL:
            return False
    if w.garbage > 0 and (w.cells_used + w.garbage + num_cells > w.num_cells
                          or w.garbage > max(w.cells_used // 8, <uint32_t>GARBAGE_MIN)):
        compact(w)
    return True


cdef size_t state_bytes(WorkerData* w) noexcept nogil:
    """Host memory that the states of all sequences with cells take."""
    cdef size_t total = 0
    cdef int32_t i
    for i in range(w.num_ids):
        if w.seqs[i].num_kv > 0:
            total += lqs_state_size(w.ctx, w.seqs[i].id)
    return total


cdef void shed_for_compaction(WorkerData* w) noexcept nogil:
    """Compaction turns shared cells into private ones: evict until those fit."""
    cdef uint64_t total
    cdef int32_t i
    while True:
        total = 0
        for i in range(w.num_ids):
            total += w.seqs[i].num_kv
        # Half of the cache stays free, so that the next compaction is far off.
        if 2 * total <= w.num_cells or evict(w, NULL) == NULL:
            return


cdef char* room_to_save(WorkerData* w, size_t room) noexcept nogil:
    """The buffer for a compaction's states, `room` bytes; NULL where that is too much."""
    if room > w.saved_bytes:
        free_saved(w)
        if room <= COMPACT_BYTES_MAX:
            w.saved = <char*>malloc(room)
            w.saved_bytes = room if w.saved != NULL else 0
    return w.saved if room <= w.saved_bytes else NULL


cdef void free_saved(WorkerData* w) noexcept nogil:
    free(w.saved)
    w.saved = NULL
    w.saved_bytes = 0


cdef void compact(WorkerData* w) noexcept nogil:
    """Lay everything that lives out from the first cell on, each sequence in its order.

    Where the copy would take more host memory than allowed, the garbage is freed in place:
    room is made all the same, but texts may round differently from here on.
    """
    cdef char* saved
    cdef size_t room
    shed_for_compaction(w)
    room = state_bytes(w)
    saved = room_to_save(w, room)
    if saved == NULL and room > 0:
        lqs_seq_rm(w.ctx, w.garbage_id, -1, -1)
    else:
        save_all(w, saved)
        lqs_memory_clear(w.ctx)
        restore_all(w, saved)
        if room > SAVED_KEEP_MAX:
            free_saved(w)
        w.stats.num_compactions += 1
    w.garbage = 0


cdef void save_all(WorkerData* w, char* saved) noexcept nogil:
    cdef size_t at = 0
    cdef int32_t i
    for i in range(w.num_ids):
        w.seqs[i].saved_bytes = 0
        if w.seqs[i].num_kv > 0:
            w.seqs[i].saved_bytes = lqs_state_get(w.ctx, saved + at, w.seqs[i].id)
            at += w.seqs[i].saved_bytes


cdef void restore_all(WorkerData* w, const char* saved) noexcept nogil:
    """Bring the states back in the order they were saved; whoever does not come back has no cells."""
    cdef Sequence* seq
    cdef size_t at = 0
    cdef int32_t i
    for i in range(w.num_ids):
        seq = &w.seqs[i]
        if seq.num_kv == 0:
            continue
        set_shared(w, seq, -1, 0)
        if seq.saved_bytes == 0 or not lqs_state_set(w.ctx, saved + at, seq.saved_bytes, seq.id):
            set_kv(w, seq, 0)
            seq.lost = True
        at += seq.saved_bytes


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
    return evict(w, but)


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
    if lqs_seq_cp(w.ctx, donor.id, seq.id, 0, reuse[0]) != 1:
        reuse[0] = 0
        return seq
    donor.last_used = w.clock
    memcpy(seq.tokens, donor.tokens, reuse[0] * sizeof(int32_t))
    set_kv(w, seq, reuse[0])
    set_shared(w, seq, donor.id, reuse[0])
    return seq
