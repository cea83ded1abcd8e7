/* The state token by token, over a strip of columns. Columns of the state are independent of each other, and a strip of all rows fits
 * the first-level cache. Each token reads and writes an element once: when it is written, the token reads it for its output, and the
 * next token for its removal. */
#ifndef PENSTOCK_DELTA_WALK_H
#define PENSTOCK_DELTA_WALK_H

#include "problem.h"

#define STRIP 4 /* vectors of a strip: two sums for each, and the factors of a row, are in registers */

/* Tokens of a run, and rows of values, `columns` floats apart. In the forward pass `output` gets o_t. In the backward pass `error` gets
 * u_t / beta_t, and each token writes a state of its own. */
typedef struct {
    token_rows r;
    int64_t K, Kp, columns, count;
    const float *v;
    float *u, *error, *output;
    int leaves;
    wanted *ahead;
} run;

#define ROWS 8 /* rows that are summed at once, from one prefetch to the next. Sums of such sums have smaller rounding errors */

INLINE void clear(vec x[STRIP], const int vectors) {
    for (int j = 0; j < vectors; j++) x[j] = splat(0);
}

INLINE void add_to(vec total[STRIP], const vec x[STRIP], const int vectors) {
    for (int j = 0; j < vectors; j++) total[j] += x[j];
}

/* x_j = sum over rows of remove_d P_dj */
INLINE void read_strip(tile P, int64_t K, const float *remove, vec x[STRIP], const int vectors) {
    clear(x, vectors);
    for (int64_t d = 0; d < K; d += ROWS) {
        vec sum[STRIP];
        clear(sum, vectors);
        for (int64_t row = d; row < K && row < d + ROWS; row++)
            for (int j = 0; j < vectors; j++) sum[j] += splat(remove[row]) * load(P.data + row * P.row + j * LANES);
        add_to(x, sum, vectors);
    }
}

/* Rows of one token, and of the removal of the next one. */
typedef struct { const float *decay, *write, *add, *query, *remove; const int32_t *keep; } factors;

/* One row of a strip. Where a small sum of decays is applied because the state leaves the pass, decay is expm1(sum) and all bits are
 * kept: exp(sum) is rounded the same way at every decode step, and its error would grow from step to step. */
INLINE void token_row(factors r, int64_t d, const float *from, float *to, const float *u, const float *v, vec o[STRIP], vec x[STRIP],
                      const int vectors, const int decays, const int two, const int output, const int more, const int leaves) {
    vec decay = splat(decays ? r.decay[d] : 1), write = splat(r.write[d]), add = splat(two ? r.add[d] : 0);
    vec query = splat(output ? r.query[d] : 0), remove = splat(more ? r.remove[d] : 0);
    ivec keep = isplat(leaves && decays ? r.keep[d] : 0);
    for (int j = 0; j < vectors; j++) {
        vec s = load(from + j * LANES);
        if (leaves && decays) s = s * decay + (vec)((ivec)s & keep);
        else if (decays) s *= decay;
        s += write * load(u + j * LANES);
        if (two) s += add * load(v + j * LANES);
        store(to + j * LANES, s);
        if (output) o[j] += query * s;
        if (more) x[j] += remove * s;
    }
}

/* One token of a strip. */
INLINE void token_strip(const run *m, int64_t i, tile from, tile to, const float *u, const float *v, vec o[STRIP], vec x[STRIP],
                        const int vectors, const int decays, const int two, const int output, const int more, const int leaves) {
    int64_t K = m->K, at = i * m->Kp;
    factors r = {m->r.decay + at, m->r.write + at, m->r.add + at, m->r.query + at, m->r.remove + at + m->Kp, m->r.keep + at};
    if (output) clear(o, vectors);
    if (more) clear(x, vectors);
    for (int64_t d = 0; d < K; d += ROWS) {
        int64_t end = d + ROWS < K ? d + ROWS : K;
        vec query[STRIP], remove[STRIP];
        clear(query, vectors), clear(remove, vectors);
        prefetch_one(m->ahead);
        for (int64_t row = d; row < end; row++)
            token_row(r, row, from.data + row * from.row, to.data + row * to.row, u, v, query, remove, vectors, decays, two, output, more,
                      leaves);
        if (output) add_to(o, query, vectors);
        if (more) add_to(x, remove, vectors);
    }
}

/* All tokens of a run over one strip, from column `column` of the tiles on. Token i writes to `to` + i `step`, which the next one reads;
 * the first reads `from`. */
INLINE void run_strip(const run *m, tile from, tile to, int64_t step, int64_t column, const int vectors, const int decays, const int two,
                      const int output) {
    vec x[STRIP], o[STRIP];
    from.data += column, to.data += column;
    read_strip(from, m->K, m->r.remove, x, vectors);
    for (int64_t i = 0; i < m->count; i++) {
        const float *v = m->v + i * m->columns + column;
        float *u = m->u + i * m->columns + column;
        for (int j = 0; j < vectors; j++) {
            vec error = splat(m->r.vary[i]) * load(v + j * LANES) - x[j];
            store(u + j * LANES, two ? x[j] : splat(m->r.beta[i]) * error);
            if (!two && !output) store(m->error + i * m->columns + column + j * LANES, error);
        }
        if (i + 1 < m->count) token_strip(m, i, from, to, u, v, o, x, vectors, decays, two, output, 1, 0);
        else if (output && m->leaves) token_strip(m, i, from, to, u, v, o, x, vectors, decays, two, output, 0, 1);
        else token_strip(m, i, from, to, u, v, o, x, vectors, decays, two, output, 0, 0);
        for (int j = 0; output && j < vectors; j++) store(m->output + i * m->columns + column + j * LANES, o[j]);
        from = to, to.data += step;
    }
}

#define RUN_STRIP(VECTORS, DECAYS, TWO)                                                                                 \
    for (; decays == DECAYS && two == TWO && column + VECTORS * LANES <= width; column += VECTORS * LANES)              \
        run_strip(m, from, to, step, column, VECTORS, DECAYS, TWO, output);

/* All tokens of a run over a tile of `width` columns. */
INLINE void run_tokens(const run *m, tile from, tile to, int64_t step, int64_t width, int decays, int two, const int output) {
    int64_t column = 0;
    RUN_STRIP(STRIP, 0, 0) RUN_STRIP(STRIP, 0, 1) RUN_STRIP(STRIP, 1, 0) RUN_STRIP(STRIP, 1, 1)
    RUN_STRIP(1, 0, 0) RUN_STRIP(1, 0, 1) RUN_STRIP(1, 1, 0) RUN_STRIP(1, 1, 1)
}

#endif
