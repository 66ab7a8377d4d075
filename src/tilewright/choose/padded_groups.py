"""Pads the groups of channels-last convolutions of 16-bit floats to 16, 32 or 64 channels, in and out, on NVIDIA GPUs.

    y = conv(x, w, groups=5)      [N, 120, …]    →    y = unpad(conv(pad(x), pad(w), groups=5))      [N, 160, …]

cuDNN has kernels for channels-last groups of 8, 16, 32 and 64 channels, and converts the operands of other groups: 64
images of 28 × 28 in bf16, forward and both gradients, take 631 µs in 5 groups of 24 channels, and 173 of 32 (H200).
Neighbouring kernels write and read the padded tensors, if nothing else needs the unpadded ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.choose.chooser import chosen
from tilewright.graph import calls
from tilewright.graph.insert import contiguous, insert_formula, replace, replace_results
from tilewright.graph.layouts import FORMATS, lies_channels_last
from tilewright.graph.specialise import has_symbols
from tilewright.hardware.target import Target
from tilewright.kernels.device import NARROW
from tilewright.kernels.offer import Offer
from tilewright.passes.simplify import simplify

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
    profile, size = target.profile, len(graph.nodes)
    unraced = None if profile.is_timed else f"they were timed on compute capability {profile.timed_on} alone"
    for node in list(graph.nodes):
        if node.target in (FORWARD, BACKWARD) and (found := _groups(node)) is not None:
            what = f"channels-last groups of {min(found.made, found.read)} channels, which cuDNN converts"
            kernel = f"groups padded to {found.width} channels"
            yield [Offer(kernel, what, node, partial(_write, node, found), unraced=unraced)]
    if len(graph.nodes) != size:
        # Forward and backward share the padded image and weight.
        simplify(graph, target)


@dataclass(frozen=True)
class _Groups:
    count: int
    read: int
    """Input channels of each."""
    made: int

    @property
    def width(self) -> int:
        """Channels to which both sides are padded; 0 if neither needs it or one would grow by more than its half."""
        sides = self.read, self.made
        first, second = (next((wide for wide in WIDTHS[1:] if WIDTHS[0] < size <= wide), 0) for size in sides)
        return 0 if first != second or sides == (first, first) else first


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


def _write(node: fx.Node, groups: _Groups) -> fx.Node:
    if node.target is FORWARD:
        new: fx.Node = _laid_like(node, insert_formula(node, partial(_forward, groups), *node.args))
        replace(node, new)
        return new
    results = insert_formula(node, partial(_backward, groups), *node.args)
    read = {user.args[1]: user for user in node.users if calls.output(user) is not None}
    laid = [_laid_like(read[place], x) if place in read else None for place, x in enumerate(results)]
    replace_results(node, laid)
    return next(x for x in laid if x is not None)


def _forward(groups: _Groups, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    count, wide = groups.count, groups.width
    padded = None if bias is None else _pad(bias.view(count, -1), wide).view(-1)
    made = FORWARD(_pad_image(x, count, wide), _pad_weight(weight, count, wide), padded, *rest)
    return _unpad_image(made, count, groups.made)


def _backward(
    groups: _Groups, g: Tensor, x: Tensor, weight: Tensor, sizes: list[int] | None, *rest: Any
) -> tuple[Tensor | None, ...]:
    count, wide = groups.count, groups.width
    operands = *(_pad_image(image, count, wide) for image in (g, x)), _pad_weight(weight, count, wide)
    dx, dw, db = BACKWARD(*operands, None if sizes is None else [count * wide], *rest)
    return (
        None if dx is None else _unpad_image(dx, count, groups.read),
        None if dw is None else _unpad_weight(dw, count, groups.made, groups.read),
        None if db is None else db.view(count, -1)[:, : groups.made].reshape(-1),
    )


def _laid_like(node: fx.Node, result: fx.Node) -> fx.Node:
    """`result` in the layout of `node`: PyTorch computes some convolutions on a CPU contiguous from any operands."""
    if lies_channels_last(calls.tensor(node)) or not calls.tensor(node).is_contiguous():
        return result
    return contiguous(result.next, result)


def _pad(parts: Tensor, wide: int, *more: int) -> Tensor:
    """[…, width] → […, wide]; `more` are the paddings of the axes before, the last first."""
    result: Tensor = aten.constant_pad_nd(parts, [0, wide - parts.shape[-1], *more])
    return result


def _pad_image(x: Tensor, count: int, wide: int) -> Tensor:
    """[N, count · width, …] → [N, count · wide, …], channels-last."""
    parts = x.movedim(1, -1).unflatten(-1, (count, -1))
    return x if parts.shape[-1] == wide else _pad(parts, wide).flatten(-2).movedim(-1, 1)


def _unpad_image(x: Tensor, count: int, width: int) -> Tensor:
    parts = x.movedim(1, -1).unflatten(-1, (count, -1))
    result: Tensor = parts[..., :width].reshape(*parts.shape[:-2], -1).movedim(-1, 1)
    return result


def _pad_weight(weight: Tensor, count: int, wide: int) -> Tensor:
    """[count · made, read, …] → [count · wide, wide, …], channels-last."""
    parts = weight.movedim(1, -1).unflatten(0, (count, -1))
    return _pad(parts, wide, *[0, 0] * (weight.dim() - 2), 0, wide - parts.shape[1]).flatten(0, 1).movedim(-1, 1)


def _unpad_weight(weight: Tensor, count: int, made: int, read: int) -> Tensor:
    parts = weight.movedim(1, -1).unflatten(0, (count, -1))
    kept: Tensor = parts[:, :made, ..., :read].reshape(count * made, *parts.shape[2:-1], read)
    result: Tensor = kept.contiguous().movedim(-1, 1)
    return result


pad_groups = chosen("pad_groups", offers)
