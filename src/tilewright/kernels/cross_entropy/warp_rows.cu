// Cross entropy forward over rows that lanes of a warp hold at once.
//
// ROW_THREADS lanes have a row at a time, VECTORS vectors of 16 bytes a lane, and load the next while they reduce it.
// Label, logarithm, loss and statistics are done once for ROW_THREADS rows, one row a lane: 2 instructions of a warp a
// row instead of 21.
//
// Macros: those of a schedule (row_schedule.py), ELEMENT (float, bf16, fp16), SMOOTH (1: labels are smoothed).
//
// Limit: DRAM, and instructions at 512 bytes a row. H200, of a copy's bandwidth, bf16: 0.95 at 256 columns, 0.98 at
// 512, 1.01 at 1024.
#include "loss_sum.cuh"

constexpr int LANES = lanes<ELEMENT>;
constexpr int ROWS_PER_BLOCK = THREADS / ROW_THREADS;
using Elements = Row<ELEMENT, ALIGNMENT>;
constexpr bool FILLED = WHOLE_VECTORS == VECTORS;  // every lane has all of its vectors, and whole

struct Max {
    float most;
    __device__ __forceinline__ void combine(Max other) { most = fmaxf(most, other.most); }
};

// The reduction of a row; the sum of the logits is for smoothing.
struct RowSum {
    float maximum, sum, logits;
};

__device__ __forceinline__ void load(const Elements &row, int first, uint4 (&loaded)[VECTORS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = first + i * ROW_THREADS;
        // Past the end: the row's last vector again.
        loaded[i] = row.load(FILLED ? v : min(v, row.vectors - 1));
    }
}

// 16-bit elements are compared in pairs before any is widened.
template <class T>
__device__ __forceinline__ float max_of(const uint4 (&vectors)[VECTORS]) {
    ElementMax<T> element_max;
    if constexpr (sizeof(T) == 2) {
        uint4 most = vectors[0];
#pragma unroll
        for (int i = 1; i < VECTORS; i++) {
            most.x = element_max.max_pair(most.x, vectors[i].x, T());
            most.y = element_max.max_pair(most.y, vectors[i].y, T());
            most.z = element_max.max_pair(most.z, vectors[i].z, T());
            most.w = element_max.max_pair(most.w, vectors[i].w, T());
        }
        element_max.update(most);
    } else {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) element_max.update(vectors[i]);
    }
    return element_max.value;
}

// With the maximum known first, no exponential is taken twice.
__device__ __forceinline__ RowSum reduce_row(const Elements &row, int first, uint4 (&loaded)[VECTORS]) {
    if constexpr (!FILLED) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int v = first + i * ROW_THREADS;
            loaded[i] = row.holds(v) ? row.masked(v, loaded[i], minus_infinity()) : Elements::filled(minus_infinity());
        }
    }
    const float maximum = reduce_lanes<ROW_THREADS>(Max{max_of<ELEMENT>(loaded)}).most;
    // Two accumulators, for shorter dependent chains.
    float sums[2] = {0.f, 0.f}, logits = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        float a[LANES];
        unpack<ELEMENT>(loaded[i], a);
#pragma unroll
        for (int k = 0; k < LANES; k++) sums[k % 2] += exp2_approx((a[k] - maximum) * LOG2E);
#if SMOOTH
#pragma unroll
        for (int k = 0; k < LANES; k++)
            if (unsigned(row.column(first + i * ROW_THREADS) + k) < unsigned(row.columns)) logits += a[k];
#endif
    }
    const float sum = reduce_lanes<ROW_THREADS>(Sum{sums[0] + sums[1]}).sum;
    return {maximum, sum, SMOOTH ? reduce_lanes<ROW_THREADS>(Sum{logits}).sum : 0.f};
}

// `statistics` gets each row's maximum, then each row's log sum exp(x - maximum): kept apart, for their sum would lose
// the digits that backward needs. `losses` gets each row's loss if it is not null. A label that is no column makes the
// loss NaN, and nothing outside of the row is read.
ROW_KERNEL(THREADS)
forward(const ELEMENT *logits, const long long *target, ELEMENT *losses, float *statistics, LossSum *block_sums,
            long long rows, int columns, long long stride, long long ignored, float smoothing, float z_loss) {
    const int lane = threadIdx.x % ROW_THREADS;
    const long long step = (long long)gridDim.x * ROWS_PER_BLOCK, begin = (long long)blockIdx.x * ROWS_PER_BLOCK;
    const long long start = begin + threadIdx.x / ROW_THREADS;
    // Rows that share a warp shuffle together, so all take as many turns as the block's first.
    const int turns = int((rows - begin + step - 1) / step);
    const auto row_of = [&](int turn) { return start + turn * step; };
    const auto label_of = [&](long long row) { return row < rows ? target[row] : ignored; };
    const ELEMENT *const end = logits + (rows - 1) * stride, *place = logits + start * stride;
    // Past the last row: that row again.
    const auto row_at = [&](const ELEMENT *from) { return Elements(from < end ? from : end, columns); };
    long long label = label_of(row_of(lane));
    RowSum found{0.f, 1.f, 0.f};  // of the row that this lane will finish
    float wanted = 0.f;
    LossSum total{0.f, 0.f};
    Elements row = row_at(place);
    uint4 some[VECTORS], others[VECTORS];
    load(row, lane, some);
    const auto accumulate = [&](int number, uint4 (&now)[VECTORS], uint4 (&ahead)[VECTORS]) {
        place += step * stride;
        const Elements next = row_at(place);
        load(next, lane, ahead);
        const RowSum here = reduce_row(row, lane, now);
        if (lane == number) {
            found = here;
            wanted = label >= 0 && label < columns ? widen(row.base[row.head + int(label)]) : not_a_number();
        }
        row = next;
    };
    const auto finish = [&](long long number) {
        const float log_sum = logf(found.sum);
        float loss = 0.f;
        if (label != ignored) {
            loss = log_sum - (wanted - found.maximum);
#if SMOOTH
            loss = (1.f - smoothing) * loss + smoothing * (log_sum - (found.logits / columns - found.maximum));
#endif
            loss += z_loss * (found.maximum + log_sum) * (found.maximum + log_sum);
            total.combine({loss, 1.f});
        }
        if (losses) narrow(losses[number], loss);
        statistics[number] = found.maximum;
        statistics[rows + number] = log_sum;
    };
#pragma unroll 1
    for (int turn = 0; turn < turns; turn += ROW_THREADS) {
        const long long next_label = label_of(row_of(turn + ROW_THREADS + lane));
        const int count = min(ROW_THREADS, turns - turn);
#pragma unroll 1
        for (int i = 0; i < count - 1; i += 2) accumulate(i, some, others), accumulate(i + 1, others, some);
        // An odd last turn. A branch inside the pair would make its loads wait.
        if (count % 2) accumulate(count - 1, some, others);
        if (lane < count && row_of(turn + lane) < rows) finish(row_of(turn + lane));
        label = next_label;
    }
    write_block_sum(total, block_sums);
}
