/* All gradients. With dS_t the gradient of S_t, after everything that reads it (see docs/recurrence.md):
 *
 *     dq_t = scale dO_t S_t^T  (previous: S_{t-1})      dk_t = v_t dS_t^T      dv_t = k_t dS_t      dg_t = exp(g_t) rowsum(S_{t-1} o dS_t)
 *
 * Between chunks, states (forward in time, stored as checkpoints) and their gradients (backward) take one step per chunk, with pending
 * decays, so they are rounded once per chunk. Within a chunk both are computed token by token from there.
 *
 * A unit of work is one (sequence, head); threads take units from a shared counter. Sums over time that leave a unit (du, dg of a
 * constant decay) are double. Compiled once per target, with LANES floats per register and SUFFIX appended to names. */
#include "problem.h"

#define BACKWARD_BLOCK 4096 /* floats of state in a block of columns: CHUNK states of them fit a 512 KiB second-level cache */

/* Rows of gradients: q, k and g [CHUNK, Kp] and, per block of columns, v [CHUNK, columns]. */
typedef struct { float *q, *k, *g, *v; } gradient_rows;

/* The step of a chunk: rows that it adds, decayed up to its far end [CHUNK, Kp]; the factor of the state, and that of the rows. */
typedef struct { float *rows, *whole, *write; } chunk_step;

/* Rows x of `count` tokens times the decays after them in loop order: up to the end of the chunk or, backwards in time, its beginning;
 * with the token's own decay if `own`. The decays of the whole chunk become pending. */
static void prepare_step(chunk_step to, pending p, const float *x, const float *g, int64_t count, int64_t Kp, int backwards, int own,
                         int leaves) {
    for (int64_t d = 0; d < Kp; d += LANES) {
        vec ahead = {};
        for (int64_t n = 0; n < count; n++) {
            int64_t at = (backwards ? n : count - 1 - n) * Kp + d;
            vec with = ahead + load(g + at);
            store(to.rows + at, load(x + at) * exp_of(exponential_of(own ? with : ahead)));
            ahead = with;
        }
        addition a = add_decay(p, d, ahead, limit_of(leaves));
        store(to.whole + d, choose(a.stays, splat(1), exp_of(a.e)));
        store(to.write + d, a.write);
    }
}

/* to = whole from + write sum_i rows_i^T y_i, for `channels` rows of the state from row d on, over a strip of vectors. */
INLINE void step_rows(const float *from, float *to, int64_t width, int64_t d, int64_t Kp, chunk_step p, const float *y, int64_t columns,
                      int64_t count, const int channels, const int vectors) {
    vec sum[2][4] = {};
    for (int64_t i = 0; i < count; i++)
        for (int j = 0; j < vectors; j++) {
            vec value = load(y + i * columns + j * LANES);
            for (int c = 0; c < channels; c++) sum[c][j] += splat(p.rows[i * Kp + d + c]) * value;
        }
    for (int c = 0; c < channels; c++)
        for (int j = 0; j < vectors; j++) {
            int64_t at = (d + c) * width + j * LANES;
            store(to + at, load(from + at) * splat(p.whole[d + c]) + sum[c][j] * splat(p.write[d + c]));
        }
}

/* The state after a chunk from the state before it; for gradients, the reverse. */
static void step_chunk(const float *from, float *to, int64_t width, int64_t K, int64_t Kp, chunk_step p, const float *y, int64_t columns,
                       int64_t count) {
    int64_t d = 0;
    for (; d + 2 <= K; d += 2) {
        int64_t j = 0;
        for (; j + 4 * LANES <= width; j += 4 * LANES) step_rows(from + j, to + j, width, d, Kp, p, y + j, columns, count, 2, 4);
        for (; j < width; j += LANES) step_rows(from + j, to + j, width, d, Kp, p, y + j, columns, count, 2, 1);
    }
    for (int64_t j = 0; d < K && j < width; j += LANES) step_rows(from + j, to + j, width, d, Kp, p, y + j, columns, count, 1, 1);
}

