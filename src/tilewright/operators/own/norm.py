"""Layer and RMS norm, with a residual before it or without: counted as PyTorch's, and the sums of the residual."""

from __future__ import annotations

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, elements, nothing
from tilewright.operators.own.activation import role
from tilewright.operators.row import own
from tilewright.operators.shapes import Axes, CallAxes, Result


def _flops(sizes: CallSizes) -> Count:
    affine = sum(sizes.shape(name) is not None for name in ("weight", "bias"))
    added = sizes.shape("residual") is not None
    return elements(sizes.shape("x")) * ((5 if sizes.argument("centered") else 3) + affine + added)


def _roots(sizes: CallSizes) -> Count:
    """One for each row."""
    shape = sizes.shape("x")
    return elements(shape[:-1]) if shape else 0


def _backward_flops(sizes: CallSizes) -> Count:
    # x̂ takes 2 and dx 7 (two sums, a product, the combination); without a mean 1 and 5. Each with a weight one more.
    weight = sizes.shape("weight") is not None
    per_element = (9 if sizes.argument("centered") else 6) + weight * (1 + 2)
    added = sizes.shape("dsum") is not None
    return elements(sizes.shape("x")) * (per_element + bool(sizes.argument("has_bias")) + added)


def _normalised(call: CallAxes) -> tuple[Axes, Axes]:
    """The rows [..., columns] and the weight [columns]."""
    given = [axes for name in ("x", "residual", "dy", "dsum") if (axes := call.axes(name)) is not None]
    source = call.broadcast(*given)
    columns = source[-1]
    for name in ("weight", "bias"):
        if (axes := call.axes(name)) is not None:
            columns = call.names.unify(columns, axes[0])
    return (*source[:-1], columns), (columns,)


def _forward(copies: int, call: CallAxes) -> Result:
    """The statistics are one for each row, however many axes the rows have: [rows]; a mean only where it is needed."""
    source, _ = _normalised(call)
    rows = (tuple(factor for axis in source[:-1] for factor in axis),)
    return [*[source] * copies, rows if call.arguments.get("centered") else None, rows]


def _backward(call: CallAxes) -> Result:
    source, weight = _normalised(call)
    has_weight = call.axes("weight") is not None
    return [source, weight if has_weight else None, weight if has_weight and call.arguments.get("has_bias") else None]


# x - mean cancels, so it depends on the rounding of x, as in PyTorch's own norms.
NORM = Arithmetic(_flops, _roots)
own(
    "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centered) -> (Tensor, Tensor, Tensor)",
    "reduction",
    shapes=lambda call: _forward(1, call),
    dtypes=("x", "float32", "float32"),
    role=role("norm"),
    cancels=True,
    arithmetic=NORM,
)
own(
    "add_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, bool centered)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "reduction",
    shapes=lambda call: _forward(2, call),
    dtypes=("x", "x", "float32", "float32"),
    role=role("residual", "norm"),
    cancels=True,
    arithmetic=NORM,
)
own(
    "norm_backward(Tensor dy, Tensor x, Tensor? dsum, Tensor? weight, bool has_bias, Tensor mean, Tensor rstd,"
    " bool centered) -> (Tensor, Tensor, Tensor)",
    "reduction",
    cancels=True,
    arithmetic=Arithmetic(_backward_flops, nothing),
    shapes=_backward,
    dtypes=("x", "weight", "weight"),
    role=role("norm", backward=True),
)
