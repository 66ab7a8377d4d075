// What the programs of `backward.cu` found for each column, added in a fixed order.

// partial fp32 [1 or 2, programs, columns] to `first` and `second`, [columns] of the weights' type (WEIGHT: 0 fp32,
// 1 bf16, 2 fp16). A block takes 32 columns; each of its warps adds every THREADS/32-th program.
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_columns(const float* partial, void* first, void* second, int programs, int columns) {
    __shared__ float sums[THREADS];
    constexpr int WARPS = THREADS / 32;
    int lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane;
    float sum = 0.f;
    if (column < columns) {
        const float* from = partial + (long long)blockIdx.y * programs * columns + column;
#pragma unroll 8
        for (int p = threadIdx.x / 32; p < programs; p += WARPS) sum += from[(long long)p * columns];
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= 32 || column >= columns) return;
    for (int w = 1; w < WARPS; w++) sum += sums[w * 32 + lane];
    void* to = blockIdx.y ? second : first;
    if (WEIGHT == 0) {
        static_cast<float*>(to)[column] = sum;
    } else {
        unsigned short rounded;
        if (WEIGHT == 1) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(sum));
        else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(sum));
        static_cast<unsigned short*>(to)[column] = rounded;
    }
}
