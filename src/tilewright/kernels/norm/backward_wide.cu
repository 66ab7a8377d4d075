// Gradients as in backward.cu, of rows that take a thread block or several; partial dweight and dbias likewise.
//
// A program is a block, or a cluster of SHARE blocks that have a row together, and stays for many rows. In each block
// one thread fetches the rows ahead through bulk copies (TMA) into a ring of ROWS rows in shared memory, and THREADS
// others, VECTORS vectors each, go over a row twice: for its sums, and, a row later, for dx. A warp of its own tells
// the other blocks of a cluster the sums of this one. Bulk copies take no instructions of those that compute, and any
// multiple of 16 bytes is as good a place for them as another: cp.async is 15 % slower 16 bytes into a line.
//
// A thread owns the same columns of all rows whose first element lies alike within 16 bytes, as every PERIOD-th row's
// does. A program takes rows of one such class, then, if it has not had its share, of the next, with sums of its own.
//
// Limit: DRAM, but for layer norm in 16 bits at 50257 columns, where instructions count and clusters of 4 leave 12 of
// 132 multiprocessors idle. On an H200, of the bandwidth of a copy in the same run, beside the rings of backward.cu: 5000
// columns, layer norm bf16 0.94 (0.77), fp32 1.02 (0.95), RMS norm 0.89 (0.81) and 1.01 (0.95); 50257 columns, layer
// norm 0.80 (0.60) and 0.91 (0.75), RMS norm 0.86 (0.68) and 0.91 (0.83).
// Lost, at 50257 columns of bf16, layer norm and RMS norm: programs of any 4 blocks that tell each other their sums
// through words in global memory, 0.61 and 0.64, with the write two rows behind 0.68; equal shares of each class side by
// side in memory, not in time, 0.80 and 0.83 (at 5000 columns 0.83 and 0.87); the write two rows behind within a
// cluster, 0.79 and 0.83; clusters of 8, two blocks a multiprocessor, 0.52 and 0.82; weights kept in fp32, which are
// not unpacked again, 0.79 and 0.86. An L2 hint (evict_last) on what is fetched: within 0.02 either way.
//
// Defined by whoever compiles: ELEMENT, WEIGHT, EDGES, LINE (16), ALIGNED, CENTERED, HAS_WEIGHT, HAS_BIAS, RESIDUAL as
// in backward.cu; THREADS, VECTORS, SHARE, COUNT (vectors of a block at most), ROWS, BLOCKS (a multiprocessor), PERIOD.
#include "shares.cuh"
#include "weights.cuh"

constexpr int INPUTS = 2 + RESIDUAL, WARPS = THREADS / 32, SETS = 4;
constexpr int LAG = 1;  // rows between the passes
constexpr int ALL = THREADS + 32 * (SHARE > 1 ? 2 : 1);  // a warp fetches, and one tells the other blocks
static_assert(ROWS >= LAG + 2, "a row must be on its way while others wait for their sums");

struct State {
    float along;  // sum of g * n
#if CENTERED
    float plain;  // sum of g
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
};

struct Gradients {
    float weight[VECTORS][LANES], bias[VECTORS][LANES];
};

struct Matrix {
    const ELEMENT *base;
    long long stride;  // elements from row to row
};

// In shared memory: what the threads of a block tell each other.
struct Desk {
    Arrival full[ROWS], empty[ROWS][VECTORS];
    Arrival posted[SETS], heard[SETS], joined[SETS];
    State found[SETS][WARPS], told[SETS][SHARE], averages[SETS];
    Normal normals[ROWS];
    long long rows[ROWS];     // numbers of the rows in the ring
    Segment segments[PERIOD];  // of the program: it comes into every class once at most
    int count;
};

extern __shared__ __align__(128) uint4 ring[];  // [ROWS][INPUTS][COUNT], then the weights of the columns

// Vector v of those that the block has of a row.
__device__ __forceinline__ uint4 *in_ring(int row, int input, int v) {
    return ring + (row * INPUTS + input) * COUNT + v;
}
__device__ __forceinline__ WEIGHT *kept_weights(int v) {
    return reinterpret_cast<WEIGHT *>(in_ring(ROWS, 0, 0)) + v * LANES;
}

__device__ __forceinline__ void copy_bulk(uint4 *to, const void *from, int bytes, const Arrival &arrival) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from), "r"(bytes), "r"(arrival.address())
                 : "memory");
}

