/* Matrix products with few rows: y = x W^T. Reading W takes most of the time, so W is read once, whatever the number of rows.
 *
 * An output is LANES partial sums over K, each in the order of K, then added in pairs. So its bits depend neither on the number of rows
 * nor on the number of threads.
 *
 * A unit of work is a few rows of W. Threads take units from a shared counter.
 *
 * Compiled once per target, with LANES floats per register, REGISTERS registers, and SUFFIX appended to names. */
#include "rows.h"

#define ROWS 4                  /* rows of x in a tile */
#define OUTPUTS (REGISTERS / 5) /* rows of W in a tile: ROWS * OUTPUTS sums, OUTPUTS vectors of W and one of x are in registers */
#define UNIT 32768              /* weights in a unit of work */
#define UNROLL _Pragma("clang loop unroll(full)")

typedef uint16_t bfloat16s __attribute__((vector_size(LANES * 2), aligned(2)));
typedef _Float16 float16s __attribute__((vector_size(LANES * 2), aligned(2)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4)));

typedef struct {
    void *x, *weight, *y;      /* [M,K], [N,K] and [M,N] of one dtype, the last axis contiguous; y is contiguous */
    int64_t M, N, K, x_row, weight_row; /* elements from row to row */
    int64_t dtype;
    int64_t threads, next, out_of_memory; /* as in a problem */
} product;

INLINE vec load_weights(const char *p, int dtype) {
    if (dtype == FLOAT32) return load((const float *)p);
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

typedef vec sums[OUTPUTS][ROWS];

/* Adds the products of LANES weights at w, of each output, with those of each token at x. */
INLINE void multiply(sums sum, const char *w, int64_t row, const float *x, int64_t Kp, int rows, int outputs, int dtype) {
    vec weights[OUTPUTS];
    UNROLL for (int i = 0; i < outputs; i++) weights[i] = load_weights(w + i * row, dtype);
    UNROLL for (int j = 0; j < rows; j++) {
        vec token = load(x + j * Kp);
        UNROLL for (int i = 0; i < outputs; i++) sum[i][j] += weights[i] * token;
    }
}

/* Outputs n to n + outputs of tokens m to m + rows. Rows of x are float32, padded with zeros to whole vectors. The first tokens prefetch
 * the next rows of W. */
INLINE void multiply_tile(const product *p, const float *x, int64_t m, int64_t n, int rows, int outputs, int dtype) {
    int64_t K = p->K, Kp = padded(K), whole = K / LANES * LANES, size = dtype == FLOAT32 ? 4 : 2, row = p->weight_row * size;
    const char *w = (const char *)p->weight + n * row;
    sums sum = {};
    x += m * Kp;
    for (int64_t k = 0; k < whole; k += LANES) {
        if (m == 0 && k * size % 64 == 0)
            UNROLL for (int i = 0; i < outputs; i++) __builtin_prefetch(w + (outputs + i) * row + k * size);
        multiply(sum, w + k * size, row, x + k, Kp, rows, outputs, dtype);
    }
    if (whole < K) {
        char rest[OUTPUTS][LANES * 4] = {};
        for (int i = 0; i < outputs; i++) memcpy(rest[i], w + i * row + whole * size, (size_t)((K - whole) * size));
        multiply(sum, rest[0], LANES * 4, x + whole, Kp, rows, outputs, dtype);
    }
    UNROLL for (int j = 0; j < rows; j++)
        UNROLL for (int i = 0; i < outputs; i++) store_output(p->y, (m + j) * p->N + n + i, sum_in_pairs(sum[i][j]), dtype);
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
EXPORT void NAME(penstock_linear_, SUFFIX)(product *p) {
    int64_t Kp = padded(p->K), outputs = UNIT / p->K / OUTPUTS * OUTPUTS;
    if (outputs < OUTPUTS) outputs = OUTPUTS;
    float *x = scratch_of(p->M * Kp);
    if (!x) { p->out_of_memory = 1; return; }
    tensor given = {p->x, p->dtype, {p->x_row, 1}};
    for (int64_t m = 0; m < p->M; m++) load_row(x + m * Kp, &given, m * p->x_row, 1, p->K);
    for (;;) {
        int64_t from = __atomic_fetch_add(&p->next, outputs, __ATOMIC_RELAXED), to = from + outputs < p->N ? from + outputs : p->N;
        if (from >= p->N) break;
        switch (p->dtype) {
        case FLOAT32: multiply_unit(p, x, from, to, FLOAT32); break;
        case BFLOAT16: multiply_unit(p, x, from, to, BFLOAT16); break;
        default: multiply_unit(p, x, from, to, FLOAT16);
        }
    }
    free_scratch(x);
}
