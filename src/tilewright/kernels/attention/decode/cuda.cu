// Attention of few queries against a long cache, split over the keys (Flash-Decoding, Dao 2023).
//
// A lane is a batch entry and a head of k and v; the queries of all heads that share it are the rows of one tile. Its
// keys are cut into tiles of KEYS, and the tiles of all lanes into equal shares, one a program, so that all
// multiprocessors read to the end. A warp takes every WARPS-th tile of its program from its own ring, which cp.async
// fills STAGES - 1 tiles ahead, across lanes, and keeps maximum, sum and O of its keys. At the end of a segment, its
// program's part of a lane, the warps merge in shared memory. Where a segment is not the whole lane, O and L go to
// scratch, and the last program of the lane combines them: L = log₂ Σₚ 2^Lₚ, O = Σₚ 2^(Lₚ - L) · Oₚ.
//
// Constants: HEAD (64 or 128), ROWS of the tile of queries (8 or 16), KEYS (16 or 32), WARPS, STAGES, HALF.
//
// Limit: memory. On an H200 0.98 to 1.08 of the copy bandwidth for caches of 1 GB and more, 0.73 for 134 MB (joins take
// 3.7 of 44 µs). Loads are evict-first, so they do not force dirty lines of other kernels out of L2.

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
    s64 batch, head, position;
};

__device__ __forceinline__ u64 evict_first_policy() {
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

// Offset in a tile of a row's 16-byte vector, swizzled so that ldmatrix reads eight rows without bank conflicts.
__device__ __forceinline__ u32 swizzled_offset(int row, int vector) {
    return row * ROW_BYTES + ((vector ^ row % 8) << 4);
}

struct Problem {
    const value *q, *k, *v;
    value* out;
    float *lse, *scratch;
    int* counters;
    Strides q_strides, k_strides, v_strides, out_strides;
    int heads, kv_heads, group, queries, keys;
    int origin;  // the first key of a lane's first tile
    int tiles;   // of a lane
    int tiles_per_program;  // each of the first `remainder` programs has one more
    int remainder;
    int left, right;
    float factor;
};

// A warp copies rows [first, first + KEYS) of a matrix to the tile at `to`; beyond the last row it repeats that one.
__device__ __forceinline__ void copy_tile(u32 to, const value* from, s64 step, int first, int rows, u64 policy) {
    constexpr int AT_ONCE = 32 / VECTORS;
    int row = threadIdx.x % 32 / VECTORS, vector = threadIdx.x % VECTORS;
    from += vector * 8;
    if (first + KEYS <= rows) {
        from += (first + row) * step;
#pragma unroll
        for (int i = 0; i < KEYS; i += AT_ONCE)
            copy_vector(to + swizzled_offset(i + row, vector), from + i * step, policy);
    } else {
#pragma unroll 1
        for (int i = row; i < KEYS; i += AT_ONCE)
            copy_vector(to + swizzled_offset(i, vector), from + min(first + i, rows - 1) * step, policy);
    }
}

// Iterates over the tiles that a warp copies, from lane to lane of its program's share.
struct TileIterator {
    int tile, end;  // the warp's next tile and the end of the segment, counted over all lanes
    int begin;      // first tile of the lane
    const value *k, *v;

    __device__ __forceinline__ void enter_lane(const Problem& p, int first, int last, int warp) {
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
        while (tile >= end && end < last) enter_lane(p, end, last, warp);
        if (tile < end) {
            int first = p.origin + (tile - begin) * KEYS;
            copy_tile(to, k, p.k_strides.position, first, p.keys, policy);
            copy_tile(to + TILE_BYTES, v, p.v_strides.position, first, p.keys, policy);
            tile += WARPS;
        }
        copies_commit();
    }
};

// Online softmax of a warp's keys: maximum and sum of each row (in this thread's columns), and O.
struct State {
    float row_max[HALVES], row_sum[HALVES];
    float acc[2 * STEPS][4];
};

// Adds the keys from `first` on, and their values, which are at `tile`. A row sees keys `low` to `high`.
__device__ __forceinline__ void attend(State& state, const u32 (&q)[STEPS][4], u32 tile, int first, bool edge,
                                       const int (&low)[HALVES], const int (&high)[HALVES], float factor) {
    int lane = threadIdx.x % 32, matrix = lane / 8;
    float products[KEYS / 8][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int pair = 0; pair < KEYS / 16; ++pair) {
            u32 k[4];
            load_matrices(k, tile + swizzled_offset(pair * 16 + matrix / 2 * 8 + lane % 8, 2 * step + matrix % 2));
            multiply_add(products[2 * pair], q[step], k[0], k[1]);
            multiply_add(products[2 * pair + 1], q[step], k[2], k[3]);
        }
    u32 weights[KEYS / 16][4] = {};
    float rescale[HALVES];
    bool max_changed = false;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        float s[KEYS / 4], row_max = state.row_max[half], sum = 0.0f;
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) {
            int j = first + i / 2 * 8 + lane % 4 * 2 + i % 2;
            s[i] = products[i / 2][2 * half + i % 2] * factor;
            if (edge && (j < low[half] || j > high[half])) s[i] = -infinity();
            row_max = fmaxf(row_max, s[i]);
        }
        row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
        row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
        // A row that has seen no key yet: -inf - -inf would be NaN.
        float base = row_max == -infinity() ? 0.0f : row_max;
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) sum += s[i] = exp2_fast(s[i] - base);
        rescale[half] = exp2_fast(state.row_max[half] - base);
        max_changed |= row_max != state.row_max[half];
        state.row_max[half] = row_max;
        state.row_sum[half] = state.row_sum[half] * rescale[half] + sum;
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i) weights[i / 2][i % 2 * 2 + half] = pack(s[2 * i], s[2 * i + 1]);
    }
    if (__any_sync(~0u, max_changed)) {
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i)
#pragma unroll
            for (int at = 0; at < 2 * HALVES; ++at) state.acc[i][at] *= rescale[at / 2];
    }
