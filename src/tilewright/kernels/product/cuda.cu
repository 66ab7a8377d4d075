// y = left · right (+ bias) in fp32 by Hopper's 16-bit matrix instructions, as precise as a product of fp32.
//
//   left [M, K], right [K, N], bias [N], y [M, N]: fp32; either operand row by row or column by column. Batched: B of
//   left, right and y.
//
// A value of fp32 is the sum of three of bf16, high + middle + low, exactly; of the nine products of two such sums the
// six largest are computed, what is left out is below 2⁻²⁴ of the whole. (Henry, Tang, Heinecke, Leveraging the
// bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations, 2019.) Matrix instructions round their
// sums toward zero, which over a long K costs digits; so each step's sum is added to one in registers, where it is rounded
// to nearest. (Ootomo, Yokota, Recovering single precision accuracy from Tensor Cores while surpassing the FP32
// theoretical peak performance, 2022.) A sum that is not a number is computed again one by one: the parts of an infinity
// are infinity and NaN. Values below 2⁻¹¹⁰ lose digits, since bf16 ends at 2⁻¹³³.
//
// A persistent program computes tiles of 128 × 128 in steps of 32 along K. Tiles that are no whole wave of programs are
// shared out by steps, so that all programs end together; `add_shares` then adds the shares of a tile in the order of K.
// (Osama et al., Stream-K: Work-Centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU, 2023.)
// A program has twelve warps:
//
//   0       producer  one thread copies tiles of left and right as they are (TMA) into two rings.
//   1 to 3  cutters   cut a tile of right into its three parts, each a tile that wgmma reads.
//   4 to 11 math      two warpgroups of 64 rows: cut their rows of left in registers, multiply, add, store.
//
// Limit: shared memory, from which each part of right is read for each part of left. H200, 4096 × 4096 × 4096: 93 TFLOP/s
// of fp32, cuBLAS 50; six products at cuBLAS's rate in bf16 would be 137. docs/experiments.md: what was tried.
//
// Settings: LEFT_ALONG_K, RIGHT_ALONG_K (in memory [M, K] and [N, K]; otherwise [K, M] and [K, N]), BIAS.

#define HALF 0
#include "cut.cuh"

constexpr int GROUP = 8;  // rows of tiles that are walked together
constexpr int LEFT_SLOTS = 4, RIGHT_SLOTS = 3, PART_SLOTS = 4;
constexpr int CUTTERS = 3, MATH_WARPS = 8, MATH_THREADS = 32 * MATH_WARPS;
constexpr int THREADS = 32 * (1 + CUTTERS + MATH_WARPS);
constexpr int CUTTER_REGISTERS = 72, MATH_REGISTERS = 216;  // per thread; all start with 168

struct Problem {
    int batch, m, n, k;
    u64 left_line, left_batch, right_line, right_batch;  // elements from a row in memory, from a matrix, to the next
    int shared_tiles, share;  // the first tiles are shared out; the steps of them that a program takes
    float* y;
    const float* left;
    const float* right;
    const float* bias;
    float4* shares;  // two tiles for each program: its first share, and any other
};

struct Tile {
    int batch, row, column;
};

// GROUP rows of tiles are walked column by column, so that programs at work share rows and columns.
__device__ __forceinline__ Tile tile_at(int index, int rows, int columns) {
    int batch = index / (rows * columns);
    index -= batch * rows * columns;
    int whole = GROUP * columns, group = index / whole, inside = index - group * whole;
    int first = group * GROUP, height = min(rows - first, GROUP), column = inside / height;
    return {batch, (first + inside - column * height) * BM, column * BN};
}

// What a program computes at a time: steps `first` to `end` of a tile. It walks its share, which ends one tile and
// begins another, and then whole tiles.
struct Work {
    int index, first, end, slot;  // slot: where the sums go among the shares; -1 for a whole tile
};

