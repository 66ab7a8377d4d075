// Cross entropy over rows of logits: forward reads them once and keeps two numbers a row, backward reads them once more
// and writes their gradient.
//
// Macros: those of a schedule (row_schedule.py), ELEMENT (float, bf16, fp16), SMOOTH (1: labels are smoothed), and
// GRADIENT, the type of the loss and of its gradient.
//
// Limit: DRAM. H200, of a copy's bandwidth, bf16: forward 0.99 to 1.02 from 4096 columns on, 0.97 at 50257; backward
// 0.98 to 1.01.
#include "row.cuh"

constexpr int LANES = lanes<ELEMENT>;
constexpr int ROWS_PER_BLOCK = THREADS / ROW_THREADS;
using Elements = Row<ELEMENT, ALIGNMENT>;

// What smoothing needs beside the maximum and the sum of exponentials: the sum of the logits.
struct Statistics {
    MaxSum exponentials;
    Sum logits;
    __device__ __forceinline__ void combine(Statistics other) {
        exponentials.combine(other.exponentials);
        logits.combine(other.logits);
    }
};
#if SMOOTH
using State = Statistics;
__device__ __forceinline__ MaxSum &exponentials(State &state) { return state.exponentials; }
#else
using State = MaxSum;
__device__ __forceinline__ MaxSum &exponentials(State &state) { return state; }
#endif

// The sum and count of losses.
struct LossSum {
    float loss, count;
    __device__ __forceinline__ void combine(LossSum other) { loss += other.loss, count += other.count; }
};

struct Reader {
    const ELEMENT *logits;
    long long rows, stride;
    int columns;
    __device__ __forceinline__ Elements row(long long number) const {
        return Elements(logits + number * stride, number < rows ? columns : 0);
    }
    __device__ __forceinline__ void load(long long number, int first, uint4 (&loaded)[VECTORS]) const {
        const Elements in = row(number);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int v = first + i * ROW_THREADS;
            loaded[i] = in.holds(v) ? in.load(v) : Elements::filled(minus_infinity());
        }
    }
    // A label that is no column makes the loss NaN, and nothing outside of the row is read.
    __device__ __forceinline__ float wanted(long long number, long long label) const {
        return label >= 0 && label < columns ? widen(logits[number * stride + label]) : not_a_number();
    }
};

// Masks lanes outside of the row; returns the maximum of the others and `most`.
__device__ __forceinline__ float max_of(const Elements &in, int first, uint4 (&loaded)[VECTORS], float most) {
    ElementMax<ELEMENT> element_max{most};
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = first + i * ROW_THREADS;
        if (in.holds(v)) loaded[i] = in.masked(v, loaded[i], minus_infinity());
        element_max.update(loaded[i]);
    }
    return element_max.value;
}

// Adds the vectors to `state`.
__device__ __forceinline__ void accumulate(const Elements &in, int first, uint4 (&loaded)[VECTORS], State &state) {
    MaxSum &sum = exponentials(state);
    const float most = max_of(in, first, loaded, sum.max);
    sum.sum *= exp2_approx((sum.max - most) * LOG2E);
    sum.max = most;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        float a[LANES];
        unpack<ELEMENT>(loaded[i], a);
#pragma unroll
        for (int k = 0; k < LANES; k++) sum.sum += exp2_approx((a[k] - sum.max) * LOG2E);
#if SMOOTH
        const int v = first + i * ROW_THREADS;
#pragma unroll
        for (int k = 0; k < LANES; k++)
            if (unsigned(in.column(v) + k) < unsigned(in.columns)) state.logits.sum += a[k];
#endif
    }
}

