// Layer norm and RMS norm of rows that a cluster of blocks shares: y = (x - mean) * rstd * weight + bias, or
// x * rstd * weight; with RESIDUAL, of sum = x + residual rounded to the element type, which is written too. Each
// element is read once: a row's vectors stay in registers from the first sum to the last multiplication, and their
// slots are refilled meanwhile.
//
// Limit: DRAM in RMS norm, 0.83 to 0.90 of the bandwidth of a copy on an H200 at 32768 to 262144 columns, bf16 and
// fp32; instructions and the wait for the cluster in layer norm of bf16, 0.61 to 0.74 (fp32: 0.80 to 0.86). Clusters
// of 16 leave 20 of 132 multiprocessors idle. Rows of 50257 columns, whose ends need masks: 0.39 and 0.53 in bf16 when
// half of the threads masked every vector; now the two that hold the ends do, which is unmeasured.
// Lost: every thread merging the parts of all blocks by itself, 0.43 to 0.65 in bf16 layer norm, where lanes that
// share them by shuffles take 0.61 to 0.71; blocks that end after a row, 0.41 to 0.59.

#define INPUTS (1 + RESIDUAL)
#define KEEPS_BIAS HAS_BIAS
#define STREAMED 1
#include "statistics.cuh"

// The row's vectors from their slots, each given back as soon as it is in registers.
__device__ void load_row(Ring& ring, const Place& at, int offset, i64 row, const Matrix& sum, float* values) {
    bool live = row < at.rows;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        bool here = GROUPS > 1 || c * EACH * LANES < at.count;
        if (here) ring.wait_full();
#pragma unroll
        for (int k = c * EACH; k < (c + 1) * EACH; k++) {
            float* own = values + k * VEC;
            load_vector(memory.slots[ring.slot][0], offset, k, at, live, own);
            if constexpr (RESIDUAL) {
                float other[VEC];
                load_vector(memory.slots[ring.slot][1], offset, k, at, live, other);
#pragma unroll
                for (int e = 0; e < VEC; e++) own[e] += other[e];
                round_vector(own);
                if (live) store_vector(sum, row, k, at, own);
            }
        }
        if (here) ring.release(), ring.step();
    }
}

__device__ void write_row(float* values, Statistics found, const Place& at, i64 row, const Matrix& y, float* means,
                          float* rstds) {
    if (at.lane == 0 && at.rank == 0) {
        if (CENTERED) means[row] = found.mean;
        rstds[row] = found.rstd;
    }
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        float scale[VEC], shift[VEC];
        if (HAS_WEIGHT) weight_vector(memory.weight, k, at, scale);
        if (HAS_BIAS) weight_vector(memory.bias, k, at, shift);
        normalise(values + k * VEC, found, scale, shift);
        store_vector(y, row, k, at, values + k * VEC);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS)
    norm_forward(char* x, i64 x_pitch, char* residual, i64 residual_pitch, char* y, char* sum, i64 y_pitch,
            const void* weight, const void* bias, float* means, float* rstds, i64 rows, int columns, float eps) {
    Matrix inputs[2] = {{x, x_pitch}, {residual, residual_pitch}};
    Matrix out{y, y_pitch}, total{sum, y_pitch};
    Place at = place_of(inputs[0], rows, columns);
    open_memory();
    if (HAS_WEIGHT) load_weights(weight, memory.weight, inputs[0], at);
    if (HAS_BIAS) load_weights(bias, memory.bias, inputs[0], at);
    cluster_barrier();
    Feed feed(inputs, at);
    Ring ring;
    Reducer reducer;
    int offset = offset_in_slot(inputs, at);
    float mine = elements(at, at.rank), theirs = elements(at, threadIdx.x % CLUSTER);
    for (i64 first = at.begin(); first < rows; first += at.step()) {
        i64 row = first + at.group;
        float values[OWNED];
        load_row(ring, at, offset, row, total, values);
        Statistics found = CENTERED ? layer_statistics(values, at, reducer, mine, theirs, eps)
                                    : rms_statistics(values, at, reducer, eps);
        for (int begin = 0; begin < (GROUPS > 1 ? 1 : at.count); begin += CHUNK_VECTORS * LANES) feed.next(inputs, at);
        if (row < rows) write_row(values, found, at, row, out, means, rstds);
    }
    cluster_barrier();
}
