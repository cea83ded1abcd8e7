/* Matrix products with few rows: y = x W^T. Reading W takes most of the time, so W is read once, whatever the number of rows.
 *
 * An output is LANES partial sums over K, each in the order of K, then added in pairs. So its bits depend neither on the number of rows
 * nor on the number of threads.
 *
 * W has the dtype of x, or codes of 8 or 4 bits with scales (quantization.py), which are converted to float32 as they are read.
 *
 * A unit of work is a few rows of W. Threads take units from a shared counter.
 *
 * Compiled once per target, with LANES floats per register, REGISTERS registers, and SUFFIX appended to names. */
#include "rows.h"

#define ROWS 4                  /* rows of x in a tile */
#define OUTPUTS (REGISTERS / 5) /* rows of W in a tile: ROWS * OUTPUTS sums, OUTPUTS vectors of W and one of x are in registers */
#define UNIT 32768              /* weights in a unit of work */
#define GROUP 64                /* columns of a scale of 4 bits */
#define HALF (GROUP / 2)        /* bytes of a group: byte j has columns j and j + HALF */
#define UNROLL _Pragma("clang loop unroll(full)")

typedef uint16_t bfloat16s __attribute__((vector_size(LANES * 2), aligned(2)));
typedef _Float16 float16s __attribute__((vector_size(LANES * 2), aligned(2)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4)));
typedef int8_t int8s __attribute__((vector_size(LANES), aligned(1)));
typedef uint8_t uint8s __attribute__((vector_size(LANES), aligned(1)));

enum { INT8 = FLOAT64 + 1, INT4 }; /* dtypes of weights only */

typedef struct {
    void *x, *weight, *y;      /* [M,K], [N,K] and [M,N], the last axis contiguous; y is contiguous */
    void *scales;              /* INT8: float32 [N]. INT4: bfloat16 [N,ceil(K / GROUP)]. Else unused */
    int64_t M, N, K, x_row, weight_row; /* elements from row to row; of INT4 bytes */
    int64_t dtype, weight_dtype;
    int64_t threads, next, out_of_memory; /* as in a problem */
} product;

INLINE int64_t size_of(int dtype) { return dtype == FLOAT32 ? 4 : dtype == INT8 || dtype == INT4 ? 1 : 2; }

/* LANES weights of a dtype other than INT4. */
INLINE vec load_weights(const char *p, int dtype) {
    if (dtype == FLOAT32) return load((const float *)p);
    if (dtype == INT8) return __builtin_convertvector(*(const int8s *)p, vec);
    if (dtype == FLOAT16) return __builtin_convertvector(*(const float16s *)p, vec);
    return (vec)(__builtin_convertvector(*(const bfloat16s *)p, bits) << 16);
}

INLINE void store_output(void *y, int64_t at, float x, int dtype) {
    if (dtype == FLOAT32) ((float *)y)[at] = x;
    else if (dtype == FLOAT16) ((_Float16 *)y)[at] = (_Float16)x;
    else ((uint16_t *)y)[at] = float_to_bfloat16(x);
}

