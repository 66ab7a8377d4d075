// Gradients of layer norm and RMS norm. With n = (x - mean) * rstd (or x * rstd), g = dy * weight and averages over the
// row,
//
//     dx = rstd * (g - average(g) - n * average(g * n))        (without average(g) in RMS norm; plus dsum if RESIDUAL)
//     dweight = sum over rows of dy * n,   dbias = sum over rows of dy
//
// x and dy are read once and wait in the ring (ring.cuh) between the sums and dx. Each thread keeps the partial dweight
// and dbias of its columns in registers over all its rows; column_sums.cu adds the programs' in a fixed order, so
// gradients are the same at every run.
//
// Macros: those of ring.cuh and moments.cuh; KEPT (1: weights lie in shared memory), HAS_WEIGHT, HAS_BIAS, RESIDUAL.
//
// Limit: DRAM. H200, of a copy's bandwidth: RMS norm 0.93 to 0.99 in bf16, 0.96 to 1.02 in fp32; layer norm 0.96 to
// 0.98 in bf16 up to 2048 columns, 0.95 to 1.02 in fp32. Longer or odd rows: backward_tma.cu (cuda.py).
#define INPUTS (2 + RESIDUAL)
#define PASSES 2
#include "ring.cuh"
#include "moments.cuh"

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

// With KEPT 1 the weights of each thread's vectors lie in shared memory behind the ring; else they are read from
// memory.
__device__ __forceinline__ WEIGHT *kept_vector(int i) {
    return reinterpret_cast<WEIGHT *>(shared_bytes + RING_BYTES) +
           (i * THREADS + int(threadIdx.x)) * LANES;
}
__device__ __forceinline__ void keep_weights(const WEIGHT *from, const Elements &shape, const ThreadRows &at) {
    for (int i = 0; i < VECTORS; i++) {
        const int column = shape.column(at.first + i * STEP);
        for (int k = 0; k < LANES; k++)
            if (unsigned(column + k) < unsigned(shape.columns))
                kept_vector(i)[k] = from[column + k];
            else
                narrow(kept_vector(i)[k], 0.f);
    }
}
__device__ __forceinline__ void weights_of(const WEIGHT *from, int i, const Elements &shape, const ThreadRows &at,
                                           float (&to)[LANES]) {
    if (KEPT)
        read_lanes(kept_vector(i), to);
    else
        weights_at(from, shape.column(at.first + i * STEP), shape.columns, to);
}

struct Gradients {
    float weight[VECTORS][LANES], bias[VECTORS][LANES];
};

// dy * weight. Rounded where a row may be of one column, not fused: g less the average of g must be 0 then.
__device__ __forceinline__ float product(float dy, float weight) {
    return ROW_THREADS > 32 ? dy * weight : __fmul_rn(dy, weight);
}

// n, dy and g of this thread's vector i, which lies in `slot`.
__device__ __forceinline__ void vectors_of(int slot, int i, const Elements &shape, const ThreadRows &at,
                                           Statistics normal, const WEIGHT *weight, float (&n)[LANES],
                                           float (&dy)[LANES], float (&g)[LANES]) {
    unpack<ELEMENT>(slot_vector(slot, 0), n);
    unpack<ELEMENT>(slot_vector(slot, 1), dy);
    if constexpr (HAS_WEIGHT) weights_of(weight, i, shape, at, g);
#pragma unroll
    for (int k = 0; k < LANES; k++) {
        n[k] = (CENTERED ? n[k] - normal.mean : n[k]) * normal.rstd;
        g[k] = HAS_WEIGHT ? product(dy[k], g[k]) : dy[k];
    }
}

