// Gradients of layer norm and RMS norm. With n = (x - mean) * rstd (or x * rstd), g = dy * weight and averages over the
// row,
//
//     dx = rstd * (g - average(g) - n * average(g * n))        (without average(g) in RMS norm; plus dsum if RESIDUAL)
//     dweight = sum over rows of dy * n,   dbias = sum over rows of dy
//
// A program is a thread block or a cluster, and takes many rows in turn. In each block one thread fetches rows by
// bulk copies (TMA) into STAGES slots, and THREADS others, with VECTORS vectors each, compute a row's sums and, one row
// later, dx; in a cluster one warp exchanges sums. Bulk copies cost the computing warps no instructions. If rows begin
// on lines (BULK_STORE), bulk copies store dx too. Every row is whole vectors and begins on 16 bytes: a thread owns the
// same columns of all rows, and keeps their partial dweight and dbias in registers; column_sums.py adds the programs'
// in a fixed order, so gradients are the same at every run.
//
// Macros: those of a schedule and of moments.cuh; HAS_WEIGHT, HAS_BIAS, RESIDUAL.
//
// Limit: DRAM. H200, 2^25 elements: 201 MB of bf16 in 64 us at 768 columns, 58 to 64 at 1024 to 8192, 403 MB of fp32 in
// 101 to 106. Of a copy's bandwidth, 1 GiB: 5000 columns, layer norm 0.94 in bf16, 1.02 in fp32, RMS norm 0.90 and 1.01.
#include "moments.cuh"

constexpr int INPUTS = 2 + RESIDUAL, WARPS = THREADS / 32, SETS = 4;
constexpr int LAG = 1;                                     // rows from the first pass to the second
constexpr bool BULK_STORE = LINE == 128;                   // rows begin on lines
constexpr int PARTS = BULK_STORE ? 1 : VECTORS;                // in which a row arrives, and in which its slot is freed
constexpr int PART = BULK_STORE ? BLOCK_VECTORS : THREADS;             // vectors of one part
constexpr int ALL = THREADS + 32 * (CLUSTER > 1 ? 2 : 1);  // one warp fetches, one exchanges sums in a cluster
static_assert(STAGES >= LAG + 2, "one row is fetched while others wait for their sums");
static_assert(ALIGNMENT == ALIGNED, "bulk copies move whole vectors");
// n is one multiply-add: not rounding x - mean changes n far below 16 bits; n of equal values stays 0 (rstd_of).
constexpr bool FUSED = sizeof(ELEMENT) == 2;

// Sums over a row, or averages.
struct State {
    float gn;  // of g * n
#if CENTERED
    float g;  // of g
    static __device__ __forceinline__ State identity() { return {0.f, 0.f}; }
    __device__ __forceinline__ void combine(State other) { gn += other.gn, g += other.g; }
    __device__ __forceinline__ State over(int columns) const { return {gn / columns, g / columns}; }
#else
    static __device__ __forceinline__ State identity() { return {0.f}; }
    __device__ __forceinline__ void combine(State other) { gn += other.gn; }
    __device__ __forceinline__ State over(int columns) const { return {gn / columns}; }
#endif
};

// n
__device__ __forceinline__ float normalised(float x, Statistics row) {
    if (!CENTERED) return x * row.rstd;
    return FUSED ? fmaf(x, row.rstd, -row.mean * row.rstd) : (x - row.mean) * row.rstd;
}

struct Gradients {
    float weight[VECTORS][LANES], bias[VECTORS][LANES];
};

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

// The barriers and values in shared memory through which the warps of a block communicate.
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
// One thread fetches rows and their statistics into slots as these become free; with BULK_STORE it stores dx from them.
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

