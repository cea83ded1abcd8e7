// Each thread copies one channel of r, k and w to shared memory, where all threads of the head read it. The critical path is the memory
// latency, two barriers and HEAD steps for every token. Only as many multiprocessors as heads are busy.

extern "C" __global__ void wkv(int B, int T, int H, const float *r, const float *k, const float *v, const float *w,
                               const float *u, float *o) {
    alignas(16) __shared__ float r_s[HEAD], k_s[HEAD], w_s[HEAD], u_s[HEAD];
    int channels = H * HEAD, b = blockIdx.x / H, h = blockIdx.x % H, i = threadIdx.x;
    float4 state[HEAD / 4] = {};
    u_s[i] = u[h * HEAD + i];
    for (int t = 0; t < T; t++) {
        long long row = ((long long)b * T + t) * channels + h * HEAD;
        __syncthreads();
        r_s[i] = r[row + i], k_s[i] = k[row + i], w_s[i] = w[row + i];
        __syncthreads();
        float sum = 0.0f, vi = v[row + i];
#pragma unroll
        for (int j = 0; j < HEAD; j += 4) {
            const float4 r_ = *(const float4 *)&r_s[j], k_ = *(const float4 *)&k_s[j], w_ = *(const float4 *)&w_s[j];
            const float4 u_ = *(const float4 *)&u_s[j];
            float4 &s = state[j / 4];
            sum += r_.x * (u_.x * k_.x * vi + s.x) + r_.y * (u_.y * k_.y * vi + s.y);
            sum += r_.z * (u_.z * k_.z * vi + s.z) + r_.w * (u_.w * k_.w * vi + s.w);
            s.x = w_.x * s.x + k_.x * vi, s.y = w_.y * s.y + k_.y * vi;
            s.z = w_.z * s.z + k_.z * vi, s.w = w_.w * s.w + k_.w * vi;
        }
        o[row + i] = sum;
    }
}