template <int I = 0>
__device__ __forceinline__ void gather(Ring &ring, const Elements &shape, const ThreadRows &at, bool live,
                                       Statistics normal, const WEIGHT *weight, State &sums, Gradients &partial) {
    if constexpr (I < VECTORS) {
        ring.wait<I>();
        if (live && shape.holds(at.first + I * STEP)) {
            float n[LANES], dy[LANES], g[LANES];
            vectors_of(ring.read_slot, I, shape, at, normal, weight, n, dy, g);
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
        gather<I + 1>(ring, shape, at, live, normal, weight, sums, partial);
    }
}

__device__ __forceinline__ void write(Ring &ring, const Elements &shape, const ThreadRows &at, const Elements &dx,
                                      bool live, Statistics normal, const WEIGHT *weight, State sums) {
#if CENTERED
    const float constant = sums.g / shape.columns;
#else
    const float constant = 0.f;
#endif
    const float slope = sums.gn / shape.columns;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = at.first + i * STEP;
        if (live && shape.holds(v)) {
            float n[LANES], dy[LANES], g[LANES];
            vectors_of(ring.write_slot, i, shape, at, normal, weight, n, dy, g);
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

// Writes the program's sums of its columns to `to` [columns].
__device__ __forceinline__ void write_partial(const float (&own)[VECTORS][LANES], const Elements &shape,
                                              const ThreadRows &at, float *to) {
    if constexpr (ROWS_PER_BLOCK == 1) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int v = at.first + i * STEP;
            if (!shape.holds(v)) continue;
#pragma unroll
            for (int k = 0; k < LANES; k++) to[shape.column(v) + k] = own[i][k];
        }
    } else {
        float *room = reinterpret_cast<float *>(shared_bytes);
        constexpr int slice = ROW_THREADS * VECTORS * LANES;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
#pragma unroll
            for (int k = 0; k < LANES; k++)
                room[threadIdx.x / ROW_THREADS * slice + (at.first + i * STEP) * LANES + k] = own[i][k];
        __syncthreads();
        for (int column = threadIdx.x; column < shape.columns; column += THREADS) {
            double sum = 0.;
            for (int g = 0; g < ROWS_PER_BLOCK; g++) sum += room[g * slice + column];
            to[column] = float(sum);
        }
    }
}

ROW_KERNEL(THREADS)
norm_backward(ELEMENT *x, ELEMENT *dy, ELEMENT *dsum, ELEMENT *dx, const WEIGHT *weight, const float *means,
                       const float *rstds, float *partial, long long rows, int columns, long long x_stride,
                       long long dy_stride, long long dsum_stride) {
    __shared__ ClusterReduce<State> reduction;
#if RESIDUAL
    const Matrix inputs[INPUTS] = {{x, x_stride}, {dy, dy_stride}, {dsum, dsum_stride}};
#else
    const Matrix inputs[INPUTS] = {{x, x_stride}, {dy, dy_stride}};
#endif
    const ThreadRows at(rows);
    const Elements shape(x + at.row * x_stride, columns);
    Ring ring(inputs, shape, at);
    if (KEPT > 0) keep_weights(weight, shape, at);
    reduction.start();
    const auto normal_at = [&](int i) -> Statistics {
        if (i >= at.rows) return {0.f, 0.f};
        const long long row = at.row + i * at.step;
        return {CENTERED ? __ldg(means + row) : 0.f, __ldg(rstds + row)};
    };
    Gradients sums{};
    State now = State::identity(), before = now;
    Statistics last{}, normal = normal_at(0);
    for (int i = 0; i < at.iterations + LAG; i++) {
        const Statistics next = normal_at(i + 1);
        if (i < at.iterations) {
            now = State::identity();
            gather(ring, shape, at, i < at.rows, normal, weight, now, sums);
            reduction.post(now, i);
        }
        if (i >= LAG) {
            const Elements out(dx + (at.row + (i - LAG) * at.step) * columns, shape);
            const State all = reduction.collect(LAG ? before : now, i - LAG);
            write(ring, shape, at, out, i - LAG < at.rows, LAG ? last : normal, weight, all);
        }
        before = now, last = normal, normal = next;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    partial += (long long)at.program * columns;
    if (HAS_WEIGHT) {
        write_partial(sums.weight, shape, at, partial);
        partial += (long long)at.programs * columns;
    }
    if (HAS_BIAS) write_partial(sums.bias, shape, at, partial);
    reduction.sync();
}
