// Mean and reciprocal standard deviation of a row from its vectors: the mean, then squares about it. Included by
// held.cu and streamed.cu, which define CENTERED (1 layer norm, 0 RMS norm) and what weights.cuh wants.
#pragma once
#include "weights.cuh"

struct Normal {
    float mean, rstd;
};

// Adds x / columns of one vector, what is outside of the row being 0. Divided before they are summed, large values do
// not overflow.
__device__ __forceinline__ float mean_of(uint4 vector, float share, float sum) {
    float x[LANES];
    unpack<ELEMENT>(vector, x);
#pragma unroll
    for (int k = 0; k < LANES; k++) sum = fmaf(x[k], share, sum);
    return sum;
}

// Adds the squares about the mean of vector v of a row, 0 in RMS norm, where what is outside of the row is 0.
__device__ __forceinline__ float squares_of(const Elements &row, int v, uint4 vector, float mean, float sum) {
    float x[LANES];
    unpack<ELEMENT>(vector, x);
    if (CENTERED && row.edge(v)) {
#pragma unroll
        for (int k = 0; k < LANES; k++)
            if (unsigned(row.column(v) + k) >= unsigned(row.columns)) x[k] = mean;
    }
#pragma unroll
    for (int k = 0; k < LANES; k++) {
        const float off = CENTERED ? x[k] - mean : x[k];
        sum = fmaf(off, off, sum);
    }
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
