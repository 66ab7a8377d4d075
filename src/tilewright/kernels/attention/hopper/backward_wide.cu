// Attention's backward for Hopper, head sizes 129 to 256: what `backward.cu` computes, by clusters of two.
//
// dK and dV of 128 keys would fill the registers, and with 64 keys a program the copies of Q and dO and the sums of dQ
// would fill the L2's bandwidth. So two programs of 64 keys each form a cluster: Q and dO are fetched once for both,
// and dS goes to the neighbour too, so that each adds its half of dQ's columns, over the keys of both.
//
// The two warpgroups that multiply do different work:
//
//   weights     Sᵀ = K Qᵀ, P = exp(scale · S − lse), dV += Pᵀ dO         hands P over
//   gradients   dPᵀ = V dOᵀ, dS = P ∘ (dP − Δ), dK += dSᵀ Q              publishes dS, here and at the neighbour's
//   both        dQᵀ += Kᵀ dSᵀ for 64 columns each, added to fp32 sums in global memory
//
// Programs take the next keys as in backward.cu, the first of a cluster for both. dV and dK leave by way of V's
// and K's own places. One cluster for each block of keys, S 512: 307 TFLOP/s for 326 (causal 206 for 212).
//
// The gradients' dQ is added in the next step, under dP: when it is there, S 8192, 5577 µs for 5408 (causal 2880 for
// 2807). Both warpgroups' in the next step: 5375 (causal 2771), with more registers spilled than are accepted here.
//
// Settings: BANDED (some keys are hidden by their place), HALF (fp16, otherwise bf16).

constexpr int HEAD = 256, QUERIES = 64, KEYS = 64, CLUSTER = 2, WALK_KEYS = CLUSTER * KEYS;

#include "backward_scores.cuh"

constexpr int Q_STAGES = 2, TILES = HEAD / 64, HALF_TILES = TILES / CLUSTER;
constexpr int TILE = 64 * 128;  // bytes of 64 rows of 64 columns
constexpr int WHOLE = TILES * TILE;
constexpr int DQ_SHARE = QUERIES * HEAD / 4;  // sums of a warpgroup; two programs of two
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
    s.v = s.k + WHOLE;
    s.other_k = s.v + WHOLE;
    s.q = s.other_k + WHOLE / CLUSTER;
    s.dout = s.q + Q_STAGES * WHOLE;
    s.ds = s.dout + WHOLE;
    s.weights = s.ds + 2 * CLUSTER * TILE;
    s.lse = s.weights + TILE;
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

// The place in a ring, and the parity of the turn.
template <int SIZE>
struct Slot {
    int index = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++index == SIZE) index = 0, parity ^= 1;
    }
};

struct Place {
    int pair, kv_head, batch, rank;  // the cluster's first key: none where it is negative
    __device__ __forceinline__ int key() const { return pair + rank * KEYS; }
};

struct Maps {
    const TensorMap *q, *k, *v, *dout;
};

// Each program fetches half of the columns of Q and dO for both.
__device__ __forceinline__ void fetch_rows(u32 to, const TensorMap* map, u32 full, int row, int head, const Place& at) {
    barrier_expect(full, WHOLE);
    for (int i = HALF_TILES * at.rank; i < HALF_TILES * (at.rank + 1); ++i)
        load_tile_to_both(to + i * TILE, map, full, 64 * i, row, head, at.batch);
}

// Two neighbouring numbers of a step, read beforehand, to where nobody needs the last ones any more.
__device__ __forceinline__ void hand_over(float2 numbers, u32 to, u32 full, u32 empty, u32 parity) {
    barrier_wait(empty, parity ^ 1);
    store_pair(to + threadIdx.x * 8, numbers);
    barrier_arrive(full);
}

