"""Dropout draws in the kernel that applies its mask, from a saved state of the generator.

    y, mask = native_dropout(x, p, True)     →   mask = keep_mask(x, p)
                                                 y = x · mask / (1 - p)

The numbers are those that eager's elementwise dropout would draw, in the same order. On a CPU only the generator's
state before the draw is kept, and the kernel that applies the mask computes it:

    stream = draw_stream(x.shape);  mask = keep(stream, x.shape, order, 1 - p)       (`kernels/dropout_add/stream.py`)

On a GPU seed and offset are kept, and the numbers are Philox's (`kernels/dropout_add/philox.py`). Consecutive draws
share one state, which advances by the sum of their advances:

    state = draw_philox(like, advance);  mask = keep_philox(state, x.shape, order, 1 - p, …)

PyTorch itself draws a mask (`keep_mask`), which is then kept, if it is small on a CPU, if it is fp64 or has a dynamic
size on a GPU, or if this PyTorch draws by another algorithm. With p = 0, or not in training, dropout is the identity;
with p = 1 it multiplies by zero. Neither draws.
"""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_known, replace_results
from tilewright.graph.layouts import layout, memory_order
from tilewright.hardware.architectures import DeviceLimits, limits_of
from tilewright.hardware.target import Target
from tilewright.kernels.device import DTYPES
from tilewright.kernels.dropout_add import generator
from tilewright.kernels.dropout_add.philox import draw_philox, keep_philox
from tilewright.kernels.dropout_add.stream import SHAPE, draw_stream, generator_is_known, keep, keep_mask
from tilewright.measure.truth.contract import ulp
from tilewright.passes.simplify import is_pure

aten = torch.ops.aten
FEWEST = 32768
"""PyTorch draws smaller masks: saving a stream's 20 kB instead of the mask would hardly pay."""


def _operand_laid_alike(x: fx.Node) -> fx.Node:
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
    size = [_extent(node, x, dim) for dim in range(mask.dim())]
    stream = insert_known(node, draw_stream, mask.new_empty(SHAPE, dtype=torch.int32), size)
    return insert_known(node, keep, mask, stream, size, memory_order(calls.strides_of(mask)), 1 - p)


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
        in_memory = memory_order(calls.strides_of(value))
        is_dense = value.permute(in_memory).is_contiguous()
        alignment = generator.VECTOR_BYTES if is_dense else value.element_size()
        geometry = generator.geometry(mask.numel(), value.element_size(), alignment, self._most_blocks)
        order = in_memory if is_dense and geometry.vector > 1 else list(range(mask.dim()))
        if self._state is None:
            state = mask.new_empty(2, dtype=torch.int64)
            self._state = insert_known(node, draw_philox, state, self._on_device_of(node), 0)
        like, skip = self._state.args
        assert isinstance(skip, int)
        self._state.args = (like, skip + geometry.advance)
        numbering = geometry.vector, geometry.threads, skip
        return insert_known(node, keep_philox, mask, self._state, list(mask.shape), order, 1 - p, *numbering)

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


def _extent(before: fx.Node, x: fx.Node, dim: int) -> int | fx.Node:
    """The size of a dimension: a number, or a new `sym_size` node."""
    extent: int | torch.SymInt = x.meta["val"].shape[dim]
    return extent if isinstance(extent, int) else insert_known(before, aten.sym_size.int, extent, x, dim)


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


def split_dropout(graph: fx.Graph, target: Target) -> None:
    """Rewrite every `native_dropout` of `graph`, which is planned for `target`, in place."""
    philox = _philox_draws(graph, target)
    for node in list(graph.nodes):
        if node.target is not aten.native_dropout.default:
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
            # As eager, which multiplies with zero.
            none = insert_known(node, aten.full_like.default, mask_meta, x, False, dtype=torch.bool)
            replace_results(node, (insert_known(none, aten.mul.Tensor, value, x, 0), none))
            continue
        has_stream = mask_meta.device.type == "cpu" and target.language == "c++"
        mask = philox.mask(node, x, p) if philox else _by_stream(node, x, p) if has_stream else None
        if mask is None:
            mask = insert_known(node, keep_mask, mask_meta, _operand_laid_alike(x), p)
            if philox is not None:
                philox.interrupt()
        kept = insert_known(node, aten.native_dropout_backward.default, value, x, mask, _scale(value, p))
        replace_results(node, (kept, mask))
