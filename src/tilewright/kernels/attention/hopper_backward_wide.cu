// Attention's backward for Hopper, head sizes 129 to 256: what `hopper_backward.cu` computes, by clusters of two.
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
// H200, bf16, as in hopper_backward.cu, TFLOP/s and, in brackets, over the better of cuDNN and FlashAttention-2:
//
//              S 512        1024         4096         16384
//   d256       311 (1.32)   387 (1.29)   465 (1.16)   478 (1.29)
//   causal     205 (1.15)   296 (1.16)   443 (1.18)   507 (1.25)
//
// Settings: BANDED (some keys are hidden by their place), HALF (fp16, otherwise bf16).

#include "hopper_instructions.cuh"

constexpr int HEAD = 256, QUERIES = 64, KEYS = 64, CLUSTER = 2, GROUP_THREADS = 128, GROUP_WARPS = 4;
constexpr int Q_STAGES = 2, TILES = HEAD / 64, HALF_TILES = TILES / CLUSTER;
constexpr int TILE = 64 * 128;  // bytes of 64 rows of 64 columns
constexpr int WHOLE = TILES * TILE, ROW_BYTES = QUERIES * 4;
constexpr int DQ_SHARE = QUERIES * HEAD / 4;  // sums of a warpgroup; two programs of two
constexpr int MATH_REGISTERS = 240, PRODUCER_REGISTERS = 24;

struct Problem {
    float* dq;           // [batch · heads, q_blocks, QUERIES · HEAD]
    const float* lse;    // [batch · heads, q_blocks · QUERIES], times log2 e, infinite where nothing is to be done
    const float* delta;
    int queries, keys, q_blocks, heads, group;
    int below, above;    // key j is seen by query i where -below <= j - i <= above
    float scale, scale_log2;
};

