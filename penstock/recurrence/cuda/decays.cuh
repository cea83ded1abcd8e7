// Decays. Weak decays stay pending: a row of the state is exp(sum) times the stored row, reads are multiplied by exp(sum), writes by
// exp(-sum). So weak decays are not lost when the state is rounded. Forward, a token whose sum is below WEAK applies it, so no later token
// changes an output. Backward, if the sum at the end of a chunk is below WEAK, the chunk's decays are applied token by token.

constexpr float WEAK = -4.0f;
constexpr float LOG2E = 1.4426950216f, LOG2E_REST = 1.9259629e-8f;

__device__ inline float near_exponential(float x) { return exp2_near(x * LOG2E); }  // for small x

// exp(x) for x <= 0: the error of exp2(x * LOG2E) grows with x.
__device__ inline float exponential(float x) {
    x = fmaxf(x, -105.0f);  // 0 in float32
    const float power = x * LOG2E, rest = fmaf(x, LOG2E_REST, fmaf(x, LOG2E, -power)), e = exp2_near(power);
    return fmaf(e, 0.69314718f * rest, e);
}

// exp(x) - 1 for -0.5 <= x <= 0.
__device__ inline float expm1_near(float x) {
    float series = 1.0f / 40320;
    series = series * x + 1.0f / 5040;
    series = series * x + 1.0f / 720;
    series = series * x + 1.0f / 120;
    series = series * x + 1.0f / 24;
    series = series * x + 1.0f / 6;
    series = series * x + 1.0f / 2;
    return series * x * x + x;
}

// A compensated sum of many terms: the sum and its rounding error.
struct Sum {
    float sum = 0.0f, rest = 0.0f;

    __device__ void add(float x) {
        const float addend = x + rest, all = sum + addend;
        rest = addend - (all - sum);
        sum = all;
    }
};

// The log decays of a channel that are not yet applied to the state.
struct Pending : Sum {
    // Add the sum of a chunk; returns whether it stays pending.
    __device__ bool pend(float chunk) {
        add(chunk);
        const bool weak = sum >= WEAK;
        sum = weak ? sum : 0.0f;
        rest = weak ? rest : 0.0f;
        return weak;
    }
};

// Apply pending decays. Weak ones are applied by expm1, so that rounding errors are random: a rounded exp(sum) has the same relative error
// at every decode step.
__device__ inline void apply(float (&S)[ROWS][COLS], const Few<ROWS> &sum) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const bool small = sum[i] > -0.5f;
        const float factor = small ? expm1_near(sum[i]) : exponential(sum[i]);
#pragma unroll
        for (int c = 0; c < COLS; c++) S[i][c] = S[i][c] * factor + (small ? S[i][c] : 0.0f);
    }
}

// Loads the decays of one channel in a chunk of tokens (see Coming). Two threads share a channel: each loads all of its decays to sum
// them, and writes the factors of every second token.
template <int TOKENS> struct Decays {
    static constexpr int MINE = TOKENS / 2;
    Channel<G> from;
    G held[TOKENS];
    float before[MINE], after[MINE], own[MINE];  // see sums and exponents

    __device__ explicit Decays(const Tensor &g, const Place &p) : from(channel<G>(g, p, threadIdx.x % HEAD)) {}

    __device__ void ask(int chunk, int length) {
        const int left = length - chunk * TOKENS;
        const G *next = &from[chunk * TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++, next += from.step) held[t] = t < left ? *next : G{};
    }
    // The i-th token for which this thread writes factors.
    __device__ static int token(int i) { return 2 * i + threadIdx.x / HEAD; }

    // Fill `before`, `after` and `own` with exponents of reads, writes and the state's rows, and add to the pending decays.
    __device__ void exponents(Pending &pending) {
        const bool odd = threadIdx.x / HEAD;
        float sum = 0.0f;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const float next = sum + number(held[t]), whole = pending.sum + next;
            const bool weak = whole >= WEAK;
            if (odd == t % 2) before[t / 2] = pending.sum + sum, after[t / 2] = weak ? -whole : 0.0f, own[t / 2] = weak ? 0.0f : whole;
            pending.sum = weak ? pending.sum : 0.0f;
            pending.rest = weak ? pending.rest : 0.0f;
            sum = weak ? next : 0.0f;
        }
        pending.add(sum);
    }

    // Fill them with sums in loop order without and with the token's own decay, and with the own decay. Returns the sum over the chunk.
    template <bool BACKWARDS = false> __device__ float sums() {
        const bool odd = threadIdx.x / HEAD;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < TOKENS; n++) {
            const int t = BACKWARDS ? TOKENS - 1 - n : n;
            const float g = number(held[t]), next = sum + g;
            if (odd == t % 2) before[t / 2] = sum, after[t / 2] = next, own[t / 2] = g;
            sum = next;
        }
        return sum;
    }
};

// Factors of a token: of the state, of reads before it, and of writes.
struct Passing {
    float factor, read, write;
};

// Shared memory holds for each token exp(pending + sum) if decays stay pending, else -exp(g). The factors of a token follow from its value
// and from the value of the previous token in loop order; the value before a chunk is exp(pending).
__device__ inline Passing passing(float before, float own) {
    const float read = negative(before) ? 1.0f : before;
    return negative(own) ? Passing{-own * read, read, 1.0f} : Passing{1.0f, read, 1.0f / own};
}
