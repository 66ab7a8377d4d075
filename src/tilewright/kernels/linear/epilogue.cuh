// What follows the product, on pairs of 16-bit values: GELU, and dropout with eager's own mask.
//
// EPILOGUE and HALF are set before this is included.
//
// Measured on an H200 beside an endless m64n256k16: while the matrix units work, a quarter of a multiprocessor takes
// one other instruction of a unit in about 4.5 cycles, and so few instructions are what counts. A product of 32-bit
// numbers with both words of its result takes 24 cycles and stops the matrix units for 6 of them; of the others here
// only fp32 ones that come in a row stop them, for a cycle each.

#pragma once

#include "ptx.cuh"

// Where eager's dropout takes the random number of an element from: eight neighbours are drawn by one of
// `threads` threads, in its `turn`-th pair of Philox calls.
struct Draw {
    u64 seed, offset;     // of the generator; in a graph that is being captured they are in `state`
    u64* state;           // seed and offset for the backward
    u32 captured;
    u32 limit;            // kept if the drawn word is at most this
    float rest;           // what 1 / (1 - p) is times `factor`, at most 1
    u32 factor;           // 1 / (1 - p) in the result's dtype, rounded up
    u32 threads;          // of eager's launch
    u32 row_turn, row_thread;  // N / 8 divided by `threads`: quotient and remainder
};

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 pair;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

__device__ __forceinline__ float2 unpack(u32 pair) {
    float2 values;
#if HALF
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(values.x), "=f"(values.y) : "r"(pair));
#else
    values.x = __uint_as_float(pair << 16);
    values.y = __uint_as_float(pair & 0xFFFF0000u);
#endif
    return values;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The lesser and the greater, NaN where one is NaN.
__device__ __forceinline__ u32 least(u32 pair, u32 other) {
    u32 found;
#if HALF
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(found) : "r"(pair), "r"(other));
#else
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(pair), "r"(other));
#endif
    return found;
}

__device__ __forceinline__ u32 greatest(u32 pair, u32 other) {
    u32 found;
#if HALF
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(found) : "r"(pair), "r"(other));
#else
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(pair), "r"(other));
#endif
    return found;
}

// Pairs of fp16, whatever the type of the result.
__device__ __forceinline__ u32 pack_half(float2 values) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values.y), "f"(values.x));
    return pair;
}

__device__ __forceinline__ float2 unpack_half(u32 pair) {
    float2 values;
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(values.x), "=f"(values.y) : "r"(pair));
    return values;
}

__device__ __forceinline__ u32 multiply_add_half(u32 pair, u32 factors, u32 other) {
    u32 sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(factors), "r"(other));
    return sum;
}

// Of pairs, from coefficients in fp16, the highest power's first.
template <u32 FIRST, u32... OTHERS>
__device__ __forceinline__ u32 polynomial(u32 x) {
    u32 sum = FIRST * 0x10001u;
    ((sum = multiply_add_half(sum, x, OTHERS * 0x10001u)), ...);
    return sum;
}

// log₂ Φ(x) for x <= 0, Φ the normal distribution or what the tanh form has in its place, fitted to the least relative
// error of Φ. Beyond the fit, from x = -5 on, both go to -∞.
__device__ __forceinline__ u32 log2_phi(u32 x) {
    return EPILOGUE == 1 ? polynomial<0x0D14, 0x1DE8, 0x2A2C, 0xB76C, 0x3C99, 0xBC00>(x)
                         : polynomial<0x9ED8, 0x1ECA, 0xB810, 0x3C89, 0xBC01>(x);
}

// Low and high word in one instruction; the compiler takes two for a product of 64-bit numbers.
__device__ __forceinline__ uint2 multiply_wide(u32 a, u32 b) {
    uint2 words;
    asm("{\n.reg .b64 product;\nmul.wide.u32 product, %2, %3;\nmov.b64 {%0, %1}, product;\n}"
        : "=r"(words.x), "=r"(words.y) : "r"(a), "r"(b));
    return words;
}

__device__ __forceinline__ u32 dot_of_halves(u32 halves, u32 bytes, u32 sum) {
    u32 dot;
    asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(dot) : "r"(halves), "r"(bytes), "r"(sum));
    return dot;
}

// The same product in ten instructions, none of which stops the matrix units: x by 16 bits times M by bytes.
template <u32 M>
__device__ __forceinline__ uint2 multiply_by_pieces(u32 x) {
    constexpr u32 M0 = M & 255, M1 = M >> 8 & 255, M2 = M >> 16 & 255, M3 = M >> 24;
    u32 carry = (x & 0xFFFF) * (M & 0xFFFF) >> 16;
    carry = dot_of_halves(x, M2 | M0 << 8, carry) >> 8;
    carry = dot_of_halves(x, M3 | M1 << 8, carry) >> 8;
    return make_uint2(x * M, (x >> 16) * (M >> 16) + carry);
}

