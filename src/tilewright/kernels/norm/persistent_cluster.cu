// Layer norm and RMS norm forward, as registers.cu, of rows longer than a block's registers hold: clusters stay, rows
// pass through STAGES slots of their shared memory, weights stay in registers (KEPT).
//
// Each thread fetches the vectors it will use (cp.async). x and x² are summed in one pass, and a row's sums travel
// through the cluster while the row before is written (LAG 1). Variance is mean square less squared mean; where that
// cancels, the slot is read again about the mean, twice at most.
//
// Vectors lie in whole lines, so only every `period`-th row puts the same columns on the same threads. Programs step by
// a multiple of `period` (SAME_ALIGNMENT 1), or take runs of rows that begin alike and reload weights between (0).
//
// Limit: DRAM. H200, of a copy's bandwidth: 0.97 to 1.00 at 65536 to 262144 columns; 0.91 to 0.94 at 50257, where rows
// begin anywhere.
#include "cluster_reduce.cuh"
#include "moments.cuh"

constexpr int SLOT_VECTORS = VECTORS * THREADS;           // vectors
constexpr int PREFETCH = STAGES - LAG;                 // rows fetched before the first is summed; slots of the residual
constexpr int CHUNK = VECTORS < 4 ? VECTORS : 4;  // vectors that are loaded before the first is used

extern __shared__ __align__(128) uint4 slots[];

// Number of this thread's i-th vector of a row.
__device__ __forceinline__ int vector(int i) { return (cluster_rank() + i * CLUSTER) * THREADS + threadIdx.x; }
// Whether lanes of the i-th may lie outside of the row.
__device__ __forceinline__ constexpr bool may_be_partial(int i) {
    return ALIGNMENT == PEELED && (i == 0 || i >= WHOLE_VECTORS);
}
__device__ __forceinline__ bool has(const Elements &row, int i) {
    return (i < WHOLE_VECTORS && !may_be_partial(i)) || row.holds(vector(i));
}
__device__ __forceinline__ uint4 inside(const Elements &row, int i, uint4 x) {
    return may_be_partial(i) ? row.masked(vector(i), x, 0.f) : x;
}
__device__ __forceinline__ void store(const Elements &row, int i, uint4 x) {
    if (may_be_partial(i))
        row.store(vector(i), x);
    else
        store_vector(row.base + (long long)vector(i) * LANES, x);
}

// This thread's first vector of row number `iteration`, in a ring of `count` slots from slot `start` on.
__device__ __forceinline__ uint4 *slot_of(int iteration, int start, int count) {
    return slots + (start + iteration % count) * SLOT_VECTORS + threadIdx.x;
}

__device__ __forceinline__ void fetch(uint4 *slot, const Elements &row) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (has(row, i)) copy_vector_once(slot + i * THREADS, row.base + (long long)vector(i) * LANES);
}

// Iterates over the rows of a program.
struct RowWalk {
    int row, step, rows;

    // Every programs-th row, or a run of rows ordered by row % period.
    __device__ __forceinline__ RowWalk(int program, int programs, int all, int period) : rows(all) {
        if constexpr (SAME_ALIGNMENT) {
            row = program, step = programs;
        } else {
            const int place = first(program, programs), few = all / period, more = all % period * (few + 1);
            row = place < more ? place / (few + 1) + place % (few + 1) * period
                               : all % period + (place - more) / max(few, 1) + (place - more) % max(few, 1) * period;
            step = period;
        }
    }
    // Place of a program's first row in that order.
    __device__ __forceinline__ int first(int program, int programs) const {
        return int((long long)program * rows / programs);
    }
    __device__ __forceinline__ int iterations(int program, int programs) const {
        if (!SAME_ALIGNMENT) return first(program + 1, programs) - first(program, programs);
        return program < rows ? (rows - program + programs - 1) / programs : 0;
    }
    __device__ __forceinline__ void next() {
        row += step;
        if (!SAME_ALIGNMENT && row >= rows) row = row % step + 1;
    }
};

// Adds x and x² of a vector, whose lanes outside of the row are 0, to two accumulators: shorter dependent chains.
__device__ __forceinline__ void add(uint4 vector, float share, Moments (&found)[2]) {
    float x[LANES];
    unpack<ELEMENT>(vector, x);
#pragma unroll
    for (int k = 0; k < LANES; k++) {
        // Divided before summing: large values do not overflow.
        if (CENTERED) found[k % 2].mean = fmaf(x[k], share, found[k % 2].mean);
        found[k % 2].square = fmaf(x[k], x[k], found[k % 2].square);
    }
}

