// Gradients of layer norm and RMS norm. With n = (x - mean) * rstd (or x * rstd), g = dy * weight and averages
// over the row,
//
//     dx = rstd * (g - average(g) - n * average(g * n))        (without average(g) in RMS norm; plus dsum if RESIDUAL)
//     dweight = sum over rows of dy * n,   dbias = sum over rows of dy
//
// x and dy are read from memory once and wait in the ring (ring.cuh) between the sums and dx. Each thread keeps the
// partial dweight and dbias of the columns it owns in registers over all its rows; `columns` adds what the
// programs found, in a fixed order, so the gradients are the same at every run.
//
// Defined by whoever compiles, beside what ring.cuh wants: CENTERED (1 layer norm, 0 RMS norm), HAS_WEIGHT, HAS_BIAS,
// RESIDUAL.
//
// Limit: DRAM, which reads faster than it copies, so that 1 is not the end. On an H200, of the bandwidth of a copy,
// RMS norm: bf16 0.93 to 0.99 up to 32768 columns; fp32 0.96 to 1.02. Layer norm: bf16 0.96 to 0.98 up to 2048, fp32
// 0.95 to 1.02. Rows that do not begin on a line are for backward_tma.cu from 256 vectors on; so are longer ones of
// 16 bits that do, where it has, beside these rings, at 4096, 8192, 16384, 32768, 65536, 131072 and 262144 columns of
// layer norm 1.01 (0.97), 0.97 (0.95), 0.96 (0.94), 0.97 (0.88), 0.96 (0.89), 0.92 (0.90) and 0.88 (0.84), of RMS norm
// at the last three 0.97 (0.95), 0.97 (0.91) and 0.95 (0.93), but at 8192 0.92 (0.95).
// Lost: one vector a thread, 0.21 to 0.87; four where two suffice, 0.93 to 0.95; clusters of 7 at 50257 columns, 0.48
// to 0.63; twice the programs that the device holds at once, down to 0.75; weights from L2 at 262144 columns of fp32,
// 0.64 to 0.67; at 5000 columns of bf16 vectors counted from a line, 0.90 and 0.93 where backward_tma.cu has 0.94 and
// 0.89, from a sector 0.87; cp.async through L1 (.ca) 0.75 to 0.86 there and 0.47 to 0.57 at 50257; a sixth fewer
// instructions (multiply-adds that do not round x - mean and dy * weight) at 8192 to 131072 columns: within 0.01.
#define INPUTS (2 + RESIDUAL)
#define PASSES 2
#include "ring.cuh"
#include "moments.cuh"

#if CENTERED
struct State {
    float plain, along;  // sums of g and of g * n
    static __device__ __forceinline__ State identity() { return {0.f, 0.f}; }
    __device__ __forceinline__ void combine(State other) { plain += other.plain, along += other.along; }
};
#else
struct State {
    float along;
    static __device__ __forceinline__ State identity() { return {0.f}; }
    __device__ __forceinline__ void combine(State other) { along += other.along; }
};
#endif

// Behind the ring (ring.cuh), each thread's own vectors: weight where KEPT is 1, and bias where it is 2. Others are
// read from memory. `kind`: 0 weight, 1 bias.
__device__ __forceinline__ WEIGHT *kept_vector(int kind, int i) {
    return reinterpret_cast<WEIGHT *>(shared_bytes + RING_BYTES) +
           ((kind * VECTORS + i) * THREADS + int(threadIdx.x)) * LANES;
}
__device__ __forceinline__ void keep_weights(const WEIGHT *from, int kind, const Elements &shape, const ThreadRows &at) {
    for (int i = 0; i < VECTORS; i++) {
        const int column = shape.column(at.first + i * STEP);
        for (int k = 0; k < LANES; k++)
            if (unsigned(column + k) < unsigned(shape.columns))
                kept_vector(kind, i)[k] = from[column + k];
            else
                narrow(kept_vector(kind, i)[k], 0.f);
    }
}
__device__ __forceinline__ void weights_of(const WEIGHT *from, int kind, int i, const Elements &shape, const ThreadRows &at,
                                           float (&to)[LANES]) {
    if (kind < KEPT)
        read_lanes(kept_vector(kind, i), to);
    else
        weights_at(from, shape.column(at.first + i * STEP), shape.columns, to);
}

struct Gradients {
    float weight[VECTORS][LANES], bias[VECTORS][LANES];
};

// Sets to 0, in the ring, what vectors of the row of the first pass hold beside the row. Few threads have such
// vectors, so that this is apart from what all do.
__device__ __forceinline__ void mask_edges(const Ring &ring, const Elements &shape, const ThreadRows &at, bool live) {
    if (ALIGNMENT == ALIGNED || !live || !at.has_partial) return;
    ring.wait<VECTORS - 1>();
    int slot = ring.read_slot;
#pragma unroll 1
    for (int i = 0; i < VECTORS; i++, slot = Ring::next_slot(slot)) {
        const int v = at.first + i * STEP;
        if (shape.holds(v) && shape.is_partial(v))
            for (int n = 0; n < 2; n++) slot_vector(slot, n) = shape.masked(v, slot_vector(slot, n), 0.f);
    }
}

