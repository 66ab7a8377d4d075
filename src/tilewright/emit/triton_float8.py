"""Floats of 8 bits in generated Triton kernels, where they are bytes; converted as by PyTorch, to nearest even.

Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433. A number that is too large becomes `beyond`; the
hardware's conversions give the largest there. `triton_math` re-exports these functions.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _rounded(x: tl.tensor, dropped: tl.constexpr, bias: tl.constexpr) -> tl.tensor:
    """|x| without its lowest `dropped` bits, and with that exponent bias; as a byte below the smallest normal too."""
    bits = tl.abs(x).to(tl.uint32, bitcast=True)
    half: tl.constexpr = (1 << (dropped - 1)) - 1
    shifted: tl.constexpr = 127 - bias
    normal = ((bits + half + ((bits >> dropped) & 1)) >> dropped) - (shifted << (23 - dropped))
    # The last bit of this sum counts as much as a subnormal's.
    magic: tl.constexpr = (shifted + dropped + 1) << 23
    raised = tl.abs(x) + tl.full((1,), magic, tl.uint32).to(tl.float32, bitcast=True)
    subnormal = raised.to(tl.uint32, bitcast=True) - magic
    return tl.where(bits < ((shifted + 1) << 23), subnormal, normal).to(tl.uint8)


@triton.jit
def _converted(
    x: tl.tensor, dtype: tl.constexpr, dropped: tl.constexpr, bias: tl.constexpr, held: tl.tensor, beyond: tl.constexpr
) -> tl.tensor:
    """x as a byte of `dtype` where that holds it, else `beyond` or NaN; with the sign of x."""
    if INTERPRETED or not cuda_capability_geq(8, 9):
        finite = _rounded(x, dropped, bias)
    else:
        finite = tl.abs(x).to(dtype).to(tl.uint8, bitcast=True)
    size = tl.where(held, finite, tl.where(x == x, beyond, 0x7F).to(tl.uint8))
    return size | ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80).to(tl.uint8)


@triton.jit
def to_float8_e4m3fn(x: tl.tensor, beyond: tl.constexpr) -> tl.tensor:
    return _converted(x, tl.float8e4nv, 20, 7, tl.abs(x) <= 464.0, beyond)


@triton.jit
def from_float8_e4m3fn(x: tl.tensor) -> tl.tensor:
    if INTERPRETED or not cuda_capability_geq(8, 9):
        size = ((x & 0x7F).to(tl.uint32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        known = tl.where((x & 0x7F) == 0x7F, float("nan"), size)
        signed = known.to(tl.uint32, bitcast=True) | ((x & 0x80).to(tl.uint32) << 24)
        return signed.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def to_float8_e5m2(x: tl.tensor, beyond: tl.constexpr) -> tl.tensor:
    return _converted(x, tl.float8e5, 21, 15, tl.abs(x) < 61440.0, beyond)


@triton.jit
def from_float8_e5m2(x: tl.tensor) -> tl.tensor:
    """The upper byte of an fp16."""
    return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
