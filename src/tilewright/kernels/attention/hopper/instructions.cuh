// Hopper's instructions that only attention uses, beside `hopper.cuh`: four-dimensional tiles, bulk stores and
// reductions, messages between the programs of a cluster.
//
// Macro: HALF (1: fp16, 0: bf16).

#pragma once

#include "wgmma.cuh"

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