// Vectors of a row that this block has.
__device__ __forceinline__ int vectors_here(const Elements &shape, const Place &at) {
    return max(0, min(COUNT, shape.vectors - at.first));
}

// One thread: rows into the ring, as far ahead as there is room, and what is known of each.
__device__ __forceinline__ void fetch(Desk &desk, const Matrix (&inputs)[INPUTS], const float *means,
                                      const float *rstds, int columns, const Share &share, const Place &at) {
    int slot = 0;
    unsigned round = 0;
    long long turn = 0;
    for (int n = 0; n < desk.count; n++) {
        const Segment part = desk.segments[n];
        const Elements shape(inputs[0].base + part.row * inputs[0].stride, columns);
        const int count = vectors_here(shape, at);
        for (int i = 0; i < part.turns; i++, turn++) {
            const long long row = share.row_of(part, turn);
            const Normal normal{CENTERED ? __ldg(means + row) : 0.f, __ldg(rstds + row)};
            for (int k = 0; k < VECTORS; k++) {
                if (round > 0) desk.empty[slot][k].wait_here(round - 1);
                if (k == 0) {
                    desk.normals[slot] = normal, desk.rows[slot] = row;
                    desk.full[slot].expect(INPUTS * count * 16);
                }
                const int vectors = min(THREADS, count - k * THREADS);
#pragma unroll
                for (int n = 0; n < INPUTS; n++)
                    if (vectors > 0)
                        copy_bulk(in_ring(slot, n, k * THREADS),
                                  inputs[n].base + row * inputs[n].stride - shape.head +
                                      (long long)(at.first + k * THREADS) * LANES,
                                  vectors * 16, desk.full[slot]);
            }
            if (++slot == ROWS) slot = 0, round++;
        }
    }
}

// One warp: the sums of each row from the block's warps, then from the cluster's blocks; averages for this block's.
__device__ __forceinline__ void tell(Desk &desk, int turns, int columns, const Place &at) {
    const int lane = threadIdx.x % 32;
    constexpr int width = WARPS > 16 ? 32 : 16;
    constexpr int together = SHARE > 8 ? 16 : SHARE > 4 ? 8 : SHARE > 2 ? 4 : 2;
    for (int i = 0; i < turns; i++) {
        const int set = i % SETS;
        desk.posted[set].wait_here(i / SETS);
        State state = across_lanes<width>(lane < WARPS ? desk.found[set][lane] : State::none());
        if (lane == 0) desk.heard[set].expect(sizeof(desk.told[0]));
        if (lane < SHARE) send(&desk.told[set][at.block], state, desk.heard[set], lane);
        desk.heard[set].wait(i / SETS);
        state = across_lanes<together>(lane < SHARE ? desk.told[set][lane] : State::none());
        if (lane == 0) desk.averages[set] = state.over(columns), desk.joined[set].arrive();
    }
}

__device__ __forceinline__ void post(Desk &desk, State state, int number) {
    state = across_lanes<32>(state);
    if (threadIdx.x % 32 == 0) {
        desk.found[number % SETS][threadIdx.x / 32] = state;
        desk.posted[number % SETS].arrive();
    }
}
// Averages over the row.
__device__ __forceinline__ State collect(const Desk &desk, int number, int columns) {
    const int set = number % SETS;
    if constexpr (SHARE > 1) {
        desk.joined[set].wait_here(number / SETS);
        return desk.averages[set];
    } else {
        constexpr int width = WARPS > 16 ? 32 : WARPS > 8 ? 16 : WARPS > 4 ? 8 : WARPS > 2 ? 4 : WARPS > 1 ? 2 : 1;
        desk.posted[set].wait_here(number / SETS);
        const int lane = threadIdx.x % width;
        return across_lanes<width>(lane < WARPS ? desk.found[set][lane] : State::none()).over(columns);
    }
}

// n or, without rstd, x - mean of LANES columns; and dy * weight.
__device__ __forceinline__ void centred(uint4 vector, Normal normal, float (&c)[LANES]) {
    unpack<ELEMENT>(vector, c);
#pragma unroll
    for (int k = 0; k < LANES; k++) c[k] = CENTERED ? c[k] - normal.mean : c[k];
}
__device__ __forceinline__ void weighted(int v, const float (&dy)[LANES], float (&g)[LANES]) {
    if constexpr (HAS_WEIGHT) read_lanes(kept_weights(v), g);
#pragma unroll
    for (int k = 0; k < LANES; k++) g[k] = HAS_WEIGHT ? g[k] * dy[k] : dy[k];
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
    __device__ __forceinline__ bool edge(int i) const { return EDGES != WHOLE && (edged >> i & 1); }
};

