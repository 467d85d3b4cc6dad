# The Python face of a worker: requests, the thread's body, opening and closing.

# llama.cpp's CPU attention has another kernel for 64 and more tokens at once
# (GGML_FA_TILE_Q), whose sums round differently. Below that a token's logits do not depend
# on how many others share its step, so a text does not either; it costs nothing on a CPU.
CPU_UBATCH_MAX = 63

LOGPROBS_MAX = 20


@cython.final
cdef class Completion(Work):
    """One request as the worker reads it: prompt ids, sampling, stop strings.

    Args:
        prompt: token ids, at least one, each inside the model's vocabulary.
        max_tokens: tokens to make at most, at least 1.
        scope: requests of one scope may share cached prefixes.
        stops: stop strings as bytes.
        options: see SamplingParams.

    Raises ValueError for a bad value. Owner: the event loop; the worker only reads it, and
    the scheduler keeps the object alive until the request is settled.
    """
    cdef WorkData _work
    cdef object _kept

    def __cinit__(self, Model model not None, array.array prompt not None, *, uint32_t max_tokens, uint64_t scope=0,
                  bint cache_prompt=True, list stops=None, Grammar grammar=None, **options):
        memset(&self._work, 0, sizeof(WorkData))
        model._require()
        if prompt.typecode != "i":
            raise ValueError("a prompt is an array of type 'i'")
        if len(prompt) == 0 or max_tokens == 0:
            raise ValueError("a request needs at least one prompt token and one token to make")
        if min(prompt) < 0 or max(prompt) >= model.n_vocab:
            raise ValueError(f"a prompt token is outside the vocabulary of {model.n_vocab}")
        if options.get("num_logprobs", -1) > LOGPROBS_MAX:
            raise ValueError(f"at most {LOGPROBS_MAX} logprobs per token")
        self._kept = (model, prompt, grammar)
        self._work.prompt = <int32_t*>prompt.data.as_ints
        self._work.num_prompt = <uint32_t>len(prompt)
        self._work.max_tokens = max_tokens
        self._work.scope = scope
        self._work.cache_prompt = cache_prompt
        if options.get("ignore_eos"):
            options["banned"] = [*options.get("banned", ()), *model.eog]
        params_fill(&self._work.params, model.n_vocab, options)
        if grammar is not None:
            self._work.params.grammar = grammar._prototype
        stops_fill(&self._work.stops, stops or [])
        self.data = &self._work

    def __dealloc__(self):
        params_free(&self._work.params)
        stops_free(&self._work.stops)

    @property
    def num_prompt_tokens(self) -> int:
        return self._work.num_prompt

    @property
    def max_tokens(self) -> int:
        return self._work.max_tokens


cdef int32_t finest(dict found):
    """The smallest of the measured sizes whose tokens cost hardly more than the cheapest do."""
    cheapest = min(took / n for n, took in found.items())
    return min(n for n, took in found.items() if took / n <= FINE_COST_MAX * cheapest)


