"""The worker over libllama: models, requests as the worker sees them, and the step.

One extension, read in this order: what is declared here (the shared structs), then
engine/text.pxi (tokens to bytes), model.pxi (a loaded file), sampling.pxi (logits to a token),
prefix.pxi (cells that prompts share), swap.pxi (cells that are given up), again.pxi (requests of dead device slots),
threads.pxi (how many threads), chaos.pxi (what drills break), step.pxi (the worker's step) and worker.pxi (the Python
face).

Only lqs.engine.library imports this module, and llama_cpp before it: wheels hold no
symlinks, so the library would be mapped twice the other way round.
"""
cimport cython
from cpython cimport array
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strncpy
from libcpp cimport bool as cbool

from lqs._core cimport (
    DECODE_EVERY,
    FINISH_CANCELLED,
    FINISH_DEVICE,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    FINISH_TIMEOUT,
    LANE_LONG,
    LANE_SHORT,
    PREFILL_MIN,
    RECORD_LOGPROBS,
    RECORD_TEXT,
    Attempt,
    Scheduler,
    SchedulerState,
    Work,
    announce,
    ask_growth,
    bump,
    emit_output,
    entry_of,
    fine_chunk,
    finish_request,
    granted_tokens,
    is_dead,
    load_acquire32,
    load_relaxed,
    next_attempt,
    note_made,
    out_footprint,
    out_free,
    report_dead,
    scheduler_round,
    scheduler_sleep,
    store_relaxed,
    store_relaxed32,
    store_release32,
    wake,
    wake_loop,
    wake_scheduler,
    wants_end,
    worker_sleep,
)

import array

from lqs.engine.native cimport *


IS_TRACED = bool(LQS_IS_TRACED)
"""Whether this is a build for coverage, whose native threads take the GIL after all."""


class EngineError(RuntimeError):
    """libllama refused something; the message says what and, where it is known, why."""


class NoRoom(EngineError):
    """There is not memory enough for the context; a smaller one may fit."""


class GrammarError(ValueError):
    """A grammar that cannot be enforced; the client's fault."""


include "engine/text.pxi"
include "engine/model.pxi"
include "engine/sampling.pxi"


cdef enum Phase:
    PHASE_EMPTY = 0     # no cells
    PHASE_CACHED = 1    # finished, its cells wait for a prompt that starts alike
    PHASE_PREFILL = 2   # its prompt is being computed
    PHASE_DECODE = 3    # its next token is being computed

cdef enum:
    LEVEL_NONE = 255
    LANE_ANY = 255
    GARBAGE_MIN = 192               # cells of garbage under which compacting is not worth it
    COMPACT_BYTES_MAX = 1 << 30     # host memory that a compaction may take
    SAVED_KEEP_MAX = 1 << 28        # of it, what stays for the next one
    CELL_BYTES = 8                  # what a state holds for a cell beside keys and values

cdef uint64_t NEVER = 0xFFFFFFFFFFFFFFFFULL

# How much dearer a token may be for steps to be short.
cdef double FINE_COST_MAX = 1.1

cdef enum WorkerState:
    WORKER_NEW = 0
    WORKER_READY = 1
    WORKER_DEAD = 2
    WORKER_STOPPED = 3

# Codes in Attempt.error_code beside llama_decode's own.
cdef enum:
    ERROR_STOPPED = -200
    ERROR_NO_SEQUENCE = -201
    ERROR_NO_MEMORY = -202
    ERROR_NOT_CUT = -203
    ERROR_LOST = -204
    ERROR_SAMPLING = -300   # minus the DrawCode

cdef enum Chaos:
    CHAOS_NONE = 0
    CHAOS_ASSERT = 1
    CHAOS_RC = 2
    CHAOS_HELPER = 3
    CHAOS_HANG = 4
    CHAOS_LOST = 5


cdef struct WorkData:
    # A request as the worker reads it: built by the event loop's side, constant afterwards.
    int32_t* prompt
    uint32_t num_prompt
    uint32_t max_tokens
    uint64_t scope          # requests share prefixes only inside one scope
    bint cache_prompt
    SamplingParams params
    StopSet stops


