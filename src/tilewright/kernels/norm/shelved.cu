// Layer norm and RMS norm, as held.cu, of rows that the registers of a block have no room for beside another block: a
// part of each lies in shared memory, so that a multiprocessor has two rows at a time, one that comes and one that
// goes.
//
// Weights come from the caches, DEPTH vectors ahead of their use: no load passes a store that stands before it. In a
// ragged row those of a vector lie in two vectors of weights; with COPIES (shifted.cu) they have been shifted before,
// for every place within 16 bytes at which a row may begin.
//
// Weight and bias begin on 16 bytes and are of the rows' type. Defined by whoever compiles, beside what weights.cuh
// wants: THREADS (a block, all of one row), VECTORS (of a row, a thread), FULL (of these, such as every thread has and
// the end of a row is not in), SHELVED (of these, in shared memory), DEPTH, COPIES, and CENTERED, HAS_WEIGHT, HAS_BIAS
// as in held.cu.
//
// Limit: DRAM. On an H200, of the bandwidth of a copy, in brackets streamed.cu in the same run: RMS norm in fp32 1.00
// (0.92) at 16416 columns, 0.99 (0.94) at 25001, 0.98 (0.93) at 32729 and 1.00 (0.97) at 32768, in bf16 1.00 (0.94) at
// 40000, 0.98 to 1.00 (0.93) at 50257 and 1.00 (0.96) at 65536; layer norm 1.00 (0.91), 1.00 (0.97) at 32768, 0.99
// (0.93) at 40000 and 0.98 (0.95) at 65536; with COPIES, whose making takes 0.01 of it, in fp32 0.97 (0.94) at 25001
// and 0.96 (0.93) at 32729, in bf16 0.96 (0.92) at 40001 and 0.95 (0.91) at 50257.
// Lost: weights read where they are used, RMS norm 0.95 at 32768 and 0.91 at 65536, layer norm 0.74 and 0.78; two
// weights shifted by those who use them, 0.87 to 0.92 at 50257 in bf16, 0.93 with a kernel of four cases of which each
// has its shift by words as a constant; RMS norm with COPIES 0.00 to 0.01 less; two passes of layer norm, mean and
// squares about it, 0.97 at 65536; a cluster of two such blocks for rows twice as long, layer norm in fp32 0.79 (0.91)
// at 50257, with COPIES 0.92, and 0.97 (0.97) at 65536, RMS norm 0.92 (0.91) and 0.97 (0.98), in bf16 0.96 (0.97) at
// 131072. As fast: 8, 6 or 4 of 16 vectors in registers, weights 2, 3 or 4 ahead.
#include "moments.cuh"

static_assert(sizeof(WEIGHT) == sizeof(ELEMENT) && EDGES != LOOSE);
constexpr int HELD = VECTORS - SHELVED;  // vectors of a thread in registers
constexpr int BLOCKS = 1024 / THREADS;

extern __shared__ __align__(128) uint4 shelf[];

// A thread's vectors of a row: the first in registers, the others where only this thread writes and reads.
struct Vectors {
    uint4 held[HELD];
    __device__ __forceinline__ uint4 *shelved(int i) const { return shelf + (i - HELD) * THREADS + threadIdx.x; }
    __device__ __forceinline__ uint4 operator[](int i) const { return i < HELD ? held[i] : *shelved(i); }
};

// Number of a thread's i-th vector, and whether it may be only partly the row's.
__device__ __forceinline__ int vector(int i) { return i * THREADS + threadIdx.x; }
__device__ __forceinline__ constexpr bool ragged(int i) { return EDGES == RAGGED && (i == 0 || i >= FULL); }
__device__ __forceinline__ bool has(const Elements &row, int i) {
    return (i < FULL && !ragged(i)) || row.holds(vector(i));
}

__device__ __forceinline__ void load(const Elements &row, Vectors &vectors) {
#pragma unroll
    for (int i = HELD; i < VECTORS; i++)
        if (has(row, i)) copy_vector_once(vectors.shelved(i), row.base + (long long)vector(i) * LANES);
#pragma unroll
    for (int i = 0; i < HELD; i++) vectors.held[i] = has(row, i) ? row.load_once(vector(i)) : make_uint4(0, 0, 0, 0);
}

// What the compiler unpacked, or read of the shelf, it shall unpack and read again: registers are for loads.
__device__ __forceinline__ void forget(Vectors &vectors) {
#pragma unroll
    for (int i = 0; i < HELD; i++)
        asm volatile("" : "+r"(vectors.held[i].x), "+r"(vectors.held[i].y), "+r"(vectors.held[i].z),
                          "+r"(vectors.held[i].w)::"memory");
}

// Adds x and x².
__device__ __forceinline__ void add_lanes(const float (&x)[LANES], float share, Moments &sums) {
#pragma unroll
    for (int k = 0; k < LANES; k++) {
        // Divided before they are summed, large values do not overflow.
        if (CENTERED) sums.mean = fmaf(x[k], share, sums.mean);
        sums.square = fmaf(x[k], x[k], sums.square);
    }
}
__device__ __forceinline__ void add_vector(uint4 vector, float share, Moments &sums) {
    float x[LANES];
    unpack<ELEMENT>(vector, x);
    add_lanes(x, share, sums);
}

// A thread's part of the mean and mean square that `add(sums, vector, its number)` adds up, in the order in which
// vectors come.
template <class Add>
__device__ __forceinline__ Moments sum_of_row(const Elements &row, Vectors &vectors, float share, Add add) {
    Moments found = Moments::none();
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (i == HELD) asm volatile("cp.async.wait_all;" ::: "memory");
        if (!has(row, i)) continue;
        const uint4 x = vectors[i];
        add(found, ragged(i) ? row.inside(vector(i), x, 0.f) : x, vector(i));
    }
    forget(vectors);
    found.square *= share;
    return found;
}

