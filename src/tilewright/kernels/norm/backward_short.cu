// Gradients as in backward_tma.cu, of rows of up to 64 vectors: each lies within a warp, several in a block.
//
// A program stays and walks rows program * ROWS_PER_BLOCK, + programs * ROWS_PER_BLOCK, ... Every thread fetches the
// vectors that it will use itself (cp.async) into its ring of STAGES vectors, several rows ahead, so no thread waits
// for another's data. It owns the same columns of every row: their weights lie in shared memory behind the rings, their
// partial dweight and dbias in registers.
//
// Macros: those of a schedule and of moments.cuh; HAS_WEIGHT, HAS_BIAS, RESIDUAL.
//
// Limit: DRAM. H200, of a copy's bandwidth: layer norm 0.96 to 0.98 in bf16, 0.95 to 1.02 in fp32; RMS norm 0.93 to
// 0.99 and 0.96 to 1.02.
#include "moments.cuh"

constexpr int INPUTS = 2 + RESIDUAL, ROWS_PER_BLOCK = THREADS / ROW_THREADS;
static_assert(ALIGNMENT == ALIGNED, "a thread owns the same columns of every row");
static_assert(ROW_THREADS <= 32 && STAGES >= VECTORS, "a row is within a warp and within the ring");

struct Matrix {
    ELEMENT *base;
    long long stride;  // elements from row to row
};

// The rows and vectors of a thread.
struct ThreadRows {
    int first;             // number of its first vector of a row; ROW_THREADS to the next
    long long row, step;   // its first row, and from row to row
    int rows, iterations;  // that it has; that any thread of its program has

    __device__ __forceinline__ ThreadRows(long long all) {
        first = threadIdx.x % ROW_THREADS;
        step = (long long)gridDim.x * ROWS_PER_BLOCK;
        const long long begin = (long long)blockIdx.x * ROWS_PER_BLOCK;
        row = begin + threadIdx.x / ROW_THREADS;
        rows = row < all ? int((all - row + step - 1) / step) : 0;
        iterations = begin < all ? int((all - begin + step - 1) / step) : 0;
    }
};

extern __shared__ __align__(128) char shared_bytes[];  // the rings, then the weights
constexpr int RING_BYTES = STAGES * INPUTS * THREADS * 16;

// This thread's vector of an input.
__device__ __forceinline__ uint4 &slot_vector(int slot, int input) {
    return reinterpret_cast<uint4 *>(shared_bytes)[(slot * INPUTS + input) * THREADS + threadIdx.x];
}

struct Ring {
    const ELEMENT *from[INPUTS];  // lane 0 of this thread's first vector, in the row that is fetched next
    long long step[INPUTS];       // elements from row to row
    int read_slot = 0, write_slot = 0, rows_left;  // slots of the first and the second pass; rows not yet fetched

    // Starts the loads that fill the ring.
    __device__ __forceinline__ Ring(const Matrix (&inputs)[INPUTS], const Elements &shape, const ThreadRows &at)
        : rows_left(at.rows) {
#pragma unroll
        for (int n = 0; n < INPUTS; n++) {
            step[n] = at.step * inputs[n].stride;
            from[n] = inputs[n].base + at.row * inputs[n].stride + shape.column(at.first);
        }
#pragma unroll
        for (int p = 0; p < STAGES; p++) fetch(p, p % VECTORS, shape, at);
    }
    // Loads vector i of the next row, all inputs; i cycles through 0, 1, ..., VECTORS - 1.
    __device__ __forceinline__ void fetch(int slot, int i, const Elements &shape, const ThreadRows &at) {
        if (rows_left > 0 && shape.holds(at.first + i * ROW_THREADS)) {
#pragma unroll
            for (int n = 0; n < INPUTS; n++)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                             ::"r"(unsigned(__cvta_generic_to_shared(&slot_vector(slot, n)))),
                             "l"(from[n] + i * ROW_THREADS * LANES) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (i == VECTORS - 1) {
            rows_left--;
#pragma unroll
            for (int n = 0; n < INPUTS; n++) from[n] += step[n];
        }
    }
    // Until vector I of the row of the first pass has arrived.
    template <int I>
    __device__ __forceinline__ void wait() const {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - I - 1) : "memory");
    }
    __device__ __forceinline__ static int next_slot(int slot) { return slot == STAGES - 1 ? 0 : slot + 1; }
    // Reuses the slot of vector i of the row of the second pass for the vector STAGES later.
    __device__ __forceinline__ void release(int i, const Elements &shape, const ThreadRows &at) {
        fetch(write_slot, (i + STAGES) % VECTORS, shape, at);
        write_slot = next_slot(write_slot);
    }
};

