// Gradients as in backward.cu, of rows that take a thread block or several; partial dweight and dbias likewise.
//
// A program is a block, or a cluster of CLUSTER blocks that have a row together, and stays for many rows. In each block
// one thread fetches the rows ahead through bulk copies (TMA) into a ring of STAGES rows in shared memory, and THREADS
// others, VECTORS vectors each, go over a row twice: for its sums, and, a row later, for dx. A warp of its owned tells
// the other blocks of a cluster the sums of this one. Bulk copies take no instructions of those that compute; where
// rows begin on lines, dx leaves through them, too (BULK_STORE).
//
// A thread owns the same columns of all rows whose first element lies alike within 16 bytes, as every PERIOD-th row's
// does. A program takes rows of one such class, then, if it has not had its schedule, of the next, with sums of its owned.
//
// Limit: DRAM where rows begin on lines (figures beside those of rings in backward.cu) and at 5000 columns. At 50257 it
// is how such rows move, not what is done with them: the same kernel without its arithmetic has 0.87, and rows of
// 50184 columns, which all begin on 16 bytes but not on lines, 0.87 to 0.89 (of 50176, on lines, 0.88, without
// arithmetic 0.91). DRAM is read and written once, by its counters. Clusters of 2, 3, 4, 5, 6 and 8 are 66, 39, 30, 22,
// 17 and 15 at once; of 3 no three rows fit beside the weights. On an H200, of the bandwidth of a copy in the same run,
// beside the rings: 5000 columns, layer norm bf16 0.94 (0.77), fp32 1.02 (0.95), RMS norm 0.90 (0.81) and 1.01 (0.95);
// 50257 columns, layer norm 0.88 (0.60) and 0.92 (0.75), RMS norm 0.87 (0.68) and 0.91 (0.83); 8191 columns of bf16
// 0.76 and 0.82.
//
// What there was to gain at 50257 columns lay beside the rows, layer norm and RMS norm in bf16 from 0.81 and 0.85 to
// 0.86 and 0.87 (65536 columns 0.96 to 1.00, 8191 0.60 to 0.75): partial sums that lie as their rows do leave in
// vectors of 16 bytes, weights come before the first is kept, no partial sum has to be zeroed before. No division for
// each row's number: clusters of 8 from 0.73 and 0.80 to 0.83 and 0.90, of 5 from 0.82 and 0.88 to 0.88 and 0.87, of 4
// from 0.87 and 0.89 to 0.86 and 0.88. Few warps a column add partial sums up in 7 to 10 us instead of 14 to 20.
//
// Lost, at 50257 columns of bf16, layer norm and RMS norm: clusters of 6, 0.79 and 0.87; three vectors a thread, 0.86
// and 0.88, with clusters of 6 0.77 and 0.80. Before those gains: four vectors a thread instead of two 0.74 and 0.83
// (at 5000 columns two instead of four 0.88); a row in one bulk copy 0.71, dx by bulk copies, too, 0.74 (at 5000
// columns 0.85); the same in copies that begin on lines, which lowers requests to L2 from 44 to 30 million, 0.77 and
// 0.84 (5000 columns 0.91 and 0.92, fp32 0.92 and 0.94); programs of any 4 blocks that reduce_cluster each other their sums
// through words in global memory, 0.61 and 0.64, with the write two rows behind 0.68; equal shares of each class side
// by side in memory, not in time, 0.80 and 0.83 (at 5000 columns 0.83 and 0.87); the write two rows behind within a
// cluster, 0.79 and 0.83, of 6 or 8 no change; clusters of 8, two blocks a multiprocessor, 0.52 and 0.82; weights kept
// in fp32, which are not unpacked again, 0.79 and 0.86. An L2 hint (evict_last) on what is fetched: within 0.02 either
// way. Of rows on lines, half the cluster, with three rows instead of six in the ring: 0.88 to 0.90 at 32768 to 131072
// columns.
//
// Defined by whoever compiles: ELEMENT, WEIGHT, ALIGNMENT, LINE (16), WEIGHTS_ALIGNED, CENTERED, HAS_WEIGHT, HAS_BIAS, RESIDUAL as
// in backward.cu; THREADS, VECTORS, CLUSTER, BLOCK_VECTORS (vectors of a block at most), STAGES, BLOCKS (a multiprocessor),
// PERIOD, BULK_STORE (1 where rows begin on lines).
#include "moments.cuh"

