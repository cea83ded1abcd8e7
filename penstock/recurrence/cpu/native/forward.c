/* Output and final state, token after token; decode steps are forward passes on rows of a pool. Formulas and names as in
 * docs/recurrence.md:
 *
 *     S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t
 *     updated:  o_t = scale q_t S_t          previous:  o_t = scale q_t (S_{t-1} + diag(u) k_t^T v_t)
 *
 * A unit of work is one sequence, a few heads and one block of value columns. Threads take units from a shared counter, which balances
 * sequences of different lengths. The state of a block, [K, columns], stays in a cache near the core.
 *
 * Compiled once per target, with LANES floats per register and SUFFIX appended to names. */
#include "problem.h"

#define FORWARD_BLOCK 16384 /* floats of state that stay in the second-level cache; each group of tokens touches each once */

/* Tokens t to t + count of one head. */
static wanted want_tokens(const problem *p, const sequence *s, int64_t h, int64_t t, int64_t count, int64_t column, int64_t columns) {
    wanted f;
    f.count = f.next = 0;
    for (int64_t end = t + count; t < end; t++) {
        want_token(&f, &p->q, s, t, h, 0, p->K);
        want_token(&f, &p->k, s, t, h, 0, p->K);
        want_token(&f, &p->v, s, t, h, column, columns);
        if (!p->constant_decay) want_token(&f, &p->g, s, t, h, 0, p->K);
    }
    return f;
}

/* Factors of the state's rows: S becomes S a + (S & keep). a = 1 while decays are pending and a = exp(sum) where they are applied, with
 * keep = 0. Where a small sum is applied because the state leaves the pass, a = expm1(sum) and all bits are kept: exp(sum) is rounded
 * the same way at every decode step, and its error would grow from step to step. */
typedef struct { float *a; int32_t *keep; } factors;

typedef struct { vec a; ivec keep; } factor; /* of one channel, in every lane */
INLINE factor factor_of(factors w, int64_t d) { return (factor){splat(w.a[d]), isplat(w.keep[d])}; }
INLINE vec decayed(vec s, factor w) { return s * w.a + (vec)((ivec)s & w.keep); }

/* Tokens are processed in groups of up to 4, a small chunkwise form: with W_i the decay from the state before the group
 * up to token i and D_j that from token j to the group's end, all at most 1,
 *
 *     o_i = (q_i W_i read) S + sum_{j<=i} A_ij v_j          S <- w S + sum_j (k_j D_j write)^T v_j
 *
 * so that a state element is loaded, multiplied and stored once for 4 tokens. w, read (before the group) and write (after it)
 * are the factors of pending decays. */
#define GROUP 4

/* Applies a group to `channels` rows of the state from row d on, over a strip of `vectors` vectors. Channels of a pair share the loads
 * of v. */
INLINE void pass_channels(tile from, tile to, int64_t d, int64_t Kp, const float *q, const float *k, factors w, const float *v,
                          vec out[GROUP][8], int64_t columns, const int channels, const int tokens, const int vectors, const int decays) {
    const int together = tokens == 1 ? 1 : vectors; /* vectors whose chains of additions are in flight at once */
    factor wd[2];
    for (int c = 0; decays && c < channels; c++) wd[c] = factor_of(w, d + c);
    for (int at = 0; at < vectors; at += together) {
        vec s[2][4];
        for (int c = 0; c < channels; c++)
            for (int j = 0; j < together; j++) s[c][j] = load(from.data + (d + c) * from.row + (at + j) * LANES);
        for (int c = 0; c < channels; c++)
            for (int i = 0; i < tokens; i++)
                for (int j = 0; j < together; j++) out[i][at + j] += s[c][j] * splat(q[i * Kp + d + c]);
        for (int c = 0; decays && c < channels; c++)
            for (int j = 0; j < together; j++) s[c][j] = decayed(s[c][j], wd[c]);
        for (int i = 0; i < tokens; i++)
            for (int j = 0; j < together; j++) {
                vec value = load(v + i * columns + (at + j) * LANES);
                for (int c = 0; c < channels; c++) s[c][j] += splat(k[i * Kp + d + c]) * value;
            }
        for (int c = 0; c < channels; c++)
            for (int j = 0; j < together; j++) store(to.data + (d + c) * to.row + (at + j) * LANES, s[c][j]);
    }
}

