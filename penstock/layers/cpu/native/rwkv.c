/* A decode step of RWKV-5 and RWKV-6 between its linear maps: the recurrence in place, the norm of heads and the gate. The formula is that of
 * decode_examples.py.
 *
 * A unit of work is a head of a token. Threads take units from a shared counter. A unit has the same operations whatever the others are. */
#include "activations.h"
#include "norm.h"
#include "sequences.h"

typedef struct {
    void *r, *k, *v, *gate, *low, *y; /* r, k and low [R,H,K], v, gate and y [R,H,V], contiguous; low, of the log decay, may be NULL */
    tensor u, bias;                   /* [H,K] */
    void *weight, *shift;             /* [H,V], contiguous */
    tensor pool;                      /* [P,H,K,V], updated in place */
    int64_t *slots;                   /* [R], or NULL: token n has row n */
    int64_t R, H, K, V, dtype, weight_dtype;
    double eps;
    int64_t threads, next; /* as in a problem */
} step;

typedef struct { float *r, *k, *u, *w, *whole, *low, *v, *gate, *o, *weight, *shift, *S; } rows;
enum { ROWS = 11 };

/* Columns c and on: the output of the state before the token, with the share of the token, and the new state. */
INLINE void recur(rows m, int64_t K, int64_t Vp, int64_t c, float share) {
    vec v = load(m.v + c), o[4] = {};
    for (int64_t d = 0; d < K; d += 4)
        for (int j = 0; j < 4; j++) { /* rows to padded(K) are zeros */
            float *at = m.S + (d + j) * Vp + c;
            vec s = load(at);
            o[j] += splat(m.r[d + j]) * s;
            store(at, s * splat(m.whole[d + j]) + s * splat(m.w[d + j]) + splat(m.k[d + j]) * v);
        }
    store(m.o + c, (o[0] + o[1]) + (o[2] + o[3]) + splat(share) * v);
}

/* The norm of the output, times silu of the gate. */
static void finish(const step *p, rows m, int64_t Vp) {
    vec scale = norm_factor(m.o, p->V, 1, p->eps);
    for (int64_t i = 0; i < Vp; i += LANES) {
        vec gate = load(m.gate + i);
        store(m.o + i, (load(m.o + i) * scale * load(m.weight + i) + load(m.shift + i)) * (gate * sigmoid(gate)));
    }
}

static void one_head(const step *p, rows m, int64_t n, int64_t h) {
    int64_t K = p->K, V = p->V, Kp = padded(K), Vp = padded(V), token = n * p->H + h, slot = p->slots ? p->slots[n] : n;
    tile S = {m.S, Vp};
    if (slot < 0) {
        memset(m.o, 0, (size_t)Vp * 4);
        store_at(p->y, p->dtype, token * V, m.o, V);
        return;
    }
    load_at(m.r, p->r, p->dtype, token * K, K), load_at(m.k, p->k, p->dtype, token * K, K);
    load_at(m.v, p->v, p->dtype, token * V, V), load_at(m.gate, p->gate, p->dtype, token * V, V);
    load_at(m.weight, p->weight, p->weight_dtype, h * V, V), load_at(m.shift, p->shift, p->weight_dtype, h * V, V);
    load_row(m.u, &p->u, h * p->u.stride[0], p->u.stride[1], K), load_row(m.w, &p->bias, h * p->bias.stride[0], p->bias.stride[1], K);
    if (p->low) load_at(m.low, p->low, p->dtype, token * K, K);
    for (int64_t i = 0; i < Kp; i += LANES) {
        vec bias = p->low ? load(m.w + i) + load(m.low + i) : load(m.w + i);
        exponential decay = exponential_of(-exp_of_any(bias));
        ivec weak = exp_of(decay) > splat(0.5f); /* the state and its loss; else what is left of it, which would be their difference */
        store(m.w + i, choose(weak, expm1_of(decay), exp_of(decay)));
        store(m.whole + i, choose(weak, splat(1), splat(0)));
        store(m.u + i, load(m.u + i) * load(m.k + i));
    }
    load_state(S, &p->pool, slot, h, K, 0, V);
    memset(m.S + K * Vp, 0, (size_t)((Kp - K) * Vp) * 4);
    float share = dot(m.r, m.u, K);
    for (int64_t c = 0; c < Vp; c += LANES) recur(m, Kp, Vp, c, share);
    store_state(&p->pool, slot, h, K, 0, V, S);
    finish(p, m, Vp);
    store_at(p->y, p->dtype, token * V, m.o, V);
}

/* Every thread of a team calls this; each takes units until none is left. */
EXPORT void NAME(penstock_rwkv_step_, SUFFIX)(step *p) {
    int64_t Kp = padded(p->K), Vp = padded(p->V), wide = Kp > Vp ? Kp : Vp;
    float *memory = scratch_of(ROWS * wide + Kp * Vp), *m[ROWS + 1];
    if (!memory) return;
    for (int i = 0; i <= ROWS; i++) m[i] = memory + i * wide;
    rows all;
    memcpy(&all, m, sizeof all);
    for (int64_t unit; (unit = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->R * p->H;)
        one_head(p, all, unit / p->H, unit % p->H);
    free_scratch(memory);
}
