"""Upsampling by nearest neighbours by whole factors: its gradient is a sum over windows.

    y = interpolate(x, scale_factor=2)       →   the same, with dx = dy[…, ::2, ::2] + dy[…, ::2, 1::2] + …

PyTorch decomposes it into a gather, and the gradient into a scatter that adds with atomics.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tilewright.operators.upsampling import MOST_REPEATS
from tilewright.passes.attention.spelling import argument, example, spelled


def sum_windows(module: fx.GraphModule) -> None:
    """Rewrite `module`, a torch-level graph from Dynamo, in place."""
    for node in module.graph.nodes:
        if spelled(node) == "interpolate" and argument(node, 3, "mode", "nearest") == "nearest":
            factors = _factors(argument(node, 0, "input"), node)
            if factors is not None:
                node.target, node.args, node.kwargs = upsampled, (argument(node, 0, "input"), *factors), {}
    module.recompile()


def _factors(source: Any, node: fx.Node) -> tuple[int, int] | None:
    """How often rows and columns are repeated; None where it has no gradient, or they are not whole or many."""
    x, y = example(source), example(node)
    if x is None or y is None or x.dim() != 4 or not x.requires_grad:
        return None
    sizes = (*x.shape[2:], *y.shape[2:])
    if not all(isinstance(size, int) and size for size in sizes):
        return None
    height, width, rows, columns = sizes
    if rows % height or columns % width or (rows // height) * (columns // width) > MOST_REPEATS:
        return None
    factors = rows // height, columns // width
    scale = argument(node, 2, "scale_factor")
    given = scale if isinstance(scale, (list, tuple)) else (scale, scale)
    return factors if all(one is None or one == factor for one, factor in zip(given, factors, strict=True)) else None


class _Upsampled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, columns: int) -> Tensor:
        ctx.factors = rows, columns
        return F.interpolate(x, size=[x.shape[2] * rows, x.shape[3] * columns], mode="nearest")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (g,), (rows, columns) = gradients, ctx.factors
        first, *others = (g[:, :, i::rows, j::columns] for i, j in product(range(rows), range(columns)))
        total = first.clone() if not others else first
        for part in others:
            total = total + part
        return total, None, None


def upsampled(x: Tensor, rows: int, columns: int) -> Tensor:
    """`interpolate` of [N, C, H, W] to [N, C, H · rows, W · columns]."""
    result: Tensor = _Upsampled.apply(x, rows, columns)  # type: ignore[no-untyped-call]
    return result