struct Walk {
    const int steps, total, shared, end;
    int at, next;
    bool is_first = true;
    __device__ __forceinline__ Walk(const Problem& p, int steps, int total)
        : steps(steps), total(total), shared(p.shared_tiles * steps), end(min(((int)blockIdx.x + 1) * p.share, shared)),
          at(min((int)blockIdx.x * p.share, shared)), next(p.shared_tiles + (int)blockIdx.x) {}
    __device__ __forceinline__ bool take(Work& w) {
        if (at < end) {
            w.index = at / steps, w.first = at - w.index * steps;
            w.end = min(steps, w.first + end - at);
            w.slot = w.end - w.first == steps ? -1 : 2 * (int)blockIdx.x + !is_first;
            at += w.end - w.first, is_first = false;
            return true;
        }
        if (next >= total) return false;
        w = {next, 0, steps, -1};
        next += gridDim.x;
        return true;
    }
};

// A ring's slot and the parity of its barriers.
template <int SLOTS>
struct Ring {
    int slot = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

struct Shared {
    u32 left, right, parts, left_full, left_empty, right_full, right_empty, parts_full, parts_empty;
};

__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, u32 barrier, int column, int row, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(batch) : "memory");
}

// A tile of an operand: 128 rows along K, or four boxes of 32 columns across K.
template <int ALONG_K>
__device__ __forceinline__ void copy_raw(u32 to, const TensorMap* map, u32 barrier, int k, int at, int batch) {
    barrier_expect(barrier, RAW_BYTES);
    if (ALONG_K) copy_box(to, map, barrier, k, at, batch);
    else
        for (int i = 0; i < BM / BOX; ++i) copy_box(to + i * BOX_BYTES, map, barrier, at + i * BOX, k, batch);
}

__device__ __forceinline__ void produce(const Shared& s, const TensorMap* left_map, const TensorMap* right_map,
                                        const Problem& p, int steps, int rows, int columns) {
    Ring<LEFT_SLOTS> left;
    Ring<RIGHT_SLOTS> right;
    Work w;
    for (Walk walk(p, steps, rows * columns * p.batch); walk.take(w);) {
        Tile tile = tile_at(w.index, rows, columns);
        for (int step = w.first; step < w.end; ++step, left.next(), right.next()) {
            barrier_wait(s.right_empty + 8 * right.slot, right.parity ^ 1);
            copy_raw<RIGHT_ALONG_K>(s.right + RAW_BYTES * right.slot, right_map, s.right_full + 8 * right.slot,
                                    step * BK, tile.column, tile.batch);
            barrier_wait(s.left_empty + 8 * left.slot, left.parity ^ 1);
            copy_raw<LEFT_ALONG_K>(s.left + RAW_BYTES * left.slot, left_map, s.left_full + 8 * left.slot, step * BK,
                                   tile.row, tile.batch);
        }
    }
}

__device__ __forceinline__ void cut_right(const Shared& s, const Problem& p, int steps, int total) {
    Ring<RIGHT_SLOTS> right;
    Ring<PART_SLOTS> parts;
    int thread = threadIdx.x - 32, count = 0;
    Work w;
    for (Walk walk(p, steps, total); walk.take(w);) count += w.end - w.first;
    for (; count > 0; --count, right.next(), parts.next()) {
        barrier_wait(s.right_full + 8 * right.slot, right.parity);
        barrier_wait(s.parts_empty + 8 * parts.slot, parts.parity ^ 1);
        u32 from = s.right + RAW_BYTES * right.slot, to = s.parts + PARTS_BYTES * parts.slot;
#pragma unroll 4
        for (int i = thread; i < RAW_BYTES / 16; i += 32 * CUTTERS) cut_piece(from, to, i);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(s.right_empty + 8 * right.slot);
            barrier_arrive(s.parts_full + 8 * parts.slot);
        }
    }
}

__device__ __forceinline__ u64 right_part(u32 address) {
    if (!RIGHT_ALONG_K) return across_k(address, PART_BYTES / 2);
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(512 >> 4) << 32 | (u64)2 << 62;
}

