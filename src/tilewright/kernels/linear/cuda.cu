// y = epilogue(x · wᵀ + bias) for Hopper: one persistent cluster of two programs for each pair of SMs.
//
//   x [M, K], w [N, K], bias [N], residual [M, N], y [M, N]: one 16-bit dtype, rows contiguous; sums in fp32.
//
// A program owns tiles of 128 × COLUMNS and has twelve warps, or sixteen:
//
//   0      producer   one thread issues bulk tensor copies of x and w into a ring of STAGES slots. Both programs
//                     of a cluster need the same rows of w: each fetches half and multicasts it to both.
//   next   epilogue   three warps for 256 columns, whose sums leave registers for no more, seven for 192: they
//                     read the hand-over buffer by rows, apply GELU, or dropout and residual, and store, while
//                     the math warps are in the main loop of the next tile.
//   last   math       two warpgroups of 64 rows each: wgmma into registers, then + bias, rounded, into the
//                     hand-over buffer in shared memory, and on to the next tile at once.
//
// Limit: the matrix rate under the power cap. H200, bf16, interleaved medians in TFLOP/s, 256 columns (192):
//
//   M x N x K               8192x16384x4096  8192x4096x16384  16384x3072x768  4096x4096x4096
//   cuBLAS, product alone         669              695              667             748
//   product alone                 689 (694)        695 (674)        677 (666)       738 (664)
//   GELU by erf                   675 (666)        691 (665)        563 (525)       717 (632)
//   GELU by tanh                  677 (679)        691 (669)        601 (578)       722 (642)
//   residual                      673 (676)        691 (669)        592 (565)       716 (637)
//   dropout and residual          573 (560)        663 (635)        370 (352)       643 (560)
//   ... one Philox round          658 (652)        687 (663)        549 (515)       701 (624)
//
// An epilogue hides under the products only in part: 192 columns with seven epilogue warps in place of three win
// nothing, so their latency is not what is waited for. Eager's ten Philox rounds add their own time at every
// depth, as if the matrix units stood still meanwhile.
//
// What it took, and what lost:
//   - an arrival at the neighbour's barrier with .release.cluster is a fence of the whole GPU: 550 in place of 700
//   - epilogue warps that compute 1, 2, 4 rows together: 505, 540, 566 (erf, K = 768)
//   - the residual fetched into registers one group ahead: 519 in place of 600 (K = 768)
//   - the last tile finished by the epilogue warps alone: 532 in place of 540 (K = 768), 727 in place of 741 (4096)
//   - a product of two words as two instructions (low, high) in a Philox round: the same as one
//   - plain Triton over tensor descriptors (triton.py), GELU by erf: 622, 683, 442, 697
//
// Settings: COLUMNS, STAGES, EPILOGUE (0 none, 1 GELU by erf, 2 GELU by tanh, 3 residual, 4 dropout and residual),
// BIAS, KEEP_PRE (the value before the activation is stored too), HALF (fp16, otherwise bf16).

#include "epilogue.cuh"
#include "ptx.cuh"

constexpr int BM = 128, BN = COLUMNS, BK = 64, CLUSTER = 2;
constexpr int GROUP = 8;  // rows of cluster tiles that are walked together
constexpr int X_BYTES = BM * BK * 2, W_BYTES = BN * BK * 2, W_PART = W_BYTES / CLUSTER;
constexpr int ROW_BYTES = BN * 2, HALF_TILE = BM / 2 * ROW_BYTES;
constexpr int BIAS_SLOTS = STAGES + 1;  // with one step a tile the producer is STAGES tiles ahead of the additions
constexpr int EPILOGUE_WARPS = BN == 256 ? 3 : 7, MATH_THREADS = 128, WARP_ROWS = 16;
constexpr int THREADS = 32 * (1 + EPILOGUE_WARPS) + 2 * MATH_THREADS;
// Registers a thread; twelve or sixteen warps start with 168 or 128.
constexpr int EPILOGUE_REGISTERS = BN == 256 ? 136 : 104, MATH_REGISTERS = BN == 256 ? 184 : 152;
constexpr int GROUP_ROWS = BN == 256 ? 4 : 2;  // rows that an epilogue warp computes together
constexpr int RING = 2;                        // groups of rows of the residual on their way to it
constexpr int RING_BYTES = RING * GROUP_ROWS * 512;

