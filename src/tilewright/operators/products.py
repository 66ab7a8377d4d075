"""Matrix products and convolutions: calls of a library."""

from __future__ import annotations

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, Shape, elements, nothing, wanted
from tilewright.operators.row import calls
from tilewright.operators.shapes import Axes, CallAxes, Result, windows


def _flops(sizes: CallSizes) -> Count:
    # A bias is what the accumulator starts from: no FLOPs of its own.
    return 2 * elements(sizes.result()) * sizes.operand(-2)[-1]


def _linear_flops(sizes: CallSizes) -> Count:
    source = sizes.shape("input")
    assert source is not None
    return 2 * elements(sizes.result()) * source[-1]


PRODUCT = Arithmetic(_flops, nothing)


def multiplied(call: CallAxes, left: Axes, right: Axes) -> Axes:
    """[..., m, k] × [..., k, n] → [..., m, n]; a vector on either side loses its axis."""
    if not left or not right:
        return call.names.unknown_shape(call.shape)
    call.names.unify(left[-1], right[-2] if len(right) > 1 else right[-1])
    columns = right[-1:] if len(right) > 1 else ()
    return call.broadcast(left[:-2], right[:-2]) + left[-2:-1] + columns


def product(call: CallAxes) -> Result:
    return multiplied(call, call.operands[0], call.operands[-1])


def _linear(call: CallAxes) -> Result:
    source, weight, bias = call.tensor("input"), call.tensor("weight"), call.axes("bias")
    call.names.unify(source[-1], weight[-1])
    return call.broadcast(source[:-1] + weight[:-1], *([bias] if bias else []))


calls(
    "mm.default(self, mat2)\nmv.default(self, vec)\ndot.default(self, tensor)\nvdot.default(self, other)\n"
    "bmm.default(self, mat2)",
    "compute",
    arithmetic=PRODUCT,
    shapes=product,
)
calls("matmul.default(self, other)", "compute", arithmetic=PRODUCT, shapes=product, priced=False)
calls(
    """
    addmm.default(self, mat1, mat2, beta, alpha)
    addmm_.default(self, mat1, mat2, beta, alpha)
    baddbmm.default(self, batch1, batch2, beta, alpha)
    addmv.default(self, mat, vec, beta, alpha)
    """,
    "compute",
    arithmetic=PRODUCT,
    shapes=lambda call: call.broadcast(multiplied(call, *call.operands[1:3]), call.operands[0]),
)
calls(
    "addbmm.default(self, batch1, batch2, beta, alpha)",
    "compute",
    # Every product of the batch is added into one result.
    arithmetic=Arithmetic(lambda n: 2 * elements(n.result()) * n.operand(-2)[-1] * n.operand(-2)[0], nothing),
    shapes=None,
)
calls(
    "linear.default(input, weight, bias)",
    "compute",
    arithmetic=Arithmetic(_linear_flops, nothing),
    shapes=_linear,
    priced=False,
)


def _grouped_flops(sizes: CallSizes) -> Count:
    """FLOPs of products of groups of rows with one matrix each: as many as with one matrix for all rows."""
    left, right, result = sizes.operand(0), sizes.operand(1), sizes.result()
    batch = left[0] if len(left) == len(right) == 3 else 1
    return 2 * batch * elements(result[-2:]) * left[-1]


def _grouped(call: CallAxes) -> Result:
    """[T, K] × [E, K, N] → [T, N]; [E, M, K] × [K, T] → [M, T]; [M, T] × [T, N] → [E, M, N], of T in E groups."""
    left, right = call.tensor("self"), call.tensor("mat2")
    if len(left) == len(right) == 3:
        return multiplied(call, left, right)
    call.names.unify(left[-1], right[-2])
    groups = call.names.unknown_shape(call.shape[:1]) if len(left) == len(right) else ()
    return (*groups, left[-2], right[-1])


calls(
    "_grouped_mm.default(self, mat2, offs, bias, out_dtype)",
    "compute",
    arithmetic=Arithmetic(_grouped_flops, nothing),
    shapes=_grouped,
)


def _convolution_of(sizes: CallSizes, result: Shape) -> Count:
    # [N, C, …] with a kernel of [out, in / groups, …], or [in, out / groups, …] transposed.
    source, weight = sizes.shape("input") or sizes.shape("self"), sizes.shape("weight")
    assert source is not None and weight is not None
    points = source if sizes.argument("transposed") else result
    return 2 * points[0] * elements(points[2:]) * elements(weight)


def convolution_flops(sizes: CallSizes) -> Count:
    return _convolution_of(sizes, sizes.result())


def _convolution_backward_flops(sizes: CallSizes) -> Count:
    source, weight, bias = wanted(sizes, 3)
    gradient = sizes.shape("grad_output")
    assert gradient is not None
    return (source + weight) * _convolution_of(sizes, gradient) + bias * elements(gradient)


def _convolution(call: CallAxes) -> Result:
    source, weight, bias = call.tensor("input"), call.tensor("weight"), call.axes("bias")
    # A kernel of 3×3 has the size of no dimension, also where there are three channels.
    for axis in weight[2:]:
        call.names.unify(axis, call.names.number(call.names.size_of(axis)))
    if call.arguments["transposed"] or call.arguments["groups"] != 1 or len(source) != len(weight):
        return call.kept(source[:1] + call.names.unknown_shape(call.shape[1:]))
    call.names.unify(source[1], weight[1])
    channels = call.names.unify(weight[0], bias[0]) if bias else weight[0]
    same_size = [
        axis if call.names.size_of(axis) == size else call.names.unknown(size)
        for axis, size in zip(source[2:], call.shape[2:], strict=True)
    ]
    return (source[0], channels, *same_size)


def library_convolution(call: CallAxes) -> Result:
    source, weight = call.tensor("self"), call.tensor("weight")
    kernel = [call.names.size_of(axis) for axis in weight[2:]]
    return (source[0], weight[0], *call.names.unknown_shape(windows(call, source, kernel)))


def _convolution_backward(call: CallAxes) -> Result:
    weight = call.tensor("weight")
    return call.wanted(call.tensor("input"), weight, weight[:1])


calls(
    "convolution.default(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)",
    "compute",
    arithmetic=Arithmetic(convolution_flops, nothing),
    shapes=_convolution,
    priced=False,
    role="convolution",
)
# A profiler records these in place of `convolution`, which calls them.
calls(
    """
    cudnn_convolution.default(self, weight, padding, stride, dilation, groups, benchmark, deterministic, allow_tf32)
    mkldnn_convolution.default(self, weight, bias, padding, stride, dilation, groups)
    _slow_conv2d_forward.default(self, weight, kernel_size, bias, stride, padding)
    _conv_depthwise2d.default(self, weight, kernel_size, bias, stride, padding, dilation)
    """,
    "compute",
    arithmetic=Arithmetic(convolution_flops, nothing),
    shapes=library_convolution,
    dtypes=("self",),
    role="convolution",
)
calls(
    "convolution_backward.default(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, "
    "output_padding, groups, output_mask)",
    "compute",
    arithmetic=Arithmetic(_convolution_backward_flops, nothing),
    shapes=_convolution_backward,
    dtypes=("input", "weight", "weight"),
    role="convolution backward",
)


# Their dtype of results is an argument's.
calls(
    """
    _int_mm.default(self, mat2)
    _scaled_mm.default(self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    """,
    "compute",
    arithmetic=Arithmetic(lambda sizes: 2 * elements(sizes.result()) * sizes.operand(0)[-1], nothing),
    shapes=lambda call: multiplied(call, *call.operands[:2]),
    priced=False,
)