#pragma unroll
    for (int pair = 0; pair < KEYS / 16; ++pair)
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 v[4];
            int row = pair * 16 + matrix % 2 * 8 + lane % 8;
            load_matrices_transposed(v, tile + TILE_BYTES + swizzled_offset(row, 2 * step + matrix / 2));
            multiply_add(state.acc[2 * step], weights[pair], v[0], v[1]);
            multiply_add(state.acc[2 * step + 1], weights[pair], v[2], v[3]);
        }
}

// Loads a lane's queries as the left operand of Q Kᵀ.
__device__ __forceinline__ void load_queries(u32 (&q)[STEPS][4], const Problem& p, int lane) {
    int thread = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = half * 8 + thread / 4;
        bool valid = half < HALVES && row < p.group * p.queries;
        s64 batch = lane / p.kv_heads, head = lane % p.kv_heads * p.group + row / p.queries;
        const value* from = p.q + batch * p.q_strides.batch + head * p.q_strides.head +
                            row % p.queries * p.q_strides.position + thread % 4 * 2;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            q[step][half] = valid ? *(const u32*)(from + step * 16) : 0;
            q[step][2 + half] = valid ? *(const u32*)(from + step * 16 + 8) : 0;
        }
    }
}

__device__ __forceinline__ void store_result(const Problem& p, int lane, int row, int column, float4 x, float lse2) {
    s64 batch = lane / p.kv_heads, head = lane % p.kv_heads * p.group + row / p.queries;
    value* to = p.out + batch * p.out_strides.batch + head * p.out_strides.head +
                row % p.queries * p.out_strides.position + column;
    *(uint2*)to = make_uint2(pack(x.x, x.y), pack(x.z, x.w));
    // times ln 2; -inf for a row that sees no key
    if (column == 0) p.lse[(batch * p.heads + head) * p.queries + row % p.queries] = lse2 * 0.6931471805599453f;
}

// The first of a program's tiles.
__device__ __forceinline__ int first_tile(const Problem& p, int program) {
    return program * p.tiles_per_program + min(program, p.remainder);
}

// The program that has a tile.
__device__ __forceinline__ int program_of(const Problem& p, int tile) {
    int in_first = p.remainder * (p.tiles_per_program + 1);
    return tile < in_first ? tile / (p.tiles_per_program + 1) : p.remainder + (tile - in_first) / p.tiles_per_program;
}

// First row in scratch of a program's part of a lane. A program has at most two parts: of the lane in which its share
// begins, and of the one in which it ends.
__device__ __forceinline__ int part_row(int program, bool ends) { return (program * 2 + ends) * ROWS; }

// Combines all programs' parts of a lane. For the first program that may be its second part.
__device__ __forceinline__ void combine_programs(const Problem& p, int lane, int program, int parts, bool ends) {
    const float* part_lse2 = p.scratch + gridDim.x * 2 * ROWS * HEAD;
    for (int at = threadIdx.x * 4; at < p.group * p.queries * HEAD; at += THREADS * 4) {
        int row = at / HEAD, column = at % HEAD;
        float row_max = -infinity(), row_sum = 0.0f;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int i = 0; i < parts; ++i) {
            int from = part_row(program + i, i == 0 && ends) + row;
            float lse2 = __ldcg(part_lse2 + from);
            float4 x = __ldcg((const float4*)(p.scratch + from * HEAD + column));
            float top = fmaxf(row_max, lse2), base = top == -infinity() ? 0.0f : top;
            float rescale = exp2_fast(row_max - base), weight = exp2_fast(lse2 - base);
            row_max = top;
            row_sum = row_sum * rescale + weight;
            sum.x = sum.x * rescale + weight * x.x, sum.y = sum.y * rescale + weight * x.y;
            sum.z = sum.z * rescale + weight * x.z, sum.w = sum.w * rescale + weight * x.w;
        }
        float inverse = row_sum == 0.0f ? 0.0f : __fdividef(1.0f, row_sum);
        sum.x *= inverse, sum.y *= inverse, sum.z *= inverse, sum.w *= inverse;
        store_result(p, lane, row, column, sum, row_sum == 0.0f ? -infinity() : row_max + log2f(row_sum));
    }
}

