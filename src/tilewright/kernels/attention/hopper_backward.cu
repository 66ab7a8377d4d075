// Attention's backward for Hopper, head sizes up to 128: dK, dV of a block of keys, and its share of dQ.
//
//   P = exp(scale · Q Kᵀ − lse)    dV = Pᵀ dO               dP = dO Vᵀ
//   dS = P ∘ (dP − Δ)              dK = scale · dSᵀ Q       dQ = scale · dS K
//
// A program owns KEYS = 128 keys of one key head and walks over the blocks of QUERIES queries that see them, of every
// query head of the group. Its twelve warps:
//
//   0 to 3   producer   one thread issues bulk tensor copies: K and V once, Q (with lse) and dO (with Δ) into rings.
//   4 to 11  math       two warpgroups of 64 keys each. Sᵀ = K Qᵀ and dPᵀ = V dOᵀ are computed transposed, so that Pᵀ
//                       is already where the product dV += Pᵀ dO takes its first operand from: registers; and so is
//                       dSᵀ for dK += dSᵀ Q. dSᵀ goes to shared memory besides, where both warpgroups find all of it
//                       for dQᵀ = Kᵀ dSᵀ, each for half of the result. That is added to fp32 sums in global memory in
//                       the order of registers, a warp 512 bytes in a row (hopper_backward_ends.cu makes rows of them).
//
// Products are issued ahead, so that the tensor cores have work of this warpgroup under every other step:
//
//   exp of S(j)                    under  dK(j - 1), dP(j)
//   dS(j) and its way to shared    under  dV(j)
//   dQ(j - 1) added                under  dK(j)
//
// dQ is a step late so that no warpgroup waits for the other's dS. The first step has a dQ of nothing, which is not
// added: with a branch around a product the assembler makes every product wait.
//
// The algorithm is FlashAttention's (Dao et al. 2022, 2023); transposed scores and operands in registers are
// FlashAttention-3's (Shah et al. 2024); the order of products within a step and how dQ is added are ours.
//
// Limit: the shared memory, which the two 64 x 64 products of scores read at the tensor cores' own rate, and, for short
// sequences, the memory traffic of hopper_backward_ends.cu. H200, bf16, 16384 positions in all, heads x head size 2048,
// medians interleaved with PyTorch 2.11's backends, all three kernels counted, TFLOP/s (backward 2.5 forwards, causal
// half) and, in brackets, over the better of cuDNN and FlashAttention-2:
//
//              S 512        1024         4096         16384
//   d64        293 (1.05)   392 (1.08)   488 (1.12)   501 (1.05)
//   causal     174 (1.02)   276 (1.10)   436 (1.16)   523 (1.19)
//   d128       364 (1.06)   460 (1.04)   567 (1.04)   562 (0.93)
//   causal     230 (1.09)   344 (1.08)   517 (1.09)   603 (1.08)
//
// What lost, TFLOP/s in place of (d128, S 4096, full, unless named):
//   - sums of dQ handed to the copy engine (cp.reduce.async.bulk) by way of shared memory: 537 for 557, d64 440 for 498
//   - dQ in the step of its dS, the warpgroups meeting in it: 563 for 567, causal 498 for 517, S 16384 591 for 603
//   - programs that start at different queries, none adding where another does: 549 for 557, d64 S 16384 485 for 517
//   - P read again as it was rounded: 556 for 567, causal S 16384 564 for 603; rings of two blocks of Q: 467 for 567
//   - d64: 64 queries a step, 455 for 488 (but S 512 causal 192 for 174); dSᵀ from shared memory, causal 419 for 436
//
// Settings: HEAD (64 or 128), QUERIES (a multiple of 16), Q_STAGES and DO_STAGES (powers of two), BANDED (some keys are
// hidden by their place), HALF (fp16, otherwise bf16).

#include "hopper_instructions.cuh"

constexpr int KEYS = 128, GROUP_KEYS = 64, GROUPS = 2, GROUP_THREADS = 128;
constexpr int TILES = HEAD / 64;  // of 64 columns, in a row of K, V, Q, dO
constexpr int KEY_TILE = KEYS * 128, QUERY_TILE = QUERIES * 128;
constexpr int KEY_BYTES = TILES * KEY_TILE, QUERY_BYTES = TILES * QUERY_TILE;
constexpr int DS_BYTES = QUERIES * KEYS * 2;  // [64 keys of a warpgroup][queries][64 keys]
constexpr int DQ_SHARE = QUERIES * HEAD / GROUPS;  // sums of a warpgroup
constexpr int ROW_BYTES = QUERIES * 4;  // of lse and Δ
constexpr int DQ_COLUMNS = HEAD == 128 ? QUERIES : QUERIES / 2;
constexpr int MATH_REGISTERS = 240, PRODUCER_REGISTERS = 24;
constexpr int DS_STAGES = 2;
// Where registers suffice, dSᵀ stays in them until dK, else it comes back from shared memory; and P stays in fp32
// until dS, else what was rounded is read again.
constexpr bool KEEPS_DS = HEAD == 64, KEEPS_P = HEAD == 128;

