"""Lets the loss of all positions but the last read the uncopied logits of all positions and ignore the last.

    x = view(clone(slice(y, 1, 0, -1)))     [B·(T-1), V]   →   x = view(y)                       [B·T, V]
    loss, s, w = cross_entropy(x, t)        s [2, B·(T-1)]     loss, s, w = cross_entropy(x, pad(t, ignored))
    dx = cross_entropy_backward(x, t, s, w)                    dx = cross_entropy_backward(x, pad(t, ignored), z, w)
    dy = slice_backward(view(dx), 1, 0, -1) [B, T, V]      →   dy = view(dx)

z is s with zeros for the last positions. The gradient of an ignored row is log Σ exp(x - maximum) minus itself, NaN if
the row's logits are not finite; the zeros in z make it 0 for the last positions.

A causal language model predicts the next token, so the last position has no target. A copy of 4 × 1023 rows of 32,000
logits took 124 µs on an H200 and as much memory as the logits; that of their gradient 125 µs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tilewright.graph import calls
from tilewright.graph.insert import insert_call, insert_formula, replace
from tilewright.graph.layouts import before_widening, widened
from tilewright.graph.specialise import has_symbols

aten: Any = torch.ops.aten
FEW = 16
"""At most one in this many rows is computed in vain."""
MOVES = ("view", "_unsafe_view", "clone")


@dataclass(frozen=True)
class Shift:
    """The rows of a loss are the first positions of these logits."""

    logits: Node
    """[…, T, …, V], contiguous."""
    dim: int
    """The axis of the positions."""
    read: int
    """How many positions are read."""
    replaced: tuple[Node, ...]
    """The moves and casts between the logits and the loss's rows, and between the gradients of both."""
    gradient: Node | None
    """The `slice_backward`, in training."""

    def rows(self, before: Node) -> Node:
        """The logits of all positions, [B·T, V]."""
        rows = insert_call(before, aten.view.default, self.logits, [-1, self.logits.meta["val"].shape[-1]])
        return before_widening(rows)

    def targets(self, before: Node, targets: Node, ignored: int) -> Node:
        """The targets of all positions [B·T]; those that are left out are ignored."""

        def padded(targets: Tensor) -> Tensor:
            shape = list(self.logits.meta["val"].shape[:-1])
            shape[self.dim] = self.read
            return self._padded(targets.view(shape), ignored).view(-1)

        found: Node = insert_formula(before, padded, targets)
        return found

    def statistics(self, before: Node, statistics: Node) -> Node:
        """The statistics of all positions, [2, B·T], with zeros for positions that are left out."""

        def with_zeros(all_rows: Tensor) -> Tensor:
            positions = all_rows.view(2, *self.logits.meta["val"].shape[:-1])
            return self._padded(positions.narrow(1 + self.dim, 0, self.read), 0).view(2, -1)

        found: Node = insert_formula(before, with_zeros, statistics)
        return found

    def _padded(self, positions: Tensor, value: int) -> Tensor:
        shape = self.logits.meta["val"].shape
        behind = [0, 0] * (len(shape) - 2 - self.dim)
        found: Tensor = aten.constant_pad_nd(positions, [*behind, 0, shape[self.dim] - self.read], value)
        return found

    def replace_gradient(self, gradient: Node) -> None:
        """Replace the `slice_backward` by the gradient of all rows, [B·T, V]."""
        old = self.gradient
        assert old is not None
        new = insert_call(old, aten.view.default, gradient, list(self.logits.meta["val"].shape))
        if (dtype := old.meta["val"].dtype) != new.meta["val"].dtype:
            new = insert_call(old, aten._to_copy.default, new, dtype=dtype)
        replace(old, new)


def shift_of(rows: Node, gradient: Node | None) -> Shift | None:
    """The shift, if `rows`, the logits of a loss [N, V], are the first positions of other logits; else None.

    `gradient` is the gradient of `rows`."""
    moves = [rows]
    while (node := moves[-1]).target is not aten.slice.Tensor:
        if calls.operator_name(node.target) not in MOVES and widened(node) is None:
            return None
        moves.append(node.all_input_nodes[0])
    given: Any = calls.arguments(node)
    logits, part = given["self"].meta["val"], node.meta["val"]
    if has_symbols(logits) or not logits.is_contiguous() or logits.shape[-1] != rows.meta["val"].shape[1]:
        return None
    dim = given["dim"] % logits.dim()
    left_out = logits.shape[dim] - part.shape[dim]
    if given.get("start") not in (None, 0) or given.get("step", 1) != 1 or not 0 < left_out * FEW <= logits.shape[dim]:
        return None
    back = [] if gradient is None else _to_slice_backward(gradient, list(logits.shape), given["dim"])
    if dim == logits.dim() - 1 or back is None:
        return None
    return Shift(given["self"], dim, part.shape[dim], (*moves, *back), back[-1] if back else None)


def _to_slice_backward(gradient: Node, sizes: list[int], dim: int) -> list[Node] | None:
    """The chain of moves and casts from the gradient of the rows to the `slice_backward`; None if there is no such."""
    found = []
    while gradient.target is not aten.slice_backward.default:
        if len(gradient.users) != 1:
            return None
        gradient = next(iter(gradient.users))
        found.append(gradient)
        if calls.operator_name(gradient.target) not in (*MOVES, "_to_copy", "slice_backward"):
            return None
    given: Any = calls.arguments(gradient)
    alike = list(given["input_sizes"]) == sizes and given["dim"] == dim and given["start"] == 0
    return found if alike else None
