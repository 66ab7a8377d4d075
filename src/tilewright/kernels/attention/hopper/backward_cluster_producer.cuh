// The producer of backward_cluster.cu: shared memory of a program, TMA loads for both programs of a cluster, and which
// block of keys a cluster takes next.

#pragma once

constexpr int HEAD = 256, QUERIES = 64, KEYS = 64, CLUSTER = 2, BLOCK_KEYS = CLUSTER * KEYS;

#include "backward_scores.cuh"

constexpr int Q_STAGES = 2, TILES = HEAD / 64, HALF_TILES = TILES / CLUSTER;
constexpr int TILE_BYTES = 64 * 128;  // bytes of 64 rows of 64 columns
constexpr int MATRIX_BYTES = TILES * TILE_BYTES;
constexpr int DQ_GROUP_SUMS = QUERIES * HEAD / 4;  // sums of a warpgroup; two programs of two
constexpr int MATH_REGISTERS = 240, PRODUCER_REGISTERS = 24;

struct Shared {
    u32 k, v, other_k, q, dout, ds, weights, lse, delta;
    u32 lse_full, lse_empty, delta_full, delta_empty;
    u32 k_full, v_full, q_full, q_empty, dout_full, dout_empty, weights_full, weights_empty, ds_full, ds_empty;
    u32 k_empty, v_empty, ticket_full, ticket_empty, ticket, block;
};

__device__ __forceinline__ Shared layout(u32 start) {
    Shared s;
    s.k = start;
    s.v = s.k + MATRIX_BYTES;
    s.other_k = s.v + MATRIX_BYTES;
    s.q = s.other_k + MATRIX_BYTES / CLUSTER;
    s.dout = s.q + Q_STAGES * MATRIX_BYTES;
    s.ds = s.dout + MATRIX_BYTES;
    s.weights = s.ds + 2 * CLUSTER * TILE_BYTES;
    s.lse = s.weights + TILE_BYTES;
    s.delta = s.lse + Q_STAGES * ROW_BYTES;
    s.lse_full = s.delta + ROW_BYTES;
    s.lse_empty = s.lse_full + 8 * Q_STAGES;
    s.delta_full = s.lse_empty + 8 * Q_STAGES;
    s.delta_empty = s.delta_full + 8;
    s.k_full = s.delta_empty + 8;
    s.v_full = s.k_full + 8;
    s.q_full = s.v_full + 8;
    s.q_empty = s.q_full + 8 * Q_STAGES;
    s.dout_full = s.q_empty + 8 * Q_STAGES;
    s.dout_empty = s.dout_full + 8;
    s.weights_full = s.dout_empty + 8;
    s.weights_empty = s.weights_full + 8;
    s.ds_full = s.weights_empty + 8;
    s.ds_empty = s.ds_full + 16;
    s.k_empty = s.ds_empty + 16;
    s.v_empty = s.k_empty + 8;
    s.ticket_full = s.v_empty + 8;
    s.ticket_empty = s.ticket_full + 8;
    s.ticket = s.ticket_empty + 8;
    s.block = (s.ticket + 4 + 15) / 16 * 16;
    return s;
}

// A slot of a ring of SIZE, and the parity of its barriers.
template <int SIZE>
struct Slot {
    int index = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++index == SIZE) index = 0, parity ^= 1;
    }
};

struct ClusterBlock {
    int pair, kv_head, batch, rank;  // the cluster's first key: none where it is negative
    __device__ __forceinline__ int key() const { return pair + rank * KEYS; }
};

struct Maps {
    const TensorMap *q, *k, *v, *dout;
};

// Each program fetches half of the columns of Q and dO for both.
__device__ __forceinline__ void fetch_rows(u32 to, const TensorMap* map, u32 full, int row, int head,
                                           const ClusterBlock& at) {
    barrier_expect(full, MATRIX_BYTES);
    for (int i = HALF_TILES * at.rank; i < HALF_TILES * (at.rank + 1); ++i)
        load_tile_multicast(to + i * TILE_BYTES, map, full, 64 * i, row, head, at.batch);
}

// Stores two neighbouring numbers of a step, once the last ones have been read.
__device__ __forceinline__ void publish_numbers(float2 numbers, u32 to, u32 full, u32 empty, u32 parity) {
    barrier_wait(empty, parity ^ 1);
    store_pair(to + threadIdx.x * 8, numbers);
    barrier_arrive(full);
}

