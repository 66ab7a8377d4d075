"""Dropout: the draw is set apart from its application, so that the application can fuse.

    y, mask = native_dropout(x, p, True)     →   mask = keep_mask(x, p)
                                                 y = x · mask / (1 - p)

On a CPU the mask is drawn by PyTorch's own generator, the same numbers in the same order as
eager's elementwise dropout. The draw waits for no computed value, or x's kernel could not be the
one that applies the mask. On a GPU PyTorch's kernel draws it. A dropout with p = 0, or
not in training, is the identity and draws nothing.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from tilewright.operators.table import row_of


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
            mask = graph.call_function(keep_mask, (_laid_out_alike(x), p))
            mask.meta = {**node.meta, "val": mask_meta}
            kept = graph.call_function(torch.ops.aten.native_dropout_backward.default, (x, mask, 1 / (1 - p)))
            kept.meta = {**node.meta, "val": value}
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(kept if user.args[1] == 0 else mask)
            graph.erase_node(user)
        graph.erase_node(node)
