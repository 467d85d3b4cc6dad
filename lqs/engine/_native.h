/* What the worker needs from C and C++: libllama's calls behind codes, the thread's
 * own clock, and the way a thread is parked when ggml gives up.
 *
 * libllama is C++ under a C header. An exception that crossed into Cython's nogil code
 * would make it take the GIL to translate the exception, so every call that may throw
 * goes through one of these and comes back as a number.
 */
#ifndef LQS_ENGINE_NATIVE_H
#define LQS_ENGINE_NATIVE_H

#include <cstdint>
#include <cstring>
#include <csignal>
#include <dlfcn.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

/* A build for coverage takes the GIL for every line, in nogil code too. */
#if defined(CYTHON_TRACE_NOGIL) && CYTHON_TRACE_NOGIL
enum { LQS_IS_TRACED = 1 };
#else
enum { LQS_IS_TRACED = 0 };
#endif

/* Below every code that llama_decode itself uses (2 .. -3 as of the pinned version). */
enum { LQS_RC_THROWN = -100 };

typedef void (*lqs_death_fn)(void * worker, const char * message);

/* The worker whose step runs on this thread; NULL on every other thread. */
static thread_local void * lqs_thread_worker = nullptr;
static lqs_death_fn        lqs_death_handler = nullptr;
static int                 lqs_log_level_min = GGML_LOG_LEVEL_WARN;

static inline int64_t lqs_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t) t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* How often any thread of this process lost its core to another (kernel's count). */
static inline int64_t lqs_preemptions(void) {
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? (int64_t) usage.ru_nivcsw : 0;
}

/* One line to stderr with write(2): no stdio lock, no allocation, no GIL. */
static inline void lqs_say(const char * text) {
    size_t n = strlen(text);
    while (n > 0) {
        ssize_t done = write(2, text, n);
        if (done <= 0) {
            return;
        }
        text += done;
        n -= (size_t) done;
    }
}

/* Replaces the Python callback that importing llama_cpp installs: that one takes the
 * GIL for every line, inside llama_decode too. */
static void lqs_on_log(enum ggml_log_level level, const char * text, void *) {
    static thread_local int last = GGML_LOG_LEVEL_NONE;
    if (level != GGML_LOG_LEVEL_CONT) {
        last = level;
    }
    if (last >= lqs_log_level_min) {
        lqs_say(text);
    }
}

/* Stops this thread for good without using a core. */
static inline void lqs_park(void) {
    for (;;) {
        pause();
    }
}

/* ggml calls this where it would abort the process. It never returns: the state of the
 * context is unknown, but everything else in the process is sound. On one of OpenMP's
 * helper threads `lqs_thread_worker` is NULL: the worker then waits at its barrier for
 * ever and is found by the watchdog. */
static void lqs_on_abort(const char * message) {
    if (lqs_thread_worker != nullptr && lqs_death_handler != nullptr) {
        lqs_death_handler(lqs_thread_worker, message);
    } else {
        lqs_say("lqs: ggml gave up on a thread that is no worker's: ");
        lqs_say(message);
        lqs_say("\n");
    }
    lqs_park();
}

/* What a thread that steps a worker is called; those that ggml starts to compute with inherit it. */
static const char        lqs_compute_name[] = "lqs-compute";
static thread_local bool lqs_has_stepped = false;

/* Whether this thread is inside of a worker's step: the worker's own, or one that helps it. */
static inline bool lqs_computes(void) {
    char name[16] = "";
    if (lqs_thread_worker != nullptr || lqs_has_stepped) {
        return lqs_thread_worker != nullptr;
    }
    prctl(PR_GET_NAME, name);
    return strcmp(name, lqs_compute_name) == 0;
}

static struct sigaction lqs_bus_before;

/* The weights are a mapped file: what was cut off behind our back, or cannot be read, is a SIGBUS in the
 * middle of a step. It ends this device slot like an assert, and the process goes on. The kernel raises it
 * in the thread that reads, never inside of malloc or of a lock of ours. Everywhere else it means what it
 * meant before. */
static void lqs_on_bus(int, siginfo_t *, void *) {
    if (lqs_computes()) {
        lqs_on_abort("a part of the model file cannot be read any more: it was cut short, or its disk failed");
    }
    sigaction(SIGBUS, &lqs_bus_before, nullptr);
}

static inline void lqs_install_bus_handler(void) {
    struct sigaction action = {};
    struct sigaction now = {};
    action.sa_sigaction = lqs_on_bus;
    action.sa_flags = SA_SIGINFO;
    if (sigaction(SIGBUS, nullptr, &now) == 0 && now.sa_sigaction != lqs_on_bus) {
        sigaction(SIGBUS, &action, &lqs_bus_before);
    }
}

static inline void lqs_install_callbacks(lqs_death_fn on_death, int log_level_min) {
    lqs_install_bus_handler();
    lqs_death_handler = on_death;
    lqs_log_level_min = log_level_min;
    llama_log_set(lqs_on_log, nullptr);
    ggml_set_abort_callback(lqs_on_abort);
}

static inline void lqs_bind_worker(void * worker) {
    lqs_thread_worker = worker;
    if (!lqs_has_stepped) {
        lqs_has_stepped = prctl(PR_SET_NAME, lqs_compute_name) == 0;
    }
}

/* ---- drills (chaos.pxi) --------------------------------------------------------- */

static void lqs_assert_on_helper(struct ggml_tensor *, const struct ggml_tensor *, int thread, int, void *) {
    if (thread == 1) {
        GGML_ABORT("a drill's assert on a helper thread");
    }
}

/* Computes a real graph on two threads, of which the second gives up; this one then waits for it at
 * ggml's barrier. Found by name: the backend that has it is no library of ours to link. */
static inline void lqs_abort_on_helper(void) {
    typedef enum ggml_status (*compute_fn)(struct ggml_context *, struct ggml_cgraph *, int);
    compute_fn compute = (compute_fn) dlsym(RTLD_DEFAULT, "ggml_graph_compute_with_ctx");
    struct ggml_init_params params = {1 << 20, nullptr, false};
    struct ggml_context * ctx = compute != nullptr ? ggml_init(params) : nullptr;
    if (ctx == nullptr) {
        lqs_say("lqs: this drill needs ggml's CPU backend\n");
        return;
    }
    struct ggml_tensor * row = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 16);
    struct ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, ggml_map_custom1(ctx, row, lqs_assert_on_helper, 2, nullptr));
    compute(ctx, graph, 2);
    ggml_free(ctx);
}

