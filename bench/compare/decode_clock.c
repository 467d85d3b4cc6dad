/*
 * Counts the CPU time that a server spends inside llama_decode, for any server that calls it.
 *
 * Loaded with LD_PRELOAD, this llama_decode stands before libllama's, passes the call on and adds
 * its thread's CPU time to a file that DECODE_CLOCK_FILE names: three 64-bit numbers, nanoseconds,
 * calls, and the id of the calling thread. The bench reads the file while the server runs.
 * llama_process is the same call with another kind of batch. llama_synchronize counts too: a
 * backend may do there what it has put off.
 * Helper threads of a decode are not counted, so the numbers hold for one thread only.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct totals {
    uint64_t decode_ns;
    uint64_t num_calls;
    uint64_t thread_id;
};

/* llama_batch as llama.h has it; it is passed by value, so its size matters. */
struct batch {
    int32_t n_tokens;
    void *token, *embd, *pos, *n_seq_id, *seq_id, *logits;
};

typedef int32_t (*decode_fn)(void *ctx, struct batch batch);
typedef int32_t (*process_fn)(void *ctx, int type, void *batch);
typedef void (*synchronize_fn)(void *ctx);

static struct totals *totals;
static decode_fn next_decode;
static process_fn next_process;
static synchronize_fn next_synchronize;

/* A library that a Python module pulled in is not in the global scope: look into it by name. */
static void *find_next(const char *name) {
    static const char *const libraries[] = {"libllama.so.0", "libllama.so"};
    void *symbol = dlsym(RTLD_NEXT, name);
    for (size_t i = 0; !symbol && i < sizeof libraries / sizeof *libraries; i++) {
        void *library = dlopen(libraries[i], RTLD_LAZY | RTLD_NOLOAD);
        if (library) {
            symbol = dlsym(library, name);
        }
    }
    return symbol;
}

__attribute__((constructor)) static void map_totals(void) {
    const char *path = getenv("DECODE_CLOCK_FILE");
    int fd = path ? open(path, O_RDWR) : -1;
    if (fd < 0) {
        return;
    }
    void *memory = mmap(NULL, sizeof *totals, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    totals = memory == MAP_FAILED ? NULL : memory;
}

static uint64_t thread_cpu_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void count(uint64_t start_ns, uint64_t num_calls) {
    if (totals) {
        totals->decode_ns += thread_cpu_ns() - start_ns;
        totals->num_calls += num_calls;
        totals->thread_id = (uint64_t)syscall(SYS_gettid);
    }
}

int32_t llama_decode(void *ctx, struct batch batch) {
    if (!next_decode) {
        next_decode = (decode_fn)find_next("llama_decode");
    }
    uint64_t start_ns = thread_cpu_ns();
    int32_t rc = next_decode(ctx, batch);
    count(start_ns, 1);
    return rc;
}

int32_t llama_process(void *ctx, int type, void *batch) {
    if (!next_process) {
        next_process = (process_fn)find_next("llama_process");
    }
    uint64_t start_ns = thread_cpu_ns();
    int32_t rc = next_process(ctx, type, batch);
    count(start_ns, 1);
    return rc;
}

void llama_synchronize(void *ctx) {
    if (!next_synchronize) {
        next_synchronize = (synchronize_fn)find_next("llama_synchronize");
    }
    uint64_t start_ns = thread_cpu_ns();
    next_synchronize(ctx);
    count(start_ns, 0);
}
