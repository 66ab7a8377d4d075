// Attention's backward for Hopper, head sizes up to 128: dK and dV of a block of keys, and its share of dQ.
//
//   P = exp(scale · Q Kᵀ − lse)    dV = Pᵀ dO               dP = dO Vᵀ
//   dS = P ∘ (dP − Δ)              dK = scale · dSᵀ Q       dQ = scale · dS K
//
// After FlashAttention (Dao et al. 2022, 2023); transposed scores and register operands are FlashAttention-3's (Shah et
// al. 2024). The order of products within a step and how dQ is added are ours.
//
// Constants: HEAD (64 or 128), QUERIES (a multiple of 16), Q_STAGES and DO_STAGES (powers of two), BANDED (positions
// hide keys), HALF (fp16, else bf16), DQ_WARPS (1: spare warps zero and round the sums of dQ; 0: other kernels do),
// PING_PONG (1: one math warpgroup computes dS while the other multiplies).
//
// Limit: the fp32 additions to dQ in the L2 cache. Without them it is 1.13 (d 64) to 1.21 (d 128) times as fast.
// docs/kernels.md has the times, docs/experiments.md the variants that lost.

constexpr int KEYS = 128, GROUP_KEYS = 64, GROUPS = 2, BLOCK_KEYS = KEYS;

constexpr int TILES = HEAD / 64;  // of 64 columns, in a row of K, V, Q, dO
constexpr int KEY_TILE = KEYS * 128, QUERY_TILE = QUERIES * 128;
constexpr int KEY_BYTES = TILES * KEY_TILE, QUERY_BYTES = TILES * QUERY_TILE;
constexpr int DS_BYTES = QUERIES * KEYS * 2;  // [64 keys of a warpgroup][queries][64 keys]
constexpr int DQ_GROUP_SUMS = QUERIES * HEAD / GROUPS;  // sums of a warpgroup
constexpr int DQ_COLUMNS = HEAD == 128 ? QUERIES : QUERIES / 2;

#include "backward_dq_warps.cuh"

// A program owns a block of 128 keys of one key head and loops over the blocks of QUERIES queries that see them, of
// every query head of the group; then it claims another block. Its twelve warps:
//
//   0        producer   One thread issues TMA loads: K and V once a block, Q (with lse) and dO (with Δ) into rings.
//   1 to 3   dQ warps   Where DQ_WARPS, two zero and round sums of dQ (backward_dq_warps.cuh), one counts blocks.
//   4 to 11  math       Two warpgroups of 64 keys each compute Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, so that Pᵀ and dSᵀ are in
//                       registers where dV += Pᵀ dO and dK += dSᵀ Q take them. dSᵀ also goes to shared memory, for
//                       dQᵀ = Kᵀ dSᵀ over the keys of both; each warpgroup adds half of that to fp32 sums in global
//                       memory, in the order of its registers. dK and dV leave through the buffers of dSᵀ.
//
// The tensor cores have work of this warpgroup under every other step:
//
//   exp of S(j)             under  dK(j - 1), dP(j)
//   dS(j) to shared memory  under  dV(j)
//   add dQ(j - 1)           under  dK(j)
//
// dQ is a step late so that no warpgroup waits for the other's dS. The first step computes a dQ too and does not add
// it: a branch around a product makes ptxas serialise all of them.

constexpr int MATH_REGISTERS = 240, PRODUCER_REGISTERS = 24;
constexpr int DS_STAGES = 2, DQ_WARP_COUNT = 2;
// Where registers suffice. Else dK reads dSᵀ from shared memory, and dS takes the rounded P.
constexpr bool DS_IN_REGISTERS = HEAD == 64, P_IN_FP32 = HEAD == 128;
constexpr int MATH_THREADS = GROUPS * GROUP_THREADS;
// Named barriers: of a warpgroup (+ part), of both, and of each warpgroup's turn (+ part).
constexpr int GROUP_BARRIER = 1, MATH_BARRIER = 3, PING_PONG_BARRIER = 4;

struct Shared {
    u32 k, v, q, dout, ds, lse, delta, k_full, v_full, q_full, q_empty, dout_full, dout_empty, ds_full, ds_empty;
    u32 kv_empty, added, chunk_full, block, chunks;
};

