// Softmax and log-softmax, forward, of rows that pass through the rings of programs that stay (ring.cuh): those that
// no block holds in registers.
//
// Defined by whoever compiles, beside what ring.cuh wants: LOG (0 softmax, 1 log-softmax).
#define INPUTS 1
#define PASSES 2
#include "ring.cuh"

constexpr int LANES = lanes<ELEMENT>;

__device__ __forceinline__ float exp_of(float x) { return power_of_two(x * LOG2E); }

template <int I = 0>
__device__ __forceinline__ void gather(Ring &ring, const Elements &shape, const Place &at, bool live,
                                       uint4 (&held)[VECTORS]) {
    if constexpr (I < VECTORS) {
        const int v = at.first + I * STEP;
        ring.wait<I>();
        held[I] = live && shape.holds(v) ? shape.inside(v, in_slot(ring.taken, 0), minus_infinity())
                                         : Elements::full_of(minus_infinity());
        ring.taken = Ring::after(ring.taken);
        gather<I + 1>(ring, shape, at, live, held);
    }
}

__device__ __forceinline__ MaxSum state_of(const uint4 (&held)[VECTORS]) {
    Greatest<ELEMENT> greatest;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) greatest.see(held[i]);
    MaxSum state{greatest.most, 0.f};
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        float a[LANES];
        unpack<ELEMENT>(held[i], a);
#pragma unroll
        for (int k = 0; k < LANES; k++) state.sum += exp_of(a[k] - state.max);
    }
    return state;
}

__device__ __forceinline__ void write(Ring &ring, const Elements &shape, const Place &at, const Elements &y, bool live,
                                      MaxSum state) {
    const float scale = LOG ? logf(state.sum) : 1.f / state.sum;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = at.first + i * STEP;
        if (live && shape.holds(v)) {
            float a[LANES];
            unpack<ELEMENT>(in_slot(ring.given, 0), a);
#pragma unroll
            for (int k = 0; k < LANES; k++)
                a[k] = LOG ? a[k] - state.max - scale : exp_of(a[k] - state.max) * scale;
            y.store(v, pack<ELEMENT>(a));
        }
        ring.give_back(i, shape, at);
    }
}

PROGRAM forward(ELEMENT *x, ELEMENT *y, long long rows, int columns, long long x_stride, long long y_stride) {
    __shared__ Mail<MaxSum> mail;
    const Matrix inputs[INPUTS] = {{x, x_stride}};
    const Place at(rows);
    const Elements shape(x + at.row * x_stride, columns);
    Ring ring(inputs, shape, at);
    mail.start();
    MaxSum now = MaxSum::none(), before = now;
    for (int i = 0; i < at.turns + LAG; i++) {
        if (i < at.turns) {
            uint4 held[VECTORS];
            gather(ring, shape, at, i < at.rows, held);
            now = state_of(held);
            mail.post(now, i);
        }
        if (i >= LAG) {
            const Elements out(y + (at.row + (i - LAG) * at.step) * y_stride, shape);
            write(ring, shape, at, out, i - LAG < at.rows, mail.collect(LAG ? before : now, i - LAG));
        }
        before = now;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    mail.meet();
}
