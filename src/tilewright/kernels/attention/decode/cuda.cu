// Attention of few queries against a long cache, split over the keys (Flash-Decoding, Dao 2023): limited by memory.
//
// A lane is a batch entry and a head of k and v; the queries of all heads that share it are the rows of one tile. Its
// keys are cut into tiles of KEYS, and the tiles of all lanes, one after another, into equal shares, one a program: all
// multiprocessors read until the last tile. A warp takes every WARPS-th tile of its program by itself, from a ring of
// its own that asynchronous copies fill STAGES - 1 tiles ahead, also across the end of a lane, and keeps the maximum,
// the sum and the result O of its own keys; nobody waits for anybody:
//
//     program p:  [ end of lane l ][ lane l+1 ][ begin of lane l+2 ]     a share, in segments
//     warp 0        0   4   8        0   4       0   4   8
//     warp 1        1   5   9        1   5       1   5                   its tiles of each segment, WARPS = 4
//
// At the end of a segment the warps' parts are joined in shared memory. Where the segment is not the whole lane, O and
// the logarithm L of the sum go to scratch, and of the programs that have a part of a lane the last weighs them all:
//
//     L = log₂ Σₚ 2^Lₚ                O = Σₚ 2^(Lₚ - L) · Oₚ
//
// Keys and values leave L2 first: what others have written there need not be written back before it is used again.
//
// On an H200, bf16, 64 heads of 128 on 8 of k and v, cold, in shares of the copy bandwidth (cuDNN,
// `triton.py`): 0.98 to 1.08 (1.00 to 1.07, 0.97 to 1.06) for caches of 1 GB and more. 134 MB take 44 us, 0.73
// (49, 46). A kernel that reads them and nothing else takes 41.5 us, or 39.3 where they leave L2 first, be it by
// cp.async or by bulk copies, for lines that the call before has written must go back meanwhile; on a clean L2 33.2,
// 0.97, and this one 39.2. Without products and joins this kernel takes 39.5: the joins cost 3.7 us, the products
// 1.2. One query on 8 heads with 16384 keys, 33 MB, takes 30 us (33, 35). Lost at 134 MB: lines that do not leave L2
// first (3 us more, and 26 at 1 GB), 4 or 6 warps with deeper rings (2 to 7 more), rings of two tiles (as fast here,
// 4 to 12 more at 1 to 4 GB), tiles of 32 keys (2 more), fetches of 256 bytes to L2 (0.4 more, 63 at 4 GB), queries
// fetched to L2 ahead (0.7 less, 0 to 9 more elsewhere).
//
// Settings: HEAD (64 or 128) the size of a head, ROWS (8 or 16) of the tile of queries, KEYS (16 or 32) of a tile,
// WARPS, STAGES, HALF.

#include "hopper.cuh"

#define THREADS (32 * WARPS)
#define ROW_BYTES (2 * HEAD)
#define VECTORS (HEAD / 8)           // of 16 bytes in a row
#define TILE_BYTES (KEYS * ROW_BYTES)
#define STEP_BYTES (2 * TILE_BYTES)  // a tile of keys, then one of values
#define STEPS (HEAD / 16)            // of a product along the head
#define HALVES (ROWS / 8)            // a thread has row lane / 4 of each eight

using value = unsigned short;
using s64 = long long;

struct Strides {
    s64 batch, head, place;
};

