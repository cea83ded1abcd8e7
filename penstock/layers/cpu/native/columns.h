/* Products with a W that is stored by columns, [K,N]: tiles of a few rows of x and vectors of columns. A sum has the order of K. */
#ifndef PENSTOCK_COLUMNS_H
#define PENSTOCK_COLUMNS_H

#include "product.h"

#define VECTORS 8 /* of columns in a tile of one row: they hide the latency of multiply-adds */
#define AHEAD 8   /* rows of W from those that are read to those that are prefetched */

/* Columns n to n + vectors * LANES of rows m to m + rows of x. `rest`: the columns of a single vector that is not whole, else 0. */
INLINE void multiply_columns(const product *p, const float *x, float *y, int64_t row, int64_t n, int rows, int vectors, int rest, int dtype, int prefetch) {
    int64_t K = p->K, Kp = padded(K), size = size_of(dtype), step = p->weight_row * size;
    const char *w = (const char *)p->weight + n * size;
    vec sum[VECTORS][ROWS] = {}, weights[VECTORS];
    for (int64_t k = 0; k < K; k++, w += step) {
        if (prefetch) for (int64_t byte = 0; byte < vectors * LANES * size; byte += 64) __builtin_prefetch(w + AHEAD * step + byte);
        if (rest) {
            char padded_row[LANES * 4] = {};
            memcpy(padded_row, w, (size_t)(rest * size));
            weights[0] = load_weights(padded_row, dtype);
        } else UNROLL for (int i = 0; i < vectors; i++) weights[i] = load_weights(w + i * LANES * size, dtype);
        UNROLL for (int j = 0; j < rows; j++)
            UNROLL for (int i = 0; i < vectors; i++) sum[i][j] += weights[i] * splat(x[j * Kp + k]);
    }
    UNROLL for (int j = 0; j < rows; j++)
        UNROLL for (int i = 0; i < vectors; i++) store(y + j * row + i * LANES, sum[i][j]);
}

/* The same for all rows of x. y has rows of `row` floats. */
INLINE void multiply_tile_of_columns(const product *p, const float *x, float *y, int64_t row, int64_t n, int vectors, int rest, int dtype) {
    int64_t m = 0, Kp = padded(p->K);
    for (; m + ROWS <= p->M; m += ROWS) multiply_columns(p, x + m * Kp, y + m * row, row, n, ROWS, vectors, rest, dtype, m == 0);
    for (; m < p->M; m++) multiply_columns(p, x + m * Kp, y + m * row, row, n, 1, vectors, rest, dtype, m == 0);
}

/* Columns from to to. */
INLINE void multiply_unit_of_columns(const product *p, const float *x, float *y, int64_t row, int64_t from, int64_t to, int dtype) {
    int64_t n = from, wide = VECTORS * LANES, narrow = OUTPUTS * LANES;
    if (p->M == 1) for (; n + wide <= to; n += wide) multiply_columns(p, x, y + n - from, row, n, 1, VECTORS, 0, dtype, 1);
    else for (; n + narrow <= to; n += narrow) multiply_tile_of_columns(p, x, y + n - from, row, n, OUTPUTS, 0, dtype);
    for (; n + LANES <= to; n += LANES) multiply_tile_of_columns(p, x, y + n - from, row, n, 1, 0, dtype);
    if (n < to) multiply_tile_of_columns(p, x, y + n - from, row, n, 1, (int)(to - n), dtype);
}

#endif
