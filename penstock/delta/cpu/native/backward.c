/* All gradients. In terms of P_t and the rows of a token (problem.h), with dP_t the gradient of P_t after everything that reads it:
 *
 *     dquery_t = dO_t P_t^T        dwrite_t = u_t dP_t^T       dadd_t = v_t dP_t^T       du_t = write_t dP_t
 *     one stream:   dv_t = vary_t beta_t du_t      dbeta_t = sum du_t o u_t / beta_t      dx_t = -beta_t du_t
 *     two streams:  dv_t = add_t dP_t                                                   dx_t = du_t
 *     dremove_t = dx_t P_{t-1}^T            dP'_{t-1} = decay_t o dP_t + remove_t^T dx_t
 *     dg_t = rowsum(P_{t-1} o dP'_{t-1})    dP_{t-1} = dP'_{t-1} + query_{t-1}^T dO_{t-1}
 *
 * with only the first term of dP' in dg where the removal reads the state before its decay. The factors of P_{t-1} and of its gradient
 * cancel in dg, a sum of products without a difference. Where a decay is 0 each of these terms is 0.
 *
 * States are recomputed: first those before spans, then those before the chunks of a span, then those after every token of a chunk. A token
 * backward in time reads and writes an element of dP once: when dP_{t-1} is written, the sums of token t - 1 over rows take it.
 *
 * A unit of work is one (sequence, head); threads take units from a shared counter. Compiled once per target, with LANES floats per
 * register and SUFFIX appended to names. */
#include "walk.h"

#define BACKWARD_BLOCK 8192 /* floats of state in a block of columns: CHUNK states of them are 512 KiB, a second-level cache */
#define SPAN_FLOATS 2097152 /* of states before the chunks of a span; longer sequences have spans of about the square root of their chunks */

/* A thread's memory. Blocks of columns of the state are tiles [K, columns], one after another. */
typedef struct {
    const problem *p;
    sequence s;
    int64_t n, h;
    int64_t Kp, columns, blocks, tile, state, chunks, span; /* tile, state: floats; chunks, span: of the longest sequence */
    float *spans, *checkpoints;                             /* states before spans; before the chunks of one */
    float *span_sums, *sums_before;                         /* their sums of decays */
    float *states, *dP;                                     /* after every token of a chunk, of one block; the gradient */
    float *v, *d_out, *u, *error, *dv;                      /* [blocks, CHUNK, columns] */
    float *du, *dx, *du_part, *dv_part;                     /* [columns]; parts: of a few rows, 0 between them */
    float *dquery, *dremove, *dwrite, *dadd, *dg;           /* [CHUNK, Kp] */
    float dbeta[CHUNK];
    pending sums;
    token_rows r;
    wanted ahead;
} workspace;

