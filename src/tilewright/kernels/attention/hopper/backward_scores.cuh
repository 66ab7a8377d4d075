// Scores of attention's backward on Hopper: which blocks of queries see a block of keys, P and dS in registers, dSᵀ on
// its way to shared memory, and sums of dQ.
//
// The including file sets HEAD, QUERIES, BANDED and BLOCK_KEYS, the keys of a block. Scores are transposed,
// Sᵀ [64 keys, QUERIES], in the registers of a warpgroup's product: thread t of warp w has rows 16 w + t / 4 and eight
// further, of columns 8 i + 2 (t % 4) and the next, at indices 4 i to 4 i + 3.

#pragma once

#include "instructions.cuh"

constexpr int GROUP_THREADS = 128, GROUP_WARPS = GROUP_THREADS / 32, ROW_BYTES = QUERIES * 4;  // of lse and Δ

struct Problem {
    float* dq_sums;      // [batch · heads, q_blocks, QUERIES · HEAD]
    const float* lse;    // [batch · heads, q_blocks · QUERIES], times log2 e; infinite where a query sees no key
    const float* delta;
    u32* work_counters;  // blocks of keys that are claimed; pieces of sums that are claimed, to round them
    // Where DQ_WARPS: dQ [batch, heads, queries, width], with its strides in elements; for each key head, the slices
    // of its sums that are zeroed and the blocks of its keys that are added.
    char* dq;
    u64 dq_batch, dq_head, dq_position;
    u32 *zeroed, *added;
    int queries, keys, q_blocks, heads, group, kv_heads, k_blocks, blocks;  // k_blocks of a head, `blocks` of all
    int width, ahead;    // the head size without padding; key heads whose sums are zeroed by an earlier kernel
    int below, above;    // query i sees key j where -below <= j - i <= above
    float scale, scale_log2;
};

// BLOCK_KEYS keys of one key head from `key` on. A negative key: there is no block left.
struct Block {
    int key, kv_head, batch;
};

__device__ __forceinline__ Block block_at(const Problem& p, int index) {
    return {index % p.k_blocks * BLOCK_KEYS, index / p.k_blocks % p.kv_heads, index / p.k_blocks / p.kv_heads};
}

// A block in 16 bytes of shared memory.
__device__ __forceinline__ void store_block(u32 to, const Block& at) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %3};" ::"r"(to), "r"(at.key), "r"(at.kv_head), "r"(at.batch)
                 : "memory");
}

__device__ __forceinline__ Block load_block(u32 from) {
    Block at;
    asm volatile("{\n.reg .b32 unused;\nld.shared.v4.b32 {%0, %1, %2, unused}, [%3];\n}"
                 : "=r"(at.key), "=r"(at.kv_head), "=r"(at.batch) : "r"(from) : "memory");
    return at;
}

// Iterates over the blocks of queries that see BLOCK_KEYS keys from `key` on, one query head of the group after another.
struct QueryIterator {
    int first, end, head, block;
    int skipped;  // blocks of a head that do not see the keys
    int left;     // blocks of this head, this one included
    u32 index;    // of the block, over all heads
    __device__ __forceinline__ QueryIterator(const Problem& p, int key, int kv_head, int batch)
        : head(kv_head * p.group) {
        int last = min(key + BLOCK_KEYS, p.keys);
        first = BANDED ? max(0, key - p.above) / QUERIES : 0;
        end = BANDED ? min(p.q_blocks, max(0, last + p.below + QUERIES - 1) / QUERIES) : p.q_blocks;
        skipped = p.q_blocks - (end - first);
        block = first, left = end - first;
        index = (batch * p.heads + head) * p.q_blocks + first;
    }
    __device__ __forceinline__ int steps(int group) const { return max(0, end - first) * group; }
    __device__ __forceinline__ void advance() {
        ++index, ++block;
        if (--left == 0) {
            asm volatile("");  // keeps the branch: selections would be computed at every step
            block = first, left = end - first, ++head, index += skipped;
        }
    }
};

// This thread's part of the scores of 64 keys from `key` on and a block of queries from `query` on.
struct Scores {
    const Problem& p;
    int key, query, row, column;
    __device__ __forceinline__ Scores(const Problem& p, int key, int query, int warp, int lane)
        : p(p), key(key), query(query), row(key + warp * 16 + lane / 4), column(query + lane % 4 * 2) {}

    // Whether any of `keys` keys from `from` on is hidden from any of the queries.
    __device__ __forceinline__ bool needs_mask(int from, int keys) const {
        bool past = from + keys > p.keys;
        if (!BANDED) return past;
        return past | (from + keys - 1 - query > p.above) | (from - (query + QUERIES - 1) < -p.below);
    }

