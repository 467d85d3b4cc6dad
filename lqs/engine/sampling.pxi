# Turns one row of logits into one token.
#
# The order is llama.cpp's default chain:
#
#     logit bias -> penalties -> (grammar) -> top_k -> typical_p -> top_p -> min_p
#     -> temperature -> draw
#
# It differs in three points, on purpose. A temperature of 0 takes the best token left by
# bias, penalties and grammar: llama.cpp runs the filters first, and typical_p can throw
# the best one out. min_keep does not exist: every filter keeps at least one. And the
# draw is ours: Philox keyed by (seed, position), which has no state, so a text depends
# neither on who shared its batches nor on where it was continued.
#
# The row is edited in place (bias and penalties touch a few hundred logits at most) and
# put back before sampler_draw returns, so that log-probabilities come from what the
# model said. Nothing is allocated per token.

from libc.float cimport FLT_MAX
from libc.math cimport INFINITY, log
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from lqs.engine.llama cimport llama_sampler, llama_token_data, llama_vocab


cdef extern from "engine/_shim.h" namespace "lqs" nogil:
    const int32_t LANES
    const int32_t BLOCK
    int32_t num_blocks(int32_t n)
    bint scan_blocks(const float* x, int32_t n, float* block_max, float* best)
    int32_t find_best(const float* x, int32_t n, const float* block_max, float best)
    double total_mass(const float* x, int32_t n, float best, float scale, float* block_sum)
    int32_t draw_row(const float* x, int32_t n, float best, float scale, const float* block_sum,
                     double total, double uniform, float* prob)
    uint64_t key_of(float logit, int32_t id)
    float logit_of(uint64_t key)
    int32_t id_of(uint64_t key)
    size_t collect(const float* x, int32_t n, const float* block_max, float threshold, uint64_t* keys)
    double row_masses(const float* x, int32_t n, float best, float* mass, float* centre)
    size_t nearest_of_row(const float* x, int32_t n, const float* block_max, float best, float centre,
                          const float* mass, double target, bint strict, uint64_t* keys)
    float min_p_bound(float best, float min_p)
    size_t keep_best(uint64_t* keys, size_t num, size_t k)
    size_t select_best(const float* x, int32_t n, const float* block_max, float* spare, size_t k, uint64_t* keys)
    float best_of(const uint64_t* keys, size_t num)
    double list_masses(const uint64_t* keys, size_t num, float best, float scale, float* mass)
    float mean_of_list(const uint64_t* keys, size_t num, float best, float* mass)
    size_t keep_nearest(uint64_t* keys, size_t num, float best, float centre, double target, bint strict)
    size_t keep_min_p(uint64_t* keys, size_t num, float best, float min_p)
    int32_t draw_list(const uint64_t* keys, size_t num, float best, float scale, double uniform,
                      float* mass, float* prob)
    void uniforms(uint64_t seed, uint64_t position, double* out)
    llama_sampler* grammar_parse(const llama_vocab* vocab, const char* gbnf)
    llama_sampler* grammar_clone(const llama_sampler* grammar)
    void grammar_free(llama_sampler* grammar)
    int grammar_accept(llama_sampler* grammar, int32_t token)
    int64_t grammar_filter(llama_sampler* grammar, uint64_t* keys, size_t num, llama_token_data* room)


cdef enum:
    REPEAT_LAST_N_MAX = 4096     # Tokens that penalties look back at; read again for every draw.
    BIAS_MAX = 1024              # OpenAI allows 300; the rest is for the banned.
    TOP_LOGPROBS_MAX = 20        # OpenAI's.
    GRAMMAR_FIRST_LOOK = 256     # Candidates shown to a grammar before it sees the whole vocabulary.

cdef enum DrawCode:
    DRAW_OK = 0
    DRAW_NOT_FINITE = 1          # A NaN or +inf among the logits: the decode went wrong.
    DRAW_NO_CANDIDATE = 2        # Bias or grammar rule out every token.
    DRAW_GRAMMAR = 3             # The native grammar threw.

cdef struct DrawResult:
    int32_t token
    float prob                   # In the distribution it was drawn from; 1 when greedy.
    uint32_t num_candidates      # Left by the filters; 0 for the whole vocabulary, or greedy.

cdef struct LogitBias:
    int32_t token
    float bias

