/* The token-serial recurrence on a CPU: forward (also the decode step), and backward with states recomputed from
 * checkpoints. Formulas and names as in docs/recurrence.md:
 *
 *     S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t
 *     updated:  o_t = scale q_t S_t          previous:  o_t = scale q_t (S_{t-1} + diag(u) k_t^T v_t)
 *
 * A unit of work is one (sequence, head), in the forward pass a few heads and one block of value columns. Threads take units from
 * a shared counter, so that sequences of very different lengths balance. The state of a block, [K, columns],
 * stays in a cache near the core. Sums over time that leave a unit (du, dg of a constant decay) are
 * kept in double.
 *
 * Compiled once per target: LANES floats to a register, SUFFIX behind the names. */
#include "rows.h"
#include <stdlib.h>

#define FORWARD_BLOCK 16384 /* floats of state held while tokens pass, in the second-level cache: a group of tokens touches each once */
#define BACKWARD_BLOCK 4096 /* the same in the backward pass: CHUNK states of them fit a 512 KiB second-level cache */
#define CHUNK 16            /* tokens between checkpoints in the backward pass */
#define JOIN(a, b) a##b
#define NAME(a, b) JOIN(a, b)

enum { DECAY_GRADIENT_ROW, DECAY_GRADIENT_SUM, DECAY_GRADIENT_STATIC };

typedef struct {
    tensor q, k, v, g, u, initial_state, output, final_state;          /* [B,T,H,*], u [H,K], states [N,H,K,V] */
    tensor d_output, d_final_state;                                    /* gradients given ... */
    tensor dq, dk, dv, dg, du, d_initial_state;                        /* ... and wanted; du, static dg: float64 [N,H,K] */
    const int64_t *cu_seqlens;                                         /* [N+1], or NULL: sequence n is batch row n */
    const int64_t *slots;                                              /* [N] rows of the states, negative: skip; or NULL */
    int64_t N, T, H, K, V, previous, reverse, decay_gradient, threads;
    double scale;
    int64_t next;                                                      /* the unit of work to be taken next */
    int64_t out_of_memory;                                             /* set if a thread could not allocate its scratch */
} problem;

/* One sequence: its length and where token 0 lies in each tensor (the last token if time is reversed). */
typedef struct { int64_t row, first, length, direction; } sequence;

static sequence find_sequence(const problem *p, int64_t n) {
    int64_t row = p->cu_seqlens ? 0 : n;
    int64_t begin = p->cu_seqlens ? p->cu_seqlens[n] : 0, end = p->cu_seqlens ? p->cu_seqlens[n + 1] : p->T;
    return (sequence){row, p->reverse ? end - 1 : begin, end - begin, p->reverse ? -1 : 1};
}

INLINE int64_t at(const tensor *x, const sequence *s, int64_t t, int64_t h) {
    return offset(x, s->row, s->first + t * s->direction, h);
}

/* Cache lines that will be wanted soon. Rows of one head lie H rows apart, a page or more: too far for the processor to
 * foresee. They are asked for one by one between the arithmetic, since a burst fills the few slots for missing lines and stalls. */
typedef struct { const char *line[256]; int64_t count, next; } wanted;

INLINE void want_token(wanted *f, const tensor *x, const sequence *s, int64_t t, int64_t h, int64_t column, int64_t n) {
    if (t >= s->length || !x->data) return;
    int64_t size = x->dtype == FLOAT32 ? 4 : x->dtype == FLOAT64 ? 8 : 2;
    const char *row = (const char *)x->data + (at(x, s, t, h) + column * x->stride[3]) * size;
    for (int64_t byte = 0; byte < n * size && f->count < 256; byte += 64) f->line[f->count++] = row + byte;
}

INLINE void prefetch_one(wanted *f) {
    if (f->next < f->count) __builtin_prefetch(f->line[f->next++]);
}

static void load_token(float *to, const tensor *x, const sequence *s, int64_t t, int64_t h, int64_t column, int64_t n) {
    load_row(to, x, at(x, s, t, h) + column * x->stride[3], x->stride[3], n);
}

static void store_token(const tensor *x, const sequence *s, int64_t t, int64_t h, int64_t column, const float *from, int64_t n) {
    store_row(x, at(x, s, t, h) + column * x->stride[3], x->stride[3], from, n);
}