static float *make_workspace(workspace *m, const problem *p) {
    int64_t longest = 0;
    for (int64_t n = 0; n < p->N; n++) {
        int64_t length = sequence_of(p->cu_seqlens, p->T, 0, n).length;
        longest = length > longest ? length : longest;
    }
    int64_t Kp = padded(p->K), columns = block_columns(p->K, p->V, BACKWARD_BLOCK), blocks = (p->V + columns - 1) / columns;
    int64_t tile = p->K * columns, state = tile * blocks, chunks = (longest + CHUNK - 1) / CHUNK, span = chunks;
    if (chunks * state > SPAN_FLOATS)
        for (span = 1; span * span < chunks;) span++;
    int64_t spans = span ? (chunks + span - 1) / span : 0, rows_k = CHUNK * Kp + STAGGER, rows_v = CHUNK * columns * blocks + STAGGER;
    *m = (workspace){.p = p, .Kp = Kp, .columns = columns, .blocks = blocks, .tile = tile, .state = state, .chunks = chunks, .span = span};
    int64_t floats = (spans + span + 2) * (state + 3 * Kp) + tile * CHUNK + 5 * rows_v + 4 * (columns + STAGGER) + 5 * rows_k + 3 * Kp;
    float *memory = scratch_of(floats + floats_of_rows(Kp)), *rest = memory;
    if (!memory) return NULL;
    m->spans = take(&rest, spans * state), m->checkpoints = take(&rest, (span + 1) * state), m->dP = take(&rest, state);
    m->span_sums = take(&rest, spans * 3 * Kp), m->sums_before = take(&rest, (span + 1) * 3 * Kp), m->sums = pending_at(take(&rest, 3 * Kp), Kp);
    m->states = take(&rest, tile * CHUNK);
    m->v = take(&rest, rows_v), m->d_out = take(&rest, rows_v), m->u = take(&rest, rows_v), m->error = take(&rest, rows_v);
    m->dv = take(&rest, rows_v), m->du = take(&rest, columns + STAGGER), m->dx = take(&rest, columns + STAGGER);
    m->du_part = take(&rest, columns + STAGGER), m->dv_part = take(&rest, columns + STAGGER);
    memset(m->du_part, 0, (size_t)(2 * (columns + STAGGER)) * 4);
    m->dquery = take(&rest, rows_k), m->dremove = take(&rest, rows_k), m->dwrite = take(&rest, rows_k), m->dadd = take(&rest, rows_k);
    m->dg = take(&rest, rows_k);
    take_rows(&m->r, rest, Kp);
    return memory;
}

/* Columns of a block: the last may have fewer. */
INLINE int64_t width_of(const workspace *m, int64_t block) {
    int64_t left = m->p->V - block * m->columns;
    return left < m->columns ? left : m->columns;
}

INLINE int64_t tokens_of(const workspace *m, int64_t chunk) {
    int64_t left = m->s.length - chunk * CHUNK;
    return left < CHUNK ? left : CHUNK;
}

static void load_values(const workspace *m, float *to, const tensor *x, int64_t from, int64_t count) {
    for (int64_t b = 0; b < m->blocks; b++)
        for (int64_t i = 0; i < count; i++)
            load_token(to + (b * CHUNK + i) * m->columns, x, &m->s, from + i, m->h, b * m->columns, width_of(m, b));
}

static void load_blocks(const workspace *m, float *to, const tensor *x) {
    for (int64_t b = 0; b < m->blocks; b++)
        load_state((tile){to + b * m->tile, m->columns}, x, m->n, m->h, m->p->K, b * m->columns, width_of(m, b));
}

/* Prepare a chunk from the sums of decays before it. */
static void prepare_chunk(workspace *m, int64_t chunk) {
    prepare(m->p, &m->s, m->h, chunk * CHUNK, tokens_of(m, chunk), m->Kp, 0, 0, m->sums, &m->r);
    load_values(m, m->v, &m->p->v, chunk * CHUNK, tokens_of(m, chunk));
}

/* A block of the states of a prepared chunk: after all tokens in `to` or, with step, after each. */
static void walk_block(workspace *m, int64_t chunk, int64_t b, const float *from, float *to, int64_t step) {
    int64_t row = b * CHUNK * m->columns;
    run one = {.r = m->r, .K = m->p->K, .Kp = m->Kp, .columns = m->columns, .count = tokens_of(m, chunk)};
    one.v = m->v + row, one.u = m->u + row, one.error = m->error + row, one.ahead = &m->ahead;
    run_tokens(&one, (tile){(float *)from, m->columns}, (tile){to, m->columns}, step, padded(width_of(m, b)), m->p->g.data != NULL,
               has_two_streams(m->p), 0);
}

static void walk_chunk(workspace *m, int64_t chunk, const float *from, float *to) {
    for (int64_t b = 0; b < m->blocks; b++) walk_block(m, chunk, b, from + b * m->tile, to + b * m->tile, 0);
}