cdef struct SamplingParams:      # One per request; constant once filled.
    float temperature            # <= 0: greedy.
    float top_p                  # >= 1: off.
    float min_p                  # <= 0: off.
    float typical_p              # >= 1: off.
    float repeat_penalty         # 1: off.
    float presence_penalty       # 0: off.
    float frequency_penalty      # 0: off.
    int32_t top_k                # <= 0: off.
    int32_t repeat_last_n        # Tokens, prompt included; 0: penalties off.
    int32_t num_logprobs         # -1: none at all; 0: the drawn token's only.
    uint64_t seed
    bint ignore_eos              # What it bans is in `bias` already.
    uint32_t num_bias
    LogitBias* bias              # Owned.
    const llama_sampler* grammar  # Borrowed prototype: a Grammar outlives its requests.

cdef struct Edit:
    int32_t token
    float was

cdef struct SamplerScratch:      # One per worker: room for one draw at a time.
    int32_t n_vocab
    float* block_max             # Of the row as it is now; the block sums go to `spare`.
    float* spare
    float* mass                  # n_vocab rounded up to a block.
    uint64_t* keys               # The candidates, see _shim.h.
    uint32_t* counts             # All zero between draws.
    llama_token_data* room       # For grammars.
    Edit* edits
    uint32_t num_edits

cdef struct Sampler:             # One per running sequence.
    const SamplingParams* params
    int32_t* ring                # The last repeat_last_n tokens; NULL when penalties are off.
    uint32_t ring_size
    uint32_t num_seen            # Tokens accepted so far, the prompt's tail included.
    llama_sampler* grammar       # Owned clone, or NULL.


# ---- parameters ---------------------------------------------------------------------

cdef object _number(str name, object value, double low, double high):
    """A float within [low, high], or ValueError with the option's name."""
    number = float(value)
    if not low <= number <= high:
        raise ValueError(f"{name} must lie between {low:g} and {high:g}")
    return number


cdef int params_fill(SamplingParams* params, int32_t n_vocab, dict options) except -1:
    """Fill `params` from options named like its fields, all of them optional.

    Besides the fields: `logit_bias` is a list of (token, bias); `banned` a list of tokens
    that are never drawn (the model's suppressed ones, and with ignore_eos those that end
    a generation). An unknown name is a TypeError, a bad value a ValueError; both blame
    the caller. Pairs with params_free, also after a failure.
    """
    cdef dict left = dict(options)
    memset(params, 0, sizeof(SamplingParams))
    params.temperature = _number("temperature", left.pop("temperature", 0.8), -1, 100)
    params.top_p = _number("top_p", left.pop("top_p", 1.0), 0, 1)
    params.min_p = _number("min_p", left.pop("min_p", 0.0), 0, 1)
    params.typical_p = _number("typical_p", left.pop("typical_p", 1.0), 0, 1)
    params.repeat_penalty = _number("repeat_penalty", left.pop("repeat_penalty", 1.0), 0.01, 100)
    params.presence_penalty = _number("presence_penalty", left.pop("presence_penalty", 0.0), -100, 100)
    params.frequency_penalty = _number("frequency_penalty", left.pop("frequency_penalty", 0.0), -100, 100)
    params.top_k = min(max(int(left.pop("top_k", 0)), 0), n_vocab)
    params.repeat_last_n = int(_number("repeat_last_n", left.pop("repeat_last_n", 64), 0, REPEAT_LAST_N_MAX))
    params.num_logprobs = int(_number("num_logprobs", left.pop("num_logprobs", -1), -1, TOP_LOGPROBS_MAX))
    params.seed = int(left.pop("seed", 0)) & 0xFFFFFFFFFFFFFFFF
    params.ignore_eos = bool(left.pop("ignore_eos", False))
    biases = list(left.pop("logit_bias", ()))
    biases += [(token, -INFINITY) for token in left.pop("banned", ())]
    if left:
        raise TypeError(f"unknown sampling option {next(iter(left))!r}")
    return _fill_bias(params, n_vocab, biases)


cdef int _fill_bias(SamplingParams* params, int32_t n_vocab, list biases) except -1:
    cdef LogitBias* bias
    if len(biases) > BIAS_MAX:
        raise ValueError(f"logit_bias must have at most {BIAS_MAX} entries")
    if not biases:
        return 0
    params.bias = <LogitBias*>malloc(len(biases) * sizeof(LogitBias))
    if params.bias == NULL:
        raise MemoryError
    for token, value in biases:
        if not 0 <= token < n_vocab:
            raise ValueError(f"logit_bias names token {token}, which is not in the vocabulary")
        if not value <= 1e6:                # A NaN, or so large that sums overflow.
            raise ValueError("logit_bias must be a finite number, or -inf")
        bias = &params.bias[params.num_bias]
        bias.token = token
        bias.bias = value
        params.num_bias += 1
    return 0


