"""Activations and their slopes as scalar code that Triton kernels call: fp32 in, fp32 out.

Each takes two special-function instructions (an exponential and a reciprocal): at full memory speed a kernel on
16-bit numbers can issue about 45 instructions an element.

The erf GELU needs Φ(x), the normal distribution. With h(|x|) = Φ(-|x|) = ½ erfc(|x|/√2),

    h(s) = exp(-s²/2) · (p₁t + p₂t² + …),   t = 1 / (1 + c·s)

the form of Abramowitz & Stegun 7.1.26 with new coefficients (least relative error for 0 ≤ s ≤ 13.5, by
Lawson's reweighted least squares): five terms are within 2.9e-5 of h, for 16-bit results, nine within
1.4e-8, for fp32. The error is relative, so it stays small for negative x, where eager's 1 + erf cancels.

Where eager gives NaN or an infinity these do: gelu(-∞) and silu(-∞) are NaN, gelu(∞) is ∞.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import INTERPRETED

LOG2_E = tl.constexpr(1.4426950408889634)
SHORT_C = tl.constexpr(0.375)
SHORT = tl.constexpr(
    (-0.09098558280449495, 0.2010439969601445, 0.08297358984371417, 0.15792019100461738, 0.14904112091170063)
)
"""Five terms of h, the highest power first."""
LONG_C = tl.constexpr(0.21)
LONG = tl.constexpr(
    (
        -0.07203386108021945, 0.2854528429735708, -0.3341885419282241, 0.35403240737962605, -0.09724486793324155,
        0.12635479246627246, 0.06879013100622178, 0.08512939523011517, 0.08370770368776144,
    )
)  # fmt: skip
"""Nine terms of h, the highest power first."""
TANH_SCALE = tl.constexpr(0.7978845608028654)
"""√(2/π)"""
TANH_CUBE = tl.constexpr(0.044715)
DENSITY = tl.constexpr(0.3989422804014327)
"""1/√(2π)"""


@triton.jit
def reciprocal(x: tl.tensor) -> tl.tensor:
    """1/x to an ulp by the special-function unit; Triton's own division is eight instructions."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def exp2(x: tl.tensor) -> tl.tensor:
    """2ˣ by the special-function unit, with results below 2⁻¹²⁶ as 0: `tl.exp2` spends four more
    instructions on those."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _normal(x: tl.tensor, PRECISE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Φ(x) and exp(-x²/2)."""
    TERMS: tl.constexpr = LONG if PRECISE else SHORT
    COUNT: tl.constexpr = 9 if PRECISE else 5
    C: tl.constexpr = LONG_C if PRECISE else SHORT_C
    s = tl.abs(x)
    if PRECISE:
        # From 16 on h is 0. Newton's step would make NaN of an infinity.
        s = tl.minimum(s, 16.0)
    d = s * C + 1.0
    t = reciprocal(d)
    if PRECISE and not INTERPRETED:
        # The instruction may be an ulp off, and h errs by four times as many as t: a step of Newton's method.
        t = tl.fma(t, tl.fma(-d, t, 1.0), t)
    p = t * TERMS[0] + TERMS[1]
    for k in tl.static_range(2, COUNT):
        p = p * t + TERMS[k]
    gauss = exp2(x * x * (-0.5 * LOG2_E))
    h = p * t * gauss
    return tl.where(x >= 0.0, 1.0 - h, h), gauss


@triton.jit
def _logistic(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """σ(x) and its slope σ(x)·σ(-x), both without cancellation: 1 - σ has no digits left where σ is nearly 1."""
    e = exp2(tl.abs(x) * -LOG2_E)
    r = reciprocal(e + 1.0)
    er = e * r
    return tl.where(x >= 0.0, r, er), er * r


@triton.jit
def _tanh_argument(x: tl.tensor, square: tl.tensor) -> tl.tensor:
    """2u, so that ½(1 + tanh u) is its σ."""
    return x * (square * TANH_CUBE + 1.0) * (2.0 * TANH_SCALE)


@triton.jit
def activate(x: tl.tensor, KIND: tl.constexpr, PRECISE: tl.constexpr) -> tl.tensor:
    """The activation KIND of x: "none", "gelu", "gelu_tanh" or "silu". PRECISE: to fp32's last digits."""
    if KIND == "gelu":
        phi, _ = _normal(x, PRECISE)
        return x * phi
    elif KIND == "gelu_tanh":
        s, _ = _logistic(_tanh_argument(x, x * x))
        return x * s
    elif KIND == "silu":
        s, _ = _logistic(x)
        return x * s
    else:
        return x


@triton.jit
def activate_and_slope(x: tl.tensor, KIND: tl.constexpr, PRECISE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The activation and its derivative at x; KIND is "gelu", "gelu_tanh" or "silu"."""
    if KIND == "gelu":
        phi, gauss = _normal(x, PRECISE)
        return x * phi, x * gauss * DENSITY + phi
    elif KIND == "gelu_tanh":
        square = x * x
        s, slope = _logistic(_tanh_argument(x, square))
        inner = square * (6.0 * TANH_SCALE * TANH_CUBE) + 2.0 * TANH_SCALE
        return x * s, x * slope * inner + s
    else:
        s, slope = _logistic(x)
        return x * s, x * slope + s
