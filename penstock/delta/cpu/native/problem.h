/* One call of the delta family: its tensors, and the rows of a chunk of tokens, float32.
 *
 *     one stream (delta_rule, gated_delta_rule, kda):  u_t = beta_t (v_t - k_t x_t)     S_t = exp(g_t) o S_{t-1} + k_t^T u_t
 *     two streams (rwkv7, dplr):                       u_t = a_t x_t                    S_t = exp(g_t) o S_{t-1} + b_t^T u_t + k_t^T v_t
 *
 *     o_t = scale q_t S_t          x_t = exp(g_t) o S_{t-1} if the removal reads the decayed state, else S_{t-1}
 *
 * Decays stay pending (decay.h): P_t = S_t / read_t is stored, with read_t the exponential of a sum of decays, at least exp(-0.5). In
 * terms of P a token is the same recurrence with other rows, which `prepare` makes, and so are the gradients:
 *
 *     u_t = beta_t (vary_t v_t - remove_t P_{t-1})  or  remove_t P_{t-1}
 *     P_t = decay_t o P_{t-1} + write_t^T u_t + add_t^T v_t              o_t = query_t P_t
 *
 * decay_t is 1, or exp(sum) where the sum of decays is applied, also 0. Nothing is divided by a decay smaller than exp(-0.5).
 *
 * remove_t and write_t are rounded, so that a token removes 1 + delta times what it should. With equal keys, beta = 2 and weak decays the
 * same delta of every token would add up. So remove_t is multiplied, and write_t divided, by a factor vary_t, which changes from token to
 * token: their roundings differ, and average out. */
#ifndef PENSTOCK_DELTA_PROBLEM_H
#define PENSTOCK_DELTA_PROBLEM_H

#include "decay.h"
#include "sequences.h"

#define CHUNK 16 /* tokens whose rows are prepared at once; also the distance of checkpoints in the backward pass */

typedef struct {
    tensor q, k, v, g, beta, a, b;                                     /* [B,T,H,*], g [B,T,H] or [B,T,H,K], beta [B,T,H] */
    tensor initial_state, output, final_state;                         /* states [N,H,K,V] */
    tensor d_output, d_final_state;                                    /* gradients given ... */
    tensor dq, dk, dv, dg, dbeta, da, db, d_initial_state;             /* ... and wanted, each of every head; data is NULL if not */
    const int64_t *cu_seqlens;                                         /* [N+1], or NULL: sequence n is batch row n */
    const int64_t *slots;                                              /* [N] rows of the states, negative: skip; or NULL */
    int64_t N, T, H, K, V;
    int64_t group, removal_group;                                      /* heads that share q and k; a and b */
    int64_t after, scalar;                                             /* the removal reads the decayed state; one decay for all channels */
    int64_t advance;                                                   /* initial_state and final_state are one pool, updated in place */
    int64_t threads;
    double scale;
    int64_t next;                                                      /* the next unit of work; a thread that takes none had no memory */
} problem;

INLINE int has_two_streams(const problem *p) { return p->a.data != NULL; }

/* Rows of a chunk [CHUNK, Kp], and the factors that made them of the tensors' rows: query = scale q o read, remove = (k or a) o removed,
 * write = (k or b) o written, add = k o written vary. Without decays the factors are absent, and vary is 1. `keep` is a mask: see `factor`. */
typedef struct {
    float *query, *remove, *write, *add, *decay, *g;
    float *read, *removed, *written;
    int32_t *keep;
    float *beta, *vary; /* [CHUNK] */
} token_rows;

#define ROWS_OF_KEYS 10 /* arrays [CHUNK, Kp] of token_rows */

INLINE float *take_rows(token_rows *r, float *memory, int64_t Kp) {
    int64_t n = CHUNK * Kp + STAGGER;
    r->query = take(&memory, n), r->remove = take(&memory, n), r->write = take(&memory, n), r->add = take(&memory, n);
    r->decay = take(&memory, n), r->g = take(&memory, n), r->keep = (int32_t *)take(&memory, n);
    r->read = take(&memory, n), r->removed = take(&memory, n), r->written = take(&memory, n);
    r->beta = take(&memory, CHUNK), r->vary = take(&memory, CHUNK);
    return memory;
}

INLINE int64_t floats_of_rows(int64_t Kp) { return ROWS_OF_KEYS * (CHUNK * Kp + STAGGER) + 2 * CHUNK; }

INLINE float load_number(const tensor *x, const sequence *s, int64_t t, int64_t h) {
    float row[LANES];
    load_row(row, x, at(x, s, t, h), 0, 1);
    return row[0];
}

