// Spare warps of backward.cu zero the sums of dQ of key heads to come and round those of heads that are done, while
// these are in the L2 cache. Separate kernels before and after would move every sum to memory and back.
//
// The sums of a key head are cut into as many slices to zero as it has blocks of keys, and into PIECES times as many
// pieces to round. A warp claims pieces in order; with every PIECES-th it zeroes a slice of the head `ahead` further,
// before it waits for all blocks of the piece's head to be added. A block of keys waits only for slices being zeroed,
// and a piece only for blocks that are claimed or can be, so neither waits for a warp that does not run.

#pragma once

#include "backward_scores.cuh"

// A chunk of sums in a buffer: 64 columns of DQ_COLUMNS queries, as a warpgroup adds them.
constexpr int CHUNK = 64 * DQ_COLUMNS, CHUNK_BYTES = CHUNK * 4, CHUNKS = QUERIES * HEAD / CHUNK, PIECES = 4;

__device__ __forceinline__ void wait_for_count(const u32* count, u32 wanted) {
    while (load_acquire(count) < wanted) __nanosleep(100);
}

// Waits until a block of keys may add to the sums of its head.
__device__ __forceinline__ void wait_for_zeros(const Problem& p, const Block& at) {
    int head = at.batch * p.kv_heads + at.kv_head;
    if (head >= p.ahead) wait_for_count(p.zeroed + head, p.k_blocks);
}

// Part `index` of all heads' items, where each head has `count` items in `parts` parts.
struct Range {
    int head, first, end;
    __device__ __forceinline__ Range(int index, int parts, int count) : head(index / parts) {
        int each = (count + parts - 1) / parts;
        first = head * count + min(index % parts * each, count);
        end = min(first + each, (head + 1) * count);
    }
};

__device__ __forceinline__ void zero_slice(const Problem& p, int slice, int lane) {
    Range blocks(slice, p.k_blocks, p.group * p.q_blocks);
    float4* end = (float4*)(p.dq_sums + (u64)blocks.end * QUERIES * HEAD);
#pragma unroll 4
    for (float4* at = (float4*)(p.dq_sums + (u64)blocks.first * QUERIES * HEAD) + lane; at < end; at += 32)
        *at = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    __syncwarp();
    if (lane == 0) __threadfence(), atomicAdd(p.zeroed + blocks.head, 1);
}

// Rounds 16 rows of 16 columns of dQ: from the order of registers at `from` to rows there, then to global memory.
__device__ __forceinline__ void round_rows(const Problem& p, char* rows, int query, int column, u32 from, int lane) {
    float4 a = load_four(from + lane * 16), b = load_four(from + GROUP_THREADS * 16 + lane * 16);
    __syncwarp();
    u32 to = from + (lane % 8 + lane / 16 * 8) * 32 + lane / 8 % 2 * 16;
    store_matrices_transposed(to, pack(a.x * p.scale, a.y * p.scale), pack(a.z * p.scale, a.w * p.scale),
                              pack(b.x * p.scale, b.y * p.scale), pack(b.z * p.scale, b.w * p.scale));
    __syncwarp();
    float4 eight = load_four(from + lane * 16);
    query += lane / 2, column += lane % 2 * 8;
    if (query < p.queries && column < p.width) *(float4*)(rows + 2 * (query * p.dq_position + column)) = eight;
}

__device__ __forceinline__ void round_piece(const Problem& p, int piece, u32 buffer, u32 full, u32& round, int lane) {
    Range chunks(piece, p.k_blocks * PIECES, p.group * p.q_blocks * CHUNKS);
    if (lane == 0) wait_for_count(p.added + chunks.head, p.k_blocks);
    __syncwarp();
#pragma unroll 1
    for (int chunk = chunks.first; chunk < chunks.end; ++chunk, ++round) {
        if (lane == 0) {
            fence_global_to_async();
            barrier_expect(full, CHUNK_BYTES);
            load_bytes(buffer, p.dq_sums + (u64)chunk * CHUNK, CHUNK_BYTES, full);
        }
        barrier_wait(full, round % 2);
        int head = chunk / CHUNKS / p.q_blocks, query = chunk / CHUNKS % p.q_blocks * QUERIES;
        int part = chunk % CHUNKS, column = HEAD == 64 ? 0 : part * 64;
        query += HEAD == 64 ? part * DQ_COLUMNS : 0;
        char* rows = p.dq + 2 * (head / p.heads * p.dq_batch + head % p.heads * p.dq_head);
#pragma unroll 1
        for (int i = 0; i < DQ_COLUMNS / 16; ++i)
#pragma unroll 1
            for (int warp = 0; warp < 4; ++warp)
                round_rows(p, rows, query + 16 * i, column + 16 * warp, buffer + (2 * i * 4 + warp) * 512, lane);
        fence_shared_to_async();
        __syncwarp();
    }
}

// A warp's loop; `buffer` of CHUNK_BYTES and the barrier `full` are its own.
__device__ __forceinline__ void run_dq_warp(const Problem& p, u32 buffer, u32 full, int lane) {
    u32 round = 0;
#pragma unroll 1
    for (;;) {
        int piece = 0;
        if (lane == 0) piece = atomicAdd(p.work_counters + 1, 1);
        piece = __shfl_sync(0xFFFFFFFF, piece, 0);
        int slice = p.ahead * p.k_blocks + piece / PIECES;
        if (piece % PIECES == 0 && slice < p.blocks) zero_slice(p, slice, lane);
        if (piece >= p.blocks * PIECES) return;
        round_piece(p, piece, buffer, full, round, lane);
    }
}

// One thread counts the program's blocks of keys for their heads, after both math warpgroups added their dQ.
__device__ __forceinline__ void count_added_blocks(const Problem& p, u32 k_full, u32 blocks, u32 kv_empty, u32 added) {
#pragma unroll 1
    for (u32 round = 0;; ++round) {
        barrier_wait(k_full, round % 2);
        Block at = load_block(blocks + round % 2 * 16);
        if (at.key < 0) return;
        barrier_wait(added, round % 2);
        barrier_arrive(kv_empty);
        __threadfence();
        atomicAdd(p.added + at.batch * p.kv_heads + at.kv_head, 1);
    }
}
