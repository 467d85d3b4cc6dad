/* Memory orders, named in one place.
 *
 * Everything that two threads touch goes through one of these; a plain access to such a
 * word is a mistake. They are GCC builtins on plain integers, so that the same structs
 * can be read from C (the core) and from C++ (the engine).
 *
 * Names: no suffix is 64 bits, 32 and 8 are those widths. An exchange is always
 * acquire and release: it is only used where both sides exchange the same word, and
 * each must see what the other did before its own exchange.
 */
#ifndef LQS_ATOMICS_H
#define LQS_ATOMICS_H

#include <assert.h>
#include <stdint.h>

/* No index: the end of a list, no place in a heap. */
#define LQS_NOWHERE UINT32_MAX

/* Holds in every build; costs something only in a debug one. */
#ifdef LQS_DEBUG
#define LQS_IS_DEBUG 1
#define lqs_assert(condition) assert(condition)
#else
#define LQS_IS_DEBUG 0
#define lqs_assert(condition) ((void)(condition))
#endif

static inline uint64_t load_relaxed(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static inline uint64_t load_acquire(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void store_relaxed(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

static inline void store_release(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline uint64_t add_relaxed(uint64_t *word, uint64_t value)
{
    return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
}

/* Move *word from *expected to desired; on failure *expected holds what was found. */
static inline int claim_relaxed(uint64_t *word, uint64_t *expected, uint64_t desired)
{
    return __atomic_compare_exchange_n(word, expected, desired, 1, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
}

static inline uint32_t load_relaxed32(const uint32_t *word)
{
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static inline uint32_t load_acquire32(const uint32_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void store_relaxed32(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

static inline void store_release32(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline uint32_t exchange32(uint32_t *word, uint32_t value)
{
    return __atomic_exchange_n(word, value, __ATOMIC_ACQ_REL);
}

/* For a counter with one writer and any number of readers: no locked instruction. */
static inline void bump(uint64_t *counter, int64_t by)
{
    __atomic_store_n(counter, *counter + (uint64_t)by, __ATOMIC_RELAXED);
}

/* Only a hint: the line will be wanted soon. The empty asm keeps GCC from taking a caller
 * that does nothing else for one without effects, and dropping it. */
static inline void prefetch(const void *address)
{
    __builtin_prefetch(address);
    __asm__ volatile("");
}

#endif
