// Layer norm and RMS norm: y = (x - mean) * rstd * weight + bias, or x * rstd * weight; with RESIDUAL, of
// sum = x + residual rounded to the element type, which is written too. One trip through HBM.
//
// As in softmax/cuda.cu, a row lies as it came from memory in the registers of WIDTH threads (several rows a block),
// or of a block, VECTORS vectors of 16 bytes a thread; a block ends with its row. Weights come from the caches. Where
// the squares about the mean are so few that what the mean lacks counts, it gains that, and they are taken again: of a
// row of one value the mean is that value, and the variance 0.
//
// Defined by whoever compiles, beside what weights.cuh wants: THREADS (a block), WIDTH (threads of a block that
// share a row), VECTORS, CENTERED (1 layer norm, 0 RMS norm), HAS_WEIGHT, HAS_BIAS, RESIDUAL.
//
// Limit: DRAM. On an H200, of the bandwidth of a copy: 1.00 to 1.01 at 256 to 32768 columns in bf16, 1.02 to 1.03 at
// 256 to 16384 in fp32; with plain loads (see load_vector_once) 0.97 to 0.99.
// Lost: merging (count, mean, squares) of all threads in one exchange, layer norm 0.71 at 4096 and 0.75 at 5000; two
// vectors a thread and more threads, 0.75 to 0.82; loads that stay in L1 too (L1::evict_last), 0.86 at 32768 in bf16
// and 0.97 at 16384 in fp32, where the weights leave L1 instead; twice the threads with half the vectors, layer norm
// 0.94 at 16384 and 0.79 at 32768.
#include "moments.cuh"

// Registers of a thread: 64 where it holds 32 of data or fewer, else 128.
constexpr int BLOCKS = VECTORS * 4 <= 32 ? 1024 / THREADS : (512 + THREADS - 1) / THREADS;

// Squared mean over variance up to which the mean, to a few times 2^-24 of itself, is exact enough.
constexpr float FAR = 1024.f;

__device__ __forceinline__ void load(const Elements &row, int first, uint4 (&held)[VECTORS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = first + i * WIDTH;
        held[i] = row.holds(v) ? row.load_once(v) : make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ float across_row(float sum, Exchange<THREADS, 1, Sum> &exchange, int number) {
    if constexpr (WIDTH <= 32)
        return across_lanes<WIDTH>(Sum{sum}).sum;
    else
        return exchange(Sum{sum}, number).sum;
}

// What the compiler unpacked it shall unpack again: registers are for loads.
__device__ __forceinline__ void forget(uint4 (&held)[VECTORS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        asm volatile("" : "+r"(held[i].x), "+r"(held[i].y), "+r"(held[i].z), "+r"(held[i].w));
}

// A thread's part of the sum of x - mean, and of its squares.
__device__ __forceinline__ float offsets_of_row(const Elements &in, int first, const uint4 (&held)[VECTORS],
                                                float mean) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = first + i * WIDTH;
        if (!in.holds(v)) continue;
        float off[LANES];
        centred(in, v, held[i], mean, off);
#pragma unroll
        for (int k = 0; k < LANES; k++) sum += off[k];
    }
    return sum;
}
__device__ __forceinline__ float squares_of_row(const Elements &in, int first, const uint4 (&held)[VECTORS],
                                                float mean) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = first + i * WIDTH;
        if (in.holds(v)) sum = squares_of(in, v, held[i], mean, sum);
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    norm_held(const ELEMENT *x, const ELEMENT *residual, ELEMENT *y, ELEMENT *sum, const WEIGHT *weight,
                 const WEIGHT *bias, float *means, float *rstds, long long rows, int columns, long long x_stride,
                 long long residual_stride, float eps) {
    __shared__ Exchange<THREADS, 1, Sum> exchange;
    const int first = threadIdx.x % WIDTH;
    const long long row = (long long)blockIdx.x * (THREADS / WIDTH) + threadIdx.x / WIDTH;
    const Elements in(x + row * x_stride, row < rows ? columns : 0), out(y + row * columns, in);
    uint4 held[VECTORS];
    load(in, first, held);
    if constexpr (RESIDUAL) {
        const Elements other(residual + row * residual_stride, in), total(sum + row * columns, in);
        uint4 more[VECTORS];
        load(other, first, more);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (!in.holds(first + i * WIDTH)) continue;
            held[i] = sum_of(held[i], more[i]);
            total.store(first + i * WIDTH, held[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (in.holds(first + i * WIDTH)) held[i] = in.inside(first + i * WIDTH, held[i], 0.f);
    float mean = 0.f;
    if constexpr (CENTERED) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            // Others add nothing, but without this branch the compiler unpacks all at once and runs out of registers.
            if (!in.holds(first + i * WIDTH)) continue;
            mean = mean_of(held[i], 1.f / columns, mean);
        }
        mean = across_row(mean, exchange, 0);
        forget(held);
    }
    float variance = across_row(squares_of_row(in, first, held, mean), exchange, CENTERED) / columns;
    if constexpr (CENTERED) {
        const bool far = variance * FAR < mean * mean;
        // Of the rows that share a warp all go along, but only one that is far gains.
        if (WIDTH < 32 ? __any_sync(~0u, far) : far) {
            forget(held);
            const float lacked = across_row(offsets_of_row(in, first, held, mean), exchange, 2) / columns;
            if (far) mean += lacked;
            forget(held);
            variance = across_row(squares_of_row(in, first, held, mean), exchange, 3) / columns;
        }
    }
    const Normal found{mean, rstd_of(variance, eps)};
    forget(held);
    if (row >= rows) return;
    if (first == 0) {
        if (CENTERED) means[row] = found.mean;
        rstds[row] = found.rstd;
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = first + i * WIDTH;
        if (!in.holds(v)) continue;
        float a[LANES], b[LANES];
        unpack<ELEMENT>(held[i], a);
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
