/* A decode step of RWKV-7 between its linear maps: the inputs of the recurrence, the recurrence in place, the norm of heads and the gate.
 * The formulas are those of rwkv7_chains.py and rwkv7_decode.py.
 *
 * A unit of work is a head of a token. Threads take units from a shared counter. A unit has the same operations whatever the others are. */
#include "activations.h"
#include "norm.h"
#include "sequences.h"

#define LEAST 1e-12f         /* of the norm of keys, as in torch's normalize */
#define FASTEST -0.60653066f /* -exp(-1/2), the log decay of sigmoid(raw) = 1 */

typedef struct {
    void *r, *k, *w, *rate, *v, *mix, *first, *gate, *y;         /* [R,H,N], contiguous; mix and first may be NULL */
    void *k_k, *k_a, *r_k, *w0, *a0, *v0, *weight, *shift;       /* [H,N], contiguous; v0 may be NULL */
    tensor pool;                                                 /* [P,H,N,N], updated in place */
    int64_t *slots;                                              /* [R], or NULL: token n has row n */
    int64_t R, H, N, dtype, weight_dtype;                        /* of tokens; of parameters */
    double eps;
    int64_t threads, next; /* as in a problem */
} step;

typedef struct { float *r, *k, *w, *rate, *v, *mix, *first, *gate, *y, *k_k, *k_a, *r_k, *w0, *a0, *v0, *weight, *shift, *removed, *o, *S; } rows;
enum { ROWS = 19 };

/* From the tokens: kk in `removed`, b in `rate`, the key in `k`, the factor of the decay minus 1 in `w`, the mixed values in `v`. */
static void prepare(const step *p, rows m, int64_t Np) {
    for (int64_t i = 0; i < Np; i += LANES) store(m.removed + i, load(m.k + i) * load(m.k_k + i));
    float norm = __builtin_sqrtf(dot(m.removed, m.removed, Np));
    vec size = splat(norm < LEAST ? LEAST : norm); /* NaN stays NaN */
    for (int64_t i = 0; i < Np; i += LANES) {
        vec kk = load(m.removed + i) / size, logit = load(m.rate + i) + load(m.a0 + i);
        store(m.removed + i, kk);
        store(m.rate + i, kk * sigmoid(logit));
        store(m.k + i, load(m.k + i) * (splat(1) - sigmoid(-logit) * load(m.k_a + i)));
        store(m.w + i, expm1_of(exponential_of(splat(FASTEST) * sigmoid(load(m.w + i) + load(m.w0 + i)))));
        if (p->mix) {
            vec v = load(m.v + i);
            store(m.v + i, v + (load(m.first + i) - v) * sigmoid(load(m.mix + i) + load(m.v0 + i)));
        }
    }
}

/* Columns c and on of the state: what is removed, the new state, and the output. Four sums hide the latency of additions. */
INLINE void recur(rows m, int64_t Np, int64_t c) {
    vec sum[4] = {};
    for (int64_t d = 0; d < Np; d += 4)
        for (int j = 0; j < 4; j++) sum[j] += splat(m.removed[d + j]) * load(m.S + (d + j) * Np + c);
    vec removed = -((sum[0] + sum[1]) + (sum[2] + sum[3])), v = load(m.v + c), o[4] = {};
    for (int64_t d = 0; d < Np; d += 4)
        for (int j = 0; j < 4; j++) {
            float *at = m.S + (d + j) * Np + c;
            vec s = load(at);
            s = s + s * splat(m.w[d + j]) + splat(m.rate[d + j]) * removed + splat(m.k[d + j]) * v;
            store(at, s);
            o[j] += splat(m.r[d + j]) * s;
        }
    store(m.o + c, (o[0] + o[1]) + (o[2] + o[3]));
}

/* The norm of the output, with the share of the values, times the gate. */
static void finish(const step *p, rows m, int64_t Np) {
    for (int64_t i = 0; i < Np; i += LANES) store(m.r_k + i, load(m.r_k + i) * load(m.k + i));
    float share = dot(m.r, m.r_k, Np);
    vec scale = norm_factor(m.o, p->N, 1, p->eps);
    for (int64_t i = 0; i < Np; i += LANES) {
        vec normed = load(m.o + i) * scale * load(m.weight + i) + load(m.shift + i);
        store(m.y + i, (normed + splat(share) * load(m.v + i)) * load(m.gate + i));
    }
}

static void one_head(const step *p, rows m, int64_t n, int64_t h) {
    int64_t N = p->N, Np = padded(N), at = n * p->H + h, slot = p->slots ? p->slots[n] : n;
    tile S = {m.S, Np};
    if (slot < 0) {
        memset(m.y, 0, (size_t)Np * 4);
        store_at(p->y, p->dtype, at * N, m.y, N);
        return;
    }
    float *tokens[] = {m.r, m.k, m.w, m.rate, m.v, m.mix, m.first, m.gate};
    void *const given[] = {p->r, p->k, p->w, p->rate, p->v, p->mix, p->first, p->gate};
    float *learned[] = {m.k_k, m.k_a, m.r_k, m.w0, m.a0, m.v0, m.weight, m.shift};
    void *const weights[] = {p->k_k, p->k_a, p->r_k, p->w0, p->a0, p->v0, p->weight, p->shift};
    for (int i = 0; i < 8; i++) {
        if (given[i]) load_at(tokens[i], given[i], p->dtype, at * N, N);
        if (weights[i]) load_at(learned[i], weights[i], p->weight_dtype, h * N, N);
    }
    load_state(S, &p->pool, slot, h, N, 0, N);
    memset(m.S + N * Np, 0, (size_t)((Np - N) * Np) * 4);
    prepare(p, m, Np);
    for (int64_t c = 0; c < Np; c += LANES) recur(m, Np, c);
    store_state(&p->pool, slot, h, N, 0, N, S);
    finish(p, m, Np);
    store_at(p->y, p->dtype, at * N, m.y, N);
}

/* Every thread of a team calls this; each takes units until none is left. */
EXPORT void NAME(penstock_rwkv7_step_, SUFFIX)(step *p) {
    int64_t Np = padded(p->N);
    float *memory = scratch_of((ROWS + Np) * Np), *m[ROWS + 1];
    if (!memory) return;
    for (int i = 0; i <= ROWS; i++) m[i] = memory + i * Np;
    rows all;
    memcpy(&all, m, sizeof all);
    for (int64_t unit; (unit = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->R * p->H;)
        one_head(p, all, unit / p->H, unit % p->H);
    free_scratch(memory);
}
