/* Output and final state, token after token; updates in place are forward passes on rows of a pool. problem.h has the formulas.
 *
 * A unit of work is one sequence, a few heads and some columns. Threads take units from a shared counter, which balances sequences of
 * different lengths. The heads of a unit are computed chunk by chunk in turn: their rows share pages, so one page-table walk serves them
 * all. The order of sums depends on nothing but K, so bits depend neither on the units nor on the threads.
 *
 * Compiled once per target, with LANES floats per register and SUFFIX appended to names. */
#include "walk.h"

#define HEADS 8        /* at most, of a unit */
#define FLOATS 65536   /* of their states: 256 KiB, half a second-level cache */

/* A state as tiles of STRIP vectors, [K, STRIP * LANES] each: the rows of a strip are next to each other, and do not contend for a few
 * sets of the first-level cache. */
typedef struct { float *memory; int64_t K, Kp, width; } strips;

INLINE int64_t width_of_strip(int64_t column, int64_t columns) {
    int64_t left = columns - column;
    return left < STRIP * LANES ? left : STRIP * LANES;
}

INLINE tile strip_at(float *state, int64_t K, int64_t column, int64_t columns) {
    return (tile){state + K * column, padded(width_of_strip(column, columns))};
}

/* The decays that are still pending, at most half a nat, with all bits of the state kept. */
static void apply_pending(tile S, int64_t K, int64_t width, pending p, int scalar) {
    for (int64_t d = 0; d < K; d++) {
        vec factor = splat(expm1_of(exponential_of(splat(p.sum[scalar ? 0 : d])))[0]);
        for (int64_t j = 0; j < width; j += LANES) store(S.data + d * S.row + j, load(S.data + d * S.row + j) * factor + load(S.data + d * S.row + j));
    }
}

/* A unit of the call, at one of its heads, and the memory of a thread. */
typedef struct {
    const problem *p;
    sequence s;
    int64_t slot, first, heads, h, column, columns; /* heads and columns of the unit */
    float *states, *sums_of_heads;                  /* of all heads */
    float *state, *v, *u, *out;
    run run;
    pending sums;
} unit;

static void at_head(unit *w, int64_t head) {
    w->h = w->first + head;
    w->state = w->states + head * w->run.K * w->run.columns;
    w->sums = pending_at(w->sums_of_heads + head * 3 * w->run.Kp, w->run.Kp);
}

static void load_head(unit *w) {
    for (int64_t c = 0; c < w->columns; c += STRIP * LANES)
        load_state(strip_at(w->state, w->p->K, c, w->columns), &w->p->initial_state, w->slot, w->h, w->p->K, w->column + c,
                   width_of_strip(c, w->columns));
}

static void store_head(const unit *w) {
    for (int64_t c = 0; c < w->columns; c += STRIP * LANES)
        store_state(&w->p->final_state, w->slot, w->h, w->p->K, w->column + c, width_of_strip(c, w->columns),
                    strip_at(w->state, w->p->K, c, w->columns));
}

/* Tokens t to t + count. `direct` is the pool's own memory, or its data is NULL. */
static void pass(unit *w, int64_t t, int64_t count, int leaves, tile direct) {
    const problem *p = w->p;
    run *m = &w->run;
    wanted f;
    prepare(p, &w->s, w->h, t, count, m->Kp, leaves, leaves && count == 1, w->sums, &m->r);
    for (int64_t i = 0; i < count; i++) load_token(w->v + i * m->columns, &p->v, &w->s, t + i, w->h, w->column, w->columns);
    int last = w->h + 1 == w->first + w->heads; /* then the first head again, a chunk later */
    want_tokens(p, &w->s, last ? w->first : w->h + 1, last ? t + count : t, CHUNK, w->column, w->columns, &f);
    m->count = count, m->leaves = leaves, m->ahead = &f;
    for (int64_t c = 0; c < w->columns; c += STRIP * LANES) {
        tile S = direct.data ? (tile){direct.data + c, direct.row} : strip_at(w->state, p->K, c, w->columns);
        m->v = w->v + c, m->u = w->u, m->output = w->out + c;
        run_tokens(m, S, S, 0, padded(width_of_strip(c, w->columns)), p->g.data != NULL, has_two_streams(p), 1);
    }
    for (int64_t i = 0; i < count; i++) store_token(&p->output, &w->s, t + i, w->h, w->column, w->out + i * m->columns, w->columns);
}