// x, dy and weights of the block's vector v.
__device__ __forceinline__ void read(int slot, int v, float (&x)[LANES], float (&dy)[LANES], float (&weight)[LANES]) {
    unpack<ELEMENT>(*in_ring(slot, 0, v), x);
    unpack<ELEMENT>(*in_ring(slot, 1, v), dy);
    if constexpr (HAS_WEIGHT) read_lanes(kept_weights(v), weight);
}
// This thread's vectors of each row: VECTORS or fewer.
struct Owned {
    int first, count;  // of the block's vectors
    __device__ __forceinline__ Owned(const Place &at, int columns) : first(at.first), count(at.count(columns)) {}
    __device__ __forceinline__ int vector(int i) const { return i * THREADS + int(threadIdx.x); }
    __device__ __forceinline__ bool holds(int i) const { return vector(i) < count; }
};

// The first pass: sums over the row.
__device__ __forceinline__ State gather(int slot, const Owned &owned, Statistics normal, Gradients &sums) {
    State found[2] = {State::identity(), State::identity()};  // two, for shorter dependent chains
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (!owned.holds(i)) continue;
        float x[LANES], dy[LANES], weight[LANES];
        read(slot, owned.vector(i), x, dy, weight);
#pragma unroll
        for (int k = 0; k < LANES; k++) {
            const float n = normalised(x[k], normal), g = HAS_WEIGHT ? dy[k] * weight[k] : dy[k];
#if CENTERED
            found[k % 2].g += g;
#endif
            found[k % 2].gn = fmaf(g, n, found[k % 2].gn);
            if (HAS_WEIGHT) sums.weight[i][k] = fmaf(dy[k], n, sums.weight[i][k]);
            if (HAS_BIAS) sums.bias[i][k] += dy[k];
        }
    }
    found[0].combine(found[1]);
    return found[0];
}

// The second pass: dx = rstd * (g - average(g) - n * average(g * n)), to `to` (vector 0 of this thread), or with
// BULK_STORE in place of x, from where fetch() stores it.
__device__ __forceinline__ void write(Pipeline &pipeline, int slot, const Owned &owned, Statistics normal,
                                      State average, ELEMENT *to) {
    const bool is_leader = threadIdx.x % 32 == 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (owned.holds(i)) {
            const int v = owned.vector(i);
            float x[LANES], dy[LANES], weight[LANES], dx[LANES];
            read(slot, v, x, dy, weight);
#pragma unroll
            for (int k = 0; k < LANES; k++) {
                dx[k] = HAS_WEIGHT ? dy[k] * weight[k] : dy[k];
#if CENTERED
                dx[k] -= average.g;
#endif
                dx[k] = fmaf(-normalised(x[k], normal), average.gn, dx[k]) * normal.rstd;
            }
            if constexpr (RESIDUAL) {
                unpack<ELEMENT>(*in_ring(slot, INPUTS - 1, v), x);
#pragma unroll
                for (int k = 0; k < LANES; k++) dx[k] += x[k];
            }
            const uint4 packed = pack<ELEMENT>(dx);
            if (BULK_STORE)
                *in_ring(slot, 0, v) = packed;
            else
                store_vector(to + i * THREADS * LANES, packed);
        }
        if (BULK_STORE) continue;
        __syncwarp();
        if (is_leader) pipeline.empty[slot][i].arrive();
    }
    if (BULK_STORE) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before the copy that reads what was written
        __syncwarp();
        if (is_leader) pipeline.empty[slot][0].arrive();
    }
}

// Writes the program's sums of its columns to `to` [columns].
__device__ __forceinline__ void write_partial(const float (&sums)[VECTORS][LANES], const Owned &owned, float *to) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (!owned.holds(i)) continue;
        uint4 *vectors = reinterpret_cast<uint4 *>(to + (owned.first + owned.vector(i)) * LANES);
#pragma unroll
        for (int k = 0; k < LANES; k += 4)
            store_vector(vectors + k / 4, {__float_as_uint(sums[i][k]), __float_as_uint(sums[i][k + 1]),
                                           __float_as_uint(sums[i][k + 2]), __float_as_uint(sums[i][k + 3])});
    }
}

