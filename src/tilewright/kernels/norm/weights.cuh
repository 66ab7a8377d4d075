// Weights and biases of the columns of a vector.
//
// Defined by whoever compiles: ELEMENT and WEIGHT (float, bf16, fp16), EDGES and LINE as in row.cuh, ALIGNED (1 where
// weight and bias begin on 16 bytes). With ring.cuh before it, also KEPT.
#pragma once
#include "row.cuh"

constexpr int LANES = lanes<ELEMENT>;
using Elements = Row<ELEMENT, EDGES>;

// LANES of them, from an address that is a multiple of 16 bytes or of their size.
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

// From memory: those of the columns `column`, `column + 1`, ... that are columns, 0 for the others.
__device__ __forceinline__ void weights_at(const WEIGHT *from, int column, int columns, float (&to)[LANES]) {
    if constexpr (EDGES == WHOLE && ALIGNED) {
        read_lanes(from + column, to);
    } else {
#pragma unroll
        for (int i = 0; i < LANES; i++)
            to[i] = unsigned(column + i) < unsigned(columns) ? widen(from[column + i]) : 0.f;
    }
}

#ifdef KEPT
// Behind the ring (ring.cuh), each thread's own vectors: weight where KEPT is 1, and bias where it is 2. Others are
// read from memory. `kind`: 0 weight, 1 bias.
__device__ __forceinline__ WEIGHT *kept_vector(int kind, int i) {
    return reinterpret_cast<WEIGHT *>(shared_bytes + RING_BYTES) +
           ((kind * VECTORS + i) * THREADS + int(threadIdx.x)) * LANES;
}
__device__ __forceinline__ void keep_weights(const WEIGHT *from, int kind, const Elements &shape, const Place &at) {
    for (int i = 0; i < VECTORS; i++) {
        const int column = shape.column(at.first + i * STEP);
        for (int k = 0; k < LANES; k++)
            if (unsigned(column + k) < unsigned(shape.columns))
                kept_vector(kind, i)[k] = from[column + k];
            else
                narrow(kept_vector(kind, i)[k], 0.f);
    }
}
__device__ __forceinline__ void weights_of(const WEIGHT *from, int kind, int i, const Elements &shape, const Place &at,
                                           float (&to)[LANES]) {
    if (kind < KEPT)
        read_lanes(kept_vector(kind, i), to);
    else
        weights_at(from, shape.column(at.first + i * STEP), shape.columns, to);
}
#endif
