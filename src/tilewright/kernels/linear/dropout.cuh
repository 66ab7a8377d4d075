// Dropout with eager's own mask, on pairs of 16-bit values, and the sum with a residual.
//
// Limit: instructions. Beside an endless m64n256k16 on an H200, a quarter of a multiprocessor issues one other
// instruction in about 4.5 cycles. A product of 32-bit numbers with both words of its result takes 24 cycles and stops
// the matrix units for 6 of them; of the other instructions here only consecutive fp32 ones stop them, a cycle each.

#pragma once

#include "epilogue.cuh"

// Which random number eager's dropout gives an element: one of `threads` threads draws eight neighbours, in its
// `turn`-th pair of Philox calls.
struct Draw {
    u64 seed, offset;     // of the generator; in a graph that is being captured they are in `state`
    u64* state;           // seed and offset for the backward
    u32 captured;
    u32 limit;            // kept if the drawn word is at most this
    float rest;           // 1 / (1 - p) divided by `factor`, at most 1
    u32 factor;           // 1 / (1 - p) in the result's dtype, rounded up
    u32 threads;          // of eager's launch
    u32 row_turn, row_thread;  // N / 8 divided by `threads`: quotient and remainder
};

// Low and high word in one instruction; the compiler takes two for a product of 64-bit numbers.
__device__ __forceinline__ uint2 multiply_wide(u32 a, u32 b) {
    uint2 words;
    asm("{\n.reg .b64 product;\nmul.wide.u32 product, %2, %3;\nmov.b64 {%0, %1}, product;\n}"
        : "=r"(words.x), "=r"(words.y) : "r"(a), "r"(b));
    return words;
}

// The multipliers of Philox4x32 (Salmon et al. 2011).
constexpr u32 A = 0xD2511F53u, B = 0xCD9E8D57u;

// The part of the first two of ten rounds that depends on the key and the call's number alone, shared by `threads`
// pieces of the result. The counter is (call, thread), as cuRAND counts.
struct Call {
    u32 s, p, q, r;
};

__device__ __forceinline__ Call call_of(u64 seed, u64 call) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
    uint2 a = multiply_wide((u32)call, A), b = multiply_wide(a.y ^ k1, B);
    return {(u32)(call >> 32) ^ k0, b.y ^ (k0 + 0x9E3779B9u), b.x, a.x ^ (k1 + 0xBB67AE85u)};
}

// `product` is the thread's number times the second multiplier.
__device__ __forceinline__ uint4 philox(u64 seed, const Call& call, uint2 product) {
    uint2 a = multiply_wide(product.y ^ call.s, A);
    uint4 c = make_uint4(call.p ^ product.x, call.q, a.y ^ call.r, a.x);
#pragma unroll
    for (u32 round = 2; round < 10; ++round) {
        u32 k0 = (u32)seed + round * 0x9E3779B9u, k1 = (u32)(seed >> 32) + round * 0xBB67AE85u;
        uint2 a = multiply_wide(c.x, A), b = multiply_wide(c.z, B);
        c = make_uint4(b.y ^ c.y ^ k0, b.x, a.y ^ c.w ^ k1, a.x);
    }
    return c;
}

__device__ __forceinline__ Draw drawn_from(Draw draw, bool keeper) {
    if (draw.captured) {
        draw.seed = draw.state[0], draw.offset = draw.state[1];
    } else if (keeper && blockIdx.x == 0) {
        draw.state[0] = draw.seed, draw.state[1] = draw.offset;
    }
    return draw;
}

// The two calls of one of eager's turns.
struct Dealt {
    u32 turn;
    Call first, second;
};

__device__ __forceinline__ Dealt dealt(const Draw& draw, u32 turn) {
    u64 call = draw.offset / 4 + (u64)turn * 2;
    return {turn, call_of(draw.seed, call), call_of(draw.seed, call + 1)};
}

// The words of a piece of eight neighbours.
struct Words {
    uint4 first, second;
};

__device__ __forceinline__ Words words_of(const Dealt& d, u32 thread, const Draw& draw) {
    uint2 product = multiply_wide(thread, B);
    return {philox(draw.seed, d.first, product), philox(draw.seed, d.second, product)};
}

// Which elements of a piece are kept, as bits: the four even ones, then the four odd ones.
__device__ __forceinline__ u32 kept(const Dealt& d, u32 thread, const Draw& draw) {
    auto [a, b] = words_of(d, thread, draw);
    const u32 words[] = {a.x, a.z, b.x, b.z, a.y, a.w, b.y, b.w};
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        asm("{\n.reg .pred one;\nsetp.le.u32 one, %1, %2;\n@one add.u32 %0, %0, %3;\n}"
            : "+r"(bits) : "r"(words[i]), "r"(draw.limit), "r"(1 << i));
    return bits;
}

// A dropped value is multiplied by zero, as eager does, so that its NaN and Inf show.
__device__ __forceinline__ uint4 drop_and_add(uint4 v, uint4 r, u32 bits, const Draw& draw) {
    u32 spread = bits * 0x1001u;
    auto one = [&](u32 pair, u32 residual, int i) {
        return multiply_add(pair, (spread >> i & 0x10001u) * draw.factor, residual);
    };
    return make_uint4(one(v.x, r.x, 0), one(v.y, r.y, 1), one(v.z, r.z, 2), one(v.w, r.w, 3));
}

// `workers` warps draw the masks of `rows` rows of 32 pieces, from `piece` on: a byte for each piece.
__device__ __forceinline__ void draw_masks(u32 masks, u32 piece, u32 pieces_a_row, int rows, int worker, int workers,
                                           const Draw& draw) {
    constexpr int AT_ONCE = 2;  // rows that a warp computes together
    u32 stride = workers * AT_ONCE * pieces_a_row, turns = stride / draw.threads, rest = stride % draw.threads;
    piece += AT_ONCE * worker * pieces_a_row + threadIdx.x % 32;
    u32 turn = piece / draw.threads, thread = piece % draw.threads;
    masks += threadIdx.x % 32;
    Dealt numbers = dealt(draw, turn);
#pragma unroll 1
    for (int row = AT_ONCE * worker; row < rows; row += workers * AT_ONCE) {
        if (turn != numbers.turn) numbers = dealt(draw, turn);
        u32 below_turn = turn + draw.row_turn, below = thread + draw.row_thread;
        if (below >= draw.threads) below -= draw.threads, ++below_turn;
        u32 bits[AT_ONCE] = {kept(numbers, thread, draw), kept(numbers, below, draw)};
        // Rare: the row below is in another turn. It is computed again, so that the usual case is one basic block.
        if (below_turn != turn) bits[1] = kept(dealt(draw, below_turn), below, draw);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            asm volatile("st.shared.u8 [%0], %1;" ::"r"(masks + 32 * (row + i)), "r"(bits[i]) : "memory");
        turn += turns, thread += rest;
        if (thread >= draw.threads) thread -= draw.threads, ++turn;
    }
}
