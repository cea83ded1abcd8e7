// Gradients, one token after another, from the last to the first. With dS_t the gradient of S_t, e_t = dO_t . v_t and the state S_{t-1}:
//
//     dq_t = scale * (S_{t-1} dO_t + u k_t e_t)         dv_t = dS_t^T k_t + (scale * q_t u k_t) dO_t
//     dk_t = dS_t v_t + scale * q_t u e_t               dg_t = rowsum(exp(g_t) S_{t-1} o dS_t)
//     du   = sum_t scale * q_t k_t e_t                  dS_{t-1} = diag(exp(g_t)) dS_t + scale * q_t^T dO_t
//
// States are recomputed forward, three times: from the start, with a checkpoint every `span` tokens; through a span, with a checkpoint
// every 8 tokens; through 8 tokens, with four states in registers. A span near sqrt(8 T) minimises the memory of checkpoints.
//
// dq, dk, dg [B,T,H,BLOCKS * K] and du, and a static decay's dg, [N,H,1,BLOCKS * K] are one float32 partial sum per block of columns; the
// host adds them.

constexpr int TOKENS = 8;
constexpr long long STATE = HEAD * (COLUMNS + 2);  // a checkpoint: a block of columns, and two columns for pending decays

// past and future: factors of tokens for the state and for its gradient, see `passing`; past[0] and future[TOKENS] are exp(pending).
struct Buffers {
    float q[2][TOKENS][HEAD], k[2][TOKENS][HEAD], past[2][TOKENS + 1][HEAD], future[2][TOKENS + 1][HEAD];
    float v[2][TOKENS][COLUMNS], d[2][TOKENS][COLUMNS];
};

// A checkpoint: each thread reads back only what it wrote.
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

__device__ inline void keep(float *kept, const Pending &pending) {
    if (threadIdx.x >= HEAD) return;
    kept[COLUMNS * HEAD + threadIdx.x] = pending.sum, kept[(COLUMNS + 1) * HEAD + threadIdx.x] = pending.rest;
}
__device__ inline Pending recall(const float *kept) {
    const int mine = threadIdx.x % HEAD;
    Pending pending;
    pending.sum = kept[COLUMNS * HEAD + mine], pending.rest = kept[(COLUMNS + 1) * HEAD + mine];
    return pending;
}

// Recompute the states of chunks [begin, end), with a checkpoint before every `every` chunks.
__device__ inline void walk(
    const Call &call, const Place &p, Buffers &in, float (&S)[ROWS][COLS], Pending pending, int begin, int end, int every, float *kept) {
    Coming<X, TOKENS, HEAD> k(call.k, p, 0);
    Coming<X, TOKENS, COLUMNS> v(call.v, p, p.block * COLUMNS);
    Decays<TOKENS> g(call.g, p);
    const int mine = threadIdx.x % HEAD;
    auto ask = [&](int chunk) { k.ask(chunk, p.length), g.ask(chunk, p.length), v.ask(chunk, p.length); };
    auto put = [&](int chunk) {
        if ((chunk - begin) % every == 0) keep(kept + (chunk - begin) / every * STATE, pending);
        v.put(in.v[chunk % 2]);
        const float before = pending.sum;
        const bool weak = pending.pend(g.sums());
#pragma unroll
        for (int i = 0; i < g.MINE; i++) {
            const int t = g.token(i);
            const float kt = number(k.held[i]);
            in.k[chunk % 2][t][mine] = kt * near_exponential(weak ? -before - g.after[i] : 0.0f);
            in.past[chunk % 2][t][mine] = exponential(weak ? 0.0f : t == 0 ? before + g.own[i] : g.own[i]);
        }
    };
    ask(begin);
    put(begin);
    for (int chunk = begin; chunk < end; chunk++) {
        const int turn = chunk % 2;
        if (chunk + 1 < end) ask(chunk + 1);
        __syncthreads();
        if ((chunk - begin) % every == 0) keep(kept + (chunk - begin) / every * STATE, S);
#pragma unroll 4
        for (int t = 0; t < TOKENS; t++)
            advance(S, few<ROWS>(&in.past[turn][t][p.row]), few<ROWS>(&in.k[turn][t][p.row]), few<COLS>(&in.v[turn][t][COLS * p.vv]));
        if (chunk + 1 < end) put(chunk + 1);
    }
    __syncthreads();
}

