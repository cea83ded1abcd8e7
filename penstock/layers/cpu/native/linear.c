/* Matrix products with few rows: y = x W^T, several in one call. Reading W takes most of the time, so W is read once, whatever the number of
 * rows.
 *
 * An output is LANES partial sums over K, each in the order of K, then added in pairs; of a W stored by columns (columns.h) it is one sum in the
 * order of K. So its bits depend neither on the number of rows nor on the number of threads.
 *
 * W has the dtype of x, or codes of 8 or 4 bits with scales (quantization.py), which are converted to float32 as they are read.
 *
 * A unit of work is a few rows, or columns, of one W. Threads take units from a shared counter.
 *
 * Compiled once per target, with LANES floats per register, REGISTERS registers, and SUFFIX appended to names. */
#include "product.h"
#include "columns.h"

#define GROUP 64       /* columns of a scale of 4 bits */
#define HALF (GROUP / 2) /* bytes of a group: byte j has columns j and j + HALF */
#define SHORT 2048     /* bytes of a row of W: rows up to this are prefetched in the order of addresses */

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

typedef vec sums[WIDE][ROWS];

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
        vec scale[WIDE], low[WIDE], high[WIDE];
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
    const char *w = (const char *)p->weight + n * row, *next = w + outputs * row;
    int64_t step = row <= SHORT ? 64 : row, along = row <= SHORT ? outputs * 64 : 64; /* of prefetches: from output to output, along K */
    vec weights[WIDE];
    for (int64_t k = 0; k < whole; k += LANES) {
        if (prefetch && k * size % 64 == 0) {
            UNROLL for (int i = 0; i < outputs; i++) __builtin_prefetch(next + i * step);
            next += along;
        }
        UNROLL for (int i = 0; i < outputs; i++) weights[i] = load_weights(w + i * row + k * size, dtype);
        multiply(sum, weights, x + k, Kp, rows, outputs);
    }
    if (whole < K) {
        char rest[WIDE][LANES * 4] = {};
        for (int i = 0; i < outputs; i++) memcpy(rest[i], w + i * row + whole * size, (size_t)((K - whole) * size));
        UNROLL for (int i = 0; i < outputs; i++) weights[i] = load_weights(rest[i], dtype);
        multiply(sum, weights, x + whole, Kp, rows, outputs);
    }
}

/* Outputs n to n + outputs of tokens m to m + rows, to y with rows of `row` floats. The first tokens prefetch the next rows of W. */
INLINE void multiply_tile(const product *p, const float *x, float *y, int64_t row, int64_t m, int64_t n, int rows, int outputs, int dtype) {
    sums sum = {};
    x += m * length(p->K, dtype);
    if (dtype == INT4) multiply_groups(sum, p, x, n, rows, outputs, m == 0);
    else multiply_vectors(sum, p, x, n, rows, outputs, dtype, m == 0);
    UNROLL for (int j = 0; j < rows; j++)
        UNROLL for (int i = 0; i < outputs; i++) y[(m + j) * row + i] = sum_in_pairs(sum[i][j]);
}

INLINE void multiply_rows(const product *p, const float *x, float *y, int64_t row, int64_t n, int outputs, int dtype) {
    int64_t m = 0;
    for (; m + ROWS <= p->M; m += ROWS) multiply_tile(p, x, y, row, m, n, ROWS, outputs, dtype);
    switch (p->M - m) {
    case 3: multiply_tile(p, x, y, row, m, n, 3, outputs, dtype); break;
    case 2: multiply_tile(p, x, y, row, m, n, 2, outputs, dtype); break;
    case 1: multiply_tile(p, x, y, row, m, n, 1, outputs, dtype); break;
    }
}

/* Outputs from to to, of all tokens. */
INLINE void multiply_unit(const product *p, const float *x, float *y, int64_t row, int64_t from, int64_t to, int dtype) {
    int64_t n = from;
    if (dtype != INT4 && p->by_columns) { multiply_unit_of_columns(p, x, y, row, from, to, dtype); return; }
    if (p->M == 1) for (; n + WIDE <= to; n += WIDE) multiply_tile(p, x, y + n - from, row, 0, n, 1, WIDE, dtype);
    for (; n + OUTPUTS <= to; n += OUTPUTS) multiply_rows(p, x, y + n - from, row, n, OUTPUTS, dtype);
    for (; n < to; n++) multiply_rows(p, x, y + n - from, row, n, 1, dtype);
}

/* The outputs of a unit: whole tiles, but at most MOST. */
static int64_t outputs_of(const product *p) {
    int64_t tile = p->by_columns ? VECTORS * LANES : WIDE, outputs = UNIT / p->K / tile * tile;
    return outputs < tile ? tile : outputs > MOST ? MOST / tile * tile : outputs;
}

typedef struct {
    product *each;
    int64_t count;
    int64_t threads, next; /* as in a problem */
} products;

/* Every thread of a team calls this; each takes units until none is left. */
EXPORT void NAME(penstock_products_, SUFFIX)(products *all) {
    int64_t most = 0, rows = 0, before = 0, loaded = -1; /* `before`: units of products before i */
    for (int64_t i = 0; i < all->count; i++) {
        const product *p = all->each + i;
        int64_t floats = p->M * length(p->K, (int)p->weight_dtype);
        most = floats > most ? floats : most, rows = p->M > rows ? p->M : rows;
    }
    float *x = scratch_of(padded(most) + rows * MOST), *y = x + padded(most);
    if (!x) return;
    for (int64_t i = 0, unit = -1; i < all->count;) {
        if (unit < 0) unit = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED);
        const product *p = all->each + i;
        int64_t outputs = outputs_of(p), units = (p->N + outputs - 1) / outputs;
        if (unit >= before + units) { before += units, i++; continue; }
        if (loaded != i) load_input(p, x, length(p->K, (int)p->weight_dtype)), loaded = i;
        int64_t from = (unit - before) * outputs, to = from + outputs < p->N ? from + outputs : p->N;
        switch (p->weight_dtype) {
        case FLOAT32: multiply_unit(p, x, y, MOST, from, to, FLOAT32); break;
        case INT8: multiply_unit(p, x, y, MOST, from, to, INT8); break;
        case INT4: multiply_unit(p, x, y, MOST, from, to, INT4); break;
        case BFLOAT16: multiply_unit(p, x, y, MOST, from, to, BFLOAT16); break;
        default: multiply_unit(p, x, y, MOST, from, to, FLOAT16);
        }
        for (int64_t m = 0; m < p->M; m++) store_outputs(p, y + m * MOST, m, from, to - from);
        unit = -1;
    }
    free_scratch(x);
}
