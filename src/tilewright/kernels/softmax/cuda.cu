// Softmax and log-softmax over rows, forward and backward; one trip through HBM.
//
// A row lies in the registers of WIDTH threads (several rows a block), of a block, or of a cluster of
// CLUSTER blocks, VECTORS vectors of 16 bytes a thread; all loads are under way before the first is used.
// Rows longer than that are streamed twice by a cluster, the second time out of L2.
//
// Defined by whoever compiles: ELEMENT (float, bf16, fp16), EDGES, LINE, THREADS (a block), WIDTH (threads of a
// block that share a row), VECTORS, CLUSTER, LOG (0 softmax, 1 log-softmax).
#include "row.cuh"

// Registers of a thread: 64 where it holds 32 of data or fewer, else 128. In a cluster, whose blocks wait for each
// other, 28 of a softmax's data do with 48.
template <int Tensors>
constexpr int blocks = CLUSTER > 1 && !LOG && Tensors == 1 && VECTORS <= 7 ? 1280 / THREADS
                       : VECTORS * 4 * Tensors <= 32                       ? 1024 / THREADS
                                                                           : (512 + THREADS - 1) / THREADS;

#if CLUSTER > 1
#define KERNEL(TENSORS) extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, blocks<TENSORS>)
#else
#define KERNEL(TENSORS) extern "C" __global__ void __launch_bounds__(THREADS, blocks<TENSORS>)
#endif

constexpr int LANES = lanes<ELEMENT>;
// In fp32 a vector's registers take its exponentials; narrower elements are kept as they are and
// exponentiated again, which costs less than twice the registers would.
constexpr bool KEEPS = sizeof(ELEMENT) == 4 && !LOG;
using Elements = Row<ELEMENT, EDGES>;

__device__ __forceinline__ float exp_of(float x) { return power_of_two(x * LOG2E); }

__device__ __forceinline__ long long row_number() {
    return (long long)(blockIdx.x / CLUSTER) * (THREADS / WIDTH) + threadIdx.x / WIDTH;
}
// The i-th vector of this thread: they go round the cluster block by block, so that its blocks have alike much
// to do.
__device__ __forceinline__ int vector_number(int i) {
    return (i * CLUSTER + (CLUSTER > 1 ? cluster_rank() : 0)) * WIDTH + threadIdx.x % WIDTH;
}

template <class State>
__device__ __forceinline__ State across_row(State state, Exchange<THREADS, CLUSTER, State> &exchange) {
    if constexpr (WIDTH <= 32)
        return across_lanes<WIDTH>(state);
    else
        return exchange(state, 0);
}

// What the row does not hold is `fill`. `Once`: nobody reads them again.
template <bool Once = false>
__device__ __forceinline__ void load(const Elements &row, int first, float fill, uint4 (&loaded)[VECTORS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = vector_number(first + i);
        loaded[i] = row.holds(v) ? (Once ? row.load_once(v) : row.load(v)) : Elements::full_of(fill);
    }
}
// After the last load: this waits for them.
__device__ __forceinline__ void clear_edges(const Elements &row, int first, float fill, uint4 (&loaded)[VECTORS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = vector_number(first + i);
        if (row.holds(v)) loaded[i] = row.inside(v, loaded[i], fill);
    }
}

// Keeps the compiler from holding what it unpacked until it is unpacked again: registers are for loads.
__device__ __forceinline__ void forget(uint4 (&loaded)[VECTORS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        asm volatile("" : "+r"(loaded[i].x), "+r"(loaded[i].y), "+r"(loaded[i].z), "+r"(loaded[i].w));
}

// Joins the vectors to `state`.
__device__ __forceinline__ void take(uint4 (&loaded)[VECTORS], MaxSum &state) {
    Greatest<ELEMENT> greatest{state.max};
#pragma unroll
    for (int i = 0; i < VECTORS; i++) greatest.see(loaded[i]);
    const float most = greatest.most;
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
        if (KEEPS) loaded[i] = pack<ELEMENT>(a);
    }
}

// `own` is the maximum that exponentials in `loaded` were taken against, if that is what it holds.
template <bool Exponentials>
__device__ __forceinline__ void give(const Elements &row, int first, const uint4 (&loaded)[VECTORS], MaxSum state,
                                     float own) {
    const float scale = LOG ? logf(state.sum) : (Exponentials ? exp_of(own - state.max) : 1.f) / state.sum;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = vector_number(first + i);
        if (!row.holds(v)) continue;
        float a[LANES];
        unpack<ELEMENT>(loaded[i], a);
#pragma unroll
        for (int k = 0; k < LANES; k++) {
            if (LOG)
                a[k] = a[k] - state.max - scale;
            else
                a[k] = (Exponentials ? a[k] : exp_of(a[k] - state.max)) * scale;
        }
        row.store(v, pack<ELEMENT>(a));
    }
}

