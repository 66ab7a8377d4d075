"""Norms over channels or groups of them: batch norm and group norm."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, each, elements, nothing, of_argument, wanted
from tilewright.operators.language import Unfusable, Value, call
from tilewright.operators.normalization import affine, layer_norm_flops, moments, norm, roots_of_rows
from tilewright.operators.row import Call, Row, body, calls, declare
from tilewright.operators.shapes import CallAxes, Result


def _batch_norm_backward_flops(sizes: CallSizes) -> Count:
    # x̂ takes 2, its sums 3; towards the input 4 (the combination and the scale of the channel).
    return elements(sizes.shape("input")) * (5 + 4 * wanted(sizes, 3)[0])


def _channel_norm(call: CallAxes) -> Result:
    source = call.tensor("input")
    if call.known is None and call.count is not None:
        return [source, *[source[1:2]] * (call.count - 1)]
    vectors = [axes for axes in call.operands[1:] if len(axes) == 1]
    for axes in vectors:
        call.names.unify(source[1], axes[0])
    return [source, *(None if shape is None else call.kept(*vectors, shape=shape) for shape in call.shapes[1:])]


def _channel_norm_backward(call: CallAxes) -> Result:
    source = call.tensor("input")
    return call.wanted(source, source[1:2], source[1:2])


STATISTICS = ("input", "statistic", "statistic")
calls(
    """
    native_batch_norm.default(input, weight, bias, running_mean, running_var, training, momentum, eps)
    _native_batch_norm_legit.default(input, weight, bias, running_mean, running_var, training, momentum, eps)
    cudnn_batch_norm.default(input, weight, bias, running_mean, running_var, training, exponential_average_factor,
        epsilon)
    """,
    "reduction",
    arithmetic=Arithmetic(layer_norm_flops, roots_of_rows),
    shapes=_channel_norm,
    dtypes=STATISTICS,
)
calls(
    "cudnn_batch_norm_backward.default(input, grad_output, weight, running_mean, running_var, save_mean, save_var, "
    "epsilon, reserveSpace)",
    "reduction",
    arithmetic=Arithmetic(_batch_norm_backward_flops, nothing),
    shapes=_channel_norm_backward,
    dtypes=STATISTICS,
)


def _along_channels(x: Value, statistic: Value) -> Value:
    """A value [C] that meets `x` [N, C, …] at its second dimension."""
    return statistic.view([1, x.shape[1], *[1] * (len(x.dims) - 2)])


def _but_channels(x: Value) -> list[int]:
    return [d for d in range(len(x.dims)) if d != 1]


def _normalised(c: Call, centred: Value, rstd: Value, weight: Value | None, bias: Value | None) -> Value:
    """centred · (rstd · weight) + bias, one factor a channel as in eager; all but `centred` [N, C, …] are [C]."""
    scale = rstd if weight is None else rstd * weight.to_compute(c.dtype)
    y = centred * _along_channels(centred, scale)
    return y if bias is None else y + _along_channels(y, bias.to_compute(c.dtype))


@body(
    "_native_batch_norm_legit_no_training.default(input, weight, bias, running_mean, running_var, momentum, eps)",
    promotion="none",
    # Centring and scaling.
    arithmetic=Arithmetic(lambda n: elements(n.shape("input")) * (2 + affine(n)), of_argument("running_mean")),
)
def batch_norm_inference(
    c: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, None, None]:
    rstd = call("rsqrt", running_var.to_compute(c.dtype) + eps)
    centred = x - _along_channels(x, running_mean.to_compute(c.dtype))
    return _normalised(c, centred, rstd, weight, bias), None, None


@norm(
    "_native_batch_norm_legit_functional.default(input, weight, bias, running_mean, running_var, "
    "training, momentum, eps)",
    arithmetic=Arithmetic(layer_norm_flops, roots_of_rows),
    shapes=_channel_norm,
)
def batch_norm(
    c: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, Value, Value, Value, Value]:
    y, mean, rstd, squares = _by_moments(c, x, weight, bias, training, eps)
    count = prod(x.shape) // x.shape[1]
    # The running variance is unbiased: divided by count - 1.
    batch = ((running_mean, mean), (running_var, squares / (count - 1)))
    running = (old * (1 - momentum) + new.to_compute(old.dtype) * momentum for old, new in batch)
    return y, mean, rstd, *running  # type: ignore[return-value]


@norm(
    "_native_batch_norm_legit.no_stats(input, weight, bias, training, momentum, eps)",
    arithmetic=Arithmetic(layer_norm_flops, roots_of_rows),
    shapes=_channel_norm,
)
def batch_norm_without_running(
    c: Call, x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float, eps: float
) -> tuple[Value, Value, Value]:
    """An instance norm is one, of a view in which each sample's channels are channels of their own."""
    return _by_moments(c, x, weight, bias, training, eps)[:3]