// The program's next keys, once both warpgroups are done with the last ones.
__device__ __forceinline__ void hand_out(const Shared& s, const Maps& maps, const Place& at, bool loads, u32 turn) {
    barrier_wait(s.k_empty, turn % 2 ^ 1);
    barrier_wait(s.v_empty, turn % 2 ^ 1);
    keep_block(s.block + turn % 2 * 16, Block{at.pair, at.kv_head, at.batch});
    barrier_expect(s.k_full, loads ? WHOLE + WHOLE / CLUSTER : 0);
    barrier_expect(s.v_full, loads ? WHOLE : 0);
    if (!loads) return;
    for (int i = 0; i < TILES; ++i) load_tile(s.k + i * TILE, maps.k, s.k_full, 64 * i, at.key(), at.kv_head, at.batch);
    for (int i = 0; i < TILES; ++i) load_tile(s.v + i * TILE, maps.v, s.v_full, 64 * i, at.key(), at.kv_head, at.batch);
    int theirs = at.pair + (1 - at.rank) * KEYS;
    for (int i = 0; i < HALF_TILES; ++i)
        load_tile(s.other_k + i * TILE, maps.k, s.k_full, 64 * (HALF_TILES * at.rank + i), theirs, at.kv_head,
                  at.batch);
}

// What the first program of the cluster took is what both do next.
__device__ __forceinline__ int agree(const Shared& s, int taken, int rank, u32 turn) {
    if (rank == 0) {
        barrier_wait(s.ticket_empty, turn % 2 ^ 1);
        send_word(s.ticket, taken, s.ticket_full, 1);
        return taken;
    }
    barrier_expect(s.ticket_full, 4);
    barrier_wait(s.ticket_full, turn % 2);
    taken = load_word(s.ticket);
    arrive_at(s.ticket_empty, 0);
    return taken;
}

// One warp: its first thread starts copies, all hand over lse and Δ. compute-sanitizer's racecheck follows no bulk copies
// by clusters.
__device__ __forceinline__ void produce(const Shared& s, const Maps& maps, const Problem& p, int rank) {
    static_assert(QUERIES == 64, "two numbers a thread");
    Slot<Q_STAGES> q;
    Slot<1> dout;
    u32 turn = 0;
    int clusters = gridDim.x / CLUSTER;
    bool leads = threadIdx.x == 0;
#pragma unroll 1
    for (int index = blockIdx.x / CLUSTER; index < p.blocks; ++turn) {
        Block block = block_at(p, index);
        Place at{block.key, block.kv_head, block.batch, rank};
        Walk walk(p, at.pair, at.kv_head, at.batch);
        int steps = walk.steps(p.group);
        if (leads && steps == 0) hand_out(s, maps, at, false, turn);
#pragma unroll 1
        for (bool first = true; steps > 0; --steps, walk.advance(), q.advance(), dout.advance(), first = false) {
            int row = walk.block * QUERIES;
            u64 at_row = (u64)walk.index * (QUERIES / 2) + threadIdx.x;
            float2 lse = ((const float2*)p.lse)[at_row], delta = ((const float2*)p.delta)[at_row];
            if (leads) {
                barrier_wait(s.q_empty + 8 * q.index, q.parity ^ 1);
                fetch_rows(s.q + q.index * WHOLE, maps.q, s.q_full + 8 * q.index, row, walk.head, at);
                if (first) hand_out(s, maps, at, true, turn);
            }
            hand_over(lse, s.lse + q.index * ROW_BYTES, s.lse_full + 8 * q.index, s.lse_empty + 8 * q.index, q.parity);
            if (leads) {
                barrier_wait(s.dout_empty, dout.parity ^ 1);
                fetch_rows(s.dout, maps.dout, s.dout_full, row, walk.head, at);
            }
            hand_over(delta, s.delta, s.delta_full, s.delta_empty, dout.parity);
        }
        // No sooner: whoever is free first takes the next.
        if (leads) index = agree(s, rank == 0 ? clusters + (int)atomicAdd(p.handed_out, 1) : 0, rank, turn);
        index = __shfl_sync(0xFFFFFFFF, index, 0);
    }
    if (leads) hand_out(s, maps, Place{-1, 0, 0, rank}, false, turn);
}

// What both warpgroups do.
struct Math {
    Shared s;
    Problem p;
    Walk walk;
    int part, warp, lane, rank, pair;
    Slot<Q_STAGES> q;
    Slot<1> dout;
    Slot<2> met;
    float sum[HEAD / 2];  // dV or dK

