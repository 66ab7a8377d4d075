// Softmax and log-softmax forward of rows of 512 KiB and more: they pass through the rings (ring.cuh) of clusters that
// stay.
//
// Macros: those of ring.cuh, LOG (1: log-softmax).
//
// Limit: DRAM. H200, of a copy's bandwidth: 0.95 at 131072 and 262144 columns of fp32, 0.94 at 262144 of bf16.
#define INPUTS 1
#define PASSES 2
#include "ring.cuh"

constexpr int LANES = lanes<ELEMENT>;

__device__ __forceinline__ float exp_of(float x) { return exp2_approx(x * LOG2E); }

template <int I = 0>
__device__ __forceinline__ void gather(Ring &ring, const Elements &shape, const ThreadRows &at, bool live,
                                       uint4 (&vectors)[VECTORS]) {
    if constexpr (I < VECTORS) {
        const int v = at.first + I * STEP;
        ring.wait<I>();
        vectors[I] = live && shape.holds(v) ? slot_vector(ring.read_slot, 0) : Elements::filled(minus_infinity());
        ring.read_slot = Ring::next_slot(ring.read_slot);
        gather<I + 1>(ring, shape, at, live, vectors);
    }
}

__device__ __forceinline__ MaxSum state_of(const uint4 (&vectors)[VECTORS]) {
    ElementMax<ELEMENT> element_max;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) element_max.update(vectors[i]);
    MaxSum state{element_max.value, 0.f};
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        float a[LANES];
        unpack<ELEMENT>(vectors[i], a);
#pragma unroll
        for (int k = 0; k < LANES; k++) state.sum += exp_of(a[k] - state.max);
    }
    return state;
}

__device__ __forceinline__ void write(Ring &ring, const Elements &shape, const ThreadRows &at, const Elements &y,
                                      bool live, MaxSum state) {
    const float scale = LOG ? logf(state.sum) : 1.f / state.sum;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = at.first + i * STEP;
        if (live && shape.holds(v)) {
            float a[LANES];
            unpack<ELEMENT>(slot_vector(ring.write_slot, 0), a);
#pragma unroll
            for (int k = 0; k < LANES; k++)
                a[k] = LOG ? a[k] - state.max - scale : exp_of(a[k] - state.max) * scale;
            y.store(v, pack<ELEMENT>(a));
        }
        ring.release(i, shape, at);
    }
}

ROW_KERNEL(THREADS)
forward(ELEMENT *x, ELEMENT *y, long long rows, int columns, long long x_stride, long long y_stride) {
    __shared__ ClusterReduce<MaxSum> reduction;
    const Matrix inputs[INPUTS] = {{x, x_stride}};
    const ThreadRows at(rows);
    const Elements shape(x + at.row * x_stride, columns);
    Ring ring(inputs, shape, at);
    reduction.start();
    MaxSum now = MaxSum::identity(), before = now;
    for (int i = 0; i < at.iterations + LAG; i++) {
        if (i < at.iterations) {
            uint4 vectors[VECTORS];
            gather(ring, shape, at, i < at.rows, vectors);
            now = state_of(vectors);
            reduction.post(now, i);
        }
        if (i >= LAG) {
            const Elements out(y + (at.row + (i - LAG) * at.step) * y_stride, shape);
            write(ring, shape, at, out, i - LAG < at.rows, reduction.collect(LAG ? before : now, i - LAG));
        }
        before = now;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    reduction.sync();
}