/* A state with pending decays, applied. */
static const float *apply(const float *from, float *to, int64_t width, int64_t K, const float *read) {
    for (int64_t d = 0; d < K; d++)
        for (int64_t j = d * width; j < (d + 1) * width; j += LANES) store(to + j, load(from + j) * splat(read[d]));
    return to;
}

/* The state after one token, `rows` channels at a time, and the gradient of the query: the sum over columns of (state read by this
 * token) o (gradient of the output). */
INLINE void advance_rows(const float *before, float *after, int64_t width, int64_t d, const float *k, const float *w, const float *v,
                         const float *d_out, float *dq, const int rows, const int decays, const int previous) {
    vec kd[2], wd[2], to_q[2] = {};
    for (int i = 0; i < rows; i++) kd[i] = splat(k[d + i]), wd[i] = decays ? splat(w[d + i]) : splat(1);
    before += d * width, after += d * width;
    for (int64_t j = 0; j < width; j += LANES) {
        vec value = load(v + j), gradient = load(d_out + j);
        for (int i = 0; i < rows; i++) {
            vec s = load(before + i * width + j);
            if (previous) to_q[i] += s * gradient;
            if (decays) s *= wd[i];
            s += kd[i] * value;
            if (!previous) to_q[i] += s * gradient;
            store(after + i * width + j, s);
        }
    }
    for (int i = 0; i < rows; i++) dq[d + i] += sum_lanes(to_q[i]);
}

/* One token backwards in time, `rows` channels at a time: dS is the gradient of S_t, and becomes that of S_{t-1}. */
INLINE void retreat_rows(const float *before, float *dS, int64_t width, int64_t d, const float *q, const float *k, const float *w,
                         const float *v, const float *d_out, float *dk, float *dg, float *dv, const int rows, const int decays,
                         const int previous) {
    vec qd[2], kd[2], wd[2], to_k[2] = {}, to_g[2] = {};
    for (int i = 0; i < rows; i++) qd[i] = splat(q[d + i]), kd[i] = splat(k[d + i]), wd[i] = decays ? splat(w[d + i]) : splat(1);
    before += d * width, dS += d * width;
    for (int64_t j = 0; j < width; j += LANES) {
        vec value = load(v + j), gradient = load(d_out + j), to_v = load(dv + j);
        for (int i = 0; i < rows; i++) {
            vec ds = load(dS + i * width + j);
            if (!previous) ds += qd[i] * gradient;
            to_k[i] += ds * value;
            if (decays) to_g[i] += ds * load(before + i * width + j);
            to_v += kd[i] * ds;
            if (decays) ds *= wd[i];
            if (previous) ds += qd[i] * gradient;
            store(dS + i * width + j, ds);
        }
        store(dv + j, to_v);
    }
    for (int i = 0; i < rows; i++) {
        dk[d + i] += sum_lanes(to_k[i]);
        if (decays) dg[d + i] += w[d + i] * sum_lanes(to_g[i]);
    }
}

#define BY_ROWS(DECAYS, PREVIOUS, CALL)                                                                                 \
    if (decays == DECAYS && previous == PREVIOUS) {                                                                     \
        const int decay = DECAYS, prior = PREVIOUS;                                                                     \
        int64_t d = 0;                                                                                                  \
        for (; d + 2 <= K; d += 2) { const int rows = 2; CALL; }                                                        \
        for (; d < K; d++) { const int rows = 1; CALL; }                                                                \
    }
#define EVERY_KIND(CALL) BY_ROWS(0, 0, CALL) BY_ROWS(0, 1, CALL) BY_ROWS(1, 0, CALL) BY_ROWS(1, 1, CALL)

