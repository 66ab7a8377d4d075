// Gradients as in backward.cu, of rows that take a thread block or several; partial dweight and dbias likewise.
//
// A program is a block, or a cluster of SHARE blocks that have a row together, and stays for many rows. In each block
// one thread fetches the rows ahead through bulk copies (TMA) into a ring of ROWS rows in shared memory, and THREADS
// others, VECTORS vectors each, go over a row twice: for its sums, and, a row later, for dx. A warp of its own tells
// the other blocks of a cluster the sums of this one. Bulk copies take no instructions of those that compute; where
// rows begin on lines, dx leaves through them, too (BULK).
//
// A thread owns the same columns of all rows whose first element lies alike within 16 bytes, as every PERIOD-th row's
// does. A program takes rows of one such class, then, if it has not had its share, of the next, with sums of its own.
//
// Limit: DRAM where rows begin on lines (figures beside those of rings in backward.cu) and at 5000 columns; at 50257
// it is not known: instructions are not it (a tenth fewer change nothing), nor requests to L2, nor bytes (DRAM is read
// and written once, by its counters), and clusters of 4 leave 12 of 132 multiprocessors idle. On an H200, of the
// bandwidth of a copy in the same run, beside the rings: 5000 columns, layer norm bf16 0.95 (0.77), fp32 1.02 (0.95),
// RMS norm 0.90 (0.81) and 1.01 (0.95); 50257 columns, layer norm 0.81 (0.60) and 0.90 (0.75), RMS norm 0.86 (0.68)
// and 0.91 (0.83).
//
// Lost, at 50257 columns of bf16, layer norm and RMS norm: four vectors a thread instead of two 0.74 and 0.83 (at 5000
// columns two instead of four 0.88); a row in one bulk copy 0.71, dx by bulk copies, too, 0.74 (at 5000 columns 0.85);
// the same in copies that begin on lines, which lowers requests to L2 from 44 to 30 million, 0.77 and 0.84 (5000
// columns 0.91 and 0.92, fp32 0.92 and 0.94); programs of any 4 blocks that tell each other their sums through words
// in global memory, 0.61 and 0.64, with the write two rows behind 0.68; equal shares of each class side by side in
// memory, not in time, 0.80 and 0.83 (at 5000 columns 0.83 and 0.87); the write two rows behind within a cluster, 0.79
// and 0.83; clusters of 8, two blocks a multiprocessor, 0.52 and 0.82; weights kept in fp32, which are not unpacked
// again, 0.79 and 0.86. An L2 hint (evict_last) on what is fetched: within 0.02 either way. Of rows on lines, half the
// cluster, with three rows instead of six in the ring: 0.88 to 0.90 at 32768 to 131072 columns.
//
// Defined by whoever compiles: ELEMENT, WEIGHT, EDGES, LINE (16), ALIGNED, CENTERED, HAS_WEIGHT, HAS_BIAS, RESIDUAL as
// in backward.cu; THREADS, VECTORS, SHARE, COUNT (vectors of a block at most), ROWS, BLOCKS (a multiprocessor),
// PERIOD, BULK (1 where rows begin on lines).
#include "weights.cuh"

constexpr int INPUTS = 2 + RESIDUAL, WARPS = THREADS / 32, SETS = 4;
constexpr int PARTS = BULK ? 1 : VECTORS;                // in which a row comes, and its room is given back
constexpr int PART = BULK ? COUNT : THREADS;             // vectors of one
constexpr int LAG = 1;                                   // rows between the passes
constexpr int ALL = THREADS + 32 * (SHARE > 1 ? 2 : 1);  // a warp fetches, and one tells the other blocks
static_assert(ROWS >= LAG + 2, "a row must be on its way while others wait for their sums");
static_assert(!BULK || EDGES == WHOLE, "bulk copies write whole vectors");
// x - mean is not rounded: what that changes is far below 16 bits. Of a row of one value n is 0 all the same: see
// rstd_of in moments.cuh.
constexpr bool FUSED = sizeof(ELEMENT) == 2;

// Sums over a row or a part of it, or averages.
struct State {
    float along;  // of g * n
#if CENTERED
    float plain;  // of g
    static __device__ __forceinline__ State none() { return {0.f, 0.f}; }
    __device__ __forceinline__ void join(State other) { along += other.along, plain += other.plain; }
    __device__ __forceinline__ State over(int columns) const { return {along / columns, plain / columns}; }
#else
    static __device__ __forceinline__ State none() { return {0.f}; }
    __device__ __forceinline__ void join(State other) { along += other.along; }
    __device__ __forceinline__ State over(int columns) const { return {along / columns}; }
#endif
};

struct Normal {
    float mean, rstd;
    // n
    __device__ __forceinline__ float of(float x) const {
        if (!CENTERED) return x * rstd;
        return FUSED ? fmaf(x, rstd, -mean * rstd) : (x - mean) * rstd;
    }
};

struct Gradients {
    float weight[VECTORS][LANES], bias[VECTORS][LANES];
};

#include "desk.cuh"

