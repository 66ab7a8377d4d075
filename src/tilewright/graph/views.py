"""Views that no operator has to compute: the elements of a tensor from its first one on, under other strides."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import fx

from tilewright.operators.table import row_of


def lies_as_told(meta: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor that lies in memory as its strides say."""
    return (
        isinstance(meta, torch.Tensor)
        and meta.device.type in ("cpu", "cuda")
        and meta.layout is torch.strided
        and meta.numel() > 0
    )


def is_relabelled(node: fx.Node) -> bool:
    """Whether this is a view of all elements of its operand, from the first one on."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row is not None and row.is_relabelled


def base_of(node: fx.Node) -> fx.Node:
    """The tensor whose elements `node` shows under other strides, all views passed over; else `node` itself."""
    while is_relabelled(node):
        operand = node.args[0]
        if not isinstance(operand, fx.Node) or not _same_storage(operand, node):
            break
        node = operand
    return node


def _same_storage(operand: fx.Node, view: fx.Node) -> bool:
    shown, seen = operand.meta.get("val"), view.meta.get("val")
    return lies_as_told(shown) and lies_as_told(seen) and shown.dtype == seen.dtype