    // Sets scores of hidden keys to -inf.
    __device__ __forceinline__ void apply_mask(float (&scores)[QUERIES / 2]) const {
#pragma unroll
        for (int i = 0; i < QUERIES / 2; ++i) {
            int j = row + i / 2 % 2 * 8, distance = j - (column + i / 4 * 8 + i % 2);
            if (j >= p.keys || (BANDED && (distance > p.above || distance < -p.below))) scores[i] = -infinity();
        }
    }

    // Whether the block has queries that see a single key: at the edges of a wider band.
    __device__ __forceinline__ bool has_single_key() const {
        return BANDED && ((query <= -p.above) | (query + QUERIES >= p.keys + p.below));
    }

    // Calls `change` with the index of each score whose query sees a single key. Its gradient is zero, but dP − Δ, two
    // sums in different orders, is not quite. Changing P or dP keeps NaN, and needs no branch between dS and its store,
    // which ptxas overlaps.
    template <class Change>
    __device__ __forceinline__ void for_single_key(Change change) const {
        int from_second = column + p.above - 1;
        u32 others = (u32)p.keys + p.below + p.above - 2;  // than the first and the last query that see one
#pragma unroll
        for (int i = 0; i < QUERIES / 2; ++i)
            if ((u32)(from_second + i / 4 * 8 + i % 2) >= others) change(i);
    }
};

// Turns scores into P, in fp32 and rounded. lse: the address of the one of this thread's first column.
__device__ __forceinline__ void exponentiate(float (&scores)[QUERIES / 2], u32 (&weights)[QUERIES / 4], u32 lse,
                                             float scale_log2) {
#pragma unroll
    for (int i = 0; i < QUERIES / 8; ++i) {
        float2 l = load_pair(lse + 32 * i);
        float* x = scores + 4 * i;
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = exp2_fast(fmaf(x[e], scale_log2, e % 2 ? -l.y : -l.x));
        weights[2 * i] = pack(x[0], x[1]);
        weights[2 * i + 1] = pack(x[2], x[3]);
    }
}

// dS = P ∘ (dP − Δ), rounded. P is `p` in fp32 where P_IS_FP32, else the rounded `weights`.
template <bool P_IS_FP32, int N>
__device__ __forceinline__ void score_gradients(u32 (&ds)[QUERIES / 4], const float (&dp)[QUERIES / 2],
                                              const float (&p)[N], const u32 (&weights)[QUERIES / 4], u32 delta) {
#pragma unroll
    for (int i = 0; i < QUERIES / 8; ++i) {
        float2 d = load_pair(delta + 32 * i);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float2 w = unpack(weights[2 * i + half]);
            if (P_IS_FP32) w = make_float2(p[4 * i + 2 * half], p[4 * i + 2 * half + 1]);
            ds[2 * i + half] = pack(w.x * (dp[4 * i + 2 * half] - d.x), w.y * (dp[4 * i + 2 * half + 1] - d.y));
        }
    }
}

// Stores the warpgroup's dSᵀ to `area`, a row of 128 bytes for each query, swizzled as TMA does.
__device__ __forceinline__ void store_ds(const u32 (&ds)[QUERIES / 4], u32 area, int warp, int lane) {
    int query = lane % 8 + lane / 16 * 8, piece = warp * 2 + lane / 8 % 2;
    u32 to = area + query * 128 + ((piece ^ (lane % 8)) * 16);
#pragma unroll
    for (int i = 0; i < QUERIES / 16; ++i)
        store_matrices_transposed(to + i * 16 * 128, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
    fence_shared_to_async();
}

// Adds a warpgroup's product to sums, which are in the order of its registers.
template <int N>
__device__ __forceinline__ void add_to_sums(float* sums, const float (&dq)[N]) {
    float* to = sums + threadIdx.x % GROUP_THREADS * 4;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) add_vector(to + i * GROUP_THREADS * 4, dq + 4 * i);
}

// Stores 64 rows of dK or dV, scaled and rounded, to shared memory: tiles of 64 columns `pitch` bytes apart.
__device__ __forceinline__ void stage_rows(const float (&sum)[HEAD / 2], float scale, u32 area, u32 pitch, int warp,
                                      int lane) {
    u32 row = area + (warp * 16 + lane % 16) * 128;
#pragma unroll
    for (int i = 0; i < HEAD / 16; ++i) {
        const float* x = sum + 8 * i;
        u32 piece = ((i % 4 * 2 + lane / 16) ^ (lane % 8)) * 16;
        store_matrices(row + i / 4 * pitch + piece, pack(x[0] * scale, x[1] * scale),
                       pack(x[2] * scale, x[3] * scale), pack(x[4] * scale, x[5] * scale),
                       pack(x[6] * scale, x[7] * scale));
    }
    fence_shared_to_async();
}
