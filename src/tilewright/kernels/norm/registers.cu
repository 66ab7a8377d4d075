// Layer norm y = (x - mean) * rstd * weight + bias, or RMS norm y = x * rstd * weight, forward; with RESIDUAL, of
// sum = x + residual rounded to the element type, which is written too.
//
// A row lies in the registers of ROW_THREADS threads (several rows a block) or of a block, VECTORS vectors of 16 bytes
// a thread; a block ends with its row. Two passes over the registers: the mean, then squares about it. If variance is
// far below mean², the mean of x - mean is added and the squares are taken again: a row of one value has variance 0.
// Weights come from the caches.
//
// Macros: those of a schedule (row_schedule.py) and of moments.cuh; HAS_WEIGHT, HAS_BIAS, RESIDUAL.
//
// Limit: DRAM. H200, of a copy's bandwidth: 1.00 to 1.01 at 256 to 32768 columns of bf16, 1.02 to 1.03 at 256 to 16384
// of fp32.
#include "moments.cuh"

// Squared mean over variance up to which the mean, to a few times 2^-24 of itself, is exact enough.
constexpr float LARGE_MEAN = 1024.f;

__device__ __forceinline__ void load(const Elements &row, int first, uint4 (&vectors)[VECTORS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = first + i * ROW_THREADS;
        vectors[i] = row.holds(v) ? row.load_once(v) : make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ float across_row(float sum, RowReduce<THREADS, 1, Sum> &row_reduce, int number) {
    if constexpr (ROW_THREADS <= 32)
        return reduce_lanes<ROW_THREADS>(Sum{sum}).sum;
    else
        return row_reduce(Sum{sum}, number).sum;
}

// A thread's part of the sum of x - mean, and of its squares.
__device__ __forceinline__ float offsets_of_row(const Elements &in, int first, const uint4 (&vectors)[VECTORS],
                                                float mean) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = first + i * ROW_THREADS;
        if (!in.holds(v)) continue;
        float off[LANES];
        centered(in, v, vectors[i], mean, off);
#pragma unroll
        for (int k = 0; k < LANES; k++) sum += off[k];
    }
    return sum;
}
__device__ __forceinline__ float squares_of_row(const Elements &in, int first, const uint4 (&vectors)[VECTORS],
                                                float mean) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = first + i * ROW_THREADS;
        if (in.holds(v)) sum = add_squares(in, v, vectors[i], mean, sum);
    }
    return sum;
}

ROW_KERNEL(THREADS)
norm_registers(const ELEMENT *x, const ELEMENT *residual, ELEMENT *y, ELEMENT *sum, const WEIGHT *weight,
                 const WEIGHT *bias, float *means, float *rstds, long long rows, int columns, long long x_stride,
                 long long residual_stride, float eps) {
    __shared__ RowReduce<THREADS, 1, Sum> row_reduce;
    const int first = threadIdx.x % ROW_THREADS;
    const long long row = (long long)blockIdx.x * (THREADS / ROW_THREADS) + threadIdx.x / ROW_THREADS;
    const Elements out(y + row * columns, row < rows ? columns : 0), in(x + row * x_stride, out);
    uint4 vectors[VECTORS];
    load(in, first, vectors);
    if constexpr (RESIDUAL) {
        const Elements other(residual + row * residual_stride, out), total(sum + row * columns, out);
        uint4 more[VECTORS];
        load(other, first, more);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (!in.holds(first + i * ROW_THREADS)) continue;
            vectors[i] = add_residual(vectors[i], more[i]);
            total.store(first + i * ROW_THREADS, vectors[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (in.holds(first + i * ROW_THREADS)) vectors[i] = in.masked(first + i * ROW_THREADS, vectors[i], 0.f);
    float mean = 0.f;
    if constexpr (CENTERED) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            // Without this branch the compiler unpacks all vectors at once and runs out of registers.
            if (!in.holds(first + i * ROW_THREADS)) continue;
            mean = add_mean(vectors[i], 1.f / columns, mean);
        }
        mean = across_row(mean, row_reduce, 0);
        drop_unpacked(vectors);
    }
    float variance = across_row(squares_of_row(in, first, vectors, mean), row_reduce, CENTERED) / columns;
    if constexpr (CENTERED) {
        const bool cancels = variance * LARGE_MEAN < mean * mean;
        // Rows that share a warp shuffle together; only those whose variance cancels change.
        if (ROW_THREADS < 32 ? __any_sync(~0u, cancels) : cancels) {
            drop_unpacked(vectors);
            const float residual_mean = across_row(offsets_of_row(in, first, vectors, mean), row_reduce, 2) / columns;
            if (cancels) mean += residual_mean;
            drop_unpacked(vectors);
            variance = across_row(squares_of_row(in, first, vectors, mean), row_reduce, 3) / columns;
        }
    }
    const Statistics found{mean, rstd_of(variance, eps)};
    drop_unpacked(vectors);
    if (row >= rows) return;
    if (first == 0) {
        if (CENTERED) means[row] = found.mean;
        rstds[row] = found.rstd;
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = first + i * ROW_THREADS;
        if (!in.holds(v)) continue;
        float a[LANES], b[LANES];
        unpack<ELEMENT>(vectors[i], a);
        normalise(a, found);
        if constexpr (HAS_WEIGHT) {
            weights_at(weight, in.column(v), columns, b);
#pragma unroll
            for (int k = 0; k < LANES; k++) a[k] *= b[k];
        }
        if constexpr (HAS_BIAS) {
            weights_at(bias, in.column(v), columns, b);
#pragma unroll
            for (int k = 0; k < LANES; k++) a[k] += b[k];
        }
        out.store(v, pack<ELEMENT>(a));
    }
}
