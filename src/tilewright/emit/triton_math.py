"""Scalar functions of generated Triton kernels: faster than libdevice's, or more accurate than `triton.language`'s.

All run on a GPU and in Triton's interpreter, so tests without a GPU run the same code. Floating arguments are fp32
or fp64; results are within a few ulp, and NaN propagates. The polynomials are Chebyshev fits made for this file.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.target_info import is_hip

from tilewright.emit import interpreted_libdevice
from tilewright.emit.triton_arithmetic import (  # noqa: F401, generated kernels find all functions here
    INTERPRETED,
    div,
    fused,
    max_over,
    maximum,
    mean,
    min_over,
    minimum,
    neg,
    ordered,
    polynomial,
    product_over,
    round_even,
    sign,
    sqrt,
    to_bfloat16,
    trunc,
)
from tilewright.emit.triton_float8 import (  # noqa: F401, here too
    from_float8_e4m3fn,
    from_float8_e5m2,
    to_float8_e4m3fn,
    to_float8_e5m2,
)

if INTERPRETED:
    interpreted_libdevice.install()

LOG2_E = tl.constexpr(1.44269502162933349609375)
LOG2_E_LOW = tl.constexpr(1.9259629911266175e-08)
LN_2 = tl.constexpr(0.693147180559945309417)
EXPM1 = tl.constexpr((1 / 120, 1 / 24, 1 / 6, 0.5, 1.0))
LOG1P = tl.constexpr((-0.25, 1 / 3, -0.5, 1.0))
TANH = tl.constexpr((0.002214902743, -0.008272456733, 0.02174618709, -0.0539563494, 0.1333329075, -0.3333333308))
"""(tanh(x) / x - 1) / x² in powers of x², falling, |x| ≤ 0.65."""
LOG2_ERFC = tl.constexpr(
    (
        -4.535860352916643e-05, 0.0004455077287275344, -0.0014894419582560658, -0.000774629064835608,
        0.02825368009507656, -0.1484816074371338, -0.9184163808822632, -1.6279085874557495,
    )
)  # fmt: skip
"""log₂(erfc(x)) / x in powers of x, falling, x ≥ 0; fitted so that erfc is right to 2⁻²⁵."""


@triton.jit
def exp(x: tl.tensor) -> tl.tensor:
    """2ᵗ · (1 + ln 2 · rest), where t = x · log₂ e rounded and `rest` is its rounding error, which `tl.exp` drops.

    `tl.exp2` flushes subnormal results to zero, so these are computed 2²⁴ times as large and scaled back.
    """
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        c = minimum(maximum(x, -104.0), 89.0)
        t = c * LOG2_E
        rest = fused(c, LOG2_E_LOW, fused(c, LOG2_E, neg(t)))
        small = t < -126.0
        power = tl.exp2(tl.where(small, t + 24.0, t)) * fused(rest, 0.6931472, 1.0)
        return tl.where(small, power * 5.9604644775390625e-08, power)


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def exp_approximate(x: tl.tensor) -> tl.tensor:
    """To 18 bits, subnormal results too (see `exp`): an infinite gradient times one of them is infinite."""
    root = tl.exp2(x * (0.5 * LOG2_E))
    return root * root


@triton.jit
def sigmoid_approximate(x: tl.tensor) -> tl.tensor:
    """To 18 bits."""
    return 1.0 / (1.0 + tl.exp2(x * -LOG2_E))


@triton.jit
def expm1_approximate(x: tl.tensor) -> tl.tensor:
    """To 16 bits: near 0, where exp(x) - 1 cancels, by the first terms of its series."""
    near = x * polynomial(x, EXPM1, 4)
    return tl.where(tl.abs(x) < 0.3, near, tl.exp2(x * LOG2_E) - 1.0)


@triton.jit
def log2_approximate(x: tl.tensor) -> tl.tensor:
    """To 22 bits: one instruction of an NVIDIA GPU. AMD's library has no function for its own."""
    if is_hip():
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


@triton.jit
def log1p_approximate(x: tl.tensor) -> tl.tensor:
    """To 16 bits: near 0, where 1 + x drops the low bits of x, by the first terms of its series."""
    near = x * polynomial(x, LOG1P, 3)
    return tl.where(tl.abs(x) < 0.0625, near, log2_approximate(1.0 + x) * LN_2)


@triton.jit
def _with_sign(size: tl.tensor, x: tl.tensor) -> tl.tensor:
    """`size`, not negative, with the sign of `x`; fp32."""
    bits = size.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _tanh_far(size: tl.tensor) -> tl.tensor:
    """1 - 2e / (1 + e), e = exp(-2 · size), with an absolute error of a few ulp of 1."""
    e = tl.exp2(size * (-2.0 * LOG2_E))
    return 1.0 - e * (2.0 / (1.0 + e))


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    if x.dtype == tl.float64:
        return libdevice.tanh(x)
    else:
        size, u = tl.abs(x), x * x
        near = size + size * u * polynomial(u, TANH, 5)
        return _with_sign(tl.where(size < 0.65, near, _tanh_far(size)), x)


@triton.jit
def tanh_absolute(x: tl.tensor) -> tl.tensor:
    """tanh(x) with an absolute error of 2⁻²³, for sums with 1."""
    return _with_sign(_tanh_far(tl.abs(x)), x)


@triton.jit
def erf_absolute(x: tl.tensor) -> tl.tensor:
    """erf(x) = 1 - 2^q(|x|) with an absolute error of 2⁻²³, for sums with 1; `tl.erf` is also accurate near 0.

    Eight elements of a GELU in bf16 take 168 instructions with it and 304 with `tl.erf` (sm_90a).
    """
    size = tl.abs(x)
    return _with_sign(1.0 - tl.exp2(size * polynomial(size, LOG2_ERFC, 7)), x)


@triton.jit
def integer_power(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """By squaring, with wrap-around; negative powers of all but ±1 are 0."""
    # A value that a loop carries keeps its shape, and either operand may be one number.
    x, y = tl.broadcast(x, y)
    result = x * 0 + 1
    base, left = x, y
    for _ in range(63):
        result = tl.where((left & 1) != 0, result * base, result)
        base = base * base
        left = left >> 1
    unit = tl.where(x == 1, 1, tl.where(x == -1, tl.where((y & 1) != 0, -1, 1), 0)).to(x.dtype)
    return tl.where(y < 0, unit, result)
