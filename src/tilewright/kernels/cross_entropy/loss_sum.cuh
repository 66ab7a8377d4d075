// The losses of rows added up: by each block its own, then by one block all of them.
//
// Defined by whoever compiles: THREADS (a block).
#pragma once
#include "row.cuh"

struct LossSum {
    float loss, count;
    __device__ __forceinline__ void combine(LossSum other) { loss += other.loss, count += other.count; }
};

// At the end of a kernel, by all threads of a block, each with what it found.
__device__ __forceinline__ void write_block_sum(LossSum found, LossSum *block_sums) {
    __shared__ RowReduce<THREADS, 1, LossSum> totals;
    found = totals(found, 0);
    if (threadIdx.x == 0) block_sums[blockIdx.x] = found;
}
