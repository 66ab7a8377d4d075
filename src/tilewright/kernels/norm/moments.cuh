// What the norms' kernels share: weights of a vector's columns, a row's mean and variance, normalisation.
//
// Macros: ELEMENT and WEIGHT (float, bf16, fp16), ALIGNMENT and LINE as in row.cuh, WEIGHTS_ALIGNED (1: weight and bias
// begin on 16 bytes), CENTERED (1: layer norm, 0: RMS norm).
#pragma once
#include "row.cuh"

constexpr int LANES = lanes<ELEMENT>;
using Elements = Row<ELEMENT, ALIGNMENT>;

// Reads LANES numbers from an address that is a multiple of 16 bytes or of their total size.
template <class Number>
__device__ __forceinline__ void read_lanes(const Number *from, float (&to)[LANES]) {
    constexpr int bytes = LANES * sizeof(Number);
    if constexpr (bytes == 8) {
        const uint2 words = *reinterpret_cast<const uint2 *>(from);
        widen_pair(words.x, to[0], to[1], Number()), widen_pair(words.y, to[2], to[3], Number());
    } else {
#pragma unroll
        for (int half = 0; half < bytes / 16; half++) {
            float part[lanes<Number>];
            unpack<Number>(reinterpret_cast<const uint4 *>(from)[half], part);
#pragma unroll
            for (int i = 0; i < lanes<Number>; i++) to[half * lanes<Number> + i] = part[i];
        }
    }
}

// Weights from memory of columns `column`, `column + 1`, ...; 0 outside of the row.
__device__ __forceinline__ void weights_at(const WEIGHT *from, int column, int columns, float (&to)[LANES]) {
    if constexpr (ALIGNMENT == ALIGNED && WEIGHTS_ALIGNED) {
        read_lanes(from + column, to);
    } else {
#pragma unroll
        for (int i = 0; i < LANES; i++)
            to[i] = unsigned(column + i) < unsigned(columns) ? widen(from[column + i]) : 0.f;
    }
}

struct Statistics {
    float mean, rstd;
};

// For a row of equal 16-bit values rstd is rounded to 13 binary digits: its product with a value of 11 digits is exact,
// so that fmaf(x, rstd, -mean * rstd) is 0. rstd moves by 2^-13.
__device__ __forceinline__ float rstd_of(float variance, float eps) {
    const float rstd = rsqrtf(variance + eps);
    if (!CENTERED || sizeof(ELEMENT) == 4 || variance != 0.f) return rstd;
    return __uint_as_float((__float_as_uint(rstd) + 0x400) & ~0x7ffu);
}

// Adds x / columns of a vector, whose lanes outside of the row are 0. Divided before summing: large values do not
// overflow.
__device__ __forceinline__ float add_mean(uint4 vector, float share, float sum) {
    float x[LANES];
    unpack<ELEMENT>(vector, x);
#pragma unroll
    for (int k = 0; k < LANES; k++) sum = fmaf(x[k], share, sum);
    return sum;
}

// x - mean (RMS norm: x) of vector v of a row; 0 outside of the row.
__device__ __forceinline__ void centered(const Elements &row, int v, uint4 vector, float mean, float (&x)[LANES]) {
    unpack<ELEMENT>(vector, x);
    if (CENTERED && row.is_partial(v)) {
#pragma unroll
        for (int k = 0; k < LANES; k++)
            if (unsigned(row.column(v) + k) >= unsigned(row.columns)) x[k] = mean;
    }
    if (CENTERED) {
#pragma unroll
        for (int k = 0; k < LANES; k++) x[k] -= mean;
    }
}

// Adds the squares of what `centered` gives.
__device__ __forceinline__ float add_squares(const Elements &row, int v, uint4 vector, float mean, float sum) {
    float x[LANES];
    centered(row, v, vector, mean, x);
#pragma unroll
    for (int k = 0; k < LANES; k++) sum = fmaf(x[k], x[k], sum);
    return sum;
}

__device__ __forceinline__ void normalise(float (&x)[LANES], Statistics found) {
#pragma unroll
    for (int k = 0; k < LANES; k++) x[k] = (CENTERED ? x[k] - found.mean : x[k]) * found.rstd;
}

// x + residual, rounded to the element type.
__device__ __forceinline__ uint4 add_residual(uint4 one, uint4 other) {
    float a[LANES], b[LANES];
    unpack<ELEMENT>(one, a);
    unpack<ELEMENT>(other, b);
#pragma unroll
    for (int k = 0; k < LANES; k++) a[k] += b[k];
    return pack<ELEMENT>(a);
}