/* States and sums of decays before the chunks of a span; the last are those after it, if another span follows. */
static void walk_span(workspace *m, int64_t span, int64_t chunks) {
    int64_t first = span * m->span, Kp = m->Kp;
    memcpy(m->checkpoints, m->spans + span * m->state, (size_t)m->state * 4);
    memcpy(m->sums.sum, m->span_sums + span * 3 * Kp, (size_t)(3 * Kp) * 4);
    for (int64_t c = 0; c < m->span && first + c < chunks; c++) {
        memcpy(m->sums_before + c * 3 * Kp, m->sums.sum, (size_t)(3 * Kp) * 4);
        if (first + c + 1 == chunks) break;
        prepare_chunk(m, first + c);
        want_tokens(m->p, &m->s, m->h, (first + c + 1) * CHUNK, CHUNK, 0, m->p->V, &m->ahead);
        walk_chunk(m, first + c, m->checkpoints + c * m->state, m->checkpoints + (c + 1) * m->state);
    }
}

typedef struct { const float *decay, *remove, *write, *add, *query, *write_before, *add_before; } row_factors;
typedef struct { vec query, remove, write, add, g; } row_sums;

/* One row of dP, one token backward in time. `more`: the token is not the first of the chunk; du and dv become the sums of the token
 * before. */
INLINE row_sums retreat_row(row_factors r, int64_t d, const float *before, float *dP, int64_t width, const float *u, const float *v,
                            const float *dx, const float *d_out, float *du, float *dv, const int decays, const int after, const int two,
                            const int more) {
    row_sums sum = {};
    vec decay = splat(decays ? r.decay[d] : 1), remove = splat(r.remove[d]), query = splat(more ? r.query[d] : 0);
    vec write = splat(more ? r.write_before[d] : 0), add = splat(more && two ? r.add_before[d] : 0);
    for (int64_t j = 0; j < width; j += LANES) {
        vec s = load(before + j), ds = load(dP + j), x = load(dx + j);
        sum.write += ds * load(u + j);
        if (two) sum.add += ds * load(v + j);
        sum.remove += s * x;
        if (decays) ds *= decay;
        if (decays && !after) sum.g += s * ds;
        ds += remove * x;
        if (decays && after) sum.g += s * ds;
        if (more) {
            vec out = load(d_out + j);
            ds += query * out;
            sum.query += s * out;
            store(du + j, load(du + j) + write * ds);
            if (two) store(dv + j, load(dv + j) + add * ds);
        }
        store(dP + j, ds);
    }
    return sum;
}

/* The last token of a chunk: dP takes its query, and du and dv its sums. */
INLINE vec begin_row(float query, float write, float add, const float *after, float *dP, int64_t width, const float *d_out, float *du,
                     float *dv, const int two) {
    vec sum = {};
    for (int64_t j = 0; j < width; j += LANES) {
        vec out = load(d_out + j), ds = load(dP + j) + splat(query) * out;
        sum += load(after + j) * out;
        store(du + j, load(du + j) + splat(write) * ds);
        if (two) store(dv + j, load(dv + j) + splat(add) * ds);
        store(dP + j, ds);
    }
    return sum;
}

/* Lane i of the result is the sum of the lanes of x[i]. */
#define OWN(LANE, STAGE) (((LANE) & (STAGE)) ? (LANE) + LANES : (LANE))
#define OTHER(LANE, STAGE) (((LANE) & (STAGE)) ? ((LANE) ^ (STAGE)) + LANES : ((LANE) ^ (STAGE)))
#define FOUR(PICK, LANE, STAGE) PICK(LANE, STAGE), PICK(LANE + 1, STAGE), PICK(LANE + 2, STAGE), PICK(LANE + 3, STAGE)
#if LANES == 4
#define EVERY(PICK, STAGE) FOUR(PICK, 0, STAGE)
#elif LANES == 8
#define EVERY(PICK, STAGE) FOUR(PICK, 0, STAGE), FOUR(PICK, 4, STAGE)
#else
#define EVERY(PICK, STAGE) FOUR(PICK, 0, STAGE), FOUR(PICK, 4, STAGE), FOUR(PICK, 8, STAGE), FOUR(PICK, 12, STAGE)
#endif
#define ADD_PAIRS(STAGE)                                                                                                \
    for (int i = 0; LANES > STAGE && i < LANES / STAGE / 2; i++) {                                                      \
        vec a = x[2 * i], b = x[2 * i + 1];                                                                             \
        x[i] = __builtin_shufflevector(a, b, EVERY(OWN, STAGE)) + __builtin_shufflevector(a, b, EVERY(OTHER, STAGE));   \
    }