// dy * weight. Rounded where a row may be of one column, not rows_left to a multiply-add: g less the average of g is 0 then.
__device__ __forceinline__ float product(float dy, float weight) {
    return ROW_THREADS > 32 ? dy * weight : __fmul_rn(dy, weight);
}

// n, dy and g of this thread's vector i, which lies in `slot`.
__device__ __forceinline__ void vectors_of(int slot, int i, const Elements &shape, const ThreadRows &at, Statistics normal,
                                           const WEIGHT *weight, float (&n)[LANES], float (&dy)[LANES],
                                           float (&g)[LANES]) {
    unpack<ELEMENT>(slot_vector(slot, 0), n);
    unpack<ELEMENT>(slot_vector(slot, 1), dy);
    if constexpr (HAS_WEIGHT) weights_of(weight, 0, i, shape, at, g);
#pragma unroll
    for (int k = 0; k < LANES; k++) {
        n[k] = (CENTERED ? n[k] - normal.mean : n[k]) * normal.rstd;
        g[k] = HAS_WEIGHT ? product(dy[k], g[k]) : dy[k];
    }
}

template <int I = 0>
__device__ __forceinline__ void gather(Ring &ring, const Elements &shape, const ThreadRows &at, bool live, Statistics normal,
                                       const WEIGHT *weight, State &sums, Gradients &partial) {
    if constexpr (I < VECTORS) {
        ring.wait<I>();
        if (live && shape.holds(at.first + I * STEP)) {
            float n[LANES], dy[LANES], g[LANES];
            vectors_of(ring.read_slot, I, shape, at, normal, weight, n, dy, g);
#pragma unroll
            for (int k = 0; k < LANES; k++) {
#if CENTERED
                sums.plain += g[k];
#endif
                sums.along = fmaf(g[k], n[k], sums.along);
                if (HAS_WEIGHT) partial.weight[I][k] = fmaf(dy[k], n[k], partial.weight[I][k]);
                if (HAS_BIAS) partial.bias[I][k] += dy[k];
            }
        }
        ring.read_slot = Ring::next_slot(ring.read_slot);
        gather<I + 1>(ring, shape, at, live, normal, weight, sums, partial);
    }
}

__device__ __forceinline__ void write(Ring &ring, const Elements &shape, const ThreadRows &at, const Elements &dx, bool live,
                                      Statistics normal, const WEIGHT *weight, State sums) {
#if CENTERED
    const float constant = sums.plain / shape.columns;
#else
    const float constant = 0.f;
#endif
    const float slope = sums.along / shape.columns;
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

// A program's sums of its columns to `to`, [columns].
__device__ __forceinline__ void write_partial(const float (&own)[VECTORS][LANES], const Matrix &x,
                                              const Elements &shape, const ThreadRows &at, float *to) {
    if constexpr (ROWS_PER_BLOCK == 1) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int v = at.first + i * STEP;
            if (!shape.holds(v)) continue;
#pragma unroll
            for (int k = 0; k < LANES; k++)
                if (!shape.is_partial(v) || unsigned(shape.column(v) + k) < unsigned(shape.columns))
                    to[shape.column(v) + k] = own[i][k];
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
            for (int g = 0; g < ROWS_PER_BLOCK; g++) {
                const Elements row(x.base + ((long long)at.program * ROWS_PER_BLOCK + g) * x.stride, shape.columns);
                sum += room[g * slice + row.head + column];
            }
            to[column] = float(sum);
        }
    }
}

ROW_KERNEL norm_backward(ELEMENT *x, ELEMENT *dy, ELEMENT *dsum, ELEMENT *dx, const WEIGHT *weight, const float *means,
                       const float *rstds, float *partial, long long rows, int columns, long long x_stride,
                       long long dy_stride, long long dsum_stride) {
    __shared__ ClusterReduce<State> reduction;
#if RESIDUAL
    const Matrix inputs[INPUTS] = {{x, x_stride}, {dy, dy_stride}, {dsum, dsum_stride}};
#else
    const Matrix inputs[INPUTS] = {{x, x_stride}, {dy, dy_stride}};
#endif
    ThreadRows at(rows);
    const Elements shape(x + at.row * x_stride, columns);
    at.find_partial(shape);
    Ring ring(inputs, shape, at);
    if (KEPT > 0) keep_weights(weight, 0, shape, at);
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
            mask_edges(ring, shape, at, i < at.rows);
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
        write_partial(sums.weight, inputs[0], shape, at, partial);
        partial += (long long)at.programs * columns;
    }
    if (HAS_BIAS) write_partial(sums.bias, inputs[0], shape, at, partial);
    reduction.sync();
}