// This thread's moments of the row in `slot`; x + residual replaces x there.
__device__ __forceinline__ Moments gather(uint4 *slot, const uint4 *residual, const Elements &row, const Elements &sum,
                                          float share) {
    Moments found[2] = {};
#pragma unroll
    for (int start = 0; start < VECTORS; start += CHUNK) {
        uint4 x[CHUNK];
#pragma unroll
        for (int k = 0; k < CHUNK; k++) {
            const int i = start + k;
            x[k] = make_uint4(0, 0, 0, 0);
            if (i >= VECTORS || !has(row, i)) continue;
            x[k] = slot[i * THREADS];
            if constexpr (RESIDUAL) {
                x[k] = add_residual(x[k], residual[i * THREADS]);
                store(sum, i, x[k]);
                slot[i * THREADS] = x[k];
            }
            x[k] = inside(row, i, x[k]);
        }
#pragma unroll
        for (int k = 0; k < CHUNK; k++) add(x[k], share, found);
    }
    found[0].combine(found[1]);
    return {found[0].mean, found[0].square * share};
}

// This thread's part of the mean and mean square of x - mean over the row in `slot`.
__device__ __forceinline__ Moments recentre(const uint4 *slot, const Elements &row, float share, float mean) {
    Moments found = Moments::identity();
    // Not unrolled: rare, and registers are short.
#pragma unroll 1
    for (int i = 0; i < VECTORS; i++)
        if (row.holds(vector(i))) {
            float off[LANES];
            centered(row, vector(i), row.masked(vector(i), slot[i * THREADS], 0.f), mean, off);
#pragma unroll
            for (int k = 0; k < LANES; k++) {
                found.mean = fmaf(off[k], share, found.mean);
                found.square = fmaf(off[k], off[k], found.square);
            }
        }
    return {found.mean, found.square * share};
}

// Weight (KEPT 1) and bias (KEPT 2) of this thread's columns, packed as in memory.
template <class W>
struct Weights {
    static constexpr int words = LANES * sizeof(W) / 4;
    unsigned packed[KEPT > 0 ? KEPT : 1][VECTORS][words];
    int head = -1;  // Row::head that they are for

    __device__ __forceinline__ void hold(const W *weight, const W *bias, const Elements &row) {
        if (head == row.head) return;
        head = row.head;
#pragma unroll
        for (int kind = 0; kind < KEPT; kind++)
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                float w[LANES] = {};
                if (has(row, i)) weights_at(kind ? bias : weight, row.column(vector(i)), row.columns, w);
#pragma unroll
                for (int k = 0; k < words; k++)
                    if constexpr (sizeof(W) == 4)
                        packed[kind][i][k] = __float_as_uint(w[k]);
                    else
                        packed[kind][i][k] = narrow_pair(w[2 * k], w[2 * k + 1], W());
            }
    }
    // Of the i-th vector, widened.
    __device__ __forceinline__ void of(const W *from, int kind, const Elements &row, int i, float (&to)[LANES]) {
        if (kind >= KEPT) return weights_at(from, row.column(vector(i)), row.columns, to);
#pragma unroll
        for (int k = 0; k < words; k++) {
            // Stop the compiler from keeping unpacked weights live from row to row.
            asm volatile("" : "+r"(packed[kind][i][k]));
            if constexpr (sizeof(W) == 4)
                to[k] = __uint_as_float(packed[kind][i][k]);
            else
                widen_pair(packed[kind][i][k], to[2 * k], to[2 * k + 1], W());
        }
    }
};

__device__ __forceinline__ void write(const uint4 *slot, const Elements &y, Statistics found, const WEIGHT *weight,
                                      const WEIGHT *bias, Weights<WEIGHT> &kept) {
    const float shift = -found.mean * found.rstd;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (!has(y, i)) continue;
        float a[LANES], b[LANES];
        unpack<ELEMENT>(slot[i * THREADS], a);
        if constexpr (CENTERED && sizeof(ELEMENT) == 2) {
            // One multiply-add: its rounding is far below 16 bits.
#pragma unroll
            for (int k = 0; k < LANES; k++) a[k] = fmaf(a[k], found.rstd, shift);
        } else {
            normalise(a, found);
        }
        if constexpr (HAS_WEIGHT) {
            kept.of(weight, 0, y, i, b);
#pragma unroll
            for (int k = 0; k < LANES; k++) a[k] *= b[k];
        }
        if constexpr (HAS_BIAS) {
            kept.of(bias, 1, y, i, b);
#pragma unroll
            for (int k = 0; k < LANES; k++) a[k] += b[k];
        }
        store(y, i, pack<ELEMENT>(a));
    }
}