__device__ __forceinline__ u64 leaves_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void copy_vector(u32 to, const value* from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

// d[16, 8] += a[16, 16] · b[16, 8].
__device__ __forceinline__ void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPES ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where vector `vector` of row `row` of a tile lies, so that eight rows of a matrix are in eight different banks.
__device__ __forceinline__ u32 place_of(int row, int vector) { return row * ROW_BYTES + ((vector ^ row % 8) << 4); }

struct Problem {
    const value *q, *k, *v;
    value* out;
    float *lse, *scratch;
    int* arrived;
    Strides q_strides, k_strides, v_strides, out_strides;
    int heads, kv_heads, group, queries, keys;
    int origin;  // the first key of a lane's first tile
    int tiles;   // of a lane
    int share;   // of a program; each of the first `longer` has one more
    int longer;
    int left, right;
    float factor;
};

// Rows [first, first + KEYS) of a matrix to the tile at `to`, by a warp; its last row in place of those beyond it.
__device__ __forceinline__ void copy_tile(u32 to, const value* from, s64 step, int first, int rows, u64 policy) {
    constexpr int AT_ONCE = 32 / VECTORS;
    int row = threadIdx.x % 32 / VECTORS, vector = threadIdx.x % VECTORS;
    from += vector * 8;
    if (first + KEYS <= rows) {
        from += (first + row) * step;
#pragma unroll
        for (int i = 0; i < KEYS; i += AT_ONCE) copy_vector(to + place_of(i + row, vector), from + i * step, policy);
    } else {
#pragma unroll 1
        for (int i = row; i < KEYS; i += AT_ONCE)
            copy_vector(to + place_of(i, vector), from + min(first + i, rows - 1) * step, policy);
    }
}

// A warp's tiles in the order in which it takes them, and where those of the present lane are.
struct Walk {
    int tile, end;  // the next of this warp, the end of its segment; both among the tiles of all lanes
    int begin;      // of the lane
    const value *k, *v;

    __device__ __forceinline__ void enter(const Problem& p, int first, int last, int warp) {
        int lane = first / p.tiles;
        begin = lane * p.tiles;
        end = min(last, begin + p.tiles);
        tile = first + warp;
        s64 batch = lane / p.kv_heads, head = lane % p.kv_heads;
        k = p.k + batch * p.k_strides.batch + head * p.k_strides.head;
        v = p.v + batch * p.v_strides.batch + head * p.v_strides.head;
    }

    // Copy the next tile to `to`, if the share has one.
    __device__ __forceinline__ void fetch(const Problem& p, u32 to, int last, int warp, u64 policy) {
        while (tile >= end && end < last) enter(p, end, last, warp);
        if (tile < end) {
            int first = p.origin + (tile - begin) * KEYS;
            copy_tile(to, k, p.k_strides.place, first, p.keys, policy);
            copy_tile(to + TILE_BYTES, v, p.v_strides.place, first, p.keys, policy);
            tile += WARPS;
        }
        copies_commit();
    }
};

// What a warp knows of its keys: in each half, the row's largest score and sum (in this thread's columns), and O.
struct State {
    float peak[HALVES], mass[HALVES];
    float acc[2 * STEPS][4];
};

// The keys from `first` on, which lie at `tile`, with their values. A row sees those from `low` to `high`.
__device__ __forceinline__ void attend(State& state, const u32 (&q)[STEPS][4], u32 tile, int first, bool edge,
                                       const int (&low)[HALVES], const int (&high)[HALVES], float factor) {
    int lane = threadIdx.x % 32, matrix = lane / 8;
    float products[KEYS / 8][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int pair = 0; pair < KEYS / 16; ++pair) {
            u32 k[4];
            load_matrices(k, tile + place_of(pair * 16 + matrix / 2 * 8 + lane % 8, 2 * step + matrix % 2));
            multiply_add(products[2 * pair], q[step], k[0], k[1]);
            multiply_add(products[2 * pair + 1], q[step], k[2], k[3]);
        }
    u32 weights[KEYS / 16][4] = {};
    float decay[HALVES];
    bool grown = false;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        float s[KEYS / 4], peak = state.peak[half], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) {
            int j = first + i / 2 * 8 + lane % 4 * 2 + i % 2;
            s[i] = products[i / 2][2 * half + i % 2] * factor;
            if (edge && (j < low[half] || j > high[half])) s[i] = -infinity();
            peak = fmaxf(peak, s[i]);
        }
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
        // A row that has seen no key yet: -inf - -inf would be NaN.
        float base = peak == -infinity() ? 0.0f : peak;
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) sum += s[i] = exp2_fast(s[i] - base);
        decay[half] = exp2_fast(state.peak[half] - base);
        grown |= peak != state.peak[half];
        state.peak[half] = peak;
        state.mass[half] = state.mass[half] * decay[half] + sum;
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i) weights[i / 2][i % 2 * 2 + half] = pack(s[2 * i], s[2 * i + 1]);
    }
    if (__any_sync(~0u, grown)) {
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i)
#pragma unroll
            for (int at = 0; at < 2 * HALVES; ++at) state.acc[i][at] *= decay[at / 2];
    }
#pragma unroll
    for (int pair = 0; pair < KEYS / 16; ++pair)
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 v[4];
            int row = pair * 16 + matrix % 2 * 8 + lane % 8;
            load_matrices_transposed(v, tile + TILE_BYTES + place_of(row, 2 * step + matrix / 2));
            multiply_add(state.acc[2 * step], weights[pair], v[0], v[1]);
            multiply_add(state.acc[2 * step + 1], weights[pair], v[2], v[3]);
        }
}

