// Gradients, token after token backwards in time. With dS_t the gradient of S_t, e_t = dO_t . v_t and the state S_{t-1}:
//
//     dq_t = scale * (S_{t-1} dO_t + u k_t e_t)         dv_t = dS_t^T k_t + (scale * q_t u k_t) dO_t
//     dk_t = dS_t v_t + scale * q_t u e_t               dg_t = rowsum(exp(g_t) S_{t-1} o dS_t)
//     du   = sum_t scale * q_t k_t e_t                  dS_{t-1} = diag(exp(g_t)) dS_t + scale * q_t^T dO_t
//
// States cannot be walked backwards, so they are walked forwards three times: from the start, keeping one every `span` tokens; through a
// span, keeping one every 8; through 8 tokens, keeping four in registers. With span near sqrt(8 T) little memory is needed.
//
// dq, dk, dg [B,T,H,BLOCKS * K] and du, and a static decay's dg, [N,H,1,BLOCKS * K] are shares of blocks of columns, float32, to be summed.

constexpr int TOKENS = 8;
constexpr long long STATE = HEAD * COLUMNS;

struct Buffers {
    float q[2][TOKENS][HEAD], k[2][TOKENS][HEAD], lost[2][TOKENS][HEAD], v[2][TOKENS][COLUMNS], d[2][TOKENS][COLUMNS];
};

// A kept state: each thread reads back only what it wrote.
__device__ inline void keep(float *kept, const float (&S)[ROWS][COLS]) {
#pragma unroll
    for (int e = 0; e < ROWS * COLS; e++) kept[e * THREADS + threadIdx.x] = S[e / COLS][e % COLS];
}
__device__ inline void copy(float (&to)[ROWS][COLS], const float (&S)[ROWS][COLS]) {
#pragma unroll
    for (int e = 0; e < ROWS * COLS; e++) to[e / COLS][e % COLS] = S[e / COLS][e % COLS];
}
__device__ inline void recall(float (&S)[ROWS][COLS], const float *kept) {
#pragma unroll
    for (int e = 0; e < ROWS * COLS; e++) S[e / COLS][e % COLS] = kept[e * THREADS + threadIdx.x];
}

