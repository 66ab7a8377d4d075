// Weight and bias once for every place within 16 bytes at which a row may begin, for shelved.cu: vector j of copy s has
// the columns LANES j - s, LANES j - s + 1, ..., and 0 where that is none.
//
// Defined by whoever compiles: WEIGHT (float, bf16, fp16), THREADS (a block).
//
// Limit: the launch. At 50257 columns of bf16 copies of weight and bias are 1.6 MB and take 3 us of layer norm's 270.
#include "row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_shifted(const WEIGHT *weight, const WEIGHT *bias, uint4 *copies, int columns, int pitch) {
    constexpr int LANES = lanes<WEIGHT>;
    const int j = blockIdx.x * THREADS + threadIdx.x, shift = blockIdx.y;
    if (j >= pitch) return;
    const WEIGHT *from = blockIdx.z ? bias : weight;
    float found[LANES];
#pragma unroll
    for (int k = 0; k < LANES; k++) {
        const int column = j * LANES - shift + k;
        found[k] = unsigned(column) < unsigned(columns) ? widen(from[column]) : 0.f;
    }
    copies[(blockIdx.z * LANES + shift) * pitch + j] = pack<WEIGHT>(found);
}
