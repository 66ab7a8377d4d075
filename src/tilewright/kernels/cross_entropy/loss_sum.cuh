// The sum and count of losses: each block its own, then one block all of them.
//
// Macro: THREADS (of a block).
#pragma once
#include "row.cuh"

struct LossSum {
    float loss, count;
    __device__ __forceinline__ void combine(LossSum other) { loss += other.loss, count += other.count; }
};

// At the end of a kernel, by all threads of a block, each with its own sum.
__device__ __forceinline__ void write_block_sum(LossSum found, LossSum *block_sums) {
    __shared__ RowReduce<THREADS, 1, LossSum> totals;
    found = totals(found, 0);
    if (threadIdx.x == 0) block_sums[blockIdx.x] = found;
}