// Writes a chunk's factors for the state and for its gradient; `after` are the pending decays of the gradient.
__device__ inline void put_decays(
    float (&past)[TOKENS + 1][HEAD], float (&future)[TOKENS + 1][HEAD], Decays<TOKENS> &g, Pending before, Pending &after) {
    const int mine = threadIdx.x % HEAD;
    past[0][mine] = near_exponential(before.sum), future[TOKENS][mine] = near_exponential(after.sum);
    auto put = [&](float (&to)[TOKENS + 1][HEAD], int first, Pending &pending, float sum) {
        const float so_far = pending.sum;
        const bool weak = pending.pend(sum);
#pragma unroll
        for (int i = 0; i < g.MINE; i++) {
            const float kept = near_exponential(weak ? so_far + g.after[i] : 0.0f), applied = exponential(weak ? 0.0f : g.own[i]);
            to[g.token(i) + first][mine] = weak ? kept : -applied;
        }
    };
    put(past, 1, before, g.sums<false>());
    put(future, 0, after, g.sums<true>());
}

extern "C" __global__ void __launch_bounds__(THREADS) penstock_wkv_bwd(const Call call) {
    alignas(16) __shared__ Buffers in;
    alignas(16) __shared__ float shares[2][WARPS][TOKENS][COLUMNS];
    const Place p(call);
    const float scale = call.scale;
    const int chunks = (p.length + TOKENS - 1) / TOKENS, span = call.span / TOKENS;
    const long long before = ((long long)p.b * call.T + p.begin) / call.span + p.n;  // spans of the previous sequences
    float *every_span = call.kept + ((long long)(p.h * BLOCKS + p.block) * call.spans + before) * STATE;
    float *every_chunk = call.kept + ((long long)call.H * BLOCKS * call.spans + (long long)blockIdx.x * span) * STATE;
    float S[ROWS][COLS], dS[ROWS][COLS], u[ROWS];
    Sum du[ROWS], static_dg[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) u[i] = number(((const U *)call.u.data)[p.h * call.u.stride[0] + (p.row + i) * call.u.stride[1]]);
    load_state<S0>(S, call.initial_state, p.n, p);
    load_state<float>(dS, call.d_final_state, p.n, p);
    walk(call, p, in, S, Pending(), 0, chunks, span, every_span);

    Coming<X, TOKENS, HEAD> q(call.q, p, 0), k(call.k, p, 0);
    Decays<TOKENS> g(call.g, p);
    Pending after;
    Coming<X, TOKENS, COLUMNS> v(call.v, p, p.block * COLUMNS), d(call.d_output, p, p.block * COLUMNS);
    auto ask = [&](int chunk) {
        q.ask(chunk, p.length), k.ask(chunk, p.length), g.ask(chunk, p.length), v.ask(chunk, p.length), d.ask(chunk, p.length);
    };
    auto put = [&](int turn, const float *kept) {
        q.put(in.q[turn], scale), k.put(in.k[turn]), v.put(in.v[turn]), d.put(in.d[turn]);
        put_decays(in.past[turn], in.future[turn], g, recall(kept), after);
    };
    // The lane's sums after shared_out: token vv / 4 of two and row vv % 4 of four.
    const int my_row = p.row + p.vv % 4, my_token = p.vv / 4;
    const int my_share = p.block * HEAD + my_row;
    const auto dq = channel<float>(call.dq, p, my_share), dk = channel<float>(call.dk, p, my_share);
    const auto dg = channel<float>(call.dg, p, my_share);

    for (int begin = (chunks - 1) / span * span; begin >= 0 && chunks; begin -= span) {
        const int end = begin + span < chunks ? begin + span : chunks;
        recall(S, every_span + begin / span * STATE);
        walk(call, p, in, S, recall(every_span + begin / span * STATE), begin, end, 1, every_chunk);
        ask(end - 1);
        put((end - 1) % 2, every_chunk + (end - 1 - begin) * STATE);
        for (int chunk = end - 1; chunk >= begin; chunk--) {
            const int turn = chunk % 2;
            recall(S, every_chunk + (chunk - begin) * STATE);
            if (chunk > begin) ask(chunk - 1);
            __syncthreads();
            if (chunk < end - 1) write_columns(call.dv, p, shares[1 - turn], chunk + 1);
#pragma unroll 1
            for (int four = TOKENS - 4; four >= 0; four -= 4) {
                float R[ROWS][COLS], before[4][ROWS][COLS];  // the states before four tokens; eight would spill
                copy(R, S);
                auto next = [&](int t) {
                    auto before = few<ROWS>(&in.past[turn][t][p.row]), own = few<ROWS>(&in.past[turn][t + 1][p.row]);
                    auto kt = few<ROWS>(&in.k[turn][t][p.row]);
                    Few<ROWS> factor;
#pragma unroll
                    for (int i = 0; i < ROWS; i++) {
                        const Passing passes = passing(before[i], own[i]);
                        factor.x[i] = passes.factor, kt.x[i] *= passes.write;
                    }
                    advance(R, factor, kt, few<COLS>(&in.v[turn][t][COLS * p.vv]));
                };
#pragma unroll 4
                for (int t = 0; t < four; t++) next(t);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    copy(before[j], R);
                    if (j < 3) next(four + j);
                }
                float dv[COLS][4], du_[ROWS] = {}, static_dg_[ROWS] = {};
#pragma unroll
                for (int two = 2; two >= 0; two -= 2) {
                    float of_q[8], of_k[8], of_g[8];
#pragma unroll
                    for (int j = 1; j >= 0; j--) {
                        const int t = four + two + j;
                        auto qt = few<ROWS>(&in.q[turn][t][p.row]), kt = few<ROWS>(&in.k[turn][t][p.row]);
                        auto before_t = few<ROWS>(&in.past[turn][t][p.row]), past = few<ROWS>(&in.past[turn][t + 1][p.row]);
                        auto future = few<ROWS>(&in.future[turn][t][p.row]), after_t = few<ROWS>(&in.future[turn][t + 1][p.row]);
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
                            const Passing of_state = passing(before_t[i], past[i]), of_gradient = passing(after_t[i], future[i]);
                            const float k_read = kt[i] * of_gradient.read, q_written = qt[i] * of_gradient.write;
                            float dq_ = 0.0f, dk_ = 0.0f, dg_ = 0.0f;
                            du_[i] += qt[i] * kt[i] * e;
#pragma unroll
                            for (int c = 0; c < COLS; c++) {
                                const float s = before[two + j][i][c], ds = dS[i][c];
                                dq_ += s * dt[c];
                                dk_ += ds * vt[c];
                                dg_ += s * ds;
                                dv[c][two + j] += ds * k_read;
                                dS[i][c] = ds * of_gradient.factor + q_written * dt[c];
                            }
                            dq_ = dq_ * of_state.read + u[i] * kt[i] * e, dk_ = dk_ * of_gradient.read + u[i] * qt[i] * e;
                            dg_ *= of_gradient.read;
                            dg_ = negative(past[i]) ? -past[i] * (of_state.read * dg_) : past[i] * dg_;
                            of_q[4 * j + i] = dq_ * scale, of_k[4 * j + i] = dk_, of_g[4 * j + i] = dg_;
                            if (STATIC && chunk * TOKENS + t < p.length) static_dg_[i] += dg_;  // skip padding: its s and ds are not 0
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
                for (int i = 0; i < ROWS; i++) {
                    du[i].add(du_[i]);
                    if (STATIC) static_dg[i].add(static_dg_[i]);
                }
#pragma unroll
                for (int c = 0; c < COLS; c++) shares[turn][p.warp][four + p.kk][COLS * p.vv + c] = shared_out<4, 8>(dv[c], p.kk);
            }
            if (chunk > begin) put(1 - turn, every_chunk + (chunk - 1 - begin) * STATE);
        }
        __syncthreads();
        write_columns(call.dv, p, shares[begin % 2], begin);
    }
    if (threadIdx.x < HEAD) in.future[0][0][threadIdx.x] = near_exponential(after.sum);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int c = 0; c < COLS; c++) dS[i][c] *= in.future[0][0][p.row + i];
    float sums[8];
#pragma unroll
    for (int i = 0; i < ROWS; i++) sums[i] = du[i].sum, sums[ROWS + i] = static_dg[i].sum;
    const float sum = shared_out<8, 1>(sums, p.vv);
    const Tensor &to = my_token ? call.dg : call.du;
    if (!my_token || STATIC) ((float *)to.data)[p.n * to.stride[0] + p.h * to.stride[1] + my_share * to.stride[3]] = sum;
    if (call.d_initial_state.data) store_state<S0>(dS, call.d_initial_state, p.n, p);
}
