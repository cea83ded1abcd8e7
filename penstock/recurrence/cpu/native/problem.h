/* One call: its tensors, its sequences, and the scratch of the passes. */
#ifndef PENSTOCK_PROBLEM_H
#define PENSTOCK_PROBLEM_H

#include "decay.h"
#include "sequences.h"

#define CHUNK 16 /* tokens loaded at once; also the distance of checkpoints in the backward pass */

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
    int64_t next;                                                      /* the next unit of work; a thread that takes none had no memory */
} problem;

static inline sequence find_sequence(const problem *p, int64_t n) { return sequence_of(p->cu_seqlens, p->T, p->reverse != 0, n); }

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