__device__ __forceinline__ Shared layout(u32 start) {
    Shared s;
    s.k = start;
    s.v = s.k + KEY_BYTES;
    s.q = s.v + KEY_BYTES;
    s.dout = s.q + Q_STAGES * QUERY_BYTES;
    s.ds = s.dout + DO_STAGES * QUERY_BYTES;
    s.lse = s.ds + DS_STAGES * DS_BYTES;
    s.delta = s.lse + Q_STAGES * ROW_BYTES;
    s.k_full = s.delta + DO_STAGES * ROW_BYTES;
    s.v_full = s.k_full + 8;
    s.q_full = s.v_full + 8;
    s.q_empty = s.q_full + 8 * Q_STAGES;
    s.dout_full = s.q_empty + 8 * Q_STAGES;
    s.dout_empty = s.dout_full + 8 * DO_STAGES;
    s.ds_full = s.dout_empty + 8 * DO_STAGES;
    s.ds_empty = s.ds_full + 8 * DS_STAGES;
    s.kv_empty = s.ds_empty + 8 * DS_STAGES;
    s.added = s.kv_empty + 8;
    s.chunk_full = s.added + 8;
    s.block = (s.chunk_full + 8 * DQ_WARP_COUNT + 15) / 16 * 16;
    s.chunks = (s.block + 2 * 16 + 127) / 128 * 128;
    return s;
}

// Index and parity of a step's slot in a ring of SIZE, a power of two.
template <int SIZE>
__device__ __forceinline__ u32 slot(u32 step) {
    return step % SIZE;
}
template <int SIZE>
__device__ __forceinline__ u32 parity(u32 step) {
    return step / SIZE % 2;
}

struct Maps {
    const TensorMap *q, *k, *v, *dout;
};

__device__ __forceinline__ void fetch(u32 to, const TensorMap* map, u32 full, const void* numbers, u32 numbers_to,
                                      int row, int head, int batch) {
    barrier_expect(full, QUERY_BYTES + ROW_BYTES);
    for (int i = 0; i < TILES; ++i) load_tile(to + i * QUERY_TILE, map, full, 64 * i, row, head, batch);
    load_bytes(numbers_to, numbers, ROW_BYTES, full);
}

// Gives the program's next block to the math warpgroups, once both are done with the last one.
__device__ __forceinline__ void publish_block(const Shared& s, const Maps& maps, const Block& at, bool loads,
                                              u32 round) {
    barrier_wait(s.kv_empty, round % 2 ^ 1);
    store_block(s.block + round % 2 * 16, at);
    barrier_expect(s.k_full, loads ? KEY_BYTES : 0);
    barrier_expect(s.v_full, loads ? KEY_BYTES : 0);
    if (loads) {
        for (int i = 0; i < TILES; ++i)
            load_tile(s.k + i * KEY_TILE, maps.k, s.k_full, 64 * i, at.key, at.kv_head, at.batch);
        for (int i = 0; i < TILES; ++i)
            load_tile(s.v + i * KEY_TILE, maps.v, s.v_full, 64 * i, at.key, at.kv_head, at.batch);
    }
}

// The next unclaimed block. Without DQ_WARPS a program's first block is its index; with them, warps wait for all blocks
// of a head, so a program that does not run yet must own none.
__device__ __forceinline__ int claim_block(const Problem& p) {
    return (DQ_WARPS ? 0 : gridDim.x) + atomicAdd(p.work_counters, 1);
}

__device__ __forceinline__ void produce(const Shared& s, const Maps& maps, const Problem& p) {
    u32 step = 0, round = 0;
#pragma unroll 1
    for (int index = DQ_WARPS ? claim_block(p) : blockIdx.x; index < p.blocks; ++round) {
        Block at = block_at(p, index);
        QueryIterator it(p, at.key, at.kv_head, at.batch);
        int steps = it.steps(p.group);
        if (DQ_WARPS) wait_for_zeros(p, at);
        if (steps == 0) publish_block(s, maps, at, false, round);
#pragma unroll 1
        for (bool first = true; steps > 0; --steps, ++step, it.advance(), first = false) {
            int row = it.block * QUERIES;
            u64 at_row = (u64)it.index * QUERIES;
            u32 q = slot<Q_STAGES>(step), dout = slot<DO_STAGES>(step);
            barrier_wait(s.q_empty + 8 * q, parity<Q_STAGES>(step) ^ 1);
            fetch(s.q + q * QUERY_BYTES, maps.q, s.q_full + 8 * q, p.lse + at_row, s.lse + q * ROW_BYTES, row,
                  it.head, at.batch);
            if (first) publish_block(s, maps, at, true, round);
            barrier_wait(s.dout_empty + 8 * dout, parity<DO_STAGES>(step) ^ 1);
            fetch(s.dout + dout * QUERY_BYTES, maps.dout, s.dout_full + 8 * dout, p.delta + at_row,
                  s.delta + dout * ROW_BYTES, row, it.head, at.batch);
        }
        index = claim_block(p);  // as late as possible, so that the first free program gets it
    }
    publish_block(s, maps, Block{-1, 0, 0}, false, round);
}