INLINE vec sums_of(vec x[LANES]) {
    ADD_PAIRS(1) ADD_PAIRS(2)
#if LANES > 4
    ADD_PAIRS(4)
#endif
#if LANES > 8
    ADD_PAIRS(8)
#endif
    return x[0];
}

INLINE void add_sums(float *to, vec x[LANES]) { store(to, load(to) + sums_of(x)); }

/* Sums over rows are sums of parts, which have smaller rounding errors. */
INLINE void add_part(float *to, float *part, int64_t width) {
    for (int64_t j = 0; j < width; j += LANES) {
        store(to + j, load(to + j) + load(part + j));
        store(part + j, splat(0));
    }
}

/* All rows of a block, one token backward in time. The sums over columns of LANES rows are added to the rows' gradients at once. */
INLINE void retreat(workspace *m, int64_t i, const float *before, float *dP, int64_t width, int64_t row, const int decays,
                    const int after, const int two, const int more) {
    int64_t K = m->p->K, Kp = m->Kp, columns = m->columns, at = i * Kp, prior = (i - 1) * Kp;
    row_factors r = {m->r.decay + at, m->r.remove + at, m->r.write + at, m->r.add + at};
    const float *u = m->u + row + i * columns, *v = m->v + row + i * columns, *d_out = NULL;
    float *dv = NULL;
    if (more) {
        r.query = m->r.query + prior, r.write_before = m->r.write + prior, r.add_before = m->r.add + prior;
        d_out = m->d_out + row + (i - 1) * columns, dv = m->dv + row + (i - 1) * columns;
    }
    for (int64_t d = 0; d < K; d += LANES) {
        vec query[LANES], remove[LANES], write[LANES], add[LANES], g[LANES];
        prefetch_one(&m->ahead), prefetch_one(&m->ahead);
        for (int64_t n = 0; n < LANES; n++) {
            row_sums sum = {};
            if (d + n < K)
                sum = retreat_row(r, d + n, before + (d + n) * columns, dP + (d + n) * columns, width, u, v, m->dx, d_out, m->du_part, m->dv_part,
                                  decays, after, two, more);
            query[n] = sum.query, remove[n] = sum.remove, write[n] = sum.write, add[n] = sum.add, g[n] = sum.g;
        }
        if (more) add_part(m->du, m->du_part, width), add_sums(m->dquery + prior + d, query);
        if (more && two) add_part(dv, m->dv_part, width);
        add_sums(m->dremove + at + d, remove), add_sums(m->dwrite + at + d, write);
        if (two) add_sums(m->dadd + at + d, add);
        if (decays) add_sums(m->dg + at + d, g);
    }
}

/* dv_t, dx_t and the part of dbeta_t of a block, from du_t. */
INLINE void finish_values(workspace *m, int64_t i, int64_t row, int64_t width, const int two) {
    const float *error = m->error + row + i * m->columns;
    float *dv = m->dv + row + i * m->columns;
    vec sum = {};
    for (int64_t j = 0; j < width; j += LANES) {
        vec du = load(m->du + j);
        if (!two) sum += du * load(error + j), du *= splat(m->r.beta[i]), store(dv + j, du * splat(m->r.vary[i]));
        store(m->dx + j, two ? du : -du);
        store(m->du + j, splat(0));
    }
    if (!two) m->dbeta[i] += sum_lanes(sum);
}

