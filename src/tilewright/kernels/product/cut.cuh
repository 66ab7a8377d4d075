// How values of fp32 are cut into three of bf16: a piece of right, for the tiles that wgmma reads, and a thread's values
// of left.
//
// The order of a step's K is free: where left lies along K, a thread of the fragment of left takes four neighbours
// instead of two pairs, and right's rows are placed alike (`logical`).
//
// Macros: LEFT_ALONG_K, RIGHT_ALONG_K.

#pragma once

#include "wgmma.cuh"

constexpr int BM = 128, BN = 128, BK = 32;
constexpr int RAW_BYTES = BM * BK * 4, PART_BYTES = BN * BK * 2, PARTS_BYTES = 3 * PART_BYTES;
constexpr int BOX = 32, BOX_BYTES = BK * BOX * 4;  // of an operand across K: 32 columns

// Two values as three pairs of bf16 whose sum they are.
__device__ __forceinline__ void cut(float x, float y, u32& high, u32& middle, u32& low) {
    high = pack(x, y);
    float2 h = unpack(high);
    x -= h.x, y -= h.y;
    middle = pack(x, y);
    float2 m = unpack(middle);
    low = pack(x - m.x, y - m.y);
}

// Where a step's row `k` of right is multiplied; a pair of rows stays one.
__device__ __forceinline__ int logical(int k) {
    return LEFT_ALONG_K ? (k & ~15) | (k & 2) << 2 | (k & 12) >> 1 | (k & 1) : k;
}

__device__ __forceinline__ float4 read_four(u32 from) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from) : "memory");
    return v;
}

__device__ __forceinline__ float read_one(u32 from) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
    return v;
}

// Cuts piece `i` of 16 bytes of a tile of right. Along K its parts have rows of 64 bytes in the 64-byte swizzle, across
// K two tiles of 64 columns.
__device__ __forceinline__ void cut_piece(u32 raw, u32 parts, int i) {
    u32 high[2], middle[2], low[2];
    if (RIGHT_ALONG_K) {
        int row = i / 8, chunk = i % 8;
        float4 v = read_four(raw + row * 128 + ((chunk ^ row % 8) * 16));
        cut(v.x, v.y, high[0], middle[0], low[0]);
        cut(v.z, v.w, high[1], middle[1], low[1]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 to = parts + row * 64 + ((logical(4 * chunk + 2 * h) * 2) ^ (row / 2 % 4 * 16));
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(high[h]) : "memory");
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + PART_BYTES), "r"(middle[h]) : "memory");
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + 2 * PART_BYTES), "r"(low[h]) : "memory");
        }
    } else {
        int k = i / 32, box = i / 8 % 4, chunk = i % 8, row = logical(k), column = i % 32 * 4;
        float4 v = read_four(raw + box * BOX_BYTES + k * 128 + ((chunk ^ k % 8) * 16));
        cut(v.x, v.y, high[0], middle[0], low[0]);
        cut(v.z, v.w, high[1], middle[1], low[1]);
        u32 to = parts + column / 64 * (PART_BYTES / 2) + row * 128 + ((column % 64 / 8 ^ row % 8) * 16) + column % 8 * 2;
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(high[0]), "r"(high[1]) : "memory");
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + PART_BYTES), "r"(middle[0]), "r"(middle[1])
                     : "memory");
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + 2 * PART_BYTES), "r"(low[0]), "r"(low[1])
                     : "memory");
    }
}

// A thread's part of left in a step: the operand of two instructions for each of the three parts.
struct Fragment {
    u32 high[8], middle[8], low[8];
};

// The row of its 16 that a thread of a fragment has as the first, the second is 8 further: along K such that eight
// threads read from all banks.
__device__ __forceinline__ int fragment_row(int lane) {
    return LEFT_ALONG_K ? (lane / 4 & 1) << 2 | lane / 8 : lane / 4;
}

__device__ __forceinline__ void cut_left(u32 raw, Fragment& f, int row, int quarter) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            int r = row + 8 * below;
            float4 v;
            if (LEFT_ALONG_K) {
                v = read_four(raw + r * 128 + (((4 * half + quarter) ^ r % 8) * 16));
            } else {
                u32 box = raw + r / BOX * BOX_BYTES + r % 4 * 4;
                int k = 16 * half + 2 * quarter, chunk = r % BOX / 4;
                v.x = read_one(box + k * 128 + ((chunk ^ k % 8) * 16));
                v.y = read_one(box + (k + 1) * 128 + ((chunk ^ (k + 1) % 8) * 16));
                v.z = read_one(box + (k + 8) * 128 + ((chunk ^ k % 8) * 16));
                v.w = read_one(box + (k + 9) * 128 + ((chunk ^ (k + 1) % 8) * 16));
            }
            int at = 4 * half + below;
            cut(v.x, v.y, f.high[at], f.middle[at], f.low[at]);
            cut(v.z, v.w, f.high[at + 2], f.middle[at + 2], f.low[at + 2]);
        }
}
