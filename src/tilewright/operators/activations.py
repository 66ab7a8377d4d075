"""Activations and their derivatives: elementwise, and `g` is the gradient of the result.

The derivatives of the shrinkages stay with PyTorch, whose kernels for CPUs and for GPUs disagree on NaN.
"""

from __future__ import annotations

import math

from tilewright.operators.arithmetic import each, of_argument, per_result
from tilewright.operators.concatenation import beside
from tilewright.operators.language import Scalar, Unfusable, Value, call, where
from tilewright.operators.row import Call, body, formulas
from tilewright.operators.shapes import kept, like
from tilewright.operators.slice_value import slice_value

SQRT_HALF = math.sqrt(0.5)
GAUSSIAN = 1 / math.sqrt(2 * math.pi)
TANH_GAIN = math.sqrt(2 / math.pi)
TANH_CUBIC = 0.044715
SIXTH = 0.1666666716337204
"""Rounded to fp32, as PyTorch has it for every dtype."""


def _elu(c: Call, x: Value, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1) -> Value:
    """Clevert et al., arXiv:1511.07289; with other scales SELU and CELU."""
    return where(x < 0, call("expm1", x * input_scale) * (alpha * scale), x * scale)


def _hard_gate(c: Call, x: Value) -> Value:
    if c.dtype == "float64":
        raise Unfusable("in float64, PyTorch multiplies by 1/6 rounded to fp32 on a GPU, but by a float64 one on a CPU")
    return call("minimum", call("maximum", x + 3, 0), 6)


def _mish_gate(x: Value) -> Value:
    """tanh(log(1 + e)) = n / (n + 2), with e = exp(x) and n = e (e + 2); from 20 on it is 1 in every dtype."""
    e = call("exp", call("minimum", x, 20))
    n = e * (e + 2)
    return n / (n + 2)


def _mish_backward(c: Call, g: Value, x: Value) -> Value:
    gate = _mish_gate(x)
    return g * (gate + x * call("sigmoid", x) * (1 - gate * gate))


def silu_backward(c: Call, g: Value, x: Value) -> Value:
    s = call("sigmoid", x)
    return g * s * (1 + x * (1 - s))


formulas({"relu.default(self)": lambda c, x: call("maximum", x, 0)}, role="ReLU", part="activation")
formulas(
    {
        "threshold.default(self, threshold, value)": lambda c, x, limit, value: where(x <= limit, value, x),
        "threshold_backward.default(grad_output, self, threshold)": lambda c, g, x, threshold: where(
            x <= threshold, 0, g
        ),
        "leaky_relu.default(self, negative_slope)": lambda c, x, slope=0.01: where(x > 0, x, x * slope),
        "leaky_relu_backward.default(grad_output, self, negative_slope, self_is_result)": lambda c, g, x, slope, _: (
            where(x > 0, g, g * slope)
        ),
        "silu_backward.default(grad_output, self)": silu_backward,
        "sigmoid_backward.default(grad_output, output)": lambda c, g, y: g * (1 - y) * y,
        "tanh_backward.default(grad_output, output)": lambda c, g, y: g * (1 - y * y),
        "elu.default(self, alpha, scale, input_scale)": _elu,
        "celu.default(self, alpha)": lambda c, x, alpha=1: _elu(c, x, alpha, 1, 1 / alpha),
        "hardsigmoid.default(self)": lambda c, x: c.quotient(_hard_gate(c, x), 6),
        "hardsigmoid_backward.default(grad_output, self)": lambda c, g, x: where((x > -3) & (x < 3), g * SIXTH, 0),
        # Howard et al., arXiv:1905.02244.
        "hardswish.default(self)": lambda c, x: c.quotient(x * _hard_gate(c, x), 6),
        "hardtanh.default(self, min_val, max_val)": lambda c, x, low=-1, high=1: call(
            "minimum", call("maximum", x, low), high
        ),
        # Misra, arXiv:1908.08681.
        "mish.default(self)": lambda c, x: x * _mish_gate(x),
        "mish_backward.default(grad_output, self)": _mish_backward,
        "_prelu_kernel.default(self, weight)": lambda c, x, weight: where(x > 0, x, weight * x),
        "_prelu_kernel_backward.default(grad_output, self, weight)": lambda c, g, x, weight: (
            where(x > 0, g, weight * g),
            where(x > 0, 0, x * g),
        ),
        "hardshrink.default(self, lambd)": lambda c, x, limit=0.5: where((x >= -limit) & (x <= limit), 0, x),
        "softshrink.default(self, lambd)": lambda c, x, limit=0.5: where(
            x > limit, x - limit, where(x < -limit, x + limit, x * 0)
        ),
        # g · σ(-x). A GPU's buffer is empty, so there PyTorch computes it.
        "log_sigmoid_backward.default(grad_output, self, buffer)": lambda c, g, x, z: (
            g * where(x < 0, 1 - z / (1 + z), z / (1 + z))
        ),
    }
)


def _normal_cdf(x: Value) -> Value:
    return 0.5 + 0.5 * call("erf", x * SQRT_HALF)


def _tanh_gate(x: Value) -> Value:
    return call("tanh", TANH_GAIN * (x + TANH_CUBIC * (x * x * x)))