/* A block of a chunk, whose last token is i. `first` is the state before the chunk. */
INLINE void backward_tokens(workspace *m, int64_t i, const float *first, int64_t b, const int decays, const int after, const int two) {
    int64_t K = m->p->K, columns = m->columns, width = padded(width_of(m, b)), row = b * CHUNK * columns, at = i * m->Kp;
    float *dP = m->dP + b * m->tile, *end = m->states + i * m->tile;
    for (int64_t d = 0; d < K; d += LANES) {
        vec query[LANES] = {};
        for (int64_t n = 0; n < LANES && d + n < K; n++)
            query[n] = begin_row(m->r.query[at + d + n], m->r.write[at + d + n], two ? m->r.add[at + d + n] : 0, end + (d + n) * columns,
                                 dP + (d + n) * columns, width, m->d_out + row + i * columns, m->du_part, m->dv_part, two);
        add_sums(m->dquery + at + d, query), add_part(m->du, m->du_part, width);
        if (two) add_part(m->dv + row + i * columns, m->dv_part, width);
    }
    for (; i > 0; i--) {
        finish_values(m, i, row, width, two);
        retreat(m, i, m->states + (i - 1) * m->tile, dP, width, row, decays, after, two, 1);
    }
    finish_values(m, 0, row, width, two);
    retreat(m, 0, first, dP, width, row, decays, after, two, 0);
}

INLINE void multiply_row(float *to, const float *x, const float *factor, int64_t n) { /* factor may be NULL: 1 */
    for (int64_t d = 0; d < n; d += LANES) store(to + d, factor ? load(x + d) * load(factor + d) : load(x + d));
}

static void store_wanted(const workspace *m, const tensor *x, int64_t t, int64_t column, const float *from, int64_t n) {
    if (x->data) store_token(x, &m->s, t, m->h, column, from, n);
}

static void store_gradients(workspace *m, int64_t from, int64_t count) {
    const problem *p = m->p;
    int64_t Kp = m->Kp;
    int decays = p->g.data != NULL, two = has_two_streams(p);
    for (int64_t i = 0; i < count; i++) {
        int64_t at = i * Kp, t = from + i;
        float *dq = m->dquery + at, *removal = m->dremove + at, *writing = m->dwrite + at, *dk = m->dadd + at, *dg = m->dg + at;
        for (int64_t d = 0; d < Kp; d += LANES) store(dq + d, load(dq + d) * splat((float)p->scale));
        multiply_row(dq, dq, decays ? m->r.read + at : NULL, Kp);
        multiply_row(removal, removal, decays ? m->r.removed + at : NULL, Kp);
        multiply_row(writing, writing, decays ? m->r.written + at : NULL, Kp);
        store_wanted(m, &p->dq, t, 0, dq, p->K);
        if (two) {
            multiply_row(dk, dk, decays ? m->r.written + at : NULL, Kp);
            for (int64_t d = 0; d < Kp; d += LANES) store(dk + d, load(dk + d) * splat(m->r.vary[i]));
            store_wanted(m, &p->da, t, 0, removal, p->K);
            store_wanted(m, &p->db, t, 0, writing, p->K);
        } else {
            for (int64_t d = 0; d < Kp; d += LANES) store(dk + d, load(removal + d) + load(writing + d));
            store_wanted(m, &p->dbeta, t, 0, m->dbeta + i, 1);
        }
        store_wanted(m, &p->dk, t, 0, dk, p->K);
        if (p->scalar) {
            vec sum = {};
            for (int64_t d = 0; d < Kp; d += LANES) sum += load(dg + d);
            float total = sum_lanes(sum);
            store_wanted(m, &p->dg, t, 0, &total, 1);
        } else store_wanted(m, &p->dg, t, 0, dg, p->K);
        for (int64_t b = 0; b < m->blocks; b++)
            store_wanted(m, &p->dv, t, b * m->columns, m->dv + (b * CHUNK + i) * m->columns, width_of(m, b));
    }
}

#define BACKWARD(DECAYS, AFTER, TWO)                                                                                    \
    if (decays == DECAYS && after == AFTER && two == TWO) backward_tokens(m, count - 1, first, b, DECAYS, AFTER, TWO);

