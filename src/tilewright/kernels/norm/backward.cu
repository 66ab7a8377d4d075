// Gradients of layer norm and RMS norm. With n = (x - mean) * rstd (or x * rstd), g = dy * weight and averages
// over the row,
//
//     dx = rstd * (g - average(g) - n * average(g * n))        (without average(g) in RMS norm; plus dsum if RESIDUAL)
//     dweight = sum over rows of dy * n,   dbias = sum over rows of dy
//
// x and dy are read from memory once; they wait in their slots between the sums and dx. Each thread keeps the
// partial dweight and dbias of the columns it owns in registers over all its rows; `columns` adds what the
// programs found, in a fixed order, so the gradients are the same at every run.
//
// Limit: DRAM, with instructions close behind for layer norm of bf16. On an H200, of the bandwidth of a copy: fp32
// 0.87 to 0.97 at 256 to 262144 columns; bf16 RMS norm 0.90 to 0.92 up to 65536, 0.79 to 0.84 beyond; bf16 layer norm
// 0.90 to 0.92 up to 8192 columns, falling to 0.66 at 262144; 5000 columns of bf16 0.76 to 0.84; 50257 columns, as in
// forward.cu, 0.34 to 0.76 before the masks were changed.
// Lost: a warp that does nothing but feed the ring, for whose sake 96 registers are left to a thread, of which 64
// hold sums: layer norm of bf16 spills, 0.47 to 0.82; half the columns a thread and 24 warps, 0.70 to 0.77.

#define INPUTS (2 + RESIDUAL)
#define KEEPS_BIAS 0
#define STREAMED 1
#include "stream.cuh"

// What a row's elements are multiplied by, and what is added, to normalise them.
struct Row {
    float rstd, shift;
};

__device__ Row row_of(const float* means, const float* rstds, i64 row, i64 rows) {
    if (row >= rows) return {0.f, 0.f};
    float rstd = __ldg(rstds + row);
    return {rstd, CENTERED ? -__ldg(means + row) * rstd : 0.f};
}

struct Gradients {
    float weight[HAS_WEIGHT ? OWNED : 1], bias[HAS_BIAS ? OWNED : 1];
};

__device__ bool chunk_exists(const Place& at, int chunk) {
    return GROUPS > 1 || chunk * EACH * LANES < at.count;
}

// n and g of this thread's vector k, and dy.
__device__ void normal_and_gradient(const Ring& ring, int offset, int k, const Place& at,
                                    bool live, Row row, float* normal, float* dy, float* gradient) {
    load_vector(memory.slots[ring.slot][0], offset, k, at, live, normal);
    load_vector(memory.slots[ring.slot][1], offset, k, at, live, dy);
    float scale[VEC];
    if (HAS_WEIGHT) weight_vector(memory.weight, k, at, scale);
#pragma unroll
    for (int e = 0; e < VEC; e++) {
        normal[e] = fmaf(normal[e], row.rstd, row.shift);
        gradient[e] = HAS_WEIGHT ? dy[e] * scale[e] : dy[e];
    }
}

// Sums of g and g * n over the row.
__device__ float2 row_sums(Ring ring, Reducer& reducer, int offset, const Place& at, bool live, Row row,
                           Gradients& partial) {
    float2 sums = make_float2(0.f, 0.f);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        if (!chunk_exists(at, c)) break;
        ring.wait_full();
#pragma unroll
        for (int k = c * EACH; k < (c + 1) * EACH; k++) {
            float normal[VEC], dy[VEC], gradient[VEC];
            normal_and_gradient(ring, offset, k, at, live, row, normal, dy, gradient);
#pragma unroll
            for (int e = 0; e < VEC; e++) {
                if (CENTERED) sums.x += gradient[e];
                sums.y = fmaf(gradient[e], normal[e], sums.y);
                if (HAS_WEIGHT) partial.weight[k * VEC + e] = fmaf(dy[e], normal[e], partial.weight[k * VEC + e]);
                if (HAS_BIAS) partial.bias[k * VEC + e] += dy[e];
            }
        }
        ring.step();
    }
    sums = reducer.row_sum(sums);
    if constexpr (CLUSTER > 1) {
        float2 part = reducer.exchange(sums, at.rank);
        sums = make_float2(CENTERED ? Reducer::cluster_sum(part.x) : 0.f, Reducer::cluster_sum(part.y));
    }
    return sums;
}

