// o_t = scale * q_t (S_{t-1} + diag(u) k_t^T v_t), and the final state. One thread block per sequence, head and 16 columns.
//
// With slots, states are rows of a pool that is updated in place; a sequence with a negative slot is skipped, its output is 0.

constexpr int TOKENS = HEAD == 128 ? 8 : 16;
constexpr int AT_LEAST = HEAD == 128 ? 2 : 192 / HEAD;  // thread blocks per multiprocessor: registers for 16 warps, or for 12 where 16 spill

extern "C" __global__ void __launch_bounds__(THREADS, AT_LEAST) penstock_wkv_fwd(const Call call) {
    alignas(16) __shared__ float q_[2][TOKENS][HEAD], k_[2][TOKENS][HEAD], factor_[2][TOKENS][HEAD], own_[2][TOKENS][HEAD];
    alignas(16) __shared__ float v_[2][TOKENS][COLUMNS], left[HEAD];
    alignas(16) __shared__ float shares[2][WARPS][TOKENS][COLUMNS];
    const Place p(call);
    const int slot = call.slots ? call.slots[p.n] : p.n;
    const int chunks = (p.length + TOKENS - 1) / TOKENS;
    if (slot < 0) {
        for (int i = threadIdx.x; i < p.length * COLUMNS; i += THREADS)
            store(&channel<X>(call.output, p, p.block * COLUMNS + i % COLUMNS)[i / COLUMNS], 0.0f);
        return;
    }
    float S[ROWS][COLS];
    load_state<S0>(S, call.initial_state, slot, p);

    Coming<X, TOKENS, HEAD> q(call.q, p, 0), k(call.k, p, 0);
    Coming<X, TOKENS, COLUMNS> v(call.v, p, p.block * COLUMNS);
    Decays<TOKENS> g(call.g, p);
    Pending pending;
    const int mine = threadIdx.x % HEAD;  // the channel that this thread writes to shared memory
    const float scale = call.scale, u = number(((const U *)call.u.data)[p.h * call.u.stride[0] + mine * call.u.stride[1]]);
    auto ask = [&](int chunk) { q.ask(chunk, p.length), k.ask(chunk, p.length), g.ask(chunk, p.length), v.ask(chunk, p.length); };
    auto put = [&](int turn) {
        v.put(v_[turn]);
        g.exponents(pending);
#pragma unroll
        for (int i = 0; i < g.MINE; i++) {
            const int t = g.token(i);
            const float qt = number(q.held[i]) * scale, kt = number(k.held[i]);
            own_[turn][t][mine] = qt * u * kt;
            q_[turn][t][mine] = qt * near_exponential(g.before[i]);
            k_[turn][t][mine] = kt * near_exponential(g.after[i]);
            factor_[turn][t][mine] = exponential(g.own[i]);
        }
    };

    ask(0);
    put(0);
    for (int chunk = 0; chunk < chunks; chunk++) {
        const int turn = chunk % 2;
        ask(chunk + 1);
        __syncthreads();
        if (chunk) write_columns(call.output, p, shares[1 - turn], chunk - 1);
#pragma unroll
        for (int four = 0; four < TOKENS; four += 4) {
            float o[COLS][4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                auto qt = few<ROWS>(&q_[turn][four + j][p.row]), kt = few<ROWS>(&k_[turn][four + j][p.row]);
                auto factor = few<ROWS>(&factor_[turn][four + j][p.row]), own = few<ROWS>(&own_[turn][four + j][p.row]);
                auto vt = few<COLS>(&v_[turn][four + j][COLS * p.vv]);
                float bonus = 0.0f;
#pragma unroll
                for (int i = 0; i < ROWS; i++) bonus += own[i];
#pragma unroll
                for (int c = 0; c < COLS; c++) {
                    o[c][j] = bonus * vt[c];
#pragma unroll
                    for (int i = 0; i < ROWS; i++) o[c][j] += qt[i] * S[i][c];
                }
                advance(S, factor, kt, vt);
            }
#pragma unroll
            for (int c = 0; c < COLS; c++) shares[turn][p.warp][four + p.kk][COLS * p.vv + c] = shared_out<4, 8>(o[c], p.kk);
        }
        if (chunk + 1 < chunks) put(1 - turn);
    }
    if (threadIdx.x < HEAD) left[mine] = pending.sum;
    __syncthreads();
    if (chunks) write_columns(call.output, p, shares[(chunks - 1) % 2], chunks - 1);
    apply(S, few<ROWS>(&left[p.row]));
    store_state<F>(S, call.final_state, slot, p);
}