// The queries of a lane as the left operand of products along the head.
__device__ __forceinline__ void load_queries(u32 (&q)[STEPS][4], const Problem& p, int lane) {
    int thread = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = half * 8 + thread / 4;
        bool there = half < HALVES && row < p.group * p.queries;
        s64 batch = lane / p.kv_heads, head = lane % p.kv_heads * p.group + row / p.queries;
        const value* from = p.q + batch * p.q_strides.batch + head * p.q_strides.head +
                            row % p.queries * p.q_strides.place + thread % 4 * 2;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            q[step][half] = there ? *(const u32*)(from + step * 16) : 0;
            q[step][2 + half] = there ? *(const u32*)(from + step * 16 + 8) : 0;
        }
    }
}

__device__ __forceinline__ void store_result(const Problem& p, int lane, int row, int column, float4 x, float level) {
    s64 batch = lane / p.kv_heads, head = lane % p.kv_heads * p.group + row / p.queries;
    value* to = p.out + batch * p.out_strides.batch + head * p.out_strides.head +
                row % p.queries * p.out_strides.place + column;
    *(uint2*)to = make_uint2(pack(x.x, x.y), pack(x.z, x.w));
    // ln 2; the level of a row that sees no key is -inf.
    if (column == 0) p.lse[(batch * p.heads + head) * p.queries + row % p.queries] = level * 0.6931471805599453f;
}

// The first tile of a program's share.
__device__ __forceinline__ int begin_of(const Problem& p, int program) {
    return program * p.share + min(program, p.longer);
}

// Which program has a tile.
__device__ __forceinline__ int program_of(const Problem& p, int tile) {
    int in_longer = p.longer * (p.share + 1);
    return tile < in_longer ? tile / (p.share + 1) : p.longer + (tile - in_longer) / p.share;
}

// Where a program's part of a lane begins in scratch, counted in rows: it has at most two, of the lane that its share
// begins in and of that in which it ends.
__device__ __forceinline__ int part_of(int program, bool ends) { return (program * 2 + ends) * ROWS; }

// All programs' parts of a lane, by the last of them. The first program may end in the lane, the others begin there.
__device__ __forceinline__ void join_programs(const Problem& p, int lane, int program, int parts, bool ends) {
    const float* levels = p.scratch + gridDim.x * 2 * ROWS * HEAD;
    for (int at = threadIdx.x * 4; at < p.group * p.queries * HEAD; at += THREADS * 4) {
        int row = at / HEAD, column = at % HEAD;
        float peak = -infinity(), mass = 0.0f;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int i = 0; i < parts; ++i) {
            int from = part_of(program + i, i == 0 && ends) + row;
            float level = __ldcg(levels + from);
            float4 x = __ldcg((const float4*)(p.scratch + from * HEAD + column));
            float top = fmaxf(peak, level), base = top == -infinity() ? 0.0f : top;
            float decay = exp2_fast(peak - base), weight = exp2_fast(level - base);
            peak = top;
            mass = mass * decay + weight;
            sum.x = sum.x * decay + weight * x.x, sum.y = sum.y * decay + weight * x.y;
            sum.z = sum.z * decay + weight * x.z, sum.w = sum.w * decay + weight * x.w;
        }
        float share = mass == 0.0f ? 0.0f : __fdividef(1.0f, mass);
        sum.x *= share, sum.y *= share, sum.z *= share, sum.w *= share;
        store_result(p, lane, row, column, sum, mass == 0.0f ? -infinity() : peak + log2f(mass));
    }
}

// The warps' parts of a segment, through shared memory; then those of the programs. `levels` has two numbers for each
// warp and row: its peak and mass, of which `weigh` makes its share of the result and the level of the row.
__device__ __forceinline__ void weigh(float2* levels) {
    if (threadIdx.x >= ROWS) return;
    float peak = -infinity(), mass = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) peak = fmaxf(peak, levels[i * ROWS + threadIdx.x].x);
    float base = peak == -infinity() ? 0.0f : peak;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        float2& level = levels[i * ROWS + threadIdx.x];
        level.x = exp2_fast(level.x - base);
        mass += level.x * level.y;
    }
    float share = mass == 0.0f ? 0.0f : __fdividef(1.0f, mass), level = mass == 0.0f ? -infinity() : base + log2f(mass);
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        float2& own = levels[i * ROWS + threadIdx.x];
        own = make_float2(own.x * share, level);
    }
}

