"""How each ATen operator's axes follow from its operands' axes, one rule per family of operators.

A rule gets the call and returns the axes of its result, or a tuple of them for several results. A
result without a rule gets axes without names, which a later use may name. Whatever a rule says is
checked against the captured sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from tilewright.graph import calls
from tilewright.graph.axis_names import Axes, Axis, AxisNames

if TYPE_CHECKING:
    from torch.fx import Node

Result = Axes | list[Axes | None]
"""The axes of one result, or a list with those of each of several results."""


@dataclass
class Call:
    """One operator call: its arguments by name, and the axes known for its operands."""

    node: Node
    names: AxisNames
    known: Mapping[Node, Result]

    def __post_init__(self) -> None:
        self.arguments = calls.arguments(self.node)
        tensors = calls.outputs(self.node)
        self.shapes = [None if tensor is None else calls.shape_of(tensor) for tensor in tensors]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the first result."""
        return self.shapes[0] or ()

    def axes(self, name: str) -> Axes | None:
        """Axes of the tensor argument `name`; None where it is absent."""
        return self.axes_of(self.arguments.get(name))

    def tensor(self, name: str) -> Axes:
        axes = self.axes(name)
        assert axes is not None, f"{self.node.target} without {name}"
        return axes

    def axes_of(self, argument: object) -> Axes | None:
        known = self.known.get(cast("Node", argument))
        return known if isinstance(known, tuple) else None

    @property
    def operands(self) -> list[Axes]:
        """Axes of every tensor operand, in order."""
        found = [self.axes_of(node) for node in self.node.all_input_nodes]
        return [axes for axes in found if axes is not None]

    def list_of(self, name: str) -> list[Axes]:
        argument = self.arguments[name]
        assert isinstance(argument, Sequence)
        return [axes for axes in map(self.axes_of, argument) if axes is not None]

    def dim(self, rank: int, name: str = "dim") -> int:
        """A dimension argument, counted from the front."""
        return cast("int", self.arguments[name]) % max(rank, 1)

    def dims(self, rank: int) -> list[int]:
        """The `dim` argument, one or several, counted from the front; empty where there is none."""
        argument = self.arguments.get("dim")
        listed = argument if isinstance(argument, Sequence) else [] if argument is None else [argument]
        return [cast("int", dim) % max(rank, 1) for dim in listed]

    def each(self, axes: Axes) -> Result:
        """The same axes for every result."""
        return [axes for _ in self.shapes] if calls.has_many_outputs(self.node) else axes


Rule = Callable[[Call], Result]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


def broadcast(names: AxisNames, operands: Sequence[Axes], shape: Sequence[int]) -> Axes:
    """The axes of a result of `shape` whose operands broadcast to it, aligned at the right."""
    result: list[Axis] = []
    for place, size in enumerate(shape):
        axis: Axis | None = None
        for axes in operands:
            behind = place - len(shape) + len(axes)
            if behind >= 0 and names.size_of(axes[behind]) == size:
                axis = axes[behind] if axis is None else names.unify(axis, axes[behind])
        result.append(names.unknown(size) if axis is None else axis)
    return tuple(result)


def pointwise(call: Call) -> Result:
    operands = call.operands
    if not operands:
        return call.names.unknown_shape(call.shape, guess=True)
    return call.each(broadcast(call.names, operands, call.shape))


RULES.update(dict.fromkeys(["_softmax_backward_data", "_log_softmax_backward_data"], pointwise))


@rule(
    "_softmax _log_softmax cumsum cumprod tril triu flip roll sort native_dropout bernoulli rand_like "
    "randn_like alias detach lift_fresh_copy lift_fresh clone index_put scatter scatter_add slice_scatter "
    "select_scatter full_like zeros_like ones_like empty_like normal_functional uniform real"
)
def same(call: Call) -> Result:
    return call.each(call.operands[0])


@rule("copy copy_")
def copy(call: Call) -> Result:
    return broadcast(call.names, [call.tensor("self"), call.tensor("src")], call.shape)


@rule("full zeros ones empty arange rand randn randint new_zeros new_ones new_empty new_empty_strided new_full eye")
def factory(call: Call) -> Result:
    return call.names.unknown_shape(call.shape, guess=True)


@rule("max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d upsample_nearest2d repeat constant_pad_nd topk")
def kept(call: Call) -> Result:
    """An axis whose size stays keeps its name; axes are aligned at the right."""
    source = call.operands[0]
    return call.each(broadcast(call.names, [source], call.shape))


# Reductions.


@rule("sum mean prod amax amin max min argmax argmin any all var std var_mean logsumexp linalg_vector_norm norm")
def reduction(call: Call) -> Result:
    source = call.operands[0]
    reduced = call.dims(len(source)) or range(len(source))
    if call.arguments.get("keepdim"):
        return call.each(tuple(() if i in reduced else axis for i, axis in enumerate(source)))
    return call.each(tuple(axis for i, axis in enumerate(source) if i not in reduced))


@rule("mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits")
def loss(call: Call) -> Result:
    return broadcast(call.names, call.operands, call.shape)


