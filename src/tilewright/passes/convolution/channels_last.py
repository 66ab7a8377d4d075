"""Gives convolutions channels-last tensors. `Convolution` is one as plain data, by which its layouts are raced.

    y = conv2d(x, w)          →   y = conv2d(x.contiguous(channels_last), w.contiguous(channels_last))
    return relu(y)                return relu(y).contiguous()

Pointwise operators, batch norms (`split_norms`) and pooling keep the layout of their operand, so that one copy at the
first convolution is enough for the whole graph: `contiguous` copies nothing if a tensor already has the layout.
Results, views and gradients of weights keep eager's strides; a gradient in another layout is converted. The same holds
for volumes, transposed convolutions, and sequences, which `convolve_as_images` has made images of one row.
`choose/layouts.py` decides.

On a GPU, the kernel that computes an operand of another layout writes the copy that PyTorch would make
(`lay_operands`):

    g = cat([a, b], 1)[:, :, None]             [N, C, 1, L], contiguous: PyTorch knows no other format of sequences
    dx, dw = convolution_backward(g, x, w)   →   dx, dw = convolution_backward(g.clone(channels_last), x, w)

On a CPU, backward of a dense convolution reads the graph's operands, so that forward's copies are not kept
(`drop_kept_copies`); oneDNN converts them to its own layout in any case. With w' = w.clone(channels_last):

    dx, dw, db = convolution_backward(g, x, w', …)   →   dx, dw, db = convolution_backward(g, x, w, …)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph import calls
from tilewright.graph.canonical import argument, canonical_name, example, memory_of, mutates, static
from tilewright.graph.insert import insert_call, insert_like
from tilewright.graph.layouts import FORMATS, laid_channels_last, lies_channels_last
from tilewright.hardware.target import Target
from tilewright.kernels.device import NARROW
from tilewright.kernels.norm.group import group_norm
from tilewright.passes.rule import call, cpu, gpu, rule
from tilewright.pytorch.layouts import suggested_format

CONVOLUTIONS = {
    **{f"conv{places}d": ("stride", "padding", "dilation", "groups") for places in (2, 3)},
    **{f"conv_transpose{places}d": ("stride", "padding", "output_padding", "groups", "dilation") for places in (2, 3)},
}
"""By function of `torch.nn.functional`, its arguments behind the bias, in their order."""
DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Convolution:
    """What the time of a convolution depends on. `gradients`: of input and of weight, whether they are computed."""

    function: str
    input: tuple[Shape, Shape]
    """Sizes and strides."""
    weight: tuple[Shape, Shape]
    options: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    gradients: tuple[bool, bool]


def convolution_of(node: fx.Node) -> Convolution | None:
    """A call of torch's functions as data; None if a size is a symbol or an option is no number."""
    function = canonical_name(node) or ""
    x, weight, made = example(argument(node, 0, "input")), example(argument(node, 1, "weight")), example(node)
    if x is None or weight is None or made is None or not (static(x.shape) and static(weight.shape)):
        return None
    options = [argument(node, 3 + i, name, DEFAULTS[name]) for i, name in enumerate(CONVOLUTIONS[function])]
    if any(isinstance(number, fx.Node) for option in options for number in _numbers(option)):
        return None
    return Convolution(
        function,
        (tuple(x.shape), x.stride()),
        (tuple(weight.shape), weight.stride()),
        tuple(tuple(_numbers(option)) if isinstance(option, (list, tuple)) else option for option in options),
        made.dtype,
        made.device,
        (made.requires_grad and x.requires_grad, made.requires_grad and weight.requires_grad),
    )


def _numbers(option: Any) -> list[Any]:
    return list(option) if isinstance(option, (list, tuple)) else [option]


WIDE = (torch.float32,)
POOLS = {f"adaptive_avg_pool{places}d": places for places in (1, 2, 3)}
"""By operator, the number of dimensions that it averages over."""
VIEWS = ("view", "as_strided")
"""Calls that fail or compute something else for a tensor with other strides."""
MOVES = ("permute", "transpose", "movedim", "swapaxes", "linear", "matmul")
"""Calls whose results have the channels on another axis than the second."""