cdef void params_free(SamplingParams* params) noexcept nogil:
    free(params.bias)
    params.bias = NULL
    params.num_bias = 0


cdef inline bint _has_penalties(const SamplingParams* params) noexcept nogil:
    return params.repeat_last_n > 0 and (
        params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    )


# ---- scratch and sampler: life ------------------------------------------------------

cdef int scratch_init(SamplerScratch* scratch, int32_t n_vocab) noexcept nogil:
    """Allocate room for rows of `n_vocab`. 0, or -1 without memory; pairs with scratch_free."""
    cdef size_t n = <size_t>n_vocab
    cdef size_t blocks = <size_t>num_blocks(n_vocab) + LANES
    memset(scratch, 0, sizeof(SamplerScratch))
    scratch.n_vocab = n_vocab
    scratch.block_max = <float*>malloc(blocks * sizeof(float))
    scratch.spare = <float*>malloc(blocks * sizeof(float))
    scratch.mass = <float*>malloc((n + BLOCK) * sizeof(float))
    scratch.keys = <uint64_t*>malloc(n * sizeof(uint64_t))
    scratch.counts = <uint32_t*>calloc(n, sizeof(uint32_t))
    scratch.room = <llama_token_data*>malloc(n * sizeof(llama_token_data))
    scratch.edits = <Edit*>malloc((BIAS_MAX + REPEAT_LAST_N_MAX) * sizeof(Edit))
    if (scratch.block_max == NULL or scratch.spare == NULL or scratch.mass == NULL or scratch.keys == NULL
            or scratch.counts == NULL or scratch.room == NULL or scratch.edits == NULL):
        scratch_free(scratch)
        return -1
    return 0


cdef void scratch_free(SamplerScratch* scratch) noexcept nogil:
    free(scratch.block_max)
    free(scratch.spare)
    free(scratch.mass)
    free(scratch.keys)
    free(scratch.counts)
    free(scratch.room)
    free(scratch.edits)
    memset(scratch, 0, sizeof(SamplerScratch))


cdef int sampler_init(Sampler* sampler, const SamplingParams* params, const int32_t* prompt,
                      uint32_t num_prompt) noexcept nogil:
    """Start a sequence's sampler; penalties see the prompt's tail, as llama-server's do.

    `params` must outlive it. 0, or -1 without memory; pairs with sampler_free.
    """
    cdef uint32_t i, first
    memset(sampler, 0, sizeof(Sampler))
    sampler.params = params
    if _has_penalties(params):
        sampler.ring_size = <uint32_t>params.repeat_last_n
        sampler.ring = <int32_t*>malloc(sampler.ring_size * sizeof(int32_t))
        if sampler.ring == NULL:
            return -1
        first = num_prompt - sampler.ring_size if num_prompt > sampler.ring_size else 0
        for i in range(first, num_prompt):
            _remember(sampler, prompt[i])
    if params.grammar != NULL:
        sampler.grammar = grammar_clone(params.grammar)
        if sampler.grammar == NULL:
            sampler_free(sampler)
            return -1
    return 0


cdef void sampler_free(Sampler* sampler) noexcept nogil:
    free(sampler.ring)
    sampler.ring = NULL
    if sampler.grammar != NULL:
        grammar_free(sampler.grammar)
        sampler.grammar = NULL


cdef inline void _remember(Sampler* sampler, int32_t token) noexcept nogil:
    sampler.ring[sampler.num_seen % sampler.ring_size] = token
    sampler.num_seen += 1


cdef int sampler_accept(Sampler* sampler, int32_t token, bint is_eog) noexcept nogil:
    """Take note of a token of the completion: for penalties and grammar.

    After every draw; after a failover, for every token made so far. 0 or DRAW_GRAMMAR.
    """
    if sampler.ring != NULL:
        _remember(sampler, token)
    # A grammar aborts on an end of generation that it does not expect, and has nothing
    # to say after one that it does.
    if sampler.grammar != NULL and not is_eog and grammar_accept(sampler.grammar, token) != 0:
        return DRAW_GRAMMAR
    return DRAW_OK


