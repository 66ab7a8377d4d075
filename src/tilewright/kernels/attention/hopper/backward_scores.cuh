// What both backward kernels for Hopper do with scores: which blocks of queries meet which keys, weights and their
// gradients in registers, gradients on their way to shared memory, and sums of dQ.
//
// HEAD, QUERIES, BANDED and WALK_KEYS, the keys that are walked together, are set before this is included. Scores are
// transposed, Sᵀ [64 keys, QUERIES], as the registers of a warpgroup hold a product: thread t of warp w has the rows
// 16 w + t / 4 and eight more, of columns 8 i + 2 (t % 4) and one more, at 4 i to 4 i + 3.

#pragma once

#include "instructions.cuh"

constexpr int GROUP_THREADS = 128, GROUP_WARPS = GROUP_THREADS / 32, ROW_BYTES = QUERIES * 4;  // of lse and Δ

struct Problem {
    float* dq;           // [batch · heads, q_blocks, QUERIES · HEAD]
    const float* lse;    // [batch · heads, q_blocks · QUERIES], times log2 e, infinite where nothing is to be done
    const float* delta;
    u32* handed_out;     // blocks of keys, beside each program's first where not ATTENDED; pieces of sums to round
    // Where ATTENDED, dQ as it is wanted, [batch, heads, queries, width], and its strides in elements; how many slices
    // of the sums of a key head are zeroed, and how many blocks of its keys are added.
    char* rows;
    u64 row_batch, row_head, row_position;
    u32 *zeroed, *added;
    int queries, keys, q_blocks, heads, group, kv_heads, k_blocks, blocks;  // k_blocks of a head, `blocks` of all
    int width, ahead;    // the head size, before it was padded; key heads whose sums are zero before
    int below, above;    // key j is seen by query i where -below <= j - i <= above
    float scale, scale_log2;
};

// Keys of one key head, from `key` on; none where it is negative.
struct Block {
    int key, kv_head, batch;
};

__device__ __forceinline__ Block block_at(const Problem& p, int index) {
    return {index % p.k_blocks * WALK_KEYS, index / p.k_blocks % p.kv_heads, index / p.k_blocks / p.kv_heads};
}

// In 16 bytes of shared memory.
__device__ __forceinline__ void keep_block(u32 to, const Block& at) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %3};" ::"r"(to), "r"(at.key), "r"(at.kv_head), "r"(at.batch)
                 : "memory");
}

__device__ __forceinline__ Block kept_block(u32 from) {
    Block at;
    asm volatile("{\n.reg .b32 unused;\nld.shared.v4.b32 {%0, %1, %2, unused}, [%3];\n}"
                 : "=r"(at.key), "=r"(at.kv_head), "=r"(at.batch) : "r"(from) : "memory");
    return at;
}

// The blocks of queries that see WALK_KEYS keys from `key` on, for each query head of the group in turn.
struct Walk {
    int first, end, skipped, head, block, left;  // skipped of a head, left of this one
    u32 index;  // among the blocks of queries of all heads
    __device__ __forceinline__ Walk(const Problem& p, int key, int kv_head, int batch) : head(kv_head * p.group) {
        int last = min(key + WALK_KEYS, p.keys);
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
            asm volatile("");  // keeps the branch: as selections this would be computed anew at every step
            block = first, left = end - first, ++head, index += skipped;
        }
    }
};

// 64 keys from `key` on and the block of queries from `query` on, as this thread sees them.
struct Scores {
    const Problem& p;
    int key, query, row, column;
    __device__ __forceinline__ Scores(const Problem& p, int key, int query, int warp, int lane)
        : p(p), key(key), query(query), row(key + warp * 16 + lane / 4), column(query + lane % 4 * 2) {}

    // Whether some of `keys` keys from `from` on are hidden from some of the queries.
    __device__ __forceinline__ bool cut(int from, int keys) const {
        bool past = from + keys > p.keys;
        if (!BANDED) return past;
        return past | (from + keys - 1 - query > p.above) | (from - (query + QUERIES - 1) < -p.below);
    }

    // Scores of keys that a query does not see become -inf.
    __device__ __forceinline__ void hide(float (&scores)[QUERIES / 2]) const {
#pragma unroll
        for (int i = 0; i < QUERIES / 2; ++i) {
            int j = row + i / 2 % 2 * 8, away = j - (column + i / 4 * 8 + i % 2);
            if (j >= p.keys || (BANDED && (away > p.above || away < -p.below))) scores[i] = -infinity();
        }
    }

    // Whether the block has queries that see one key alone: at the edges of a band that is wider.
    __device__ __forceinline__ bool lonely() const {
        return BANDED && ((query <= -p.above) | (query + QUERIES >= p.keys + p.below));
    }

    // `change` is told the scores of queries that see one key alone. The gradient of an only score is zero, which
    // dP − Δ, two sums in different orders, is not quite. P or dP is changed, that NaN stays and that no branch stands
    // between dS and its way to shared memory, which the assembler overlaps.
    template <class Change>
    __device__ __forceinline__ void for_lonely(Change change) const {
        int from_second = column + p.above - 1;
        u32 others = (u32)p.keys + p.below + p.above - 2;  // than the first and the last
#pragma unroll
        for (int i = 0; i < QUERIES / 2; ++i)
            if ((u32)(from_second + i / 4 * 8 + i % 2) >= others) change(i);
    }
};

// Scores become P, in fp32 and rounded. lse: the address of the thread's first column's.
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

// dS = P ∘ (dP − Δ), rounded; P from `kept`, or as it was rounded where KEPT is false.
template <bool KEPT, int N>
__device__ __forceinline__ void differentiate(u32 (&ds)[QUERIES / 4], const float (&dp)[QUERIES / 2],
                                              const float (&kept)[N], const u32 (&weights)[QUERIES / 4], u32 delta) {
#pragma unroll
    for (int i = 0; i < QUERIES / 8; ++i) {
        float2 d = load_pair(delta + 32 * i);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float2 w = unpack(weights[2 * i + half]);
            if (KEPT) w = make_float2(kept[4 * i + 2 * half], kept[4 * i + 2 * half + 1]);
            ds[2 * i + half] = pack(w.x * (dp[4 * i + 2 * half] - d.x), w.y * (dp[4 * i + 2 * half + 1] - d.y));
        }
    }
}

// dSᵀ of the warpgroup to `area`, a row of 128 bytes for each query; 16-byte pieces are swizzled as the copies' are.
__device__ __forceinline__ void publish(const u32 (&ds)[QUERIES / 4], u32 area, int warp, int lane) {
    int query = lane % 8 + lane / 16 * 8, piece = warp * 2 + lane / 8 % 2;
    u32 to = area + query * 128 + ((piece ^ (lane % 8)) * 16);
#pragma unroll
    for (int i = 0; i < QUERIES / 16; ++i)
        store_matrices_transposed(to + i * 16 * 128, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
    stores_to_async();
}

// Adds a warpgroup's product to sums that lie in the order of its registers.
template <int N>
__device__ __forceinline__ void add_to_sums(float* sums, const float (&dq)[N]) {
    float* to = sums + threadIdx.x % GROUP_THREADS * 4;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) add_vector(to + i * GROUP_THREADS * 4, dq + 4 * i);
}

// 64 rows of dK or dV, scaled and rounded, to shared memory: tiles of 64 columns `pitch` bytes apart.
__device__ __forceinline__ void stage(const float (&sum)[HEAD / 2], float scale, u32 area, u32 pitch, int warp,
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
    stores_to_async();
}
