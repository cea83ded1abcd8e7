// Threads do not share outputs, so the sum stays in a register and is written once.

extern "C" __global__ void wkv(int B, int T, int H, const float *r, const float *k, const float *v, const float *w,
                               const float *u, float *o) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x, channels = H * HEAD;
    if (thread >= B * channels) return;
    int b = thread / channels, h = thread / HEAD % H, i = thread % HEAD;
    float state[HEAD] = {};
    for (int t = 0; t < T; t++) {
        long long row = ((long long)b * T + t) * channels + h * HEAD;
        float sum = 0.0f;
        for (int j = 0; j < HEAD; j++) {
            float kv = k[row + j] * v[row + i];
            sum += r[row + j] * (u[h * HEAD + j] * kv + state[j]);
            state[j] = w[row + j] * state[j] + kv;
        }
        o[row + i] = sum;
    }
}