# ---- edits: bias and penalties ------------------------------------------------------

cdef inline void _edit(SamplerScratch* scratch, float* logits, int32_t token, float value) noexcept nogil:
    cdef Edit* edit = &scratch.edits[scratch.num_edits]
    edit.token = token
    edit.was = logits[token]
    logits[token] = value
    scratch.num_edits += 1


cdef void _undo(SamplerScratch* scratch, float* logits) noexcept nogil:
    # Backwards: a token edited twice gets its first value back last.
    while scratch.num_edits > 0:
        scratch.num_edits -= 1
        logits[scratch.edits[scratch.num_edits].token] = scratch.edits[scratch.num_edits].was


cdef void _apply_bias(const SamplingParams* params, SamplerScratch* scratch, float* logits) noexcept nogil:
    cdef uint32_t i
    for i in range(params.num_bias):
        _edit(scratch, logits, params.bias[i].token, logits[params.bias[i].token] + params.bias[i].bias)


cdef inline float _penalised(const SamplingParams* params, float logit, uint32_t count) noexcept nogil:
    # Dividing a negative logit would reward the repetition; llama.cpp multiplies, too.
    logit = logit * params.repeat_penalty if logit <= 0 else logit / params.repeat_penalty
    return logit - (<float>count * params.frequency_penalty + params.presence_penalty)


cdef void _apply_penalties(const Sampler* sampler, SamplerScratch* scratch, float* logits) noexcept nogil:
    cdef uint32_t i
    cdef int32_t token
    cdef uint32_t num = min(sampler.num_seen, sampler.ring_size)
    for i in range(num):
        token = sampler.ring[i]
        if 0 <= token < scratch.n_vocab:
            scratch.counts[token] += 1
    for i in range(num):
        token = sampler.ring[i]
        if 0 <= token < scratch.n_vocab and scratch.counts[token] > 0:
            _edit(scratch, logits, token, _penalised(sampler.params, logits[token], scratch.counts[token]))
            scratch.counts[token] = 0       # Edited once, and zero again for the next draw.


# ---- the draw -----------------------------------------------------------------------

cdef int _draw_from_list(const SamplingParams* params, SamplerScratch* scratch, size_t num, double uniform,
                         DrawResult* out) noexcept nogil:
    """Filter the `num` candidates in `keys` by typical_p and top_p, then _draw_kept."""
    cdef float best, centre
    cdef double total
    if num == 0:
        return DRAW_NO_CANDIDATE
    if params.typical_p < 1:
        best = best_of(scratch.keys, num)
        centre = mean_of_list(scratch.keys, num, best, scratch.mass)
        total = list_masses(scratch.keys, num, best, 1, scratch.mass)
        num = keep_nearest(scratch.keys, num, best, centre, total * params.typical_p, True)
    if params.top_p < 1:
        num = _keep_top_p(params, scratch, num)
    return _draw_kept(params, scratch, num, uniform, out)


cdef size_t _keep_top_p(const SamplingParams* params, SamplerScratch* scratch, size_t num) noexcept nogil:
    cdef float best = best_of(scratch.keys, num)
    cdef double total = list_masses(scratch.keys, num, best, 1, scratch.mass)
    # At least one: a top_p of 0 is reached by nobody's mass.
    return max(keep_nearest(scratch.keys, num, best, best, total * params.top_p, False), <size_t>1)


cdef int _draw_kept(const SamplingParams* params, SamplerScratch* scratch, size_t num, double uniform,
                    DrawResult* out) noexcept nogil:
    """The end of the chain: min_p, temperature, draw."""
    cdef float best = best_of(scratch.keys, num)
    if params.min_p > 0:
        num = keep_min_p(scratch.keys, num, best, params.min_p)
    out.num_candidates = <uint32_t>num
    out.token = draw_list(scratch.keys, num, best, _scale(params), uniform, scratch.mass, &out.prob)
    return DRAW_OK


cdef inline float _scale(const SamplingParams* params) noexcept nogil:
    # Below 1e-5 nothing but the best token is left, and its reciprocal would overflow.
    return 1 / max(params.temperature, <float>1e-5)


