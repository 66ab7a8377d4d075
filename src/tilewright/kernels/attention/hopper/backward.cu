// Attention's backward for Hopper, head sizes up to 128: dK, dV of a block of keys, and its share of dQ.
//
//   P = exp(scale · Q Kᵀ − lse)    dV = Pᵀ dO               dP = dO Vᵀ
//   dS = P ∘ (dP − Δ)              dK = scale · dSᵀ Q       dQ = scale · dS K
//
// A program owns KEYS = 128 keys of one key head and walks over the blocks of QUERIES queries that see them, of every
// query head of the group; then it takes the next keys, if there are any. Its twelve warps:
//
//   0        producer   one thread issues bulk tensor copies: K and V once, Q (with lse) and dO (with Δ) into rings,
//                       those of the next block of keys while the last one is being finished.
//   1 to 3   attendants where ATTENDED: they zero and round sums of dQ (backward_attend.cuh).
//   4 to 11  math       two warpgroups of 64 keys each. Sᵀ = K Qᵀ and dPᵀ = V dOᵀ are computed transposed, so that Pᵀ
//                       is already where the product dV += Pᵀ dO takes its first operand from: registers; and so is
//                       dSᵀ for dK += dSᵀ Q. dSᵀ goes to shared memory besides, where both warpgroups find all of it
//                       for dQᵀ = Kᵀ dSᵀ, each for half of the result. That is added to fp32 sums in global memory in
//                       the order of registers, a warp 512 bytes in a row (rows are made of them afterwards).
//                       dK and dV leave by way of dSᵀ's place, so that the next K and V can come at once.
//
// Products are issued ahead, so that the tensor cores have work of this warpgroup under every other step:
//
//   exp of S(j)                    under  dK(j - 1), dP(j)
//   dS(j) and its way to shared    under  dV(j)
//   dQ(j - 1) added                under  dK(j)
//
// dQ is a step late so that no warpgroup waits for the other's dS. The first step has a dQ of nothing, which is not
// added: with a branch around a product the assembler makes every product wait. Where TURNS, one warpgroup multiplies
// while the other computes dS. Without, builds for head size 128 that computed the same differed by up to 8 % (S 8192,
// causal), and not as their numbers of instructions did.
//
// The algorithm is FlashAttention's (Dao et al. 2022, 2023); transposed scores and operands in registers are
// FlashAttention-3's (Shah et al. 2024); the order of products within a step and how dQ is added are ours.
//
// Limit: the additions to dQ in the L2 cache: without them 1.19 to 1.21 times as fast (d128, S 4096 and 16384), 1.13
// to 1.14 (d64). Shared memory comes next, which the two 64 x 64 products of scores read at the tensor cores' own rate;
// for short sequences the memory traffic of backward_ends.cu, a quarter of the time at S 512 where that kernel
// zeroes and rounds all sums. docs/kernels.md has the times.
//
// What lost, TFLOP/s in place of (H200, 16384 positions, heads x head size 2048, d128, S 4096, full, unless named):
//   - sums of dQ handed to the copy engine (cp.reduce.async.bulk) by way of shared memory: 537 for 557, d64 440 for 498
//   - dQ in the step of its dS, the warpgroups meeting in it: 563 for 567, causal 498 for 517, S 16384 591 for 603
//   - programs that start at different queries, none adding where another does: 549 for 557, d64 S 16384 485 for 517,
//     or as they would under a causal mask, 525 for 525, S 16384 566 for 561
//   - clusters of two that fetch Q and dO once for both: 516 for 525, S 16384 559 for 561, causal 523 for 558
//   - a program for each block of keys, S 512: 365 for 375 (causal 229 for 235), d64 293 for 312 (causal 173 for 182);
//     all blocks dealt to programs that stay, causal, S 16384: 522 for 548, and taken a block ahead: 501 for 558
//   - dQ of a head rounded by the warps that multiply, in the program that adds to it last: S 2048 452 for 519, d64 401
//     for 460
//   - P read again as it was rounded: 556 for 567, causal S 16384 564 for 603; rings of two blocks of Q: 467 for 567
//   - d64: 64 queries a step, 415 for 467 (but S 512 322 for 312, causal 199 for 182); dSᵀ from shared memory, causal
//     419 for 436
// The same in µs, S 8192:
//   - no turns, 5035 for 4855, causal 2724 for 2608; turns in the exponentials, 5160 and 2747; one warpgroup sent off
//     0.4 to 1.6 µs later, causal 2745 for 2758 (no turns); four places for dSᵀ instead of two, 2603 for 2608
//   - a build for one block of keys a program, without the loop over blocks: causal 2632 for 2758 (no turns), but 5338
//     for 5270, and d64 causal 3025 for 2937
//   - dQ added a step later still, under dP: d64 5376 for 5472, but causal 2987 for 2937; d128 has no registers for it
//
// Settings: HEAD (64 or 128), QUERIES (a multiple of 16), Q_STAGES and DO_STAGES (powers of two), BANDED (some keys are
// hidden by their place), HALF (fp16, otherwise bf16), ATTENDED (0: zeros before and rows after are other kernels'),
// TURNS (1: the warpgroups take turns in computing dS).

