// Attention's backward for Hopper, head sizes 129 to 256: what backward.cu computes, by clusters of two programs.
//
// dK and dV of 128 keys would fill the registers. With 64 keys a program, the loads of Q and dO and the additions to dQ
// would fill the L2's bandwidth. So two programs of 64 keys form a cluster: TMA multicasts Q and dO to both, and each
// sends its dS to the other and adds half of dQ's columns, over the keys of both. The two math warpgroups differ:
//
//   weights     Sᵀ = K Qᵀ, P = exp(scale · S − lse), dV += Pᵀ dO         sends P to the other warpgroup
//   gradients   dPᵀ = V dOᵀ, dS = P ∘ (dP − Δ), dK += dSᵀ Q              sends dS to both programs
//   both        dQᵀ += Kᵀ dSᵀ for 64 columns each, added to fp32 sums in global memory
//
// Constants: BANDED (positions hide keys), HALF (fp16, else bf16). Limit: as of backward.cu, the additions to dQ.
// docs/kernels.md has the times, docs/experiments.md the variants that lost.

#include "backward_cluster_producer.cuh"

// A math warpgroup.
struct Math {
    Shared s;
    Problem p;
    QueryIterator it;
    int part, warp, lane, rank, pair;
    Slot<Q_STAGES> q;
    Slot<1> dout;
    Slot<2> ds_slot;
    float sum[HEAD / 2];  // dV or dK

    // out = mine · theirsᵀ [KEYS, QUERIES]: rows of K or V with those of Q or dO.
    __device__ __forceinline__ void keys_by_queries(float (&out)[QUERIES / 2], u32 mine, u32 theirs) {
        u64 a = along_k(mine), b = along_k(theirs);
        mma_fence();
#pragma unroll
        for (int i = 0; i < HEAD / 16; ++i)
            mma<0, 0>(out, a + (i / 4 * TILE_BYTES + i % 4 * 32) / 16, b + (i / 4 * TILE_BYTES + i % 4 * 32) / 16,
                      i > 0);
        mma_commit();
    }

    // sum += left · rows [KEYS, HEAD]: left [KEYS, QUERIES] from registers.
    __device__ __forceinline__ void keys_by_head(const u32 (&left)[QUERIES / 4], u32 rows) {
        u64 b = across_k(rows, TILE_BYTES);
        mma_fence();
#pragma unroll
        for (int i = 0; i < QUERIES / 16; ++i) mma<1>(sum, left + 4 * i, b + i * 16 * 128 / 16, 1);
        mma_commit();
    }

