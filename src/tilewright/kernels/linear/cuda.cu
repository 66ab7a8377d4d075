// y = epilogue(x · wᵀ + bias) for Hopper: one persistent cluster of two programs for each pair of multiprocessors.
//
//   x [M, K], w [N, K], bias [N], y [M, N]: one 16-bit dtype, rows contiguous; sums in fp32.
//
// A program computes tiles of 128 × 256 and has twelve warps:
//
//   0      producer   one thread issues bulk tensor copies of x and w into a ring of STAGES slots. Both programs
//                     of a cluster need the same rows of w: each fetches half and multicasts it to both. In a deep
//                     product x and w are prefetched into L2 AHEAD steps earlier.
//   next   epilogue   three warps read the hand-over buffer by rows, apply GELU, and store,
//                     while the math warps are in the main loop of the next tile. The registers of a matrix
//                     instruction of 256 columns leave room for three.
//   last   math       two warpgroups of 64 rows each: wgmma into registers, then + bias, rounded, into the
//                     hand-over buffer in shared memory, and on to the next tile at once.
//
// All warps finish the last tile of a program, since the matrix units have nothing more to do.
//
// Limit: the matrix rate under the power cap; at K = 768 the epilogue's instructions: beside busy matrix units a
// multiprocessor issues few (docs/kernels.md), and its quarter with the producer none of them. H200, bf16,
// medians of interleaved runs: cuBLAS's product alone in TFLOP/s, this kernel as a share of that:
//
//   M x N x K               8192x16384x4096  8192x4096x16384  16384x3072x768  4096x4096x4096
//   cuBLAS, product alone        726              705              657             755
//   product and bias                -                -             0.99            0.98
//   GELU by erf                  1.02             1.00             0.98            0.98
//   GELU by tanh                 1.02             1.00             0.98            0.98
//
// docs/experiments.md: what was tried.
//
// Settings: STAGES, EPILOGUE (0 none, 1 GELU by erf, 2 GELU by tanh), BIAS, KEEP_PRE (the value before the activation
// is stored too), HALF (fp16, otherwise bf16).

#include "epilogue.cuh"
#include "instructions.cuh"

constexpr int BM = 128, BN = 256, BK = 64, CLUSTER = 2;
constexpr int GROUP = 8;  // rows of cluster tiles that are walked together
constexpr int X_BYTES = BM * BK * 2, W_BYTES = BN * BK * 2, W_PART = W_BYTES / CLUSTER;
constexpr int ROW_BYTES = BN * 2, HALF_TILE = BM / 2 * ROW_BYTES;
constexpr int AHEAD = 8, DEEP = 32;  // steps from L2 prefetch to shared-memory copy, if a tile has DEEP steps
constexpr int BIAS_SLOTS = STAGES + 1;  // with one step per tile, the producer is STAGES tiles ahead of the additions
constexpr int EPILOGUE_WARPS = 3, MATH_WARPS = 8, MATH_THREADS = 128, WARP_ROWS = 16;
constexpr int THREADS = 32 * (1 + EPILOGUE_WARPS + MATH_WARPS);
constexpr int EPILOGUE_REGISTERS = 136, MATH_REGISTERS = 184;  // per thread; all start with 168
constexpr int GROUP_ROWS = 4;  // rows that an epilogue warp computes together

struct Problem {
    int m, n, k;
    void* y;
    void* pre;
    const void* bias;
};

struct Tile {
    int row, column;
};

// GROUP rows of cluster tiles are walked column by column, so that programs at work share rows and columns.
__device__ __forceinline__ Tile tile_at(int index, int rows, int columns, u32 rank) {
    int whole = GROUP * columns;
    int group = index / whole, inside = index - group * whole;
    int first = group * GROUP, height = min(rows - first, GROUP);
    int column = inside / height;
    return {((first + inside - column * height) * CLUSTER + (int)rank) * BM, column * BN};
}

struct Shared {
    u32 x, w, tile, bias, wide_bias, full, empty, tile_full, tile_empty;
};

// About GROUP running programs share a step's rows of x, and about GROUP its rows of w: one of each prefetches.
__device__ __forceinline__ void prefetch_step(const TensorMap* x_map, const TensorMap* w_map, Tile tile, int step,
                                              u32 rank) {
    if (tile.column / BN % GROUP == 0) prefetch_tile(x_map, step * BK, tile.row);
    if (tile.row / (BM * CLUSTER) % GROUP == 0)
        prefetch_tile(w_map, step * BK, tile.column + BN / CLUSTER * (int)rank);
}