constexpr int KEYS = 128, GROUP_KEYS = 64, GROUPS = 2, WALK_KEYS = KEYS;

constexpr int TILES = HEAD / 64;  // of 64 columns, in a row of K, V, Q, dO
constexpr int KEY_TILE = KEYS * 128, QUERY_TILE = QUERIES * 128;
constexpr int KEY_BYTES = TILES * KEY_TILE, QUERY_BYTES = TILES * QUERY_TILE;
constexpr int DS_BYTES = QUERIES * KEYS * 2;  // [64 keys of a warpgroup][queries][64 keys]
constexpr int DQ_SHARE = QUERIES * HEAD / GROUPS;  // sums of a warpgroup
constexpr int DQ_COLUMNS = HEAD == 128 ? QUERIES : QUERIES / 2;

#include "backward_attend.cuh"

constexpr int MATH_REGISTERS = 240, PRODUCER_REGISTERS = 24;
constexpr int DS_STAGES = 2, ATTENDANTS = 2;
// Where registers suffice, dSᵀ stays in them until dK, else it comes back from shared memory; and P stays in fp32
// until dS, else what was rounded is read again.
constexpr bool KEEPS_DS = HEAD == 64, KEEPS_P = HEAD == 128;
constexpr int MATH_THREADS = GROUPS * GROUP_THREADS;
// Where threads meet: a warpgroup's, those of both, and each warpgroup's turn.
constexpr int OWN_MEETING = 1, BOTH_MEETING = 3, TURN = 4;

