"""Splits dropout into the random draw and its application, which can be fused.

    y, mask = native_dropout(x, p, True)     →   mask = keep_mask(x, p)
                                                 y = x · mask / (1 - p)

The numbers are those that eager's elementwise dropout would draw, in the same order. On a CPU only the
generator's state before the draw is kept, and the kernel that applies the mask computes it
(`passes/random/draws.py`):

    stream = draw_stream(x.shape);  mask = keep(stream, x.shape, order, 1 - p)

On a GPU seed and offset are kept, and the numbers are Philox's (`kernels/dropout_add/philox.py`). Consecutive draws
share one state, which advances by the sum of their advances:

    state = draw_philox(like, advance);  mask = keep_philox(state, x.shape, order, 1 - p, …)

PyTorch itself draws a mask (`keep_mask`), which is then kept, if it is small on a CPU, if it is fp64 or has a dynamic
size on a GPU, or if this PyTorch draws by another algorithm. Such a draw depends on no computed value; otherwise the
kernel that computes x could not apply the mask. A dropout with p = 0, or not in training, is the identity and draws
nothing; one with p = 1 multiplies by zero and draws nothing.
"""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import replace_results
from tilewright.graph.layouts import layout
from tilewright.hardware.architectures import DeviceLimits, limits_of
from tilewright.hardware.target import Target
from tilewright.kernels.device import DTYPES
from tilewright.kernels.dropout_add import generator
from tilewright.kernels.dropout_add.philox import draw_philox, keep_philox
from tilewright.measure.truth.contract import ulp
from tilewright.passes.random.draws import SHAPE, draw_stream, generator_is_known, keep
from tilewright.passes.simplify import is_pure

FEWEST = 32768
"""PyTorch draws smaller masks: saving a stream's 20 kB instead of the mask would hardly pay."""


@fx.has_side_effect
def keep_mask(like: torch.Tensor, p: float) -> torch.Tensor:
    """The boolean mask that eager dropout with probability `p` would draw now for a tensor like `like`."""
    if like.device.type == "cpu":
        return torch.empty_like(like, dtype=torch.bool).bernoulli_(1 - p)
    # PyTorch numbers the elements of a tensor with gaps in another order.
    alike = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    mask: torch.Tensor = torch.ops.aten.native_dropout(alike, p, True)[1]
    return mask


def _laid_out_alike(x: fx.Node) -> fx.Node:
    """The earliest tensor from which pointwise operators compute `x` and that has its layout and dtype."""
    while calls.class_of(x) == "pointwise":
        alike = next((operand for operand in x.all_input_nodes if layout(operand) == layout(x)), None)
        if alike is None:
            break
        x = alike
    return x


def _by_stream(node: fx.Node, x: fx.Node, p: float) -> fx.Node | None:
    """The mask of dropout `node` from a stream of the CPU's generator; None if PyTorch must draw it."""
    mask = node.meta["val"][1]
    if prod(calls.shape_of(mask)) < FEWEST or not generator_is_known():
        return None
    graph = node.graph
    size = [_extent(graph, x, dim) for dim in range(mask.dim())]
    order = _memory_order(mask)
    stream = graph.call_function(draw_stream, (size,))
    stream.meta = {**node.meta, "val": mask.new_empty(SHAPE, dtype=torch.int32)}
    return graph.call_function(keep, (stream, size, order, 1 - p))


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """Dimensions, the outermost in memory first."""
    strides = calls.strides_of(tensor)
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


class _PhiloxDraws:
    """The draws of a GPU's generator in one graph, in order."""

    def __init__(self, device: torch.device, limits: DeviceLimits) -> None:
        self._device = device
        self._most_blocks = generator.most_blocks(limits)
        self._state: fx.Node | None = None

    def interrupt(self) -> None:
        """Note that another draw follows, so that the next dropout begins a new state."""
        self._state = None

    def mask(self, node: fx.Node, x: fx.Node, p: float) -> fx.Node | None:
        """The mask of dropout `node`; None if PyTorch must draw it."""
        mask, value = node.meta["val"][1], x.meta["val"]
        if value.device != self._device or value.dtype not in DTYPES:
            return None
        if any(not isinstance(n, int) for n in mask.shape) or not mask.numel():
            return None
        # PyTorch's kernel numbers the elements of a tensor with gaps one by one, in its own order.
        is_dense = value.permute(_memory_order(value)).is_contiguous()
        alignment = generator.VECTOR_BYTES if is_dense else value.element_size()
        geometry = generator.geometry(mask.numel(), value.element_size(), alignment, self._most_blocks)
        order = _memory_order(value) if is_dense and geometry.vector > 1 else list(range(mask.dim()))
        if self._state is None:
            self._state = node.graph.call_function(draw_philox, (self._on_device_of(node), 0))
            self._state.meta = {**node.meta, "val": mask.new_empty(2, dtype=torch.int64)}
        like, skip = self._state.args
        assert isinstance(skip, int)
        self._state.args = (like, skip + geometry.advance)
        numbering = geometry.vector, geometry.threads, skip
        return node.graph.call_function(keep_philox, (self._state, list(mask.shape), order, 1 - p, *numbering))

    @staticmethod
    def _on_device_of(dropout: fx.Node) -> fx.Node:
        """An input of the graph on the dropout's device; if there is none, the dropout's operand."""
        device = dropout.meta["val"][1].device
        given: list[fx.Node] = [node for node in dropout.graph.nodes if node.op == "placeholder"]
        for node in given:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.device == device:
                return node
        return dropout.all_input_nodes[0]