constexpr int INPUTS = 2 + RESIDUAL, WARPS = THREADS / 32, SETS = 4;
constexpr bool BULK_STORE = LINE == 128;                   // rows begin on lines
constexpr int PARTS = BULK_STORE ? 1 : VECTORS;                // in which a row comes, and its room is given back
constexpr int PART = BULK_STORE ? BLOCK_VECTORS : THREADS;             // vectors of one
constexpr int ALL = THREADS + 32 * (CLUSTER > 1 ? 2 : 1);  // a warp fetches, and one tells the other blocks
static_assert(STAGES >= LAG + 2, "a row must be on its way while others wait for their sums");
static_assert(!BULK_STORE || ALIGNMENT == ALIGNED, "bulk copies write whole vectors");
// x - mean is not rounded: what that changes is far below 16 bits. Of a row of one value n is 0 all the same: see
// rstd_of in moments.cuh.
constexpr bool FUSED = sizeof(ELEMENT) == 2;

// Sums over a row or a part of it, or averages.
struct State {
    float along;  // of g * n
#if CENTERED
    float plain;  // of g
    static __device__ __forceinline__ State identity() { return {0.f, 0.f}; }
    __device__ __forceinline__ void combine(State other) { along += other.along, plain += other.plain; }
    __device__ __forceinline__ State over(int columns) const { return {along / columns, plain / columns}; }
#else
    static __device__ __forceinline__ State identity() { return {0.f}; }
    __device__ __forceinline__ void combine(State other) { along += other.along; }
    __device__ __forceinline__ State over(int columns) const { return {along / columns}; }
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

// x, dy and the weights of vector v of the block's.
__device__ __forceinline__ void read(int slot, int v, float (&x)[LANES], float (&dy)[LANES], float (&weight)[LANES]) {
    unpack<ELEMENT>(*in_ring(slot, 0, v), x);
    unpack<ELEMENT>(*in_ring(slot, 1, v), dy);
    if constexpr (HAS_WEIGHT) read_lanes(kept_weights(v), weight);
}
// Ones where a vector is the row's.
__device__ __forceinline__ uint4 inside(int column, int columns) {
    constexpr int each = LANES / 4;  // elements of a word
    unsigned word[4] = {};
#pragma unroll
    for (int k = 0; k < LANES; k++)
        if (unsigned(column + k) < unsigned(columns)) word[k / each] |= (each == 2 ? 0xffffu : ~0u) << k % each * 16;
    return {word[0], word[1], word[2], word[3]};
}
// Sets what a vector in the ring holds beside the row to 0: at once, for the row waits for the thread that does it.
__device__ __forceinline__ void clear_beside(uint4 *vector, uint4 inside) {
    const uint4 held = *vector;
    *vector = {held.x & inside.x, held.y & inside.y, held.z & inside.z, held.w & inside.w};
}
// What this thread has of each row of a segment: VECTORS vectors or fewer.
struct Owned {
    int first, count;  // vectors of the block
    unsigned edged;    // a bit for each of the thread's that is only partly the row's
    __device__ __forceinline__ Owned(const Elements &shape, const Place &at)
        : first(at.first), count(vectors_here(shape, at)), edged(0) {
        for (int i = 0; i < VECTORS; i++)
            if (holds(i) && shape.is_partial(first + vector(i))) edged |= 1u << i;
    }
    __device__ __forceinline__ int vector(int i) const { return i * THREADS + int(threadIdx.x); }
    __device__ __forceinline__ bool holds(int i) const { return vector(i) < count; }
    __device__ __forceinline__ int column(const Elements &shape, int i) const {
        return shape.column(first + vector(i));
    }
    __device__ __forceinline__ bool is_partial(int i) const { return ALIGNMENT != ALIGNED && (edged >> i & 1); }
};

// The first pass. What few threads' vectors hold beside the row is set to 0 in the ring, apart from what all do.
__device__ __forceinline__ State gather(const Pipeline &pipeline, int slot, const Elements &shape, const Owned &owned,
                                        Statistics normal, Gradients &sums) {
    if (ALIGNMENT != ALIGNED && owned.edged) {
#pragma unroll 1
        for (int i = 0; i < VECTORS; i++) {
            if (!owned.is_partial(i)) continue;
            const uint4 inside = pipeline.inside[owned.column(shape, i) >= 0];
            for (int n = 0; n < 2; n++) clear_beside(in_ring(slot, n, owned.vector(i)), inside);
        }
    }
    State found[2] = {State::identity(), State::identity()};  // so that sums wait less for sums
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (!owned.holds(i)) continue;
        float x[LANES], dy[LANES], weight[LANES];
        read(slot, owned.vector(i), x, dy, weight);
#pragma unroll
        for (int k = 0; k < LANES; k++) {
            const float n = normalised(x[k], normal), g = HAS_WEIGHT ? dy[k] * weight[k] : dy[k];
#if CENTERED
            found[k % 2].plain += g;
#endif
            found[k % 2].along = fmaf(g, n, found[k % 2].along);
            if (HAS_WEIGHT) sums.weight[i][k] = fmaf(dy[k], n, sums.weight[i][k]);
            if (HAS_BIAS) sums.bias[i][k] += dy[k];
        }
    }
    found[0].combine(found[1]);
    return found[0];
}