@cython.final
cdef class Worker:
    """One device slot: a llama.cpp context and the thread that steps it.

    `open` and `close` belong to the thread that builds the server (give `open` a thread of its
    own: an assert of llama.cpp in there parks it for good); between them `run` is
    the body of the worker thread and owns everything; `stop`, `snapshot` and `state` may
    be called from anywhere.

    Args:
        n_ctx: KV cells of the whole context (padded to 256 by llama.cpp).
        n_seq: requests that run at once, 1..256.
        n_extra: further ones for urgent requests; while those run, as many lesser ones step back.
        n_batch: tokens of one step at most.
        n_ubatch: of these, tokens that are computed at once; see CPU_UBATCH_MAX.
        n_warm: tokens of the batch that is computed before anybody is let in; 0: n_ubatch, since a larger
            batch is computed in parts of that size and takes no more memory.
        threads: threads of a CPU device slot.
        kv_unified: one budget for all sequences; False gives each n_ctx / n_seq cells.
        num_cached: finished sequences kept as prefix cache beside the running ones.
        compact: keep a unified cache in order (prefix.pxi); for CPU device slots.
        swap_bytes: host memory for the cells of those that had to give them up (swap.pxi).
        kv_block: promises grow by so many tokens; -1: as the core's device slot says just now.
    """
    cdef WorkerData _w
    cdef Scheduler _scheduler
    cdef Model _model
    cdef readonly int32_t n_ctx
    cdef readonly int32_t n_seq
    cdef readonly int32_t n_batch
    cdef readonly int32_t n_ubatch
    cdef readonly int32_t threads
    cdef readonly dict calibration
    cdef readonly dict swapping
    cdef readonly tuple warmed
    cdef int32_t _n_warm
    cdef int _flash
    cdef int32_t _num_cached
    cdef readonly int32_t n_extra

    def __cinit__(self, Scheduler scheduler not None, uint32_t slot, Model model not None, *, int32_t n_ctx,
                  int32_t n_seq, int32_t n_batch=512, int32_t n_ubatch=CPU_UBATCH_MAX, int32_t n_warm=0,
                  int32_t threads=1, bint kv_unified=True, bint prefix_cache=True,
                  int flash_attn=-1, int32_t num_cached=32, bint compact=True, int32_t n_extra=0,
                  size_t swap_bytes=1 << 28, int64_t kv_block=-1):
        memset(&self._w, 0, sizeof(WorkerData))
        if not 1 <= n_seq <= 256 - n_extra or n_extra < 0:
            raise ValueError(f"n_seq is {n_seq}, n_extra {n_extra}; llama.cpp takes 1 to 256 sequences in a context")
        if n_batch < n_seq + n_extra:
            raise ValueError(f"n_batch is {n_batch}; it must hold one token of each of the {n_seq + n_extra} sequences")
        if n_ctx < 1 or threads < 1 or n_ubatch < 1:
            raise ValueError("n_ctx, n_ubatch and threads must be at least 1")
        model._require()
        self._scheduler = scheduler
        self._model = model
        self.n_ctx = n_ctx
        self.n_seq = n_seq
        self.n_extra = n_extra
        self.n_batch = n_batch
        self.n_ubatch = min(n_ubatch, n_batch)
        self.threads = threads
        self.calibration = {}
        self.swapping = {}
        self.warmed = (0, 0)
        self._n_warm = n_warm if n_warm > 0 else self.n_ubatch
        self._w.unified = kv_unified
        self._w.prefix_cache = prefix_cache and model.can_reuse_prefix
        self._flash = flash_attn
        # Compaction needs one sequence id for itself, and a cache whose parts can be copied.
        self._w.compacting = (compact and kv_unified and model.can_reuse_prefix
                              and n_seq + self.n_extra < 256 and flash_attn != 0)
        self._w.num_in_turn = n_seq
        self._num_cached = 0
        if kv_unified and self._w.prefix_cache:
            self._num_cached = max(0, min(num_cached, 256 - n_seq - self.n_extra - self._w.compacting))
        self._w.sched = scheduler.state
        self._w.slot = slot
        scheduler.check_slot(slot)
        self._w.kv_block = <uint32_t>kv_block if kv_block >= 0 else scheduler.state.slots[slot].kv_block
        self._w.kept_bytes_max = swap_bytes

    def __dealloc__(self):
        # A parked thread still stands inside the context: nothing of it may be freed.
        if not load_acquire32(&self._w.parked):
            self._free()

    def open(self):
        """Create the context and compute once at full width. Raises EngineError, NoRoom where it does not fit."""
        cdef llama_context_params params
        cdef llama_context* ctx
        cdef int32_t num_ids = self.n_seq + self.n_extra + self._num_cached
        if self._w.ctx != NULL:
            raise EngineError("the worker is open already")
        self._model._require()
        if not self._model.has_decoder:
            raise EngineError(f"{self._model.path} is not a model that generates text token by token")
        cdef int32_t num_ids_all = num_ids + self._w.compacting
        # States can be copied quickly only with flash attention, which compaction therefore asks for.
        params = lqs_context_params(self.n_ctx, self.n_batch, self.n_ubatch, num_ids_all, self.threads, self._w.unified,
                                    1 if self._w.compacting and self._flash < 0 else self._flash)
        # Before: who is parked in there stands on the weights, too.
        self._model._num_open += 1
        with nogil:
            # An assert in here kills this device slot, not the process; it parks this thread.
            lqs_bind_worker(&self._w)
            ctx = lqs_open_context(self._model._model, params)
            lqs_bind_worker(NULL)
        if ctx == NULL:
            self._model._num_open -= 1
            raise NoRoom(
                f"a context of {self.n_ctx} tokens for {self.n_seq} sequences could not be made; try a smaller ctx"
            )
        self._w.ctx = ctx
        try:
            self._allocate(num_ids)
            self._warm_up()
        except BaseException:
            self.close()
            raise
        store_release32(&self._w.state, WORKER_READY)

    cdef _allocate(self, int32_t num_ids):
        cdef WorkerData* w = &self._w
        cdef int32_t i
        w.pieces = &self._model._pieces
        w.n_vocab = self._model.n_vocab
        w.num_ids = num_ids
        w.garbage_id = num_ids
        w.num_cells = llama_n_ctx(w.ctx)
        w.seq_tokens_max = llama_n_ctx_seq(w.ctx)
        w.batch_max = self.n_batch
        w.budget = self.n_batch
        w.batch = llama_batch_init(w.batch_max, 0, 1)
        w.seqs = <Sequence*>calloc(num_ids, sizeof(Sequence))
        w.logprobs_room = logprobs_bytes_max(w.pieces, LOGPROBS_MAX)
        w.logprobs_buf = <char*>malloc(w.logprobs_room)
        if w.seqs == NULL or w.logprobs_buf == NULL or scratch_init(&w.scratch, w.n_vocab) != 0:
            raise MemoryError("no memory for the worker's own tables")
        for i in range(num_ids):
            w.seqs[i].id = i
            w.seqs[i].parent = -1
            w.seqs[i].tokens = <int32_t*>malloc((w.seq_tokens_max + 1) * sizeof(int32_t))
            if w.seqs[i].tokens == NULL:
                raise MemoryError("no memory for the sequences' tokens")
        governor_init(&w.governor, self.threads, lqs_preemptions())

    cdef void _fill_batch(self, int32_t num_tokens, int32_t num_seqs) noexcept:
        """`num_tokens` of the same token, spread over `num_seqs` sequences."""
        cdef WorkerData* w = &self._w
        cdef int32_t i
        cdef int32_t token = max(llama_vocab_bos(self._model._vocab), 0)
        w.batch.n_tokens = num_tokens
        for i in range(num_tokens):
            w.batch.n_seq_id[i] = 1
            w.batch.token[i] = token
            w.batch.pos[i] = i // num_seqs
            w.batch.seq_id[i][0] = i % num_seqs
            w.batch.logits[i] = i >= num_tokens - num_seqs

    cdef int64_t _decode_once(self, int32_t num_tokens) except -1:
        """Nanoseconds that the batch takes."""
        cdef WorkerData* w = &self._w
        cdef int32_t rc
        cdef int64_t began
        with nogil:
            lqs_bind_worker(w)
            began = lqs_now_ns()
            rc = chaos_or_decode(w)
            llama_synchronize(w.ctx)
            began = lqs_now_ns() - began
            lqs_bind_worker(NULL)
        if rc != 0:
            raise NoRoom(f"the warm-up of {num_tokens} tokens failed with code {rc}; try a smaller ctx or batch")
        return began

    cdef int64_t _time_batch(self, int32_t num_tokens, int32_t num_seqs) except -1:
        """Nanoseconds of one decode of `num_tokens` over `num_seqs` sequences; the cache is cleared after it."""
        cdef int64_t took
        self._fill_batch(num_tokens, num_seqs)
        took = self._decode_once(num_tokens)
        with nogil:
            lqs_memory_clear(self._w.ctx)
        return took

    cdef _warm_up(self):
        """Compute the widest batch that there will ever be, over all sequences, before the first request is let in.

        Memory that is taken only while it computes is missing now, and not in the first full step; that the
        budget may grow later (`steer_budget`) changes nothing about it. Raises NoRoom.
        """
        cdef int32_t num_seqs = self.n_seq + self.n_extra
        cdef int32_t num_tokens = min(max(self._n_warm, num_seqs), self.n_batch, <int32_t>self._w.num_cells)
        self._time_batch(num_tokens, num_seqs)
        self.warmed = (num_tokens, num_seqs)

    def calibrate(self, double target_ms=200.0) -> dict:
        """Set the step's budget: the most tokens whose step still meets the inter-token target.

        Sizes double from 16 until one is too slow, so a slow device is not kept busy for long. The quicker
        of two tries counts: one disturbed step would make a size look dear from then on. Returns
        milliseconds by number of tokens. Call it between `open` and `run`. Raises NoRoom.
        """
        # All of them are tokens of one sequence, which may have fewer cells than a batch has tokens.
        cdef int32_t n_max = min(self.n_batch, <int32_t>self._w.seq_tokens_max)
        cdef int32_t n = min(16, n_max)
        cdef double took_ms
        found = {}
        self._w.fine_budget = n
        self._w.step_target_ns = <int64_t>min(target_ms * 1e6, 1e18)
        self._w.budget = n
        while True:
            took_ms = min(self._time_batch(n, 1), self._time_batch(n, 1)) / 1e6
            found[n] = took_ms
            if took_ms > target_ms:
                break
            self._w.budget = n
            if n == n_max:
                break
            n = min(2 * n, n_max)
        self._w.fine_budget = finest(found)
        self.calibration = found
        return found

    def calibrate_swap(self, int32_t num_tokens=16) -> dict:
        """Compare copying cells out and in with computing them, and take what is faster from then on.

        Returns the tokens, `swap_ms`, `compute_ms`, and `bytes_per_token`: what llama.cpp keeps for a
        cell, keys and values of all layers; nothing where cells cannot be copied. Call it between
        `open` and `run`.
        """
        cdef int32_t n = max(2, min(num_tokens, self.n_batch))
        least_bytes, _, _ = self._swap_once(1)
        num_bytes, swap_ns, compute_ns = self._swap_once(n)
        self._w.recomputes = swap_ns < 0 or swap_ns > compute_ns
        if swap_ns < 0:
            return self.swapping
        self.swapping = {"tokens": n, "swap_ms": swap_ns / 1e6, "compute_ms": compute_ns / 1e6,
                         "bytes_per_token": (num_bytes - least_bytes) // (n - 1) - CELL_BYTES}
        return self.swapping

    cdef tuple _swap_once(self, int32_t num_tokens):
        """Bytes of a sequence of `num_tokens`, ns to copy it out and in (-1: it cannot be), ns to compute it."""
        cdef llama_context* ctx = self._w.ctx
        cdef int64_t compute_ns, began
        cdef size_t num_bytes
        cdef char* kept
        cdef bint is_back
        self._fill_batch(num_tokens, 1)
        compute_ns = self._decode_once(num_tokens)
        num_bytes = lqs_state_size(ctx, 0)
        kept = <char*>malloc(num_bytes)
        if kept == NULL:
            raise MemoryError("no memory to measure how fast cells are copied")
        with nogil:
            lqs_bind_worker(&self._w)
            began = lqs_now_ns()
            is_back = lqs_state_get(ctx, kept, 0) == num_bytes and lqs_seq_rm(ctx, 0, -1, -1) == 1
            is_back = is_back and lqs_state_set(ctx, kept, num_bytes, 0)
            began = lqs_now_ns() - began
            lqs_memory_clear(ctx)
            lqs_bind_worker(NULL)
        free(kept)
        return num_bytes, began if is_back else -1, compute_ns

    @property
    def budget(self) -> int:
        """Tokens of one step that decodes and prefill share."""
        return self._w.budget

    @budget.setter
    def budget(self, int32_t value):
        if not 1 <= value <= self.n_batch:
            raise ValueError(f"a step's budget is 1 to n_batch ({self.n_batch}) tokens")
        self._w.budget = value

    def run(self):
        """The worker thread's body: steps until `stop`, without the GIL."""
        if self._w.ctx == NULL:
            raise EngineError("the worker is not open")
        with nogil:
            worker_loop(&self._w)
        if load_acquire32(&self._w.state) != WORKER_DEAD:
            store_release32(&self._w.state, WORKER_STOPPED)

    def stop(self):
        """Ask `run` to end after its current step. Idempotent, from any thread."""
        store_release32(&self._w.stopping, 1)
        wake(&self._w.sched.slots[self._w.slot].waker)

    def close(self):
        """Free the context. Raises EngineError for a parked worker: its context must not be freed."""
        if load_acquire32(&self._w.parked):
            raise EngineError("the worker's thread is parked inside llama.cpp; leave the process with os._exit")
        self._free()

    cdef void _free(self) noexcept:
        cdef WorkerData* w = &self._w
        cdef int32_t i
        if w.ctx == NULL:
            return
        llama_free(w.ctx)
        w.ctx = NULL
        self._model._num_open -= 1
        llama_batch_free(w.batch)
        scratch_free(&w.scratch)
        free(w.logprobs_buf)
        free_saved(w)
        if w.seqs != NULL:
            for i in range(w.num_ids):
                free(w.seqs[i].tokens)
            free(w.seqs)
        w.seqs = NULL
        w.logprobs_buf = NULL

    def break_at(self, str kind not None, *, uint64_t step=0, int32_t rc=-3, int32_t times=1, double for_s=0.0,
                 int32_t tokens=0):
        """Drills only: break a step. `kind` is one of chaos.pxi: "rc" `times` in a row, "hang" `for_s` seconds.

        Batches of less than `tokens` are computed as ever. Before `open` it breaks the warm-up.
        """
        kinds = {
            "assert": CHAOS_ASSERT, "helper": CHAOS_HELPER, "hang": CHAOS_HANG, "rc": CHAOS_RC, "lost": CHAOS_LOST,
        }
        if kind not in kinds:
            raise ValueError(f"a drill is one of {', '.join(kinds)}")
        self._w.chaos_rc = rc
        self._w.chaos_times = times
        self._w.chaos_step = step
        self._w.chaos_tokens = tokens
        self._w.chaos_ns = <int64_t>min(for_s * 1e9, 1e18)
        self._w.chaos_kind = kinds[kind]

    @property
    def state(self) -> str:
        """new, ready, dead or stopped; dead as well where others gave it up, wherever its thread is."""
        if is_dead(self._w.sched, self._w.slot):
            return "dead"
        return ("new", "ready", "dead", "stopped")[load_acquire32(&self._w.state)]

    @property
    def is_parked(self) -> bool:
        return load_acquire32(&self._w.parked) != 0

    @property
    def death(self) -> str:
        """What killed the device slot, empty while it lives."""
        if load_acquire32(&self._w.state) == WORKER_DEAD:
            return self._w.death.decode("utf-8", "replace")
        return "its step did not end" if is_dead(self._w.sched, self._w.slot) else ""

    @property
    def n_ctx_seq(self) -> int:
        """KV cells that one sequence may use."""
        return self._w.seq_tokens_max

    @property
    def num_cells(self) -> int:
        return self._w.num_cells

    @property
    def step_began_ns(self) -> int:
        """Monotonic ns at which the running step began, 0 between steps."""
        return <int64_t>load_relaxed(&self._w.sched.slots[self._w.slot].step_began_ns)

    def count_cells(self) -> int:
        """Cells in use, counted from llama.cpp's own books; only while nothing runs (a check for tests)."""
        cdef llama_memory_t memory = llama_get_memory(self._w.ctx)
        cdef int32_t i
        total = 0
        for i in range(self._w.num_ids):
            length = self._w.seqs[i].num_kv
            if llama_memory_seq_pos_max(memory, i) + 1 != <int32_t>length:
                raise EngineError(f"sequence {i} has {llama_memory_seq_pos_max(memory, i) + 1} cells, not {length}")
            total += length - self._w.seqs[i].shared
        return total

    def snapshot(self) -> dict:
        """Published counters; each is exact, together they may be a step apart."""
        cdef WorkerStats s = self._w.stats
        found = <object>s
        return found


def check_abi(str version not None, dict sizes not None):
    """Compare what this module was compiled against with the llama_cpp that is loaded.

    Args:
        version: llama_cpp.__version__.
        sizes: ctypes' sizes of llama_model_params, llama_context_params and llama_batch.

    Raises EngineError naming the difference.
    """
    compiled = {
        "llama_model_params": sizeof(llama_model_params),
        "llama_context_params": sizeof(llama_context_params),
        "llama_batch": sizeof(llama_batch),
    }
    wanted = LQS_LLAMA_CPP_PYTHON.decode()
    if version != wanted:
        raise EngineError(f"lqs was compiled against llama-cpp-python {wanted}, but {version} is installed: "
                          "install that version, or rebuild lqs")
    for name, size in compiled.items():
        if sizes.get(name) != size:
            raise EngineError(f"{name} has {sizes.get(name)} bytes in llama_cpp but {size} in lqs: rebuild lqs")


def install_callbacks(*, bint verbose=False):
    """Send libllama's log and aborts to C functions that need no GIL. Call right after importing llama_cpp."""
    lqs_install_callbacks(on_death, GGML_LOG_LEVEL_INFO if verbose else GGML_LOG_LEVEL_ERROR)


def backend_init():
    """Initialise ggml's backends, once per process."""
    with nogil:
        llama_backend_init()


def gpu_places() -> list:
    """The place on the bus of each GPU that libllama can use, in its order; empty where it does not say."""
    cdef const char* place
    found = []
    while True:
        place = lqs_gpu_place(len(found))
        if place == NULL:
            return found
        found.append(place.decode("ascii", "replace"))


# Rounds are counted by the time they took: up to 1 us, and each bound four times the one
# before; the last has no bound.
cdef enum:
    ROUND_BOUNDS = 10
    ROUND_BOUND_NS = 1000

# Atomic, one writer: the scheduler's thread.
cdef struct RoundTimes:
    uint64_t sum_ns
    uint64_t[ROUND_BOUNDS + 1] counts


cdef void round_times_add(RoundTimes* times, int64_t passed_ns) noexcept nogil:
    cdef int64_t bound = ROUND_BOUND_NS
    cdef int place = 0
    while place < ROUND_BOUNDS and passed_ns > bound:
        bound *= 4
        place += 1
    bump(&times.sum_ns, passed_ns)
    bump(&times.counts[place], 1)


@cython.final
cdef class SchedulerThread:
    """The body of the scheduler's thread. The clock is read here: the core has none."""
    cdef Scheduler _scheduler
    cdef RoundTimes _times
    cdef uint32_t _stopping

    def __cinit__(self, Scheduler scheduler not None):
        self._scheduler = scheduler
        self._stopping = 0
        memset(&self._times, 0, sizeof(RoundTimes))

    def run(self):
        """Rounds until `stop`, without the GIL."""
        cdef SchedulerState* s = self._scheduler.state
        cdef int64_t now_ns, due_ns
        # From here on device slots that are added are this thread's to adopt.
        self._scheduler.has_begun = True
        with nogil:
            while not load_acquire32(&self._stopping):
                now_ns = lqs_now_ns()
                due_ns = scheduler_round(s, now_ns)
                round_times_add(&self._times, lqs_now_ns() - now_ns)
                if due_ns < 0:
                    scheduler_sleep(s, -1)
                elif due_ns > now_ns:
                    scheduler_sleep(s, due_ns - now_ns)

    def snapshot(self) -> dict:
        """Rounds by the time they took: seconds in all, and (bound in seconds, rounds up to it)."""
        cdef int i
        cdef uint64_t total = 0
        counts = []
        for i in range(ROUND_BOUNDS + 1):
            total += load_relaxed(&self._times.counts[i])
            bound = ROUND_BOUND_NS * 4.0 ** i / 1e9 if i < ROUND_BOUNDS else float("inf")
            counts.append((bound, total))
        return {"seconds": load_relaxed(&self._times.sum_ns) / 1e9, "counts": counts}

    def stop(self):
        """Ask `run` to end after its current round. Idempotent, from any thread."""
        store_release32(&self._stopping, 1)
        wake(&self._scheduler.state.waker)