// x, dy and the weights of vector v of the block's.
__device__ __forceinline__ void read(int slot, int v, float (&x)[LANES], float (&dy)[LANES], float (&weight)[LANES]) {
    unpack<ELEMENT>(*in_ring(slot, 0, v), x);
    unpack<ELEMENT>(*in_ring(slot, 1, v), dy);
    if constexpr (HAS_WEIGHT) read_lanes(kept_weights(v), weight);
}
// Sets what a vector in the ring holds beside the row to 0.
__device__ __forceinline__ void clear_beside(uint4 *vector, int column, int columns) {
    ELEMENT *lane = reinterpret_cast<ELEMENT *>(vector);
#pragma unroll 1
    for (int k = 0; k < LANES; k++)
        if (unsigned(column + k) >= unsigned(columns)) narrow(lane[k], 0.f);
}
// What this thread has of each row of a segment: VECTORS vectors or fewer.
struct Owned {
    int first, count;  // vectors of the block
    unsigned edged;    // a bit for each of the thread's that is only partly the row's
    __device__ __forceinline__ Owned(const Elements &shape, const Place &at)
        : first(at.first), count(vectors_here(shape, at)), edged(0) {
        for (int i = 0; i < VECTORS; i++)
            if (holds(i) && shape.edge(first + vector(i))) edged |= 1u << i;
    }
    __device__ __forceinline__ int vector(int i) const { return i * THREADS + int(threadIdx.x); }
    __device__ __forceinline__ bool holds(int i) const { return vector(i) < count; }
    __device__ __forceinline__ int column(const Elements &shape, int i) const {
        return shape.column(first + vector(i));
    }
    __device__ __forceinline__ bool edge(int i) const { return EDGES != WHOLE && (edged >> i & 1); }
};

// The first pass. What few threads' vectors hold beside the row is set to 0 in the ring, apart from what all do.
__device__ __forceinline__ State gather(int slot, const Elements &shape, const Owned &own, Normal normal,
                                        Gradients &sums) {
    if (EDGES != WHOLE && own.edged) {
#pragma unroll 1
        for (int i = 0; i < VECTORS; i++)
            if (own.edge(i))
#pragma unroll 1
                for (int n = 0; n < 2; n++)
                    clear_beside(in_ring(slot, n, own.vector(i)), own.column(shape, i), shape.columns);
    }
    State found[2] = {State::none(), State::none()};  // so that sums wait less for sums
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (!own.holds(i)) continue;
        float x[LANES], dy[LANES], weight[LANES];
        read(slot, own.vector(i), x, dy, weight);
#pragma unroll
        for (int k = 0; k < LANES; k++) {
            const float n = normal.of(x[k]), g = HAS_WEIGHT ? dy[k] * weight[k] : dy[k];
#if CENTERED
            found[k % 2].plain += g;
#endif
            found[k % 2].along = fmaf(g, n, found[k % 2].along);
            if (HAS_WEIGHT) sums.weight[i][k] = fmaf(dy[k], n, sums.weight[i][k]);
            if (HAS_BIAS) sums.bias[i][k] += dy[k];
        }
    }
    found[0].join(found[1]);
    return found[0];
}

// A vector that is only partly the row's.
__device__ __forceinline__ void store_lanes(uint4 vector, int column, int columns, ELEMENT *to) {
#pragma unroll
    for (int k = 0; k < LANES; k++)
        if (unsigned(column + k) < unsigned(columns)) to[k] = element<ELEMENT>(vector, k);
}

// The second pass: dx = rstd * (g - average(g) - n * average(g * n)), to `to`, which is where vector 0 of this thread
// belongs, or, with BULK, to the place of x, from where fetch() sends it.
__device__ __forceinline__ void write(Desk &desk, int slot, const Elements &shape, const Owned &own, Normal normal,
                                      State average, ELEMENT *to) {
    const bool speaks = threadIdx.x % 32 == 0;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (own.holds(i)) {
            const int v = own.vector(i);
            float x[LANES], dy[LANES], weight[LANES], dx[LANES];
            read(slot, v, x, dy, weight);
#pragma unroll
            for (int k = 0; k < LANES; k++) {
                dx[k] = HAS_WEIGHT ? dy[k] * weight[k] : dy[k];
#if CENTERED
                dx[k] -= average.plain;
#endif
                dx[k] = fmaf(-normal.of(x[k]), average.along, dx[k]) * normal.rstd;
            }
            if constexpr (RESIDUAL) {
                unpack<ELEMENT>(*in_ring(slot, INPUTS - 1, v), x);
#pragma unroll
                for (int k = 0; k < LANES; k++) dx[k] += x[k];
            }
            const uint4 packed = pack<ELEMENT>(dx);
            if (own.edge(i))
                store_lanes(packed, own.column(shape, i), shape.columns, to + i * THREADS * LANES);
            else if (BULK)
                *in_ring(slot, 0, v) = packed;
            else
                store_vector(to + i * THREADS * LANES, packed);
        }
        if (BULK) continue;
        __syncwarp();
        if (speaks) desk.empty[slot][i].arrive();
    }
    if (BULK) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before the copy that reads what was written
        __syncwarp();
        if (speaks) desk.empty[slot][0].arrive();
    }
}