static inline void lqs_sleep(int64_t ns) {
    struct timespec left = {(time_t) (ns / 1000000000), (long) (ns % 1000000000)};
    while (nanosleep(&left, &left) != 0) {
    }
}

/* llama_decode, or LQS_RC_THROWN. */
static inline int32_t lqs_decode(struct llama_context * ctx, struct llama_batch batch) {
    try {
        return llama_decode(ctx, batch);
    } catch (...) {
        return LQS_RC_THROWN;
    }
}

static inline float * lqs_logits(struct llama_context * ctx, int32_t i) {
    try {
        return llama_get_logits_ith(ctx, i);
    } catch (...) {
        return nullptr;
    }
}

/* 1 removed, 0 refused (a recurrent or sliding-window memory), LQS_RC_THROWN. */
static inline int lqs_seq_rm(struct llama_context * ctx, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    try {
        return llama_memory_seq_rm(llama_get_memory(ctx), seq, p0, p1) ? 1 : 0;
    } catch (...) {
        return LQS_RC_THROWN;
    }
}

static inline int lqs_seq_cp(struct llama_context * ctx, llama_seq_id from, llama_seq_id to, llama_pos p0,
                             llama_pos p1) {
    try {
        llama_memory_seq_cp(llama_get_memory(ctx), from, to, p0, p1);
        return 1;
    } catch (...) {
        return LQS_RC_THROWN;
    }
}

/* Bytes of a sequence's state; 0 where it threw. */
static inline size_t lqs_state_size(struct llama_context * ctx, llama_seq_id seq) {
    try {
        return llama_state_seq_get_size(ctx, seq);
    } catch (...) {
        return 0;
    }
}

/* Bytes written; 0 where it threw. `out` has the room that lqs_state_size told. */
static inline size_t lqs_state_get(struct llama_context * ctx, char * out, llama_seq_id seq) {
    try {
        return llama_state_seq_get_data(ctx, (uint8_t *) out, llama_state_seq_get_size(ctx, seq), seq);
    } catch (...) {
        return 0;
    }
}