__device__ __forceinline__ void produce(const Shared& s, const TensorMap* x_map, const TensorMap* w_map,
                                        const Problem& p, int steps, int rows, int columns, u32 rank) {
    int slot = 0, turn = 0, stride = gridDim.x / CLUSTER;
    const bool deep = steps >= DEEP;
    u32 parity = 1;
    for (int index = blockIdx.x / CLUSTER; index < rows * columns; index += stride, ++turn) {
        Tile tile = tile_at(index, rows, columns, rank), next = tile_at(index + stride, rows, columns, rank);
        bool more = index + stride < rows * columns;
        if (deep && turn == 0)
            for (int step = STAGES; step < AHEAD; ++step) prefetch_step(x_map, w_map, tile, step, rank);
        for (int step = 0; step < steps; ++step) {
            if (deep && step + AHEAD < steps) prefetch_step(x_map, w_map, tile, step + AHEAD, rank);
            else if (deep && more) prefetch_step(x_map, w_map, next, step + AHEAD - steps, rank);
            u32 full = s.full + 8 * slot;
            barrier_wait(s.empty + 8 * slot, parity);
            u32 bias_bytes = BIAS && step == 0 ? 2 * min(BN, p.n - tile.column) : 0;
            barrier_expect(full, X_BYTES + W_BYTES + bias_bytes);
            if (bias_bytes)
                load_bytes(s.bias + ROW_BYTES * (turn % BIAS_SLOTS), (const char*)p.bias + 2 * tile.column, bias_bytes,
                           full);
            copy_tile(s.x + X_BYTES * slot, x_map, full, step * BK, tile.row);
            copy_tile_to_all(s.w + W_BYTES * slot + W_PART * rank, w_map, full, step * BK,
                             tile.column + BN / CLUSTER * (int)rank, (1 << CLUSTER) - 1);
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
    }
}

// Each warpgroup widens the biases of a tile to fp32 during the main loop, so that the hand-over, which nothing hides,
// has a third fewer instructions.
__device__ __forceinline__ void widen_bias(u32 wide, u32 bias, int part) {
    u32 pair, thread = threadIdx.x % MATH_THREADS;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(bias + 4 * thread));
    float2 b = unpack(pair);
    meet(1 + part, MATH_THREADS);  // until the biases of the tile before have been read
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(wide + 8 * thread), "f"(b.x), "f"(b.y) : "memory");
    meet(1 + part, MATH_THREADS);
}

// Writes rounded sums to the hand-over buffer; row r's 16-byte pieces are permuted by r mod 8 against bank conflicts.
__device__ __forceinline__ void hand_over(const float (&d)[BN / 2], u32 tile, u32 bias, int warp, int lane) {
    u32 row = tile + (warp * WARP_ROWS + lane % 16) * ROW_BYTES, piece = 16 * ((lane / 16) ^ (lane % 8));
#pragma unroll
    for (int block = 0; block < BN / 64; ++block) {
        float2 b[8] = {};
#pragma unroll
        for (int i = 0; BIAS && i < 8; ++i)
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(b[i].x), "=f"(b[i].y) : "r"(bias + 256 * block + 32 * i + 8 * (lane % 4)));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float* v = d + 32 * block + 8 * j;
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float low = v[2 * i], high = v[2 * i + 1], c0 = b[2 * j + i / 2].x, c1 = b[2 * j + i / 2].y;
                pairs[i] = pack(low + c0, high + c1);
            }
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             row + (piece ^ (32 * j)) + 128 * block),
                         "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]) : "memory");
        }
    }
}

// The place of a lane that walks down its column of 16-byte pieces.
struct Walk {
    int row;
    u64 at;  // byte of the piece in the result
};

// Rows from `end` on are outside of the result.
__device__ __forceinline__ void finish_rows(u32 tile, u32 inside, Walk walk, const Problem& p, int end) {
    uint4 v[GROUP_ROWS];
    u32 lane = threadIdx.x % 32, from = tile + inside * ROW_BYTES, swizzled = 16 * (lane ^ inside % 8);
#pragma unroll
    for (u32 i = 0; i < GROUP_ROWS; ++i) v[i] = read_piece(from + i * ROW_BYTES + (swizzled ^ (16 * i)));
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; ++i) {
        bool stored = walk.row + i < end;
        uint4 x = v[i];
        if (KEEP_PRE && stored) *(uint4*)((char*)p.pre + walk.at) = x;
        if (EPILOGUE) x = make_uint4(activate(x.x), activate(x.y), activate(x.z), activate(x.w));
        if (stored) *(uint4*)((char*)p.y + walk.at) = x;
        walk.at += 2 * p.n;
    }
}

// Finishes every `workers`-th group of rows of a tile, from group `worker` on. `handed_over` waits for a half of the
// tile, `taken` signals that the half is no longer needed.
template <typename HandedOver, typename Taken>
__device__ __forceinline__ void finish_tile(u32 buffer, const Problem& p, Tile tile, int worker, int workers,
                                            HandedOver handed_over, Taken taken) {
    int lane = threadIdx.x % 32, stride = workers * GROUP_ROWS, inside = worker * GROUP_ROWS;
    u64 bytes = 16 * (u64)(u32)(stride * (p.n / 8));
    int column = tile.column + 8 * lane, end = column < p.n ? min(p.m, tile.row + BM) : 0;
    Walk walk{tile.row + inside, ((u64)(tile.row + inside) * p.n + column) * 2};
    handed_over(0);
    bool upper = true;
#pragma unroll 1
    for (; inside < BM; inside += stride) {
        if (upper && inside >= BM / 2) {
            upper = false;
            taken(0);
            handed_over(1);
        }
        finish_rows(buffer, inside, walk, p, end);
        walk.row += stride, walk.at += bytes;
    }
    taken(1);
}