// d = left · right of a step; the smallest products first.
__device__ __forceinline__ void multiply_step(float (&d)[BN / 2], const Fragment& f, u32 parts) {
    constexpr int HALF_STEP = RIGHT_ALONG_K ? 32 >> 4 : 16 * 128 >> 4, ACROSS = !RIGHT_ALONG_K;
    u64 high = right_part(parts), middle = right_part(parts + PART_BYTES), low = right_part(parts + 2 * PART_BYTES);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        mma<ACROSS>(d, f.low + 4 * half, high + HALF_STEP * half, half);
        mma<ACROSS>(d, f.high + 4 * half, low + HALF_STEP * half, 1);
        mma<ACROSS>(d, f.middle + 4 * half, middle + HALF_STEP * half, 1);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        mma<ACROSS>(d, f.middle + 4 * half, high + HALF_STEP * half, 1);
        mma<ACROSS>(d, f.high + 4 * half, middle + HALF_STEP * half, 1);
        mma<ACROSS>(d, f.high + 4 * half, high + HALF_STEP * half, 1);
    }
}

__device__ float one_by_one(const Problem& p, int batch, int row, int column) {
    const float* left = p.left + batch * p.left_batch + row * (LEFT_ALONG_K ? p.left_line : 1);
    const float* right = p.right + batch * p.right_batch + column * (RIGHT_ALONG_K ? p.right_line : 1);
    float sum = 0;
#pragma unroll 1
    for (int k = 0; k < p.k && !isnan(sum); ++k)
        sum = fmaf(left[k * (LEFT_ALONG_K ? 1 : p.left_line)], right[k * (RIGHT_ALONG_K ? 1 : p.right_line)], sum);
    return sum;
}

// Stores the sums of rows `row` and `row` + 8, columns 2 · quarter and the next of every eight.
__device__ __forceinline__ void store(const float (&sum)[BN / 2], const Problem& p, Tile tile, int row, int quarter) {
    float* y = p.y + (u64)tile.batch * p.m * p.n;
    int first = tile.column + 2 * quarter;
    float numbers = 0;  // NaN if a sum is one, or infinite
#pragma unroll
    for (int i = 0; i < BN / 8; ++i) {
        int column = first + 8 * i;
        float2 bias = {0, 0};
        if (BIAS && column < p.n) bias.x = p.bias[column], bias.y = column + 1 < p.n ? p.bias[column + 1] : 0;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            float2 v = {sum[4 * i + 2 * below] + bias.x, sum[4 * i + 2 * below + 1] + bias.y};
            numbers = fmaf(v.x, 0, fmaf(v.y, 0, numbers));
            u64 at = (u64)(row + 8 * below) * p.n + column;
            if (row + 8 * below >= p.m || column >= p.n) continue;
            if (p.n % 2 == 0) *(float2*)(y + at) = v;
            else {
                y[at] = v.x;
                if (column + 1 < p.n) y[at + 1] = v.y;
            }
        }
    }
    if (numbers == 0) return;
#pragma unroll 1
    for (int i = 0; i < BN / 2; ++i) {
        int r = row + (i / 2 % 2) * 8, column = first + i / 4 * 8 + i % 2;
        u64 at = (u64)r * p.n + column;
        if (r < p.m && column < p.n && isnan(y[at]))
            y[at] = one_by_one(p, tile.batch, r, column) + (BIAS ? p.bias[column] : 0);
    }
}

// The place of a thread's sums of a tile among the shares: pieces of 16 bytes, adjacent for adjacent threads.
__device__ __forceinline__ float4* share_at(const Problem& p, int slot, int thread) {
    return p.shares + (u64)slot * (BM * BN / 4) + thread;
}

__device__ __forceinline__ void multiply(const Shared& s, const Problem& p, int steps, int rows, int columns,
                                         int warp) {
    int lane = threadIdx.x % 32, row = 16 * warp + fragment_row(lane), quarter = lane % 4;
    bool signals = lane == 0;
    Ring<LEFT_SLOTS> left;
    Ring<PART_SLOTS> parts;
    Work w;
    for (Walk walk(p, steps, rows * columns * p.batch); walk.take(w);) {
        float sum[BN / 2] = {}, d[BN / 2];
#pragma unroll 1
        for (int step = w.first; step < w.end; ++step, left.next(), parts.next()) {
            Fragment f;
            barrier_wait(s.left_full + 8 * left.slot, left.parity);
            cut_left(s.left + RAW_BYTES * left.slot, f, row, quarter);
            barrier_wait(s.parts_full + 8 * parts.slot, parts.parity);
            mma_fence();
            multiply_step(d, f, s.parts + PARTS_BYTES * parts.slot);
            mma_commit();
            // Not before: an arrival overtakes loads whose values nothing has read.
            __syncwarp();
            if (signals) barrier_arrive(s.left_empty + 8 * left.slot);
            mma_wait<0>();
            fence_registers(d);
            if (signals) barrier_arrive(s.parts_empty + 8 * parts.slot);
#pragma unroll
            for (int i = 0; i < BN / 2; ++i) sum[i] += d[i];
        }
        if (w.slot < 0) {
            Tile tile = tile_at(w.index, rows, columns);
            store(sum, p, tile, tile.row + row, quarter);
        } else {
            float4* to = share_at(p, w.slot, 32 * warp + lane);
#pragma unroll
            for (int i = 0; i < BN / 8; ++i)
                to[i * MATH_THREADS] = {sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]};
        }
    }
}

