/* Rows of a strided tensor to and from float32 scratch.
 *
 * Everything here works on rows padded with zeros to a whole number of vectors, so that no loop has a tail.
 * LANES is the number of float32 in one register of the target; the build compiles this once per target. */
#ifndef PENSTOCK_ROWS_H
#define PENSTOCK_ROWS_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#include <malloc.h>
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define INLINE static inline __attribute__((always_inline))
#define JOIN(a, b) a##b
#define NAME(a, b) JOIN(a, b) /* of a function that the build compiles once per target */

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4)));

enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT64 };

/* A tensor of up to four axes; a missing axis has stride 0. data is NULL for an absent argument. */
typedef struct {
    void *data;
    int64_t dtype;
    int64_t stride[4]; /* in elements */
} tensor;

/* Memory aligned to cache lines: a vector that straddles two costs twice. */
static inline float *scratch_of(int64_t floats) {
    size_t bytes = ((size_t)floats * 4 + 63) / 64 * 64;
#ifdef _WIN32
    return _aligned_malloc(bytes, 64);
#else
    return aligned_alloc(64, bytes);
#endif
}

static inline void free_scratch(float *scratch) {
#ifdef _WIN32
    _aligned_free(scratch);
#else
    free(scratch);
#endif
}
#pragma GCC poison free /* free_scratch: on Windows, aligned memory has a function of its own */

INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE vec splat(float x) { return x - (vec){}; }
INLINE ivec isplat(int32_t x) { return x - (ivec){}; }
INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec x) { *(vec *)p = x; }
INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }

INLINE float sum_lanes(vec x) {
#pragma clang fp reassociate(on)
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

INLINE float bfloat16_to_float(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE uint16_t float_to_bfloat16(float x) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE int64_t offset(const tensor *x, int64_t a, int64_t b, int64_t c) {
    return a * x->stride[0] + b * x->stride[1] + c * x->stride[2];
}

/* to[0:n] = from[0:n]. Rows are short, and a call of memcpy, which compilers make of such a loop without the barrier, takes longer. */
INLINE void copy_row(float *to, const float *from, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        store(to + i, load(from + i));
        __asm__ volatile("" ::: "memory");
    }
    for (; i < n; i++) {
        to[i] = from[i];
        __asm__ volatile("" ::: "memory");
    }
}

/* to[0:n] = x[at + step * i], to[n:padded(n)] = 0 */
static void load_row(float *to, const tensor *x, int64_t at, int64_t step, int64_t n) {
    switch (x->dtype) {
    case FLOAT32: {
        const float *p = (const float *)x->data + at;
        if (step == 1) copy_row(to, p, n);
        else for (int64_t i = 0; i < n; i++) to[i] = p[i * step];
        break;
    }
    case BFLOAT16: {
        const uint16_t *p = (const uint16_t *)x->data + at;
        if (step == 1) for (int64_t i = 0; i < n; i++) to[i] = bfloat16_to_float(p[i]);
        else for (int64_t i = 0; i < n; i++) to[i] = bfloat16_to_float(p[i * step]);
        break;
    }
    case FLOAT16: {
        const _Float16 *p = (const _Float16 *)x->data + at;
        if (step == 1) for (int64_t i = 0; i < n; i++) to[i] = (float)p[i];
        else for (int64_t i = 0; i < n; i++) to[i] = (float)p[i * step];
        break;
    }
    default: {
        const double *p = (const double *)x->data + at;
        for (int64_t i = 0; i < n; i++) to[i] = (float)p[i * step];
    }
    }
    for (int64_t i = n; i < padded(n); i++) to[i] = 0;
}

/* x[at + step * i] = from[i] for i in 0:n */
__attribute__((unused)) static void store_row(const tensor *x, int64_t at, int64_t step, const float *from, int64_t n) {
    switch (x->dtype) {
    case FLOAT32: {
        float *p = (float *)x->data + at;
        if (step == 1) copy_row(p, from, n);
        else for (int64_t i = 0; i < n; i++) p[i * step] = from[i];
        break;
    }
    case BFLOAT16: {
        uint16_t *p = (uint16_t *)x->data + at;
        if (step == 1) for (int64_t i = 0; i < n; i++) p[i] = float_to_bfloat16(from[i]);
        else for (int64_t i = 0; i < n; i++) p[i * step] = float_to_bfloat16(from[i]);
        break;
    }
    case FLOAT16: {
        _Float16 *p = (_Float16 *)x->data + at;
        if (step == 1) for (int64_t i = 0; i < n; i++) p[i] = (_Float16)from[i];
        else for (int64_t i = 0; i < n; i++) p[i * step] = (_Float16)from[i];
        break;
    }
    default: {
        double *p = (double *)x->data + at;
        for (int64_t i = 0; i < n; i++) p[i * step] = from[i];
    }
    }
}

/* The same of n elements in a row, from element `at` on. */
static inline void load_at(float *to, void *x, int64_t dtype, int64_t at, int64_t n) {
    tensor row = {x, dtype, {0}};
    load_row(to, &row, at, 1, n);
}

static inline void store_at(void *x, int64_t dtype, int64_t at, const float *from, int64_t n) {
    tensor row = {x, dtype, {0}};
    store_row(&row, at, 1, from, n);
}

/* The sum of products of n elements, padded with zeros. */
__attribute__((unused)) static float dot(const float *a, const float *b, int64_t n) {
    vec total = {};
    for (int64_t i = 0; i < n; i += LANES) total += load(a + i) * load(b + i);
    return sum_lanes(total);
}

#endif
