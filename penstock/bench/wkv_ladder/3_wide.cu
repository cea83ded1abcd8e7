// Each load has 128 bits, four channels: a quarter of the load instructions. All threads of a head still load the same r, k, w and u.

extern "C" __global__ void wkv(int B, int T, int H, const float *r, const float *k, const float *v, const float *w,
                               const float *u, float *o) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x, channels = H * HEAD;
    if (thread >= B * channels) return;
    int b = thread / channels, h = thread / HEAD % H, i = thread % HEAD;
    float4 state[HEAD / 4] = {};
    for (int t = 0; t < T; t++) {
        long long row = ((long long)b * T + t) * channels + h * HEAD;
        float sum = 0.0f, vi = v[row + i];
#pragma unroll
        for (int j = 0; j < HEAD; j += 4) {
            const float4 r_ = *(const float4 *)&r[row + j], k_ = *(const float4 *)&k[row + j], w_ = *(const float4 *)&w[row + j];
            const float4 u_ = *(const float4 *)&u[h * HEAD + j];
            float4 &s = state[j / 4];
            sum += r_.x * (u_.x * k_.x * vi + s.x) + r_.y * (u_.y * k_.y * vi + s.y);
            sum += r_.z * (u_.z * k_.z * vi + s.z) + r_.w * (u_.w * k_.w * vi + s.w);
            s.x = w_.x * s.x + k_.x * vi, s.y = w_.y * s.y + k_.y * vi;
            s.z = w_.z * s.z + k_.z * vi, s.w = w_.w * s.w + k_.w * vi;
        }
        o[row + i] = sum;
    }
}
