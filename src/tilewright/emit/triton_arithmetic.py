"""Arithmetic for Triton kernels where Triton's own is inexact, drops NaN, truncates or loses the sign of zero.

`triton_math` re-exports these functions.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def polynomial(u: tl.tensor, coefficients: tl.constexpr, degree: tl.constexpr) -> tl.tensor:
    """Horner's rule, the highest power first."""
    p = u * coefficients[0] + coefficients[1]
    for k in tl.static_range(2, degree + 1):
        p = p * u + coefficients[k]
    return p


@triton.jit
def is_negative(x: tl.tensor) -> tl.tensor:
    """Whether the sign bit is set."""
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) < 0
    else:
        return x.to(tl.int32, bitcast=True) < 0


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """int32 that compare as fp32 do: zeros are equal, NaN is above all others."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, 2147483647, bits ^ ((bits >> 31) & 2147483647))


@triton.jit
def neg(x: tl.tensor) -> tl.tensor:
    """-x; Triton's minus is 0 - x, which loses the sign of a zero."""
    return x * -1.0


@triton.jit
def div(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """The correctly rounded quotient; Triton's `/` is less accurate in fp32."""
    if y.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def mean(total: tl.tensor, count: tl.constexpr) -> tl.tensor:
    """total / count in fp32 of an fp64 sum, rounded once, so that the mean of equal values is that value. A sum that
    overflows fp32 gives an infinity, as in eager.
    """
    narrow = total.to(tl.float32)
    return tl.where(tl.abs(narrow) == INFINITY, narrow, (total / count).to(tl.float32))


@triton.jit
def sqrt(x: tl.tensor) -> tl.tensor:
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def maximum(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """The larger; NaN propagates."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """The smaller; NaN propagates."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_over(x: tl.tensor, axis: tl.constexpr, keep_dims: tl.constexpr) -> tl.tensor:
    """The largest along `axis`; NaN propagates, which `tl.max` drops."""
    if INTERPRETED:
        # The interpreter would call the function of `tl.reduce` for one element after another.
        nan = tl.max((x != x).to(tl.int32), axis=axis, keep_dims=keep_dims)
        largest = tl.max(tl.where(x != x, -INFINITY, x), axis=axis, keep_dims=keep_dims)
        return tl.where(nan != 0, float("nan"), largest)
    else:
        return tl.reduce(x, axis, maximum, keep_dims=keep_dims)


@triton.jit
def min_over(x: tl.tensor, axis: tl.constexpr, keep_dims: tl.constexpr) -> tl.tensor:
    """The smallest along `axis`; NaN propagates, which `tl.min` drops."""
    return neg(max_over(neg(x), axis, keep_dims))


@triton.jit
def _multiply(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    return x * y


@triton.jit
def product_over(x: tl.tensor, axis: tl.constexpr, keep_dims: tl.constexpr) -> tl.tensor:
    return tl.reduce(x, axis, _multiply, keep_dims=keep_dims)


@triton.jit
def to_bfloat16(x: tl.tensor) -> tl.tensor:
    """fp32 rounded to the nearest bf16, ties to even. The interpreter's conversion truncates."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """fp32 rounded to `dtype`, ties to even."""
    if dtype == tl.bfloat16:
        return to_bfloat16(x)
    else:
        return x.to(dtype)


@triton.jit
def sign(x: tl.tensor) -> tl.tensor:
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def trunc(x: tl.tensor) -> tl.tensor:
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_even(x: tl.tensor) -> tl.tensor:
    """The nearest integer, ties to even: adding 2²³ (2⁵² in fp64) rounds off the fraction."""
    whole: tl.constexpr = 4503599627370496.0 if x.dtype == tl.float64 else 8388608.0
    size = tl.abs(x)
    rounded = (size + whole) - whole
    return tl.where(size < whole, tl.where(is_negative(x), neg(rounded), rounded), x)


@triton.jit
def fused(x: tl.tensor, y: tl.tensor, z: tl.tensor) -> tl.tensor:
    """x · y + z of fp32, rounded once. The interpreter's `tl.fma` rounds the product too."""
    if INTERPRETED:
        return (x.to(tl.float64) * y + z).to(tl.float32)
    else:
        return tl.fma(x, y, z)
