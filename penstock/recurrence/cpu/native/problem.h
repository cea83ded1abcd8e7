/* One call: its tensors, its sequences, and the scratch of the passes. */
#ifndef PENSTOCK_PROBLEM_H
#define PENSTOCK_PROBLEM_H

#include "decay.h"

#define CHUNK 16 /* tokens loaded at once; also the distance of checkpoints in the backward pass */
#define PIECE 64 /* tokens of an update in place between roundings of the state, as in tokens/pieces.py; a multiple of CHUNK */

typedef struct {
    tensor q, k, v, g, u, initial_state, output, final_state;          /* [B,T,H,*], u [H,K], states [N,H,K,V] */
    tensor d_output, d_final_state;                                    /* gradients given ... */
    tensor dq, dk, dv, dg, du, d_initial_state;                        /* ... and wanted; du, static dg: float64 [N,H,K] */
    const int64_t *cu_seqlens;                                         /* [N+1], or NULL: sequence n is batch row n */
    const int64_t *slots;                                              /* [N] rows of the states, negative: skip; or NULL */
    int64_t N, T, H, K, V, previous, reverse;
    int64_t constant_decay, scalar_decay;                              /* one decay for all tokens; one for all channels */
    int64_t advance;                                                   /* initial_state and final_state are one pool, updated in place */
    int64_t threads;
    double scale;
    int64_t next;                                                      /* the next unit of work */
    int64_t out_of_memory;                                             /* set if a thread could not allocate its scratch */
} problem;

/* One sequence: its length and where token 0 lies in each tensor (the last token if time is reversed). */
typedef struct { int64_t row, first, length, direction; } sequence;

static inline sequence find_sequence(const problem *p, int64_t n) {
    int64_t row = p->cu_seqlens ? 0 : n;
    int64_t begin = p->cu_seqlens ? p->cu_seqlens[n] : 0, end = p->cu_seqlens ? p->cu_seqlens[n + 1] : p->T;
    return (sequence){row, p->reverse ? end - 1 : begin, end - begin, p->reverse ? -1 : 1};
}

INLINE int64_t at(const tensor *x, const sequence *s, int64_t t, int64_t h) {
    return offset(x, s->row, s->first + t * s->direction, h);
}

static inline void load_token(float *to, const tensor *x, const sequence *s, int64_t t, int64_t h, int64_t column, int64_t n) {
    load_row(to, x, at(x, s, t, h) + column * x->stride[3], x->stride[3], n);
}

static inline void store_token(const tensor *x, const sequence *s, int64_t t, int64_t h, int64_t column, const float *from, int64_t n) {
    store_row(x, at(x, s, t, h) + column * x->stride[3], x->stride[3], from, n);
}

/* Rows of K state vectors, `row` floats apart, each padded to whole vectors. */
typedef struct { float *data; int64_t row; } tile;

static inline void load_state(tile S, const tensor *x, int64_t n, int64_t h, int64_t K, int64_t column, int64_t columns) {
    for (int64_t d = 0; d < K; d++)
        if (x->data) load_row(S.data + d * S.row, x, offset(x, n, h, d) + column * x->stride[3], x->stride[3], columns);
        else memset(S.data + d * S.row, 0, (size_t)padded(columns) * 4);
}

static inline void store_state(const tensor *x, int64_t n, int64_t h, int64_t K, int64_t column, int64_t columns, tile S) {
    for (int64_t d = 0; x->data && d < K; d++)
        store_row(x, offset(x, n, h, d) + column * x->stride[3], x->stride[3], S.data + d * S.row, columns);
}

/* Columns of the states in a block of this many floats. */
static inline int64_t block_columns(int64_t K, int64_t V, int64_t floats) {
    int64_t columns = floats / K / LANES * LANES;
    return columns < LANES ? LANES : columns > padded(V) ? padded(V) : columns;
}

#define STAGGER 16 /* floats after arrays of rows: 4096 bytes apart, the rows of a token would contend for one set of the L1 cache */

INLINE float *take(float **scratch, int64_t n) { float *p = *scratch; *scratch += n; return p; }

static inline unsigned flush_denormals(void) { /* subnormal numbers of a decaying state would be slow */
#ifdef __x86_64__
    unsigned old = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(old | 0x8040);
    return old;
#else
    return 0;
#endif
}

static inline void restore_denormals(unsigned old) {
#ifdef __x86_64__
    __builtin_ia32_ldmxcsr(old);
#endif
}

/* The rows of one chunk, float32: q (scaled), k and g [CHUNK, Kp] and, per block of columns, v and d_out [CHUNK, columns]. */
typedef struct { float *q, *k, *g, *v, *d_out; } chunk_rows;

/* Load `count` tokens, of v and d_out some blocks of columns. d_out may be absent. A constant decay is not loaded again. */
static inline void load_chunk(const problem *p, const sequence *s, int64_t h, int64_t from, int64_t count, int64_t Kp, int64_t columns,
                       int64_t first_block, int64_t blocks, const chunk_rows *r) {
    for (int64_t i = 0; i < count; i++) {
        load_token(r->q + i * Kp, &p->q, s, from + i, h, 0, p->K);
        load_token(r->k + i * Kp, &p->k, s, from + i, h, 0, p->K);
        if (p->g.data && !p->constant_decay) load_token(r->g + i * Kp, &p->g, s, from + i, h, 0, p->K);
        for (int64_t b = 0; b < blocks; b++) {
            int64_t column = (first_block + b) * columns, left = p->V - column, width = left < columns ? left : columns;
            load_token(r->v + (b * CHUNK + i) * columns, &p->v, s, from + i, h, column, width);
            if (p->d_output.data) load_token(r->d_out + (b * CHUNK + i) * columns, &p->d_output, s, from + i, h, column, width);
        }
    }
    for (int64_t d = 0; d < count * Kp; d += LANES) store(r->q + d, load(r->q + d) * splat((float)p->scale));
}

/* A decay that is the same for all tokens, for every token of a chunk. */
static inline void load_constant_decay(const problem *p, int64_t h, int64_t Kp, const chunk_rows *r) {
    if (!p->g.data || !p->constant_decay) return;
    for (int64_t i = 0; i < CHUNK; i++) load_row(r->g + i * Kp, &p->g, h * p->g.stride[2], p->g.stride[3], p->K);
}

#endif
