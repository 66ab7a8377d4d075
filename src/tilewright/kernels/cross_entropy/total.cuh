// The losses of rows added up: by each block its own, then by one block all of them.
//
// Defined by whoever compiles: THREADS (a block).
#pragma once
#include "row.cuh"

struct Total {
    float loss, count;
    __device__ __forceinline__ void join(Total other) { loss += other.loss, count += other.count; }
};

// At the end of a kernel, by all threads of a block, each with what it found.
__device__ __forceinline__ void leave_share(Total found, Total *shares) {
    __shared__ Exchange<THREADS, 1, Total> totals;
    found = totals(found, 0);
    if (threadIdx.x == 0) shares[blockIdx.x] = found;
}