#if CENTERED
struct State {
    float g, gn;  // sums of g and of g * n
    static __device__ __forceinline__ State identity() { return {0.f, 0.f}; }
    __device__ __forceinline__ void combine(State other) { g += other.g, gn += other.gn; }
};
#else
struct State {
    float gn;
    static __device__ __forceinline__ State identity() { return {0.f}; }
    __device__ __forceinline__ void combine(State other) { gn += other.gn; }
};
#endif

// Weights of this thread's vector i.
__device__ __forceinline__ WEIGHT *kept_vector(int i) {
    return reinterpret_cast<WEIGHT *>(shared_bytes + RING_BYTES) + (i * THREADS + int(threadIdx.x)) * LANES;
}
__device__ __forceinline__ void keep_weights(const WEIGHT *from, const Elements &shape, const ThreadRows &at) {
    for (int i = 0; i < VECTORS; i++) {
        const int column = shape.column(at.first + i * ROW_THREADS);
        for (int k = 0; k < LANES; k++)
            if (unsigned(column + k) < unsigned(shape.columns))
                kept_vector(i)[k] = from[column + k];
            else
                narrow(kept_vector(i)[k], 0.f);
    }
}

struct Gradients {
    float weight[VECTORS][LANES], bias[VECTORS][LANES];
};

// n, dy and g of this thread's vector i, which lies in `slot`.
__device__ __forceinline__ void vectors_of(int slot, int i, Statistics normal, float (&n)[LANES], float (&dy)[LANES],
                                           float (&g)[LANES]) {
    unpack<ELEMENT>(slot_vector(slot, 0), n);
    unpack<ELEMENT>(slot_vector(slot, 1), dy);
    if constexpr (HAS_WEIGHT) read_lanes(kept_vector(i), g);
#pragma unroll
    for (int k = 0; k < LANES; k++) {
        n[k] = (CENTERED ? n[k] - normal.mean : n[k]) * normal.rstd;
        // Rounded, not fused: in a row of one column g less the average of g must be 0.
        g[k] = HAS_WEIGHT ? __fmul_rn(dy[k], g[k]) : dy[k];
    }
}

template <int I = 0>
__device__ __forceinline__ void gather(Ring &ring, const Elements &shape, const ThreadRows &at, bool live,
                                       Statistics normal, State &sums, Gradients &partial) {
    if constexpr (I < VECTORS) {
        ring.wait<I>();
        if (live && shape.holds(at.first + I * ROW_THREADS)) {
            float n[LANES], dy[LANES], g[LANES];
            vectors_of(ring.read_slot, I, normal, n, dy, g);
#pragma unroll
            for (int k = 0; k < LANES; k++) {
#if CENTERED
                sums.g += g[k];
#endif
                sums.gn = fmaf(g[k], n[k], sums.gn);
                if (HAS_WEIGHT) partial.weight[I][k] = fmaf(dy[k], n[k], partial.weight[I][k]);
                if (HAS_BIAS) partial.bias[I][k] += dy[k];
            }
        }
        ring.read_slot = Ring::next_slot(ring.read_slot);
        gather<I + 1>(ring, shape, at, live, normal, sums, partial);
    }
}

