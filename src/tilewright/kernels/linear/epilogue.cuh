// What follows the product: GELU, on pairs of 16-bit values.
//
// EPILOGUE and HALF are set before this is included.

#pragma once

#include "hopper.cuh"

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

// A polynomial of both values of a pair, with coefficients in fp16, that of the highest power first.
template <u32 FIRST, u32... OTHERS>
__device__ __forceinline__ u32 polynomial(u32 x) {
    u32 sum = FIRST * 0x10001u;
    ((sum = multiply_add_half(sum, x, OTHERS * 0x10001u)), ...);
    return sum;
}

// log₂ Φ(x) for x <= 0, where Φ is the normal distribution or the tanh form's approximation of it, fitted to the least
// relative error of Φ. Beyond the fit, below x = -5, both go to -∞.
__device__ __forceinline__ u32 log2_phi(u32 x) {
    return EPILOGUE == 1 ? polynomial<0x0D14, 0x1DE8, 0x2A2C, 0xB76C, 0x3C99, 0xBC00>(x)
                         : polynomial<0x9ED8, 0x1ECA, 0xB810, 0x3C89, 0xBC01>(x);
}

// Rounded once.
__device__ __forceinline__ u32 multiply_add(u32 pair, u32 factors, u32 other) {
    u32 sum;
#if HALF
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(factors), "r"(other));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(factors), "r"(other));
#endif
    return sum;
}

// x Φ(x) = max(x, 0) - |x| Φ(-|x|), which keeps its digits where Φ is near 0. The second term
// takes x as at most 64, where it is 0, so that +∞ gives no ∞ · 0; -∞ gives NaN as in eager.
__device__ __forceinline__ u32 activate(u32 pair) {
    constexpr u32 LIMIT = (HALF ? 0x5400u : 0x4280u) * 0x10001u, SIGNS = 0x80008000u;
    u32 below = least(pair, LIMIT) | SIGNS;
    u32 x = HALF ? below : pack_half(unpack(below));
    float2 powers = unpack_half(log2_phi(x));
    return multiply_add(below, pack(exp2_fast(powers.x), exp2_fast(powers.y)), greatest(pair, 0));
}