static void advance(const float *before, float *after, int64_t width, int64_t K, const float *k, const float *w, const float *v,
                    const float *d_out, float *dq, int decays, int previous) {
    EVERY_KIND(advance_rows(before, after, width, d, k, w, v, d_out, dq, rows, decay, prior))
}

static void retreat(const float *before, float *dS, int64_t width, int64_t K, const float *q, const float *k, const float *w,
                    const float *v, const float *d_out, float *dk, float *dg, float *dv, int decays, int previous) {
    EVERY_KIND(retreat_rows(before, dS, width, d, q, k, w, v, d_out, dk, dg, dv, rows, decay, prior))
}

/* A thread's memory. */
typedef struct {
    int64_t Kp, columns, blocks, tile, state; /* floats of a block of columns, and of all blocks */
    float *checkpoints, *reads;               /* states before chunks with pending decays, and their factors of reads [chunks, Kp] */
    float *dS, *d_reads;                      /* the same for the gradient after a chunk */
    float *states, *d_state;                  /* within a chunk, of one block: before every token; after one */
    float *w, *u;                             /* exp(g) [CHUNK, Kp]; the bonus */
    chunk_rows r;
    gradient_rows to;
    chunk_step step;
    pending before, after;
} workspace;

static float *make_workspace(workspace *m, const problem *p, int64_t chunks) {
    int64_t Kp = padded(p->K), columns = block_columns(p->K, p->V, BACKWARD_BLOCK), blocks = (p->V + columns - 1) / columns;
    int64_t tile = p->K * columns, state = tile * blocks, rows_k = CHUNK * Kp + STAGGER, rows_v = CHUNK * columns * blocks + STAGGER;
    float *memory = scratch_of(state * (chunks + 1) + tile * (CHUNK + 2) + 8 * rows_k + 3 * rows_v + (chunks + 10) * Kp), *rest = memory;
    if (!memory) return NULL;
    *m = (workspace){Kp, columns, blocks, tile, state};
    m->checkpoints = take(&rest, state * chunks), m->dS = take(&rest, state);
    m->states = take(&rest, tile * (CHUNK + 1)), m->d_state = take(&rest, tile);
    m->r.q = take(&rest, rows_k), m->r.k = take(&rest, rows_k), m->r.g = take(&rest, rows_k);
    m->r.v = take(&rest, rows_v), m->r.d_out = take(&rest, rows_v);
    m->to.q = take(&rest, rows_k), m->to.k = take(&rest, rows_k), m->to.g = take(&rest, rows_k), m->to.v = take(&rest, rows_v);
    m->w = take(&rest, rows_k), m->step.rows = take(&rest, rows_k);
    m->reads = take(&rest, chunks * Kp), m->d_reads = take(&rest, Kp), m->u = take(&rest, Kp);
    m->step.whole = take(&rest, Kp), m->step.write = take(&rest, Kp);
    for (int64_t d = 0; d < Kp; d++) m->step.whole[d] = m->step.write[d] = 1;
    m->before = pending_at(take(&rest, 3 * Kp), Kp), m->after = pending_at(take(&rest, 3 * Kp), Kp);
    return memory;
}

/* Columns of a block: the last may have fewer. */
INLINE int64_t width_of(const problem *p, const workspace *m, int64_t block) {
    int64_t left = p->V - block * m->columns;
    return left < m->columns ? left : m->columns;
}

/* dg of one token, or its term in that of a constant decay. */
static void finish_decay(const problem *p, const sequence *s, int64_t t, int64_t h, const float *dg, double *constant_dg) {
    if (p->constant_decay) {
        for (int64_t d = 0; d < p->K; d++) constant_dg[d] += dg[d];
    } else if (p->scalar_decay) {
        float total = 0;
        for (int64_t d = 0; d < p->K; d++) total += dg[d];
        store_token(&p->dg, s, t, h, 0, &total, 1);
    } else store_token(&p->dg, s, t, h, 0, dg, p->K);
}