    // out = mine · theirsᵀ [KEYS, QUERIES]: rows of K or V with those of Q or dO.
    __device__ __forceinline__ void keys_by_queries(float (&out)[QUERIES / 2], u32 mine, u32 theirs) {
        u64 a = along_k(mine), b = along_k(theirs);
        mma_fence();
#pragma unroll
        for (int i = 0; i < HEAD / 16; ++i)
            mma<0, 0>(out, a + (i / 4 * TILE + i % 4 * 32) / 16, b + (i / 4 * TILE + i % 4 * 32) / 16, i > 0);
        mma_commit();
    }

    // sum += left · rows [KEYS, HEAD]: left [KEYS, QUERIES] from registers.
    __device__ __forceinline__ void keys_by_head(const u32 (&left)[QUERIES / 4], u32 rows) {
        u64 b = across_k(rows, TILE);
        mma_fence();
#pragma unroll
        for (int i = 0; i < QUERIES / 16; ++i) mma<1>(sum, left + 4 * i, b + i * 16 * 128 / 16, 1);
        mma_commit();
    }

    // 64 columns of dQᵀ = Kᵀ dSᵀ over the keys of both programs.
    __device__ __forceinline__ void head_by_queries(float (&dq)[QUERIES / 2]) {
        u32 ds = s.ds + met.index * CLUSTER * TILE;
        u64 mine = across_k(s.k + (HALF_TILES * rank + part) * TILE, TILE);
        u64 theirs = across_k(s.other_k + part * TILE, TILE);
        u64 my_ds = along_k(ds + rank * TILE), their_ds = along_k(ds + (1 - rank) * TILE);
        mma_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) mma<1, 0>(dq, mine + i * 16 * 128 / 16, my_ds + i * 32 / 16, i > 0);
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) mma<1, 0>(dq, theirs + i * 16 * 128 / 16, their_ds + i * 32 / 16, 1);
        mma_commit();
    }

    __device__ __forceinline__ void add_to_dq(const float (&dq)[QUERIES / 2], u32 block) {
        add_to_sums(p.dq + ((u64)block * 4 + rank * 2 + part) * DQ_SHARE, dq);
    }

    __device__ __forceinline__ Scores scores_at() const {
        return Scores(p, pair + rank * KEYS, walk.block * QUERIES, warp, lane);
    }

    // dSᵀ to shared memory, and a copy of it to the neighbour.
    __device__ __forceinline__ void publish_to_both(const u32 (&ds)[QUERIES / 4]) {
        u32 area = s.ds + (met.index * CLUSTER + rank) * TILE, full = s.ds_full + 8 * met.index;
        publish(ds, area, warp, lane);
        warp_arrive(full);
        meet(2, GROUP_THREADS);
        if (threadIdx.x % GROUP_THREADS == 0) {
            barrier_expect(full, TILE);
            send_bytes(area, area, TILE, full, 1 - rank);
        }
    }

    // Weights of the step go from one warpgroup to the same thread of the other.
    __device__ __forceinline__ void hand_over(const u32 (&weights)[QUERIES / 4]) {
        u32 to = s.weights + threadIdx.x % GROUP_THREADS * 16;
        barrier_wait(s.weights_empty, dout.parity ^ 1);
#pragma unroll
        for (int i = 0; i < QUERIES / 16; ++i)
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * GROUP_THREADS * 16),
                         "r"(weights[4 * i]), "r"(weights[4 * i + 1]), "r"(weights[4 * i + 2]), "r"(weights[4 * i + 3])
                         : "memory");
        barrier_arrive(s.weights_full);
    }

    __device__ __forceinline__ void take_over(u32 (&weights)[QUERIES / 4]) {
        u32 from = s.weights + threadIdx.x % GROUP_THREADS * 16;
        barrier_wait(s.weights_full, dout.parity);
#pragma unroll
        for (int i = 0; i < QUERIES / 16; ++i)
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(weights[4 * i]), "=r"(weights[4 * i + 1]), "=r"(weights[4 * i + 2]),
                           "=r"(weights[4 * i + 3])
                         : "r"(from + i * GROUP_THREADS * 16) : "memory");
        barrier_arrive(s.weights_empty);
    }

    // The scores are there; on return, those of the next step.
    template <bool LAST>
    __device__ __forceinline__ void weights_step(float (&scores)[QUERIES / 2]) {
        u32 weights[QUERIES / 4];
        float next[QUERIES / 2], dq[QUERIES / 2];
        Scores place = scores_at();
        if (place.cut(pair + rank * KEYS, KEYS)) place.hide(scores);
        barrier_wait(s.lse_full + 8 * q.index, q.parity);
        exponentiate(scores, weights, s.lse + q.index * ROW_BYTES + lane % 4 * 8, p.scale_log2);
        barrier_arrive(s.lse_empty + 8 * q.index);
        warp_arrive_at_both(s.q_empty + 8 * q.index);
        hand_over(weights);
        barrier_wait(s.dout_full, dout.parity);
        keys_by_head(weights, s.dout);
        if (!LAST) {
            q.advance();
            barrier_wait(s.q_full + 8 * q.index, q.parity);
            keys_by_queries(next, s.k, s.q + q.index * WHOLE);
        }
        mma_wait<LAST ? 0 : 1>();
        settle(weights);
        warp_arrive_at_both(s.dout_empty);
        barrier_wait(s.ds_full + 8 * met.index, met.parity);
        head_by_queries(dq);
        mma_wait<0>();
        settle(dq);
        warp_arrive_at_both(s.ds_empty + 8 * met.index);
        add_to_dq(dq, walk.index);
        if (!LAST) {
            settle(next);
#pragma unroll
            for (int i = 0; i < QUERIES / 2; ++i) scores[i] = next[i];
        }
        dout.advance(), met.advance(), walk.advance();
    }

    __device__ __forceinline__ void run_weights(int steps) {
        float first[QUERIES / 2], scores[QUERIES / 2];
        barrier_wait(s.q_full + 8 * q.index, q.parity);
        keys_by_queries(first, s.k, s.q + q.index * WHOLE);
        mma_wait<0>();
        settle(first);
#pragma unroll
        for (int i = 0; i < QUERIES / 2; ++i) scores[i] = first[i];
        for (int step = 1; step < steps; ++step) weights_step<false>(scores);
        weights_step<true>(scores);
        q.advance();
    }

    __device__ __forceinline__ void run_gradients(int steps, u32 turn) {
        barrier_wait(s.v_full, turn % 2);
        float dq[QUERIES / 2];
        u32 sums = 0;  // that dQ of the step before is of
        for (int step = 0; step < steps; ++step) {
            float dp[QUERIES / 2];
            u32 weights[QUERIES / 4], ds[QUERIES / 4];
            barrier_wait(s.dout_full, dout.parity);
            keys_by_queries(dp, s.v, s.dout);
            if (step > 0) add_to_dq(dq, sums);  // under a product
            take_over(weights);
            Scores place = scores_at();
            if (place.lonely())
                place.for_lonely([&](int i) { weights[i / 2] &= i % 2 ? 0x0000FFFFu : 0xFFFF0000u; });
            mma_wait<0>();
            settle(dp);
            barrier_wait(s.delta_full, dout.parity);
            differentiate<false>(ds, dp, dp, weights, s.delta + lane % 4 * 8);
            barrier_arrive(s.delta_empty);
            warp_arrive_at_both(s.dout_empty);
            barrier_wait(s.ds_empty + 8 * met.index, met.parity ^ 1);
            publish_to_both(ds);
            barrier_wait(s.q_full + 8 * q.index, q.parity);
            keys_by_head(ds, s.q + q.index * WHOLE);
            barrier_wait(s.ds_full + 8 * met.index, met.parity);
            head_by_queries(dq);
            mma_wait<1>();
            settle(ds);
            warp_arrive_at_both(s.q_empty + 8 * q.index);
            mma_wait<0>();
            settle(dq);
            warp_arrive_at_both(s.ds_empty + 8 * met.index);
            sums = walk.index;
            q.advance(), dout.advance(), met.advance(), walk.advance();
        }
        add_to_dq(dq, sums);
    }

    // dV or dK to global memory by way of shared memory that nobody reads any more until `empty` says so.
    __device__ __forceinline__ void write(float scale, u32 area, const TensorMap* map, const Block& at, u32 empty) {
        stage(sum, scale, area, TILE, warp, lane);
        meet(1 + part, GROUP_THREADS);
        if (threadIdx.x % GROUP_THREADS == 0) {
            for (int i = 0; i < TILES; ++i)
                store_tile(map, area + i * TILE, 64 * i, at.key + rank * KEYS, at.kv_head, at.batch);
            bulk_commit();
            bulk_wait_read();
            barrier_arrive(empty);
        }
        __syncwarp();
    }

    __device__ __forceinline__ bool next_block(u32 turn) {
        barrier_wait(s.k_full, turn % 2);
        Block at = kept_block(s.block + turn % 2 * 16);
        pair = at.key;
        walk = Walk(p, at.key, at.kv_head, at.batch);
#pragma unroll
        for (int i = 0; i < HEAD / 2; ++i) sum[i] = 0.0f;
        settle(sum);
        return pair >= 0;
    }

    template <bool WEIGHTS>
    __device__ __forceinline__ void run_all(const TensorMap* map) {
        for (u32 turn = 0; next_block(turn); ++turn) {
            int steps = walk.steps(p.group);
            if (steps > 0) WEIGHTS ? run_weights(steps) : run_gradients(steps, turn);
            mma_wait<0>();
            settle(sum);
            meet(3, 2 * GROUP_THREADS);  // both warpgroups have read K, and the other V
            Block at = kept_block(s.block + turn % 2 * 16);
            write(WEIGHTS ? 1.0f : p.scale, WEIGHTS ? s.v : s.k, map, at, WEIGHTS ? s.v_empty : s.k_empty);
        }
    }
};