// The first pass.
__device__ __forceinline__ State gather(int slot, const Elements &shape, const Owned &own, Normal normal,
                                        Gradients &sums) {
    State state = State::none();
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (!own.holds(i)) continue;
        const int v = own.vector(i);
        uint4 of_x = *in_ring(slot, 0, v), of_dy = *in_ring(slot, 1, v);
        if (own.edge(i)) {
            of_x = shape.inside(own.first + v, of_x, 0.f);
            of_dy = shape.inside(own.first + v, of_dy, 0.f);
        }
        float n[LANES], dy[LANES], g[LANES];
        centred(of_x, normal, n);
        unpack<ELEMENT>(of_dy, dy);
        weighted(v, dy, g);
#pragma unroll
        for (int k = 0; k < LANES; k++) {
            n[k] *= normal.rstd;
#if CENTERED
            state.plain += g[k];
#endif
            state.along = fmaf(g[k], n[k], state.along);
            if (HAS_WEIGHT) sums.weight[i][k] = fmaf(dy[k], n[k], sums.weight[i][k]);
            if (HAS_BIAS) sums.bias[i][k] += dy[k];
        }
    }
    return state;
}

// The second pass: dx = rstd * (g - average(g)) - (x - mean) * rstd² * average(g * n); `to` is where vector 0 of
// this thread belongs.
__device__ __forceinline__ void write(Desk &desk, int slot, const Elements &shape, const Owned &own, Normal normal,
                                      State average, ELEMENT *to) {
    const float slope = -average.along * normal.rstd * normal.rstd;
#if CENTERED
    const float constant = average.plain;
#else
    const float constant = 0.f;
#endif
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (own.holds(i)) {
            const int v = own.vector(i);
            float c[LANES], dy[LANES], g[LANES];
            centred(*in_ring(slot, 0, v), normal, c);
            unpack<ELEMENT>(*in_ring(slot, 1, v), dy);
            weighted(v, dy, g);
#pragma unroll
            for (int k = 0; k < LANES; k++)
                g[k] = fmaf(CENTERED ? g[k] - constant : g[k], normal.rstd, c[k] * slope);
            if constexpr (RESIDUAL) {
                unpack<ELEMENT>(*in_ring(slot, INPUTS - 1, v), dy);
#pragma unroll
                for (int k = 0; k < LANES; k++) g[k] += dy[k];
            }
            const uint4 packed = pack<ELEMENT>(g);
            if (own.edge(i)) {
#pragma unroll
                for (int k = 0; k < LANES; k++)
                    if (unsigned(shape.column(own.first + v) + k) < unsigned(shape.columns))
                        to[i * THREADS * LANES + k] = element<ELEMENT>(packed, k);
            } else {
                store_vector(to + i * THREADS * LANES, packed);
            }
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) desk.empty[slot][i].arrive();
    }
}

// A program's sums of its columns to `to`, [columns].
__device__ __forceinline__ void write_partial(const float (&sums)[VECTORS][LANES], const Elements &shape,
                                              const Owned &own, float *to) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (!own.holds(i)) continue;
        const int column = shape.column(own.first + own.vector(i));
#pragma unroll
        for (int k = 0; k < LANES; k++)
            if (unsigned(column + k) < unsigned(shape.columns)) to[column + k] = sums[i][k];
    }
}

// Of the columns of this thread's vectors: it alone uses them.
__device__ __forceinline__ void keep_weights(const WEIGHT *weight, const Elements &shape, const Owned &own) {
    for (int i = 0; i < VECTORS; i++)
        for (int k = 0; k < LANES && own.holds(i); k++) {
            const int column = shape.column(own.first + own.vector(i)) + k;
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
            for (int i = 0; i < VECTORS; i++) desk.empty[slot][i].init(WARPS);
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
        if (threadIdx.x % 32 == 0) fetch(desk, inputs, means, rstds, columns, share, at);
    } else if (SHARE > 1) {
        tell(desk, share.turns(), columns, at);
    }
    __syncwarp();  // the warp of the thread that fetched comes as one
    if (SHARE > 1) meet();
}
