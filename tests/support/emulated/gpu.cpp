// A GPU of one CPU thread: it stands in for gpu.cuh, and runs a kernel's threads as fibers, block after block.
//
// Every thread of a block runs until its next barrier or exchange between lanes, then the next thread. All must have come to one of the
// same kind, else the kernel would hang or read garbage on a GPU, and the run ends with a complaint. The order in which they run is
// given: two orders with different results show that a barrier is missing.

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

struct Index {
    int x;
};
static Index threadIdx, blockIdx, blockDim;

struct float16 {
    _Float16 x;
};
struct bfloat16 {
    uint16_t bits;
};
inline float number(double x) { return (float)x; }
inline float number(float x) { return x; }
inline float number(float16 x) { return (float)x.x; }
inline float number(bfloat16 x) {
    uint32_t wide = (uint32_t)x.bits << 16;
    float y;
    memcpy(&y, &wide, 4);
    return y;
}
inline void store(double *to, float x) { *to = x; }
inline void store(float *to, float x) { *to = x; }
inline void store(float16 *to, float x) { to->x = (_Float16)x; }
inline void store(bfloat16 *to, float x) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    to->bits = (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

inline bool negative(float x) { return signbit(x); }
inline float exp2_near(float x) { return exp2f(x); }

struct alignas(16) float4 {
    float x, y, z, w;
};
inline float __expf(float x) { return expf(x); }
inline void atomicAdd(float *to, float x) { *to += x; }

constexpr int MOST = 256, STACK = 1 << 16;
enum Stop { BARRIER, EXCHANGE, END };
struct Fiber {
    ucontext_t context;
    Stop at;
    float given[2];  // to other lanes, in exchanges by turns: who is first may be at the next before others have read
    int turn;
    char stack[STACK];
};
static Fiber fibers[MOST];
static ucontext_t scheduler;

static void stop(Stop at) {
    Fiber &mine = fibers[threadIdx.x];
    mine.at = at;
    swapcontext(&mine.context, &scheduler);
}
inline void __syncthreads() { stop(BARRIER); }
inline float of_lane_across(float x, int bits) {
    Fiber &mine = fibers[threadIdx.x];
    int turn = mine.turn ^= 1;
    mine.given[turn] = x;
    stop(EXCHANGE);
    return fibers[threadIdx.x ^ bits].given[turn];
}

#include SOURCE

template <typename T, T... AT> struct Count {};
template <typename... P, int... AT> static void launch(void (*kernel)(P...), void **arguments, Count<int, AT...>) {
    kernel(*(P *)arguments[AT]...);
}
template <typename... P> static void launch(void (*kernel)(P...), void **arguments) {
    launch(kernel, arguments, __make_integer_seq<Count, int, sizeof...(P)>());
}

static void **given;
static void body() {
    launch(KERNEL, given);
    stop(END);
}

// 0, or 1 if threads of a block did not come to the same stop.
extern "C" int run(void **arguments, int blocks, int threads, int backwards) {
    given = arguments, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (int i = 0; i < threads; i++) {
            Fiber &fiber = fibers[i];
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack;
            fiber.context.uc_stack.ss_size = STACK;
            fiber.context.uc_link = nullptr;
            fiber.turn = 0;
            makecontext(&fiber.context, body, 0);
        }
        do {
            for (int i = 0; i < threads; i++) {
                threadIdx.x = backwards ? threads - 1 - i : i;
                swapcontext(&scheduler, &fibers[threadIdx.x].context);
            }
            for (int i = 1; i < threads; i++)
                if (fibers[i].at != fibers[0].at) return 1;
        } while (fibers[0].at != END);
    }
    return 0;
}
