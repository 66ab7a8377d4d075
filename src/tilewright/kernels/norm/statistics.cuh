// Mean and reciprocal standard deviation of a row whose elements the threads hold in registers.
//
// The variance is exact in two passes over the registers: the block's own mean, then squares about it; blocks of
// a cluster merge (mean, squares) by Chan, Golub and LeVeque's rule in one exchange.

#include "stream.cuh"

// Elements of a row that the block of that rank holds.
__device__ int elements(const Place& at, int rank) {
    int vectors = (at.head + at.columns + VEC - 1) / VEC, share = (vectors + CLUSTER - 1) / CLUSTER;
    int begin = max(0, rank * share * VEC - at.head);
    int end = min(at.columns, min(vectors, (rank + 1) * share) * VEC - at.head);
    return max(0, end - begin);
}

struct Statistics {
    float mean, rstd;
};

// `mine`: elements that this block holds; `theirs`: that block threadIdx.x % CLUSTER of the cluster holds.
__device__ Statistics layer_statistics(float* values, const Place& at, Reducer& reducer, float mine, float theirs,
                                       float eps) {
    // Divided before they are summed, large values do not overflow.
    float share = mine ? 1.f / mine : 0.f, sum = 0.f;
#pragma unroll
    for (int i = 0; i < OWNED; i++) sum = fmaf(values[i], share, sum);
    float mean = reducer.row_sum(make_float2(sum, 0.f)).x;
    float squares = 0.f;
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        mask_vector(values + k * VEC, k, at, mean);
        if (!at.holds(k)) continue;
#pragma unroll
        for (int e = 0; e < VEC; e++) {
            float off = values[k * VEC + e] - mean;
            squares = fmaf(off, off, squares);
        }
    }
    squares = reducer.row_sum(make_float2(squares, 0.f)).x;
    if constexpr (CLUSTER > 1) {
        float2 part = reducer.exchange(make_float2(mean, squares), at.rank);
        mean = Reducer::cluster_sum(part.x * (theirs / at.columns));
        float off = part.x - mean;
        squares = Reducer::cluster_sum(part.y + off * off * theirs);
    }
    return {mean, rsqrtf(squares / at.columns + eps)};
}

__device__ Statistics rms_statistics(const float* values, const Place& at, Reducer& reducer, float eps) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < OWNED; i++) sum = fmaf(values[i], values[i], sum);
    sum = reducer.row_sum(make_float2(sum, 0.f)).x;
    if constexpr (CLUSTER > 1) sum = Reducer::cluster_sum(reducer.exchange(make_float2(sum, 0.f), at.rank).x);
    return {0.f, rsqrtf(sum / at.columns + eps)};
}

__device__ void normalise(float* values, Statistics found, const float* scale, const float* shift) {
#pragma unroll
    for (int e = 0; e < VEC; e++) {
        values[e] = (values[e] - found.mean) * found.rstd;
        if (HAS_WEIGHT) values[e] *= scale[e];
        if (HAS_BIAS) values[e] += shift[e];
    }
}