// The multipliers of Philox4x32 (Salmon et al. 2011).
constexpr u32 A = 0xD2511F53u, B = 0xCD9E8D57u;

template <bool BY_PIECES, u32 M>
__device__ __forceinline__ uint2 multiply(u32 x) {
    return BY_PIECES ? multiply_by_pieces<M>(x) : multiply_wide(x, M);
}

// What the first two of ten rounds owe to the key and to the call's number, which is the same for `threads` pieces
// of the result: the counter is (call, thread) as cuRAND counts.
struct Call {
    u32 s, p, q, r;
};

__device__ __forceinline__ Call call_of(u64 seed, u64 call) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
    uint2 a = multiply_wide((u32)call, A), b = multiply_wide(a.y ^ k1, B);
    return {(u32)(call >> 32) ^ k0, b.y ^ (k0 + 0x9E3779B9u), b.x, a.x ^ (k1 + 0xBB67AE85u)};
}

// `product` is the thread's number times the second multiplier.
template <bool BY_PIECES>
__device__ __forceinline__ uint4 philox(u64 seed, const Call& call, uint2 product) {
    uint2 a = multiply<BY_PIECES, A>(product.y ^ call.s);
    uint4 c = make_uint4(call.p ^ product.x, call.q, a.y ^ call.r, a.x);
#pragma unroll
    for (u32 round = 2; round < 10; ++round) {
        u32 k0 = (u32)seed + round * 0x9E3779B9u, k1 = (u32)(seed >> 32) + round * 0xBB67AE85u;
        uint2 a = multiply<BY_PIECES, A>(c.x), b = multiply<BY_PIECES, B>(c.z);
        c = make_uint4(b.y ^ c.y ^ k0, b.x, a.y ^ c.w ^ k1, a.x);
    }
    return c;
}

// On pairs, rounded once.
__device__ __forceinline__ u32 add(u32 pair, u32 other) {
    u32 sum;
#if HALF
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(pair), "r"(other));
#else
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(pair), "r"(other));
#endif
    return sum;
}

__device__ __forceinline__ u32 multiply_add(u32 pair, u32 factors, u32 other) {
    u32 sum;
#if HALF
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(factors), "r"(other));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(factors), "r"(other));
#endif
    return sum;
}

// x Φ(x) = max(x, 0) - |x| Φ(-|x|), which keeps its digits where Φ is near 0. From 64 on nothing is subtracted, as
// ∞ · 0 would be; -∞ gives NaN as eager's does.
__device__ __forceinline__ u32 activate(u32 pair) {
    constexpr u32 LIMIT = (HALF ? 0x5400u : 0x4280u) * 0x10001u, SIGNS = 0x80008000u;
    u32 below = least(pair, LIMIT) | SIGNS;
    u32 x = HALF ? below : pack_half(unpack(below));
    float2 powers = unpack_half(log2_phi(x));
    return multiply_add(below, pack(exp2_fast(powers.x), exp2_fast(powers.y)), greatest(pair, 0));
}

// A dropped value is multiplied by zero, as eager does, so that its NaN and Inf show.
__device__ __forceinline__ u32 drop_and_add(u32 pair, u32 residual, u32 word0, u32 word1, const Draw& draw) {
    u32 factors;
    asm("{\n.reg .pred low, high;\nsetp.le.u32 low, %1, %3;\nsetp.le.u32 high, %2, %3;\n"
        "selp.b32 %0, %4, 0, low;\n@high or.b32 %0, %0, %5;\n}"
        : "=&r"(factors) : "r"(word0), "r"(word1), "r"(draw.limit), "r"(draw.factor), "r"(draw.factor << 16));
    return multiply_add(pair, factors, residual);
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

template <bool BY_PIECES>
__device__ __forceinline__ uint4 drop_and_add(uint4 v, uint4 r, const Dealt& d, u32 thread, const Draw& draw) {
    uint2 product = multiply<BY_PIECES, B>(thread);
    uint4 a = philox<BY_PIECES>(draw.seed, d.first, product), b = philox<BY_PIECES>(draw.seed, d.second, product);
    return make_uint4(drop_and_add(v.x, r.x, a.x, a.y, draw), drop_and_add(v.y, r.y, a.z, a.w, draw),
                      drop_and_add(v.z, r.z, b.x, b.y, draw), drop_and_add(v.w, r.w, b.z, b.w, draw));
}