struct Problem {
    int m, n, k;
    void* y;
    void* pre;
    const void* bias;
    const void* residual;
    Draw draw;
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
    u32 x, w, tile, residual, bias, full, empty, tile_full, tile_empty;
};

__device__ __forceinline__ void produce(const Shared& s, const TensorMap* x_map, const TensorMap* w_map,
                                        const Problem& p, int steps, int rows, int columns, u32 rank) {
    int slot = 0, turn = 0;
    u32 parity = 1;
    for (int index = blockIdx.x / CLUSTER; index < rows * columns; index += gridDim.x / CLUSTER, ++turn) {
        Tile tile = tile_at(index, rows, columns, rank);
        for (int step = 0; step < steps; ++step) {
            u32 full = s.full + 8 * slot;
            barrier_wait(s.empty + 8 * slot, parity);
            u32 bias_bytes = BIAS && step == 0 ? 2 * min(BN, p.n - tile.column) : 0;
            barrier_expect(full, X_BYTES + W_BYTES + bias_bytes);
            if (bias_bytes)
                copy_bytes(s.bias + ROW_BYTES * (turn % BIAS_SLOTS), (const char*)p.bias + 2 * tile.column, bias_bytes,
                           full);
            copy_tile(s.x + X_BYTES * slot, x_map, full, step * BK, tile.row);
            copy_tile_to_all(s.w + W_BYTES * slot + W_PART * rank, w_map, full, step * BK,
                             tile.column + BN / CLUSTER * (int)rank, (1 << CLUSTER) - 1);
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
    }
}

// Rounded sums to the hand-over buffer: row r's 16-byte pieces are permuted by r mod 8 against bank conflicts.
__device__ __forceinline__ void hand_over(const float (&d)[BN / 2], u32 tile, u32 bias, int warp, int lane) {
    u32 row = tile + (warp * WARP_ROWS + lane % 16) * ROW_BYTES;
    u32 piece = 16 * ((lane / 16) ^ (lane % 8));
#pragma unroll
    for (int j = 0; j < BN / 16; ++j) {
        u32 pairs[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* v = d + 8 * j + 4 * half;
            float2 b = make_float2(0.0f, 0.0f);
            if (BIAS) {
                u32 pair;
                asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(bias + 32 * j + 16 * half + 4 * (lane % 4)));
                b = unpack(pair);
            }
            pairs[2 * half] = pack(v[0] + b.x, v[1] + b.y);
            pairs[2 * half + 1] = pack(v[2] + b.x, v[3] + b.y);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row + (piece ^ (32 * j))),
                     "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]) : "memory");
    }
}

__device__ __forceinline__ Draw drawn_from(Draw draw, bool keeper) {
    if (draw.captured) {
        draw.seed = draw.state[0], draw.offset = draw.state[1];
    } else if (keeper && blockIdx.x == 0) {
        draw.state[0] = draw.seed, draw.state[1] = draw.offset;
    }
    return draw;
}

// Where the walk of a warp down its column pieces stands: its next rows, and eager's numbers for them.
struct Walk {
    int row;          // in the result
    u64 at;           // position of the lane's piece, in pieces
    u32 turn, thread;
};

__device__ __forceinline__ Walk walk_from(const Problem& p, const Draw& draw, int row, int column) {
    Walk walk;
    walk.row = row;
    walk.at = ((u64)row * p.n + column) / 8;
    if (EPILOGUE == 4) walk.turn = (u32)walk.at / draw.threads, walk.thread = (u32)walk.at % draw.threads;
    return walk;
}

