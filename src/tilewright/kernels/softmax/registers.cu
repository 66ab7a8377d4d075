// Softmax and log-softmax over rows, forward and backward, one trip through DRAM.
//
// A row lies in the registers of a block or of a cluster, VECTORS vectors of 16 bytes a thread; all loads are issued
// before the first is used. Shorter rows are generated (cuda.py: LONGEST_GENERATED).
//
// Macros: those of a schedule (row_schedule.py), ELEMENT (float, bf16, fp16), LOG (1: log-softmax).
//
// Limit: DRAM; in clusters the exchange, since blocks start, wait and end together. H200, of a copy's bandwidth, bf16:
// forward 0.98 to 1.02 up to 32768 columns, 0.96 at 50257, 0.96 to 0.99 up to 131072; backward 1.02 to 1.04, 0.96 at
// 50257.
#include "row.cuh"

constexpr int LANES = lanes<ELEMENT>;
// In fp32 a vector's registers take its exponentials; 16-bit elements stay packed and are exponentiated again, which
// costs less than twice the registers.
constexpr bool KEEPS_EXPONENTIALS = sizeof(ELEMENT) == 4 && !LOG;
using Elements = Row<ELEMENT, ALIGNMENT>;

__device__ __forceinline__ float exp_of(float x) { return exp2_approx(x * LOG2E); }

__device__ __forceinline__ long long row_number() {
    return (long long)(blockIdx.x / CLUSTER) * (THREADS / ROW_THREADS) + threadIdx.x / ROW_THREADS;
}
// This thread's i-th vector: dealt to the blocks of a cluster in turn, so that their loads balance.
__device__ __forceinline__ int vector_number(int i) {
    return (i * CLUSTER + (CLUSTER > 1 ? cluster_rank() : 0)) * ROW_THREADS + threadIdx.x % ROW_THREADS;
}

// Vectors outside of the row are `fill`. `Once`: they are not read again.
template <bool Once = false>
__device__ __forceinline__ void load(const Elements &row, float fill, uint4 (&loaded)[VECTORS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = vector_number(i);
        loaded[i] = row.holds(v) ? (Once ? row.load_once(v) : row.load(v)) : Elements::filled(fill);
    }
}
// Sets lanes outside of the row to `fill`; call after the last load, since it waits for the data.
__device__ __forceinline__ void mask_edges(const Elements &row, float fill, uint4 (&loaded)[VECTORS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = vector_number(i);
        if (row.holds(v)) loaded[i] = row.masked(v, loaded[i], fill);
    }
}

// Adds the vectors to `state`.
__device__ __forceinline__ void accumulate(uint4 (&loaded)[VECTORS], MaxSum &state) {
    ElementMax<ELEMENT> element_max{state.max};
#pragma unroll
    for (int i = 0; i < VECTORS; i++) element_max.update(loaded[i]);
    const float most = element_max.value;
    state.sum *= exp_of(state.max - most);
    state.max = most;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        float a[LANES];
        unpack<ELEMENT>(loaded[i], a);
#pragma unroll
        for (int k = 0; k < LANES; k++) {
            a[k] = exp_of(a[k] - most);
            state.sum += a[k];
        }
        if (KEEPS_EXPONENTIALS) loaded[i] = pack<ELEMENT>(a);
    }
}

// Writes the row. With KEEPS_EXPONENTIALS, `loaded` holds exp(x - thread_max).
__device__ __forceinline__ void write(const Elements &row, const uint4 (&loaded)[VECTORS], MaxSum state,
                                     float thread_max) {
    const float factor = KEEPS_EXPONENTIALS ? exp_of(thread_max - state.max) : 1.f;
    const float scale = LOG ? logf(state.sum) : factor / state.sum;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = vector_number(i);
        if (!row.holds(v)) continue;
        float a[LANES];
        unpack<ELEMENT>(loaded[i], a);
#pragma unroll
        for (int k = 0; k < LANES; k++) {
            if (LOG)
                a[k] = a[k] - state.max - scale;
            else
                a[k] = (KEEPS_EXPONENTIALS ? a[k] : exp_of(a[k] - state.max)) * scale;
        }
        row.store(v, pack<ELEMENT>(a));
    }
}

ROW_KERNEL(THREADS)
forward(const ELEMENT *x, ELEMENT *y, long long rows, int columns, long long x_stride, long long y_stride) {
    __shared__ RowReduce<THREADS, CLUSTER, MaxSum> row_reduce;
    row_reduce.start();
    const long long row = row_number();
    const int here = row < rows ? columns : 0;
    const Elements out(y + row * y_stride, here), in(x + row * x_stride, out);
    uint4 loaded[VECTORS];
    load<true>(in, minus_infinity(), loaded);
    mask_edges(in, minus_infinity(), loaded);
    MaxSum state{LOWEST, 0.f};
    accumulate(loaded, state);
    drop_unpacked(loaded);
    const float thread_max = state.max;
    row_reduce.ready();
    write(out, loaded, row_reduce(state, 0), thread_max);
}

// sum y dy, or sum dy.
__device__ __forceinline__ void accumulate(const Elements &row, const uint4 (&results)[VECTORS],
                                     const uint4 (&gradients)[VECTORS], Sum &state) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        // Without this branch the compiler unpacks all vectors at once and runs out of registers.
        if (!row.holds(vector_number(i))) continue;
        float a[LANES], g[LANES];
        unpack<ELEMENT>(results[i], a);
        unpack<ELEMENT>(gradients[i], g);
#pragma unroll
        for (int k = 0; k < LANES; k++) state.sum += LOG ? g[k] : a[k] * g[k];
    }
}

// dx = y (dy - sum y dy), or dx = dy - exp(y) sum dy.
__device__ __forceinline__ void write(const Elements &row, const uint4 (&results)[VECTORS],
                                     const uint4 (&gradients)[VECTORS], Sum state) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = vector_number(i);
        if (!row.holds(v)) continue;
        float a[LANES], g[LANES];
        unpack<ELEMENT>(results[i], a);
        unpack<ELEMENT>(gradients[i], g);
#pragma unroll
        for (int k = 0; k < LANES; k++) g[k] = LOG ? g[k] - exp_of(a[k]) * state.sum : a[k] * (g[k] - state.sum);
        row.store(v, pack<ELEMENT>(g));
    }
}

ROW_KERNEL(THREADS)
backward(const ELEMENT *y, const ELEMENT *dy, ELEMENT *dx, long long rows, int columns, long long y_stride,
                long long dy_stride, long long dx_stride) {
    __shared__ RowReduce<THREADS, CLUSTER, Sum> row_reduce;
    row_reduce.start();
    const long long row = row_number();
    const int here = row < rows ? columns : 0;
    const Elements out(dx + row * dx_stride, here);
    const Elements result(y + row * y_stride, out), gradient(dy + row * dy_stride, out);
    uint4 results[VECTORS], gradients[VECTORS];
    load(gradient, 0.f, gradients);
    load(result, 0.f, results);
    mask_edges(gradient, 0.f, gradients);
    mask_edges(result, 0.f, results);
    Sum state{0.f};
    accumulate(result, results, gradients, state);
    drop_unpacked(results), drop_unpacked(gradients);
    row_reduce.ready();
    write(out, results, gradients, row_reduce(state, 0));
}