/* Bonus terms of the gradients, the scale, and the results of one chunk to memory. */
static void finish_chunk(const problem *p, const sequence *s, int64_t n, int64_t h, int64_t from, int64_t count, const workspace *m) {
    for (int64_t i = 0; i < count; i++) {
        float *q = m->r.q + i * m->Kp, *k = m->r.k + i * m->Kp, *dq = m->to.q + i * m->Kp, *dk = m->to.k + i * m->Kp;
        float bonus = 0, read = 0; /* bonus = sum scale q u k, read = dO . v */
        if (p->u.data) {
            for (int64_t b = 0; b < m->blocks; b++) {
                int64_t row = (b * CHUNK + i) * m->columns;
                read += dot(m->r.v + row, m->r.d_out + row, padded(width_of(p, m, b)));
            }
            double *du = (double *)p->du.data + (n * p->H + h) * p->K;
            for (int64_t d = 0; d < p->K; d++) {
                bonus += q[d] * m->u[d] * k[d];
                du[d] += (double)read * q[d] * k[d];
                dq[d] += read * m->u[d] * k[d];
                dk[d] += read * m->u[d] * q[d];
            }
        }
        for (int64_t d = 0; d < m->Kp; d += LANES) store(dq + d, load(dq + d) * splat((float)p->scale));
        store_token(&p->dq, s, from + i, h, 0, dq, p->K);
        store_token(&p->dk, s, from + i, h, 0, dk, p->K);
        if (p->g.data) finish_decay(p, s, from + i, h, m->to.g + i * m->Kp, (double *)p->dg.data + (n * p->H + h) * p->K);
        for (int64_t b = 0; b < m->blocks; b++) {
            int64_t row = (b * CHUNK + i) * m->columns, width = width_of(p, m, b);
            if (p->u.data)
                for (int64_t j = 0; j < padded(width); j += LANES)
                    store(m->to.v + row + j, load(m->to.v + row + j) + splat(bonus) * load(m->r.d_out + row + j));
            store_token(&p->dv, s, from + i, h, b * m->columns, m->to.v + row, width);
        }
    }
}

/* Forward in time: the state before every chunk. */
static void keep_states(const problem *p, const sequence *s, int64_t n, int64_t h, int64_t chunks, workspace *m) {
    int64_t Kp = m->Kp, decays = p->g.data != NULL;
    for (int64_t b = 0; b < m->blocks && chunks; b++) {
        int64_t width = width_of(p, m, b);
        load_state((tile){m->checkpoints + b * m->tile, padded(width)}, &p->initial_state, n, h, p->K, b * m->columns, width);
    }
    nothing_pending(m->before, Kp);
    for (int64_t c = 0; c < chunks; c++) {
        memcpy(m->reads + c * Kp, m->before.read, (size_t)Kp * 4);
        if (c + 1 == chunks) break;
        load_chunk(p, s, h, c * CHUNK, CHUNK, Kp, m->columns, 0, m->blocks, &m->r);
        chunk_step step = m->step;
        if (decays) prepare_step(step, m->before, m->r.k, m->r.g, CHUNK, Kp, 0, 0, 0);
        else step.rows = m->r.k;
        for (int64_t b = 0; b < m->blocks; b++) {
            float *from = m->checkpoints + c * m->state + b * m->tile, *v = m->r.v + b * CHUNK * m->columns;
            step_chunk(from, from + m->state, padded(width_of(p, m, b)), p->K, Kp, step, v, m->columns, CHUNK);
        }
    }
}