// Gives the program's next block of keys to the math warpgroups, once both are done with the last one.
__device__ __forceinline__ void publish_block(const Shared& s, const Maps& maps, const ClusterBlock& at, bool loads,
                                              u32 round) {
    barrier_wait(s.k_empty, round % 2 ^ 1);
    barrier_wait(s.v_empty, round % 2 ^ 1);
    store_block(s.block + round % 2 * 16, Block{at.pair, at.kv_head, at.batch});
    barrier_expect(s.k_full, loads ? MATRIX_BYTES + MATRIX_BYTES / CLUSTER : 0);
    barrier_expect(s.v_full, loads ? MATRIX_BYTES : 0);
    if (!loads) return;
    for (int i = 0; i < TILES; ++i)
        load_tile(s.k + i * TILE_BYTES, maps.k, s.k_full, 64 * i, at.key(), at.kv_head, at.batch);
    for (int i = 0; i < TILES; ++i)
        load_tile(s.v + i * TILE_BYTES, maps.v, s.v_full, 64 * i, at.key(), at.kv_head, at.batch);
    int theirs = at.pair + (1 - at.rank) * KEYS;
    for (int i = 0; i < HALF_TILES; ++i)
        load_tile(s.other_k + i * TILE_BYTES, maps.k, s.k_full, 64 * (HALF_TILES * at.rank + i), theirs, at.kv_head,
                  at.batch);
}

// The first program of a cluster claims a block for both.
__device__ __forceinline__ int share_ticket(const Shared& s, int taken, int rank, u32 round) {
    if (rank == 0) {
        barrier_wait(s.ticket_empty, round % 2 ^ 1);
        send_word(s.ticket, taken, s.ticket_full, 1);
        return taken;
    }
    barrier_expect(s.ticket_full, 4);
    barrier_wait(s.ticket_full, round % 2);
    taken = load_word(s.ticket);
    barrier_release_at(s.ticket_empty, 0);
    return taken;
}

// One warp: its first thread issues TMA loads, all copy lse and Δ, since compute-sanitizer's racecheck follows no bulk
// copies of clusters.
__device__ __forceinline__ void produce(const Shared& s, const Maps& maps, const Problem& p, int rank) {
    static_assert(QUERIES == 64, "two numbers a thread");
    Slot<Q_STAGES> q;
    Slot<1> dout;
    u32 round = 0;
    int clusters = gridDim.x / CLUSTER;
    bool leads = threadIdx.x == 0;
#pragma unroll 1
    for (int index = blockIdx.x / CLUSTER; index < p.blocks; ++round) {
        Block block = block_at(p, index);
        ClusterBlock at{block.key, block.kv_head, block.batch, rank};
        QueryIterator it(p, at.pair, at.kv_head, at.batch);
        int steps = it.steps(p.group);
        if (leads && steps == 0) publish_block(s, maps, at, false, round);
#pragma unroll 1
        for (bool first = true; steps > 0; --steps, it.advance(), q.advance(), dout.advance(), first = false) {
            int row = it.block * QUERIES;
            u64 at_row = (u64)it.index * (QUERIES / 2) + threadIdx.x;
            float2 lse = ((const float2*)p.lse)[at_row], delta = ((const float2*)p.delta)[at_row];
            if (leads) {
                barrier_wait(s.q_empty + 8 * q.index, q.parity ^ 1);
                fetch_rows(s.q + q.index * MATRIX_BYTES, maps.q, s.q_full + 8 * q.index, row, it.head, at);
                if (first) publish_block(s, maps, at, true, round);
            }
            publish_numbers(lse, s.lse + q.index * ROW_BYTES, s.lse_full + 8 * q.index, s.lse_empty + 8 * q.index,
                            q.parity);
            if (leads) {
                barrier_wait(s.dout_empty, dout.parity ^ 1);
                fetch_rows(s.dout, maps.dout, s.dout_full, row, it.head, at);
            }
            publish_numbers(delta, s.delta, s.delta_full, s.delta_empty, dout.parity);
        }
        // As late as possible, so that the first free cluster gets it.
        if (leads) index = share_ticket(s, rank == 0 ? clusters + (int)atomicAdd(p.work_counters, 1) : 0, rank, round);
        index = __shfl_sync(0xFFFFFFFF, index, 0);
    }
    if (leads) publish_block(s, maps, ClusterBlock{-1, 0, 0, rank}, false, round);
}