struct Math {
    Shared s;
    Problem p;
    QueryIterator it;
    int part, warp, lane, key;
    u32 step_index;      // over all blocks of keys
    u32 first_step;      // of this block of keys
    u32 previous_block;  // of queries, whose sums the delayed dQ is added to
    float dk[HEAD / 2], dv[HEAD / 2], scores[QUERIES / 2];
    u32 weights[QUERIES / 4], ds[QUERIES / 4];  // Pᵀ and dSᵀ, rounded, as first operands

    // out = mine · theirsᵀ [64 keys, QUERIES]: the warpgroup's rows of K or V with those of Q or dO.
    __device__ __forceinline__ void keys_by_queries(float (&out)[QUERIES / 2], u32 mine, u32 theirs) {
        u64 a = along_k(mine + part * GROUP_KEYS * 128), b = along_k(theirs);
        mma_fence();
#pragma unroll
        for (int i = 0; i < HEAD / 16; ++i)
            mma<0, 0>(out, a + (i / 4 * KEY_TILE + i % 4 * 32) / 16, b + (i / 4 * QUERY_TILE + i % 4 * 32) / 16, i > 0);
        mma_commit();
    }

    // sum += left · rows [64 keys, HEAD]: left [64 keys, QUERIES] from registers.
    __device__ __forceinline__ void keys_by_head(float (&sum)[HEAD / 2], const u32 (&left)[QUERIES / 4], u32 rows) {
        u64 b = across_k(rows, QUERY_TILE);
        mma_fence();
#pragma unroll
        for (int i = 0; i < QUERIES / 16; ++i) mma<1>(sum, left + 4 * i, b + i * 16 * 128 / 16, 1);
        mma_commit();
    }

    // The same with dSᵀ, which is in shared memory as well.
    __device__ __forceinline__ void keys_by_head_shared(float (&sum)[HEAD / 2], u32 left, u32 rows) {
        u64 a = across_k(left + part * QUERIES * 128, 0), b = across_k(rows, QUERY_TILE);
        mma_fence();
#pragma unroll
        for (int i = 0; i < QUERIES / 16; ++i) mma<1, 1>(sum, a + i * 16 * 128 / 16, b + i * 16 * 128 / 16, 1);
        mma_commit();
    }