/* One group over one strip of columns: q holds q_i W_i, k holds k_j D_j, the output rows hold A v. Outputs stay in registers. */
INLINE void strip(tile from, tile to, int64_t K, int64_t Kp, const float *q, const float *k, factors w, const float *v, float *o,
                  int64_t columns, const int tokens, const int vectors, const int decays, wanted *f) {
    vec out[GROUP][8];
    for (int i = 0; i < tokens; i++)
        for (int j = 0; j < vectors; j++) out[i][j] = load(o + i * columns + j * LANES);
    int64_t d = 0;
    for (; tokens > 1 && d + 2 <= K; d += 2) {
        if (d & 2) prefetch_one(f);
        pass_channels(from, to, d, Kp, q, k, w, v, out, columns, 2, tokens, vectors, decays);
    }
    for (; d < K; d++) {
        const float *ahead = from.data + (d + 16) * from.row;
        for (int line = 0; tokens == 1 && line < vectors * LANES; line += 16) __builtin_prefetch(ahead + line);
        pass_channels(from, to, d, Kp, q, k, w, v, out, columns, 1, tokens, vectors, decays);
    }
    for (int i = 0; i < tokens; i++)
        for (int j = 0; j < vectors; j++) store(o + i * columns + j * LANES, out[i][j]);
}

#define STRIPS(TOKENS, VECTORS)                                                                                         \
    for (; tokens == TOKENS && j + VECTORS * LANES <= width; j += VECTORS * LANES) {                                    \
        tile a = {from.data + j, from.row}, b = {to.data + j, to.row};                                                  \
        if (decays) strip(a, b, K, Kp, q, k, w, v + j, o + j, columns, TOKENS, VECTORS, 1, f);                           \
        else strip(a, b, K, Kp, q, k, w, v + j, o + j, columns, TOKENS, VECTORS, 0, f);                                \
    }

/* One group of 1, 2 or 4 tokens: reads the state in `from`, leaves the next in `to` (which may be the same). */
static void pass_group(tile from, tile to, int64_t width, int64_t K, int64_t Kp, const float *q, const float *k, factors w,
                       const float *v, float *o, int64_t columns, int tokens, int decays, wanted *f) {
    int64_t j = 0;
#if REGISTERS >= 32
    STRIPS(4, 4)
#endif
    STRIPS(4, 2)
    STRIPS(4, 1)
    STRIPS(2, 4)
    STRIPS(2, 1)
    STRIPS(1, 8)
    STRIPS(1, 4)
    STRIPS(1, 1)
}

/* Turns rows q, k of a group into q W read and k D write, the state's factors into `total`, and A v into the output rows. `leaves`:
 * whether the state leaves the pass after this group. */