/* Rows of K state vectors, `row` floats apart, each padded to whole vectors. */
typedef struct { float *data; int64_t row; } tile;

/* Where a state block can be read and written in place; data is NULL where it needs a copy. */
static tile in_place(const tensor *x, int64_t n, int64_t h, int64_t column, int64_t columns) {
    if (!x->data || x->dtype != FLOAT32 || x->stride[3] != 1 || columns % LANES) return (tile){NULL, 0};
    return (tile){(float *)x->data + offset(x, n, h, 0) + column, x->stride[2]};
}

static void load_state(tile S, const tensor *x, int64_t n, int64_t h, int64_t K, int64_t column, int64_t columns) {
    for (int64_t d = 0; d < K; d++)
        if (x->data) load_row(S.data + d * S.row, x, offset(x, n, h, d) + column * x->stride[3], x->stride[3], columns);
        else memset(S.data + d * S.row, 0, (size_t)padded(columns) * 4);
}

static void store_state(const tensor *x, int64_t n, int64_t h, int64_t K, int64_t column, int64_t columns, tile S) {
    for (int64_t d = 0; x->data && d < K; d++)
        store_row(x, offset(x, n, h, d) + column * x->stride[3], x->stride[3], S.data + d * S.row, columns);
}

static float dot(const float *a, const float *b, int64_t n) { /* over whole vectors; both padded with zeros */
    vec total = {};
    for (int64_t i = 0; i < n; i += LANES) total += load(a + i) * load(b + i);
    return sum_lanes(total);
}

/* The factor w of one channel, in the form of decay_row, on every lane */
typedef struct { vec a; ivec keep; } factor;
INLINE factor factor_of(decay_row w, int64_t d) { return (factor){splat(w.a[d]), isplat(w.keep[d])}; }
INLINE vec decayed(vec s, factor w) { return s * w.a + (vec)((ivec)s & w.keep); }

/* Tokens are taken in groups of up to 4, as a chunkwise form in small: with W_i the decay from the state before the group
 * up to token i and D_j that from token j to the group's end, all at most 1,
 *
 *     o_i = (q_i W_i) S + sum_{j<=i} A_ij v_j          S <- w S + sum_j (k_j D_j)^T v_j
 *
 * so that a state element is loaded, decayed and stored once for 4 tokens. */
#define GROUP 4

/* What a group does to `channels` rows of the state from row d on, over a strip of `vectors` vectors. Channels of a pair share the
 * loads of v. */
