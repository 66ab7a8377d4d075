"""Groups of 17 to 31 channels, in and out, are padded to 32 in a channels-last convolution of 16-bit floats on Hopper.

    y = conv(x, w, groups=5)      [N, 120, …]    →    y = unpad(conv(pad(x), pad(w), groups=5))      [N, 160, …]

cuDNN has kernels for channels-last groups of 32 and none for 24, whose operands it converts: 64 images of 28 × 28
took 210 us with 5 groups of 24, and 55 with 8 groups of 32; the gradients 405 and 117 (H200, bf16). What is padded is
zero, in operands and results. The kernels before and after write and read the padded tensor, if nothing else needs it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_call, insert_formula, replace, replace_results
from tilewright.graph.source import source_line
from tilewright.graph.specialise import has_symbols
from tilewright.hardware.architectures import known
from tilewright.hardware.target import Target
from tilewright.kernels.device import NARROW
from tilewright.passes.convolution.memory_formats import FORMATS, lies_channels_last
from tilewright.passes.units import gradients
from tilewright.records.program import Decision

aten: Any = torch.ops.aten
FORWARD, BACKWARD = aten.convolution.default, aten.convolution_backward.default
LEAST, WIDTH = 17, 32
"""Channels of a group: fewer were not measured, and may have kernels of their own."""
LEAST_BYTES = 2**20
"""Of the input. Smaller convolutions take hardly longer than a launch."""


def pad_groups(graph: fx.Graph, target: Target) -> list[Decision]:
    """Rewrite `graph`, a joint or inference graph of ATen operators, in place; a decision for each convolution."""
    architecture = known(target.profile.capability or "")
    if architecture is None or not architecture.wgmma:
        return []
    padder, behind, decisions = _Padder(), gradients(graph), []
    for node in list(graph.nodes):
        if node.target in (FORWARD, BACKWARD) and (found := _groups(node)) is not None:
            reason = (
                f"cuDNN converts channels-last groups of {max(found.made, found.read)} channels, and not of {WIDTH}"
            )
            side: Any = "backward" if node in behind else "forward"
            producer, line = node.all_input_nodes[0].name, source_line(node)
            decision = Decision(side, producer, node.name, "taken", reason, source=line, passed_by="pad_groups")
            decisions.append(decision)
            padder.forward(node, found) if node.target is FORWARD else padder.backward(node, found)
    return decisions


@dataclass(frozen=True)
class _Groups:
    count: int
    read: int
    """Input channels of each."""
    made: int


def _groups(node: fx.Node) -> _Groups | None:
    """The groups of a convolution that is to be padded."""
    first = 0 if node.target is FORWARD else 1
    args: tuple[Any, ...] = node.args
    # A gradient has the sizes of the bias among its arguments, too.
    transposed, count = args[6 + first], args[8 + first]
    tensors = [calls.output(operand) for operand in node.all_input_nodes[: 2 + first]]
    if transposed or count == 1 or any(t is None or has_symbols(t) or t.dtype not in NARROW for t in tensors):
        return None
    x, weight = tensors[first : first + 2]
    assert x is not None and weight is not None
    found = _Groups(count, weight.shape[1], weight.shape[0] // count)
    narrow = all(LEAST <= width <= WIDTH for width in (found.read, found.made)) and found.read * found.made < WIDTH**2
    laid = x.dim() in FORMATS and all(lies_channels_last(t) for t in tensors if t is not None)
    return found if narrow and laid and x.numel() * x.itemsize >= LEAST_BYTES else None


class _Padder:
    def __init__(self) -> None:
        self.padded: dict[tuple[fx.Node, int], fx.Node] = {}
        """Images and weights by what is padded and the number of groups: forward and backward share them."""

    def forward(self, node: fx.Node, groups: _Groups) -> None:
        args: tuple[Any, ...] = node.args
        x, weight, bias, *rest = args
        operands = self._image(x, groups.count, groups.read), self._weight(weight, groups)
        given = bias if bias is None else insert_formula(node, _pad_vector, bias, groups.count)
        made = insert_call(node, FORWARD, *operands, given, *rest)
        replace(node, insert_formula(node, _unpad_image, made, groups.count, groups.made))

    def backward(self, node: fx.Node, groups: _Groups) -> None:
        args: tuple[Any, ...] = node.args
        g, x, weight, sizes, *rest = args
        gradient, image = self._image(g, groups.count, groups.made), self._image(x, groups.count, groups.read)
        padded = sizes if sizes is None else [groups.count * WIDTH]
        made = insert_call(node, BACKWARD, gradient, image, self._weight(weight, groups), padded, *rest)
        results: list[fx.Node | None] = [None] * 3
        for user in node.users:
            place: Any = user.args[1]
            if calls.output(user) is None:
                continue
            result = insert_call(node, operator.getitem, made, place)
            if place == 0:
                result = insert_formula(node, _unpad_image, result, groups.count, groups.read)
            elif place == 1:
                result = insert_formula(node, _unpad_weight, result, groups.count, groups.made, groups.read)
            else:
                result = insert_formula(node, _unpad_vector, result, groups.count, groups.made)
            results[place] = result
        replace_results(node, results)

    def _image(self, x: fx.Node, count: int, width: int) -> fx.Node:
        return self._shared(_pad_image, x, count) if width < WIDTH else x

    def _weight(self, weight: fx.Node, groups: _Groups) -> fx.Node:
        return self._shared(_pad_weight, weight, groups.count)

    def _shared(self, formula: Callable[[Tensor, int], Tensor], x: fx.Node, count: int) -> fx.Node:
        if (x, count) not in self.padded:
            self.padded[x, count] = insert_formula(_behind(x), formula, x, count)
        return self.padded[x, count]


def _behind(node: fx.Node) -> fx.Node:
    """The first node behind `node` that is no input of the graph."""
    after = node.next
    while after.op == "placeholder":
        after = after.next
    return after


def _pad_image(x: Tensor, count: int) -> Tensor:
    """[N, count · width, …] → [N, count · WIDTH, …], channels-last."""
    parts = x.movedim(1, -1).unflatten(-1, (count, -1))
    result: Tensor = aten.constant_pad_nd(parts, [0, WIDTH - parts.shape[-1]]).flatten(-2).movedim(-1, 1)
    return result


def _unpad_image(x: Tensor, count: int, width: int) -> Tensor:
    parts = x.movedim(1, -1).unflatten(-1, (count, WIDTH))
    result: Tensor = parts[..., :width].reshape(*parts.shape[:-2], -1).movedim(-1, 1)
    return result


def _pad_weight(weight: Tensor, count: int) -> Tensor:
    """[count · made, read, …] → [count · WIDTH, WIDTH, …], channels-last."""
    parts = weight.movedim(1, -1).unflatten(0, (count, -1))
    more = [0, WIDTH - parts.shape[-1], *[0, 0] * (weight.dim() - 2), 0, WIDTH - parts.shape[1]]
    result: Tensor = aten.constant_pad_nd(parts, more).flatten(0, 1).movedim(-1, 1)
    return result


def _unpad_weight(weight: Tensor, count: int, made: int, read: int) -> Tensor:
    parts = weight.movedim(1, -1).unflatten(0, (count, WIDTH))
    kept: Tensor = parts[:, :made, ..., :read].reshape(count * made, *parts.shape[2:-1], read)
    result: Tensor = kept.contiguous().movedim(-1, 1)
    return result


def _pad_vector(x: Tensor, count: int) -> Tensor:
    """[count · made] → [count · WIDTH]."""
    parts = x.view(count, -1)
    result: Tensor = aten.constant_pad_nd(parts, [0, WIDTH - parts.shape[1]]).view(-1)
    return result


def _unpad_vector(x: Tensor, count: int, made: int) -> Tensor:
    result: Tensor = x.view(count, WIDTH)[:, :made].reshape(-1)
    return result