INLINE void prepare(float *q, float *k, const float *g, const float *w, const float *u, pending p, int leaves, factors total, int64_t Kp,
                    const float *v, float *o, int64_t columns, int64_t width, const int tokens, const int decays, const int previous) {
    vec A[GROUP][GROUP] = {}; /* before the lanes are summed */
    for (int64_t d = 0; d < Kp; d += LANES) {
        vec keys[GROUP], decay[GROUP], sum = {}, read = decays ? load(p.read + d) : splat(1);
        addition a = {};
        for (int j = 0; j < tokens; j++) keys[j] = load(k + j * Kp + d);
        for (int j = 0; decays && j < tokens; j++) sum += load(g + j * Kp + d);
        if (decays) a = add_decay(p, d, sum, limit_of(leaves));
        for (int j = 0; decays && j < tokens; j++) decay[j] = tokens > 1 ? load(w + j * Kp + d) : exp_of(a.e);
        if (tokens == 1 && !previous) read = splat(1);
        for (int i = 0; i < tokens; i++) {
            vec query = load(q + i * Kp + d);
            A[i][i] += query * keys[i] * (previous ? load(u + d) : splat(1));
            if (decays && !previous) query *= decay[i];
            for (int j = i - 1; j >= 0; j--) { /* query: q_i times the decay after token j */
                A[i][j] += query * keys[j];
                if (decays) query *= decay[j];
            }
            store(q + i * Kp + d, query * read);
        }
        if (!decays) continue;
        vec factor = choose(a.stays, splat(1), exp_of(a.e)), beyond = a.write;
        ivec small = {};
        if (leaves) small = a.sum >= splat(-1), factor = choose(small, expm1_of(a.e), factor);
        store(total.a + d, factor);
        *(ivec *)(total.keep + d) = small;
        for (int j = tokens - 1; j >= 0; j--) {
            store(k + j * Kp + d, keys[j] * beyond);
            beyond *= decay[j];
        }
    }
    for (int i = 0; i < tokens; i++)
        for (int j = 0; j <= i; j++) A[i][j] = splat(sum_lanes(A[i][j]));
    for (int64_t c = 0; c < width; c += LANES)
        for (int i = 0; i < tokens; i++) {
            vec out = {};
            for (int j = 0; j <= i; j++) out += A[i][j] * load(v + j * columns + c);
            store(o + i * columns + c, out);
        }
}

#define PREPARE(TOKENS, DECAYS, PREVIOUS)                                                                               \
    if (tokens == TOKENS && decays == DECAYS && previous == PREVIOUS)                                                   \
        prepare(q, k, g, w, u, p, leaves, total, Kp, v, o, columns, width, TOKENS, DECAYS, PREVIOUS);
#define PREPARE_EVERY_KIND(TOKENS) PREPARE(TOKENS, 0, 0) PREPARE(TOKENS, 0, 1) PREPARE(TOKENS, 1, 0) PREPARE(TOKENS, 1, 1)

static void prepare_group(float *q, float *k, const float *g, const float *w, const float *u, pending p, int leaves, factors total,
                          int64_t Kp, const float *v, float *o, int64_t columns, int64_t width, int tokens, int decays, int previous) {
    PREPARE_EVERY_KIND(1)
    PREPARE_EVERY_KIND(2)
    PREPARE_EVERY_KIND(4)
}

/* Heads that a unit of the forward pass takes chunk by chunk in turn. Their rows share pages, and one page-table walk
 * then serves them all; their states wait in the second-level cache. With few tokens the states are the traffic: a thread
 * then streams as many adjacent ones as it can. */
static int64_t heads_together(const problem *p, int64_t blocks) {
    int64_t heads = p->T < CHUNK ? 32 : 4;
    if (p->g.data && p->constant_decay) return 1; /* the rows of a constant decay are kept for one head */
    while (heads > 1 && p->N * (p->H / heads) * blocks < 2 * p->threads) heads /= 2;
    return heads;
}

