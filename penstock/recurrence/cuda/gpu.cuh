// GPU-specific code: number formats and shuffles between the lanes of a warp. It includes no headers, because NVRTC finds none without
// a CUDA toolkit. The tests replace this file by an emulation on the CPU.

struct float16 {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};

__device__ inline float number(double x) { return (float)x; }
__device__ inline float number(float x) { return x; }
__device__ inline float number(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float number(float16 x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}

__device__ inline void store(double *to, float x) { *to = x; }
__device__ inline void store(float *to, float x) { *to = x; }
__device__ inline void store(bfloat16 *to, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(x)); }
__device__ inline void store(float16 *to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(x)); }

// Whether the sign is set, also of 0.
__device__ inline bool negative(float x) { return __float_as_int(x) < 0; }
// 2^x with a relative error of 2^-22; subnormal results are 0.
__device__ inline float exp2_near(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The x of the lane whose index differs in these bits.
__device__ inline float of_lane_across(float x, int bits) { return __shfl_xor_sync(0xffffffffu, x, bits); }
