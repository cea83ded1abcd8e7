/* One product of a call: its operands, LANES of its weights, what is done to its input and to its results. */
#ifndef PENSTOCK_PRODUCT_H
#define PENSTOCK_PRODUCT_H

#include "activations.h"

#define ROWS 4                  /* rows of x in a tile */
#define OUTPUTS (REGISTERS / 5) /* outputs in a tile: ROWS * OUTPUTS sums, OUTPUTS vectors of W and one of x are in registers */
#define WIDE (2 * OUTPUTS)      /* outputs in a tile of one row: more loads are in flight */
#define UNIT 32768              /* weights in a unit of work */
#define MOST 256                /* outputs in a unit of work */
#define UNROLL _Pragma("clang loop unroll(full)")

typedef uint16_t bfloat16s __attribute__((vector_size(LANES * 2), aligned(2)));
typedef _Float16 float16s __attribute__((vector_size(LANES * 2), aligned(2)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4)));
typedef int8_t int8s __attribute__((vector_size(LANES), aligned(1)));
typedef uint8_t uint8s __attribute__((vector_size(LANES), aligned(1)));

enum { INT8 = FLOAT64 + 1, INT4 };            /* dtypes of weights only */
enum { AS_IT_IS, TANH, SIGMOID };             /* of the input, `before` */
enum { RELU_SQUARED = 1, GATED, SHIFTED };    /* of the results, `after` */

typedef struct {
    void *x, *weight, *y;      /* [M,K], [N,K] (by_columns: [K,N]) and [M,N], the last axis contiguous; y is contiguous */
    void *scales;              /* INT8: float32 [N]. INT4: bfloat16 [N,ceil(K / GROUP)]. Else unused */
    void *first, *second, *mu; /* GATED: y sigmoid(first). SHIFTED: first + (second - first) (mu + y). [M,N], contiguous; mu [N] */
    int64_t M, N, K, x_row, weight_row; /* elements from row to row; of INT4 bytes */
    int64_t dtype, weight_dtype, mu_dtype, by_columns, before, after;
} product;

INLINE int64_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : dtype == INT8 || dtype == INT4 ? 1 : 2; }

/* LANES weights of a dtype other than INT4. */
INLINE vec load_weights(const char *p, int dtype) {
    if (dtype == FLOAT32) return load((const float *)p);
    if (dtype == INT8) return __builtin_convertvector(*(const int8s *)p, vec);
    if (dtype == FLOAT16) return __builtin_convertvector(*(const float16s *)p, vec);
    return (vec)(__builtin_convertvector(*(const bfloat16s *)p, bits) << 16);
}

/* The input in float32, rows of Kp elements, padded with zeros. */
static void load_input(const product *p, float *x, int64_t Kp) {
    tensor given = {p->x, p->dtype, {p->x_row, 1}};
    for (int64_t m = 0; m < p->M; m++, x += Kp) {
        load_row(x, &given, m * p->x_row, 1, p->K);
        for (int64_t k = padded(p->K); k < Kp; k++) x[k] = 0;
        if (p->before == TANH) for (int64_t k = 0; k < p->K; k += LANES) store(x + k, tanh_of(load(x + k)));
        if (p->before == SIGMOID) for (int64_t k = 0; k < p->K; k += LANES) store(x + k, sigmoid(load(x + k)));
    }
}

/* Stores sums of row m, of at most MOST outputs n and on. */
static void store_outputs(const product *p, float *sum, int64_t m, int64_t n, int64_t count) {
    float first[MOST + LANES], second[MOST + LANES], mu[MOST + LANES];
    int64_t at = m * p->N + n;
    if (p->weight_dtype == INT8) for (int64_t i = 0; i < count; i++) sum[i] *= ((const float *)p->scales)[n + i];
    if (p->after >= GATED) load_at(first, p->first, p->dtype, at, count);
    if (p->after == SHIFTED) load_at(second, p->second, p->dtype, at, count), load_at(mu, p->mu, p->mu_dtype, n, count);
    for (int64_t i = 0; p->after && i < count; i += LANES) {
        vec y = load(sum + i), a = load(first + i);
        if (p->after == RELU_SQUARED) y = choose(y < splat(0), splat(0), y), y *= y; /* NaN stays NaN */
        else if (p->after == GATED) y *= sigmoid(a);
        else y = a + (load(second + i) - a) * (load(mu + i) + y);
        store(sum + i, y);
    }
    store_at(p->y, p->dtype, at, sum, count);
}

#endif