cdef int _draw_sampled(const SamplingParams* params, SamplerScratch* scratch, const float* logits, int32_t n_vocab,
                       float best, double uniform, DrawResult* out) noexcept nogil:
    """Choose the cheapest way to the candidates, then draw from them."""
    cdef double total
    cdef size_t num
    if params.top_k > 0:
        num = select_best(logits, n_vocab, scratch.block_max, scratch.spare, params.top_k, scratch.keys)
        return _draw_from_list(params, scratch, num, uniform, out)
    if params.typical_p < 1 or params.top_p < 1:
        num = _keep_by_mass(params, scratch, logits, n_vocab, best)
        return _draw_kept(params, scratch, num, uniform, out)
    if params.min_p > 0:
        num = collect(logits, n_vocab, scratch.block_max, min_p_bound(best, params.min_p), scratch.keys)
        return _draw_kept(params, scratch, num, uniform, out)
    total = total_mass(logits, n_vocab, best, _scale(params), scratch.spare)
    out.num_candidates = 0
    out.token = draw_row(logits, n_vocab, best, _scale(params), scratch.spare, total, uniform, &out.prob)
    return DRAW_OK


cdef size_t _keep_by_mass(const SamplingParams* params, SamplerScratch* scratch, const float* logits, int32_t n_vocab,
                          float best) noexcept nogil:
    """typical_p and top_p on a whole row: leaves the candidates in `keys`, at least one."""
    cdef float mean = 0
    cdef double total = row_masses(logits, n_vocab, best, scratch.mass, &mean)
    cdef size_t num
    if params.typical_p < 1:
        num = nearest_of_row(logits, n_vocab, scratch.block_max, best, mean, scratch.mass, total * params.typical_p,
                             True, scratch.keys)
        return _keep_top_p(params, scratch, num) if params.top_p < 1 else num
    num = nearest_of_row(logits, n_vocab, scratch.block_max, best, best, scratch.mass, total * params.top_p,
                         False, scratch.keys)
    return max(num, <size_t>1)


cdef int _draw_row(const SamplingParams* params, SamplerScratch* scratch, const float* logits, int32_t n_vocab,
                   double uniform, DrawResult* out) noexcept nogil:
    cdef float best = 0
    if not scan_blocks(logits, n_vocab, scratch.block_max, &best):
        return DRAW_NOT_FINITE
    if best < -FLT_MAX:
        return DRAW_NO_CANDIDATE
    if params.temperature > 0:
        return _draw_sampled(params, scratch, logits, n_vocab, best, uniform, out)
    out.token = find_best(logits, n_vocab, scratch.block_max, best)
    out.prob = 1
    out.num_candidates = 0
    return DRAW_OK


cdef int _redraw_allowed(Sampler* sampler, SamplerScratch* scratch, const float* logits, int32_t n_vocab,
                         double uniform, DrawResult* out) noexcept nogil:
    """Draw among what the grammar allows; `block_max` is still that of the row.

    A grammar is slow (milliseconds for a vocabulary), and top_k wants k of them: so it
    sees the best few hundred first. When k of those pass, they are the k best that pass
    at all, and nobody else needs to be asked.
    """
    cdef const SamplingParams* params = sampler.params
    cdef size_t want = 1 if params.temperature <= 0 else <size_t>params.top_k
    cdef size_t look = max(4 * want, <size_t>GRAMMAR_FIRST_LOOK)
    cdef int64_t num = 0
    if 0 < want and look < <size_t>n_vocab:
        num = <int64_t>select_best(logits, n_vocab, scratch.block_max, scratch.spare, look, scratch.keys)
        num = grammar_filter(sampler.grammar, scratch.keys, <size_t>num, scratch.room)
    if 0 <= num and (want == 0 or <size_t>num < want):
        num = <int64_t>collect(logits, n_vocab, scratch.block_max, -FLT_MAX, scratch.keys)
        num = grammar_filter(sampler.grammar, scratch.keys, <size_t>num, scratch.room)
    if num < 0:
        return DRAW_GRAMMAR
    if want > 0:
        num = <int64_t>keep_best(scratch.keys, <size_t>num, want)
    if params.temperature > 0:
        return _draw_from_list(params, scratch, <size_t>num, uniform, out)
    if num == 0:
        return DRAW_NO_CANDIDATE
    out.token = id_of(scratch.keys[0])
    out.prob = 1
    out.num_candidates = 0
    return DRAW_OK


