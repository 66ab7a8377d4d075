// What a linear layer alone asks of Hopper beside `hopper.cuh`: tiles of two axes, 16-byte copies, its product.
//
// HALF (fp16, otherwise bf16) is set before this is included.

#pragma once

#include "hopper.cuh"

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

// Of a tile that is needed later, into L2.
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

// 16 bytes into shared memory, without waiting; they leave L2 before all else. `to` must not be a sum with a part that
// the assembler knows to be the same in all lanes: ptxas 13.0 would lose the policy, and the instruction is illegal
// (row.cuh).
__device__ __forceinline__ void copy_piece(u32 to, const void* from) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
                 : "memory");
}

// d[64, 256] += a[64, 16] · b[256, 16]ᵀ, or = where not `accumulate`; four registers for each eight columns.
#define OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT16(i) OUT4(i), OUT4(i + 4), OUT4(i + 8), OUT4(i + 12)
#define OUT64(i) OUT16(i), OUT16(i + 16), OUT16(i + 32), OUT16(i + 48)
__device__ __forceinline__ void mma(float (&d)[128], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPES " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, add, 1, 1, 0, 0;\n"
        "}"
        : OUT64(0), OUT64(64)
        : "l"(a), "l"(b), "r"(accumulate));
}

// Until all is done; d is named so that no read of it moves ahead.
__device__ __forceinline__ void mma_wait(float (&d)[128]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : OUT64(0), OUT64(64)::"memory");
}