// A vector that is only partly the row's.
__device__ __forceinline__ void store_lanes(uint4 vector, int column, int columns, ELEMENT *to) {
#pragma unroll
    for (int k = 0; k < LANES; k++)
        if (unsigned(column + k) < unsigned(columns)) to[k] = element<ELEMENT>(vector, k);
}

// The second pass: dx = rstd * (g - average(g) - n * average(g * n)), to `to`, which is where vector 0 of this thread
// belongs, or, with BULK_STORE, to the place of x, from where fetch() sends it.
__device__ __forceinline__ void write(Pipeline &pipeline, int slot, const Elements &shape, const Owned &owned, Statistics normal,
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
                dx[k] -= average.plain;
#endif
                dx[k] = fmaf(-normalised(x[k], normal), average.along, dx[k]) * normal.rstd;
            }
            if constexpr (RESIDUAL) {
                unpack<ELEMENT>(*in_ring(slot, INPUTS - 1, v), x);
#pragma unroll
                for (int k = 0; k < LANES; k++) dx[k] += x[k];
            }
            const uint4 packed = pack<ELEMENT>(dx);
            if (owned.is_partial(i))
                store_lanes(packed, owned.column(shape, i), shape.columns, to + i * THREADS * LANES);
            else if (BULK_STORE)
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

// A segment's sums of its columns to `to`, [pitch], where vectors lie as in its rows.
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

// Of the columns of this thread's vectors: it alone uses them.
__device__ __forceinline__ void keep_weights(const WEIGHT *weight, const Elements &shape, const Owned &owned) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (!owned.holds(i)) continue;
        float found[LANES];
        weights_at(weight, owned.column(shape, i), shape.columns, found);
#pragma unroll
        for (int k = 0; k < LANES; k++) narrow(kept_weights(owned.vector(i))[k], found[k]);
    }
}

struct Arguments {
    const ELEMENT *x;
    ELEMENT *dx;
    const WEIGHT *weight;
    float *partial;  // [weight and bias, slots, pitch]
    long long x_stride;
    int columns, slots, pitch;
};

