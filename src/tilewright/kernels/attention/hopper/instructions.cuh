// Hopper's instructions that only attention uses, beside `hopper.cuh`: four-dimensional tiles, bulk stores and
// reductions, messages between the programs of a cluster, wgmma of any width with either operand MN-major.
//
// The including file sets HALF (fp16, else bf16). A matrix wider than 64 columns is several tiles side by side.

#pragma once

#include "hopper.cuh"

// The warp's index in its program. The shuffle tells the compiler that it is uniform, so that matrix descriptors made of
// it stay in uniform registers; without it attention's backward took 1.03 times as long (d 128, S 8192, full).
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0); }

__device__ __forceinline__ u32 warp_cluster_rank() { return __shfl_sync(0xFFFFFFFF, cluster_rank(), 0); }

// One arrival for the whole warp.
__device__ __forceinline__ void warp_arrive(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// The same, at the barrier of each program of a cluster of two.
__device__ __forceinline__ void warp_arrive_at_both(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 < 2) barrier_arrive_at(barrier, threadIdx.x % 32);
}

// Arrives at a named barrier without waiting; `meet` waits.
__device__ __forceinline__ void named_barrier_arrive(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void load_tile(u32 to, const TensorMap* map, u32 barrier, int column, int row, int head,
                                          int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}

// Multicasts a tile to the same address and barrier in both programs of a cluster.
__device__ __forceinline__ void load_tile_multicast(u32 to, const TensorMap* map, u32 barrier, int column, int row,
                                                  int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "h"((unsigned short)3) : "memory");
}

__device__ __forceinline__ void store_tile(const TensorMap* map, u32 from, int column, int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}

// Copies shared memory to another program of the cluster, and completes the bytes at that program's barrier.
__device__ __forceinline__ void send_bytes(u32 to, u32 from, u32 nbytes, u32 barrier, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 address, remote_bar;\n"
        "mapa.shared::cluster.u32 address, %0, %4;\n"
        "mapa.shared::cluster.u32 remote_bar, %3, %4;\n"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [address], [%1], %2, [remote_bar];\n"
        "}" ::"r"(to), "r"(from), "r"(nbytes), "r"(barrier), "r"(rank) : "memory");
}

// Stores a word to another program of the cluster, and completes four bytes at that program's barrier.
__device__ __forceinline__ void send_word(u32 to, u32 word, u32 barrier, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 address, remote_bar;\n"
        "mapa.shared::cluster.u32 address, %0, %3;\n"
        "mapa.shared::cluster.u32 remote_bar, %2, %3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [address], %1, [remote_bar];\n"
        "}" ::"r"(to), "r"(word), "r"(barrier), "r"(rank) : "memory");
}

__device__ __forceinline__ u32 load_word(u32 from) {
    u32 word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

// barrier_arrive_at with release semantics over the cluster.
__device__ __forceinline__ void barrier_release_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(barrier), "r"(rank) : "memory");
}

// Adds four fp32 values to those in global memory.
__device__ __forceinline__ void add_vector(float* to, const float* values) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(values[0]), "f"(values[1]),
                 "f"(values[2]), "f"(values[3]) : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until this thread's bulk stores have read their shared memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Makes this thread's stores to shared memory visible to wgmma and TMA, after the next barrier.
__device__ __forceinline__ void fence_shared_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Makes stores to global memory that this thread has observed visible to the TMA loads it issues next.
__device__ __forceinline__ void fence_global_to_async() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d) : "memory");
}

__device__ __forceinline__ void store_matrices_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
                 "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void store_pair(u32 to, float2 v) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(v.x), "f"(v.y) : "memory");
}

__device__ __forceinline__ float2 load_pair(u32 from) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}

__device__ __forceinline__ float load_float(u32 from) { return __uint_as_float(load_word(from)); }

__device__ __forceinline__ float4 load_four(u32 from) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 word;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

// Descriptor of an MN-major operand (along_k: K-major); the next 64 columns are `tile` bytes further.
__device__ __forceinline__ u64 across_k(u32 address, u32 tile) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)(tile >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
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
