// Shared by the forward and the backward pass: the argument, the distribution of the state over threads, and loads of tokens.
//
// A thread block holds COLUMNS columns of one head's state S [K,V], K = V = HEAD, and processes one token after another. Each warp holds
// 16 rows, each lane 4 of these rows and 2 columns: lane 8 * kk + vv holds rows 4 * kk + 0..3 of its warp and columns 2 * vv + 0..1.
//
// Macros: HEAD; X, the type of q, k, v, output and their gradients; G, U and S0, the types of decay, bonus and initial state; F, the type
// of the final state; I, the type of cu_seqlens and slots; STATIC, whether all tokens have the same decay.

constexpr int COLUMNS = 16, ROWS = 4, COLS = 2, WARPS = HEAD / 16, THREADS = 32 * WARPS, BLOCKS = HEAD / COLUMNS;

struct Tensor {
    void *data;
    long long stride[4];  // in elements; tokens have axes B, T, H and channel, states N, H, K and V, the bonus H and K
};

struct Call {  // as in launch.py
    Tensor q, k, v, g, u, initial_state, output, final_state;
    Tensor d_output, d_final_state, dq, dk, dv, dg, du, d_initial_state;
    const I *cu_seqlens, *slots;
    float *kept;
    float scale;
    int T, H, reverse, span, spans;  // span and spans: of the backward pass
};

// N adjacent numbers, loaded in one instruction of 64 or 128 bits.
template <int N> struct alignas(4 * N) Few {
    float x[N];
    __device__ float operator[](int i) const { return x[i]; }
};
template <int N> __device__ inline Few<N> few(const float *from) { return *reinterpret_cast<const Few<N> *>(from); }

struct Place {  // the position of a thread
    int block, row, column, warp, kk, vv;
    int n, h, b, length;    // sequence, head, row of the batch; number of tokens
    long long begin, first; // the first token in memory and in time
    int step;               // token t of the sequence, in the order of its time, is first + t * step

    __device__ explicit Place(const Call &call) {
        block = blockIdx.x % BLOCKS;
        h = blockIdx.x / BLOCKS % call.H;
        n = blockIdx.x / BLOCKS / call.H;
        bool packed = call.cu_seqlens;
        begin = packed ? call.cu_seqlens[n] : 0;
        length = packed ? call.cu_seqlens[n + 1] - begin : call.T;
        b = packed ? 0 : n;
        step = call.reverse ? -1 : 1;
        first = call.reverse ? begin + length - 1 : begin;
        warp = threadIdx.x / 32;
        kk = threadIdx.x % 32 / 8;
        vv = threadIdx.x % 8;
        row = 16 * warp + ROWS * kk;
        column = block * COLUMNS + COLS * vv;
    }
};

template <typename T> struct Channel {  // of all tokens of a sequence and head
    T *at;
    int step;
    __device__ T &operator[](int t) const { return at[(long long)t * step]; }
};
template <typename T> __device__ inline Channel<T> channel(const Tensor &x, const Place &p, int which) {
    T *at = (T *)x.data + p.b * x.stride[0] + p.first * x.stride[1] + p.h * x.stride[2] + which * x.stride[3];
    return {at, int(p.step * x.stride[1])};
}

// Loads a tensor's part of a chunk of tokens from global memory to shared memory through registers. The loads are issued one chunk ahead,
// so that their latency overlaps with the computation of the previous chunk. Tokens after the last are 0 and do not change the state.
template <typename T, int TOKENS, int WIDTH> struct Coming {
    static constexpr int AT_ONCE = THREADS / WIDTH, TIMES = (TOKENS + AT_ONCE - 1) / AT_ONCE;
    static constexpr bool ALL = TOKENS % AT_ONCE == 0;  // whether all threads load the same number of elements
    Channel<T> from;
    T held[TIMES];

    __device__ Coming(const Tensor &x, const Place &p, int first_channel) : from(channel<T>(x, p, first_channel + threadIdx.x % WIDTH)) {}

    __device__ void ask(int chunk, int length) {
        const int left = length - chunk * TOKENS;
        const T *next = &from[chunk * TOKENS + token(0)];
#pragma unroll
        for (int i = 0; i < TIMES; i++, next += AT_ONCE * (long long)from.step)
            held[i] = token(i) < left && (ALL || token(i) < TOKENS) ? *next : T{};
    }
    __device__ void put(float (&to)[TOKENS][WIDTH], float factor = 1.0f) const {
#pragma unroll
        for (int i = 0; i < TIMES; i++)
            if (ALL || token(i) < TOKENS) to[token(i)][threadIdx.x % WIDTH] = number(held[i]) * factor;
    }
    __device__ static int token(int i) { return i * AT_ONCE + threadIdx.x / WIDTH; }
};

// Sums of x[0..N) over N lanes with a distance of STRIDE, by shuffles that halve the number of values: lane `mine` gets the sum of
// x[mine].
template <int N, int STRIDE> __device__ inline float shared_out(float (&x)[N], int mine) {
#pragma unroll
    for (int half = N / 2; half; half /= 2) {
        bool upper = mine & half;
#pragma unroll
        for (int i = 0; i < half; i++) {
            float given = of_lane_across(upper ? x[i] : x[i + half], half * STRIDE);
            x[i] = (upper ? x[i + half] : x[i]) + given;
        }
    }
    return x[0];
}

// The thread's part of a state; zeros if the state is missing.
template <typename T> __device__ inline void load_state(float (&S)[ROWS][COLS], const Tensor &from, int n, const Place &p) {
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            long long at = n * from.stride[0] + p.h * from.stride[1] + (p.row + i) * from.stride[2] + (p.column + c) * from.stride[3];
            S[i][c] = from.data ? number(((const T *)from.data)[at]) : 0.0f;
        }
}
template <typename T> __device__ inline void store_state(const float (&S)[ROWS][COLS], const Tensor &to, int n, const Place &p) {
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            long long at = n * to.stride[0] + p.h * to.stride[1] + (p.row + i) * to.stride[2] + (p.column + c) * to.stride[3];
            store((T *)to.data + at, S[i][c]);
        }
}

// S_t from S_{t-1}, with the token's row factors and its scaled keys.
__device__ inline void advance(float (&S)[ROWS][COLS], const Few<ROWS> &factor, const Few<ROWS> &k, const Few<COLS> &v) {
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int c = 0; c < COLS; c++) S[i][c] = S[i][c] * factor[i] + k[i] * v[c];
}

// Add the partial sums of the warps and write the totals, one element per thread and iteration.
template <int TOKENS>
__device__ inline void write_columns(const Tensor &to, const Place &p, const float (&shares)[WARPS][TOKENS][COLUMNS], int chunk) {
    for (int i = threadIdx.x; i < TOKENS * COLUMNS; i += THREADS) {
        int token = i / COLUMNS, column = i % COLUMNS;
        int t = chunk * TOKENS + token;
        if (t >= p.length) break;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += shares[w][token][column];
        store(&channel<X>(to, p, p.block * COLUMNS + column)[t], sum);
    }
}