__device__ __forceinline__ void start_barriers(const Shared& s) {
    constexpr int READERS = CLUSTER * 2 * GROUP_WARPS;
    barrier_init(s.k_full, 1);
    barrier_init(s.v_full, 1);
    barrier_init(s.k_empty, 1);
    barrier_init(s.v_empty, 1);
    barrier_init(s.ticket_full, 1);
    barrier_init(s.ticket_empty, 1);
    for (int i = 0; i < Q_STAGES; ++i) barrier_init(s.q_full + 8 * i, 1), barrier_init(s.q_empty + 8 * i, READERS);
    barrier_init(s.dout_full, 1);
    barrier_init(s.dout_empty, READERS);
    for (u32 numbers : {s.lse_full, s.lse_full + 8, s.delta_full}) barrier_init(numbers, 32);
    for (u32 read : {s.lse_empty, s.lse_empty + 8, s.delta_empty, s.weights_full, s.weights_empty})
        barrier_init(read, GROUP_THREADS);
    for (int i = 0; i < 2; ++i)
        barrier_init(s.ds_full + 8 * i, GROUP_WARPS + 1), barrier_init(s.ds_empty + 8 * i, READERS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(GROUP_THREADS * 3, 1)
    attention_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                       const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
                       const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
                       const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) char memory[];
    Shared s = layout(shared_address(memory));
    int rank = warp_cluster_rank();
    if (threadIdx.x == 0) start_barriers(s);
    cluster_sync();
    if (threadIdx.x < GROUP_THREADS) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x < 32) produce(s, Maps{&q_map, &k_map, &v_map, &dout_map}, p, rank);
        __syncwarp();
    } else {
        take_registers<MATH_REGISTERS>();
        int warp = warp_index(), part = warp / GROUP_WARPS - 1;
        Math math{s, p, Walk(p, 0, 0, 0), part, warp % GROUP_WARPS, (int)threadIdx.x % 32, rank};
        if (part == 0)
            math.run_all<true>(&dv_map);
        else
            math.run_all<false>(&dk_map);
    }
    cluster_sync();  // a program's shared memory stays until its neighbour has sent and signalled all it will
}