KERNEL(1) forward(const ELEMENT *x, ELEMENT *y, long long rows, int columns, long long x_stride, long long y_stride) {
    __shared__ Exchange<THREADS, CLUSTER, MaxSum> exchange;
    exchange.start();
    const long long row = row_number();
    const int here = row < rows ? columns : 0;
    const Elements in(x + row * x_stride, here), out(y + row * y_stride, in);
    uint4 loaded[VECTORS];
    load<true>(in, 0, minus_infinity(), loaded);
    clear_edges(in, 0, minus_infinity(), loaded);
    MaxSum state{LOWEST, 0.f};
    take(loaded, state);
    forget(loaded);
    const float own = state.max;
    exchange.ready();
    give<KEEPS>(out, 0, loaded, across_row(state, exchange), own);
}

// Walks the row to its end and back: what was read last is still in L2.
KERNEL(1) forward_streamed(const ELEMENT *x, ELEMENT *y, long long rows, int columns, long long x_stride,
                        long long y_stride) {
    __shared__ Exchange<THREADS, CLUSTER, MaxSum> exchange;
    exchange.start();
    const Elements in(x + row_number() * x_stride, columns), out(y + row_number() * y_stride, in);
    MaxSum state{LOWEST, 0.f};
    uint4 loaded[VECTORS];
    int first = 0;
    for (; vector_number(first) < in.vectors; first += VECTORS) {
        load(in, first, minus_infinity(), loaded);
        clear_edges(in, first, minus_infinity(), loaded);
        take(loaded, state);
    }
    exchange.ready();
    state = across_row(state, exchange);
    for (first -= VECTORS; first >= 0; first -= VECTORS) {
        load(in, first, 0.f, loaded);
        give<false>(out, first, loaded, state, 0.f);
    }
}

// sum y dy, or sum dy.
__device__ __forceinline__ void take(const Elements &row, int first, const uint4 (&results)[VECTORS],
                                     const uint4 (&gradients)[VECTORS], Sum &state) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        // They add nothing, but without this branch the compiler unpacks all at once and runs out of registers.
        if (!row.holds(vector_number(first + i))) continue;
        float a[LANES], g[LANES];
        unpack<ELEMENT>(results[i], a);
        unpack<ELEMENT>(gradients[i], g);
#pragma unroll
        for (int k = 0; k < LANES; k++) state.sum += LOG ? g[k] : a[k] * g[k];
    }
}

// dx = y (dy - sum y dy), or dx = dy - exp(y) sum dy.
__device__ __forceinline__ void give(const Elements &row, int first, const uint4 (&results)[VECTORS],
                                     const uint4 (&gradients)[VECTORS], Sum state) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = vector_number(first + i);
        if (!row.holds(v)) continue;
        float a[LANES], g[LANES];
        unpack<ELEMENT>(results[i], a);
        unpack<ELEMENT>(gradients[i], g);
#pragma unroll
        for (int k = 0; k < LANES; k++) g[k] = LOG ? g[k] - exp_of(a[k]) * state.sum : a[k] * (g[k] - state.sum);
        row.store(v, pack<ELEMENT>(g));
    }
}

KERNEL(2) backward(const ELEMENT *y, const ELEMENT *dy, ELEMENT *dx, long long rows, int columns, long long y_stride,
                long long dy_stride, long long dx_stride) {
    __shared__ Exchange<THREADS, CLUSTER, Sum> exchange;
    exchange.start();
    const long long row = row_number();
    const int here = row < rows ? columns : 0;
    const Elements result(y + row * y_stride, here), gradient(dy + row * dy_stride, result);
    const Elements out(dx + row * dx_stride, result);
    uint4 results[VECTORS], gradients[VECTORS];
    load(gradient, 0, 0.f, gradients);
    load(result, 0, 0.f, results);
    clear_edges(gradient, 0, 0.f, gradients);
    clear_edges(result, 0, 0.f, results);
    Sum state{0.f};
    take(result, 0, results, gradients, state);
    forget(results), forget(gradients);
    exchange.ready();
    give(out, 0, results, gradients, across_row(state, exchange));
}

KERNEL(2) backward_streamed(const ELEMENT *y, const ELEMENT *dy, ELEMENT *dx, long long rows, int columns,
                         long long y_stride, long long dy_stride, long long dx_stride) {
    __shared__ Exchange<THREADS, CLUSTER, Sum> exchange;
    exchange.start();
    const Elements result(y + row_number() * y_stride, columns), gradient(dy + row_number() * dy_stride, result);
    const Elements out(dx + row_number() * dx_stride, result);
    uint4 results[VECTORS], gradients[VECTORS];
    Sum state{0.f};
    int first = 0;
    for (; vector_number(first) < result.vectors; first += VECTORS) {
        load(gradient, first, 0.f, gradients);
        load(result, first, 0.f, results);
        clear_edges(gradient, first, 0.f, gradients);
        clear_edges(result, first, 0.f, results);
        take(result, first, results, gradients, state);
    }
    exchange.ready();
    state = across_row(state, exchange);
    for (first -= VECTORS; first >= 0; first -= VECTORS) {
        load(gradient, first, 0.f, gradients);
        load(result, first, 0.f, results);
        give(out, first, results, gradients, state);
    }
}