// Weights of a row's columns, vector by vector. A row that begins `head` lanes behind its first vector has those of a
// vector in two of theirs, and `offset` says from which lane on; with COPIES it has a copy where they are in one.
struct Weights {
    static constexpr bool Shifted = EDGES == RAGGED && !COPIES;
    const uint4 *first;  // of this thread, that its vector 0 begins in
    int offset, lead, count;
    __device__ __forceinline__ Weights(const WEIGHT *from, const Elements &row, int pitch)
        : offset(Shifted ? -row.head & (LANES - 1) : 0), lead((row.head + offset) / LANES),
          count((row.columns + LANES - 1) / LANES) {
        first = reinterpret_cast<const uint4 *>(from) + (COPIES ? row.head % LANES * pitch : 0) + vector(0) - lead;
    }
    struct Pair {
        uint4 low, high;
    };
    __device__ __forceinline__ void load(int i, Pair &to) const {
        const int at = vector(i) - lead;
        if (!Shifted || i > 0 || at >= 0) to.low = first[i * THREADS];
        if (Shifted && offset != 0 && (i < FULL - 1 || at + 1 < count)) to.high = first[i * THREADS + 1];
    }
    __device__ __forceinline__ void widen(const Pair &pair, float (&to)[LANES]) const {
        uint4 found = pair.low;
        if constexpr (Shifted) {
            constexpr int of_word = 4 / sizeof(WEIGHT);
            const int words_off = offset / of_word;
            unsigned words[8] = {pair.low.x,  pair.low.y,  pair.low.z,  pair.low.w,
                                 pair.high.x, pair.high.y, pair.high.z, pair.high.w};
#pragma unroll
            for (int i = 0; i < 6; i++) words[i] = words_off & 2 ? words[i + 2] : words[i];
#pragma unroll
            for (int i = 0; i < 5; i++) words[i] = words_off & 1 ? words[i + 1] : words[i];
            if (of_word == 2) {
#pragma unroll
                for (int i = 0; i < 4; i++) words[i] = __funnelshift_r(words[i], words[i + 1], offset % 2 * 16);
            }
            found = make_uint4(words[0], words[1], words[2], words[3]);
        }
        unpack<WEIGHT>(found, to);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    norm_shelved(const ELEMENT *x, ELEMENT *y, const WEIGHT *weight, const WEIGHT *bias, float *means, float *rstds,
                 int columns, int pitch, long long x_stride, float eps) {
    __shared__ Exchange<THREADS, 1, Moments> exchange;
    const long long number = blockIdx.x;
    const Elements row(x + number * x_stride, columns), out(y + number * columns, row);
    Vectors vectors;
    load(row, vectors);
    const float share = 1.f / columns;
    const auto values = [&](Moments &sums, uint4 x, int) { add_vector(x, share, sums); };
    const Moments found = sum_of_row(row, vectors, share, values);
    const Weights weights(weight, row, pitch), biases(bias, row, pitch);
    Weights::Pair some[DEPTH] = {}, others[DEPTH] = {};
    const auto fetch = [&](int i) {
        if (i >= VECTORS || !has(row, i)) return;
        if (HAS_WEIGHT) weights.load(i, some[i % DEPTH]);
        if (HAS_BIAS) biases.load(i, others[i % DEPTH]);
    };
#pragma unroll
    for (int i = 0; i < DEPTH; i++) fetch(i);
    const Moments joined = exchange(found, 0);
    float mean = joined.mean, variance = joined.square;
    if constexpr (CENTERED) {
        float taken = mean * mean;
        variance -= taken;
        // Not a number, too, as where both are infinite.
#pragma unroll 1
        for (int n = 1; n < 3 && !(variance * CANCELS - taken >= 0.f); n++) {
            const auto offsets = [&](Moments &sums, uint4 x, int v) {
                float off[LANES];
                centred(row, v, x, mean, off);
                add_lanes(off, share, sums);
            };
            const Moments off = exchange(sum_of_row(row, vectors, share, offsets), n);
            mean += off.mean, taken = off.mean * off.mean;
            variance = fmaf(-off.mean, off.mean, off.square);
        }
    }
    const Normal normal{mean, rstd_of(variance, eps)};
    if (threadIdx.x == 0) {
        if (CENTERED) means[number] = normal.mean;
        rstds[number] = normal.rstd;
    }
    const float shift = -normal.mean * normal.rstd;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        float a[LANES], b[LANES];
        unpack<ELEMENT>(vectors[i], a);
        if constexpr (CENTERED && sizeof(ELEMENT) == 2) {
            // One instruction instead of two: what it rounds is far below 16 bits.
#pragma unroll
            for (int k = 0; k < LANES; k++) a[k] = fmaf(a[k], normal.rstd, shift);
        } else {
            normalise(a, normal);
        }
        if constexpr (HAS_WEIGHT) {
            weights.widen(some[i % DEPTH], b);
#pragma unroll
            for (int k = 0; k < LANES; k++) a[k] *= b[k];
        }
        if constexpr (HAS_BIAS) {
            biases.widen(others[i % DEPTH], b);
#pragma unroll
            for (int k = 0; k < LANES; k++) a[k] += b[k];
        }
        fetch(i + DEPTH);
        if (!has(row, i)) continue;
        if (ragged(i))
            out.store(vector(i), pack<ELEMENT>(a));
        else
            store_vector(out.base + (long long)vector(i) * LANES, pack<ELEMENT>(a));
    }
}