INLINE void pass_channels(tile from, tile to, int64_t d, int64_t Kp, const float *q, const float *k, decay_row w, const float *v,
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
INLINE void strip(tile from, tile to, int64_t K, int64_t Kp, const float *q, const float *k, decay_row w, const float *v, float *o,
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
static void pass_group(tile from, tile to, int64_t width, int64_t K, int64_t Kp, const float *q, const float *k, decay_row w,
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

/* Turns rows q, k of a group into q W and k D, leaves the group's decay in `total`, and A v in the output rows. */
INLINE void prepare(float *q, float *k, const float *g, const float *w, const float *u, decay_row total, int64_t Kp, const float *v,
                    float *o, int64_t columns, int64_t width, const int tokens, const int decays, const int previous) {
    vec A[GROUP][GROUP] = {}; /* before the lanes are summed */
    for (int64_t d = 0; d < Kp; d += LANES) {
        vec keys[GROUP], factors[GROUP], sum = {};
        for (int j = 0; j < tokens; j++) keys[j] = load(k + j * Kp + d);
        for (int j = 0; decays && j < tokens; j++) factors[j] = load(w + j * Kp + d), sum += load(g + j * Kp + d);
        for (int i = 0; i < tokens; i++) {
            vec query = load(q + i * Kp + d);
            A[i][i] += query * keys[i] * (previous ? load(u + d) : splat(1));
            if (decays && !previous) query *= factors[i];
            for (int j = i - 1; j >= 0; j--) { /* query: q_i times the decay after token j */
                A[i][j] += query * keys[j];
                if (decays) query *= factors[j];
            }
            store(q + i * Kp + d, query);
        }
        vec beyond = splat(1);
        for (int j = tokens - 1; decays && j >= 0; j--) {
            store(k + j * Kp + d, keys[j] * beyond);
            beyond *= factors[j];
        }
        if (decays && tokens > 1) store(total.w + d, sum);
    }
    if (decays && tokens > 1) decay_factors(total, total.w, Kp); /* of one token: its own */
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
        prepare(q, k, g, w, u, total, Kp, v, o, columns, width, TOKENS, DECAYS, PREVIOUS);
#define PREPARE_EVERY_KIND(TOKENS) PREPARE(TOKENS, 0, 0) PREPARE(TOKENS, 0, 1) PREPARE(TOKENS, 1, 0) PREPARE(TOKENS, 1, 1)

static void prepare_group(float *q, float *k, const float *g, const float *w, const float *u, decay_row total, int64_t Kp, const float *v,
                          float *o, int64_t columns, int64_t width, int tokens, int decays, int previous) {
    PREPARE_EVERY_KIND(1)
    PREPARE_EVERY_KIND(2)
    PREPARE_EVERY_KIND(4)
}

static int64_t block_columns(int64_t K, int64_t V, int64_t floats) {
    int64_t columns = floats / K / LANES * LANES;
    return columns < LANES ? LANES : columns > padded(V) ? padded(V) : columns;
}

/* Memory on cache lines: a vector that straddles two costs twice. */
static float *scratch_of(int64_t floats) { return aligned_alloc(64, ((size_t)floats * 4 + 63) / 64 * 64); }

INLINE float *take(float **scratch, int64_t n) { float *p = *scratch; *scratch += n; return p; }

INLINE decay_row take_decays(float **scratch, int64_t n) {
    return (decay_row){take(scratch, n), (int32_t *)take(scratch, n), take(scratch, n)};
}

static unsigned flush_denormals(void) { /* a state that fades away must not slow the processor down */
#ifdef __x86_64__
    unsigned old = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(old | 0x8040);
    return old;
#else
    return 0;
#endif
}

static void restore_denormals(unsigned old) {
#ifdef __x86_64__
    __builtin_ia32_ldmxcsr(old);
#endif
}

/* The rows of one chunk, float32: [CHUNK, Kp] and, per block of columns, [CHUNK, columns]. */
typedef struct { float *q, *k, *g, *v, *d_out, *dq, *dk, *dg, *dv; decay_row w; } chunk_rows;

static decay_row decays_of(const chunk_rows *r, int64_t i, int64_t Kp) {
    return (decay_row){r->w.a + i * Kp, r->w.keep + i * Kp, r->w.w + i * Kp};
}

/* Load `count` tokens: q (scaled), k, the decay factors, and v and d_out for some blocks of columns. d_out may be absent. */
static void load_chunk(const problem *p, const sequence *s, int64_t h, int64_t from, int64_t count, int64_t Kp, int64_t columns,
                       int64_t first_block, int64_t blocks, const chunk_rows *r) {
    int static_decay = p->g.stride[1] == 0; /* then the factors of the unit's first chunk, a full one, serve for all */
    for (int64_t i = 0; i < count; i++) {
        load_token(r->q + i * Kp, &p->q, s, from + i, h, 0, p->K);
        load_token(r->k + i * Kp, &p->k, s, from + i, h, 0, p->K);
        if (p->g.data && !static_decay) load_token(r->g + i * Kp, &p->g, s, from + i, h, 0, p->K);
        for (int64_t b = 0; b < blocks; b++) {
            int64_t column = (first_block + b) * columns, left = p->V - column, width = left < columns ? left : columns;
            load_token(r->v + (b * CHUNK + i) * columns, &p->v, s, from + i, h, column, width);
            if (p->d_output.data) load_token(r->d_out + (b * CHUNK + i) * columns, &p->d_output, s, from + i, h, column, width);
        }
    }
    for (int64_t d = 0; d < count * Kp; d += LANES) store(r->q + d, load(r->q + d) * splat((float)p->scale));
    if (p->g.data && !static_decay) decay_factors(r->w, r->g, count * Kp);
}

/* The factors of a decay that does not change with time, for every token of a chunk. */
static void load_static_decay(const problem *p, int64_t h, int64_t Kp, const chunk_rows *r) {
    if (!p->g.data || p->g.stride[1]) return;
    for (int64_t i = 0; i < CHUNK; i++) load_row(r->g + i * Kp, &p->g, h * p->g.stride[2], p->g.stride[3], p->K);
    decay_factors(r->w, r->g, CHUNK * Kp);
}

/* Tokens t to t + count of one head. */
static wanted want_tokens(const problem *p, const sequence *s, int64_t h, int64_t t, int64_t count, int64_t column, int64_t columns) {
    wanted f;
    f.count = f.next = 0;
    for (int64_t end = t + count; t < end; t++) {
        want_token(&f, &p->q, s, t, h, 0, p->K);
        want_token(&f, &p->k, s, t, h, 0, p->K);
        want_token(&f, &p->v, s, t, h, column, columns);
        if (p->g.stride[1]) want_token(&f, &p->g, s, t, h, 0, p->K);
    }
    return f;
}

/* Heads that a unit of the forward pass takes chunk by chunk in turn. Their rows share pages, and one page-table walk
 * then serves them all; their states wait in the second-level cache. With few tokens the states are the traffic: a thread
 * then streams as many adjacent ones as it can. */
static int64_t heads_together(const problem *p, int64_t blocks) {
    int64_t heads = p->T < CHUNK ? 32 : 4;
    if (p->g.data && !p->g.stride[1]) return 1; /* the factors of a constant decay are kept for one head */
    while (heads > 1 && p->N * (p->H / heads) * blocks < 2 * p->threads) heads /= 2;
    return heads;
}

/* Every thread of a team calls this; each takes units until none is left. */
void NAME(penstock_forward_, SUFFIX)(problem *p) {
    int64_t K = p->K, Kp = padded(K), columns = block_columns(K, p->V, FORWARD_BLOCK), blocks = (p->V + columns - 1) / columns;
    int64_t heads = heads_together(p, blocks), teams = (p->H + heads - 1) / heads;
    float *memory = scratch_of(heads * K * columns + 6 * CHUNK * Kp + 2 * CHUNK * columns + 4 * Kp), *scratch = memory;
    if (!memory) { p->out_of_memory = 1; return; }
    float *states = take(&scratch, heads * K * columns), *u = take(&scratch, Kp), *out = take(&scratch, CHUNK * columns);
    chunk_rows r;
    r.q = take(&scratch, CHUNK * Kp), r.k = take(&scratch, CHUNK * Kp), r.g = take(&scratch, CHUNK * Kp);
    r.w = take_decays(&scratch, CHUNK * Kp);
    r.v = take(&scratch, CHUNK * columns);
    decay_row total = take_decays(&scratch, Kp);
    unsigned mode = flush_denormals();

    for (;;) {
        int64_t unit = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
        if (unit >= p->N * teams * blocks) break;
        int64_t block = unit % blocks, first = unit / blocks % teams * heads, n = unit / blocks / teams;
        int64_t last = first + heads < p->H ? first + heads : p->H;
        int64_t column = block * columns, count = p->V - column < columns ? p->V - column : columns, width = padded(count);
        sequence s = find_sequence(p, n);
        int64_t slot = p->slots ? p->slots[n] : n;
        if (slot < 0) continue;
        for (int64_t chunk = 0; chunk < s.length || chunk == 0; chunk += CHUNK)
            for (int64_t h = first; h < last; h++) {
                int64_t tokens = s.length - chunk < CHUNK ? s.length - chunk : CHUNK;
                tile S = {states + (h - first) * K * columns, width}, from = S, to = S;
                if (chunk == 0) {
                    tile begin = in_place(&p->initial_state, slot, h, column, count);
                    if (begin.data && tokens) from = begin;
                    else load_state(S, &p->initial_state, slot, h, K, column, count);
                    load_static_decay(p, h, Kp, &r);
                }
                if (p->u.data) load_row(u, &p->u, h * p->u.stride[0], p->u.stride[1], K);
                load_chunk(p, &s, h, chunk, tokens, Kp, columns, block, 1, &r);
                tile end = in_place(&p->final_state, slot, h, column, count);
                int ends = chunk + tokens == s.length;
                for (int64_t i = 0, group; i < tokens; i += group) {
                    group = tokens - i >= 4 ? 4 : tokens - i >= 2 ? 2 : 1;
                    float *q = r.q + i * Kp, *k = r.k + i * Kp, *v = r.v + i * columns, *o = out + i * columns;
                    int more = h + 1 < last; /* else the first head again, a chunk later */
                    wanted f = want_tokens(p, &s, more ? h + 1 : first, chunk + i + (more ? 0 : CHUNK), group, column, count);
                    prepare_group(q, k, r.g + i * Kp, r.w.w + i * Kp, u, total, Kp, v, o, columns, width, (int)group,
                                  p->g.data != NULL, (int)p->previous);
                    if (end.data && ends && i + group == tokens) to = end;
                    pass_group(from, to, width, K, Kp, q, k, group == 1 ? decays_of(&r, i, Kp) : total, v, o, columns, (int)group, p->g.data != NULL,
                               &f);
                    from = S;
                }
                for (int64_t i = 0; i < tokens; i++) store_token(&p->output, &s, chunk + i, h, column, out + i * columns, count);
                if (ends && to.data == S.data) store_state(&p->final_state, slot, h, K, column, count, S);
            }
    }
    restore_denormals(mode);
    free(memory);
}

/* The state after one token, without its output, and `rows` channels at a time. With dq, also the gradient of the query:
 * the sum over columns of (state read by this token) o (gradient of the output). */
INLINE void advance_rows(const float *before, float *after, int64_t width, int64_t d, const float *k, decay_row w, const float *v,
                         const float *d_out, float *dq, const int rows, const int decays, const int previous) {
    vec kd[2], to_q[2] = {};
    factor wd[2];
    for (int i = 0; i < rows; i++) { kd[i] = splat(k[d + i]); if (decays) wd[i] = factor_of(w, d + i); }
    before += d * width, after += d * width;
    for (int64_t j = 0; j < width; j += LANES) {
        vec value = load(v + j), gradient = dq ? load(d_out + j) : value;
        for (int i = 0; i < rows; i++) {
            vec s = load(before + i * width + j);
            if (dq && previous) to_q[i] += s * gradient;
            if (decays) s = decayed(s, wd[i]);
            s += kd[i] * value;
            if (dq && !previous) to_q[i] += s * gradient;
            store(after + i * width + j, s);
        }
    }
    for (int i = 0; dq && i < rows; i++) dq[d + i] += sum_lanes(to_q[i]);
}

/* One token backwards in time, `rows` channels at a time: dS is the gradient of S_t, and becomes that of S_{t-1}. */
INLINE void retreat_rows(const float *before, float *dS, int64_t width, int64_t d, const float *q, const float *k, decay_row w,
                         const float *v, const float *d_out, float *dk, float *dg, float *dv, const int rows, const int decays,
                         const int previous) {
    vec qd[2], kd[2], to_k[2] = {}, to_g[2] = {};
    factor wd[2];
    for (int i = 0; i < rows; i++) { qd[i] = splat(q[d + i]), kd[i] = splat(k[d + i]); if (decays) wd[i] = factor_of(w, d + i); }
    before += d * width, dS += d * width;
    for (int64_t j = 0; j < width; j += LANES) {
        vec value = load(v + j), gradient = load(d_out + j), to_v = load(dv + j);
        for (int i = 0; i < rows; i++) {
            vec ds = load(dS + i * width + j);
            if (!previous) ds += qd[i] * gradient;
            to_k[i] += ds * value;
            if (decays) to_g[i] += ds * load(before + i * width + j);
            to_v += kd[i] * ds;
            if (decays) ds = decayed(ds, wd[i]);
            if (previous) ds += qd[i] * gradient;
            store(dS + i * width + j, ds);
        }
        store(dv + j, to_v);
    }
    for (int i = 0; i < rows; i++) {
        dk[d + i] += sum_lanes(to_k[i]);
        if (decays) dg[d + i] += w.w[d + i] * sum_lanes(to_g[i]);
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

static void advance(const float *before, float *after, int64_t width, int64_t K, const float *k, decay_row w, const float *v,
                    int decays) {
    const int previous = 0;
    EVERY_KIND(advance_rows(before, after, width, d, k, w, v, NULL, NULL, rows, decay, prior))
}

static void advance_with_query_gradient(const float *before, float *after, int64_t width, int64_t K, const float *k, decay_row w,
                                        const float *v, const float *d_out, float *dq, int decays, int previous) {
    EVERY_KIND(advance_rows(before, after, width, d, k, w, v, d_out, dq, rows, decay, prior))
}

static void retreat(const float *before, float *dS, int64_t width, int64_t K, const float *q, const float *k, decay_row w,
                    const float *v, const float *d_out, float *dk, float *dg, float *dv, int decays, int previous) {
    EVERY_KIND(retreat_rows(before, dS, width, d, q, k, w, v, d_out, dk, dg, dv, rows, decay, prior))
}

/* Bonus terms of the gradients, the scale, and the results of one chunk to memory. */
static void finish_chunk(const problem *p, const sequence *s, int64_t n, int64_t h, int64_t from, int64_t count, int64_t Kp,
                         int64_t columns, int64_t blocks, const float *u, const chunk_rows *r, double *static_dg) {
    for (int64_t i = 0; i < count; i++) {
        float *q = r->q + i * Kp, *k = r->k + i * Kp, *dq = r->dq + i * Kp, *dk = r->dk + i * Kp, *dg = r->dg + i * Kp;
        float bonus = 0, read = 0; /* bonus = sum scale q u k, read = dO . v */
        if (p->u.data) {
            for (int64_t b = 0; b < blocks; b++) {
                int64_t row = (b * CHUNK + i) * columns, left = p->V - b * columns;
                read += dot(r->v + row, r->d_out + row, padded(left < columns ? left : columns));
            }
            double *du = (double *)p->du.data + (n * p->H + h) * p->K;
            for (int64_t d = 0; d < p->K; d++) {
                bonus += q[d] * u[d] * k[d];
                du[d] += (double)read * q[d] * k[d];
                dq[d] += read * u[d] * k[d];
                dk[d] += read * u[d] * q[d];
            }
        }
        for (int64_t d = 0; d < Kp; d += LANES) store(dq + d, load(dq + d) * splat((float)p->scale));
        store_token(&p->dq, s, from + i, h, 0, dq, p->K);
        store_token(&p->dk, s, from + i, h, 0, dk, p->K);
        if (p->g.data && p->decay_gradient == DECAY_GRADIENT_ROW) store_token(&p->dg, s, from + i, h, 0, dg, p->K);
        else if (p->g.data && p->decay_gradient == DECAY_GRADIENT_SUM) {
            float total = 0;
            for (int64_t d = 0; d < p->K; d++) total += dg[d];
            store_token(&p->dg, s, from + i, h, 0, &total, 1);
        } else if (p->g.data)
            for (int64_t d = 0; d < p->K; d++) static_dg[d] += dg[d];
        for (int64_t b = 0; b < blocks; b++) {
            int64_t row = (b * CHUNK + i) * columns, left = p->V - b * columns, width = left < columns ? left : columns;
            if (p->u.data)
                for (int64_t j = 0; j < padded(width); j += LANES)
                    store(r->dv + row + j, load(r->dv + row + j) + splat(bonus) * load(r->d_out + row + j));
            store_token(&p->dv, s, from + i, h, b * columns, r->dv + row, width);
        }
    }
}

void NAME(penstock_backward_, SUFFIX)(problem *p) {
    int64_t K = p->K, Kp = padded(K), columns = block_columns(K, p->V, BACKWARD_BLOCK), blocks = (p->V + columns - 1) / columns;
    int64_t tile_size = K * columns, state = tile_size * blocks, rows_k = CHUNK * Kp, rows_v = CHUNK * columns * blocks, longest = 0;
    for (int64_t n = 0; n < p->N; n++) {
        int64_t length = find_sequence(p, n).length;
        longest = length > longest ? length : longest;
    }
    int64_t chunks = (longest + CHUNK - 1) / CHUNK;
    float *memory = scratch_of(state * (chunks + 1) + tile_size * (CHUNK + 1) + 9 * rows_k + 3 * rows_v + Kp);
    if (!memory) { p->out_of_memory = 1; return; }
    float *scratch = memory;
    float *checkpoints = take(&scratch, state * chunks), *dS = take(&scratch, state), *states = take(&scratch, tile_size * (CHUNK + 1));
    chunk_rows r;
    r.q = take(&scratch, rows_k), r.k = take(&scratch, rows_k), r.g = take(&scratch, rows_k);
    r.dq = take(&scratch, rows_k), r.dk = take(&scratch, rows_k), r.dg = take(&scratch, rows_k);
    r.w = take_decays(&scratch, rows_k);
    r.v = take(&scratch, rows_v), r.d_out = take(&scratch, rows_v), r.dv = take(&scratch, rows_v);
    float *u = take(&scratch, Kp);
    int decays = p->g.data != NULL, previous = (int)p->previous;
    unsigned mode = flush_denormals();

    for (;;) {
        int64_t unit = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
        if (unit >= p->N * p->H) break;
        int64_t h = unit % p->H, n = unit / p->H;
        sequence s = find_sequence(p, n);
        chunks = (s.length + CHUNK - 1) / CHUNK;
        double *static_dg = p->decay_gradient == DECAY_GRADIENT_STATIC ? (double *)p->dg.data + (n * p->H + h) * K : NULL;
        if (p->u.data) load_row(u, &p->u, h * p->u.stride[0], p->u.stride[1], K);
        load_static_decay(p, h, Kp, &r);
        for (int64_t b = 0; b < blocks; b++) {
            int64_t left = p->V - b * columns, width = left < columns ? left : columns;
            load_state((tile){dS + b * tile_size, padded(width)}, &p->d_final_state, n, h, K, b * columns, width);
            if (chunks) load_state((tile){checkpoints + b * tile_size, padded(width)}, &p->initial_state, n, h, K, b * columns, width);
        }

        for (int64_t c = 0; c + 1 < chunks; c++) { /* forward in time: the state before every chunk */
            load_chunk(p, &s, h, c * CHUNK, CHUNK, Kp, columns, 0, blocks, &r);
            for (int64_t b = 0; b < blocks; b++) {
                int64_t left = p->V - b * columns, width = padded(left < columns ? left : columns);
                float *from = checkpoints + c * state + b * tile_size, *to = from + state;
                for (int64_t i = 0; i < CHUNK; i++) {
                    advance(i ? to : from, to, width, K, r.k + i * Kp, decays_of(&r, i, Kp), r.v + (b * CHUNK + i) * columns, decays);
                }
            }
        }

        for (int64_t c = chunks - 1; c >= 0; c--) { /* backward in time */
            int64_t count = s.length - c * CHUNK < CHUNK ? s.length - c * CHUNK : CHUNK;
            load_chunk(p, &s, h, c * CHUNK, count, Kp, columns, 0, blocks, &r);
            memset(r.dq, 0, (size_t)rows_k * 4), memset(r.dk, 0, (size_t)rows_k * 4), memset(r.dg, 0, (size_t)rows_k * 4);
            memset(r.dv, 0, (size_t)rows_v * 4);
            for (int64_t b = 0; b < blocks; b++) {
                int64_t left = p->V - b * columns, width = padded(left < columns ? left : columns);
                const float *S = checkpoints + c * state + b * tile_size;
                for (int64_t i = 0; i < count; i++) {
                    decay_row w = decays_of(&r, i, Kp);
                    const float *before = i ? states + i * tile_size : S;
                    int64_t row = (b * CHUNK + i) * columns;
                    advance_with_query_gradient(before, states + (i + 1) * tile_size, width, K, r.k + i * Kp, w, r.v + row, r.d_out + row,
                                                r.dq + i * Kp, decays, previous);
                }
                for (int64_t i = count - 1; i >= 0; i--) {
                    int64_t row = (b * CHUNK + i) * columns;
                    decay_row w = decays_of(&r, i, Kp);
                    const float *before = i ? states + i * tile_size : S;
                    float *q = r.q + i * Kp, *k = r.k + i * Kp, *dk = r.dk + i * Kp, *dg = r.dg + i * Kp;
                    retreat(before, dS + b * tile_size, width, K, q, k, w, r.v + row, r.d_out + row, dk, dg, r.dv + row, decays, previous);
                }
            }
            finish_chunk(p, &s, n, h, c * CHUNK, count, Kp, columns, blocks, u, &r, static_dg);
        }
        for (int64_t b = 0; b < blocks; b++) {
            int64_t left = p->V - b * columns;
            int64_t width = left < columns ? left : columns;
            store_state(&p->d_initial_state, n, h, K, b * columns, width, (tile){dS + b * tile_size, padded(width)});
        }
    }
    restore_denormals(mode);
    free(memory);
}
