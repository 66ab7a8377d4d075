// Hopper's instructions that only a linear layer uses, beside `hopper.cuh`: tiles of two axes.
//
// Macro: HALF (1: fp16, 0: bf16).

#pragma once

#include "wgmma.cuh"

__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row) : "memory");
}

__device__ __forceinline__ void copy_tile_to_all(u32 to, const TensorMap* map, u32 barrier, int column, int row,
                                                 unsigned short everyone) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(everyone) : "memory");
}

// Prefetches a tile that is needed later into L2.
__device__ __forceinline__ void prefetch_tile(const TensorMap* map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
                 : "memory");
}

__device__ __forceinline__ uint4 read_piece(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}

// Waits for all products; `d` is an operand so that the compiler moves no read of it above the wait.
__device__ __forceinline__ void mma_wait(float (&d)[128]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : OUT128::"memory");
}