static inline bool lqs_state_set(struct llama_context * ctx, const char * saved, size_t size, llama_seq_id seq) {
    try {
        return llama_state_seq_set_data(ctx, (const uint8_t *) saved, size, seq) > 0;
    } catch (...) {
        return false;
    }
}

/* The cells' books only: what they held is written over before it is read. */
static inline void lqs_memory_clear(struct llama_context * ctx) {
    try {
        llama_memory_clear(llama_get_memory(ctx), false);
    } catch (...) {
    }
}

/* More devices than this share no model. */
enum { LQS_SPLIT_MAX = 16 };

/* Load the weights onto the devices of these names, to each its part of the layers; without any they stay in
 * the machine's memory, whatever devices there are. NULL also for a name that libllama does not know. */
static inline struct llama_model * lqs_load_model(const char * path, struct llama_model_params params,
                                                  const char * const * names, const float * parts, int num_names) {
    ggml_backend_dev_t devices[LQS_SPLIT_MAX + 1] = {};
    /* libllama reads as many parts as it knows devices, and keeps a copy. */
    float split[128] = {};
    if (num_names > LQS_SPLIT_MAX || llama_max_devices() > sizeof(split) / sizeof(split[0])) {
        return nullptr;
    }
    for (int i = 0; i < num_names; i++) {
        devices[i] = ggml_backend_dev_by_name(names[i]);
        if (devices[i] == nullptr) {
            return nullptr;
        }
        split[i] = parts[i];
    }
    params.devices      = devices;
    params.tensor_split = split;
    try {
        return llama_model_load_from_file(path, params);
    } catch (...) {
        return nullptr;
    }
}

/* The place on the bus of each GPU that libllama can use, in its order, "" where it does not say; NULL after
 * the last. */
static inline const char * lqs_gpu_place(size_t number) {
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        enum ggml_backend_dev_type type = ggml_backend_dev_type(device);
        if (type != GGML_BACKEND_DEVICE_TYPE_GPU && type != GGML_BACKEND_DEVICE_TYPE_IGPU) {
            continue;
        }
        if (number-- == 0) {
            struct ggml_backend_dev_props props = {};
            ggml_backend_dev_get_props(device, &props);
            return props.device_id != nullptr ? props.device_id : "";
        }
    }
    return nullptr;
}

static inline struct llama_context * lqs_open_context(struct llama_model * model, struct llama_context_params params) {
    try {
        return llama_init_from_model(model, params);
    } catch (...) {
        return nullptr;
    }
}

/* llama_tokenize, or INT32_MIN where it threw or overflowed. */
static inline int32_t lqs_tokenize(const struct llama_vocab * vocab, const char * text, int32_t n, llama_token * out,
                                   int32_t out_max, bool add_special, bool parse_special) {
    try {
        return llama_tokenize(vocab, text, n, out, out_max, add_special, parse_special);
    } catch (...) {
        return INT32_MIN;
    }
}

static inline int32_t lqs_detokenize(const struct llama_vocab * vocab, const llama_token * tokens, int32_t n, char * out,
                                     int32_t out_max, bool special) {
    try {
        return llama_detokenize(vocab, tokens, n, out, out_max, false, special);
    } catch (...) {
        return INT32_MIN;
    }
}

/* Fills `params` from what the worker decides; the rest stays as llama.cpp has it. */
static inline struct llama_context_params lqs_context_params(uint32_t n_ctx, uint32_t n_batch, uint32_t n_ubatch,
                                                             uint32_t n_seq, int32_t threads, bool unified, int flash) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx           = n_ctx;
    params.n_batch         = n_batch;
    params.n_ubatch        = n_ubatch;
    params.n_seq_max       = n_seq;
    /* It plans for one output of each sequence id, whether the sequence runs or is cached. */
    params.n_outputs_max   = n_seq;
    params.n_threads       = threads;
    params.n_threads_batch = threads;
    params.kv_unified      = unified;
    params.flash_attn_type = (enum llama_flash_attn_type) flash;
    params.swa_full        = false;
    params.no_perf         = true;
    return params;
}

#endif
