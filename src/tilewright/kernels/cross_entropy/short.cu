// Cross entropy forward over rows that lanes of a warp hold at once.
//
// WIDTH lanes, a team, have a row at a time, VECTORS vectors of 16 bytes a lane, and load the next while they work on
// it. What ends a row (label, logarithm, loss, statistics) waits until each lane of the team has a row to end, lane 0
// the first, lane 1 the second, and so on: it costs a row 2 instructions of a warp instead of 21.
//
// Defined by whoever compiles: ELEMENT (float, bf16, fp16), EDGES, LINE, THREADS (a block), WIDTH (32 or fewer),
// VECTORS, BLOCKS (that a multiprocessor must hold at once: bounds the registers), SMOOTH (1 where labels are
// smoothed), FULL (1 where every row is WHOLE and has WIDTH * VECTORS vectors).
#include "total.cuh"

constexpr int LANES = lanes<ELEMENT>;
constexpr int TEAMS = THREADS / WIDTH;  // of a block
using Elements = Row<ELEMENT, EDGES>;

struct Most {
    float most;
    __device__ __forceinline__ void join(Most other) { most = fmaxf(most, other.most); }
};

// What a team finds in a row; the sum of the logits is for smoothing.
struct Found {
    float maximum, sum, logits;
};

__device__ __forceinline__ void load(const Elements &row, int first, uint4 (&loaded)[VECTORS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = first + i * WIDTH;
        // Beyond the row's last vector, that one again.
        loaded[i] = row.load(FULL ? v : min(v, row.vectors - 1));
    }
}

// Of narrow elements most are compared before any is widened.
template <class T>
__device__ __forceinline__ float greatest_of(const uint4 (&vectors)[VECTORS]) {
    Greatest<T> greatest;
    if constexpr (sizeof(T) == 2) {
        uint4 most = vectors[0];
#pragma unroll
        for (int i = 1; i < VECTORS; i++) {
            most.x = greatest.greater_pair(most.x, vectors[i].x, T());
            most.y = greatest.greater_pair(most.y, vectors[i].y, T());
            most.z = greatest.greater_pair(most.z, vectors[i].z, T());
            most.w = greatest.greater_pair(most.w, vectors[i].w, T());
        }
        greatest.see(most);
    } else {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) greatest.see(vectors[i]);
    }
    return greatest.most;
}

// With the maximum known first, no exponential is taken twice.
__device__ __forceinline__ Found look_at(const Elements &row, int first, uint4 (&loaded)[VECTORS]) {
    if constexpr (!FULL) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int v = first + i * WIDTH;
            loaded[i] = row.holds(v) ? row.inside(v, loaded[i], minus_infinity()) : Elements::full_of(minus_infinity());
        }
    }
    const float maximum = across_lanes<WIDTH>(Most{greatest_of<ELEMENT>(loaded)}).most;
    // Two sums, so that additions wait less for additions.
    float sums[2] = {0.f, 0.f}, logits = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        float a[LANES];
        unpack<ELEMENT>(loaded[i], a);
#pragma unroll
        for (int k = 0; k < LANES; k++) sums[k % 2] += power_of_two((a[k] - maximum) * LOG2E);
#if SMOOTH
#pragma unroll
        for (int k = 0; k < LANES; k++)
            if (unsigned(row.column(first + i * WIDTH) + k) < unsigned(row.columns)) logits += a[k];
#endif
    }
    const float sum = across_lanes<WIDTH>(Sum{sums[0] + sums[1]}).sum;
    return {maximum, sum, SMOOTH ? across_lanes<WIDTH>(Sum{logits}).sum : 0.f};
}

// `statistics` gets each row's maximum, then each row's log sum exp(x - maximum): kept apart, for their sum would lose
// the digits that backward needs. `losses` gets each row's loss if it is not null. A label that is no column makes the
// loss NaN, and nothing outside of the row is read.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    forward(const ELEMENT *logits, const long long *target, ELEMENT *losses, float *statistics, Total *shares,
            long long rows, int columns, long long stride, long long ignored, float smoothing, float z_loss) {
    const int lane = threadIdx.x % WIDTH;
    const long long step = (long long)gridDim.x * TEAMS, begin = (long long)blockIdx.x * TEAMS;
    const long long start = begin + threadIdx.x / WIDTH;
    // Teams of a warp shuffle together, so all take the turns of the block's first.
    const int turns = int((rows - begin + step - 1) / step);
    const auto row_of = [&](int turn) { return start + turn * step; };
    const auto label_of = [&](long long row) { return row < rows ? target[row] : ignored; };
    const ELEMENT *const end = logits + (rows - 1) * stride, *place = logits + start * stride;
    // Beyond the last row, that row again.
    const auto row_at = [&](const ELEMENT *from) { return Elements(from < end ? from : end, columns); };
    long long label = label_of(row_of(lane));
    Found found{0.f, 1.f, 0.f};  // in the row that this lane will end
    float wanted = 0.f;
    Total total{0.f, 0.f};
    Elements row = row_at(place);
    uint4 some[VECTORS], others[VECTORS];
    load(row, lane, some);
    const auto take = [&](int number, uint4 (&now)[VECTORS], uint4 (&ahead)[VECTORS]) {
        place += step * stride;
        const Elements next = row_at(place);
        load(next, lane, ahead);
        const Found here = look_at(row, lane, now);
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
            total.join({loss, 1.f});
        }
        if (losses) narrow(losses[number], loss);
        statistics[number] = found.maximum;
        statistics[rows + number] = log_sum;
    };
#pragma unroll 1
    for (int turn = 0; turn < turns; turn += WIDTH) {
        const long long next_label = label_of(row_of(turn + WIDTH + lane));
        const int count = min(WIDTH, turns - turn);
#pragma unroll 1
        for (int i = 0; i < count - 1; i += 2) take(i, some, others), take(i + 1, others, some);
        // The last turn of all may be the first of a pair. A branch around the second would have its loads wait for it.
        if (count % 2) take(count - 1, some, others);
        if (lane < count && row_of(turn + lane) < rows) finish(row_of(turn + lane));
        label = next_label;
    }
    leave_share(total, shares);
}
