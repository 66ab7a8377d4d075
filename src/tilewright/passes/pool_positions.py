"""Positions of maxima that backward alone reads are kept within their windows, in 16 bits in place of 64.

    y, i = max_pool2d_with_indices(x, …)     →   y, i = …; k = (i - begin of the window).to(int16)
    dx = …_backward(dy, x, …, i)                 dx = …_backward(dy, x, …, k + begin of the window)

On a GPU, where both are generated kernels: the pooling of a ResNet-50 of 64 images keeps 26 MB in place of 103.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tilewright.graph.cut import IN_FORWARD
from tilewright.graph.insert import insert_call, insert_known
from tilewright.hardware.target import Target

aten = torch.ops.aten
POOL, BACKWARD = aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default
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
    first = readers[0]
    width = _value(first.args[1]).shape[-1]
    after: Any = positions.next
    kept = insert_call(after, aten.sub.Tensor, positions, _begins(after, positions, first, width))
    kept = insert_call(after, aten._to_copy.default, kept, dtype=torch.int16)
    kept.meta[IN_FORWARD] = True
    for reader in readers:
        wide = insert_call(reader, aten._to_copy.default, kept, dtype=torch.int64)
        found = insert_call(reader, aten.add.Tensor, wide, _begins(reader, positions, reader, width))
        reader.replace_input_with(positions, found)


def _begins(before: fx.Node, positions: fx.Node, pool: fx.Node, width: int) -> fx.Node:
    """Of each window the position at which it begins, padding included: [OH, OW]."""
    value = _value(positions)
    strides, pads = _pair(pool, 3) if pool.args[3] else _pair(pool, 2), _pair(pool, 4)
    found = []
    for size, stride, pad, scale in zip(value.shape[-2:], strides, pads, (width, 1), strict=True):
        with value.fake_mode:
            numbers = torch.arange(size, device=value.device)
        places = insert_known(before, aten.arange.default, numbers, size, device=value.device, pin_memory=False)
        scaled = insert_call(before, aten.mul.Tensor, places, stride * scale)
        found.append(insert_call(before, aten.sub.Tensor, scaled, pad * scale))
    return insert_call(before, aten.add.Tensor, insert_call(before, aten.unsqueeze.default, found[0], 1), found[1])


def _pair(pool: fx.Node, place: int) -> tuple[int, int]:
    given: Any = pool.args[place]
    return (given, given) if isinstance(given, int) else (given[0], given[-1])


def _value(node: Any) -> Any:
    return node.meta["val"]
