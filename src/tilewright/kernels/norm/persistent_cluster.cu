// Layer norm and RMS norm, as registers.cu, of rows that no block holds: clusters stay, rows pass through
// their shared memory, and the weights stay in their registers.
//
// A thread fetches the vectors of a row that it will use itself (cp.async) into one of STAGES slots, a row each. x and
// x² are summed together, and what the threads of a row find is under way to all blocks of the cluster while the row
// before, whose sums have come, is normalised and written (LAG 1; with 0 they wait). The variance is the mean square
// less the squared mean; in a row where that cancels, which all threads see alike, a second look at the slot takes
// both again about that mean, which gains what it lacked, and where that cancels, too, a third: of a row of one value
// the mean is that value, and the variance 0.
//
// Vectors lie in whole lines, so a may_be_partial row's columns lie on other threads than the next row's, and only every
// `period`-th begins alike. Programs step by a multiple of that (SAME_ALIGNMENT 1); where none fills the device (0), each takes
// its share of the rows in the order 0, period, 2 period, ..., 1, period + 1, ..., and reads its weights again where
// that iterations.
//
// Defined by whoever compiles, beside what weights.cuh wants: THREADS (a block, all of one row: ROW_THREADS too), CLUSTER,
// BLOCKS (a multiprocessor), VECTORS (of a row, a thread), WHOLE_VECTORS (of these, such as every thread has and the end of a
// row is not in), STAGES, LAG, KEPT (weights in registers; others come from the caches), SAME_ALIGNMENT, CENTERED, HAS_WEIGHT,
// HAS_BIAS, RESIDUAL as in registers.cu.
//
// Limit: DRAM, and in 16 bits the instructions of so few warps. On an H200, of the bandwidth of a copy, at 50257,
// 65536, 131072 and 262144 columns: layer norm 0.91, 0.97, 0.98, 0.97 in bf16, 0.92, 0.99, 0.99, 0.98 in fp32; RMS norm
// 0.94, 0.98, 0.98, 0.98 in bf16, 0.93, 1.00, 1.00, 0.99 in fp32; at 32768 in fp32 0.97 to 0.99.
// Lost: a ring of vectors and weights in shared memory, three passes of layer norm (mean, squares, result), 195
// instructions a vector where these are 120: 0.77 to 0.79 in bf16, 0.94, 0.80, 0.73 in fp32; with two passes, about a
// row's first element, 0.65 to 0.84. Rows in the registers of a cluster that ends with its row, whose weights come
// from L2: 0.67 to 0.82; of a block of 1024 threads, layer norm 0.78 at 65536 in bf16. Four vectors a thread and twice
// the cluster: 0.89 at 262144 in bf16, else within 0.02. Vectors counted from 16 bytes, not from lines: 0.79 at 50257
// in bf16. SAME_ALIGNMENT 0 there, with 66 programs instead of 64: 0.86. Plain copies (see copy_vector_once): 0.02 less. Seven,
// five or four vectors a thread and so many more warps: 0.89 to 0.90 at 50257 in bf16 (nine: 0.915 in that run), 0.90
// and 0.91 in fp32 (0.91), four instead of eight 0.95 at 32768 in fp32 (0.97); 64, 63 or 60 programs there, that rows
// divide among evenly, instead of 66: 0.96 to 0.95. Weights at 50257 by the aligned 16 bytes that hold them, shifted:
// within 0.01.
//
// SAME_ALIGNMENT 0 has programs far apart in memory at any time, which alone takes layer norm at 65536 in fp32 from 0.97 to
// 0.94; in the order of row_schedule.cuh, where they are together, 0.925 at 50257 (0.90 without), RMS norm 0.94 (0.915), but
// with a residual 0.90 (0.90).
#include "cluster_reduce.cuh"
#include "moments.cuh"

constexpr int STEP = CLUSTER * THREADS;
constexpr int SLOT_VECTORS = VECTORS * THREADS;           // vectors
constexpr int PREFETCH = STAGES - LAG;                 // rows fetched before the first is summed; slots of the residual
constexpr int CHUNK = VECTORS < 4 ? VECTORS : 4;  // vectors that are loaded before the first is used

extern __shared__ __align__(128) uint4 slots[];

// A thread's vectors of a row: number vector(0), + STEP, ...
__device__ __forceinline__ int vector(int i) { return (cluster_rank() + i * CLUSTER) * THREADS + threadIdx.x; }
// Whether the i-th may be only partly the row's.
__device__ __forceinline__ constexpr bool may_be_partial(int i) { return ALIGNMENT == PEELED && (i == 0 || i >= WHOLE_VECTORS); }
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

// This thread's first vector of the row of iteration `iteration` in a ring of `count` slots that begins at slot `start`.
__device__ __forceinline__ uint4 *slot_of(int iteration, int start, int count) {
    return slots + (start + iteration % count) * SLOT_VECTORS + threadIdx.x;
}

__device__ __forceinline__ void fetch(uint4 *slot, const Elements &row) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (has(row, i)) copy_vector_once(slot + i * THREADS, row.base + (long long)vector(i) * LANES);
}

// The rows of a program, one after another.
struct RowWalk {
    int row, step, rows;

    // Every programs-th row, or a run of those ordered by what they leave over from `period`.
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
    // Its place in that order.
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

// Adds x and x² of a vector, what is outside of the row being 0; into two, so that sums wait less for sums.
__device__ __forceinline__ void add(uint4 vector, float share, Moments (&found)[2]) {
    float x[LANES];
    unpack<ELEMENT>(vector, x);
#pragma unroll
    for (int k = 0; k < LANES; k++) {
        // Divided before they are summed, large values do not overflow.
        if (CENTERED) found[k % 2].mean = fmaf(x[k], share, found[k % 2].mean);
        found[k % 2].square = fmaf(x[k], x[k], found[k % 2].square);
    }
}

// Of the row in `slot`; x + residual, if there is one, takes its place.
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

// This thread's part of the mean and mean square of x - mean, of the row in `slot`.
__device__ __forceinline__ Moments recentre(const uint4 *slot, const Elements &row, float share, float mean) {
    Moments found = Moments::identity();
    // Few rows come here; unrolled, it would take registers from all.
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

// Weight where KEPT is 1, and bias where it is 2, of the columns that this thread has, as they lie in memory.
template <class W>
struct Weights {
    static constexpr int words = LANES * sizeof(W) / 4;
    unsigned packed[KEPT > 0 ? KEPT : 1][VECTORS][words];
    int head = -1;  // of the rows that they are for

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
    // Those of the i-th vector.
    __device__ __forceinline__ void of(const W *from, int kind, const Elements &row, int i, float (&to)[LANES]) {
        if (kind >= KEPT) return weights_at(from, row.column(vector(i)), row.columns, to);
#pragma unroll
        for (int k = 0; k < words; k++) {
            // What the compiler unpacked for one row it shall unpack again for the next.
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
            // One instruction instead of two: what it rounds is far below 16 bits.
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
            // Told by a lane, the iteration is not known to be the same in all of them, and slots have no addresses that
            // are: see copy_vector_once.
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
                // Not a number, too, as where both are infinite.
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