// A program's sums of its columns to `to`, [columns].
__device__ __forceinline__ void write_partial(const float (&sums)[VECTORS][LANES], const Elements &shape,
                                              const Owned &own, float *to) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (!own.holds(i)) continue;
        const int column = own.column(shape, i);
#pragma unroll
        for (int k = 0; k < LANES; k++)
            if (unsigned(column + k) < unsigned(shape.columns)) to[column + k] = sums[i][k];
    }
}

// Of the columns of this thread's vectors: it alone uses them.
__device__ __forceinline__ void keep_weights(const WEIGHT *weight, const Elements &shape, const Owned &own) {
    for (int i = 0; i < VECTORS; i++)
        for (int k = 0; k < LANES && own.holds(i); k++) {
            const int column = own.column(shape, i) + k;
            if (unsigned(column) < unsigned(shape.columns))
                kept_weights(own.vector(i))[k] = weight[column];
            else
                narrow(kept_weights(own.vector(i))[k], 0.f);
        }
}

struct Arguments {
    const ELEMENT *x;
    ELEMENT *dx;
    const WEIGHT *weight;
    float *partial;  // [weight and bias, slots, columns]
    long long x_stride;
    int columns, slots;
};

__device__ __forceinline__ void work(Desk &desk, const Arguments &to, const Place &at) {
    int number = 0, slot = 0, given = 0;  // rows so far; slots of the first and of the second pass
    unsigned round = 0;
    for (int n = 0; n < desk.count; n++) {
        const Segment &part = desk.segments[n];
        const Elements shape(to.x + part.row * to.x_stride, to.columns);
        const Owned own(shape, at);
        if (HAS_WEIGHT) keep_weights(to.weight, shape, own);
        ELEMENT *out = to.dx + shape.column(at.first + threadIdx.x);
        Gradients sums{};
        for (int i = 0; i < part.turns + LAG; i++) {
            if (i < part.turns) {
                desk.full[slot].wait_here(round);
                post(desk, gather(slot, shape, own, desk.normals[slot], sums), number + i);
                if (++slot == ROWS) slot = 0, round++;
            }
            if (i >= LAG) {
                const State average = collect(desk, number + i - LAG, to.columns);
                write(desk, given, shape, own, desk.normals[given], average, out + desk.rows[given] * to.columns);
                if (++given == ROWS) given = 0;
            }
        }
        number += part.turns;
        float *partial = to.partial + (long long)part.slot * to.columns;
        if (HAS_WEIGHT) write_partial(sums.weight, shape, own, partial);
        if (HAS_BIAS) write_partial(sums.bias, shape, own, partial + HAS_WEIGHT * (long long)to.slots * to.columns);
    }
}

// All threads of a program: none of its blocks may end while another writes to it.
__device__ __forceinline__ void meet() {
    if constexpr (SHARE > 1)
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    else
        __syncthreads();
}

#if SHARE > 1
extern "C" __global__ void __cluster_dims__(SHARE) __launch_bounds__(ALL, BLOCKS)
#else
extern "C" __global__ void __launch_bounds__(ALL, BLOCKS)
#endif
    norm_backward_wide(const ELEMENT *x, const ELEMENT *dy, const ELEMENT *dsum, ELEMENT *dx, const WEIGHT *weight,
                       const float *means, const float *rstds, float *partial, long long rows, int columns,
                       long long x_stride, long long dy_stride, long long dsum_stride, int slots) {
    __shared__ Desk desk;
    const int rank = SHARE > 1 ? cluster_rank() : 0, warp = threadIdx.x / 32;
    const Place at{int(blockIdx.x) / SHARE, int(gridDim.x) / SHARE, rank, rank * COUNT};
    Share share(rows, at);
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < ROWS; slot++) {
            desk.full[slot].init(1);
            for (int k = 0; k < PARTS; k++) desk.empty[slot][k].init(WARPS);
        }
        for (int set = 0; set < SETS; set++)
            desk.posted[set].init(WARPS), desk.heard[set].init(1), desk.joined[set].init(1);
        for (desk.count = 0; share.position < share.end; desk.count++) desk.segments[desk.count] = share.next();
    }
    meet();
    if (warp < WARPS) {
        work(desk, {x, dx, weight, partial, x_stride, columns, slots}, at);
    } else if (warp == WARPS) {
#if RESIDUAL
        const Matrix inputs[INPUTS] = {{x, x_stride}, {dy, dy_stride}, {dsum, dsum_stride}};
#else
        const Matrix inputs[INPUTS] = {{x, x_stride}, {dy, dy_stride}};
#endif
        if (threadIdx.x % 32 == 0) fetch(desk, inputs, dx, means, rstds, columns, share, at);
    } else if (SHARE > 1) {
        tell(desk, share.turns(), columns, at);
    }
    __syncwarp();  // the warp of the thread that fetched comes as one
    if (SHARE > 1) meet();
}
