// What the programs of `backward.cu` found for each column, added in a fixed order.
//
// Defined by whoever compiles: WEIGHT (float, bf16, fp16), THREADS (a block).
#include "row.cuh"

// partial fp32 [1 or 2, programs, columns] to `first` and `second`, [columns] of the weights' type. A block takes 32
// columns; each of its warps adds every THREADS/32-th program, in fp64: the sums of a column may cancel.
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_columns(const float *partial, WEIGHT *first, WEIGHT *second, int programs, int columns) {
    __shared__ double sums[THREADS];
    constexpr int warps = THREADS / 32;
    const int lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane;
    double sum = 0.;
    if (column < columns) {
        const float *from = partial + (long long)blockIdx.y * programs * columns + column;
#pragma unroll 8
        for (int p = threadIdx.x / 32; p < programs; p += warps) sum += from[(long long)p * columns];
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= 32 || column >= columns) return;
    for (int w = 1; w < warps; w++) sum += sums[w * 32 + lane];
    narrow((blockIdx.y ? second : first)[column], float(sum));
}