// Merges the warps' statistics of a segment. `stats` [warp, row] holds maximum and sum, and then the warp's weight in
// the result and the row's log-sum-exp in powers of two.
__device__ __forceinline__ void merge_warps(float2* stats) {
    if (threadIdx.x >= ROWS) return;
    float row_max = -infinity(), row_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) row_max = fmaxf(row_max, stats[i * ROWS + threadIdx.x].x);
    float base = row_max == -infinity() ? 0.0f : row_max;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        float2& stat = stats[i * ROWS + threadIdx.x];
        stat.x = exp2_fast(stat.x - base);
        row_sum += stat.x * stat.y;
    }
    float inverse = row_sum == 0.0f ? 0.0f : __fdividef(1.0f, row_sum);
    float lse2 = row_sum == 0.0f ? -infinity() : base + log2f(row_sum);
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        float2& stat = stats[i * ROWS + threadIdx.x];
        stat = make_float2(stat.x * inverse, lse2);
    }
}

__device__ __forceinline__ void finish_segment(const Problem& p, const State& state, int lane, bool whole, bool ends,
                                       float* sums, float2* stats, int* last) {
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32, row = thread / 4;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        float row_sum = state.row_sum[half];
        row_sum += __shfl_xor_sync(~0u, row_sum, 1);
        row_sum += __shfl_xor_sync(~0u, row_sum, 2);
        if (thread % 4 == 0) stats[warp * ROWS + half * 8 + row] = make_float2(state.row_max[half], row_sum);
    }
    __syncthreads();
    merge_warps(stats);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        float weight = stats[warp * ROWS + half * 8 + row].x;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i) {
            // Swizzled, so that four rows are in different banks.
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
            float lse2 = stats[of_tile].y;
            if (whole) {
                store_result(p, lane, of_tile, column, sum, lse2);
            } else {
                int to = part_row(blockIdx.x, ends) + of_tile;
                __stcg((float4*)(p.scratch + to * HEAD + column), sum);
                if (column == 0) __stcg(p.scratch + gridDim.x * 2 * ROWS * HEAD + to, lse2);
            }
        }
        __syncthreads();
    }
    if (whole) return;
    int program = program_of(p, lane * p.tiles), parts = program_of(p, (lane + 1) * p.tiles - 1) - program + 1;
    if (threadIdx.x == 0) {
        int done;
        // Releases the block's stores, and acquires those of the other programs.
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(done) : "l"(p.counters + lane) : "memory");
        *last = done == parts - 1;
    }
    __syncthreads();
    if (*last) {
        combine_programs(p, lane, program, parts, first_tile(p, program) < lane * p.tiles);
        if (threadIdx.x == 0) p.counters[lane] = 0;
    }
}

// Writes out, and lse fp32 [batch, head, query], a natural logarithm. scratch, fp32: O of two parts of ROWS rows for
// each program, then L of each row. counters: one for each lane, zero before and after.
extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) unsigned char memory[];
    float* sums = (float*)(memory + WARPS * STAGES * STEP_BYTES);
    float2* stats = (float2*)(sums + WARPS * 8 * HEAD);
    int* is_last = (int*)(stats + WARPS * ROWS);
    int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    u32 ring = shared_address(memory) + warp * STAGES * STEP_BYTES;
    int first = first_tile(p, blockIdx.x), last = first_tile(p, blockIdx.x + 1);
    u64 policy = evict_first_policy();
    TileIterator prefetch;
    prefetch.enter_lane(p, first, last, warp);
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) prefetch.fetch(p, ring + stage * STEP_BYTES, last, warp, policy);

    int shift = p.keys - p.queries;
    // All rows see the keys from highest_low to lowest_high.
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
            int position = (half * 8 + thread / 4) % p.queries + shift;
            low[half] = position - p.left;
            high[half] = min(p.keys - 1, position + p.right);
            state.row_max[half] = -infinity();
        }
        for (int tile = first + warp; tile < end; tile += WARPS) {
            copies_wait<STAGES - 2>();
            // The whole warp's copies have landed, and the slot of the next copy has been read.
            __syncwarp();
            int previous = stage == 0 ? STAGES - 1 : stage - 1;
            prefetch.fetch(p, ring + previous * STEP_BYTES, last, warp, policy);
            int key = p.origin + (tile - begin) * KEYS;
            bool edge = key < highest_low || key + KEYS - 1 > lowest_high;
            attend(state, q, ring + stage * STEP_BYTES, key, edge, low, high, p.factor);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        bool whole = end - first == p.tiles, ends = first != first_tile(p, blockIdx.x);
        finish_segment(p, state, lane, whole, ends, sums, stats, is_last);
        first = end;
    }
}