/* Every thread of a team calls this; each takes units until none is left. */
EXPORT void NAME(penstock_forward_, SUFFIX)(problem *p) {
    int64_t K = p->K, Kp = padded(K), columns = block_columns(K, p->V, FORWARD_BLOCK), blocks = (p->V + columns - 1) / columns;
    int64_t heads = heads_together(p, blocks), teams = (p->H + heads - 1) / heads;
    float *memory = scratch_of(heads * (K * columns + 3 * Kp) + 4 * CHUNK * Kp + 2 * CHUNK * columns + 3 * Kp), *scratch = memory;
    if (!memory) return;
    float *states = take(&scratch, heads * K * columns), *sums = take(&scratch, heads * 3 * Kp), *u = take(&scratch, Kp);
    float *w = take(&scratch, CHUNK * Kp), *out = take(&scratch, CHUNK * columns);
    chunk_rows r = {.q = take(&scratch, CHUNK * Kp), .k = take(&scratch, CHUNK * Kp), .g = take(&scratch, CHUNK * Kp)};
    r.v = take(&scratch, CHUNK * columns);
    factors total = {take(&scratch, Kp), (int32_t *)take(&scratch, Kp)};
    int decays = p->g.data != NULL, previous = (int)p->previous;
    uint64_t mode = flush_denormals();

    for (;;) {
        int64_t unit = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
        if (unit >= p->N * teams * blocks) break;
        int64_t block = unit % blocks, first = unit / blocks % teams * heads, n = unit / blocks / teams;
        int64_t last = first + heads < p->H ? first + heads : p->H;
        int64_t column = block * columns, count = p->V - column < columns ? p->V - column : columns, width = padded(count);
        sequence s = find_sequence(p, n);
        int64_t slot = p->slots ? p->slots[n] : n;
        if (slot < 0) continue;
        if (p->advance && !s.length) continue;
        int64_t whole = p->advance ? s.length / PIECE * PIECE : s.length; /* tokens before those that are processed one by one */
        for (int64_t chunk = 0; chunk < s.length || chunk == 0; chunk += CHUNK)
            for (int64_t h = first; h < last; h++) {
                int64_t tokens = s.length - chunk < CHUNK ? s.length - chunk : CHUNK;
                tile S = {states + (h - first) * K * columns, width};
                tile end = in_place(&p->final_state, slot, h, column, count);
                if (p->advance && end.data) S = end;
                tile from = S, to = S;
                pending before = pending_at(sums + (h - first) * 3 * Kp, Kp);
                if (chunk == 0) {
                    tile begin = in_place(&p->initial_state, slot, h, column, count);
                    if (begin.data && tokens) from = begin;
                    else load_state(S, &p->initial_state, slot, h, K, column, count);
                    nothing_pending(before, Kp);
                    load_constant_decay(p, h, Kp, &r);
                    if (decays && p->constant_decay) exp_row(w, r.g, CHUNK * Kp);
                }
                if (p->u.data) load_row(u, &p->u, h * p->u.stride[0], p->u.stride[1], K);
                load_chunk(p, &s, h, chunk, tokens, Kp, columns, block, 1, &r);
                if (decays && !p->constant_decay) exp_row(w, r.g, tokens / 2 * 2 * Kp);
                int ends = chunk + tokens == s.length;
                for (int64_t i = 0, group; i < tokens; i += group) {
                    int64_t left = p->advance && chunk + i >= whole ? 1 : tokens - i, t;
                    group = left >= 4 ? 4 : left >= 2 ? 2 : 1, t = chunk + i + group;
                    float *q = r.q + i * Kp, *k = r.k + i * Kp, *v = r.v + i * columns, *o = out + i * columns;
                    int more = h + 1 < last; /* else the first head again, a chunk later */
                    wanted f = want_tokens(p, &s, more ? h + 1 : first, chunk + i + (more ? 0 : CHUNK), group, column, count);
                    /* The state leaves the pass, with all decays applied: at the end and, in place, after each piece. */
                    int leaves = t == s.length || (p->advance && (t % PIECE == 0 || t > whole));
                    prepare_group(q, k, r.g + i * Kp, w + i * Kp, u, before, leaves, total, Kp, v, o, columns,
                                  width, (int)group, decays, previous);
                    if (end.data && leaves) to = end;
                    pass_group(from, to, width, K, Kp, q, k, total, v, o, columns, (int)group, decays, &f);
                    from = S;
                    if (p->advance && leaves && !end.data) { /* rounded to the dtype of the pool */
                        store_state(&p->final_state, slot, h, K, column, count, S);
                        if (t < s.length) load_state(S, &p->final_state, slot, h, K, column, count);
                    }
                }
                for (int64_t i = 0; i < tokens; i++) store_token(&p->output, &s, chunk + i, h, column, out + i * columns, count);
                if (ends && !p->advance && to.data == S.data) store_state(&p->final_state, slot, h, K, column, count, S);
            }
    }
    restore_denormals(mode);
    free_scratch(memory);
}
