// Hopper's matrix instructions (wgmma) as functions: descriptors of tiles in shared memory, products of any width.
//
// Macro: HALF (1: fp16, 0: bf16). Tiles in shared memory have rows of 64 16-bit values (128 bytes) in the 128-byte
// swizzle; a matrix wider than 64 columns is several tiles side by side.

#pragma once

#include "hopper.cuh"

#if HALF
#define TYPES "f16.f16"
#else
#define TYPES "bf16.bf16"
#endif

// The matrix descriptor of a tile whose rows run along the product's inner axis: eight rows are 1024 bytes.
__device__ __forceinline__ u64 along_k(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// Descriptor of an MN-major operand (along_k: K-major); the next 64 columns are `tile` bytes further.
__device__ __forceinline__ u64 across_k(u32 address, u32 tile) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)(tile >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING of the latest groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Stops the compiler from moving registers of products in flight above this point.
template <int N>
__device__ __forceinline__ void fence_registers(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ __forceinline__ void fence_registers(u32 (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

#define OUT8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define OUT16 OUT8(0), OUT8(8)
#define OUT24 OUT16, OUT8(16)
#define OUT32 OUT24, OUT8(24)
#define OUT48 OUT32, OUT8(32), OUT8(40)
#define OUT64 OUT48, OUT8(48), OUT8(56)
#define NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES24 NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES32 NAMES24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES48 NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES64 NAMES48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OUT128 OUT64, OUT8(64), OUT8(72), OUT8(80), OUT8(88), OUT8(96), OUT8(104), OUT8(112), OUT8(120)
#define NAMES128 NAMES64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, " \
    "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, " \
    "%119, %120, %121, %122, %123, %124, %125, %126, %127"

// d[64, N] += a[64, 16] · b[16, N], or = where not `accumulate`. Both from shared memory, A_MN_MAJOR and B_MN_MAJOR
// where their descriptors are of across_k; or a from registers.
template <int A_MN_MAJOR, int B_MN_MAJOR, int R>
__device__ __forceinline__ void mma(float (&d)[R], u64 a, u64 b, int accumulate);
template <int B_MN_MAJOR, int R>
__device__ __forceinline__ void mma(float (&d)[R], const u32* a, u64 b, int accumulate);

// N columns; R = N / 2 registers of the sum, which are operands %0 to %(R - 1); then those that follow.
#define PRODUCTS(N, R, P0, P1, P2, P3, P4, P5, P6) \
    template <int A_MN_MAJOR, int B_MN_MAJOR> \
    __device__ __forceinline__ void mma(float (&d)[R], u64 a, u64 b, int accumulate) { \
        asm volatile( \
            "{\n.reg .pred add;\nsetp.ne.b32 add, %" #P2 ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" NAMES##R "}, %" #P0 ", %" #P1 \
            ", add, 1, 1, %" #P3 ", %" #P4 ";\n}" \
            : OUT##R \
            : "l"(a), "l"(b), "r"(accumulate), "n"(A_MN_MAJOR), "n"(B_MN_MAJOR)); \
    } \
    template <int B_MN_MAJOR> \
    __device__ __forceinline__ void mma(float (&d)[R], const u32* a, u64 b, int accumulate) { \
        asm volatile( \
            "{\n.reg .pred add;\nsetp.ne.b32 add, %" #P5 ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" NAMES##R "}, {%" #P0 ", %" #P1 ", %" #P2 \
            ", %" #P3 "}, %" #P4 ", add, 1, 1, %" #P6 ";\n}" \
            : OUT##R \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(B_MN_MAJOR)); \
    }

PRODUCTS(32, 16, 16, 17, 18, 19, 20, 21, 22)
PRODUCTS(48, 24, 24, 25, 26, 27, 28, 29, 30)
PRODUCTS(64, 32, 32, 33, 34, 35, 36, 37, 38)
PRODUCTS(96, 48, 48, 49, 50, 51, 52, 53, 54)
PRODUCTS(128, 64, 64, 65, 66, 67, 68, 69, 70)
PRODUCTS(256, 128, 128, 129, 130, 131, 132, 133, 134)
