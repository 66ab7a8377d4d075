// Layer norm and RMS norm of rows that one block holds: as forward.cu, but a block does one tile and ends, and the
// vectors go from memory straight to registers. Many short blocks keep memory busier than a few that stay.
//
// Limit: DRAM. On an H200, of the bandwidth of a copy, at 1024 to 16384 columns: RMS norm 0.94 to 0.96 in bf16 and
// fp32, layer norm 0.93 to 0.96, but in bf16 0.88 at 5000 columns and 0.91 at 16384. Lost: the ring of forward.cu at
// these lengths, 0.87 to 0.90 whatever the depth of the ring, the blocks or hints to the L2; two vectors a thread and
// more threads, 0.75 to 0.82; a cluster for each row without a ring, 0.50 to 0.59.

#define INPUTS (1 + RESIDUAL)
#define KEEPS_BIAS HAS_BIAS
#define STREAMED 0
#include "statistics.cuh"

// All vectors of this thread are on their way before the first is used. What is not the row's becomes 0.
__device__ void fetch(const Matrix& x, i64 row, const Place& at, uint4* raw) {
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        raw[k] = make_uint4(0, 0, 0, 0);
        if (row >= at.rows || !at.holds(k)) continue;
        const char* from = x.row(row) + (i64)at.column(k) * SIZE;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(raw[k].x), "=r"(raw[k].y), "=r"(raw[k].z), "=r"(raw[k].w) : "l"(from));
    }
}

__device__ void widen(const uint4& raw, int k, const Place& at, float* to) {
    read<ELEMENT, VEC>(reinterpret_cast<const char*>(&raw), to);
    mask_vector(to, k, at, 0.f);
}

__device__ void load_row(const Matrix& x, const Matrix& residual, const Matrix& sum, i64 row, const Place& at,
                         float* values) {
    uint4 raw[VECTORS], other[VECTORS];
    fetch(x, row, at, raw);
    if (RESIDUAL) fetch(residual, row, at, other);
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        float* own = values + k * VEC;
        widen(raw[k], k, at, own);
        if constexpr (RESIDUAL) {
            float more[VEC];
            widen(other[k], k, at, more);
#pragma unroll
            for (int e = 0; e < VEC; e++) own[e] += more[e];
            round_vector(own);
            if (row < at.rows) store_vector(sum, row, k, at, own);
        }
    }
}

// The weights of a vector, from the cache; a ragged row's do not begin at 16 bytes.
__device__ void weights_at(const void* from, int column, const Place& at, float* to) {
    if constexpr (!RAGGED) {
        read<WEIGHT, VEC>(static_cast<const char*>(from) + (i64)column * WEIGHT_SIZE, to);
    } else {
#pragma unroll
        for (int e = 0; e < VEC; e++) to[e] = at.inside(column + e) ? read_one<WEIGHT>(from, column + e) : 0.f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    norm_direct(char* x, i64 x_pitch, char* residual, i64 residual_pitch, char* y, char* sum, i64 y_pitch,
                const void* weight, const void* bias, float* means, float* rstds, i64 rows, int columns, float eps) {
    Matrix in{x, x_pitch}, out{y, y_pitch};
    Place at = place_of(in, rows, columns);
    Reducer reducer;
    i64 row = at.begin() + at.group;
    float values[OWNED];
    load_row(in, {residual, residual_pitch}, {sum, y_pitch}, row, at, values);
    Statistics found = CENTERED ? layer_statistics(values, at, reducer, columns, columns, eps)
                                : rms_statistics(values, at, reducer, eps);
    if (row >= rows) return;
    if (at.lane == 0) {
        if (CENTERED) means[row] = found.mean;
        rstds[row] = found.rstd;
    }
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        if (!at.holds(k)) continue;
        float scale[VEC], shift[VEC];
        if (HAS_WEIGHT) weights_at(weight, at.column(k), at, scale);
        if (HAS_BIAS) weights_at(bias, at.column(k), at, shift);
        normalise(values + k * VEC, found, scale, shift);
        store_vector(out, row, k, at, values + k * VEC);
    }
}