def _normalised(call: Call) -> tuple[Axes, Axes, Axes]:
    """Of a normalisation over trailing axes: the operand, its statistics, its weight."""
    shape = call.arguments["normalized_shape"]
    assert isinstance(shape, Sequence)
    source = call.tensor("input")
    if (gradient := call.axes("grad_out")) is not None:
        source = broadcast(call.names, [source, gradient], [call.names.size_of(axis) for axis in source])
    leading, trailing = source[: len(source) - len(shape)], source[len(source) - len(shape) :]
    for name in ("weight", "bias"):
        if (axes := call.axes(name)) is not None:
            trailing = tuple(map(call.names.unify, trailing, axes))
    return source, leading + ((),) * len(trailing), trailing


@rule("native_layer_norm _fused_rms_norm")
def normalisation(call: Call) -> Result:
    source, statistics, _ = _normalised(call)
    return [source, *[statistics for _ in call.shapes[1:]]]


@rule("native_layer_norm_backward _fused_rms_norm_backward")
def normalisation_backward(call: Call) -> Result:
    source, _, weight = _normalised(call)
    return [source, *[weight for _ in call.shapes[1:]]]


@rule("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional native_group_norm")
def channel_normalisation(call: Call) -> Result:
    source = call.tensor("input")
    vectors = [axes for axes in call.operands[1:] if len(axes) == 1]
    for axes in vectors:
        call.names.unify(source[1], axes[0])
    others = [None if shape is None else broadcast(call.names, vectors, shape) for shape in call.shapes[1:]]
    return [source, *others]


# Matrix products, convolution, attention.


def _product(call: Call, left: Axes, right: Axes) -> Axes:
    """[..., m, k] × [..., k, n] → [..., m, n]; a vector on either side loses its axis."""
    names = call.names
    if not left or not right:
        return call.names.unknown_shape(call.shape)
    names.unify(left[-1], right[-2] if len(right) > 1 else right[-1])
    batch = call.shape[: max(len(left), len(right), 2) - 2]
    rows = left[-2:-1]
    columns = right[-1:] if len(right) > 1 else ()
    return broadcast(names, [left[:-2], right[:-2]], batch) + rows + columns


@rule("mm bmm matmul mv dot")
def product(call: Call) -> Result:
    left, right = call.operands[0], call.operands[-1]
    return _product(call, left, right)


@rule("addmm baddbmm addmv")
def added_product(call: Call) -> Result:
    arguments = list(call.arguments.values())
    added, left, right = (call.axes_of(argument) for argument in arguments[:3])
    assert added is not None and left is not None and right is not None
    return broadcast(call.names, [_product(call, left, right), added], call.shape)


@rule("linear")
def linear(call: Call) -> Result:
    source, weight, bias = call.tensor("input"), call.tensor("weight"), call.axes("bias")
    call.names.unify(source[-1], weight[-1])
    return broadcast(call.names, [source[:-1] + weight[:-1], *([bias] if bias else [])], call.shape)


@rule("convolution")
def convolution(call: Call) -> Result:
    source, weight, bias = call.tensor("input"), call.tensor("weight"), call.axes("bias")
    if call.arguments["transposed"] or call.arguments["groups"] != 1 or len(source) != len(weight):
        return broadcast(call.names, [source[:1] + call.names.unknown_shape(call.shape[1:])], call.shape)
    call.names.unify(source[1], weight[1])
    channels = call.names.unify(weight[0], bias[0]) if bias else weight[0]
    same_size = [
        axis if call.names.size_of(axis) == size else call.names.unknown(size)
        for axis, size in zip(source[2:], call.shape[2:], strict=True)
    ]
    return (source[0], channels, *same_size)


@rule("convolution_backward")
def convolution_backward(call: Call) -> Result:
    weight = call.tensor("weight")
    return [call.tensor("input"), weight, weight[:1]]


SDPA = "scaled_dot_product"


@rule(
    f"{SDPA}_attention _{SDPA}_flash_attention _{SDPA}_flash_attention_for_cpu _{SDPA}_efficient_attention "
    f"_{SDPA}_cudnn_attention _{SDPA}_fused_attention_overrideable tilewright.attention"
)
def attention(call: Call) -> Result:
    query, key, value = (call.tensor(name) for name in _names(call))
    names = call.names
    names.unify(query[-1], key[-1])
    names.unify(key[-2], value[-2])
    mask = call.axes("attn_mask") or call.axes("attn_bias") or call.axes("mask")
    if mask:
        scores = (*query[:-1], key[-2])
        broadcast(names, [scores, mask], [names.size_of(axis) for axis in scores])
    output = (*query[:-1], value[-1])
    others = [None if s is None else broadcast(names, [query[:-1]], s) for s in call.shapes[1:]]
    return [output, *others] if calls.has_many_outputs(call.node) else output


@rule(
    f"_{SDPA}_flash_attention_backward _{SDPA}_flash_attention_for_cpu_backward "
    f"_{SDPA}_efficient_attention_backward _{SDPA}_cudnn_attention_backward tilewright.attention_backward"
)
def attention_backward(call: Call) -> Result:
    return [*(call.tensor(name) for name in _names(call)), call.axes("attn_bias")]


def _names(call: Call) -> tuple[str, str, str]:
    """Of the three operands, in PyTorch's operators and in tilewright's."""
    return ("query", "key", "value") if "query" in call.arguments else ("q", "k", "v")
