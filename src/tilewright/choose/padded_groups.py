"""Pads the groups of channels-last convolutions of 16-bit floats to 16, 32 or 64 channels, in and out, on NVIDIA GPUs.

    y = conv(x, w, groups=5)      [N, 120, …]    →    y = unpad(conv(pad(x), pad(w), groups=5))      [N, 160, …]

cuDNN has kernels for channels-last groups of 8, 16, 32 and 64 channels, and converts the operands of other groups: 64
images of 28 × 28 in bf16, forward and both gradients, take 631 µs in 5 groups of 24 channels, and 173 of 32 (H200).
Neighbouring kernels write and read the padded tensors, if nothing else needs the unpadded ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.choose.chooser import chosen
from tilewright.graph import calls
from tilewright.graph.insert import contiguous, insert_call, insert_formula, replace, replace_results
from tilewright.graph.layouts import FORMATS, lies_channels_last
from tilewright.graph.specialise import has_symbols
from tilewright.hardware.target import Target
from tilewright.kernels.device import NARROW
from tilewright.kernels.offer import Offer

aten: Any = torch.ops.aten
FORWARD, BACKWARD = aten.convolution.default, aten.convolution_backward.default
WIDTHS = (8, 16, 32, 64)
"""Channels of the groups that cuDNN has kernels for."""
LEAST_BYTES = 2**20
"""Bytes of the input; smaller convolutions take hardly longer than a launch."""


def offers(graph: fx.Graph, target: Target) -> Iterator[Sequence[Offer]]:
    """An offer for each convolution of a joint or inference graph of ATen operators whose groups are converted."""
    if not target.runs_cuda:
        return
    padder, profile = _Padder(), target.profile
    unraced = None if profile.is_timed else f"they were timed on compute capability {profile.timed_on} alone"
    for node in list(graph.nodes):
        if node.target in (FORWARD, BACKWARD) and (found := _groups(node)) is not None:
            write = padder.forward if node.target is FORWARD else padder.backward
            what = f"channels-last groups of {min(found.made, found.read)} channels, which cuDNN converts"
            kernel = f"groups padded to {found.width} channels"
            yield [Offer(kernel, what, node, partial(write, node, found), unraced=unraced)]


@dataclass(frozen=True)
class _Groups:
    count: int
    read: int
    """Input channels of each."""
    made: int

    @property
    def width(self) -> int | None:
        """Channels to which both sides are padded; None if neither needs it or one would grow by more than its half."""
        both = {
            next((width for width in WIDTHS[1:] if WIDTHS[0] < size <= width), None) for size in (self.read, self.made)
        }
        (width,) = both if len(both) == 1 else (None,)
        return None if self.read == self.made == width else width


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
    laid = x.dim() in FORMATS and all(lies_channels_last(t) for t in tensors if t is not None)
    return found if found.width and laid and x.numel() * x.itemsize >= LEAST_BYTES else None


class _Padder:
    def __init__(self) -> None:
        self.padded: dict[tuple[fx.Node, int], fx.Node] = {}
        """Padded images and weights, by tensor and number of groups; forward and backward share them."""

    def forward(self, node: fx.Node, groups: _Groups) -> fx.Node:
        args: tuple[Any, ...] = node.args
        x, weight, bias, *rest = args
        operands = self._image(x, groups.read, groups), self._weight(weight, groups)
        given = bias if bias is None else insert_formula(node, _pad_vector, bias, groups.count, groups.width)
        made = insert_call(node, FORWARD, *operands, given, *rest)
        replace(node, _laid_like(node, insert_formula(node, _unpad_image, made, groups.count, groups.made)))
        return made

    def backward(self, node: fx.Node, groups: _Groups) -> fx.Node:
        args: tuple[Any, ...] = node.args
        g, x, weight, sizes, *rest = args
        gradient, image = self._image(g, groups.made, groups), self._image(x, groups.read, groups)
        padded = sizes if sizes is None else [groups.count * (groups.width or 0)]
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
            results[place] = _laid_like(user, result)
        replace_results(node, results)
        return made

    def _image(self, x: fx.Node, width: int, groups: _Groups) -> fx.Node:
        return self._shared(_pad_image, x, groups) if width != groups.width else x

    def _weight(self, weight: fx.Node, groups: _Groups) -> fx.Node:
        return self._shared(_pad_weight, weight, groups)

    def _shared(self, formula: Callable[[Tensor, int, int], Tensor], x: fx.Node, groups: _Groups) -> fx.Node:
        key = (x, groups.count)
        if key not in self.padded:
            self.padded[key] = insert_formula(_after_inputs(x), formula, x, groups.count, groups.width)
        return self.padded[key]


def _laid_like(node: fx.Node, result: fx.Node) -> fx.Node:
    """`result` in the layout of `node`: PyTorch computes some convolutions on a CPU contiguous from any operands."""
    if lies_channels_last(calls.tensor(node)) or not calls.tensor(node).is_contiguous():
        return result
    return contiguous(result.next, result)


def _after_inputs(node: fx.Node) -> fx.Node:
    """The first node after `node` that is no input of the graph."""
    after = node.next
    while after.op == "placeholder":
        after = after.next
    return after


def _pad_image(x: Tensor, count: int, wide: int) -> Tensor:
    """[N, count · width, …] → [N, count · wide, …], channels-last."""
    parts = x.movedim(1, -1).unflatten(-1, (count, -1))
    result: Tensor = aten.constant_pad_nd(parts, [0, wide - parts.shape[-1]]).flatten(-2).movedim(-1, 1)
    return result


def _unpad_image(x: Tensor, count: int, width: int) -> Tensor:
    parts = x.movedim(1, -1).unflatten(-1, (count, -1))
    result: Tensor = parts[..., :width].reshape(*parts.shape[:-2], -1).movedim(-1, 1)
    return result


def _pad_weight(weight: Tensor, count: int, wide: int) -> Tensor:
    """[count · made, read, …] → [count · wide, wide, …], channels-last."""
    parts = weight.movedim(1, -1).unflatten(0, (count, -1))
    more = [0, wide - parts.shape[-1], *[0, 0] * (weight.dim() - 2), 0, wide - parts.shape[1]]
    result: Tensor = aten.constant_pad_nd(parts, more).flatten(0, 1).movedim(-1, 1)
    return result


def _unpad_weight(weight: Tensor, count: int, made: int, read: int) -> Tensor:
    parts = weight.movedim(1, -1).unflatten(0, (count, -1))
    kept: Tensor = parts[:, :made, ..., :read].reshape(count * made, *parts.shape[2:-1], read)
    result: Tensor = kept.contiguous().movedim(-1, 1)
    return result


def _pad_vector(x: Tensor, count: int, wide: int) -> Tensor:
    """[count · made] → [count · wide]."""
    parts = x.view(count, -1)
    result: Tensor = aten.constant_pad_nd(parts, [0, wide - parts.shape[1]]).view(-1)
    return result


def _unpad_vector(x: Tensor, count: int, made: int) -> Tensor:
    result: Tensor = x.view(count, -1)[:, :made].reshape(-1)
    return result


pad_groups = chosen("pad_groups", offers)