    // The warpgroup's share of dQᵀ = Kᵀ dSᵀ: its half of the head, or, where that is 64, of the queries.
    __device__ __forceinline__ void head_by_queries(float (&dq)[DQ_COLUMNS / 2], int slot) {
        u32 columns = s.ds + slot * DS_BYTES + (HEAD == 128 ? 0 : part * DQ_COLUMNS * 128);
        u64 a = across_k(s.k + (HEAD == 128 ? part * KEY_TILE : 0), KEY_TILE), b = along_k(columns);
        mma_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i)
            mma<1, 0>(dq, a + i * 16 * 128 / 16, b + (i / 4 * QUERIES * 128 + i % 4 * 32) / 16, i > 0);
        mma_commit();
    }

    // A warpgroup computes dS in its turn, and multiplies while the other does. Without turns both may do the same.
    __device__ __forceinline__ void ping_pong_wait() const {
        if (PING_PONG) meet(PING_PONG_BARRIER + part, MATH_THREADS);
    }
    __device__ __forceinline__ void ping_pong_signal() const {
        if (PING_PONG) named_barrier_arrive(PING_PONG_BARRIER + 1 - part, MATH_THREADS);
    }

    __device__ __forceinline__ void add_to_dq(const float (&dq)[DQ_COLUMNS / 2]) {
        add_to_sums(p.dq_sums + ((u64)previous_block * GROUPS + part) * DQ_GROUP_SUMS, dq);
    }

    // Invariant: the scores of this step are in registers, and the dK of the step before is in flight.
    template <bool LAST>
    __device__ __forceinline__ void step() {
        float dp[QUERIES / 2], dq[DQ_COLUMNS / 2], next[QUERIES / 2];
        u32 this_q = s.q + slot<Q_STAGES>(step_index) * QUERY_BYTES;
        u32 this_dout = s.dout + slot<DO_STAGES>(step_index) * QUERY_BYTES;
        u32 this_ds = s.ds + slot<DS_STAGES>(step_index) * DS_BYTES;
        u32 lse = s.lse + slot<Q_STAGES>(step_index) * ROW_BYTES + lane % 4 * 8;
        u32 delta = s.delta + slot<DO_STAGES>(step_index) * ROW_BYTES + lane % 4 * 8;
        Scores place(p, key + part * GROUP_KEYS, it.block * QUERIES, warp, lane);
        barrier_wait(s.dout_full + 8 * slot<DO_STAGES>(step_index), parity<DO_STAGES>(step_index));
        keys_by_queries(dp, s.v, this_dout);
        if (place.needs_mask(key, KEYS)) place.apply_mask(scores);
        exponentiate(scores, weights, lse, p.scale_log2);
        keys_by_head(dv, weights, this_dout);
        mma_wait<1>();
        fence_registers(dp);
        ping_pong_wait();
        if (DS_IN_REGISTERS) fence_registers(ds);
        if (place.has_single_key()) {
            if (P_IN_FP32)
                place.for_single_key([&](int i) { scores[i] = 0.0f; });
            else
                place.for_single_key([&](int i) { dp[i] = load_float(delta + i / 4 * 32 + i % 2 * 4); });
        }
        if (step_index != first_step) warp_arrive(s.q_empty + 8 * slot<Q_STAGES>(step_index - 1));
        score_gradients<P_IN_FP32>(ds, dp, scores, weights, delta);
        barrier_wait(s.ds_empty + 8 * slot<DS_STAGES>(step_index), parity<DS_STAGES>(step_index) ^ 1);
        store_ds(ds, this_ds + part * QUERIES * 128, warp, lane);
        warp_arrive(s.ds_full + 8 * slot<DS_STAGES>(step_index));
        if (!LAST) {
            barrier_wait(s.q_full + 8 * slot<Q_STAGES>(step_index + 1), parity<Q_STAGES>(step_index + 1));
            keys_by_queries(next, s.k, s.q + slot<Q_STAGES>(step_index + 1) * QUERY_BYTES);
        }
        ping_pong_signal();
        mma_wait<LAST ? 0 : 1>();
        fence_registers(weights);
        warp_arrive(s.dout_empty + 8 * slot<DO_STAGES>(step_index));
        barrier_wait(s.ds_full + 8 * slot<DS_STAGES>(step_index - 1), parity<DS_STAGES>(step_index - 1));
        head_by_queries(dq, slot<DS_STAGES>(step_index - 1));
        if (DS_IN_REGISTERS) {
            keys_by_head(dk, ds, this_q);
        } else {
            meet(GROUP_BARRIER + part, GROUP_THREADS);
            keys_by_head_shared(dk, this_ds, this_q);
        }
        mma_wait<1>();
        fence_registers(dq);
        if (step_index != first_step) {
            warp_arrive(s.ds_empty + 8 * slot<DS_STAGES>(step_index - 1));
            add_to_dq(dq);
        }
        if (!LAST) {
            fence_registers(next);
#pragma unroll
            for (int i = 0; i < QUERIES / 2; ++i) scores[i] = next[i];
        }
        previous_block = it.index;
        ++step_index, it.advance();
    }

    __device__ __forceinline__ void signal_added() {
        if (DQ_WARPS) warp_arrive(s.added);
    }

    // Waits until the warpgroup's TMA stores have read their shared memory.
    __device__ __forceinline__ void wait_for_stores() {
        if (threadIdx.x % GROUP_THREADS == 0) bulk_wait_read();
        meet(GROUP_BARRIER + part, GROUP_THREADS);
    }

    __device__ __forceinline__ void run(int steps, u32 round) {
#pragma unroll
        for (int i = 0; i < HEAD / 2; ++i) dk[i] = dv[i] = 0.0f;
        fence_registers(dk), fence_registers(dv);
        if (steps == 0) {
            if (DQ_WARPS) meet(MATH_BARRIER, MATH_THREADS);  // else one warpgroup would arrive twice for one block
            signal_added();
            warp_arrive(s.kv_empty);
            wait_for_stores();
            return;
        }
        first_step = step_index;
        barrier_wait(s.q_full + 8 * slot<Q_STAGES>(step_index), parity<Q_STAGES>(step_index));
        float first[QUERIES / 2];
        keys_by_queries(first, s.k, s.q + slot<Q_STAGES>(step_index) * QUERY_BYTES);
        wait_for_stores();
        mma_wait<0>();
        fence_registers(first);
#pragma unroll
        for (int i = 0; i < QUERIES / 2; ++i) scores[i] = first[i];
        barrier_wait(s.v_full, round % 2);
        for (int left = steps - 1; left > 0; --left) step<false>();
        step<true>();
        float dq[DQ_COLUMNS / 2];
        barrier_wait(s.ds_full + 8 * slot<DS_STAGES>(step_index - 1), parity<DS_STAGES>(step_index - 1));
        head_by_queries(dq, slot<DS_STAGES>(step_index - 1));
        mma_wait<0>();
        fence_registers(dq), fence_registers(dk), fence_registers(dv);
        warp_arrive(s.kv_empty);
        warp_arrive(s.q_empty + 8 * slot<Q_STAGES>(step_index - 1));
        warp_arrive(s.ds_empty + 8 * slot<DS_STAGES>(step_index - 1));
        add_to_dq(dq);
        signal_added();
    }

    // Stores the warpgroup's rows of dK or dV, through its own part of a buffer of dSᵀ.
    __device__ __forceinline__ void write(const float (&sum)[HEAD / 2], float scale, u32 area, const TensorMap* map,
                                          const Block& at) {
        area += part * QUERIES * 128;
        stage_rows(sum, scale, area, DS_BYTES, warp, lane);
        meet(GROUP_BARRIER + part, GROUP_THREADS);
        if (threadIdx.x % GROUP_THREADS == 0) {
            for (int i = 0; i < TILES; ++i)
                store_tile(map, area + i * DS_BYTES, 64 * i, at.key + part * GROUP_KEYS, at.kv_head, at.batch);
            bulk_commit();
        }
    }

    __device__ __forceinline__ void run_all(const TensorMap* dk_map, const TensorMap* dv_map) {
        step_index = 0;
        if (part == 1) ping_pong_signal();
        for (u32 round = 0;; ++round) {
            barrier_wait(s.k_full, round % 2);
            Block at = load_block(s.block + round % 2 * 16);
            if (at.key < 0) break;
            it = QueryIterator(p, at.key, at.kv_head, at.batch);
            key = at.key;
            run(it.steps(p.group), round);
            at = load_block(s.block + round % 2 * 16);  // reloaded, which costs fewer registers than keeping it
            // Wait until both warpgroups have read dSᵀ of the last two steps.
            barrier_wait(s.ds_empty + 8 * slot<DS_STAGES>(step_index - 1), parity<DS_STAGES>(step_index - 1));
            barrier_wait(s.ds_empty + 8 * slot<DS_STAGES>(step_index - 2), parity<DS_STAGES>(step_index - 2));
            write(dv, 1.0f, s.ds, dv_map, at);
            if (TILES > 1) wait_for_stores();
            write(dk, p.scale, s.ds + (TILES > 1 ? 0 : DS_BYTES), dk_map, at);
        }
        if (part == 0) ping_pong_wait();  // for the other's last signal
        if (threadIdx.x % GROUP_THREADS == 0) bulk_wait_read();
    }
};

