// o_t = scale * q_t (S_{t-1} + diag(u) k_t^T v_t), and the final state. One block of threads a sequence, head and 16 columns.
//
// With slots, states are rows of a pool that is read and written in place; a negative slot is skipped, and its output is 0.

constexpr int TOKENS = HEAD == 128 ? 8 : 16;
constexpr int AT_LEAST = HEAD == 64 ? 3 : 512 / THREADS;  // blocks a multiprocessor: registers of 16 warps, of 12 where 16 spill

extern "C" __global__ void __launch_bounds__(THREADS, AT_LEAST) forward(const Call call) {
    alignas(16) __shared__ float q_[2][TOKENS][HEAD], k_[2][TOKENS][HEAD], lost_[2][TOKENS][HEAD], v_[2][TOKENS][COLUMNS];
    alignas(16) __shared__ float shares[2][WARPS][TOKENS][COLUMNS];
    const Place p(call);
    const int slot = call.slots ? call.slots[p.n] : p.n;
    const int chunks = (p.length + TOKENS - 1) / TOKENS;
    if (slot < 0) {
        for (int i = threadIdx.x; i < p.length * COLUMNS; i += THREADS)
            store(&channel<X>(call.output, p, p.block * COLUMNS + i % COLUMNS)[i / COLUMNS], 0.0f);
        return;
    }
    float S[ROWS][COLS], u[ROWS];
    load_state<S0>(S, call.initial_state, slot, p);
#pragma unroll
    for (int i = 0; i < ROWS; i++) u[i] = number(((const U *)call.u.data)[p.h * call.u.stride[0] + (p.row + i) * call.u.stride[1]]);

    Coming<X, TOKENS, HEAD> q(call.q, p, 0), k(call.k, p, 0);
    Coming<G, TOKENS, HEAD> g(call.g, p, 0);
    Coming<X, TOKENS, COLUMNS> v(call.v, p, p.block * COLUMNS);
    const float scale = call.scale;
    auto ask = [&](int chunk) { q.ask(chunk, p.length), k.ask(chunk, p.length), g.ask(chunk, p.length), v.ask(chunk, p.length); };
    auto put = [&](int turn) {
        q.put(q_[turn], [=](float x) { return x * scale; });
        k.put(k_[turn]), g.put(lost_[turn], loss), v.put(v_[turn]);
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
                auto lost = few<ROWS>(&lost_[turn][four + j][p.row]);
                auto vt = few<COLS>(&v_[turn][four + j][COLS * p.vv]);
                float bonus = 0.0f;
#pragma unroll
                for (int i = 0; i < ROWS; i++) bonus += qt[i] * u[i] * kt[i];
#pragma unroll
                for (int c = 0; c < COLS; c++) {
                    o[c][j] = bonus * vt[c];
#pragma unroll
                    for (int i = 0; i < ROWS; i++) o[c][j] += qt[i] * S[i][c];
                }
                advance(S, lost, kt, vt);
            }
#pragma unroll
            for (int c = 0; c < COLS; c++) shares[turn][p.warp][four + p.kk][COLS * p.vv + c] = shared_out<4, 8>(o[c], p.kk);
        }
        put(1 - turn);
    }
    __syncthreads();
    if (chunks) write_columns(call.output, p, shares[(chunks - 1) % 2], chunks - 1);
    store_state<F>(S, call.final_state, slot, p);
}