__device__ void write_row(Ring& ring, Feed& feed, const Matrix* inputs, int offset, const Place& at, i64 index,
                          Row row, float2 sums, const Matrix& dx) {
    bool live = index < at.rows;
    float constant = -row.rstd * (sums.x / at.columns), slope = -row.rstd * (sums.y / at.columns);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        if (!chunk_exists(at, c)) break;
#pragma unroll
        for (int k = c * EACH; k < (c + 1) * EACH; k++) {
            float normal[VEC], dy[VEC], gradient[VEC];
            normal_and_gradient(ring, offset, k, at, live, row, normal, dy, gradient);
#pragma unroll
            for (int e = 0; e < VEC; e++) {
                float off = CENTERED ? fmaf(row.rstd, gradient[e], constant) : row.rstd * gradient[e];
                gradient[e] = fmaf(normal[e], slope, off);
            }
            if constexpr (RESIDUAL) {
                float dsum[VEC];
                load_vector(memory.slots[ring.slot][2], offset, k, at, live, dsum);
#pragma unroll
                for (int e = 0; e < VEC; e++) gradient[e] += dsum[e];
            }
            if (live) store_vector(dx, index, k, at, gradient);
        }
        ring.release();
        ring.step();
        // The other warps have given back the chunk before by now, or nearly so.
        if (c) feed.next(inputs, at);
    }
    feed.next(inputs, at);
}

// Adds the groups' sums of each column and writes this block's columns.
__device__ void write_partial(const float* own, const Matrix& x, const Place& at, float* to) {
    float* room = reinterpret_cast<float*>(memory.slots);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < VECTORS; k++)
#pragma unroll
        for (int e = 0; e < VEC; e++) room[at.group * SLICE + (k * LANES + at.lane) * VEC + e] = own[k * VEC + e];
    __syncthreads();
    int begin = max(0, at.first * VEC - at.head), end = min(at.columns, (at.first + at.count) * VEC - at.head);
    if (GROUPS > 1) begin = 0, end = at.columns;
    for (int column = begin + threadIdx.x; column < end; column += THREADS) {
        float sum = 0.f;
        for (int g = 0; g < GROUPS; g++)
            sum += room[g * SLICE + head_of(x, at.begin() + g) + column - at.first * VEC];
        to[column] = sum;
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS)
    norm_backward(char* x, i64 x_pitch, char* dy, i64 dy_pitch, char* dsum, i64 dsum_pitch, char* dx, i64 dx_pitch,
             const void* weight, const float* means, const float* rstds, float* partial, i64 rows, int columns) {
    Matrix inputs[3] = {{x, x_pitch}, {dy, dy_pitch}, {dsum, dsum_pitch}}, out{dx, dx_pitch};
    Place at = place_of(inputs[0], rows, columns);
    open_memory();
    if (HAS_WEIGHT) load_weights(weight, memory.weight, inputs[0], at);
    cluster_barrier();
    Feed feed(inputs, at);
    Ring ring;
    Reducer reducer;
    int offset = offset_in_slot(inputs, at);
    Gradients sums = {};
    Row next = row_of(means, rstds, at.begin() + at.group, rows);
    for (i64 first = at.begin(); first < rows; first += at.step()) {
        i64 index = first + at.group;
        Row row = next;
        next = row_of(means, rstds, index + at.step(), rows);
        float2 found = row_sums(ring, reducer, offset, at, index < rows, row, sums);
        write_row(ring, feed, inputs, offset, at, index, row, found, out);
    }
    if (HAS_WEIGHT) write_partial(sums.weight, inputs[0], at, partial + (i64)at.program * columns);
    if (HAS_WEIGHT) partial += (i64)at.programs * columns;
    if (HAS_BIAS) write_partial(sums.bias, inputs[0], at, partial + (i64)at.program * columns);
    cluster_barrier();
}
