"""Positions of maxima that backward alone reads are kept within their windows, in 16 bits in place of 64.

    y, i = max_pool2d_with_indices(x, …)     →   y, i = …; k = (i - begin of the window).to(int16)
    dx = …_backward(dy, x, …, i)                 dx = …_backward(dy, x, …, k + begin of the window)

On a GPU, where both are generated kernels: the pooling of a ResNet-50 of 64 images keeps 26 MB in place of 103.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph.cut import IN_FORWARD
from tilewright.graph.insert import insert_formula
from tilewright.hardware.target import Target

aten = torch.ops.aten
POOL, BACKWARD = aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default
Pair = tuple[int, int]
LARGEST = 2**15 - 1
MOST_PLACES = 9
"""Of a window. On an H200 windows of 5 by 5 places, 3 apart, in NCHW, gave 10 of 2,340 gradients that are not eager's;
with positions in 64 bits all are. The interpreter gives eager's either way: why is not known."""


def keep_positions_in_windows(graph: fx.Graph, target: Target) -> None:
    """Rewrite a joint graph of ATen operators, in place."""
    if not target.is_gpu:
        return
    for node in list(graph.nodes):
        if node.target is operator.getitem and node.args[1] == 1 and node.args[0].target is POOL:
            readers = list(node.users)
            if readers and all(user.target is BACKWARD for user in readers) and _fits(readers[0]):
                _keep(node, readers)


def _fits(backward: fx.Node) -> bool:
    """Whether the pooling is one that becomes kernels, with windows that 16 bits reach across."""
    x, (height, width), (rows, columns) = _value(backward.args[1]), _pair(backward, 2), _pair(backward, 5)
    reach = (height - 1) * rows * x.shape[-1] + (width - 1) * columns
    return all(isinstance(size, int) for size in x.shape) and height * width <= MOST_PLACES and reach <= LARGEST


def _keep(positions: fx.Node, readers: list[fx.Node]) -> None:
    pool = readers[0]
    strides, pads = _pair(pool, 3) if pool.args[3] else _pair(pool, 2), _pair(pool, 4)
    windows = (strides, pads, _value(pool.args[1]).shape[-1])
    kept = insert_formula(positions.next, _within, positions, *windows)
    kept.meta[IN_FORWARD] = True
    for reader in readers:
        reader.replace_input_with(positions, insert_formula(reader, _whole, kept, *windows))


def _within(positions: Tensor, strides: Pair, pads: Pair, width: int) -> Tensor:
    return (positions - _begins(positions, strides, pads, width)).to(torch.int16)


def _whole(kept: Tensor, strides: Pair, pads: Pair, width: int) -> Tensor:
    return kept.to(torch.int64) + _begins(kept, strides, pads, width)


def _begins(positions: Tensor, strides: Pair, pads: Pair, width: int) -> Tensor:
    """Of each window the position at which it begins, padding included: [OH, OW]."""
    rows, columns = (
        torch.arange(size, device=positions.device) * (stride * scale) - pad * scale
        for size, stride, pad, scale in zip(positions.shape[-2:], strides, pads, (width, 1), strict=True)
    )
    return rows.unsqueeze(1) + columns


def _pair(pool: fx.Node, place: int) -> Pair:
    given: Any = pool.args[place]
    return (given, given) if isinstance(given, int) else (given[0], given[-1])


def _value(node: Any) -> Any:
    return node.meta["val"]