@body("gelu.default(self, approximate)", role="GELU", part="activation")
def gelu(c: Call, x: Value, approximate: str = "none") -> Value:
    """x·Φ(x); with `tanh`, Φ is approximated as in Hendrycks and Gimpel, arXiv:1606.08415."""
    if approximate == "tanh":
        return 0.5 * x * (1 + _tanh_gate(x))
    return x * _normal_cdf(x)


@body("gelu_backward.default(grad_output, self, approximate)")
def gelu_backward(c: Call, g: Value, x: Value, approximate: str = "none") -> Value:
    if approximate == "tanh":
        t = _tanh_gate(x)
        inner = TANH_GAIN * (1 + 3 * TANH_CUBIC * (x * x))
        return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)
    u = x * SQRT_HALF
    return g * (_normal_cdf(x) + x * GAUSSIAN * call("exp", -(u * u)))


@body("silu.default(self)", arithmetic=per_result(4, 1), role="SiLU", part="activation")
def silu(c: Call, x: Value) -> Value:
    """x·σ(x), counted as it is written."""
    return x / (1 + call("exp", -x))


@body("softplus.default(self, beta, threshold)")
def softplus(c: Call, x: Value, beta: Scalar = 1, threshold: Scalar = 20) -> Value:
    scaled = x * beta
    return where(scaled > threshold, x, call("log1p", call("exp", scaled)) / beta)


@body("softplus_backward.default(grad_output, self, beta, threshold)")
def softplus_backward(c: Call, g: Value, x: Value, beta: Scalar, threshold: Scalar) -> Value:
    scaled = x * beta
    z = call("exp", scaled)
    return where(scaled > threshold, g, g * z / (z + 1))


@body(
    "native_dropout_backward.default(grad_output, mask, scale)",
    promotion="none",
    arithmetic=per_result(2),
    dtypes=("grad_output",),
)
def dropout_with_mask(c: Call, x: Value, mask: Value, scale: float) -> Value:
    """x·scale where the mask keeps; a dropped Inf or NaN becomes NaN as in eager."""
    x = x.to_compute(c.dtype)
    return x * where(mask, x.lift(scale), 0)


@body("hardswish_backward.default(grad_output, self)", arithmetic=per_result(5), discontinuous=True)
def hardswish_backward(c: Call, g: Value, x: Value) -> Value:
    """For NaN it is `g` on a GPU, and NaN in the vectors of PyTorch's kernel for CPUs."""
    sloped = g * (x / 3 + 0.5)
    inner = where(x >= 3, g, sloped) if c.in_cpp else where(x < 3, sloped, g)
    return where(x <= -3, 0, inner)


@body("hardtanh_backward.default(grad_output, self, min_val, max_val)", arithmetic=per_result(2), discontinuous=True)
def hardtanh_backward(c: Call, g: Value, x: Value, low: Scalar, high: Scalar) -> Value:
    """For NaN it is `g` on a GPU, and 0 in the vectors of PyTorch's kernel for CPUs."""
    return where((x > low) & (x < high), g, 0) if c.in_cpp else where((x <= low) | (x >= high), 0, g)


@body("log_sigmoid_forward.default(self)", dtypes=("self", "self"))
def log_sigmoid(c: Call, x: Value) -> tuple[Value, Value]:
    """log σ(x), and exp(-|x|), which PyTorch keeps on a CPU."""
    z = call("exp", -call("abs", x))
    return call("minimum", x, 0) - call("log1p", z), z


@body("logit.default(self, eps)")
def logit(c: Call, x: Value, eps: Scalar | None = None) -> Value:
    if eps is not None and eps >= 0:
        x = where(x < eps, eps, where(x > 1 - eps, 1 - eps, x))
    return call("log", x / (1 - x))


def _halves(x: Value, dim: int) -> tuple[Value, Value]:
    size = x.shape[dim] // 2
    return slice_value(x, dim, size, 0), slice_value(x, dim, size, size)


@body("glu.default(self, dim)", shapes=kept, arithmetic=per_result(4, 1))
def glu(c: Call, x: Value, dim: int = -1) -> Value:
    """Dauphin et al., arXiv:1612.08083: the first half times σ of the second."""
    a, b = _halves(x, dim)
    return a * call("sigmoid", b)


@body(
    "glu_backward.default(grad_output, self, dim)",
    shapes=like("self"),
    dtypes=("self",),
    arithmetic=each(of_argument("grad_output"), 8, 1),
)
def glu_backward(c: Call, g: Value, x: Value, dim: int) -> Value:
    a, b = _halves(x, dim)
    gate = call("sigmoid", b)
    return beside(c, [gate * g, (1 - gate) * gate * a * g], dim % len(c.shape))


@body(
    "elu_backward.default(grad_output, alpha, scale, input_scale, is_result, self_or_result)",
    arithmetic=per_result(4, 1),
)
def elu_backward(
    c: Call, g: Value, alpha: Scalar, scale: Scalar, input_scale: Scalar, is_result: bool, x: Value
) -> Value:
    """`x` is the operand or the result. For NaN it is g · scale on a GPU, and NaN in PyTorch's vectors for CPUs."""
    steep = g * input_scale
    sloped = steep * (x + alpha * scale) if is_result else steep * (alpha * scale) * call("exp", x * input_scale)
    return where(x > 0, g * scale, sloped) if c.in_cpp else where(x <= 0, sloped, g * scale)