cdef struct Sequence:
    # One of llama.cpp's sequence ids and whatever lives in it now.
    int32_t id
    Phase phase
    uint8_t level
    uint8_t lane
    bint suspect            # was in a batch that failed; is tried alone
    int32_t accused         # llama_decode's code when it was in a batch alone and nothing has worked since; 0: none
    bint steps_back         # others are more urgent than it: it decodes now and then
    bint lost               # its cells did not come back from a compaction
    size_t saved_bytes      # its state's size during a compaction
    uint32_t num_kv         # its cells: tokens[0:num_kv] are in the cache
    uint32_t shared         # of these, borrowed from `parent` (prefix.pxi)
    int32_t parent
    uint32_t num_prompt
    uint32_t num_fill       # cells to compute before the next draw: the prompt, or all it had
    uint32_t num_generated
    uint32_t granted        # cells that it may have
    bint is_out             # it has given its cells up and is to come back (swap.pxi) ...
    uint32_t num_held       # ... which were so many
    uint64_t out_since      # steps that had succeeded when llama_decode found no cells, or NEVER
    char* kept              # their state, NULL: they are computed again
    size_t kept_bytes
    uint32_t in_batch       # its tokens in this step's batch
    int32_t logits_at       # where in the batch its logits are asked for
    uint64_t scope
    uint64_t order          # start order, ties inside a level
    uint64_t last_used      # worker clock, for the cache's LRU
    uint64_t last_step
    size_t room_needed      # bytes that one step may write into the out-buffer
    uint64_t bytes_told     # of the text that is to come: the client has them (again.pxi) ...
    uint64_t tokens_told    # ... and their tokens are counted
    int32_t* tokens         # prompt and completion, seq_tokens_max places
    Attempt* attempt
    const WorkData* work
    Sampler sampler
    TextStream text


cdef struct WorkerStats:
    # Written by the worker, read by anyone: each a plain aligned word, read as it is.
    uint64_t num_steps
    uint64_t step_ns
    uint64_t num_decodes
    uint64_t decode_ns
    uint64_t prefill_tokens
    uint64_t generated_tokens
    uint64_t prefix_queries
    uint64_t prefix_hits
    uint64_t num_cached_sequences
    uint64_t num_cache_evictions
    uint64_t num_compactions
    uint64_t num_failed_decodes
    uint64_t num_kv_failures
    uint64_t num_preemptions    # times that one gave its cells up
    uint64_t num_swaps_out      # of these, with its state kept in host memory
    uint64_t num_swaps_in
    uint64_t swapped_bytes      # copied out and in
    uint64_t swap_ns
    uint64_t recomputed_tokens
    uint64_t num_taken_over     # requests that went on here after their device slot had died
    uint64_t cells_used
    uint64_t cells_garbage  # dropped and not free yet
    uint64_t num_active
    uint64_t num_out
    uint64_t kept_bytes
    uint64_t threads


include "engine/threads.pxi"


cdef struct WorkerData:
    # Owner: the worker thread, but for `stopping` (set by others) and what is published.
    SchedulerState* sched
    uint32_t slot
    uint32_t stopping       # atomic
    uint32_t state          # atomic WorkerState
    uint32_t parked         # atomic: the thread will never come back
    char death[512]
    llama_context* ctx
    const PieceTable* pieces
    int32_t n_vocab
    int32_t num_ids
    uint32_t num_cells
    uint32_t seq_tokens_max
    int32_t batch_max       # tokens of one step
    int32_t budget
    int32_t fine_budget     # of that, for long prompts: the smallest chunk that is not dearer
    int32_t num_fine        # what is left of that in this step
    int32_t num_in_turn     # sequences that a step decodes; more only if urgent ones run
    int64_t step_target_ns  # what a step with prefill may take while others decode; 0: no limit
    bint unified
    bint prefix_cache
    Sequence* seqs
    llama_batch batch
    SamplerScratch scratch
    char* logprobs_buf
    size_t logprobs_room
    uint32_t cells_used     # by sequences, shared ones once
    uint32_t garbage        # dropped, not yet free (prefix.pxi)
    int32_t garbage_id
    char* saved             # states on their way through a compaction
    size_t saved_bytes
    bint compacting
    uint32_t kv_block       # promises grow by so many cells; 0: they do not
    uint32_t num_out
    size_t kept_bytes       # host memory that states take, and the most they may
    size_t kept_bytes_max
    bint recomputes         # computing again is faster than copying here
    uint32_t num_active
    int32_t num_suspects
    int32_t num_accused
    int32_t failed_in_a_row
    uint64_t num_started
    uint64_t step_no
    uint64_t num_succeeded  # steps whose batch was taken
    uint64_t clock
    int64_t now_ns
    bint was_idle           # the last step found nothing to compute
    bint has_news
    bint has_asked          # the scheduler is to look at a wish
    Chaos chaos_kind
    int32_t chaos_rc
    int32_t chaos_times
    int32_t chaos_tokens
    uint64_t chaos_step
    int64_t chaos_ns
    ThreadGovernor governor
    WorkerStats stats


include "engine/prefix.pxi"
include "engine/swap.pxi"
include "engine/again.pxi"
include "engine/chaos.pxi"
include "engine/step.pxi"
include "engine/worker.pxi"