struct Shared {
    u32 k, v, q, dout, ds, lse, delta, k_full, v_full, q_full, q_empty, dout_full, dout_empty, ds_full, ds_empty;
    u32 kv_empty, added, attended, block, chunks;
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
    s.attended = s.added + 8;
    s.block = (s.attended + 8 * ATTENDANTS + 15) / 16 * 16;
    s.chunks = (s.block + 2 * 16 + 127) / 128 * 128;
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

struct Maps {
    const TensorMap *q, *k, *v, *dout;
};

__device__ __forceinline__ void fetch(u32 to, const TensorMap* map, u32 full, const void* numbers, u32 numbers_to,
                                      int row, int head, int batch) {
    barrier_expect(full, QUERY_BYTES + ROW_BYTES);
    for (int i = 0; i < TILES; ++i) load_tile(to + i * QUERY_TILE, map, full, 64 * i, row, head, batch);
    load_bytes(numbers_to, numbers, ROW_BYTES, full);
}

// The program's next block, once both warpgroups are done with the last one.
__device__ __forceinline__ void hand_out(const Shared& s, const Maps& maps, const Block& at, bool loads, u32 turn) {
    barrier_wait(s.kv_empty, turn % 2 ^ 1);
    keep_block(s.block + turn % 2 * 16, at);
    barrier_expect(s.k_full, loads ? KEY_BYTES : 0);
    barrier_expect(s.v_full, loads ? KEY_BYTES : 0);
    if (loads) {
        for (int i = 0; i < TILES; ++i)
            load_tile(s.k + i * KEY_TILE, maps.k, s.k_full, 64 * i, at.key, at.kv_head, at.batch);
        for (int i = 0; i < TILES; ++i)
            load_tile(s.v + i * KEY_TILE, maps.v, s.v_full, 64 * i, at.key, at.kv_head, at.batch);
    }
}

// The next block that nobody has. Where ATTENDED others wait for all blocks of a head, and a program that does not run
// yet must have none; else each program has its first beforehand.
__device__ __forceinline__ int take(const Problem& p) {
    return (ATTENDED ? 0 : gridDim.x) + atomicAdd(p.handed_out, 1);
}

__device__ __forceinline__ void produce(const Shared& s, const Maps& maps, const Problem& p) {
    u32 step = 0, turn = 0;
#pragma unroll 1
    for (int index = ATTENDED ? take(p) : blockIdx.x; index < p.blocks; ++turn) {
        Block at = block_at(p, index);
        Walk walk(p, at.key, at.kv_head, at.batch);
        int steps = walk.steps(p.group);
        if (ATTENDED) wait_for_zeros(p, at);
        if (steps == 0) hand_out(s, maps, at, false, turn);
#pragma unroll 1
        for (bool first = true; steps > 0; --steps, ++step, walk.advance(), first = false) {
            int row = walk.block * QUERIES;
            u64 at_row = (u64)walk.index * QUERIES;
            u32 q = slot<Q_STAGES>(step), dout = slot<DO_STAGES>(step);
            barrier_wait(s.q_empty + 8 * q, parity<Q_STAGES>(step) ^ 1);
            fetch(s.q + q * QUERY_BYTES, maps.q, s.q_full + 8 * q, p.lse + at_row, s.lse + q * ROW_BYTES, row,
                  walk.head, at.batch);
            if (first) hand_out(s, maps, at, true, turn);
            barrier_wait(s.dout_empty + 8 * dout, parity<DO_STAGES>(step) ^ 1);
            fetch(s.dout + dout * QUERY_BYTES, maps.dout, s.dout_full + 8 * dout, p.delta + at_row,
                  s.delta + dout * ROW_BYTES, row, walk.head, at.batch);
        }
        index = take(p);  // no sooner: whoever is free first takes the next
    }
    hand_out(s, maps, Block{-1, 0, 0}, false, turn);
}

struct Math {
    Shared s;
    Problem p;
    Walk walk;
    int part, warp, lane, key;
    u32 now;         // step, of all blocks of keys
    u32 began;       // the block's first
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

    // Between its turns a warpgroup multiplies while the other computes dS: left to themselves both may do the same.
    __device__ __forceinline__ void take_turn() const {
        if (TURNS) meet(TURN + part, MATH_THREADS);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (TURNS) meet_without_waiting(TURN + 1 - part, MATH_THREADS);
    }

    __device__ __forceinline__ void add_to_dq(const float (&dq)[DQ_COLUMNS / 2]) {
        add_to_sums(p.dq + ((u64)dq_before * GROUPS + part) * DQ_SHARE, dq);
    }