ROW_KERNEL norm_persistent(ELEMENT *x, ELEMENT *residual, ELEMENT *y, ELEMENT *sum, const WEIGHT *weight,
                      const WEIGHT *bias, float *means, float *rstds, long long rows, int columns, long long x_stride,
                      long long residual_stride, int period, float eps) {
    __shared__ ClusterReduce<Moments> reduction;
    __shared__ ClusterReduce<Moments> recentring;
    const int program = blockIdx.x / CLUSTER, programs = gridDim.x / CLUSTER;
    RowWalk fetching(program, programs, int(rows), period), summing = fetching, writing = fetching;
    const int iterations = fetching.iterations(program, programs);
    const float share = 1.f / columns;
    const Elements shape(x + fetching.row * x_stride, columns);
    const auto in_x = [&](const RowWalk &at) {
        const ELEMENT *start = x + at.row * x_stride;
        return SAME_ALIGNMENT ? Elements(start, shape) : Elements(start, columns);
    };
    const auto in_result = [&](ELEMENT *of, const RowWalk &at) {
        return Elements(of + (long long)at.row * columns, in_x(at));
    };
    const auto fetch_row = [&](int iteration) {
        if (iteration < iterations) {
            const Elements row = in_x(fetching);
            // Keep slot addresses out of uniform registers: see copy_vector_once.
            const int opaque = __shfl_sync(~0u, iteration, 0);
            fetch(slot_of(opaque, 0, STAGES), row);
            if constexpr (RESIDUAL)
                fetch(slot_of(opaque, STAGES, PREFETCH), Elements(residual + fetching.row * residual_stride, row));
            fetching.next();
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll 1
    for (int iteration = 0; iteration < PREFETCH; iteration++) fetch_row(iteration);
    Weights<WEIGHT> kept;
    if constexpr (SAME_ALIGNMENT) kept.hold(weight, bias, shape);
    reduction.start();
    if (CENTERED) recentring.start();
    int recentred = 0;
    Moments before = Moments::identity();
#pragma unroll 1
    for (int iteration = 0; iteration < iterations + LAG; iteration++) {
        Moments found = Moments::identity();
        if (iteration < iterations) {
            asm volatile("cp.async.wait_group %0;" ::"n"(PREFETCH - 1) : "memory");
            const Elements row = in_x(summing), total = in_result(sum, summing);
            found = gather(slot_of(iteration, 0, STAGES), slot_of(iteration, STAGES, PREFETCH), row, total, share);
            reduction.post(found, iteration);
            summing.next();
        }
        if (iteration >= LAG) {
            const uint4 *slot = slot_of(iteration - LAG, 0, STAGES);
            const Elements row = in_result(y, writing);
            const Moments joined = reduction.collect(LAG ? before : found, iteration - LAG);
            float mean = joined.mean, variance = joined.square;
            if constexpr (CENTERED) {
                float taken = mean * mean;
                variance -= taken;
                // Negated, so that NaN (both infinite) recentres too.
#pragma unroll 1
                for (int n = 0; n < 2 && !(variance * CANCELLATION - taken >= 0.f); n++) {
                    Moments off = recentre(slot, row, share, mean);
                    recentring.post(off, recentred);
                    off = recentring.collect(off, recentred++);
                    mean += off.mean, taken = off.mean * off.mean;
                    variance = fmaf(-off.mean, off.mean, off.square);
                }
            }
            const Statistics normal{mean, rstd_of(variance, eps)};
            if (vector(0) == 0) {
                if (CENTERED) means[writing.row] = normal.mean;
                rstds[writing.row] = normal.rstd;
            }
            if constexpr (!SAME_ALIGNMENT) kept.hold(weight, bias, row);
            write(slot, row, normal, weight, bias, kept);
            writing.next();
        }
        fetch_row(iteration + PREFETCH);
        before = found;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    reduction.sync();
}