struct Problem {
    float* dq;           // [batch · heads, q_blocks, QUERIES · HEAD]
    const float* lse;    // [batch · heads, q_blocks · QUERIES], times log2 e, infinite where nothing is to be done
    const float* delta;
    int queries, keys, q_blocks, heads, group;
    int below, above;    // key j is seen by query i where -below <= j - i <= above
    float scale, scale_log2;
};

struct Shared {
    u32 k, v, q, dout, ds, lse, delta, k_full, v_full, q_full, q_empty, dout_full, dout_empty, ds_full, ds_empty;
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
    return s;
}

// A place in a ring of SIZE, a power of two, and how often the ring went round before.
template <int SIZE>
__device__ __forceinline__ u32 slot(u32 step) {
    return step % SIZE;
}
template <int SIZE>
__device__ __forceinline__ u32 parity(u32 step) {
    return step / SIZE % 2;
}

// The blocks of queries that see a block of keys, for each query head of the group in turn.
struct Walk {
    int first, end, head, block;
    __device__ __forceinline__ Walk(const Problem& p, int key, int kv_head) : head(kv_head * p.group) {
        first = BANDED ? max(0, key - p.above) / QUERIES : 0;
        end = BANDED ? min(p.q_blocks, max(0, min(key + KEYS, p.keys) + p.below + QUERIES - 1) / QUERIES) : p.q_blocks;
        block = first;
    }
    __device__ __forceinline__ int steps(int group) const { return max(0, end - first) * group; }
    __device__ __forceinline__ void advance() {
        if (++block == end) block = first, ++head;
    }
};

__device__ __forceinline__ void produce(const Shared& s, const TensorMap* k_map, const TensorMap* v_map,
                                        const TensorMap* q_map, const TensorMap* dout_map, const Problem& p, int key,
                                        int kv_head, int batch) {
    Walk walk(p, key, kv_head);
    int steps = walk.steps(p.group);
    if (steps == 0) return;
    barrier_expect(s.k_full, KEY_BYTES);
    for (int i = 0; i < TILES; ++i) load_tile(s.k + i * KEY_TILE, k_map, s.k_full, 64 * i, key, kv_head, batch);
    for (int step = 0; step < steps; ++step, walk.advance()) {
        int row = walk.block * QUERIES;
        u64 at = ((u64)batch * p.heads + walk.head) * p.q_blocks * QUERIES + row;
        u32 q = slot<Q_STAGES>(step), dout = slot<DO_STAGES>(step);
        u32 full = s.q_full + 8 * q;
        barrier_wait(s.q_empty + 8 * q, parity<Q_STAGES>(step) ^ 1);
        barrier_expect(full, QUERY_BYTES + ROW_BYTES);
        for (int i = 0; i < TILES; ++i)
            load_tile(s.q + q * QUERY_BYTES + i * QUERY_TILE, q_map, full, 64 * i, row, walk.head, batch);
        load_bytes(s.lse + q * ROW_BYTES, p.lse + at, ROW_BYTES, full);
        if (step == 0) {
            barrier_expect(s.v_full, KEY_BYTES);
            for (int i = 0; i < TILES; ++i) load_tile(s.v + i * KEY_TILE, v_map, s.v_full, 64 * i, key, kv_head, batch);
        }
        full = s.dout_full + 8 * dout;
        barrier_wait(s.dout_empty + 8 * dout, parity<DO_STAGES>(step) ^ 1);
        barrier_expect(full, QUERY_BYTES + ROW_BYTES);
        for (int i = 0; i < TILES; ++i)
            load_tile(s.dout + dout * QUERY_BYTES + i * QUERY_TILE, dout_map, full, 64 * i, row, walk.head, batch);
        load_bytes(s.delta + dout * ROW_BYTES, p.delta + at, ROW_BYTES, full);
    }
}

struct Math {
    Shared s;
    Problem p;
    Walk walk;
    int part, warp, lane, key, batch;
    u32 now;         // step
    u32 dq_before;   // block of sums that the step before adds to
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