def lay_channels_last(graph: fx.Graph, convolutions: list[fx.Node], dtypes: tuple[torch.dtype, ...]) -> None:
    """Rewrite `graph`, a torch-level graph from Dynamo without an `obstacle`, in place."""
    for node in convolutions:
        x = example(argument(node, 0, "input"))
        if x is not None and x.shape[1] == 1:
            _convert_result(node)
    changed, images = changed_by(convolutions), _images(convolutions)
    for node in convolutions:
        _convert(node, changed)
    _restore(graph, changed, images)
    _bring_gradients_back(images)
    for node in changed:
        _keep_the_layout(node, (node in images or _rank(node) == 4) and is_of(node, dtypes))


def is_of(node: fx.Node, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether a convolution computes in one of these dtypes; under autocast its operands may be wider."""
    result = example(node)
    return result is not None and result.dim() >= 3 and result.dtype in dtypes


def obstacle(graph: fx.Graph, convolutions: list[fx.Node], target: Target) -> str | None:
    """What forbids another layout in `graph`, if anything does."""
    changed = changed_by(convolutions)
    if (norm := next((node for node in changed if _views_samples(node, target)), None)) is not None:
        return f"{norm.name} reduces over pixels, which would not be contiguous"
    views = (node for node in graph.nodes if canonical_name(node) in VIEWS and node.args[0] in changed)
    if (view := next((x for x in views if not (_is_known(x.args[0]) or _is_copy(x))), None)) is not None:
        return f"{view.name} views a tensor with gaps"
    results = (node for node in graph.output_node().all_input_nodes if node in changed)
    return None if all(map(_is_known, results)) else "a result has gaps"


def _views_samples(node: fx.Node, target: Target) -> bool:
    """Whether an instance norm is left to PyTorch, which views each sample's channels as those of one batch entry.

    Not if it computes the moments of each sample on a GPU and has no running statistics.
    """
    if canonical_name(node) != "instance_norm":
        return False
    kept = (argument(node, place, name) for place, name in ((1, "running_mean"), (2, "running_var")))
    is_plain = node.target is torch.nn.functional.instance_norm and all(moment is None for moment in kept)
    is_of_samples = is_plain and argument(node, 5, "use_input_stats", True) is True
    return not (is_of_samples and target.is_gpu and is_of(node, (*NARROW, *WIDE)))


def _is_copy(node: fx.Node) -> bool:
    """Whether a reshape copied its operand (which works from any layout) and nothing writes to the copy."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    operand = node.args[0]
    if name not in ("reshape", "flatten") or memory_of(node) == memory_of(operand):
        return False
    shown = calls.closure([node], lambda x: (u for u in x.users if memory_of(u) == memory_of(x)))
    return not any(mutates(user) for view in shown for user in view.users)


def _is_known(node: Any) -> bool:
    """Whether a copy can have the strides of eager's tensor."""
    return _layout(node) is not None or (_rank(node) > 2 and _order(node) is not None)


def _order(node: Any) -> tuple[int, ...] | None:
    """The dimensions of eager's tensor by falling stride; None if it has gaps or overlaps."""
    value = example(node)
    if value is None or not static(value.shape):
        return None
    strides = value.stride()
    order = tuple(sorted(range(value.dim()), key=lambda d: (-strides[d], -value.shape[d])))
    return order if value.permute(order).is_contiguous() else None


def _convert_result(node: fx.Node) -> None:
    """Convert the result of a convolution of one input channel: both layouts have the strides of its operands, which
    PyTorch treats as contiguous."""
    readers = list(node.users)
    converted = _with_layout(node.next, node, torch.channels_last, torch.contiguous_format)
    for reader in readers:
        reader.replace_input_with(node, converted)


def _layout(node: Any) -> torch.memory_format | None:
    """The memory format of eager's tensor: contiguous or channels-last; None for any other strides."""
    value = example(node)
    if value is None or value.is_contiguous():
        return torch.contiguous_format
    return torch.channels_last if is_channels_last(node) else None


def _suggested(node: Any) -> torch.memory_format:
    """The format that PyTorch gives the gradient of a convolution's operand with gaps or with its axes permuted."""
    value = example(node)
    suggested = value is not None and suggested_format(value) in FORMATS.values()
    return torch.channels_last if suggested else torch.contiguous_format


def is_channels_last(node: Any) -> bool:
    value = example(node)
    return value is not None and value.dim() in FORMATS and lies_channels_last(value)


def is_trained(node: fx.Node) -> bool:
    value = example(node)
    return value is not None and value.dim() >= 3 and value.is_floating_point() and value.requires_grad


def changed_by(convolutions: list[fx.Node]) -> set[fx.Node]:
    """Nodes whose layout may change: `convolutions` and their transitive readers, none through views."""
    return calls.closure(convolutions, lambda node: (user for user in node.users if canonical_name(user) not in VIEWS))


def _images(convolutions: list[fx.Node]) -> set[fx.Node]:
    """Transitive readers of `convolutions` whose second dimension is still the channels; for images of one row, also
    those after the row is squeezed out."""
    copies = [
        u for node in convolutions for u in node.users if u.target is relayout or canonical_name(u) == "contiguous"
    ]
    rows = [
        u for node in (*convolutions, *copies) for u in node.users if canonical_name(u) == "squeeze" and _rank(u) == 3
    ]

    def readers(node: fx.Node) -> Iterator[fx.Node]:
        others = MOVES if _rank(node) > 3 else (*MOVES, *VIEWS)
        return (user for user in node.users if _rank(user) == _rank(node) and canonical_name(user) not in others)

    return calls.closure([*convolutions, *rows], readers)


def _convert(node: fx.Node, changed: set[fx.Node]) -> None:
    for place, name in ((0, "input"), (1, "weight")):
        operand = argument(node, place, name)
        if operand not in changed and is_channels_last(operand):
            continue
        back = None if operand in changed else _layout(operand) or _suggested(operand)
        converted = _with_layout(node, operand, torch.channels_last, back)
        if len(node.args) > place:
            node.update_arg(place, converted)
        else:
            node.update_kwarg(name, converted)


def _restore(graph: fx.Graph, changed: set[fx.Node], images: set[fx.Node]) -> None:
    """Give results of the graph and operands of views eager's strides; copies by `reshape` are contiguous."""
    for node in list(graph.nodes):
        if node.op == "output" or canonical_name(node) in VIEWS:
            operands = node.all_input_nodes if node.op == "output" else [node.args[0]]
            for operand in [x for x in operands if x in changed and _rank(x) > 2]:
                layout, order = _layout(operand), _order(operand)
                if layout is None and order is not None:
                    copied = _ordered(node, operand, order)
                else:
                    back = torch.channels_last if operand in images or _rank(operand) == 4 else None
                    copied = _with_layout(node, operand, layout or torch.contiguous_format, back)
                node.replace_input_with(operand, copied)


def _bring_gradients_back(images: set[fx.Node]) -> None:
    """Convert gradients before each reader of an image, except convolutions, that changes its spatial size."""
    for node in filter(is_trained, images):
        for user in [user for user in node.users if canonical_name(user) not in CONVOLUTIONS]:
            if _places(user) not in (None, _places(node)) and memory_of(user) != memory_of(node):
                user.replace_input_with(node, _with_layout(user, node, torch.channels_last, torch.channels_last))


def _keep_the_layout(node: fx.Node, is_image: bool) -> None:
    """Replace calls that would copy a channels-last operand or return other strides."""
    name, result = canonical_name(node) or "", example(node)
    if result is not None and (places := POOLS.get(name)) and set(result.shape[-places:]) == {1}:
        node.target, node.args, node.kwargs = torch.mean, (node.args[0], tuple(range(-places, 0)), True), {}
    elif is_image and name == "group_norm":
        names = (("input", None), ("num_groups", None), ("weight", None), ("bias", None), ("eps", 1e-5))
        given = (argument(node, place, name, default) for place, (name, default) in enumerate(names))
        node.target, node.args, node.kwargs = group_norm, tuple(given), {}
    elif is_image and name == "instance_norm" and result is not None:
        weight, bias, eps = argument(node, 3, "weight"), argument(node, 4, "bias"), argument(node, 7, "eps", 1e-5)
        node.target, node.args, node.kwargs = group_norm, (node.args[0], result.shape[1], weight, bias, eps), {}


def _places(node: fx.Node) -> tuple[int, ...] | None:
    value = example(node)
    return None if value is None or not all(map(calls.is_known, value.shape)) else calls.shape_of(value)[2:]


def _copy_in_layout(x: Tensor, layout: torch.memory_format) -> Tensor:
    """A copy of `operand` in a layout, which may be channels-last for any number of dimensions."""
    return laid_channels_last(x) if layout is torch.channels_last else x.clone(memory_format=layout)


class _Relayout(torch.autograd.Function):
    """A copy in one layout whose gradient has another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: torch.memory_format, back: torch.memory_format) -> Tensor:
        ctx.back = back
        return _copy_in_layout(x, layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        g = gradients[0]
        lies_so = lies_channels_last(g) if ctx.back is torch.channels_last else g.is_contiguous()
        return g if lies_so else _copy_in_layout(g, ctx.back), None, None


def relayout(x: Tensor, layout: torch.memory_format, back: torch.memory_format) -> Tensor:
    result: Tensor = _Relayout.apply(x, layout, back)  # type: ignore[no-untyped-call]
    return result


def _ordered(before: fx.Node, operand: fx.Node, order: tuple[int, ...]) -> fx.Node:
    """`operand` with its dimensions in this order in memory, the last one contiguous."""
    back = tuple(order.index(d) for d in range(len(order)))
    steps: tuple[tuple[str, tuple[int, ...]], ...] = (("permute", order), ("contiguous", ()), ("permute", back))
    for name, dims in steps:
        with torch.no_grad():
            value = getattr(example(operand), name)(*dims)
        operand = insert_like(before, operand, name, value, operand, *dims)
    return operand


def _rank(node: Any) -> int:
    value = example(node)
    return 0 if value is None else value.dim()


def _with_layout(
    before: fx.Node, operand: fx.Node, layout: torch.memory_format, back: torch.memory_format | None
) -> fx.Node:
    """`operand` in `layout`, its gradient in `back` (None: in any layout)."""
    value = example(operand)
    with torch.no_grad():
        copied = None if value is None else _copy_in_layout(value, layout)
    if back is None or not is_trained(operand):
        memory_format = FORMATS[_rank(operand)] if layout is torch.channels_last else layout
        return insert_like(before, operand, "contiguous", copied, operand, memory_format=memory_format)
    return insert_like(before, operand, relayout, copied, operand, layout, back)


aten = torch.ops.aten
OPERANDS: dict[Any, int] = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
"""How many arguments are tensors: the result's gradient, then the input and the weight, which determine the format."""


@rule(call(aten.convolution_backward.default, ...), on=cpu)
def drop_kept_copies(node: fx.Node) -> fx.Node:
    operands: Any = node.args[1:3]
    channels, width = calls.shape_of(calls.tensor(operands[1]))[:2]
    is_depthwise = width == 1 and channels == calls.number(node.args[9]) > 1
    for copy in () if is_depthwise else operands:
        if copy.target is aten.clone.default and copy.args[0].op == "placeholder":
            node.replace_input_with(copy, copy.args[0])
    return node


@rule(call(tuple(OPERANDS), ...), on=gpu)
def lay_operands(node: fx.Node) -> fx.Node | None:
    operands = node.all_input_nodes[: OPERANDS[node.target]]
    others = [operand for operand in operands[:-1] if not lies_channels_last(operand.meta["val"])]
    if not others or not any(_asks_for_the_format(operand) for operand in operands[-2:]):
        return None
    for operand in others:
        _copy(operand)
    return node


def _asks_for_the_format(operand: fx.Node) -> bool:
    """Whether the strides are channels-last and not also contiguous, as those of 1 × 1 weights may be."""
    value = operand.meta["val"]
    is_image = static(value.shape) and value.dim() in FORMATS
    return is_image and lies_channels_last(value) and not value.is_contiguous()


def _copy(operand: fx.Node) -> None:
    readers = list(operand.users)
    form = FORMATS[operand.meta["val"].dim()]
    copy = insert_call(operand.next, aten.clone.default, operand, memory_format=form)
    for reader in (one for one in readers if one.op != "output"):
        reader.replace_input_with(operand, copy)