cdef int _draw_edited(Sampler* sampler, SamplerScratch* scratch, const float* logits, int32_t n_vocab,
                      uint64_t position, DrawResult* out) noexcept nogil:
    cdef double uniform[2]
    cdef uint64_t key
    cdef int64_t allowed
    cdef int code
    uniforms(sampler.params.seed, position, uniform)
    code = _draw_row(sampler.params, scratch, logits, n_vocab, uniform[0], out)
    if code != DRAW_OK or sampler.grammar == NULL:
        return code
    # Ask the grammar about the drawn token alone first: it nearly always agrees.
    key = key_of(logits[out.token], out.token)
    allowed = grammar_filter(sampler.grammar, &key, 1, scratch.room)
    if allowed == 0:
        # With a number of its own: the first one is known to point at a refused token.
        return _redraw_allowed(sampler, scratch, logits, n_vocab, uniform[1], out)
    return DRAW_OK if allowed > 0 else DRAW_GRAMMAR


cdef int32_t sampler_draw(Sampler* sampler, SamplerScratch* scratch, float* logits, int32_t n_vocab,
                          uint64_t position, DrawResult* out) noexcept nogil:
    """Draw the completion's token number `position` (0, 1, ...); a DrawCode.

    `logits` (scratch.n_vocab of them) are edited meanwhile, and as they were on return.
    The token is not accepted: sampler_accept does that.
    """
    cdef int code
    scratch.num_edits = 0
    _apply_bias(sampler.params, scratch, logits)
    if sampler.ring != NULL:
        _apply_penalties(sampler, scratch, logits)
    code = _draw_edited(sampler, scratch, logits, n_vocab, position, out)
    _undo(scratch, logits)
    return code


# ---- log-probabilities --------------------------------------------------------------

cdef size_t logprobs_bytes_max(const PieceTable* pieces, int32_t num_top) noexcept nogil:
    """The most bytes that one LOGPROBS payload can take."""
    return 12 + pieces.longest + <size_t>num_top * (10 + pieces.longest)


cdef char* _put_piece(char* at, const PieceTable* pieces, int32_t token, float logprob, int32_t num_top) noexcept nogil:
    """Append token, logprob, (num_top unless < 0,) length and name; returns the new end.

    The name is what the token prints, or for one that prints nothing its own text.
    """
    cdef TokenText name
    pieces_name(pieces, token, &name)
    cdef uint16_t length = <uint16_t>name.num_bytes
    cdef uint16_t top = <uint16_t>max(num_top, 0)
    memcpy(at, &token, 4)
    memcpy(at + 4, &logprob, 4)
    at += 8
    if num_top >= 0:
        memcpy(at, &top, 2)
        at += 2
    memcpy(at, &length, 2)
    memcpy(at + 2, name.bytes, length)
    return at + 2 + length


cdef inline float _logprob(float logit, float best, double log_total) noexcept nogil:
    # JSON has no -inf; -9999 is what OpenAI's interface says instead.
    return <float>max(<double>logit - best - log_total, -9999.0)


cdef int64_t logprobs_write(SamplerScratch* scratch, const PieceTable* pieces, const float* logits, int32_t n_vocab,
                            int32_t token, int32_t num_top, char* out, size_t capacity) noexcept nogil:
    """Write one LOGPROBS payload: the token's log-probability and the `num_top` best ones.

    They are the model's own: the log-softmax of the raw logits, before bias, penalties,
    filters and temperature, which is what OpenAI's interface means. Natural logarithm.
    Returns its bytes; -1 when `capacity` is below logprobs_bytes_max(num_top), -2 for
    logits that are not finite.
    """
    cdef float best = 0
    cdef double log_total
    cdef size_t i, num = 0
    cdef char* at
    if capacity < logprobs_bytes_max(pieces, num_top):
        return -1
    if not scan_blocks(logits, n_vocab, scratch.block_max, &best) or best < -FLT_MAX:
        return -2
    log_total = log(total_mass(logits, n_vocab, best, 1, scratch.spare))
    if num_top > 0:
        num = select_best(logits, n_vocab, scratch.block_max, scratch.spare, <size_t>num_top, scratch.keys)
    at = _put_piece(out, pieces, token, _logprob(logits[token], best, log_total), <int32_t>num)
    for i in range(num):
        at = _put_piece(at, pieces, id_of(scratch.keys[i]), _logprob(logit_of(scratch.keys[i]), best, log_total), -1)
    return at - out


# ---- grammars -----------------------------------------------------------------------