    // Scores of keys that a query does not see become -inf.
    __device__ __forceinline__ void hide() {
        int row = key + part * GROUP_KEYS + warp * 16 + lane / 4, column = walk.block * QUERIES + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < QUERIES / 2; ++i) {
            int j = row + i / 2 % 2 * 8, away = j - (column + i / 4 * 8 + i % 2);
            if (j >= p.keys || (BANDED && (away > p.above || away < -p.below))) scores[i] = -infinity();
        }
    }

    __device__ __forceinline__ bool cut() const {
        int first = walk.block * QUERIES, last = first + QUERIES - 1;
        return key + KEYS > p.keys || (BANDED && (key + KEYS - 1 - first > p.above || key - last < -p.below));
    }

    __device__ __forceinline__ void exponentiate() {
        u32 lse = s.lse + slot<Q_STAGES>(now) * ROW_BYTES + lane % 4 * 8;
        if (cut()) hide();
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

    __device__ __forceinline__ void differentiate(const float (&dp)[QUERIES / 2]) {
        u32 delta = s.delta + slot<DO_STAGES>(now) * ROW_BYTES + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < QUERIES / 8; ++i) {
            float2 d = load_pair(delta + 32 * i);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* kept = scores + 4 * i + 2 * half;
                float2 w = KEEPS_P ? make_float2(kept[0], kept[1]) : unpack(weights[2 * i + half]);
                ds[2 * i + half] = pack(w.x * (dp[4 * i + 2 * half] - d.x), w.y * (dp[4 * i + 2 * half + 1] - d.y));
            }
        }
    }

    // dSᵀ of the warpgroup to shared memory, a row for each query; 16-byte pieces are swizzled as the copies' are.
    __device__ __forceinline__ void publish() {
        int query = lane % 8 + lane / 16 * 8, piece = warp * 2 + lane / 8 % 2;
        u32 area = s.ds + slot<DS_STAGES>(now) * DS_BYTES + part * QUERIES * 128;
        u32 to = area + query * 128 + ((piece ^ (lane % 8)) * 16);
#pragma unroll
        for (int i = 0; i < QUERIES / 16; ++i)
            store_matrices_transposed(to + i * 16 * 128, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
        stores_to_async();
        warp_arrive(s.ds_full + 8 * slot<DS_STAGES>(now));
    }

    __device__ __forceinline__ void add_to_dq(const float (&dq)[DQ_COLUMNS / 2]) {
        float* to = p.dq + ((u64)dq_before * GROUPS + part) * DQ_SHARE + threadIdx.x % GROUP_THREADS * 4;
#pragma unroll
        for (int i = 0; i < DQ_COLUMNS / 8; ++i) add_vector(to + i * GROUP_THREADS * 4, dq + 4 * i);
    }

    // On entry the scores are there and the dK of the step before is under way; on return the same of the next.
    template <bool LAST>
    __device__ __forceinline__ void step() {
        float dp[QUERIES / 2], dq[DQ_COLUMNS / 2], next[QUERIES / 2];
        u32 this_q = s.q + slot<Q_STAGES>(now) * QUERY_BYTES, this_dout = s.dout + slot<DO_STAGES>(now) * QUERY_BYTES;
        u32 this_ds = s.ds + slot<DS_STAGES>(now) * DS_BYTES;
        barrier_wait(s.dout_full + 8 * slot<DO_STAGES>(now), parity<DO_STAGES>(now));
        keys_by_queries(dp, s.v, this_dout);
        exponentiate();
        keys_by_head(dv, weights, this_dout);
        mma_wait<1>();
        settle(dp);
        if (KEEPS_DS) settle(ds);
        if (now > 0) warp_arrive(s.q_empty + 8 * slot<Q_STAGES>(now - 1));
        differentiate(dp);
        barrier_wait(s.ds_empty + 8 * slot<DS_STAGES>(now), parity<DS_STAGES>(now) ^ 1);
        publish();
        if (!LAST) {
            barrier_wait(s.q_full + 8 * slot<Q_STAGES>(now + 1), parity<Q_STAGES>(now + 1));
            keys_by_queries(next, s.k, s.q + slot<Q_STAGES>(now + 1) * QUERY_BYTES);
        }
        mma_wait<LAST ? 0 : 1>();
        settle(weights);
        warp_arrive(s.dout_empty + 8 * slot<DO_STAGES>(now));
        barrier_wait(s.ds_full + 8 * slot<DS_STAGES>(now - 1), parity<DS_STAGES>(now - 1));
        head_by_queries(dq, slot<DS_STAGES>(now - 1));
        if (KEEPS_DS) {
            keys_by_head(dk, ds, this_q);
        } else {
            meet(1 + part, GROUP_THREADS);
            keys_by_head_shared(dk, this_ds, this_q);
        }
        mma_wait<1>();
        settle(dq);
        if (now > 0) {
            warp_arrive(s.ds_empty + 8 * slot<DS_STAGES>(now - 1));
            add_to_dq(dq);
        }
        if (!LAST) {
            settle(next);
#pragma unroll
            for (int i = 0; i < QUERIES / 2; ++i) scores[i] = next[i];
        }
        dq_before = (batch * p.heads + walk.head) * p.q_blocks + walk.block;
        ++now, walk.advance();
    }

    __device__ __forceinline__ void run(int steps) {
#pragma unroll
        for (int i = 0; i < HEAD / 2; ++i) dk[i] = dv[i] = 0.0f;
        settle(dk), settle(dv);
        if (steps == 0) return;
        barrier_wait(s.k_full, 0);
        barrier_wait(s.q_full, 0);
        float first[QUERIES / 2];
        keys_by_queries(first, s.k, s.q);
        mma_wait<0>();
        settle(first);
#pragma unroll
        for (int i = 0; i < QUERIES / 2; ++i) scores[i] = first[i];
        barrier_wait(s.v_full, 0);
        for (int left = steps - 1; left > 0; --left) step<false>();
        step<true>();
        float dq[DQ_COLUMNS / 2];
        barrier_wait(s.ds_full + 8 * slot<DS_STAGES>(now - 1), parity<DS_STAGES>(now - 1));
        head_by_queries(dq, slot<DS_STAGES>(now - 1));
        mma_wait<0>();
        settle(dq), settle(dk), settle(dv);
        add_to_dq(dq);
    }

    // The warpgroup's rows of dK or dV to global memory by way of shared memory that nobody reads any more.
    __device__ __forceinline__ void write(const float (&sum)[HEAD / 2], float scale, u32 area, const TensorMap* map,
                                          int kv_head) {
        area += part * GROUP_KEYS * 128;
        u32 row = area + (warp * 16 + lane % 16) * 128;
#pragma unroll
        for (int i = 0; i < HEAD / 16; ++i) {
            const float* x = sum + 8 * i;
            u32 piece = ((i % 4 * 2 + lane / 16) ^ (lane % 8)) * 16;
            store_matrices(row + i / 4 * KEY_TILE + piece, pack(x[0] * scale, x[1] * scale),
                           pack(x[2] * scale, x[3] * scale), pack(x[4] * scale, x[5] * scale),
                           pack(x[6] * scale, x[7] * scale));
        }
        stores_to_async();
        meet(1 + part, GROUP_THREADS);
        if (threadIdx.x % GROUP_THREADS == 0) {
            for (int i = 0; i < TILES; ++i)
                store_tile(map, area + i * KEY_TILE, 64 * i, key + part * GROUP_KEYS, kv_head, batch);
            bulk_commit();
        }
    }
};

