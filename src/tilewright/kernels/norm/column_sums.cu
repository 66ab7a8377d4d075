// The programs' partial sums of each column, added in a fixed order and in fp64.
//
// Macros: WEIGHT (float, bf16, fp16), THREADS (of a block).
//
// Limit: latency; 7 to 10 us at 50257 columns.
#include "row.cuh"

constexpr int AHEAD = 8;  // loads of a warp in flight

// partial fp32 [1 or 2, programs, columns] to `first` and `second`, [columns] of the weights' type. A block takes 32
// columns; each of its warps adds every THREADS/32-th program, in fp64: the sums of a column may cancel.
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_column_sums(const float *__restrict__ partial, WEIGHT *first, WEIGHT *second, int programs, int columns) {
    __shared__ double sums[THREADS];
    constexpr int warps = THREADS / 32;
    const int lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane;
    double sum = 0.;
    if (column < columns) {
        const float *from = partial + (long long)blockIdx.y * programs * columns + column;
        for (int start = threadIdx.x / 32; start < programs; start += AHEAD * warps) {
            float found[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int p = start + i * warps;
                found[i] = p < programs ? from[(long long)p * columns] : 0.f;
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) sum += found[i];
        }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= 32 || column >= columns) return;
    for (int w = 1; w < warps; w++) sum += sums[w * 32 + lane];
    narrow((blockIdx.y ? second : first)[column], float(sum));
}