__device__ __forceinline__ void advance(Walk& walk, const Draw& draw, int rows, u32 pieces, u32 turns, u32 threads) {
    walk.row += rows;
    walk.at += pieces;
    if (EPILOGUE == 4) {
        walk.turn += turns, walk.thread += threads;
        if (walk.thread >= draw.threads) walk.thread -= draw.threads, ++walk.turn;
    }
}

// A lane fetches what it will read itself, so that nothing but its own copies needs waiting for.
__device__ __forceinline__ void fetch_residual(u32 ring, int group, const Problem& p, int row, int column, int lane) {
    if (EPILOGUE >= 3) {
#pragma unroll
        for (int i = 0; i < GROUP_ROWS; ++i) {
            const uint4* from = (const uint4*)p.residual + ((u64)(row + i) * p.n + column) / 8;
            u32 to = ring + (group % RING * GROUP_ROWS + i) * 512 + 16 * lane;
            if (column < p.n && row + i < p.m)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
}

__device__ __forceinline__ uint4 read_piece(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}

__device__ __forceinline__ void finish_rows(u32 tile, int inside, u32 ring, int group, Walk walk, const Problem& p,
                                            int column, int lane, const Draw& draw) {
    if (EPILOGUE >= 3) asm volatile("cp.async.wait_group %0;" ::"n"(RING - 1) : "memory");
    uint4 v[GROUP_ROWS], r[GROUP_ROWS];
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; ++i) {
        v[i] = read_piece(tile + (inside + i) * ROW_BYTES + 16 * (lane ^ ((inside + i) % 8)));
        if (EPILOGUE >= 3) r[i] = read_piece(ring + (group % RING * GROUP_ROWS + i) * 512 + 16 * lane);
    }
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; ++i) {
        bool stored = column < p.n && walk.row < p.m;
        uint4 x = v[i];
        if (KEEP_PRE && stored) ((uint4*)p.pre)[walk.at] = x;
        if (EPILOGUE == 1 || EPILOGUE == 2) x = make_uint4(activate(x.x), activate(x.y), activate(x.z), activate(x.w));
        if (EPILOGUE == 3)
            x = make_uint4(add(x.x, r[i].x), add(x.y, r[i].y), add(x.z, r[i].z), add(x.w, r[i].w));
        if (EPILOGUE == 4) x = drop_and_add(x, r[i], walk.turn, walk.thread, draw);
        if (stored) ((uint4*)p.y)[walk.at] = x;
        advance(walk, draw, 1, p.n / 8, draw.row_turn, draw.row_thread);
    }
}