INLINE float sum_in_pairs(vec x) {
    float part[LANES];
    memcpy(part, &x, sizeof part);
    UNROLL for (int half = LANES / 2; half; half /= 2)
        UNROLL for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

/* LANES codes of INT4 as weights. */
INLINE vec of_nibbles(uint8s codes, vec scale) { return (__builtin_convertvector(codes, vec) - 8) * scale; }

/* The length of a row of x in float32: whole vectors, and of INT4 whole groups. */
INLINE int64_t length(int64_t K, int dtype) { return dtype == INT4 ? (K + GROUP - 1) / GROUP * GROUP : padded(K); }

typedef vec sums[OUTPUTS][ROWS];

/* Adds the products of LANES weights of each output with those of each token at x. */
INLINE void multiply(sums sum, const vec *weights, const float *x, int64_t Kp, int rows, int outputs) {
    UNROLL for (int j = 0; j < rows; j++) {
        vec token = load(x + j * Kp);
        UNROLL for (int i = 0; i < outputs; i++) sum[i][j] += weights[i] * token;
    }
}

/* Adds the products of outputs n to n + outputs, of INT4, with the tokens at x. */
INLINE void multiply_groups(sums sum, const product *p, const float *x, int64_t n, int rows, int outputs, int prefetch) {
    int64_t Kp = length(p->K, INT4), groups = Kp / GROUP, row = p->weight_row;
    const uint8_t *w = (const uint8_t *)p->weight + n * row;
    const uint16_t *scales = (const uint16_t *)p->scales + n * groups;
    for (int64_t g = 0; g < groups; g++) {
        vec scale[OUTPUTS], low[OUTPUTS], high[OUTPUTS];
        UNROLL for (int i = 0; i < outputs; i++) scale[i] = splat(bfloat16_to_float(scales[i * groups + g]));
        if (prefetch && g % 2 == 0) UNROLL for (int i = 0; i < outputs; i++) __builtin_prefetch(w + (outputs + i) * row + g * HALF);
        UNROLL for (int j = 0; j < HALF; j += LANES) {
            UNROLL for (int i = 0; i < outputs; i++) {
                uint8s bytes = *(const uint8s *)(w + i * row + g * HALF + j);
                low[i] = of_nibbles(bytes & 15, scale[i]), high[i] = of_nibbles(bytes >> 4, scale[i]);
            }
            multiply(sum, low, x + g * GROUP + j, Kp, rows, outputs);
            multiply(sum, high, x + g * GROUP + HALF + j, Kp, rows, outputs);
        }
    }
}

/* Adds the products of outputs n to n + outputs, of another dtype than INT4, with the tokens at x. */
INLINE void multiply_vectors(sums sum, const product *p, const float *x, int64_t n, int rows, int outputs, int dtype, int prefetch) {
    int64_t K = p->K, Kp = padded(K), whole = K / LANES * LANES, size = size_of(dtype), row = p->weight_row * size;
    const char *w = (const char *)p->weight + n * row;
    vec weights[OUTPUTS];
    for (int64_t k = 0; k < whole; k += LANES) {
        if (prefetch && k * size % 64 == 0)
            UNROLL for (int i = 0; i < outputs; i++) __builtin_prefetch(w + (outputs + i) * row + k * size);
        UNROLL for (int i = 0; i < outputs; i++) weights[i] = load_weights(w + i * row + k * size, dtype);
        multiply(sum, weights, x + k, Kp, rows, outputs);
    }
    if (whole < K) {
        char rest[OUTPUTS][LANES * 4] = {};
        for (int i = 0; i < outputs; i++) memcpy(rest[i], w + i * row + whole * size, (size_t)((K - whole) * size));
        UNROLL for (int i = 0; i < outputs; i++) weights[i] = load_weights(rest[i], dtype);
        multiply(sum, weights, x + whole, Kp, rows, outputs);
    }
}

/* Outputs n to n + outputs of tokens m to m + rows. Rows of x are float32, padded with zeros. The first tokens prefetch the next rows of W. */
INLINE void multiply_tile(const product *p, const float *x, int64_t m, int64_t n, int rows, int outputs, int dtype) {
    sums sum = {};
    x += m * length(p->K, dtype);
    if (dtype == INT4) multiply_groups(sum, p, x, n, rows, outputs, m == 0);
    else multiply_vectors(sum, p, x, n, rows, outputs, dtype, m == 0);
    UNROLL for (int j = 0; j < rows; j++)
        UNROLL for (int i = 0; i < outputs; i++) {
            float y = sum_in_pairs(sum[i][j]);
            if (dtype == INT8) y *= ((const float *)p->scales)[n + i];
            store_output(p->y, (m + j) * p->N + n + i, y, dtype < FLOAT64 ? dtype : (int)p->dtype);
        }
}

INLINE void multiply_rows(const product *p, const float *x, int64_t n, int outputs, int dtype) {
    int64_t m = 0;
    for (; m + ROWS <= p->M; m += ROWS) multiply_tile(p, x, m, n, ROWS, outputs, dtype);
    switch (p->M - m) {
    case 3: multiply_tile(p, x, m, n, 3, outputs, dtype); break;
    case 2: multiply_tile(p, x, m, n, 2, outputs, dtype); break;
    case 1: multiply_tile(p, x, m, n, 1, outputs, dtype); break;
    }
}

INLINE void multiply_unit(const product *p, const float *x, int64_t from, int64_t to, int dtype) {
    int64_t n = from;
    for (; n + OUTPUTS <= to; n += OUTPUTS) multiply_rows(p, x, n, OUTPUTS, dtype);
    for (; n < to; n++) multiply_rows(p, x, n, 1, dtype);
}

/* Every thread of a team calls this; each takes units until none is left. */
EXPORT void NAME(penstock_product_, SUFFIX)(product *p) {
    int64_t Kp = length(p->K, (int)p->weight_dtype), outputs = UNIT / p->K / OUTPUTS * OUTPUTS;
    if (outputs < OUTPUTS) outputs = OUTPUTS;
    float *x = scratch_of(p->M * Kp);
    if (!x) { p->out_of_memory = 1; return; }
    tensor given = {p->x, p->dtype, {p->x_row, 1}};
    for (int64_t m = 0; m < p->M; m++) {
        load_row(x + m * Kp, &given, m * p->x_row, 1, p->K);
        for (int64_t k = padded(p->K); k < Kp; k++) x[m * Kp + k] = 0;
    }
    for (;;) {
        int64_t from = __atomic_fetch_add(&p->next, outputs, __ATOMIC_RELAXED), to = from + outputs < p->N ? from + outputs : p->N;
        if (from >= p->N) break;
        switch (p->weight_dtype) {
        case FLOAT32: multiply_unit(p, x, from, to, FLOAT32); break;
        case INT8: multiply_unit(p, x, from, to, INT8); break;
        case INT4: multiply_unit(p, x, from, to, INT4); break;
        case BFLOAT16: multiply_unit(p, x, from, to, BFLOAT16); break;
        default: multiply_unit(p, x, from, to, FLOAT16);
        }
    }
    free_scratch(x);
}