/* The gradients of one chunk: states forward in time, then their gradients backward. c: the chunk in its span. */
static void backward_chunk(workspace *m, int64_t chunk, int64_t c, int last) {
    const problem *p = m->p;
    int64_t Kp = m->Kp, count = tokens_of(m, chunk), from = chunk * CHUNK;
    int decays = p->g.data != NULL, after = decays && p->after, two = has_two_streams(p);
    memcpy(m->sums.sum, m->sums_before + c * 3 * Kp, (size_t)(3 * Kp) * 4);
    prepare_chunk(m, chunk);
    load_values(m, m->d_out, &p->d_output, from, count);
    if (chunk) want_tokens(p, &m->s, m->h, from - CHUNK, CHUNK, 0, p->V, &m->ahead);
    else m->ahead.count = 0;
    if (last && decays) /* the gradient of S becomes that of P */
        for (int64_t d = 0; d < p->K * m->blocks; d++) {
            vec read = splat(m->sums.read[p->scalar ? 0 : d % p->K]);
            for (int64_t j = 0; j < m->columns; j += LANES) store(m->dP + d * m->columns + j, load(m->dP + d * m->columns + j) * read);
        }
    float *rows[] = {m->dquery, m->dremove, m->dwrite, m->dadd, m->dg};
    for (int n = 0; n < 5; n++) memset(rows[n], 0, (size_t)(count * Kp) * 4);
    memset(m->dv, 0, (size_t)(CHUNK * m->columns * m->blocks) * 4);
    memset(m->du, 0, (size_t)m->columns * 4);
    memset(m->dbeta, 0, sizeof m->dbeta);
    for (int64_t b = 0; b < m->blocks; b++) {
        const float *first = m->checkpoints + c * m->state + b * m->tile;
        walk_block(m, chunk, b, first, m->states, m->tile);
        BACKWARD(0, 0, 0) BACKWARD(0, 0, 1) BACKWARD(1, 0, 0) BACKWARD(1, 0, 1) BACKWARD(1, 1, 0) BACKWARD(1, 1, 1)
    }
    store_gradients(m, from, count);
}

static void backward_unit(workspace *m) {
    const problem *p = m->p;
    int64_t Kp = m->Kp, chunks = (m->s.length + CHUNK - 1) / CHUNK, spans = chunks ? (chunks + m->span - 1) / m->span : 0;
    load_blocks(m, m->dP, &p->d_final_state);
    if (spans) load_blocks(m, m->spans, &p->initial_state);
    nothing_pending(m->sums, Kp);
    for (int64_t span = 0; span < spans; span++) { /* forward in time: the state before every span; the chunks of the last one remain */
        memcpy(m->span_sums + span * 3 * Kp, m->sums.sum, (size_t)(3 * Kp) * 4);
        walk_span(m, span, chunks);
        if (span + 1 < spans) memcpy(m->spans + (span + 1) * m->state, m->checkpoints + m->span * m->state, (size_t)m->state * 4);
    }
    for (int64_t span = spans - 1; span >= 0; span--) {
        int64_t first = span * m->span, end = first + m->span < chunks ? first + m->span : chunks;
        if (span + 1 < spans) walk_span(m, span, chunks);
        for (int64_t chunk = end - 1; chunk >= first; chunk--) backward_chunk(m, chunk, chunk - first, chunk + 1 == chunks);
    }
    for (int64_t b = 0; b < m->blocks; b++)
        store_state(&p->d_initial_state, m->n, m->h, p->K, b * m->columns, width_of(m, b), (tile){m->dP + b * m->tile, m->columns});
}

/* Every thread of a team calls this; each takes units until none is left. */
EXPORT void NAME(penstock_delta_backward_, SUFFIX)(problem *p) {
    workspace m;
    float *memory = make_workspace(&m, p);
    if (!memory) return;
    uint64_t mode = flush_denormals();
    for (;;) {
        int64_t unit = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
        if (unit >= p->N * p->H) break;
        m.h = unit % p->H, m.n = unit / p->H;
        m.s = sequence_of(p->cu_seqlens, p->T, 0, m.n);
        backward_unit(&m);
    }
    restore_denormals(mode);
    free_scratch(memory);
}