extern "C" __global__ void __launch_bounds__(GROUP_THREADS * (1 + GROUPS), 1)
    attention_backward(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                       const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
                       const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
                       const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) char memory[];
    Shared s = layout(shared_address(memory));
    int key = blockIdx.x * KEYS, kv_head = blockIdx.y, batch = blockIdx.z;
    if (threadIdx.x == 0) {
        constexpr int WARPS = GROUPS * GROUP_THREADS / 32;
        barrier_init(s.k_full, 1);
        barrier_init(s.v_full, 1);
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
        if (threadIdx.x == 0) produce(s, &k_map, &v_map, &q_map, &dout_map, p, key, kv_head, batch);
    } else {
        take_registers<MATH_REGISTERS>();
        Walk walk(p, key, kv_head);
        int part = threadIdx.x / GROUP_THREADS - 1;
        Math math{s, p, walk, part, (int)threadIdx.x / 32 % 4, (int)threadIdx.x % 32, key, batch};
        math.run(walk.steps(p.group));
        math.write(math.dv, 1.0f, s.v, &dv_map, kv_head);
        meet(3, GROUPS * GROUP_THREADS);  // both warpgroups have read K
        math.write(math.dk, p.scale, s.k, &dk_map, kv_head);
        if (threadIdx.x % GROUP_THREADS == 0) bulk_wait();
    }
}