// The sum of the shares of a tile; one program for 16 rows of it, which are those of a math warp.
extern "C" __global__ void __launch_bounds__(32) add_shares(const __grid_constant__ Problem p) {
    int rows = (p.m + BM - 1) / BM, columns = (p.n + BN - 1) / BN, steps = (p.k + BK - 1) / BK;
    int index = blockIdx.x / MATH_WARPS, warp = blockIdx.x % MATH_WARPS, lane = threadIdx.x;
    int begin = index * steps, first = begin / p.share, last = (begin + steps - 1) / p.share;
    Tile tile = tile_at(index, rows, columns);
    if (first == last || tile.row + 16 * warp >= p.m) return;
    float sum[BN / 2] = {};
    for (int program = first; program <= last; ++program) {
        const float4* from = share_at(p, 2 * program + (program == first && begin % p.share), 32 * warp + lane);
#pragma unroll
        for (int i = 0; i < BN / 8; ++i) {
            float4 v = from[i * MATH_THREADS];
            sum[4 * i] += v.x, sum[4 * i + 1] += v.y, sum[4 * i + 2] += v.z, sum[4 * i + 3] += v.w;
        }
    }
    store(sum, p, tile, tile.row + 16 * warp + fragment_row(lane), lane % 4);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    product(const __grid_constant__ TensorMap left_map, const __grid_constant__ TensorMap right_map,
            const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) char memory[];
    Shared s;
    s.left = shared_address(memory);
    s.right = s.left + LEFT_SLOTS * RAW_BYTES;
    s.parts = s.right + RIGHT_SLOTS * RAW_BYTES;
    s.left_full = s.parts + PART_SLOTS * PARTS_BYTES;
    s.left_empty = s.left_full + 8 * LEFT_SLOTS;
    s.right_full = s.left_empty + 8 * LEFT_SLOTS;
    s.right_empty = s.right_full + 8 * RIGHT_SLOTS;
    s.parts_full = s.right_empty + 8 * RIGHT_SLOTS;
    s.parts_empty = s.parts_full + 8 * PART_SLOTS;
    int rows = (p.m + BM - 1) / BM, columns = (p.n + BN - 1) / BN, steps = (p.k + BK - 1) / BK;
    if (threadIdx.x == 0) {
        for (int i = 0; i < LEFT_SLOTS; ++i)
            barrier_init(s.left_full + 8 * i, 1), barrier_init(s.left_empty + 8 * i, MATH_WARPS);
        for (int i = 0; i < RIGHT_SLOTS; ++i)
            barrier_init(s.right_full + 8 * i, 1), barrier_init(s.right_empty + 8 * i, CUTTERS);
        for (int i = 0; i < PART_SLOTS; ++i)
            barrier_init(s.parts_full + 8 * i, CUTTERS), barrier_init(s.parts_empty + 8 * i, MATH_WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int warp = threadIdx.x / 32;
    if (warp < 1 + CUTTERS) {
        give_registers<CUTTER_REGISTERS>();
        if (warp > 0) cut_right(s, p, steps, rows * columns * p.batch);
        else if (threadIdx.x == 0)
            produce(s, &left_map, &right_map, p, steps, rows, columns);
        __syncwarp();
    } else {
        take_registers<MATH_REGISTERS>();
        multiply(s, p, steps, rows, columns, warp - 1 - CUTTERS);
    }
}