// Copies the weights of this thread's columns to shared memory; only this thread reads them.
__device__ __forceinline__ void keep_weights(const WEIGHT *weight, int columns, const Owned &owned) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (!owned.holds(i)) continue;
        float found[LANES];
        weights_at(weight, (owned.first + owned.vector(i)) * LANES, columns, found);
#pragma unroll
        for (int k = 0; k < LANES; k++) narrow(kept_weights(owned.vector(i))[k], found[k]);
    }
}

__device__ __forceinline__ void work(Pipeline &pipeline, ELEMENT *dx, const WEIGHT *weight, float *partial,
                                     int columns, const Place &at) {
    const Owned owned(at, columns);
    if (HAS_WEIGHT) keep_weights(weight, columns, owned);
    dx += (at.first + int(threadIdx.x)) * LANES;
    Gradients sums{};
    int slot = 0, round = 0, write_slot = 0;  // slots of the first and the second pass
    for (int i = 0; i < at.rows + LAG; i++) {
        if (i < at.rows) {
            pipeline.full[slot].wait_block(round);
            post(pipeline, gather(slot, owned, pipeline.statistics[slot], sums), i);
            if (++slot == STAGES) slot = 0, round++;
        }
        if (i >= LAG) {
            const State average = collect(pipeline, i - LAG, columns);
            write(pipeline, write_slot, owned, pipeline.statistics[write_slot], average, dx + at.row(i - LAG) * columns);
            if (++write_slot == STAGES) write_slot = 0;
        }
    }
    partial += (long long)at.program * columns;
    if (HAS_WEIGHT) write_partial(sums.weight, owned, partial);
    if (HAS_BIAS) write_partial(sums.bias, owned, partial + HAS_WEIGHT * (long long)at.programs * columns);
}

// All threads of a program: no block may end while another writes to it.
__device__ __forceinline__ void sync_program() {
    if constexpr (CLUSTER > 1)
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    else
        __syncthreads();
}

ROW_KERNEL(ALL)
norm_backward_tma(const ELEMENT *x, const ELEMENT *dy, const ELEMENT *dsum, ELEMENT *dx, const WEIGHT *weight,
                      const float *means, const float *rstds, float *partial, long long rows, int columns,
                      long long x_stride, long long dy_stride, long long dsum_stride) {
    __shared__ Pipeline pipeline;
    const int rank = CLUSTER > 1 ? cluster_rank() : 0, warp = threadIdx.x / 32;
    const int program = blockIdx.x / CLUSTER, programs = gridDim.x / CLUSTER;
    const Place at{program, programs, rank, rank * BLOCK_VECTORS, int((rows - program + programs - 1) / programs)};
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < STAGES; slot++) {
            pipeline.full[slot].init(1);
            for (int k = 0; k < PARTS; k++) pipeline.empty[slot][k].init(WARPS);
        }
        for (int set = 0; set < SETS; set++)
            pipeline.found_ready[set].init(WARPS), pipeline.received[set].init(1), pipeline.averages_ready[set].init(1);
    }
    sync_program();
    if (warp < WARPS) {
        work(pipeline, dx, weight, partial, columns, at);
    } else if (warp == WARPS) {
#if RESIDUAL
        const Matrix inputs[INPUTS] = {{x, x_stride}, {dy, dy_stride}, {dsum, dsum_stride}};
#else
        const Matrix inputs[INPUTS] = {{x, x_stride}, {dy, dy_stride}};
#endif
        if (threadIdx.x % 32 == 0) fetch(pipeline, inputs, dx, means, rstds, columns, at);
    } else if (CLUSTER > 1) {
        reduce_cluster(pipeline, columns, at);
    }
    __syncwarp();  // reconverge the fetching warp
    if (CLUSTER > 1) sync_program();
}
