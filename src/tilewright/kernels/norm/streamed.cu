// Layer norm and RMS norm, as held.cu, of rows that no block holds in registers; they pass through the rings of
// programs that stay (ring.cuh). Layer norm makes three passes over a row in its ring: mean, squares about it,
// result.
//
// Defined by whoever compiles, beside what ring.cuh wants: WEIGHT, ALIGNED, KEPT as in weights.cuh, CENTERED,
// HAS_WEIGHT, HAS_BIAS, RESIDUAL as in held.cu.
//
// Limit: DRAM in RMS norm, in layer norm the instructions of so few warps. On an H200, of the bandwidth of a copy,
// at 65536, 131072 and 262144 columns: RMS norm 0.92, 0.94, 0.93 in bf16, 0.95, 0.94, 0.95 in fp32; layer norm 0.81,
// 0.80, 0.77 in bf16, 0.92, 0.78, 0.70 in fp32. At 50257, where programs must be a multiple of 8 (fp32: 4): 0.81 and
// 0.66 in bf16, 0.85 and 0.73 in fp32.
// Lost: rows in the registers of a cluster that ends with its row, whose weights then come from L2: RMS norm 0.77 to
// 0.82, layer norm 0.67 to 0.81; one pass less, variances about a row's first element: layer norm 0.65 to 0.84;
// merging (count, mean, squares) of all warps in one exchange: layer norm 0.50 to 0.65; a second path for threads
// without edges: 0.53 to 0.68 at 50257; twice or more programs than the device holds at once: within 0.03 where it
// won, to 0.15 where not.
#define INPUTS (1 + RESIDUAL)
#define PASSES (2 + CENTERED)
#include "ring.cuh"
#include "moments.cuh"

// Lane 0 of vector 0 of row `row` of a contiguous result.
__device__ __forceinline__ Elements in_result(ELEMENT *base, long long row, const Elements &shape) {
    return Elements(base + row * shape.columns, shape);
}

// The first pass: sum of x / columns, or of squares in RMS norm; the residual is added on the way.
template <int I = 0>
__device__ __forceinline__ float gather(Ring &ring, const Elements &shape, const Place &at, const Elements &sum,
                                        bool live, float found) {
    if constexpr (I < VECTORS) {
        const int v = at.first + I * STEP;
        ring.wait<I>();
        if (live && shape.holds(v)) {
            uint4 x = in_slot(ring.taken, 0);
            if constexpr (RESIDUAL) {
                x = sum_of(x, in_slot(ring.taken, 1));
                sum.store(v, x);
                in_slot(ring.taken, 0) = x;
            }
            x = shape.inside(v, x, 0.f);
            found = CENTERED ? mean_of(x, 1.f / shape.columns, found) : squares_of(shape, v, x, 0.f, found);
        }
        ring.taken = Ring::after(ring.taken);
        return gather<I + 1>(ring, shape, at, sum, live, found);
    }
    return found;
}

// Squares about the mean of the row that begins in `slot`, which moves on.
__device__ __forceinline__ float centre(int &slot, const Elements &shape, const Place &at, bool live, float mean) {
    float found = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++, slot = Ring::after(slot)) {
        const int v = at.first + i * STEP;
        if (live && shape.holds(v)) found = squares_of(shape, v, in_slot(slot, 0), mean, found);
    }
    return found;
}

__device__ __forceinline__ void write(Ring &ring, const Elements &shape, const Place &at, const Elements &y, bool live,
                                      Normal found, const WEIGHT *weight, const WEIGHT *bias) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = at.first + i * STEP;
        if (live && shape.holds(v)) {
            float a[LANES], b[LANES];
            unpack<ELEMENT>(in_slot(ring.given, 0), a);
            normalise(a, found);
            if constexpr (HAS_WEIGHT) {
                weights_of(weight, 0, i, shape, at, b);
#pragma unroll
                for (int k = 0; k < LANES; k++) a[k] *= b[k];
            }
            if constexpr (HAS_BIAS) {
                weights_of(bias, 1, i, shape, at, b);
#pragma unroll
                for (int k = 0; k < LANES; k++) a[k] += b[k];
            }
            y.store(v, pack<ELEMENT>(a));
        }
        ring.give_back(i, shape, at);
    }
}

PROGRAM norm_streamed(ELEMENT *x, ELEMENT *residual, ELEMENT *y, ELEMENT *sum, const WEIGHT *weight,
                      const WEIGHT *bias, float *means, float *rstds, long long rows, int columns, long long x_stride,
                      long long residual_stride, float eps) {
    __shared__ Mail<Sum> mails[PASSES - 1];
#if RESIDUAL
    const Matrix inputs[INPUTS] = {{x, x_stride}, {residual, residual_stride}};
#else
    const Matrix inputs[INPUTS] = {{x, x_stride}};
#endif
    const Place at(rows);
    const Elements shape(x + at.row * x_stride, columns);
    Ring ring(inputs, shape, at);
    if (KEPT > 0) keep_weights(weight, 0, shape, at);
    if (KEPT > 1) keep_weights(bias, 1, shape, at);
    for (auto &mail : mails) mail.start();
    constexpr int last = (PASSES - 1) * LAG;
    Sum mean = Sum::none(), squares = mean, mean_before = mean, squares_before = mean;
    float centred = 0.f, centred_before = 0.f;
    int slot = 0;
    for (int i = 0; i < at.turns + last; i++) {
        if (i < at.turns) {
            const Elements to = in_result(sum, at.row + i * at.step, shape);
            (CENTERED ? mean : squares).sum = gather(ring, shape, at, to, i < at.rows, 0.f);
            mails[0].post(CENTERED ? mean : squares, i);
        }
        if (CENTERED && i >= LAG && i - LAG < at.turns) {
            centred = mails[0].collect(LAG ? mean_before : mean, i - LAG).sum;
            squares.sum = centre(slot, shape, at, i - LAG < at.rows, centred);
            mails[PASSES - 2].post(squares, i - LAG);
        }
        if (i >= last) {
            const long long row = at.row + (i - last) * at.step;
            const float found = mails[PASSES - 2].collect(LAG ? squares_before : squares, i - last).sum;
            const Normal normal{LAG ? centred_before : centred, rsqrtf(found / columns + eps)};
            if (i - last < at.rows && at.first == 0) {
                if (CENTERED) means[row] = normal.mean;
                rstds[row] = normal.rstd;
            }
            write(ring, shape, at, in_result(y, row, shape), i - last < at.rows, normal, weight, bias);
        }
        mean_before = mean, squares_before = squares, centred_before = centred;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    Mail<Sum>::meet();
}
