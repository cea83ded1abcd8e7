/* Output and final state, token after token; updates in place are forward passes on rows of a pool. problem.h has the formulas.
 *
 * A unit of work is one sequence, one head and some columns. Threads take units from a shared counter, which balances sequences of
 * different lengths. The order of sums depends on nothing but K, so bits depend neither on the units nor on the threads.
 *
 * Compiled once per target, with LANES floats per register and SUFFIX appended to names. */
#include "walk.h"

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

/* A unit of the call, and the memory of a thread. */
typedef struct {
    const problem *p;
    sequence s;
    int64_t slot, h, column, columns; /* columns of the unit */
    float *state, *v, *u, *out;
    run run;
    pending sums;
} unit;

static void load_unit(unit *w) {
    for (int64_t c = 0; c < w->columns; c += STRIP * LANES)
        load_state(strip_at(w->state, w->p->K, c, w->columns), &w->p->initial_state, w->slot, w->h, w->p->K, w->column + c,
                   width_of_strip(c, w->columns));
}

static void store_unit(const unit *w) {
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
    want_tokens(p, &w->s, w->h, t + count, CHUNK, w->column, w->columns, &f);
    m->count = count, m->leaves = leaves, m->ahead = &f;
    for (int64_t c = 0; c < w->columns; c += STRIP * LANES) {
        tile S = direct.data ? (tile){direct.data + c, direct.row} : strip_at(w->state, p->K, c, w->columns);
        m->v = w->v + c, m->u = w->u, m->output = w->out + c;
        run_tokens(m, S, S, 0, padded(width_of_strip(c, w->columns)), p->g.data != NULL, has_two_streams(p), 1);
    }
    for (int64_t i = 0; i < count; i++) store_token(&p->output, &w->s, t + i, w->h, w->column, w->out + i * m->columns, w->columns);
}

/* All tokens of a sequence, one after another: the state leaves the pass after the last. */
static void pass_sequence(unit *w) {
    const problem *p = w->p;
    load_unit(w);
    for (int64_t t = 0; t < w->s.length; t += CHUNK)
        pass(w, t, w->s.length - t < CHUNK ? w->s.length - t : CHUNK, 0, (tile){NULL, 0});
    if (!p->final_state.data) return;
    for (int64_t c = 0; p->g.data && c < w->columns; c += STRIP * LANES)
        apply_pending(strip_at(w->state, p->K, c, w->columns), p->K, padded(width_of_strip(c, w->columns)), w->sums, p->scalar != 0);
    store_unit(w);
}

/* In place: the state leaves the pass, rounded to the dtype of the pool, after each 64 tokens and after each token of the rest. */
static void pass_in_place(unit *w) {
    const problem *p = w->p;
    int64_t length = w->s.length, whole = length / PIECE * PIECE;
    if (!length) return;
    tile pool = in_place(&p->final_state, w->slot, w->h, w->column, w->columns);
    int rounds = p->final_state.dtype != FLOAT32;
    if (length >= PIECE) pool.data = NULL;
    if (!pool.data) load_unit(w);
    for (int64_t t = 0, count; t < length; t += count) {
        count = t < whole ? CHUNK : 1;
        int leaves = t >= whole || (t + count) % PIECE == 0;
        pass(w, t, count, leaves, pool);
        if (!pool.data && leaves && (rounds || t + count == length)) {
            store_unit(w);
            if (t + count < length) load_unit(w);
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

/* Every thread of a team calls this; each takes units until none is left. */
void NAME(penstock_delta_forward_, SUFFIX)(problem *p) {
    int64_t K = p->K, Kp = padded(K), columns = columns_of_unit(p), blocks = (p->V + columns - 1) / columns, rows = CHUNK * columns + STAGGER;
    float *memory = scratch_of(K * columns + 3 * rows + floats_of_rows(Kp) + 3 * Kp), *rest = memory;
    if (!memory) { p->out_of_memory = 1; return; }
    unit w = {.p = p, .run = {.K = K, .Kp = Kp, .columns = columns}};
    w.state = take(&rest, K * columns), w.v = take(&rest, rows), w.u = take(&rest, rows), w.out = take(&rest, rows);
    w.sums = pending_at(take_rows(&w.run.r, rest, Kp), Kp);
    unsigned mode = flush_denormals();
    for (;;) {
        int64_t taken = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
        if (taken >= p->N * p->H * blocks) break;
        int64_t n = taken / blocks / p->H;
        w.slot = p->slots ? p->slots[n] : n;
        if (w.slot < 0) continue;
        w.s = sequence_of(p->cu_seqlens, p->T, 0, n), w.h = taken / blocks % p->H, w.column = taken % blocks * columns;
        w.columns = p->V - w.column < columns ? p->V - w.column : columns;
        nothing_pending(w.sums, Kp);
        if (p->advance) pass_in_place(&w);
        else pass_sequence(&w);
    }
    restore_denormals(mode);
    free(memory);
}
