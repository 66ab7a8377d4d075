"""Losses between two tensors, and their gradients towards the first; `g` is the gradient of the loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from tilewright.operators.arithmetic import per_operand
from tilewright.operators.language import FLOATS, Scalar, Unfusable, Value, call, where
from tilewright.operators.row import Call, body
from tilewright.operators.shapes import CallAxes, Result, like

MEAN, SUM = 1, 2
"""Values of the argument `reduction`; 0 is no reduction."""


def _loss(call: CallAxes) -> Result:
    """One number, or, without a reduction, one for each element."""
    each = call.broadcast(*call.operands)
    return each if call.arguments.get("reduction") == 0 else ()


loss = partial(body, operator_class="reduction", shapes=_loss)
gradient = partial(body, shapes=like("self"), dtypes=("self",))


def _refuse_integers(x: Value) -> None:
    if x.dtype not in FLOATS:
        raise Unfusable("a loss of integers")


def _reduced(each: Value, reduction: int) -> Value:
    _refuse_integers(each)
    if reduction == MEAN:
        return each.sum(None, keepdim=False) / prod(each.shape)
    return each.sum(None, keepdim=False) if reduction == SUM else each


def _share(g: Value, x: Value, reduction: int) -> Value:
    """The gradient of one element's loss."""
    _refuse_integers(x)
    return g / prod(x.shape) if reduction == MEAN else g


def _of_distance(
    name: str, width: str, height: Callable[[Value, Scalar], Value], slope: Callable[[Value, Scalar], Value]
) -> None:
    """A loss of |x - y| with a width within which it is a parabola, and its derivative by x - y."""

    @loss(f"{name}.default(self, target, reduction, {width})", arithmetic=per_operand(8))
    def _(c: Call, x: Value, y: Value, reduction: int = MEAN, width: Scalar = 1.0) -> Value:
        return _reduced(height(call("abs", x - y), width), reduction)

    @gradient(f"{name}_backward.default(grad_output, self, target, reduction, {width})")
    def _(c: Call, g: Value, x: Value, y: Value, reduction: int, width: Scalar) -> Value:
        return _share(g, x, reduction) * slope(x - y, width)


_of_distance(
    "smooth_l1_loss",
    "beta",
    lambda z, beta: where(z < beta, 0.5 * z * z / beta, z - 0.5 * beta),
    lambda d, beta: where(d <= -beta, -1, where(d >= beta, 1, d / beta)),
)
_of_distance(
    "huber_loss",
    "delta",
    lambda z, delta: where(z <= delta, 0.5 * z * z, delta * (z - 0.5 * delta)),
    lambda d, delta: where(d <= -delta, -delta, where(d >= delta, delta, d)),
)


@loss("mse_loss.default(self, target, reduction)", arithmetic=per_operand(3))
def mse_loss(c: Call, x: Value, y: Value, reduction: int = MEAN) -> Value:
    return _reduced((x - y) * (x - y), reduction)


@gradient("mse_loss_backward.default(grad_output, self, target, reduction)")
def mse_loss_backward(c: Call, g: Value, x: Value, y: Value, reduction: int) -> Value:
    return 2 * (x - y) * _share(g, x, reduction)


@loss(
    "binary_cross_entropy_with_logits.default(self, target, weight, pos_weight, reduction)",
    arithmetic=per_operand(8, 2),
)
def binary_cross_entropy_with_logits(
    c: Call, x: Value, y: Value, weight: Value | None = None, positive: Value | None = None, reduction: int = MEAN
) -> Value:
    """(1 - y)·x - w·log σ(x) with w = 1 + (positive - 1)·y."""
    log_sigmoid = call("minimum", x, 0) - call("log1p", call("exp", -call("abs", x)))
    if positive is not None:
        log_sigmoid = ((positive - 1) * y + 1) * log_sigmoid
    each = (1 - y) * x - log_sigmoid
    return _reduced(each if weight is None else each * weight, reduction)


@loss("binary_cross_entropy.default(self, target, weight, reduction)", arithmetic=per_operand(8, 2))
def binary_cross_entropy(c: Call, x: Value, y: Value, weight: Value | None = None, reduction: int = MEAN) -> Value:
    """-y·log x - (1 - y)·log(1 - x), no logarithm below -100."""
    yes, no = (call("maximum", logarithm, -100) for logarithm in (call("log", x), call("log1p", -x)))
    each = (y - 1) * no - y * yes
    return _reduced(each if weight is None else each * weight, reduction)


@gradient("binary_cross_entropy_backward.default(grad_output, self, target, weight, reduction)")
def binary_cross_entropy_backward(
    c: Call, g: Value, x: Value, y: Value, weight: Value | None = None, reduction: int = MEAN
) -> Value:
    each = g * (x - y) / call("maximum", (1 - x) * x, 1e-12)
    return _share(each if weight is None else each * weight, x, reduction)