__device__ __forceinline__ void finish(const Shared& s, const Problem& p, int rows, int columns, u32 rank, int worker) {
    int turn = 0, total = rows * columns;
    for (int index = blockIdx.x / CLUSTER; index < total; index += gridDim.x / CLUSTER, ++turn) {
        auto handed_over = [&](int half) { barrier_wait(s.tile_full + 8 * half, turn & 1); };
        auto taken = [&](int half) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(s.tile_empty + 8 * half);
        };
        Tile tile = tile_at(index, rows, columns, rank);
        // The math warps help with the last tile, since they have nothing more to multiply.
        if (index + gridDim.x / CLUSTER < total)
            finish_tile(s.tile, p, tile, worker, EPILOGUE_WARPS, handed_over, taken);
        else
            finish_tile(s.tile, p, tile, worker, EPILOGUE_WARPS + MATH_WARPS, handed_over, taken);
    }
}

__device__ __forceinline__ void multiply(const Shared& s, const Problem& p, int steps, int rows, int columns,
                                         u32 rank, int part) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, slot = 0, turn = 0;
    const bool signals = threadIdx.x % 128 < CLUSTER;
    const u32 wide_bias = s.wide_bias + 2 * ROW_BYTES * part;
    u32 parity = 0;
    float d[BN / 2];
    for (int index = blockIdx.x / CLUSTER; index < rows * columns; index += gridDim.x / CLUSTER, ++turn) {
        int before = 0;
        for (int step = 0; step < steps; ++step) {
            barrier_wait(s.full + 8 * slot, parity);
            u64 a = along_k(s.x + X_BYTES * slot + X_BYTES / 2 * part), b = along_k(s.w + W_BYTES * slot);
            mma_fence();
#pragma unroll
            for (int i = 0; i < BK / 16; ++i) mma<0, 0>(d, a + 2 * i, b + 2 * i, step > 0 || i > 0);
            mma_commit();
            if (step > 0) {
                mma_wait<1>();
                if (signals) barrier_arrive_at(s.empty + 8 * before, threadIdx.x % 128);
            }
            before = slot;
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
        if (BIAS) widen_bias(wide_bias, s.bias + ROW_BYTES * (turn % BIAS_SLOTS), part);
        mma_wait(d);
        if (signals) barrier_arrive_at(s.empty + 8 * before, threadIdx.x % 128);
        barrier_wait(s.tile_empty + 8 * part, (turn & 1) ^ 1);
        hand_over(d, s.tile + HALF_TILE * part, wide_bias, warp, lane);
        barrier_arrive(s.tile_full + 8 * part);
    }
    if (turn == 0) return;
    // All warps finish the last tile.
    int worker = EPILOGUE_WARPS + part * 4 + warp, last = blockIdx.x / CLUSTER + (turn - 1) * (gridDim.x / CLUSTER);
    for (int half = 0; half < 2; ++half) barrier_wait(s.tile_full + 8 * half, (turn - 1) & 1);
    finish_tile(s.tile, p, tile_at(last, rows, columns, rank), worker, EPILOGUE_WARPS + MATH_WARPS, [](int) {},
                [](int) {});
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    linear_epilogue(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                    const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) char memory[];
    Shared s;
    s.x = shared_address(memory);
    s.w = s.x + STAGES * X_BYTES;
    s.tile = s.w + STAGES * W_BYTES;
    s.bias = s.tile + 2 * HALF_TILE;
    s.wide_bias = s.bias + BIAS_SLOTS * ROW_BYTES;
    s.full = s.wide_bias + 4 * ROW_BYTES;
    s.empty = s.full + 8 * STAGES;
    s.tile_full = s.empty + 8 * STAGES;
    s.tile_empty = s.tile_full + 16;
    int rows = (p.m + CLUSTER * BM - 1) / (CLUSTER * BM), columns = (p.n + BN - 1) / BN, steps = (p.k + BK - 1) / BK;
    u32 rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(s.full + 8 * i, 1);
            barrier_init(s.empty + 8 * i, 2 * CLUSTER);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(s.tile_full + 8 * i, MATH_THREADS);
            barrier_init(s.tile_empty + 8 * i, EPILOGUE_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    if (threadIdx.x < THREADS - 2 * MATH_THREADS) {
        give_registers<EPILOGUE_REGISTERS>();
        if (threadIdx.x >= 32)
            finish(s, p, rows, columns, rank, threadIdx.x / 32 - 1);
        else if (threadIdx.x == 0)
            produce(s, &x_map, &w_map, p, steps, rows, columns, rank);
        __syncwarp();
    } else {
        take_registers<MATH_REGISTERS>();
        multiply(s, p, steps, rows, columns, rank, threadIdx.x / MATH_THREADS - THREADS / MATH_THREADS + 2);
    }
    cluster_sync();  // keeps this program's shared memory until the other has sent and signalled everything
}
