"""Views that no operator has to compute: the elements of a tensor from its first one on, under other strides."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import fx

aten = torch.ops.aten
_FROM_THE_START = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
}
"""Layout operators whose result begins where their operand does, and never is a copy."""


def lies_as_told(meta: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor that lies in memory as its strides say."""
    return (
        isinstance(meta, torch.Tensor)
        and meta.device.type in ("cpu", "cuda")
        and meta.layout is torch.strided
        and meta.numel() > 0
    )


def base_of(node: fx.Node) -> fx.Node:
    """The tensor whose elements `node` shows under other strides, all views passed over; else `node` itself."""
    while node.op == "call_function" and node.target in _FROM_THE_START:
        operand = node.args[0]
        if not isinstance(operand, fx.Node) or not _same_storage(operand, node):
            break
        node = operand
    return node


def _same_storage(operand: fx.Node, view: fx.Node) -> bool:
    shown, seen = operand.meta.get("val"), view.meta.get("val")
    return lies_as_told(shown) and lies_as_told(seen) and shown.dtype == seen.dtype