struct Shared {
    u32 k, v, other_k, q, dout, ds, weights, lse, delta;
    u32 k_full, v_full, q_full, q_empty, dout_full, dout_empty, weights_full, weights_empty, ds_full, ds_empty;
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
    s.k_full = s.delta + ROW_BYTES;
    s.v_full = s.k_full + 8;
    s.q_full = s.v_full + 8;
    s.q_empty = s.q_full + 8 * Q_STAGES;
    s.dout_full = s.q_empty + 8 * Q_STAGES;
    s.dout_empty = s.dout_full + 8;
    s.weights_full = s.dout_empty + 8;
    s.weights_empty = s.weights_full + 8;
    s.ds_full = s.weights_empty + 8;
    s.ds_empty = s.ds_full + 16;
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

// The blocks of queries that see the cluster's keys, for each query head of the group in turn.
struct Walk {
    int first, end, head, block;
    __device__ __forceinline__ Walk(const Problem& p, int key, int kv_head) : head(kv_head * p.group) {
        int last = min(key + CLUSTER * KEYS, p.keys);
        first = BANDED ? max(0, key - p.above) / QUERIES : 0;
        end = BANDED ? min(p.q_blocks, max(0, last + p.below + QUERIES - 1) / QUERIES) : p.q_blocks;
        block = first;
    }
    __device__ __forceinline__ int steps(int group) const { return max(0, end - first) * group; }
    __device__ __forceinline__ void advance() {
        if (++block == end) block = first, ++head;
    }
};

struct Place {
    int pair, key, kv_head, batch, rank;  // the cluster's first key, the program's
};

struct Maps {
    const TensorMap *q, *k, *v, *dout;
};

// Each program fetches half of the columns of Q and dO for both.
__device__ __forceinline__ void fetch_rows(u32 to, const TensorMap* map, u32 full, int row, int head, const Place& at) {
    barrier_expect(full, WHOLE + ROW_BYTES);
    for (int i = HALF_TILES * at.rank; i < HALF_TILES * (at.rank + 1); ++i)
        load_tile_to_both(to + i * TILE, map, full, 64 * i, row, head, at.batch);
}

__device__ __forceinline__ void produce(const Shared& s, const Maps& maps, const Problem& p, const Place& at) {
    Walk walk(p, at.pair, at.kv_head);
    int steps = walk.steps(p.group);
    if (steps == 0) return;
    barrier_expect(s.k_full, WHOLE + WHOLE / CLUSTER);
    for (int i = 0; i < TILES; ++i) load_tile(s.k + i * TILE, maps.k, s.k_full, 64 * i, at.key, at.kv_head, at.batch);
    Slot<Q_STAGES> q;
    Slot<1> dout;
    for (int step = 0; step < steps; ++step, walk.advance()) {
        int row = walk.block * QUERIES;
        u64 first = ((u64)at.batch * p.heads + walk.head) * p.q_blocks * QUERIES + row;
        barrier_wait(s.q_empty + 8 * q.index, q.parity ^ 1);
        fetch_rows(s.q + q.index * WHOLE, maps.q, s.q_full + 8 * q.index, row, walk.head, at);
        load_bytes(s.lse + q.index * ROW_BYTES, p.lse + first, ROW_BYTES, s.q_full + 8 * q.index);
        if (step == 0) {
            barrier_expect(s.v_full, WHOLE);
            for (int i = 0; i < TILES; ++i)
                load_tile(s.v + i * TILE, maps.v, s.v_full, 64 * i, at.key, at.kv_head, at.batch);
        }
        barrier_wait(s.dout_empty, dout.parity ^ 1);
        fetch_rows(s.dout, maps.dout, s.dout_full, row, walk.head, at);
        load_bytes(s.delta, p.delta + first, ROW_BYTES, s.dout_full);
        if (step == 0) {
            int theirs = at.pair + (1 - at.rank) * KEYS;
            for (int i = 0; i < HALF_TILES; ++i)
                load_tile(s.other_k + i * TILE, maps.k, s.k_full, 64 * (HALF_TILES * at.rank + i), theirs, at.kv_head,
                          at.batch);
        }
        q.advance(), dout.advance();
    }
}

// What both warpgroups do.
struct Math {
    Shared s;
    Problem p;
    Place at;
    Walk walk;
    int part, warp, lane;
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
        u64 mine = across_k(s.k + (HALF_TILES * at.rank + part) * TILE, TILE);
        u64 theirs = across_k(s.other_k + part * TILE, TILE);
        u64 my_ds = along_k(ds + at.rank * TILE), their_ds = along_k(ds + (1 - at.rank) * TILE);
        mma_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) mma<1, 0>(dq, mine + i * 16 * 128 / 16, my_ds + i * 32 / 16, i > 0);
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) mma<1, 0>(dq, theirs + i * 16 * 128 / 16, their_ds + i * 32 / 16, 1);
        mma_commit();
    }

    __device__ __forceinline__ void add_to_dq(const float (&dq)[QUERIES / 2]) {
        u64 block = ((u64)at.batch * p.heads + walk.head) * p.q_blocks + walk.block;
        float* to = p.dq + (block * 4 + at.rank * 2 + part) * DQ_SHARE + threadIdx.x % GROUP_THREADS * 4;
#pragma unroll
        for (int i = 0; i < QUERIES / 8; ++i) add_vector(to + i * GROUP_THREADS * 4, dq + 4 * i);
    }

    // Scores of keys that a query does not see become -inf.
    __device__ __forceinline__ void hide(float (&scores)[QUERIES / 2]) {
        int row = at.key + warp * 16 + lane / 4, column = walk.block * QUERIES + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < QUERIES / 2; ++i) {
            int j = row + i / 2 % 2 * 8, away = j - (column + i / 4 * 8 + i % 2);
            if (j >= p.keys || (BANDED && (away > p.above || away < -p.below))) scores[i] = -infinity();
        }
    }

    __device__ __forceinline__ bool cut() const {
        int first = walk.block * QUERIES, last = first + QUERIES - 1;
        return at.key + KEYS > p.keys || (BANDED && (at.key + KEYS - 1 - first > p.above || at.key - last < -p.below));
    }

    __device__ __forceinline__ void exponentiate(float (&scores)[QUERIES / 2], u32 (&weights)[QUERIES / 4]) {
        u32 lse = s.lse + q.index * ROW_BYTES + lane % 4 * 8;
        if (cut()) hide(scores);
#pragma unroll
        for (int i = 0; i < QUERIES / 8; ++i) {
            float2 l = load_pair(lse + 32 * i);
            float* x = scores + 4 * i;
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] = exp2_fast(fmaf(x[e], p.scale_log2, e % 2 ? -l.y : -l.x));
            weights[2 * i] = pack(x[0], x[1]);
            weights[2 * i + 1] = pack(x[2], x[3]);
        }
    }

    __device__ __forceinline__ void differentiate(const float (&dp)[QUERIES / 2], const u32 (&weights)[QUERIES / 4],
                                                  u32 (&ds)[QUERIES / 4]) {
        u32 delta = s.delta + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < QUERIES / 8; ++i) {
            float2 d = load_pair(delta + 32 * i);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float2 w = unpack(weights[2 * i + half]);
                ds[2 * i + half] = pack(w.x * (dp[4 * i + 2 * half] - d.x), w.y * (dp[4 * i + 2 * half + 1] - d.y));
            }
        }
    }

    // dSᵀ to shared memory, a row for each query, and a copy of it to the neighbour.
    __device__ __forceinline__ void publish(const u32 (&ds)[QUERIES / 4]) {
        u32 area = s.ds + (met.index * CLUSTER + at.rank) * TILE, full = s.ds_full + 8 * met.index;
        int query = lane % 8 + lane / 16 * 8, piece = warp * 2 + lane / 8 % 2;
        u32 to = area + query * 128 + ((piece ^ (lane % 8)) * 16);
#pragma unroll
        for (int i = 0; i < QUERIES / 16; ++i)
            store_matrices_transposed(to + i * 16 * 128, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
        stores_to_async();
        warp_arrive(full);
        meet(2, GROUP_THREADS);
        if (threadIdx.x % GROUP_THREADS == 0) {
            barrier_expect(full, TILE);
            send_bytes(area, area, TILE, full, 1 - at.rank);
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
        warp_arrive(s.weights_full);
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
        warp_arrive(s.weights_empty);
    }

    // The scores are there; on return, those of the next step.
    template <bool LAST>
    __device__ __forceinline__ void weights_step(float (&scores)[QUERIES / 2]) {
        u32 weights[QUERIES / 4];
        float next[QUERIES / 2], dq[QUERIES / 2];
        exponentiate(scores, weights);
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
        add_to_dq(dq);
        if (!LAST) {
            settle(next);
#pragma unroll
            for (int i = 0; i < QUERIES / 2; ++i) scores[i] = next[i];
        }
        dout.advance(), met.advance(), walk.advance();
    }

    __device__ __forceinline__ void run_weights(int steps) {
        float first[QUERIES / 2], scores[QUERIES / 2];
        barrier_wait(s.k_full, 0);
        barrier_wait(s.q_full, 0);
        keys_by_queries(first, s.k, s.q);
        mma_wait<0>();
        settle(first);
#pragma unroll
        for (int i = 0; i < QUERIES / 2; ++i) scores[i] = first[i];
        for (int step = 1; step < steps; ++step) weights_step<false>(scores);
        weights_step<true>(scores);
    }

    __device__ __forceinline__ void run_gradients(int steps) {
        barrier_wait(s.v_full, 0);
        barrier_wait(s.k_full, 0);
        for (int step = 0; step < steps; ++step) {
            float dp[QUERIES / 2], dq[QUERIES / 2];
            u32 weights[QUERIES / 4], ds[QUERIES / 4];
            barrier_wait(s.dout_full, dout.parity);
            keys_by_queries(dp, s.v, s.dout);
            take_over(weights);
            mma_wait<0>();
            settle(dp);
            differentiate(dp, weights, ds);
            warp_arrive_at_both(s.dout_empty);
            barrier_wait(s.ds_empty + 8 * met.index, met.parity ^ 1);
            publish(ds);
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
            add_to_dq(dq);
            q.advance(), dout.advance(), met.advance(), walk.advance();
        }
    }

    // dV or dK to global memory by way of shared memory that nobody reads any more.
    __device__ __forceinline__ void write(float scale, u32 area, const TensorMap* map) {
        u32 row = area + (warp * 16 + lane % 16) * 128;
#pragma unroll
        for (int i = 0; i < HEAD / 16; ++i) {
            const float* x = sum + 8 * i;
            u32 piece = ((i % 4 * 2 + lane / 16) ^ (lane % 8)) * 16;
            store_matrices(row + i / 4 * TILE + piece, pack(x[0] * scale, x[1] * scale),
                           pack(x[2] * scale, x[3] * scale), pack(x[4] * scale, x[5] * scale),
                           pack(x[6] * scale, x[7] * scale));
        }
        stores_to_async();
        meet(1 + part, GROUP_THREADS);
        if (threadIdx.x % GROUP_THREADS == 0) {
            for (int i = 0; i < TILES; ++i) store_tile(map, area + i * TILE, 64 * i, at.key, at.kv_head, at.batch);
            bulk_commit();
            bulk_wait();
        }
    }
};

__device__ __forceinline__ void start_barriers(const Shared& s) {
    constexpr int READERS = CLUSTER * 2 * GROUP_WARPS;
    barrier_init(s.k_full, 1);
    barrier_init(s.v_full, 1);
    for (int i = 0; i < Q_STAGES; ++i) barrier_init(s.q_full + 8 * i, 1), barrier_init(s.q_empty + 8 * i, READERS);
    barrier_init(s.dout_full, 1);
    barrier_init(s.dout_empty, READERS);
    barrier_init(s.weights_full, GROUP_WARPS);
    barrier_init(s.weights_empty, GROUP_WARPS);
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
    int rank = cluster_rank(), block = blockIdx.x;
    Place at{(block - rank) * KEYS, block * KEYS, (int)blockIdx.y, (int)blockIdx.z, rank};
    if (threadIdx.x == 0) start_barriers(s);
    cluster_sync();
    if (threadIdx.x < GROUP_THREADS) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(s, Maps{&q_map, &k_map, &v_map, &dout_map}, p, at);
        __syncwarp();
    } else {
        take_registers<MATH_REGISTERS>();
        Walk walk(p, at.pair, at.kv_head);
        int part = threadIdx.x / GROUP_THREADS - 1, steps = walk.steps(p.group);
        Math math{s, p, at, walk, part, (int)threadIdx.x / 32 % 4, (int)threadIdx.x % 32};
#pragma unroll
        for (int i = 0; i < HEAD / 2; ++i) math.sum[i] = 0.0f;
        settle(math.sum);
        if (part == 0) {
            if (steps > 0) math.run_weights(steps);
            mma_wait<0>();
            settle(math.sum);
            math.write(1.0f, s.v, &dv_map);
        } else {
            if (steps > 0) math.run_gradients(steps);
            mma_wait<0>();
            settle(math.sum);
            math.write(p.scale, s.q, &dk_map);
        }
    }
    cluster_sync();  // a program's shared memory stays until its neighbour has sent and signalled all it will
}
