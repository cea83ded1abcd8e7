/* A decode step of a token shift, with the sum and the norm before it: z = norm(x + y), results z + (p - z) mu_i, p the row of a pool.
 *
 * z replaces p. Sums and norms are rounded to the dtype of tokens, as where they are tensors. A unit of work is a token. */
#include "norm.h"

enum { MOST_FACTORS = 6 };

typedef struct {
    void *x, *y, *total, *normed, *before; /* [R,C], contiguous; y and, without y, total may be NULL; normed and before both, too */
    void *weight, *bias;                   /* [C], contiguous; bias may be NULL */
    void *mu[MOST_FACTORS], *mixed;        /* [C], contiguous; [count,R,C], contiguous */
    tensor pool;                           /* [P,C], updated in place */
    int64_t *slots;                        /* [R], or NULL: token n has row n */
    int64_t R, C, count, dtype, weight_dtype, mu_dtype, centre, complement;
    double eps;
    int64_t threads, next; /* as in a problem */
} shift;

/* x, rounded to a dtype. */
static void round_row(float *x, int64_t n, int64_t dtype) {
    if (dtype == BFLOAT16) for (int64_t i = 0; i < n; i++) x[i] = bfloat16_to_float(float_to_bfloat16(x[i]));
    if (dtype == FLOAT16) for (int64_t i = 0; i < n; i++) x[i] = (float)(_Float16)x[i];
}

/* x becomes its norm, not rounded. */
static void normalise(const shift *p, float *x, float *scale, float *offset) {
    int64_t C = p->C;
    vec factor = norm_factor(x, C, (int)p->centre, p->eps);
    load_at(scale, p->weight, p->weight_dtype, 0, C);
    if (p->bias) load_at(offset, p->bias, p->weight_dtype, 0, C);
    for (int64_t i = 0; i < C; i += LANES) {
        vec z = load(x + i) * factor * load(scale + i);
        store(x + i, p->bias ? z + load(offset + i) : z);
    }
}

static void one_token(const shift *p, int64_t r, float *z, float *last, float *mu, float *mixed) {
    int64_t C = p->C, at = r * C, slot = p->slots ? p->slots[r] : r, row = slot * p->pool.stride[0];
    load_at(z, p->x, p->dtype, at, C);
    if (p->y) {
        load_at(mixed, p->y, p->dtype, at, C);
        for (int64_t i = 0; i < C; i += LANES) store(z + i, load(z + i) + load(mixed + i));
        round_row(z, C, p->dtype);
        store_at(p->total, p->dtype, at, z, C);
    }
    normalise(p, z, mixed, mu);
    round_row(z, C, p->dtype);
    if (slot < 0) memset(last, 0, (size_t)padded(C) * 4);
    else {
        load_row(last, &p->pool, row, p->pool.stride[1], C);
        round_row(last, C, p->dtype);
        store_row(&p->pool, row, p->pool.stride[1], z, C);
    }
    if (p->normed) store_at(p->normed, p->dtype, at, z, C), store_at(p->before, p->dtype, at, last, C);
    const float *from = p->complement ? last : z, *to = p->complement ? z : last;
    for (int64_t n = 0; n < p->count; n++) {
        load_at(mu, p->mu[n], p->mu_dtype, 0, C);
        for (int64_t i = 0; i < C; i += LANES) store(mixed + i, load(from + i) + (load(to + i) - load(from + i)) * load(mu + i));
        store_at(p->mixed, p->dtype, (n * p->R + r) * C, mixed, C);
    }
}

/* Every thread of a team calls this; each takes tokens until none is left. */
EXPORT void NAME(penstock_shifted_norm_, SUFFIX)(shift *p) {
    int64_t Cp = padded(p->C);
    float *memory = scratch_of(4 * Cp);
    if (!memory) return;
    for (int64_t r; (r = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->R;)
        one_token(p, r, memory, memory + Cp, memory + 2 * Cp, memory + 3 * Cp);
    free_scratch(memory);
}