@cython.final
cdef class Grammar:
    """A parsed grammar: the prototype that each request's sampler clones.

    Owner: whoever made it; constant, so any number of requests and threads may clone it.
    Size, depth and repetitions must have been bounded before (native parsing recurses).
    """

    cdef llama_sampler* _prototype
    cdef Model _model                # Keeps the vocabulary alive.

    def __cinit__(self, Model model not None, str gbnf not None):
        """Parse GBNF with the root rule `root`, without the GIL; GrammarError blames the text."""
        cdef bytes raw = gbnf.encode()
        cdef const char* text = raw
        cdef const llama_vocab* vocab = model._vocab
        if not gbnf.strip() or b"\0" in raw:
            raise GrammarError("the grammar is empty or holds a NUL")
        self._model = model
        with nogil:
            self._prototype = grammar_parse(vocab, text)
        if self._prototype == NULL:
            raise GrammarError("the grammar could not be parsed")

    def __dealloc__(self):
        # The sampler refers to the vocabulary only to parse and apply, never to be freed.
        if self._prototype != NULL:
            grammar_free(self._prototype)


# ---- the face for tests and benchmarks ----------------------------------------------

@cython.final
cdef class SamplerProbe:
    """One sampler with its own scratch, driven from Python: for tests and benchmarks.

    Options are params_fill's, and `prompt`, the tokens that penalties see first.
    """

    cdef SamplingParams _params
    cdef SamplerScratch _scratch
    cdef Sampler _sampler
    cdef object _grammar
    cdef uint32_t _num_candidates

    def __cinit__(self, int32_t n_vocab, *, object prompt=(), Grammar grammar=None, **options):
        cdef int32_t* tokens
        cdef uint32_t i
        params_fill(&self._params, n_vocab, options)
        if grammar is not None:
            self._grammar = grammar
            self._params.grammar = grammar._prototype
        tokens = <int32_t*>malloc((len(prompt) + 1) * sizeof(int32_t))
        if tokens == NULL:
            raise MemoryError
        for i in range(len(prompt)):
            tokens[i] = prompt[i]
        failed = scratch_init(&self._scratch, n_vocab) != 0 or sampler_init(
            &self._sampler, &self._params, tokens, <uint32_t>len(prompt)) != 0
        free(tokens)
        if failed:
            raise MemoryError

    def __dealloc__(self):
        sampler_free(&self._sampler)
        scratch_free(&self._scratch)
        params_free(&self._params)

    def draw(self, float[::1] logits, uint64_t position):
        """(code, token, prob) of one draw; the token is not accepted."""
        cdef DrawResult result
        if logits.shape[0] != self._scratch.n_vocab:
            raise ValueError("logits must have one entry per token")
        memset(&result, 0, sizeof(DrawResult))
        code = sampler_draw(&self._sampler, &self._scratch, &logits[0], self._scratch.n_vocab, position, &result)
        self._num_candidates = result.num_candidates
        return code, result.token, result.prob

    def run(self, float[::1] logits, uint64_t num_draws):
        """Draw at the positions 0 .. num_draws - 1 without the GIL; the last token."""
        cdef DrawResult result
        cdef uint64_t i
        result.token = -1
        with nogil:
            for i in range(num_draws):
                sampler_draw(&self._sampler, &self._scratch, &logits[0], self._scratch.n_vocab, i, &result)
        return result.token

    def candidates(self):
        """The tokens that the last draw chose among; empty: the whole vocabulary, or greedy."""
        return [id_of(self._scratch.keys[i]) for i in range(self._num_candidates)]

    def accept(self, int32_t token, bint is_eog=False):
        """sampler_accept's code."""
        return sampler_accept(&self._sampler, token, is_eog)

    def logprobs(self, TextProbe text, float[::1] logits, int32_t token, int32_t num_top):
        """The LOGPROBS payload, or the negative code of logprobs_write."""
        cdef size_t room = logprobs_bytes_max(&text._pieces, num_top)
        cdef bytearray out = bytearray(room)
        cdef char* data = out
        cdef int64_t num = logprobs_write(&self._scratch, &text._pieces, &logits[0], self._scratch.n_vocab, token,
                                          num_top, data, room)
        return bytes(out[:num]) if num >= 0 else num

    @staticmethod
    def uniform(uint64_t seed, uint64_t position):
        """The two numbers in [0, 1) that a draw may use."""
        cdef double out[2]
        uniforms(seed, position, out)
        return out[0], out[1]