def _extent(graph: fx.Graph, x: fx.Node, dim: int) -> int | fx.Node:
    """The size of a dimension: a number, or a new `sym_size` node."""
    extent: int | torch.SymInt = x.meta["val"].shape[dim]
    if isinstance(extent, int):
        return extent
    asked = graph.call_function(torch.ops.aten.sym_size.int, (x, dim))
    asked.meta["val"] = extent
    return asked


def _drawn_in_the_kernel(
    node: fx.Node, x: fx.Node, p: float, target: Target, philox: _PhiloxDraws | None
) -> fx.Node | None:
    """The mask of dropout `node` from a saved state of the generator; None if PyTorch must draw it."""
    if philox is not None:
        return philox.mask(node, x, p)
    on_cpu = node.meta["val"][1].device.type == "cpu" and target.language == "c++"
    return _by_stream(node, x, p) if on_cpu else None


def _philox_draws(graph: fx.Graph, target: Target) -> _PhiloxDraws | None:
    """The draws of the graph's GPU; None on a CPU, or for a GPU of unknown limits."""
    if not target.is_gpu:
        return None
    tensors = (node.meta.get("val") for node in graph.nodes)
    kind = "cpu" if target.is_planned_gpu else "cuda"
    device = next((x.device for x in tensors if isinstance(x, torch.Tensor) and x.device.type == kind), None)
    if device is None:
        return None
    limits = target.profile.limits if target.is_planned_gpu else limits_of(device)
    return None if limits is None else _PhiloxDraws(device, limits)


def _scale(kept: torch.Tensor, p: float) -> float:
    """The factor by which eager multiplies kept elements: on a CPU it is rounded to the dtype of the result."""
    scale = 1 / (1 - p)
    step = ulp(scale, kept.dtype) if kept.device.type == "cpu" else 0.0
    return round(scale / step) * step if step else scale


def _nothing_kept(node: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Result and mask of dropout `node` with p = 1, which eager computes by multiplying with zero."""
    aten, (value, mask_meta) = torch.ops.aten, node.meta["val"]
    with node.graph.inserting_before(node):
        zero = node.graph.call_function(aten.mul.Tensor, (x, 0))
        mask = node.graph.call_function(aten.full_like.default, (x, False), {"dtype": torch.bool})
    zero.meta, mask.meta = {**node.meta, "val": value}, {**node.meta, "val": mask_meta}
    return zero, mask


def split_dropout(graph: fx.Graph, target: Target) -> None:
    """Rewrite every `native_dropout` of `graph`, which is planned for `target`, in place."""
    philox = _philox_draws(graph, target)
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.native_dropout.default:
            # An impure call may draw from the generator.
            if philox is not None and node.op == "call_function" and not is_pure(node):
                philox.interrupt()
            continue
        x, p, train = node.args[0], float(node.args[1]), node.args[2]
        assert isinstance(x, fx.Node)
        if train is False or p == 0.0:
            continue
        value, mask_meta = node.meta["val"]
        if p == 1.0:
            replace_results(node, _nothing_kept(node, x))
            continue
        with graph.inserting_before(node):
            mask = _drawn_in_the_kernel(node, x, p, target, philox)
            if mask is None:
                mask = graph.call_function(keep_mask, (_laid_out_alike(x), p))
                if philox is not None:
                    philox.interrupt()
            mask.meta = {**node.meta, "val": mask_meta}
            kept = graph.call_function(torch.ops.aten.native_dropout_backward.default, (x, mask, _scale(value, p)))
            kept.meta = {**node.meta, "val": value}
        replace_results(node, (kept, mask))
