// Gradients as in backward.cu, of rows that take a thread block or a cluster.
//
// A program stays for many rows. In each block one thread fetches rows by bulk copies (TMA) into STAGES slots, THREADS
// others compute, VECTORS vectors each: a row's sums, and one row later dx; in a cluster a warp exchanges the sums.
// Bulk copies cost the computing warps no instructions; where rows begin on lines (BULK_STORE) dx leaves through them
// too. Every row is whole vectors and begins on 16 bytes: a thread owns the same columns of all rows.
//
// Macros: those of a schedule and of moments.cuh; HAS_WEIGHT, HAS_BIAS, RESIDUAL.
//
// Limit: DRAM. H200, of a copy's bandwidth (beside backward.cu): 5000 columns, layer norm 0.94 (0.77) in bf16, 1.02
// (0.95) in fp32, RMS norm 0.90 (0.81) and 1.01 (0.95); 8192 and 32768 columns of bf16, layer norm 0.97 (0.95) and
// 0.97 (0.88).
#include "moments.cuh"

constexpr int INPUTS = 2 + RESIDUAL, WARPS = THREADS / 32, SETS = 4;
constexpr bool BULK_STORE = LINE == 128;                   // rows begin on lines
constexpr int PARTS = BULK_STORE ? 1 : VECTORS;                // in which a row comes, and its room is given back
constexpr int PART = BULK_STORE ? BLOCK_VECTORS : THREADS;             // vectors of one
constexpr int ALL = THREADS + 32 * (CLUSTER > 1 ? 2 : 1);  // one warp fetches, one exchanges sums in a cluster
static_assert(STAGES >= LAG + 2, "one row is fetched while others wait for their sums");
static_assert(ALIGNMENT == ALIGNED, "bulk copies move whole vectors");
// n in one multiply-add: x - mean unrounded differs far below 16 bits; n of a row of one value stays 0 (rstd_of).
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

#include "tma_pipeline.cuh"

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

// Weights of this thread's columns to shared memory; it alone reads them.
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
