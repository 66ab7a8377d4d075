"""Dropout: the draw is set apart from its application, so that the application can fuse.

    y, mask = native_dropout(x, p, True)     →   mask = keep_mask(x, p)
                                                 y = x · mask / (1 - p)

The numbers are those that eager's elementwise dropout would draw, in the same order. On a CPU only the
generator's state before the draw is kept, and the kernel that applies the mask computes it
(`passes/draws.py`):

    stream = draw_stream(x.shape);  mask = keep(stream, x.shape, order, 1 - p)

A small mask, one on a GPU, and one by a PyTorch that draws otherwise is drawn by PyTorch itself
(`keep_mask`), and kept. Such a draw waits for no computed value, or x's kernel could not be the one
that applies the mask. A dropout with p = 0, or not in training, is the identity and draws nothing.
"""

from __future__ import annotations

import operator
from math import prod

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.hardware.language import language_of
from tilewright.measure.truth.contract import ulp
from tilewright.operators.table import row_of
from tilewright.passes.draws import SHAPE, draw_stream, generator_is_known, keep

FEWEST = 32768
"""Elements below which PyTorch draws the mask: a stream's 20 kB would hardly be less to keep."""


def keep_mask(like: torch.Tensor, p: float) -> torch.Tensor:
    """The boolean mask that eager dropout with probability `p` would draw now for a tensor like `like`."""
    if like.device.type == "cpu":
        return torch.empty_like(like, dtype=torch.bool).bernoulli_(1 - p)
    mask: torch.Tensor = torch.ops.aten.native_dropout(torch.empty_like(like), p, True)[1]
    return mask


def _laid_out_alike(x: fx.Node) -> fx.Node:
    """The earliest operand behind `x`, through pointwise operators, that has its layout and dtype."""
    while (row := row_of(x.target)) is not None and row.operator_class == "pointwise":
        alike = next((operand for operand in x.all_input_nodes if layout(operand) == layout(x)), None)
        if alike is None:
            break
        x = alike
    return x


def layout(node: fx.Node) -> object:
    """Dtype, sizes and strides; symbolic ones as expressions, since comparing symbols would bind them."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return node
    extents = (*value.shape, *value.stride())
    return value.dtype, value.device, *(n.node.expr if isinstance(n, torch.SymInt) else n for n in extents)


def _drawn_in_the_kernel(node: fx.Node, x: fx.Node, p: float) -> fx.Node | None:
    """The mask of dropout `node` from a stream; None where PyTorch must draw it."""
    mask = node.meta["val"][1]
    known = mask.device.type == "cpu" and language_of(mask.device) == "c++"
    if not known or prod(calls.shape_of(mask)) < FEWEST or not generator_is_known():
        return None
    graph = node.graph
    size = [_extent(graph, x, dim) for dim in range(mask.dim())]
    strides = calls.strides_of(mask)
    order = sorted(range(mask.dim()), key=lambda dim: -strides[dim])
    stream = graph.call_function(draw_stream, (size,))
    stream.meta = {**node.meta, "val": mask.new_empty(SHAPE, dtype=torch.int32)}
    return graph.call_function(keep, (stream, size, order, 1 - p))


def _extent(graph: fx.Graph, x: fx.Node, dim: int) -> int | fx.Node:
    """The size of a dimension: a number, or the node that asks for it in each call."""
    extent: int | torch.SymInt = x.meta["val"].shape[dim]
    if isinstance(extent, int):
        return extent
    asked = graph.call_function(torch.ops.aten.sym_size.int, (x, dim))
    asked.meta["val"] = extent
    return asked


def _scale(kept: torch.Tensor, p: float) -> float:
    """What eager multiplies by where it keeps: on a CPU a number that was rounded to the dtype of the result."""
    scale = 1 / (1 - p)
    step = ulp(scale, kept.dtype) if kept.device.type == "cpu" else 0.0
    return round(scale / step) * step if step else scale


def split_dropout(graph: fx.Graph) -> None:
    """Rewrite every `native_dropout` of `graph` in place."""
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.native_dropout.default:
            continue
        x, p, train = node.args[0], float(node.args[1]), node.args[2]
        assert isinstance(x, fx.Node)
        if train is False or p in (0.0, 1.0):
            continue
        value, mask_meta = node.meta["val"]
        with graph.inserting_before(node):
            mask = _drawn_in_the_kernel(node, x, p) or graph.call_function(keep_mask, (_laid_out_alike(x), p))
            mask.meta = {**node.meta, "val": mask_meta}
            kept = graph.call_function(torch.ops.aten.native_dropout_backward.default, (x, mask, _scale(value, p)))
            kept.meta = {**node.meta, "val": value}
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(kept if user.args[1] == 0 else mask)
            graph.erase_node(user)
        graph.erase_node(node)
