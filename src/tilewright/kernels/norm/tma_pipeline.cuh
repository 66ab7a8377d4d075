// How rows come to the threads of backward_tma.cu, and their sums to all threads of a row; with BULK_STORE dx leaves
// the same way.
//
// One thread of a block fetches rows into slots of shared memory, ahead of THREADS others; a warp exchanges the block's
// sums with the cluster's other blocks. backward_tma.cu defines its sizes, State (what is reduced) and Statistics
// before.
#pragma once

// A block of a program, which takes every programs-th row.
struct Place {
    int program, programs, block;
    int first;  // vector of a row that is the first of this block
    int rows;   // of the program

    __device__ __forceinline__ long long row(int i) const { return program + (long long)i * programs; }
    // Vectors of a row that this block has.
    __device__ __forceinline__ int count(int columns) const {
        return max(0, min(BLOCK_VECTORS, columns / LANES - first));
    }
};

struct Matrix {
    const ELEMENT *base;
    long long stride;  // elements from row to row
};

// In shared memory: what the threads of a block tell each other.
struct Pipeline {
    Barrier full[STAGES], empty[STAGES][PARTS];
    Barrier found_ready[SETS], received[SETS], averages_ready[SETS];
    State found[SETS][WARPS], sent[SETS][CLUSTER], averages[SETS];
    Statistics statistics[STAGES];
};

extern __shared__ __align__(128) uint4 ring[];  // [STAGES][INPUTS][BLOCK_VECTORS], then the weights of the columns

// The block's vector v of a row.
__device__ __forceinline__ uint4 *in_ring(int row, int input, int v) {
    return ring + (row * INPUTS + input) * BLOCK_VECTORS + v;
}
__device__ __forceinline__ WEIGHT *kept_weights(int v) {
    return reinterpret_cast<WEIGHT *>(in_ring(STAGES, 0, 0)) + v * LANES;
}

__device__ __forceinline__ void copy_bulk(uint4 *to, const void *from, int bytes, const Barrier &barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from), "r"(bytes), "r"(barrier.address())
                 : "memory");
}

// Shared to global; `from` must stay unchanged until `await_reads`.
__device__ __forceinline__ void store_bulk(ELEMENT *to, const uint4 *from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(to), "r"(unsigned(__cvta_generic_to_shared(from))), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void await_reads() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// One thread: rows and their statistics into the slots, as far ahead as there is room; with BULK_STORE, dx out of them.
__device__ __forceinline__ void fetch(Pipeline &pipeline, const Matrix (&inputs)[INPUTS], ELEMENT *dx,
                                      const float *means, const float *rstds, int columns, const Place &at) {
    const int count = at.count(columns);
    int slot = 0, round = 0;
    const auto send = [&](int i) {
        if (count > 0) store_bulk(dx + at.row(i) * columns + at.first * LANES, in_ring(slot, 0, 0), count * 16);
    };
    for (int i = 0; i < at.rows; i++) {
        const long long row = at.row(i);
        // Not prefetched: that costs 7 % at 5000 columns of bf16.
        const Statistics normal{CENTERED ? __ldg(means + row) : 0.f, __ldg(rstds + row)};
        for (int k = 0; k < PARTS; k++) {
            if (round > 0) {
                pipeline.empty[slot][k].wait_block(round - 1);
                if (BULK_STORE) send(i - STAGES), await_reads();
            }
            if (k == 0) {
                pipeline.statistics[slot] = normal;
                pipeline.full[slot].expect(INPUTS * count * 16);
            }
            const int vectors = min(PART, count - k * PART);
#pragma unroll
            for (int n = 0; n < INPUTS; n++)
                if (vectors > 0)
                    copy_bulk(in_ring(slot, n, k * PART),
                              inputs[n].base + row * inputs[n].stride + (at.first + k * PART) * LANES, vectors * 16,
                              pipeline.full[slot]);
        }
        if (++slot == STAGES) slot = 0, round++;
    }
    if (!BULK_STORE) return;
    // dx of the rows that are still in the slots.
    const int first = max(0, at.rows - STAGES);
    slot = first % STAGES, round = first / STAGES;
    for (int i = first; i < at.rows; i++) {
        pipeline.empty[slot][0].wait_block(round);
        send(i);
        if (++slot == STAGES) slot = 0, round++;
    }
    await_reads();
}

// One warp: reduces each row over the block's warps, then over the cluster's blocks, and leaves the averages.
__device__ __forceinline__ void reduce_cluster(Pipeline &pipeline, int columns, const Place &at) {
    const int lane = threadIdx.x % 32;
    constexpr int width = WARPS > 16 ? 32 : 16;
    constexpr int together = CLUSTER > 8 ? 16 : CLUSTER > 4 ? 8 : CLUSTER > 2 ? 4 : 2;
    for (int i = 0; i < at.rows; i++) {
        const int set = i % SETS;
        pipeline.found_ready[set].wait_block(i / SETS);
        State state = reduce_lanes<width>(lane < WARPS ? pipeline.found[set][lane] : State::identity());
        if (lane == 0) pipeline.received[set].expect(sizeof(pipeline.sent[0]));
        if (lane < CLUSTER) send(&pipeline.sent[set][at.block], state, pipeline.received[set], lane);
        pipeline.received[set].wait(i / SETS);
        state = reduce_lanes<together>(lane < CLUSTER ? pipeline.sent[set][lane] : State::identity());
        if (lane == 0) pipeline.averages[set] = state.over(columns), pipeline.averages_ready[set].arrive();
    }
}

__device__ __forceinline__ void post(Pipeline &pipeline, State state, int number) {
    state = reduce_lanes<32>(state);
    if (threadIdx.x % 32 == 0) {
        pipeline.found[number % SETS][threadIdx.x / 32] = state;
        pipeline.found_ready[number % SETS].arrive();
    }
}
// The averages over row number `number`.
__device__ __forceinline__ State collect(const Pipeline &pipeline, int number, int columns) {
    const int set = number % SETS;
    if constexpr (CLUSTER > 1) {
        pipeline.averages_ready[set].wait_block(number / SETS);
        return pipeline.averages[set];
    } else {
        constexpr int width = WARPS > 16 ? 32 : WARPS > 8 ? 16 : WARPS > 4 ? 8 : WARPS > 2 ? 4 : WARPS > 1 ? 2 : 1;
        pipeline.found_ready[set].wait_block(number / SETS);
        const int lane = threadIdx.x % width;
        return reduce_lanes<width>(lane < WARPS ? pipeline.found[set][lane] : State::identity()).over(columns);
    }
}