extern "C" __global__ void __launch_bounds__(GROUP_THREADS * (1 + GROUPS), 1)
    attention_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                       const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
                       const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
                       const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) char memory[];
    Shared s = layout(shared_address(memory));
    if (threadIdx.x == 0) {
        constexpr int WARPS = GROUPS * GROUP_THREADS / 32;
        barrier_init(s.k_full, 1);
        barrier_init(s.v_full, 1);
        barrier_init(s.kv_empty, WARPS + DQ_WARPS);
        barrier_init(s.added, WARPS);
        for (int i = 0; i < DQ_WARP_COUNT; ++i) barrier_init(s.chunk_full + 8 * i, 1);
        for (int i = 0; i < Q_STAGES; ++i) barrier_init(s.q_full + 8 * i, 1), barrier_init(s.q_empty + 8 * i, WARPS);
        for (int i = 0; i < DO_STAGES; ++i)
            barrier_init(s.dout_full + 8 * i, 1), barrier_init(s.dout_empty + 8 * i, WARPS);
        for (int i = 0; i < DS_STAGES; ++i)
            barrier_init(s.ds_full + 8 * i, WARPS), barrier_init(s.ds_empty + 8 * i, WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < GROUP_THREADS) {
        give_registers<PRODUCER_REGISTERS>();
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (threadIdx.x == 0) produce(s, Maps{&q_map, &k_map, &v_map, &dout_map}, p);
        if (DQ_WARPS && threadIdx.x == 32) count_added_blocks(p, s.k_full, s.block, s.kv_empty, s.added);
        if (DQ_WARPS && warp >= 2)
            run_dq_warp(p, s.chunks + (warp - 2) * CHUNK_BYTES, s.chunk_full + 8 * (warp - 2), lane);
    } else {
        take_registers<MATH_REGISTERS>();
        int warp = warp_index();
        Math math{s, p, QueryIterator(p, 0, 0, 0), warp / GROUP_WARPS - 1, warp % GROUP_WARPS, (int)threadIdx.x % 32};
        math.run_all(&dk_map, &dv_map);
    }
}