__device__ __forceinline__ void finish(const Shared& s, const Problem& p, int rows, int columns, u32 rank, int worker) {
    constexpr int STRIDE = EPILOGUE_WARPS * GROUP_ROWS;
    int lane = threadIdx.x % 32, turn = 0;
    Draw draw = EPILOGUE == 4 ? drawn_from(p.draw, worker == 0 && lane == 0) : p.draw;
    u32 pieces = STRIDE * (p.n / 8), turns = EPILOGUE == 4 ? pieces / draw.threads : 0;
    u32 ring = s.residual + worker * RING_BYTES;
    int total = rows * columns;
    for (int index = blockIdx.x / CLUSTER; index < total; index += gridDim.x / CLUSTER, ++turn) {
        if (index + gridDim.x / CLUSTER >= total) break;  // the math warps finish the last tile
        Tile tile = tile_at(index, rows, columns, rank);
        int column = 8 * lane < BN ? tile.column + 8 * lane : p.n, inside = worker * GROUP_ROWS;
        Walk walk = walk_from(p, draw, tile.row + inside, column);
        for (int group = 0; group < RING; ++group)
            fetch_residual(ring, group, p, walk.row + group * STRIDE, column, lane);
        barrier_wait(s.tile_full, turn & 1);
        bool upper = true;
#pragma unroll 1
        for (int group = 0; inside < BM; ++group, inside += STRIDE) {
            if (upper && inside >= BM / 2) {
                upper = false;
                __syncwarp();
                if (lane == 0) barrier_arrive(s.tile_empty);
                barrier_wait(s.tile_full + 8, turn & 1);
            }
            finish_rows(s.tile, inside, ring, group, walk, p, column, lane, draw);
            int next = inside + RING * STRIDE < BM ? walk.row + RING * STRIDE : p.m;
            fetch_residual(ring, group, p, next, column, lane);
            advance(walk, draw, STRIDE, pieces, turns, pieces - turns * draw.threads);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(s.tile_empty + 8);
    }
}

// The last tile of a program: nothing is left to multiply, so its math warps finish the rows they made.
__device__ __forceinline__ void finish_own(const Shared& s, const Problem& p, Tile tile, int part, int warp, int lane) {
    Draw draw = EPILOGUE == 4 ? drawn_from(p.draw, false) : p.draw;
    int first = part * (BM / 2) + warp * WARP_ROWS, column = 8 * lane < BN ? tile.column + 8 * lane : p.n;
    u32 ring = s.x + (part * 4 + warp) * RING_BYTES;  // no tile will come into the slots again
    Walk walk = walk_from(p, draw, tile.row + first, column);
    for (int group = 0; group < RING; ++group)
        fetch_residual(ring, group, p, walk.row + group * GROUP_ROWS, column, lane);
#pragma unroll 1
    for (int group = 0; group < WARP_ROWS / GROUP_ROWS; ++group) {
        finish_rows(s.tile, first + group * GROUP_ROWS, ring, group, walk, p, column, lane, draw);
        int next = group + RING < WARP_ROWS / GROUP_ROWS ? walk.row + RING * GROUP_ROWS : p.m;
        fetch_residual(ring, group, p, next, column, lane);
        for (int i = 0; i < GROUP_ROWS; ++i) advance(walk, draw, 1, p.n / 8, draw.row_turn, draw.row_thread);
    }
}

__device__ __forceinline__ void multiply(const Shared& s, const Problem& p, int steps, int rows, int columns,
                                         u32 rank, int part) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, slot = 0, turn = 0;
    const bool signals = threadIdx.x % 128 < CLUSTER;
    u32 parity = 0;
    float d[BN / 2];
    for (int index = blockIdx.x / CLUSTER; index < rows * columns; index += gridDim.x / CLUSTER, ++turn) {
        int before = 0;
        for (int step = 0; step < steps; ++step) {
            barrier_wait(s.full + 8 * slot, parity);
            u64 a = descriptor(s.x + X_BYTES * slot + X_BYTES / 2 * part), b = descriptor(s.w + W_BYTES * slot);
            mma_fence();
#pragma unroll
            for (int i = 0; i < BK / 16; ++i) mma(d, a + 2 * i, b + 2 * i, step > 0 || i > 0);
            mma_commit();
            if (step > 0) {
                mma_wait_one();
                if (signals) barrier_arrive_at(s.empty + 8 * before, threadIdx.x % 128);
            }
            before = slot;
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
        mma_wait(d);
        if (signals) barrier_arrive_at(s.empty + 8 * before, threadIdx.x % 128);
        barrier_wait(s.tile_empty + 8 * part, (turn & 1) ^ 1);
        hand_over(d, s.tile + HALF_TILE * part, s.bias + ROW_BYTES * (turn % BIAS_SLOTS), warp, lane);
        if (index + gridDim.x / CLUSTER >= rows * columns) {
            // Both warpgroups have read the slots, which become rings.
            asm volatile("bar.sync 1, 256;" ::: "memory");
            finish_own(s, p, tile_at(index, rows, columns, rank), part, warp, lane);
        } else {
            barrier_arrive(s.tile_full + 8 * part);
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    linear_epilogue(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                    const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) char memory[];
    Shared s;
    s.x = shared_address(memory);
    s.w = s.x + STAGES * X_BYTES;
    s.tile = s.w + STAGES * W_BYTES;
    s.residual = s.tile + 2 * HALF_TILE;
    s.bias = s.residual + EPILOGUE_WARPS * RING_BYTES;
    s.full = s.bias + BIAS_SLOTS * ROW_BYTES;
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
    cluster_sync();  // a program's shared memory stays until its neighbour has sent and signalled all it will
}