/* All tokens of a sequence: the state leaves the pass after the last. */
static void pass_sequence(unit *w) {
    const problem *p = w->p;
    for (int64_t head = 0; head < w->heads; head++) at_head(w, head), load_head(w);
    for (int64_t t = 0; t < w->s.length; t += CHUNK)
        for (int64_t head = 0; head < w->heads; head++) {
            at_head(w, head);
            pass(w, t, w->s.length - t < CHUNK ? w->s.length - t : CHUNK, 0, (tile){NULL, 0});
        }
    for (int64_t head = 0; head < w->heads && p->final_state.data; head++) {
        at_head(w, head);
        for (int64_t c = 0; p->g.data && c < w->columns; c += STRIP * LANES)
            apply_pending(strip_at(w->state, p->K, c, w->columns), p->K, padded(width_of_strip(c, w->columns)), w->sums, p->scalar != 0);
        store_head(w);
    }
}

/* In place: the state leaves the pass, rounded to the dtype of the pool, after each 64 tokens and after each token of the rest. With fewer
 * than 64 tokens it is used where it lies, if it is float32 there. */
static void pass_in_place(unit *w) {
    const problem *p = w->p;
    int64_t length = w->s.length, whole = length / PIECE * PIECE;
    int rounds = p->final_state.dtype != FLOAT32;
    for (int64_t t = 0, count; t < length; t += count)
        for (int64_t head = 0; head < w->heads; head++) {
            at_head(w, head);
            tile pool = length < PIECE ? in_place(&p->final_state, w->slot, w->h, w->column, w->columns) : (tile){NULL, 0};
            count = t < whole ? CHUNK : 1;
            int leaves = t >= whole || (t + count) % PIECE == 0;
            if (t == 0 && !pool.data) load_head(w);
            pass(w, t, count, leaves, pool);
            if (!pool.data && leaves && (rounds || t + count == length)) {
                store_head(w);
                if (t + count < length) load_head(w);
            }
        }
}

/* Columns of a unit: all, or fewer where sequences and heads are fewer than the threads. */
static int64_t columns_of_unit(const problem *p) {
    int64_t columns = (p->V + STRIP * LANES - 1) / (STRIP * LANES) * STRIP * LANES;
    while (columns > STRIP * LANES && p->N * p->H * ((p->V + columns - 1) / columns) < 2 * p->threads)
        columns = (columns / (STRIP * LANES) + 1) / 2 * STRIP * LANES;
    return columns;
}

/* Heads of a unit: fewer where there would not be enough units for all threads. */
static int64_t heads_of_unit(const problem *p, int64_t columns, int64_t blocks) {
    int64_t heads = HEADS;
    while (heads > 1 && (heads * p->K * columns > FLOATS || p->N * (p->H / heads) * blocks < 2 * p->threads)) heads /= 2;
    return heads;
}

/* Every thread of a team calls this; each takes units until none is left. */
EXPORT void NAME(penstock_delta_forward_, SUFFIX)(problem *p) {
    int64_t K = p->K, Kp = padded(K), columns = columns_of_unit(p), blocks = (p->V + columns - 1) / columns, rows = CHUNK * columns + STAGGER;
    int64_t heads = heads_of_unit(p, columns, blocks), teams = (p->H + heads - 1) / heads;
    float *memory = scratch_of(heads * (K * columns + 3 * Kp) + 3 * rows + floats_of_rows(Kp)), *rest = memory;
    if (!memory) return;
    unit w = {.p = p, .run = {.K = K, .Kp = Kp, .columns = columns}};
    w.states = take(&rest, heads * K * columns), w.sums_of_heads = take(&rest, heads * 3 * Kp);
    w.v = take(&rest, rows), w.u = take(&rest, rows), w.out = take(&rest, rows);
    take_rows(&w.run.r, rest, Kp);
    uint64_t mode = flush_denormals();
    for (;;) {
        int64_t taken = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
        if (taken >= p->N * teams * blocks) break;
        int64_t n = taken / blocks / teams;
        w.slot = p->slots ? p->slots[n] : n;
        if (w.slot < 0) continue;
        w.s = sequence_of(p->cu_seqlens, p->T, 0, n), w.column = taken % blocks * columns;
        w.first = taken / blocks % teams * heads, w.heads = p->H - w.first < heads ? p->H - w.first : heads;
        w.columns = p->V - w.column < columns ? p->V - w.column : columns;
        for (int64_t head = 0; head < w.heads; head++) at_head(&w, head), nothing_pending(w.sums, Kp);
        if (p->advance) pass_in_place(&w);
        else pass_sequence(&w);
    }
    restore_denormals(mode);
    free_scratch(memory);
}
