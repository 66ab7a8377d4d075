// What follows the product, on pairs of 16-bit values: GELU, and dropout with eager's own mask.
//
// EPILOGUE and HALF are set before this is included.

#pragma once

#include "ptx.cuh"

// Where eager's dropout takes the random number of an element from: eight neighbours are drawn by one of
// `threads` threads, in its `turn`-th pair of Philox calls.
struct Draw {
    u64 seed, offset;     // of the generator; in a graph that is being captured they are in `state`
    u64* state;           // seed and offset for the backward
    u32 captured;
    u32 limit;            // kept if the drawn word is at most this
    float scale;          // 1 / (1 - p)
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
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x Φ(x). With s = |x| and t = 1 / (1 + 0.375 s), Φ(-s) = exp(-s²/2) · (p₁t + … + p₅t⁵), the shape of
// Abramowitz and Stegun 7.1.26 with the terms of kernels/activation/formulas.py, within 2.9e-5 of Φ(-s).
__device__ __forceinline__ float gelu_erf(float x) {
    float t = reciprocal(fmaf(0.375f, fabsf(x), 1.0f));
    float p = fmaf(t, -0.09098558f, 0.20104400f);
    p = fmaf(t, p, 0.08297359f);
    p = fmaf(t, p, 0.15792019f);
    p = fmaf(t, p, 0.14904112f);
    float tail = t * p * exp2_fast(x * x * -0.72134752f);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

// x/2 (1 + tanh u) = x / (1 + exp(-2u)), which keeps its digits where tanh u is near -1.
__device__ __forceinline__ float gelu_tanh(float x) {
    float u = x * fmaf(x * x, 0.044715f * 0.79788456f, 0.79788456f);
    return x * reciprocal(1.0f + exp2_fast(u * -2.88539008f));
}

// Low and high word in one instruction; the compiler takes two for a product of 64-bit numbers.
__device__ __forceinline__ uint2 multiply_wide(u32 a, u32 b) {
    uint2 words;
    asm("{\n.reg .b64 product;\nmul.wide.u32 product, %2, %3;\nmov.b64 {%0, %1}, product;\n}"
        : "=r"(words.x), "=r"(words.y) : "r"(a), "r"(b));
    return words;
}

// Philox4x32 with ten rounds (Salmon et al. 2011) as cuRAND counts: key = seed, counter = (call, thread).
__device__ __forceinline__ uint4 philox(u64 seed, u64 call, u32 thread) {
    uint4 c = make_uint4((u32)call, (u32)(call >> 32), thread, 0);
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        uint2 a = multiply_wide(c.x, 0xD2511F53u), b = multiply_wide(c.z, 0xCD9E8D57u);
        c = make_uint4(b.y ^ c.y ^ k0, b.x, a.y ^ c.w ^ k1, a.x);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

__device__ __forceinline__ u32 activate(u32 pair) {
    float2 v = unpack(pair);
    return EPILOGUE == 1 ? pack(gelu_erf(v.x), gelu_erf(v.y)) : pack(gelu_tanh(v.x), gelu_tanh(v.y));
}

__device__ __forceinline__ u32 add(u32 pair, u32 residual) {
    float2 v = unpack(pair), r = unpack(residual);
    return pack(v.x + r.x, v.y + r.y);
}

// A dropped value is multiplied by zero, as eager does, so that its NaN and Inf show.
__device__ __forceinline__ u32 drop_and_add(u32 pair, u32 residual, u32 word0, u32 word1, const Draw& draw) {
    float2 v = unpack(pair), r = unpack(residual);
    return pack(fmaf(v.x, word0 <= draw.limit ? draw.scale : 0.0f, r.x),
                fmaf(v.y, word1 <= draw.limit ? draw.scale : 0.0f, r.y));
}

__device__ __forceinline__ uint4 drop_and_add(uint4 v, uint4 r, u32 turn, u32 thread, const Draw& draw) {
    u64 call = draw.offset / 4 + (u64)turn * 2;
    uint4 a = philox(draw.seed, call, thread), b = philox(draw.seed, call + 1, thread);
    return make_uint4(drop_and_add(v.x, r.x, a.x, a.y, draw), drop_and_add(v.y, r.y, a.z, a.w, draw),
                      drop_and_add(v.z, r.z, b.x, b.y, draw), drop_and_add(v.w, r.w, b.z, b.w, draw));
}
