/* 128-bit integers, for sums that must be exact where 64 bits cannot hold them.
 *
 * Cython knows no such type; it is told that this one is a `long long`, which is enough for +, -
 * and comparisons. What it would compute in 64 bits on the way is done here.
 */
#ifndef LQS_WIDE_H
#define LQS_WIDE_H

#include <stdint.h>

typedef __int128 lqs_wide;

static inline lqs_wide wide_product(int64_t a, int64_t b)
{
    return (lqs_wide)a * b;
}

/* a / b for b above 0, rounded up; what does not fit is the largest that does. */
static inline int64_t wide_quotient_up(lqs_wide a, int64_t b)
{
    lqs_wide quotient = a / b + (a % b > 0);
    return quotient > INT64_MAX ? INT64_MAX : (int64_t)quotient;
}

#endif