/* The gradients of one chunk: states forward in time, then their gradients backward. */
static void backward_chunk(const problem *p, const sequence *s, int64_t n, int64_t h, int64_t c, workspace *m) {
    int64_t K = p->K, Kp = m->Kp, count = s->length - c * CHUNK < CHUNK ? s->length - c * CHUNK : CHUNK;
    int decays = p->g.data != NULL, previous = (int)p->previous;
    load_chunk(p, s, h, c * CHUNK, count, Kp, m->columns, 0, m->blocks, &m->r);
    if (decays) exp_row(m->w, m->r.g, count * Kp);
    for (int64_t i = 0; i < count * Kp; i++) m->to.q[i] = m->to.k[i] = m->to.g[i] = 0;
    memset(m->to.v, 0, (size_t)(CHUNK * m->columns * m->blocks) * 4);
    memcpy(m->d_reads, m->after.read, (size_t)Kp * 4);
    chunk_step step = m->step;
    if (decays) prepare_step(step, m->after, m->r.q, m->r.g, count, Kp, 1, !previous, c == 0);
    else step.rows = m->r.q;
    for (int64_t b = 0; b < m->blocks; b++) {
        int64_t width = padded(width_of(p, m, b));
        const float *first = m->checkpoints + c * m->state + b * m->tile;
        float *after = m->dS + b * m->tile;
        if (decays) first = apply(first, m->states, width, K, m->reads + c * Kp);
        apply(after, m->d_state, width, K, m->d_reads);
        for (int64_t i = 0; i < count; i++) {
            int64_t at = i * Kp, row = (b * CHUNK + i) * m->columns;
            float *S = m->states + i * m->tile;
            advance(i ? S : first, S + m->tile, width, K, m->r.k + at, m->w + at, m->r.v + row, m->r.d_out + row, m->to.q + at, decays,
                    previous);
        }
        for (int64_t i = count - 1; i >= 0; i--) {
            int64_t at = i * Kp, row = (b * CHUNK + i) * m->columns;
            const float *S = i ? m->states + i * m->tile : first;
            retreat(S, m->d_state, width, K, m->r.q + at, m->r.k + at, m->w + at, m->r.v + row, m->r.d_out + row, m->to.k + at,
                    m->to.g + at, m->to.v + row, decays, previous);
        }
        step_chunk(after, after, width, K, Kp, step, m->r.d_out + b * CHUNK * m->columns, m->columns, count);
    }
    finish_chunk(p, s, n, h, c * CHUNK, count, m);
}

/* Every thread of a team calls this; each takes units until none is left. */
EXPORT void NAME(penstock_backward_, SUFFIX)(problem *p) {
    int64_t longest = 0;
    for (int64_t n = 0; n < p->N; n++) {
        int64_t length = find_sequence(p, n).length;
        longest = length > longest ? length : longest;
    }
    workspace m;
    float *memory = make_workspace(&m, p, (longest + CHUNK - 1) / CHUNK);
    if (!memory) return;
    uint64_t mode = flush_denormals();

    for (;;) {
        int64_t unit = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
        if (unit >= p->N * p->H) break;
        int64_t h = unit % p->H, n = unit / p->H;
        sequence s = find_sequence(p, n);
        int64_t chunks = (s.length + CHUNK - 1) / CHUNK;
        if (p->u.data) load_row(m.u, &p->u, h * p->u.stride[0], p->u.stride[1], p->K);
        load_constant_decay(p, h, m.Kp, &m.r);
        keep_states(p, &s, n, h, chunks, &m);
        nothing_pending(m.after, m.Kp);
        for (int64_t b = 0; b < m.blocks; b++) {
            int64_t width = width_of(p, &m, b);
            load_state((tile){m.dS + b * m.tile, padded(width)}, &p->d_final_state, n, h, p->K, b * m.columns, width);
        }
        for (int64_t c = chunks - 1; c >= 0; c--) backward_chunk(p, &s, n, h, c, &m);
        for (int64_t b = 0; b < m.blocks; b++) {
            int64_t width = width_of(p, &m, b);
            store_state(&p->d_initial_state, n, h, p->K, b * m.columns, width, (tile){m.dS + b * m.tile, padded(width)});
        }
    }
    restore_denormals(mode);
    free_scratch(memory);
}
