// What becomes of dQ's fp32 sums beside attention's backward, while they are in the L2 cache: warps that nothing else
// needs zero those of heads that are to come, and round those of heads that are done. In kernels before and after, every
// sum goes to memory and comes back.
//
// The sums of a key head are cut into as many slices to zero as it has blocks of keys, and into PIECES times as many
// pieces to round. A warp takes the next piece, and with every PIECES-th a slice of a head `ahead` of the piece's; it
// zeroes the slice before it waits for the blocks of the piece's head. So a block waits only for what is being zeroed,
// and a piece only for blocks that are taken or free to be: nobody waits for a warp or a program that does not run.

#pragma once

#include "backward_scores.cuh"

// Of the sums that a warpgroup adds, 64 columns of DQ_COLUMNS queries, in one buffer.
constexpr int CHUNK = 64 * DQ_COLUMNS, CHUNK_BYTES = CHUNK * 4, CHUNKS = QUERIES * HEAD / CHUNK, PIECES = 4;

__device__ __forceinline__ void wait_for_count(const u32* count, u32 wanted) {
    while (load_acquire(count) < wanted) __nanosleep(100);
}

// Before a block adds to the sums of its head.
__device__ __forceinline__ void wait_for_zeros(const Problem& p, const Block& at) {
    int head = at.batch * p.kv_heads + at.kv_head;
    if (head >= p.ahead) wait_for_count(p.zeroed + head, p.k_blocks);
}

// Of `count` things of each head, those in part `index` of `parts` of each head.
struct Range {
    int head, first, end;
    __device__ __forceinline__ Range(int index, int parts, int count) : head(index / parts) {
        int each = (count + parts - 1) / parts;
        first = head * count + min(index % parts * each, count);
        end = min(first + each, (head + 1) * count);
    }
};

__device__ __forceinline__ void zero(const Problem& p, int slice, int lane) {
    Range blocks(slice, p.k_blocks, p.group * p.q_blocks);
    float4* end = (float4*)(p.dq + (u64)blocks.end * QUERIES * HEAD);
#pragma unroll 4
    for (float4* at = (float4*)(p.dq + (u64)blocks.first * QUERIES * HEAD) + lane; at < end; at += 32)
        *at = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    __syncwarp();
    if (lane == 0) __threadfence(), atomicAdd(p.zeroed + blocks.head, 1);
}

// 16 rows of dQ, 16 columns each, that lie in the order of registers at `from`; they become rows there first.
__device__ __forceinline__ void round_rows(const Problem& p, char* rows, int query, int column, u32 from, int lane) {
    float4 a = load_four(from + lane * 16), b = load_four(from + GROUP_THREADS * 16 + lane * 16);
    __syncwarp();
    u32 to = from + (lane % 8 + lane / 16 * 8) * 32 + lane / 8 % 2 * 16;
    store_matrices_transposed(to, pack(a.x * p.scale, a.y * p.scale), pack(a.z * p.scale, a.w * p.scale),
                              pack(b.x * p.scale, b.y * p.scale), pack(b.z * p.scale, b.w * p.scale));
    __syncwarp();
    float4 eight = load_four(from + lane * 16);
    query += lane / 2, column += lane % 2 * 8;
    if (query < p.queries && column < p.width) *(float4*)(rows + 2 * (query * p.row_position + column)) = eight;
}

__device__ __forceinline__ void round_piece(const Problem& p, int piece, u32 buffer, u32 full, u32& turn, int lane) {
    Range chunks(piece, p.k_blocks * PIECES, p.group * p.q_blocks * CHUNKS);
    if (lane == 0) wait_for_count(p.added + chunks.head, p.k_blocks);
    __syncwarp();
#pragma unroll 1
    for (int chunk = chunks.first; chunk < chunks.end; ++chunk, ++turn) {
        if (lane == 0) {
            others_to_async();
            barrier_expect(full, CHUNK_BYTES);
            load_bytes(buffer, p.dq + (u64)chunk * CHUNK, CHUNK_BYTES, full);
        }
        barrier_wait(full, turn % 2);
        int head = chunk / CHUNKS / p.q_blocks, query = chunk / CHUNKS % p.q_blocks * QUERIES;
        int part = chunk % CHUNKS, column = HEAD == 64 ? 0 : part * 64;
        query += HEAD == 64 ? part * DQ_COLUMNS : 0;
        char* rows = p.rows + 2 * (head / p.heads * p.row_batch + head % p.heads * p.row_head);
#pragma unroll 1
        for (int i = 0; i < DQ_COLUMNS / 16; ++i)
#pragma unroll 1
            for (int warp = 0; warp < 4; ++warp)
                round_rows(p, rows, query + 16 * i, column + 16 * warp, buffer + (2 * i * 4 + warp) * 512, lane);
        stores_to_async();
        __syncwarp();
    }
}

// A warp with a buffer of CHUNK_BYTES and a barrier of its own.
__device__ __forceinline__ void attend(const Problem& p, u32 buffer, u32 full, int lane) {
    u32 turn = 0;
#pragma unroll 1
    for (;;) {
        int piece = 0;
        if (lane == 0) piece = atomicAdd(p.handed_out + 1, 1);
        piece = __shfl_sync(0xFFFFFFFF, piece, 0);
        int slice = p.ahead * p.k_blocks + piece / PIECES;
        if (piece % PIECES == 0 && slice < p.blocks) zero(p, slice, lane);
        if (piece >= p.blocks * PIECES) return;
        round_piece(p, piece, buffer, full, turn, lane);
    }
}

// One thread says which heads have the sums of another block, once the program has added its own.
__device__ __forceinline__ void tell(const Problem& p, u32 known, u32 blocks, u32 empty, u32 added) {
#pragma unroll 1
    for (u32 turn = 0;; ++turn) {
        barrier_wait(known, turn % 2);
        Block at = kept_block(blocks + turn % 2 * 16);
        if (at.key < 0) return;
        barrier_wait(added, turn % 2);
        barrier_arrive(empty);
        __threadfence();
        atomicAdd(p.added + at.batch * p.kv_heads + at.kv_head, 1);
    }
}
