/* Log decays: their exponentials, and pending sums of them, which are not yet multiplied into the state.
 *
 * With pending decays a row of the state is exp(sum) times what is stored: reads are multiplied by exp(sum), writes by exp(-sum), and
 * the row itself by exp(sum) once the sum is below -0.5. So weak decays round the state once per half a nat, not at every token:
 * multiplied by 1 - 3e-8 token by token, a float32 state would round back to itself each time. Strong decays are applied at once. */
#ifndef PENSTOCK_DECAY_H
#define PENSTOCK_DECAY_H

#include "rows.h"

/* exp(x) = power (1 + rest) for x <= 0, by x = n ln2 + r, |r| <= ln2 / 2, and the Taylor polynomial of expm1(r) to degree 8
 * (relative error < 1e-8). */
typedef struct { vec power, rest; } exponential;

INLINE exponential exponential_of(vec x) {
    ivec gone = x < splat(-87.336545f); /* below the smallest normal number: 0, also for -inf */
    x = choose(gone, splat(0), x);
    ivec exponent = __builtin_convertvector(x * splat(1.44269504f) - splat(0.5f), ivec); /* x <= 0: to nearest */
    vec whole = __builtin_convertvector(exponent, vec);
    vec r = x - whole * splat(0.693359375f); /* ln2 in two pieces, the first exact times a small integer */
    r = r - whole * splat(-2.12194440e-4f);
    vec p = splat(1.0f / 40320);
    p = p * r + splat(1.0f / 5040);
    p = p * r + splat(1.0f / 720);
    p = p * r + splat(1.0f / 120);
    p = p * r + splat(1.0f / 24);
    p = p * r + splat(1.0f / 6);
    p = p * r + splat(0.5f);
    p = p * r * r + r;
    vec power = (vec)((exponent + isplat(127)) << 23);
    return (exponential){choose(gone, splat(0), power), choose(gone, splat(0), p)};
}
INLINE vec exp_of(exponential x) { return x.power * (splat(1) + x.rest); }
INLINE vec expm1_of(exponential x) { return x.power * x.rest + (x.power - splat(1)); }

static inline void exp_row(float *to, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store(to + i, exp_of(exponential_of(load(x + i))));
}

/* The pending sums of K channels, their rounding errors, and the factors of reads, exp(sum). */
typedef struct { float *sum, *rest, *read; } pending;

/* The result of an addition: the sum, whether it stays pending, its exponential, and the factor of later writes, exp(-sum) or 1. */
typedef struct { vec sum; ivec stays; exponential e; vec write; } addition;

/* Add log decays g to the sums of channels d and on. Sums below `limit` are to be applied, and start again at 0. */
INLINE addition add_decay(pending p, int64_t d, vec g, float limit) {
    vec addend = g + load(p.rest + d), before = load(p.sum + d), sum = before + addend;
    vec rest = addend - (sum - before);
    ivec stays = sum >= splat(limit);
    exponential e = exponential_of(sum);
    vec read = choose(stays, exp_of(e), splat(1));
    store(p.sum + d, choose(stays, sum, splat(0)));
    store(p.rest + d, choose(stays, rest, splat(0)));
    store(p.read + d, read);
    return (addition){sum, stays, e, splat(1) / read};
}

/* A limit with which all sums are applied, for the end of a pass. */
INLINE float limit_of(int leaves) { return leaves ? __builtin_inff() : -0.5f; }

/* Sums in 3 Kp floats of memory. */
INLINE pending pending_at(float *memory, int64_t Kp) { return (pending){memory, memory + Kp, memory + 2 * Kp}; }

static inline void nothing_pending(pending p, int64_t Kp) {
    for (int64_t d = 0; d < Kp; d++) p.sum[d] = p.rest[d] = 0, p.read[d] = 1;
}

#endif