// Walk chunks [begin, end) of tokens, keeping the state before every `every` chunks.
__device__ inline void walk(
    const Call &call, const Place &p, Buffers &in, float (&S)[ROWS][COLS], int begin, int end, int every, float *kept) {
    Coming<X, TOKENS, HEAD> k(call.k, p, 0);
    Coming<G, TOKENS, HEAD> g(call.g, p, 0);
    Coming<X, TOKENS, COLUMNS> v(call.v, p, p.block * COLUMNS);
    auto ask = [&](int chunk) { k.ask(chunk, p.length), g.ask(chunk, p.length), v.ask(chunk, p.length); };
    auto put = [&](int turn) { k.put(in.k[turn]), g.put(in.lost[turn], loss), v.put(in.v[turn]); };
    ask(begin);
    put(begin % 2);
    for (int chunk = begin; chunk < end; chunk++) {
        const int turn = chunk % 2;
        if (chunk + 1 < end) ask(chunk + 1);
        __syncthreads();
        if ((chunk - begin) % every == 0) keep(kept + (chunk - begin) / every * STATE, S);
#pragma unroll 4
        for (int t = 0; t < TOKENS; t++)
            advance(S, few<ROWS>(&in.lost[turn][t][p.row]), few<ROWS>(&in.k[turn][t][p.row]), few<COLS>(&in.v[turn][t][COLS * p.vv]));
        put(1 - turn);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) backward(const Call call) {
    alignas(16) __shared__ Buffers in;
    alignas(16) __shared__ float shares[2][WARPS][TOKENS][COLUMNS];
    const Place p(call);
    const float scale = call.scale;
    const int chunks = (p.length + TOKENS - 1) / TOKENS, span = call.span / TOKENS;
    const long long before = ((long long)p.b * call.T + p.begin) / call.span + p.n;  // spans of the sequences before
    float *every_span = call.kept + ((long long)(p.h * BLOCKS + p.block) * call.spans + before) * STATE;
    float *every_chunk = call.kept + ((long long)call.H * BLOCKS * call.spans + (long long)blockIdx.x * span) * STATE;
    float S[ROWS][COLS], dS[ROWS][COLS], u[ROWS], du[ROWS] = {}, static_dg[ROWS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; i++) u[i] = number(((const U *)call.u.data)[p.h * call.u.stride[0] + (p.row + i) * call.u.stride[1]]);
    load_state<S0>(S, call.initial_state, p.n, p);
    load_state<float>(dS, call.d_final_state, p.n, p);
    walk(call, p, in, S, 0, chunks, span, every_span);

    Coming<X, TOKENS, HEAD> q(call.q, p, 0), k(call.k, p, 0);
    Coming<G, TOKENS, HEAD> g(call.g, p, 0);
    Coming<X, TOKENS, COLUMNS> v(call.v, p, p.block * COLUMNS), d(call.d_output, p, p.block * COLUMNS);
    auto ask = [&](int chunk) {
        q.ask(chunk, p.length), k.ask(chunk, p.length), g.ask(chunk, p.length), v.ask(chunk, p.length), d.ask(chunk, p.length);
    };
    auto put = [&](int turn) {
        q.put(in.q[turn], [=](float x) { return x * scale; }), k.put(in.k[turn]), g.put(in.lost[turn], loss);
        v.put(in.v[turn]), d.put(in.d[turn]);
    };
    // Where this lane's sums go: of two tokens and four rows, it gets token vv / 4 and row vv % 4.
    const int my_row = p.row + p.vv % 4, my_token = p.vv / 4;
    const int my_share = p.block * HEAD + my_row;
    const auto dq = channel<float>(call.dq, p, my_share), dk = channel<float>(call.dk, p, my_share);
    const auto dg = channel<float>(call.dg, p, my_share);

    for (int begin = (chunks - 1) / span * span; begin >= 0 && chunks; begin -= span) {
        const int end = begin + span < chunks ? begin + span : chunks;
        recall(S, every_span + begin / span * STATE);
        walk(call, p, in, S, begin, end, 1, every_chunk);
        ask(end - 1);
        put((end - 1) % 2);
        for (int chunk = end - 1; chunk >= begin; chunk--) {
            const int turn = chunk % 2;
            recall(S, every_chunk + (chunk - begin) * STATE);
            if (chunk > begin) ask(chunk - 1);
            __syncthreads();
            if (chunk < end - 1) write_columns(call.dv, p, shares[1 - turn], chunk + 1);
#pragma unroll 1
            for (int four = TOKENS - 4; four >= 0; four -= 4) {
                float R[ROWS][COLS], before[4][ROWS][COLS];  // the states before four tokens; registers have no room for those of eight
                copy(R, S);
                auto next = [&](int t) {
                    auto lost = few<ROWS>(&in.lost[turn][t][p.row]), kt = few<ROWS>(&in.k[turn][t][p.row]);
                    advance(R, lost, kt, few<COLS>(&in.v[turn][t][COLS * p.vv]));
                };
#pragma unroll 4
                for (int t = 0; t < four; t++) next(t);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    copy(before[j], R);
                    if (j < 3) next(four + j);
                }
                float dv[COLS][4];
#pragma unroll
                for (int two = 2; two >= 0; two -= 2) {
                    float of_q[8], of_k[8], of_g[8];
#pragma unroll
                    for (int j = 1; j >= 0; j--) {
                        const int t = four + two + j;
                        auto qt = few<ROWS>(&in.q[turn][t][p.row]), kt = few<ROWS>(&in.k[turn][t][p.row]);
                        auto lost = few<ROWS>(&in.lost[turn][t][p.row]);
                        auto vt = few<COLS>(&in.v[turn][t][COLS * p.vv]), dt = few<COLS>(&in.d[turn][t][COLS * p.vv]);
                        float e = 0.0f, bonus = 0.0f;
#pragma unroll
                        for (int c = 0; c < COLS; c++) e += dt[c] * vt[c];
#pragma unroll
                        for (int i = 0; i < ROWS; i++) bonus += qt[i] * u[i] * kt[i];
#pragma unroll
                        for (int c = 0; c < COLS; c++) dv[c][two + j] = bonus * dt[c];
#pragma unroll
                        for (int i = 0; i < ROWS; i++) {
                            float dq_ = u[i] * kt[i] * e, dk_ = u[i] * qt[i] * e, dg_ = 0.0f;
                            du[i] += qt[i] * kt[i] * e;
#pragma unroll
                            for (int c = 0; c < COLS; c++) {
                                const float s = before[two + j][i][c], ds = dS[i][c];
                                dq_ += s * dt[c];
                                dk_ += ds * vt[c];
                                dg_ += (s + s * lost[i]) * ds;
                                dv[c][two + j] += ds * kt[i];
                                dS[i][c] = ds + ds * lost[i] + qt[i] * dt[c];
                            }
                            of_q[4 * j + i] = dq_ * scale, of_k[4 * j + i] = dk_, of_g[4 * j + i] = dg_;
                            if (STATIC && chunk * TOKENS + t < p.length) static_dg[i] += dg_;  // past the end there is a state still
                        }
                    }
                    const int t = chunk * TOKENS + four + two + my_token;
                    const float my_dq = shared_out<8, 1>(of_q, p.vv), my_dk = shared_out<8, 1>(of_k, p.vv);
                    const float my_dg = STATIC ? 0.0f : shared_out<8, 1>(of_g, p.vv);
                    if (t < p.length) {
                        dq[t] = my_dq, dk[t] = my_dk;
                        if (!STATIC) dg[t] = my_dg;
                    }
                }
#pragma unroll
                for (int c = 0; c < COLS; c++) shares[turn][p.warp][four + p.kk][COLS * p.vv + c] = shared_out<4, 8>(dv[c], p.kk);
            }
            if (chunk > begin) put(1 - turn);
        }
        __syncthreads();
        write_columns(call.dv, p, shares[begin % 2], begin);
    }
    float sums[8] = {du[0], du[1], du[2], du[3], static_dg[0], static_dg[1], static_dg[2], static_dg[3]};
    const float sum = shared_out<8, 1>(sums, p.vv);
    const Tensor &to = my_token ? call.dg : call.du;
    if (!my_token || STATIC) ((float *)to.data)[p.n * to.stride[0] + p.h * to.stride[1] + my_share * to.stride[3]] = sum;
    if (call.d_initial_state.data) store_state<S0>(dS, call.d_initial_state, p.n, p);
}