__device__ __forceinline__ void finish(const Problem& p, const State& state, int lane, bool whole, bool ends,
                                       float* sums, float2* levels, int* last) {
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32, row = thread / 4;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        float mass = state.mass[half];
        mass += __shfl_xor_sync(~0u, mass, 1);
        mass += __shfl_xor_sync(~0u, mass, 2);
        if (thread % 4 == 0) levels[warp * ROWS + half * 8 + row] = make_float2(state.peak[half], mass);
    }
    __syncthreads();
    weigh(levels);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        float weight = levels[warp * ROWS + half * 8 + row].x;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i) {
            // The columns of four rows lie in different banks.
            int column = (i * 8 + thread % 4 * 2) ^ row % 4 * 8;
            *(float2*)(sums + (warp * 8 + row) * HEAD + column) =
                make_float2(state.acc[i][2 * half] * weight, state.acc[i][2 * half + 1] * weight);
        }
        __syncthreads();
#pragma unroll 1
        for (int at = threadIdx.x * 4; at < 8 * HEAD; at += THREADS * 4) {
            int own = at / HEAD, column = at % HEAD, of_tile = half * 8 + own;
            if (of_tile >= p.group * p.queries) break;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int i = 0; i < WARPS; ++i) {
                float4 x = *(const float4*)(sums + (i * 8 + own) * HEAD + (column ^ own % 4 * 8));
                sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
            }
            float level = levels[of_tile].y;
            if (whole) {
                store_result(p, lane, of_tile, column, sum, level);
            } else {
                int to = part_of(blockIdx.x, ends) + of_tile;
                __stcg((float4*)(p.scratch + to * HEAD + column), sum);
                if (column == 0) __stcg(p.scratch + gridDim.x * 2 * ROWS * HEAD + to, level);
            }
        }
        __syncthreads();
    }
    if (whole) return;
    int program = program_of(p, lane * p.tiles), parts = program_of(p, (lane + 1) * p.tiles - 1) - program + 1;
    if (threadIdx.x == 0) {
        int before;
        // Releases what the block stored before it met, and acquires what the others did.
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(p.arrived + lane) : "memory");
        *last = before == parts - 1;
    }
    __syncthreads();
    if (*last) {
        join_programs(p, lane, program, parts, begin_of(p, program) < lane * p.tiles);
        if (threadIdx.x == 0) p.arrived[lane] = 0;
    }
}

// out, and lse of the natural logarithm, fp32 [batch, head, query]. scratch, fp32, has for each program two parts of
// ROWS rows: O of all of them, then L. arrived, one for each lane, is zero before and after.
extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) unsigned char memory[];
    float* sums = (float*)(memory + WARPS * STAGES * STEP_BYTES);
    float2* levels = (float2*)(sums + WARPS * 8 * HEAD);
    int* last_to_come = (int*)(levels + WARPS * ROWS);
    int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    u32 ring = shared_address(memory) + warp * STAGES * STEP_BYTES;
    int first = begin_of(p, blockIdx.x), last = begin_of(p, blockIdx.x + 1);
    u64 policy = leaves_first();
    Walk ahead;
    ahead.enter(p, first, last, warp);
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) ahead.fetch(p, ring + stage * STEP_BYTES, last, warp, policy);

    int shift = p.keys - p.queries;
    // What all rows see.
    int highest_low = shift + p.queries - 1 - p.left, lowest_high = min(p.keys - 1, shift + p.right);
    int stage = 0;
    while (first < last) {
        int lane = first / p.tiles, begin = lane * p.tiles, end = min(last, begin + p.tiles);
        u32 q[STEPS][4];
        load_queries(q, p, lane);
        State state = {};
        int low[HALVES], high[HALVES];
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            int place = (half * 8 + thread / 4) % p.queries + shift;
            low[half] = place - p.left;
            high[half] = min(p.keys - 1, place + p.right);
            state.peak[half] = -infinity();
        }
        for (int tile = first + warp; tile < end; tile += WARPS) {
            copies_wait<STAGES - 2>();
            // All copies of the warp are there, and what was read from the place of the next has been.
            __syncwarp();
            int behind = stage == 0 ? STAGES - 1 : stage - 1;
            ahead.fetch(p, ring + behind * STEP_BYTES, last, warp, policy);
            int key = p.origin + (tile - begin) * KEYS;
            bool edge = key < highest_low || key + KEYS - 1 > lowest_high;
            attend(state, q, ring + stage * STEP_BYTES, key, edge, low, high, p.factor);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        finish(p, state, lane, end - first == p.tiles, first != begin_of(p, blockIdx.x), sums, levels, last_to_come);
        first = end;
    }
}