    // On entry the scores are there and the dK of the step before is under way; on return the same of the next.
    template <bool LAST>
    __device__ __forceinline__ void step() {
        float dp[QUERIES / 2], dq[DQ_COLUMNS / 2], next[QUERIES / 2];
        u32 this_q = s.q + slot<Q_STAGES>(now) * QUERY_BYTES, this_dout = s.dout + slot<DO_STAGES>(now) * QUERY_BYTES;
        u32 this_ds = s.ds + slot<DS_STAGES>(now) * DS_BYTES;
        u32 lse = s.lse + slot<Q_STAGES>(now) * ROW_BYTES + lane % 4 * 8;
        u32 delta = s.delta + slot<DO_STAGES>(now) * ROW_BYTES + lane % 4 * 8;
        Scores place(p, key + part * GROUP_KEYS, walk.block * QUERIES, warp, lane);
        barrier_wait(s.dout_full + 8 * slot<DO_STAGES>(now), parity<DO_STAGES>(now));
        keys_by_queries(dp, s.v, this_dout);
        if (place.cut(key, KEYS)) place.hide(scores);
        exponentiate(scores, weights, lse, p.scale_log2);
        keys_by_head(dv, weights, this_dout);
        mma_wait<1>();
        settle(dp);
        take_turn();
        if (KEEPS_DS) settle(ds);
        if (place.lonely()) {
            if (KEEPS_P)
                place.for_lonely([&](int i) { scores[i] = 0.0f; });
            else
                place.for_lonely([&](int i) { dp[i] = load_float(delta + i / 4 * 32 + i % 2 * 4); });
        }
        if (now != began) warp_arrive(s.q_empty + 8 * slot<Q_STAGES>(now - 1));
        differentiate<KEEPS_P>(ds, dp, scores, weights, delta);
        barrier_wait(s.ds_empty + 8 * slot<DS_STAGES>(now), parity<DS_STAGES>(now) ^ 1);
        publish(ds, this_ds + part * QUERIES * 128, warp, lane);
        warp_arrive(s.ds_full + 8 * slot<DS_STAGES>(now));
        if (!LAST) {
            barrier_wait(s.q_full + 8 * slot<Q_STAGES>(now + 1), parity<Q_STAGES>(now + 1));
            keys_by_queries(next, s.k, s.q + slot<Q_STAGES>(now + 1) * QUERY_BYTES);
        }
        pass_turn();
        mma_wait<LAST ? 0 : 1>();
        settle(weights);
        warp_arrive(s.dout_empty + 8 * slot<DO_STAGES>(now));
        barrier_wait(s.ds_full + 8 * slot<DS_STAGES>(now - 1), parity<DS_STAGES>(now - 1));
        head_by_queries(dq, slot<DS_STAGES>(now - 1));
        if (KEEPS_DS) {
            keys_by_head(dk, ds, this_q);
        } else {
            meet(OWN_MEETING + part, GROUP_THREADS);
            keys_by_head_shared(dk, this_ds, this_q);
        }
        mma_wait<1>();
        settle(dq);
        if (now != began) {
            warp_arrive(s.ds_empty + 8 * slot<DS_STAGES>(now - 1));
            add_to_dq(dq);
        }
        if (!LAST) {
            settle(next);
#pragma unroll
            for (int i = 0; i < QUERIES / 2; ++i) scores[i] = next[i];
        }
        dq_before = walk.index;
        ++now, walk.advance();
    }

    __device__ __forceinline__ void tell_added() {
        if (ATTENDED) warp_arrive(s.added);
    }

    // Until the copy engine has read what the warpgroup gave it.
    __device__ __forceinline__ void wait_for_stores() {
        if (threadIdx.x % GROUP_THREADS == 0) bulk_wait_read();
        meet(OWN_MEETING + part, GROUP_THREADS);
    }

