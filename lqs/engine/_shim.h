/* The sampler's kernels, and the grammar calls that may throw.
 *
 * A row of logits is 200 kB for a vocabulary of 49,152. It is streamed once, by
 * `scan_blocks`, which leaves the maximum of every block of 128. Everything after that
 * looks only at the blocks whose maximum says they matter: the k-th largest block
 * maximum is a lower bound of the k-th largest logit, so a top-k of 40 reads 40 blocks
 * of 384, and sorts about fifty tokens instead of all of them.
 *
 * A candidate is one 64-bit key: the logit, mapped so that larger logits are smaller
 * integers, above the token's id. Sorting keys therefore sorts by logit, best first,
 * with ties broken towards the lowest id: the order is total, and the same everywhere.
 *
 * Vectors are GCC's own (`vector_size`). Nothing here allocates, and nothing lets an exception out:
 * one that crossed into Cython's nogil code would make it wait for the GIL.
 */
#ifndef LQS_ENGINE_SHIM_H
#define LQS_ENGINE_SHIM_H

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "llama.h"

namespace lqs {

/* As wide as the machine's registers that this is built for, and no wider: a vector that
 * must be split is a dozen times slower. */
#if defined(__AVX512F__)
constexpr int32_t LANES = 16;
#define LQS_LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif defined(__AVX__)
constexpr int32_t LANES = 8;
#define LQS_LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
#else
constexpr int32_t LANES = 4;
#define LQS_LANE_NUMBERS 0, 1, 2, 3
#endif

typedef float   floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

const ints LANE_NUMBERS = {LQS_LANE_NUMBERS};
constexpr int32_t BLOCK = 128;      /* Logits per block; a multiple of LANES. */
constexpr size_t  SORT_MAX = 1024;  /* Longer candidate lists stay unsorted: nobody reads their order. */

inline int32_t num_blocks(int32_t n) { return (n + BLOCK - 1) / BLOCK; }

/* Reads LANES floats at `x`; memcpy because a row need not be aligned. */
__attribute__((always_inline)) inline void load(floats & to, const float * x) { std::memcpy(&to, x, sizeof to); }

/* Like load(), for a row's last lanes: what is missing reads as `rest`. */
inline void load_tail(floats & to, const float * x, int32_t n, float rest) {
    float lanes[LANES];
    for (int32_t i = 0; i < LANES; i++) {
        lanes[i] = i < n ? x[i] : rest;
    }
    load(to, lanes);
}

/* Reads at x[at] of a row of n: whole vectors fast, the tail slowly. */
__attribute__((always_inline)) inline void load_at(floats & to, const float * x, int32_t at, int32_t n, float rest) {
    if (at + LANES <= n) {
        load(to, x + at);
    } else {
        load_tail(to, x + at, n - at, rest);
    }
}

/* Folds the lanes onto each other, the half, a quarter, ... apart: an order of operations
 * that is written down, not the compiler's choice. */
template <int32_t APART = LANES / 2, class Fold>
__attribute__((always_inline)) inline float fold(floats v, Fold with) {
    if constexpr (APART == 0) {
        return v[0];
    } else {
        return fold<APART / 2>(with(v, __builtin_shuffle(v, LANE_NUMBERS ^ APART)), with);
    }
}

struct Larger {
    __attribute__((always_inline)) floats operator()(const floats & a, const floats & b) const { return a > b ? a : b; }
};

struct Sum {
    __attribute__((always_inline)) floats operator()(const floats & a, const floats & b) const { return a + b; }
};

/* The maximum of each block in `block_max`, and of all in *best.
 * False: a NaN or +inf is among them, and the row is not to be drawn from. */
inline bool scan_blocks(const float * x, int32_t n, float * block_max, float * best) {
    ints odd = {};
    float top = -INFINITY;
    for (int32_t at = 0, b = 0; at < n; at += BLOCK, b++) {
        const int32_t end = std::min(at + BLOCK, n);
        floats most = floats{} - INFINITY;
        for (int32_t i = at; i < end; i += LANES) {
            floats v;
            load_at(v, x, i, end, -INFINITY);
            odd |= v != v;                 /* Only a NaN differs from itself. */
            most = v > most ? v : most;
        }
        block_max[b] = fold(most, Larger());
        top = std::max(top, block_max[b]);
    }
    int32_t any = 0;
    for (int32_t i = 0; i < LANES; i++) {
        any |= odd[i];
    }
    *best = top;
    return any == 0 && top < INFINITY;
}

/* The lowest id whose logit is `best`, which scan_blocks has found to be the maximum. */
inline int32_t find_best(const float * x, int32_t n, const float * block_max, float best) {
    for (int32_t b = 0; b < num_blocks(n); b++) {
        if (block_max[b] == best) {
            int32_t i = b * BLOCK;
            while (x[i] != best) {
                i++;
            }
            return i;
        }
    }
    return -1;
}

/* exp(x) for x <= 0, to 2e-7 of the value; 0 below -87, where a float would go subnormal.
 * Cephes' expf: x = n ln2 + r, a polynomial for exp(r), n put into the exponent. */
__attribute__((always_inline)) inline void exp_negative(floats & y, const floats & x) {
    const floats magic = floats{} + 12582912.0f;  /* 1.5 * 2^23: adding it rounds to an integer. */
    const floats floor_x = floats{} - 87.0f;
    floats c = x < floor_x ? floor_x : x;
    floats shifted = c * 1.44269504088896341f + magic;
    floats n = shifted - magic;
    floats r = c - n * 0.693359375f + n * 2.12194440e-4f;
    floats p = floats{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    ints exponent = (ints) shifted - (ints) magic;
    ints bits = (ints) p + (exponent << 23);
    y = x < floor_x ? floats{} : (floats) bits;
}

/* exp((x - best) * scale) of one block into `mass` (BLOCK floats, 0 past the row's end). */
inline void block_masses(const float * x, int32_t n, int32_t at, float best, float scale, float * mass) {
    for (int32_t i = 0; i < BLOCK; i += LANES) {
        floats v, m;
        load_at(v, x, std::min(at + i, n), n, -INFINITY);
        v = (v - best) * scale;
        exp_negative(m, v);
        std::memcpy(mass + i, &m, sizeof m);
    }
}

/* The sum of exp((x - best) * scale) over the row; each block's share in `block_sum`. */
inline double total_mass(const float * x, int32_t n, float best, float scale, float * block_sum) {
    double total = 0;
    for (int32_t at = 0, b = 0; at < n; at += BLOCK, b++) {
        const int32_t end = std::min(at + BLOCK, n);
        floats sum = {};
        for (int32_t i = at; i < end; i += LANES) {
            floats v, m;
            load_at(v, x, i, end, -INFINITY);
            v = (v - best) * scale;
            exp_negative(m, v);
            sum += m;
        }
        block_sum[b] = fold(sum, Sum());
        total += block_sum[b];
    }
    return total;
}

/* The first index at which the running sum of `mass` passes `target`; the last one with
 * any mass when rounding leaves the sum short of it. */
inline int32_t walk(const float * mass, int32_t n, double target, double * run) {
    int32_t last = 0;
    for (int32_t i = 0; i < n; i++) {
        if (mass[i] > 0) {
            last = i;
            *run += mass[i];
            if (*run > target) {
                return i;
            }
        }
    }
    return last;
}

/* Draws from the whole row: finds the block by the blocks' sums, then the token in it. */
inline int32_t draw_row(const float * x, int32_t n, float best, float scale, const float * block_sum,
                        double total, double uniform, float * prob) {
    const double target = uniform * total;
    double run = 0;
    int32_t b = walk(block_sum, num_blocks(n), target, &run);
    run -= block_sum[b];
    float mass[BLOCK];
    block_masses(x, n, b * BLOCK, best, scale, mass);
    int32_t i = walk(mass, BLOCK, target, &run);
    *prob = (float) (mass[i] / total);
    return b * BLOCK + i;
}

/* ---- candidate keys ------------------------------------------------------------- */

inline uint64_t key_of(float logit, int32_t id) {
    const float plain = logit + 0.0f;    /* -0 becomes +0, so that the two tie. */
    uint32_t bits;
    std::memcpy(&bits, &plain, sizeof bits);
    const uint32_t rising = bits ^ ((bits >> 31) ? 0xFFFFFFFFu : 0x80000000u);
    return ((uint64_t) ~rising << 32) | (uint32_t) id;
}

inline float logit_of(uint64_t key) {
    const uint32_t rising = ~(uint32_t) (key >> 32);
    const uint32_t bits = rising ^ ((rising >> 31) ? 0x80000000u : 0xFFFFFFFFu);
    float logit;
    std::memcpy(&logit, &bits, sizeof logit);
    return logit;
}

inline int32_t id_of(uint64_t key) { return (int32_t) (uint32_t) key; }

/* The keys of all logits >= threshold, by rising id; a threshold of -FLT_MAX leaves out
 * what is ruled out (-inf). */
inline size_t collect(const float * x, int32_t n, const float * block_max, float threshold, uint64_t * keys) {
    size_t num = 0;
    for (int32_t b = 0; b < num_blocks(n); b++) {
        if (!(block_max[b] >= threshold)) {
            continue;
        }
        const int32_t end = std::min((b + 1) * BLOCK, n);
        for (int32_t i = b * BLOCK; i < end; i++) {
            /* Written always, counted if it belongs: a branch here would be mispredicted. */
            keys[num] = key_of(x[i], i);
            num += x[i] >= threshold;
        }
    }
    return num;
}

/* Keeps the k best of a list; in order when the list is short enough to matter. */
inline size_t keep_best(uint64_t * keys, size_t num, size_t k) {
    if (k < num) {
        std::nth_element(keys, keys + k, keys + num);
        num = k;
    }
    if (num <= SORT_MAX) {
        std::sort(keys, keys + num);
    }
    return num;
}

/* The k best of a row. `spare` holds as many floats as there are blocks. */
inline size_t select_best(const float * x, int32_t n, const float * block_max, float * spare, size_t k,
                          uint64_t * keys) {
    const size_t blocks = (size_t) num_blocks(n);
    float threshold = -FLT_MAX;
    if (k <= blocks) {
        std::memcpy(spare, block_max, blocks * sizeof(float));
        std::nth_element(spare, spare + (k - 1), spare + blocks, [](float a, float b) { return a > b; });
        threshold = std::max(threshold, spare[k - 1]);
    }
    return keep_best(keys, collect(x, n, block_max, threshold, keys), k);
}

/* Moves the shortest prefix (in the order of `before`) whose mass reaches `target` to the
 * front and returns its length: all, if the target is never reached. keys[0 .. low) are
 * known to belong to it and to hold `sum`. `mass` gives a key's mass; `strict` asks for
 * more than the target instead of as much.
 * A quickselect on the running sum: linear, whatever the distribution looks like. */
template <class Mass, class Before>
inline size_t keep_mass(uint64_t * keys, size_t low, size_t num, double sum, double target, bool strict, Mass mass,
                        Before before) {
    const auto enough = [=](double held) { return strict ? held > target : held >= target; };
    size_t high = num;
    while (high - low > 64) {
        const size_t mid = low + (high - low) / 2;
        std::nth_element(keys + low, keys + mid, keys + high, before);
        double held = sum;
        for (size_t i = low; i < mid; i++) {
            held += mass(keys[i]);
        }
        if (enough(held)) {
            high = mid;
        } else {
            low = mid;
            sum = held;
        }
    }
    std::sort(keys + low, keys + high, before);
    while (low < high && !enough(sum)) {
        sum += mass(keys[low++]);
    }
    return keep_best(keys, low, low);
}

inline float best_of(const uint64_t * keys, size_t num) { return logit_of(*std::min_element(keys, keys + num)); }

/* exp((logit - best) * scale) of each candidate into `mass`, which holds num + LANES
 * floats; returns the sum. */
inline double list_masses(const uint64_t * keys, size_t num, float best, float scale, float * mass) {
    double total = 0;
    for (size_t at = 0; at < num; at += LANES) {
        const size_t end = std::min(at + LANES, num);
        for (size_t i = at; i < at + LANES; i++) {
            mass[i] = i < end ? (logit_of(keys[i]) - best) * scale : -INFINITY;
        }
        floats v, m;
        load(v, mass + at);
        exp_negative(m, v);
        std::memcpy(mass + at, &m, sizeof m);
        for (size_t i = at; i < end; i++) {
            total += mass[i];
        }
    }
    return total;
}

/* Both filters by mass keep what is nearest to a centre: top_p to the best logit, so that
 * nearest means most probable; typical_p (Meister et al. 2022, "Locally typical
 * sampling") to the mean logit, so that the surprise is nearest to the entropy. (-log p
 * is a constant minus the logit; the entropy is that constant minus the mean logit.)
 * At one distance the more probable one comes first, then the lower id. */
struct Nearer {
    float centre;
    bool operator()(uint64_t a, uint64_t b) const {
        const float to_a = std::fabs(logit_of(a) - centre), to_b = std::fabs(logit_of(b) - centre);
        return to_a < to_b || (to_a == to_b && a < b);
    }
};

struct MassOf {
    float best;
    double operator()(uint64_t key) const { return (double) expf(logit_of(key) - best); }
};

/* The same on a list; `target` is the mass to be reached. */
inline size_t keep_nearest(uint64_t * keys, size_t num, float best, float centre, double target, bool strict) {
    return keep_mass(keys, 0, num, 0, target, strict, MassOf{best}, Nearer{centre});
}

/* The mean of a list's logits under their softmax; `mass` is spare room. */
inline float mean_of_list(const uint64_t * keys, size_t num, float best, float * mass) {
    const double total = list_masses(keys, num, best, 1.0f, mass);
    double mean = 0;
    for (size_t i = 0; i < num; i++) {
        mean += mass[i] / total * (logit_of(keys[i]) - best);
    }
    return (float) (best + mean);
}

/* exp(x - best) of a whole row into `mass` (n rounded up to a BLOCK), their sum, and the
 * mean of x under them. */
inline double row_masses(const float * x, int32_t n, float best, float * mass, float * centre) {
    double total = 0, moment = 0;
    for (int32_t at = 0; at < n; at += BLOCK) {
        block_masses(x, n, at, best, 1.0f, mass + at);
        floats sum = {}, first = {};
        for (int32_t i = 0; i < BLOCK; i += LANES) {
            floats v, m;
            load_at(v, x, std::min(at + i, n), n, -INFINITY);
            load(m, mass + at + i);
            v -= best;
            sum += m;
            first += m * (v < -90.0f ? floats{} - 90.0f : v);   /* 0 times -inf is a NaN. */
        }
        total += fold(sum, Sum());
        moment += fold(first, Sum());
    }
    *centre = (float) (best + moment / total);
    return total;
}

/* The mass within `radius` of the centre, to about 1e-6 of it. */
inline double mass_within(const float * x, int32_t n, const float * block_max, const float * mass, float centre,
                          float radius) {
    double total = 0;
    for (int32_t b = 0; b < num_blocks(n); b++) {
        if (block_max[b] < centre - radius) {
            continue;
        }
        const int32_t end = std::min((b + 1) * BLOCK, n);
        floats sum = {};
        for (int32_t i = b * BLOCK; i < end; i += LANES) {
            floats v, m;
            load_at(v, x, i, end, -INFINITY);
            load(m, mass + i);
            v -= centre;
            v = v < 0.0f ? -v : v;
            sum += v <= radius ? m : floats{};
        }
        total += fold(sum, Sum());
    }
    return total;
}

/* keep_nearest for a whole row, without a list of it: halves the radius until the few
 * tokens at the border are left, and orders only those. `mass` as row_masses left it. */
inline size_t nearest_of_row(const float * x, int32_t n, const float * block_max, float best, float centre,
                             const float * mass, double target, bool strict, uint64_t * keys) {
    float inner = -1.0f;                   /* Holds too little, and outer holds enough. */
    float outer = 90.0f + (best - centre); /* Beyond 87 from the best there is no mass. */
    while (outer - inner > 0.004f) {
        const float radius = 0.5f * (inner + outer);
        const double held = mass_within(x, n, block_max, mass, centre, radius);
        if (held < target * (1 - 1e-5)) {
            inner = radius;
        } else if (held > target * (1 + 1e-5)) {
            outer = radius;
        } else {
            break;                         /* Too near to tell; the rest is done exactly. */
        }
    }
    const size_t num = collect(x, n, block_max, std::max(centre - outer - 1e-3f, -FLT_MAX), keys);
    size_t low = 0;
    double sum = 0;
    for (size_t i = 0; i < num; i++) {
        const float distance = std::fabs(logit_of(keys[i]) - centre);
        if (distance <= inner) {
            sum += mass[id_of(keys[i])];
            std::swap(keys[low++], keys[i]);
        }
    }
    /* Those above the outer radius (typical_p only) come last in the order by themselves. */
    const auto mass_of = [mass](uint64_t key) { return (double) mass[id_of(key)]; };
    return keep_mass(keys, low, num, sum, target, strict, mass_of, Nearer{centre});
}

/* The lowest logit that is at least `min_p` times as probable as the best one. */
inline float min_p_bound(float best, float min_p) { return best + logf(min_p); }

/* Those that min_p leaves, in their order. */
inline size_t keep_min_p(uint64_t * keys, size_t num, float best, float min_p) {
    const float bound = min_p_bound(best, min_p);
    size_t kept = 0;
    for (size_t i = 0; i < num; i++) {
        keys[kept] = keys[i];
        kept += logit_of(keys[i]) >= bound;
    }
    return std::max<size_t>(kept, 1);
}

/* Draws from a list; `mass` is spare room. */
inline int32_t draw_list(const uint64_t * keys, size_t num, float best, float scale, double uniform, float * mass,
                         float * prob) {
    const double total = list_masses(keys, num, best, scale, mass);
    double run = 0;
    const int32_t i = walk(mass, (int32_t) num, uniform * total, &run);
    *prob = (float) (mass[i] / total);
    return id_of(keys[i]);
}

/* ---- the generator -------------------------------------------------------------- */

/* Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
 * 1, 2, 3" (SC'11): ten rounds turn (key, counter) into four words. There is no state,
 * so a draw depends on its seed and position alone. */
inline void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int32_t round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t) 0xD2511F53u * c0;
        const uint64_t b = (uint64_t) 0xCD9E8D57u * c2;
        c0 = (uint32_t) (b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t) b;
        c2 = (uint32_t) (a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t) a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* Two independent numbers in [0, 1), of 53 bits each, for the draw at `position`. */
inline void uniforms(uint64_t seed, uint64_t position, double out[2]) {
    const uint32_t counter[4] = {(uint32_t) position, (uint32_t) (position >> 32), 0, 0};
    const uint32_t key[2] = {(uint32_t) seed, (uint32_t) (seed >> 32)};
    uint32_t words[4];
    philox(counter, key, words);
    for (int32_t i = 0; i < 2; i++) {
        const uint64_t bits = ((uint64_t) words[2 * i + 1] << 32) | words[2 * i];
        out[i] = (double) (bits >> 11) * 0x1p-53;
    }
}

/* ---- grammars: exceptions become codes ------------------------------------------ */

/* NULL: the text is no grammar, or the native parser threw. */
inline llama_sampler * grammar_parse(const llama_vocab * vocab, const char * gbnf) {
    try {
        return llama_sampler_init_grammar(vocab, gbnf, "root");
    } catch (...) {
        return nullptr;
    }
}

inline llama_sampler * grammar_clone(const llama_sampler * grammar) {
    try {
        return llama_sampler_clone(grammar);
    } catch (...) {
        return nullptr;
    }
}

inline void grammar_free(llama_sampler * grammar) {
    try {
        llama_sampler_free(grammar);
    } catch (...) {
    }
}

/* 0, or -1 when it threw. Never for an end-of-generation token: one that the grammar
 * does not allow makes llama.cpp abort, which would cost the device slot. */
inline int grammar_accept(llama_sampler * grammar, int32_t token) {
    try {
        llama_sampler_accept(grammar, token);
        return 0;
    } catch (...) {
        return -1;
    }
}

/* Leaves only the candidates that the grammar allows next, in their order; their
 * number, or -1 when it threw. `room` holds num entries. */
inline int64_t grammar_filter(llama_sampler * grammar, uint64_t * keys, size_t num, llama_token_data * room) {
    for (size_t i = 0; i < num; i++) {
        room[i] = llama_token_data{id_of(keys[i]), logit_of(keys[i]), 0.0f};
    }
    llama_token_data_array list = {room, num, -1, false};
    try {
        llama_sampler_apply(grammar, &list);
    } catch (...) {
        return -1;
    }
    int64_t kept = 0;
    for (size_t i = 0; i < num; i++) {
        if (room[i].logit > -INFINITY) {
            keys[kept++] = keys[i];
        }
    }
    return kept;
}

/* The piece of a token as llama_token_to_piece gives it; INT32_MIN when it threw. */
inline int32_t piece_of(const llama_vocab * vocab, int32_t token, char * buf, int32_t size) {
    try {
        return llama_token_to_piece(vocab, token, buf, size, 0, false);
    } catch (...) {
        return INT32_MIN;
    }
}

}  // namespace lqs

#endif
