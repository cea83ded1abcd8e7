/* Tokens and states of sequences: rows of one token, tiles of a state, lines to prefetch. For every family over tokens. */
#ifndef PENSTOCK_SEQUENCES_H
#define PENSTOCK_SEQUENCES_H

#include "rows.h"

#define PIECE 64 /* tokens of an update in place between roundings of the state, as in tokens/pieces.py */

/* One sequence: its length and where token 0 lies in each tensor (the last token if time is reversed). */
typedef struct { int64_t row, first, length, direction; } sequence;

/* Sequence n: the tokens cu_seqlens[n] to cu_seqlens[n + 1] of row 0, or, without cu_seqlens, the T tokens of row n. */
static inline sequence sequence_of(const int64_t *cu_seqlens, int64_t T, int reverse, int64_t n) {
    int64_t row = cu_seqlens ? 0 : n, begin = cu_seqlens ? cu_seqlens[n] : 0, end = cu_seqlens ? cu_seqlens[n + 1] : T;
    return (sequence){row, reverse ? end - 1 : begin, end - begin, reverse ? -1 : 1};
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

/* A state block that can be read and written in place; data is NULL if it needs a copy. */
static inline tile in_place(const tensor *x, int64_t n, int64_t h, int64_t column, int64_t columns) {
    if (!x->data || x->dtype != FLOAT32 || x->stride[3] != 1 || columns % LANES) return (tile){NULL, 0};
    return (tile){(float *)x->data + offset(x, n, h, 0) + column, x->stride[2]};
}

/* Columns of the states in a block of this many floats. */
static inline int64_t block_columns(int64_t K, int64_t V, int64_t floats) {
    int64_t columns = floats / K / LANES * LANES;
    return columns < LANES ? LANES : columns > padded(V) ? padded(V) : columns;
}

#define STAGGER 16 /* floats after arrays of rows: 4096 bytes apart, the rows of a token would contend for one set of the L1 cache */

INLINE float *take(float **scratch, int64_t n) { float *p = *scratch; *scratch += n; return p; }

static inline uint64_t flush_denormals(void) { /* subnormal numbers of a decaying state would be slow */
    uint64_t old = 0;
#if defined(__x86_64__)
    old = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr((unsigned)old | 0x8040);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" : : "r"(old | 1 << 24) : "memory");
#endif
    return old;
}

static inline void restore_denormals(uint64_t old) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr((unsigned)old);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(old) : "memory");
#else
    (void)old;
#endif
}

/* Cache lines to prefetch. Rows of one head are H rows apart, a page or more: too far for the hardware prefetcher. Prefetches are
 * interleaved with the arithmetic, because a burst fills the few line-fill buffers and stalls. */
typedef struct { const char *line[512]; int64_t count, next; } wanted;

INLINE void want_token(wanted *f, const tensor *x, const sequence *s, int64_t t, int64_t h, int64_t column, int64_t n) {
    if (t >= s->length || !x->data) return;
    int64_t size = x->dtype == FLOAT32 ? 4 : x->dtype == FLOAT64 ? 8 : 2;
    const char *row = (const char *)x->data + (at(x, s, t, h) + column * x->stride[3]) * size;
    for (int64_t byte = 0; byte < n * size && f->count < 512; byte += 64) f->line[f->count++] = row + byte;
}

INLINE void prefetch_one(wanted *f) {
    if (f->next < f->count) __builtin_prefetch(f->line[f->next++]);
}

#endif