    __device__ __forceinline__ void run(int steps, u32 turn) {
#pragma unroll
        for (int i = 0; i < HEAD / 2; ++i) dk[i] = dv[i] = 0.0f;
        settle(dk), settle(dv);
        if (steps == 0) {
            if (ATTENDED) meet(BOTH_MEETING, MATH_THREADS);  // or one warpgroup would count for the other's last block
            tell_added();
            warp_arrive(s.kv_empty);
            wait_for_stores();
            return;
        }
        began = now;
        barrier_wait(s.q_full + 8 * slot<Q_STAGES>(now), parity<Q_STAGES>(now));
        float first[QUERIES / 2];
        keys_by_queries(first, s.k, s.q + slot<Q_STAGES>(now) * QUERY_BYTES);
        wait_for_stores();
        mma_wait<0>();
        settle(first);
#pragma unroll
        for (int i = 0; i < QUERIES / 2; ++i) scores[i] = first[i];
        barrier_wait(s.v_full, turn % 2);
        for (int left = steps - 1; left > 0; --left) step<false>();
        step<true>();
        float dq[DQ_COLUMNS / 2];
        barrier_wait(s.ds_full + 8 * slot<DS_STAGES>(now - 1), parity<DS_STAGES>(now - 1));
        head_by_queries(dq, slot<DS_STAGES>(now - 1));
        mma_wait<0>();
        settle(dq), settle(dk), settle(dv);
        warp_arrive(s.kv_empty);
        warp_arrive(s.q_empty + 8 * slot<Q_STAGES>(now - 1));
        warp_arrive(s.ds_empty + 8 * slot<DS_STAGES>(now - 1));
        add_to_dq(dq);
        tell_added();
    }

    // The warpgroup's rows of dK or dV to global memory by way of its own part of dSᵀ.
    __device__ __forceinline__ void write(const float (&sum)[HEAD / 2], float scale, u32 area, const TensorMap* map,
                                          const Block& at) {
        area += part * QUERIES * 128;
        stage(sum, scale, area, DS_BYTES, warp, lane);
        meet(OWN_MEETING + part, GROUP_THREADS);
        if (threadIdx.x % GROUP_THREADS == 0) {
            for (int i = 0; i < TILES; ++i)
                store_tile(map, area + i * DS_BYTES, 64 * i, at.key + part * GROUP_KEYS, at.kv_head, at.batch);
            bulk_commit();
        }
    }

    __device__ __forceinline__ void run_all(const TensorMap* dk_map, const TensorMap* dv_map) {
        now = 0;
        if (part == 1) pass_turn();
        for (u32 turn = 0;; ++turn) {
            barrier_wait(s.k_full, turn % 2);
            Block at = kept_block(s.block + turn % 2 * 16);
            if (at.key < 0) break;
            walk = Walk(p, at.key, at.kv_head, at.batch);
            key = at.key;
            run(walk.steps(p.group), turn);
            at = kept_block(s.block + turn % 2 * 16);  // again: registers are scarce between
            // Both warpgroups have read dSᵀ of the last two steps.
            barrier_wait(s.ds_empty + 8 * slot<DS_STAGES>(now - 1), parity<DS_STAGES>(now - 1));
            barrier_wait(s.ds_empty + 8 * slot<DS_STAGES>(now - 2), parity<DS_STAGES>(now - 2));
            write(dv, 1.0f, s.ds, dv_map, at);
            if (TILES > 1) wait_for_stores();
            write(dk, p.scale, s.ds + (TILES > 1 ? 0 : DS_BYTES), dk_map, at);
        }
        if (part == 0) take_turn();  // the other's last
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
        barrier_init(s.kv_empty, WARPS + ATTENDED);
        barrier_init(s.added, WARPS);
        for (int i = 0; i < ATTENDANTS; ++i) barrier_init(s.attended + 8 * i, 1);
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
        if (ATTENDED && threadIdx.x == 32) tell(p, s.k_full, s.block, s.kv_empty, s.added);
        if (ATTENDED && warp >= 2) attend(p, s.chunks + (warp - 2) * CHUNK_BYTES, s.attended + 8 * (warp - 2), lane);
    } else {
        take_registers<MATH_REGISTERS>();
        int warp = warp_index();
        Math math{s, p, Walk(p, 0, 0, 0), warp / GROUP_WARPS - 1, warp % GROUP_WARPS, (int)threadIdx.x % 32};
        math.run_all(&dk_map, &dv_map);
    }
}