// ROW_THREADS threads go through rows, loading the next vectors while they reduce the last.
//
// `statistics` gets each row's maximum, then each row's log sum exp(x - maximum): kept apart, for their sum
// would lose the digits that backward needs. `losses` gets each row's loss if it is not null, `block_sums` each block's
// sum and count of losses.
ROW_KERNEL(THREADS)
forward(const ELEMENT *logits, const long long *target, ELEMENT *losses, float *statistics, LossSum *block_sums,
            long long rows, int columns, long long stride, long long ignored, float smoothing, float z_loss) {
    __shared__ RowReduce<THREADS, 1, State> row_reduce;
    const Reader reader{logits, rows, stride, columns};
    const int lane = threadIdx.x % ROW_THREADS;
    const long long step = (long long)gridDim.x * ROWS_PER_BLOCK;
    const long long start = (long long)blockIdx.x * ROWS_PER_BLOCK + threadIdx.x / ROW_THREADS;
    const int rounds = (Elements::most_vectors(columns) + VECTORS * ROW_THREADS - 1) / (VECTORS * ROW_THREADS);
    uint4 ahead[VECTORS];
    reader.load(start, lane, ahead);
    const bool is_leader = lane == 0;
    long long label = is_leader && start < rows ? target[start] : ignored;
    float wanted = label != ignored ? reader.wanted(start, label) : 0.f;
    LossSum total{0.f, 0.f};
    unsigned number = 0;
    // Rows that share a warp shuffle together, so all go on until the block's first has ended.
    for (long long first = (long long)blockIdx.x * ROWS_PER_BLOCK; first < rows; first += step) {
        const long long row = first + threadIdx.x / ROW_THREADS, next = row + step;
        const Elements in = reader.row(row);
        const long long next_label = is_leader && next < rows ? target[next] : ignored;
        State state{};
        exponentials(state).max = LOWEST;
        for (int round = 0; round < rounds; round++) {
            uint4 loaded[VECTORS];
#pragma unroll
            for (int i = 0; i < VECTORS; i++) loaded[i] = ahead[i];
            const bool last = round == rounds - 1;
            reader.load(last ? next : row, last ? lane : (round + 1) * VECTORS * ROW_THREADS + lane, ahead);
            accumulate(in, round * VECTORS * ROW_THREADS + lane, loaded, state);
        }
        const float next_wanted = next_label != ignored ? reader.wanted(next, next_label) : 0.f;
        if constexpr (ROW_THREADS > 32)
            state = row_reduce(state, number++);
        else
            state = reduce_lanes<ROW_THREADS>(state);
        if (is_leader && row < rows) {
            const float maximum = exponentials(state).max, log_sum = logf(exponentials(state).sum);
            float loss = 0.f;
            if (label != ignored) {
                loss = log_sum - (wanted - maximum);
#if SMOOTH
                loss = (1.f - smoothing) * loss + smoothing * (log_sum - (state.logits.sum / columns - maximum));
#endif
                loss += z_loss * (maximum + log_sum) * (maximum + log_sum);
                total.combine({loss, 1.f});
            }
            if (losses) narrow(losses[row], loss);
            statistics[row] = maximum;
            statistics[rows + row] = log_sum;
        }
        label = next_label, wanted = next_wanted;
    }
    __shared__ RowReduce<THREADS, 1, LossSum> totals;
    total = totals(total, 0);
    if (threadIdx.x == 0) block_sums[blockIdx.x] = total;
}

// One block adds the sums of `count` blocks: `total` gets the sum of the losses, or their mean over the rows
// that are not ignored (NaN where there are none, as PyTorch has it), `weight` what one row counts for.
extern "C" __global__ void __launch_bounds__(THREADS)
    finish(const LossSum *block_sums, int count, ELEMENT *total, float *weight, int mean) {
    __shared__ RowReduce<THREADS, 1, LossSum> totals;
    LossSum sum{0.f, 0.f};
    for (int i = threadIdx.x; i < count; i += THREADS) sum.combine(block_sums[i]);
    sum = totals(sum, 0);
    if (threadIdx.x == 0) {
        *weight = mean ? 1.f / sum.count : 1.f;
        narrow(*total, mean ? sum.loss / sum.count : sum.loss);
    }
}

// One block for each `VECTORS * ROW_THREADS` vectors of a row (several short rows); `gradient` moves by
// `gradient_stride` from row to row: 0 where the losses were added up.
extern "C" __global__ void __launch_bounds__(THREADS)
    backward(const ELEMENT *logits, const long long *target, const float *statistics, const GRADIENT *gradient,
             const float *weight, ELEMENT *out, long long rows, int columns, int pieces, long long stride,
             long long out_stride, long long gradient_stride, long long ignored, float smoothing, float z_loss) {
    const long long row = (long long)(blockIdx.x / pieces) * (THREADS / ROW_THREADS) + threadIdx.x / ROW_THREADS;
    if (row >= rows) return;
    const int first = blockIdx.x % pieces * VECTORS * ROW_THREADS + threadIdx.x % ROW_THREADS;
    const Elements result(out + row * out_stride, columns), in(logits + row * stride, result);
    const long long label = target[row];
    uint4 loaded[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (in.holds(first + i * ROW_THREADS) && label != ignored) loaded[i] = in.load(first + i * ROW_THREADS);
    const float maximum = statistics[row], log_sum = statistics[rows + row];
    const bool known = label >= 0 && label < columns;
    const float scale = known ? widen(gradient[row * gradient_stride]) * *weight : not_a_number();
    // exp(x - maximum) exp(-log_sum): the exponent of one exponential would be larger, and so would its rounding.
    const float inverse_sum = expf(-log_sum);
    const float squared = scale * 2.f * z_loss * (maximum + log_sum) * inverse_sum, scaled_inverse = scale * inverse_sum;
    // Without cancellation; with a single class, hit is all of the scale.
    const float miss = scale * smoothing / columns, hit = scale * (1.f - smoothing + smoothing / columns);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int v = first + i * ROW_THREADS;
        if (!in.holds(v)) continue;
        float a[LANES];
        if (label == ignored) {
            // NaN where PyTorch has it: in rows of NaN, +inf, or nothing but -inf.
#pragma unroll
            for (int k = 0; k < LANES; k++) a[k] = log_sum - log_sum;
            result.store(v, pack<ELEMENT>(a));
            continue;
        }
        unpack<ELEMENT>(loaded[i], a);
        const long long at = label - in.column(v);
#pragma unroll
        for (int k = 0; k < LANES; k++) {
            const float exponential = exp2_approx((a[k] - maximum) * LOG2E);
            a[k] = scaled_inverse * exponential;
            if (at == k)
                a[k] -= hit;
            else if (SMOOTH)
                a[k] -= miss;
            // Added last: where one class has all of the probability, only this is left.
            a[k] += squared * exponential;
        }
        result.store(v, pack<ELEMENT>(a));
    }
}