    // 64 columns of dQᵀ = Kᵀ dSᵀ over the keys of both programs.
    __device__ __forceinline__ void head_by_queries(float (&dq)[QUERIES / 2]) {
        u32 ds = s.ds + ds_slot.index * CLUSTER * TILE_BYTES;
        u64 mine = across_k(s.k + (HALF_TILES * rank + part) * TILE_BYTES, TILE_BYTES);
        u64 theirs = across_k(s.other_k + part * TILE_BYTES, TILE_BYTES);
        u64 my_ds = along_k(ds + rank * TILE_BYTES), their_ds = along_k(ds + (1 - rank) * TILE_BYTES);
        mma_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) mma<1, 0>(dq, mine + i * 16 * 128 / 16, my_ds + i * 32 / 16, i > 0);
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) mma<1, 0>(dq, theirs + i * 16 * 128 / 16, their_ds + i * 32 / 16, 1);
        mma_commit();
    }

    __device__ __forceinline__ void add_to_dq(const float (&dq)[QUERIES / 2], u32 block) {
        add_to_sums(p.dq_sums + ((u64)block * 4 + rank * 2 + part) * DQ_GROUP_SUMS, dq);
    }

    __device__ __forceinline__ Scores scores_at() const {
        return Scores(p, pair + rank * KEYS, it.block * QUERIES, warp, lane);
    }

    // Stores dSᵀ to the shared memory of both programs.
    __device__ __forceinline__ void store_ds_to_both(const u32 (&ds)[QUERIES / 4]) {
        u32 area = s.ds + (ds_slot.index * CLUSTER + rank) * TILE_BYTES, full = s.ds_full + 8 * ds_slot.index;
        store_ds(ds, area, warp, lane);
        warp_arrive(full);
        meet(2, GROUP_THREADS);
        if (threadIdx.x % GROUP_THREADS == 0) {
            barrier_expect(full, TILE_BYTES);
            send_bytes(area, area, TILE_BYTES, full, 1 - rank);
        }
    }

    // P goes from each thread of one warpgroup to the same thread of the other.
    __device__ __forceinline__ void send_weights(const u32 (&weights)[QUERIES / 4]) {
        u32 to = s.weights + threadIdx.x % GROUP_THREADS * 16;
        barrier_wait(s.weights_empty, dout.parity ^ 1);
#pragma unroll
        for (int i = 0; i < QUERIES / 16; ++i)
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * GROUP_THREADS * 16),
                         "r"(weights[4 * i]), "r"(weights[4 * i + 1]), "r"(weights[4 * i + 2]), "r"(weights[4 * i + 3])
                         : "memory");
        barrier_arrive(s.weights_full);
    }

    __device__ __forceinline__ void receive_weights(u32 (&weights)[QUERIES / 4]) {
        u32 from = s.weights + threadIdx.x % GROUP_THREADS * 16;
        barrier_wait(s.weights_full, dout.parity);
#pragma unroll
        for (int i = 0; i < QUERIES / 16; ++i)
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(weights[4 * i]), "=r"(weights[4 * i + 1]), "=r"(weights[4 * i + 2]),
                           "=r"(weights[4 * i + 3])
                         : "r"(from + i * GROUP_THREADS * 16) : "memory");
        await_loads(weights);
        barrier_arrive(s.weights_empty);
    }

    // Invariant: `scores` are those of this step, in registers.
    template <bool LAST>
    __device__ __forceinline__ void weights_step(float (&scores)[QUERIES / 2]) {
        u32 weights[QUERIES / 4];
        float next[QUERIES / 2], dq[QUERIES / 2];
        Scores place = scores_at();
        if (place.needs_mask(pair + rank * KEYS, KEYS)) place.apply_mask(scores);
        barrier_wait(s.lse_full + 8 * q.index, q.parity);
        exponentiate(scores, weights, s.lse + q.index * ROW_BYTES + lane % 4 * 8, p.scale_log2);
        await_loads(weights);
        barrier_arrive(s.lse_empty + 8 * q.index);
        warp_arrive_at_both(s.q_empty + 8 * q.index);
        send_weights(weights);
        barrier_wait(s.dout_full, dout.parity);
        keys_by_head(weights, s.dout);
        if (!LAST) {
            q.advance();
            barrier_wait(s.q_full + 8 * q.index, q.parity);
            keys_by_queries(next, s.k, s.q + q.index * MATRIX_BYTES);
        }
        mma_wait<LAST ? 0 : 1>();
        fence_registers(weights);
        warp_arrive_at_both(s.dout_empty);
        barrier_wait(s.ds_full + 8 * ds_slot.index, ds_slot.parity);
        head_by_queries(dq);
        mma_wait<0>();
        fence_registers(dq);
        warp_arrive_at_both(s.ds_empty + 8 * ds_slot.index);
        add_to_dq(dq, it.index);
        if (!LAST) {
            fence_registers(next);
#pragma unroll
            for (int i = 0; i < QUERIES / 2; ++i) scores[i] = next[i];
        }
        dout.advance(), ds_slot.advance(), it.advance();
    }

    __device__ __forceinline__ void run_weights(int steps) {
        float first[QUERIES / 2], scores[QUERIES / 2];
        barrier_wait(s.q_full + 8 * q.index, q.parity);
        keys_by_queries(first, s.k, s.q + q.index * MATRIX_BYTES);
        mma_wait<0>();
        fence_registers(first);
#pragma unroll
        for (int i = 0; i < QUERIES / 2; ++i) scores[i] = first[i];
        for (int step = 1; step < steps; ++step) weights_step<false>(scores);
        weights_step<true>(scores);
        q.advance();
    }

    __device__ __forceinline__ void run_gradients(int steps, u32 round) {
        barrier_wait(s.v_full, round % 2);
        float dq[QUERIES / 2];
        u32 sums = 0;  // block of queries of the delayed dQ
        for (int step = 0; step < steps; ++step) {
            float dp[QUERIES / 2];
            u32 weights[QUERIES / 4], ds[QUERIES / 4];
            barrier_wait(s.dout_full, dout.parity);
            keys_by_queries(dp, s.v, s.dout);
            if (step > 0) add_to_dq(dq, sums);  // while dP is computed
            receive_weights(weights);
            Scores place = scores_at();
            if (place.has_single_key())
                place.for_single_key([&](int i) { weights[i / 2] &= i % 2 ? 0x0000FFFFu : 0xFFFF0000u; });
            mma_wait<0>();
            fence_registers(dp);
            barrier_wait(s.delta_full, dout.parity);
            score_gradients<false>(ds, dp, dp, weights, s.delta + lane % 4 * 8);
            await_loads(ds);
            barrier_arrive(s.delta_empty);
            warp_arrive_at_both(s.dout_empty);
            barrier_wait(s.ds_empty + 8 * ds_slot.index, ds_slot.parity ^ 1);
            store_ds_to_both(ds);
            barrier_wait(s.q_full + 8 * q.index, q.parity);
            keys_by_head(ds, s.q + q.index * MATRIX_BYTES);
            barrier_wait(s.ds_full + 8 * ds_slot.index, ds_slot.parity);
            head_by_queries(dq);
            mma_wait<1>();
            fence_registers(ds);
            warp_arrive_at_both(s.q_empty + 8 * q.index);
            mma_wait<0>();
            fence_registers(dq);
            warp_arrive_at_both(s.ds_empty + 8 * ds_slot.index);
            sums = it.index;
            q.advance(), dout.advance(), ds_slot.advance(), it.advance();
        }
        add_to_dq(dq, sums);
    }

    // Stores dV or dK through the shared memory of V or K, and then releases that to the producer.
    __device__ __forceinline__ void write(float scale, u32 area, const TensorMap* map, const Block& at, u32 empty) {
        stage_rows(sum, scale, area, TILE_BYTES, warp, lane);
        meet(1 + part, GROUP_THREADS);
        if (threadIdx.x % GROUP_THREADS == 0) {
            for (int i = 0; i < TILES; ++i)
                store_tile(map, area + i * TILE_BYTES, 64 * i, at.key + rank * KEYS, at.kv_head, at.batch);
            bulk_commit();
            bulk_wait_read();
            barrier_arrive(empty);
        }
        __syncwarp();
    }

    __device__ __forceinline__ bool next_block(u32 round) {
        barrier_wait(s.k_full, round % 2);
        Block at = load_block(s.block + round % 2 * 16);
        pair = at.key;
        it = QueryIterator(p, at.key, at.kv_head, at.batch);
#pragma unroll
        for (int i = 0; i < HEAD / 2; ++i) sum[i] = 0.0f;
        fence_registers(sum);
        return pair >= 0;
    }

    template <bool WEIGHTS>
    __device__ __forceinline__ void run_all(const TensorMap* map) {
        for (u32 round = 0; next_block(round); ++round) {
            int steps = it.steps(p.group);
            if (steps > 0) WEIGHTS ? run_weights(steps) : run_gradients(steps, round);
            mma_wait<0>();
            fence_registers(sum);
            meet(3, 2 * GROUP_THREADS);  // until both warpgroups have read K, and the other V
            Block at = load_block(s.block + round % 2 * 16);
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
        Math math{s, p, QueryIterator(p, 0, 0, 0), part, warp % GROUP_WARPS, (int)threadIdx.x % 32, rank};
        if (part == 0)
            math.run_all<true>(&dv_map);
        else
            math.run_all<false>(&dk_map);
    }
    cluster_sync();  // the other program may still write to this one's shared memory
}
