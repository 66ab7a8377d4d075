// Mean and reciprocal standard deviation of a row from its vectors: the mean, then squares about it; or the mean and
// the mean square at once. Included by held.cu and streamed.cu, which define CENTERED (1 layer norm, 0 RMS norm) and
// what weights.cuh wants.
#pragma once
#include "weights.cuh"

struct Normal {
    float mean, rstd;
};

// Mean and mean square of a row, or what a thread found of them.
struct Moments {
    float mean, square;
    static __device__ __forceinline__ Moments none() { return {0.f, 0.f}; }
    __device__ __forceinline__ void join(Moments other) { mean += other.mean, square += other.square; }
};

// Squared mean over variance up to which the mean square tells the variance to within 2^-13 in 16 bits, 2^-21 in 32.
constexpr float CANCELS = sizeof(ELEMENT) == 4 ? 4.f : 1024.f;

// Of a row of one value in 16 bits (11 digits), 13 digits, so that their product is not rounded: x * rstd less
// mean * rstd, as a multiply-add here and in backward_wide.cu, is 0 then. rstd itself moves by 2^-13.
__device__ __forceinline__ float rstd_of(float variance, float eps) {
    const float rstd = rsqrtf(variance + eps);
    if (!CENTERED || sizeof(ELEMENT) == 4 || variance != 0.f) return rstd;
    return __uint_as_float((__float_as_uint(rstd) + 0x400) & ~0x7ffu);
}

// Adds x / columns of one vector, what is outside of the row being 0. Divided before they are summed, large values do
// not overflow.
__device__ __forceinline__ float mean_of(uint4 vector, float share, float sum) {
    float x[LANES];
    unpack<ELEMENT>(vector, x);
#pragma unroll
    for (int k = 0; k < LANES; k++) sum = fmaf(x[k], share, sum);
    return sum;
}

// x less the mean, or x in RMS norm, of vector v of a row; 0 outside of the row, where x is 0.
__device__ __forceinline__ void centred(const Elements &row, int v, uint4 vector, float mean, float (&x)[LANES]) {
    unpack<ELEMENT>(vector, x);
    if (CENTERED && row.edge(v)) {
#pragma unroll
        for (int k = 0; k < LANES; k++)
            if (unsigned(row.column(v) + k) >= unsigned(row.columns)) x[k] = mean;
    }
    if (CENTERED) {
#pragma unroll
        for (int k = 0; k < LANES; k++) x[k] -= mean;
    }
}

// Adds the squares of those.
__device__ __forceinline__ float squares_of(const Elements &row, int v, uint4 vector, float mean, float sum) {
    float x[LANES];
    centred(row, v, vector, mean, x);
#pragma unroll
    for (int k = 0; k < LANES; k++) sum = fmaf(x[k], x[k], sum);
    return sum;
}

__device__ __forceinline__ void normalise(float (&x)[LANES], Normal found) {
#pragma unroll
    for (int k = 0; k < LANES; k++) x[k] = (CENTERED ? x[k] - found.mean : x[k]) * found.rstd;
}

// x + residual, rounded to the element type.
__device__ __forceinline__ uint4 sum_of(uint4 one, uint4 other) {
    float a[LANES], b[LANES];
    unpack<ELEMENT>(one, a);
    unpack<ELEMENT>(other, b);
#pragma unroll
    for (int k = 0; k < LANES; k++) a[k] += b[k];
    return pack<ELEMENT>(a);
}