__device__ __forceinline__ void work(Pipeline &pipeline, const Arguments &to, const Place &at) {
    int number = 0, slot = 0, given = 0;  // rows so far; slots of the first and of the second pass
    unsigned round = 0;
    for (int n = 0; n < pipeline.count; n++) {
        const Segment &part = pipeline.segments[n];
        const Elements shape(to.x + part.row * to.x_stride, to.columns);
        const Owned owned(shape, at);
        if (HAS_WEIGHT) keep_weights(to.weight, shape, owned);
        for (int i = 0; i < VECTORS; i++) {
            const int column = owned.column(shape, i);
            if (owned.is_partial(i)) pipeline.inside[column >= 0] = inside(column, to.columns);
        }
        ELEMENT *out = to.dx + shape.column(at.first + threadIdx.x);
        Gradients sums{};
        for (int i = 0; i < part.row_count + LAG; i++) {
            if (i < part.row_count) {
                pipeline.full[slot].wait_block(round);
                post(pipeline, gather(pipeline, slot, shape, owned, pipeline.statistics[slot], sums), number + i);
                if (++slot == STAGES) slot = 0, round++;
            }
            if (i >= LAG) {
                const State average = collect(pipeline, number + i - LAG, to.columns);
                write(pipeline, given, shape, owned, pipeline.statistics[given], average, out + pipeline.rows[given] * to.columns);
                if (++given == STAGES) given = 0;
            }
        }
        number += part.row_count;
        float *partial = to.partial + (long long)part.slot * to.pitch;
        if (HAS_WEIGHT) write_partial(sums.weight, owned, partial);
        if (HAS_BIAS) write_partial(sums.bias, owned, partial + HAS_WEIGHT * (long long)to.slots * to.pitch);
    }
}

// All threads of a program: none of its blocks may end while another writes to it.
__device__ __forceinline__ void sync_program() {
    if constexpr (CLUSTER > 1)
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    else
        __syncthreads();
}

#if CLUSTER > 1
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(ALL, BLOCKS)
#else
extern "C" __global__ void __launch_bounds__(ALL, BLOCKS)
#endif
    norm_backward_tma(const ELEMENT *x, const ELEMENT *dy, const ELEMENT *dsum, ELEMENT *dx, const WEIGHT *weight,
                       const float *means, const float *rstds, float *partial, int *heads, long long rows, int columns,
                       long long x_stride, long long dy_stride, long long dsum_stride, int slots, int pitch) {
    __shared__ Pipeline pipeline;
    const int rank = CLUSTER > 1 ? cluster_rank() : 0, warp = threadIdx.x / 32;
    const Place at{int(blockIdx.x) / CLUSTER, int(gridDim.x) / CLUSTER, rank, rank * BLOCK_VECTORS};
    RowSchedule schedule(rows, at);
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < STAGES; slot++) {
            pipeline.full[slot].init(1);
            for (int k = 0; k < PARTS; k++) pipeline.empty[slot][k].init(WARPS);
        }
        for (int set = 0; set < SETS; set++)
            pipeline.found_ready[set].init(WARPS), pipeline.received[set].init(1), pipeline.averages_ready[set].init(1);
        for (pipeline.count = 0; schedule.position < schedule.end; pipeline.count++) {
            const Segment part = pipeline.segments[pipeline.count] = schedule.next();
            if (rank == 0) heads[part.slot] = Elements(x + part.row * x_stride, columns).head;
        }
    }
    sync_program();
    if (warp < WARPS) {
        work(pipeline, {x, dx, weight, partial, x_stride, columns, slots, pitch}, at);
    } else if (warp == WARPS) {
#if RESIDUAL
        const Matrix inputs[INPUTS] = {{x, x_stride}, {dy, dy_stride}, {dsum, dsum_stride}};
#else
        const Matrix inputs[INPUTS] = {{x, x_stride}, {dy, dy_stride}};
#endif
        if (threadIdx.x % 32 == 0) fetch(pipeline, inputs, dx, means, rstds, columns, schedule, at);
    } else if (CLUSTER > 1) {
        reduce_cluster(pipeline, schedule.row_count(), columns, at);
    }
    __syncwarp();  // the warp of the thread that fetched comes as one
    if (CLUSTER > 1) sync_program();
}