def _by_moments(
    c: Call, x: Value, weight: Value | None, bias: Value | None, training: bool, eps: float
) -> tuple[Value, Value, Value, Value]:
    """A batch norm, and of each channel the mean, the reciprocal deviation and the sum of squares about the mean."""
    count = prod(x.shape) // x.shape[1]
    if not training or count == 1:
        raise Unfusable("this batch norm uses given means and variances, or a channel has one element")
    mean, centred, squares = moments(c, x, _but_channels(x))
    rstd = call("rsqrt", squares / count + eps).to_compute(x.dtype)
    mean, rstd, squares = (statistic.view([x.shape[1]]) for statistic in (mean, rstd, squares))
    return _normalised(c, centred, rstd, weight, bias), mean, rstd, squares


@norm(
    "native_batch_norm_backward.default(grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, "
    "train, eps, output_mask)",
    arithmetic=Arithmetic(_batch_norm_backward_flops, nothing),
    shapes=_channel_norm_backward,
    dtypes=STATISTICS,
)
def batch_norm_backward(
    c: Call,
    g: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    mean: Value,
    rstd: Value,
    training: bool,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    if not training:
        raise Unfusable("in evaluation a batch norm uses its running mean and variance, not those of the batch")
    dims = _but_channels(x)
    count = prod(x.shape[d] for d in dims)
    middle, deviation = _along_channels(x, mean), _along_channels(x, rstd)
    db, dw = g.sum(dims), (g * (x - middle)).sum(dims) * deviation
    scale = _along_channels(x, rstd if weight is None else rstd * weight.to_compute(rstd.dtype))
    # x - mean again: two kernels would share it through memory.
    dx = (g - db / count - (x - middle) * (dw * deviation / count)) * scale
    flat = (dx, *(total.view([x.shape[1]]) for total in (dw, db)))
    return tuple(v if want else None for v, want in zip(flat, wanted, strict=True))  # type: ignore[return-value]


def _group_norm_shapes(call: CallAxes) -> Result:
    source = call.tensor("input")
    for name in ("weight", "bias"):
        if (axes := call.axes(name)) is not None:
            call.names.unify(source[1], axes[0])
    statistics = (source[0], *call.names.unknown_shape([call.arguments["group"]], guess=True))
    return [source, statistics, statistics]


@norm(
    "native_group_norm.default(input, weight, bias, N, C, HxW, group, eps)",
    arithmetic=Arithmetic(layer_norm_flops, roots_of_rows),
    shapes=_group_norm_shapes,
    dtypes=("input", "input", "input"),
    role="group norm",
)
def group_norm(
    c: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    batch: int,
    channels: int,
    points: int,
    group: int,
    eps: float,
) -> tuple[Value, Value, Value]:
    """Wu and He, arXiv:1803.08494: the moments are those of each sample's groups of channels."""
    count = channels // group * points
    parts = x.view([batch, group, count])
    mean, centred, squares = moments(c, parts, [2])
    rstd = call("rsqrt", squares / count + eps).to_compute(x.dtype)
    y = (centred * rstd).view(c.shape)
    if weight is not None:
        y = y * _along_channels(y, weight.to_compute(c.dtype))
    if bias is not None:
        y = y + _along_channels(y, bias.to_compute(c.dtype))
    return y, mean.view([batch, group]), rstd.view([batch, group])


GROUP_NORM = "tilewright.group_norm.default"
GROUP_NORM_BACKWARD = "tilewright.group_norm_backward.default"


# Group norm of channels-last tensors on a GPU (`kernels/norm/group.py`).
declare(
    Row(
        f"{GROUP_NORM}(Tensor input, int group, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
        "reduction",
        cancels=True,
        arithmetic=Arithmetic(layer_norm_flops, roots_of_rows),
        shapes=_group_norm_shapes,
        dtypes=("input", "float32", "float32"),
        role="group norm",
    ),
    Row(
        f"{GROUP_NORM_BACKWARD}(Tensor grad_out, Tensor input, Tensor? weight, Tensor mean, Tensor rstd) -> "
        "(Tensor, Tensor, Tensor)",
        "reduction",
        cancels=True,
        # Towards the input 7 with a weight, towards the weight 3, towards the bias 1.
        arithmetic=each(of_argument("input"), 11),
        shapes=lambda call: [call.tensor("input"), *[call.tensor("input")[1:2]] * 2],
        dtypes=("input", "input", "input"),
    ),
)