/* The rows of tokens `from` to `from + count`, without decays. */
static void load_tokens(const problem *p, const sequence *s, int64_t h, int64_t from, int64_t count, int64_t Kp, const token_rows *r) {
    const int two = has_two_streams(p);
    const tensor *removal = two ? &p->a : &p->k, *writing = two ? &p->b : &p->k;
    int64_t shared = h / p->group, of_removal = two ? h / p->removal_group : shared;
    for (int64_t i = 0; i < count; i++) {
        load_token(r->query + i * Kp, &p->q, s, from + i, shared, 0, p->K);
        load_token(r->remove + i * Kp, removal, s, from + i, of_removal, 0, p->K);
        load_token(r->write + i * Kp, writing, s, from + i, of_removal, 0, p->K);
        if (two) load_token(r->add + i * Kp, &p->k, s, from + i, shared, 0, p->K);
        if (!two) r->beta[i] = load_number(&p->beta, s, from + i, h);
        r->vary[i] = 1;
        if (p->g.data && p->scalar) store(r->g + i * Kp, splat(load_number(&p->g, s, from + i, h))); /* only the first vector is in use */
        else if (p->g.data) load_token(r->g + i * Kp, &p->g, s, from + i, h, 0, p->K);
    }
    for (int64_t d = 0; d < count * Kp; d += LANES) store(r->query + d, load(r->query + d) * splat((float)p->scale));
}

/* The decays of one token become pending or, if the state `leaves` the pass after it, are applied. */
INLINE void prepare_token(const token_rows *r, pending p, int64_t i, int64_t Kp, int leaves, const int after, const int scalar, const int two) {
    vec decay = {}, read = {}, removed = {}, written = {}, added = {}, vary = splat(r->vary[i]);
    ivec keep = {};
    for (int64_t d = 0; d < Kp; d += LANES) {
        int64_t at = i * Kp + d;
        if (!scalar || d == 0) {
            vec before = load(p.read + d);
            addition a = add_decay(p, d, load(r->g + at), limit_of(leaves));
            decay = choose(a.stays, splat(1), exp_of(a.e));
            if (leaves) keep = a.sum >= splat(-1), decay = choose(keep, expm1_of(a.e), decay);
            read = load(p.read + d), removed = (after ? exp_of(a.e) : before) * vary, added = a.write;
            written = splat(1) / (read * vary); /* of the rounded product, so that it varies with the token */
        }
        store(r->query + at, load(r->query + at) * read);
        store(r->remove + at, load(r->remove + at) * removed);
        store(r->write + at, load(r->write + at) * written);
        if (two) store(r->add + at, load(r->add + at) * added);
        store(r->decay + at, decay);
        *(ivec *)(r->keep + at) = keep;
        store(r->read + at, read), store(r->removed + at, removed), store(r->written + at, written);
    }
}

/* Tokens from `t` on that will be loaded next. */
static void want_tokens(const problem *p, const sequence *s, int64_t h, int64_t t, int64_t count, int64_t column, int64_t columns, wanted *f) {
    int64_t shared = h / p->group, of_removal = p->removal_group ? h / p->removal_group : 0;
    f->count = f->next = 0;
    for (int64_t end = t + count; t < end; t++) {
        want_token(f, &p->q, s, t, shared, 0, p->K);
        want_token(f, &p->k, s, t, shared, 0, p->K);
        want_token(f, &p->v, s, t, h, column, columns);
        want_token(f, &p->g, s, t, h, 0, p->scalar ? 1 : p->K);
        want_token(f, &p->a, s, t, of_removal, 0, p->K);
        want_token(f, &p->b, s, t, of_removal, 0, p->K);
        want_token(f, &p->d_output, s, t, h, column, columns);
    }
}

#define PREPARE(AFTER, SCALAR, TWO)                                                                                     \
    if ((p->after != 0) == AFTER && (p->scalar != 0) == SCALAR && has_two_streams(p) == TWO)                            \
        for (int64_t i = 0; i < count; i++) prepare_token(r, sums, i, Kp, leaves && i + 1 == count, AFTER, SCALAR, TWO);

/* From 1 to 2, a number for each token of a piece: fractions of multiples of the golden ratio, which are far from each other. */
INLINE float varied(int64_t t) {
    uint32_t bits = 0x3f800000 | (uint32_t)(t % PIECE) * 2654435769u >> 9;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* The rows of a chunk with its decays. `leaves`: whether the state leaves the pass after the last token. `alone`: whether the token's
 * place in its piece is not known, as in a decode step. */
static void prepare(const problem *p, const sequence *s, int64_t h, int64_t from, int64_t count, int64_t Kp, int leaves, int alone,
                    pending sums, const token_rows *r) {
    load_tokens(p, s, h, from, count, Kp, r);
    if (!p->g.data) return;
    for (int64_t i = 0; i < count && !alone; i++) r->vary[i] = varied(from + i);
    PREPARE(0, 0, 0) PREPARE(0, 0, 1) PREPARE(0, 1, 0) PREPARE(0, 1, 1)
    PREPARE(1, 0, 0) PREPARE(1, 0, 1) PREPARE(1, 1, 0) PREPARE(1, 1, 1)
}

#endif