__device__ __forceinline__ void write(Ring &ring, const Elements &shape, const ThreadRows &at, const Elements &dx,
                                      bool live, Statistics normal, State sums) {
#if CENTERED
    const float constant = sums.g / shape.columns;
#else
    const float constant = 0.f;
#endif
    const float slope = sums.gn / shape.columns;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = at.first + i * ROW_THREADS;
        if (live && shape.holds(v)) {
            float n[LANES], dy[LANES], g[LANES];
            vectors_of(ring.write_slot, i, normal, n, dy, g);
#pragma unroll
            for (int k = 0; k < LANES; k++) g[k] = fmaf(-n[k], slope, CENTERED ? g[k] - constant : g[k]) * normal.rstd;
            if constexpr (RESIDUAL) {
                unpack<ELEMENT>(slot_vector(ring.write_slot, INPUTS - 1), dy);
#pragma unroll
                for (int k = 0; k < LANES; k++) g[k] += dy[k];
            }
            dx.store(v, pack<ELEMENT>(g));
        }
        ring.release(i, shape, at);
    }
}

// Adds up the rows of the block, whose sums meet where the rings were, and writes them to `to` [columns].
__device__ __forceinline__ void write_partial(const float (&own)[VECTORS][LANES], const Elements &shape,
                                              const ThreadRows &at, float *to) {
    float *room = reinterpret_cast<float *>(shared_bytes);
    constexpr int slice = ROW_THREADS * VECTORS * LANES;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
#pragma unroll
        for (int k = 0; k < LANES; k++)
            room[threadIdx.x / ROW_THREADS * slice + (at.first + i * ROW_THREADS) * LANES + k] = own[i][k];
    __syncthreads();
    for (int column = threadIdx.x; column < shape.columns; column += THREADS) {
        double sum = 0.;
        for (int g = 0; g < ROWS_PER_BLOCK; g++) sum += room[g * slice + column];
        to[column] = float(sum);
    }
}

ROW_KERNEL(THREADS)
norm_backward_short(ELEMENT *x, ELEMENT *dy, ELEMENT *dsum, ELEMENT *dx, const WEIGHT *weight, const float *means,
                    const float *rstds, float *partial, long long rows, int columns, long long x_stride,
                    long long dy_stride, long long dsum_stride) {
#if RESIDUAL
    const Matrix inputs[INPUTS] = {{x, x_stride}, {dy, dy_stride}, {dsum, dsum_stride}};
#else
    const Matrix inputs[INPUTS] = {{x, x_stride}, {dy, dy_stride}};
#endif
    const ThreadRows at(rows);
    const Elements shape(x + at.row * x_stride, columns);
    Ring ring(inputs, shape, at);
    if (HAS_WEIGHT) keep_weights(weight, shape, at);
    const auto normal_at = [&](int i) -> Statistics {
        if (i >= at.rows) return {0.f, 0.f};
        const long long row = at.row + i * at.step;
        return {CENTERED ? __ldg(means + row) : 0.f, __ldg(rstds + row)};
    };
    Gradients sums{};
    Statistics normal = normal_at(0);
    // Rows that share a warp shuffle together, so all go on until the block's first has ended.
    for (int i = 0; i < at.iterations; i++) {
        const Statistics next = normal_at(i + 1);
        State found = State::identity();
        gather(ring, shape, at, i < at.rows, normal, found, sums);
        const Elements out(dx + (at.row + i * at.step) * columns, shape);
        write(ring, shape, at, out, i < at.rows, normal, reduce_lanes<ROW_THREADS>(found));
        normal = next;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    partial += (long long)blockIdx.x * columns;
    if (HAS_WEIGHT) {
        write_partial(sums.weight, shape, at, partial);
        partial += (long long)gridDim.x * columns;
    }
    if (HAS_BIAS) write_partial(sums.bias, shape, at, partial);
}
