"""Batch norms of channels-last tensors: sums over all rows in one kernel, what uses them in another.

    y, mean, rstd, … = batch_norm(x, w, b, …)      →   s = x.double(); Σ = sum(s); Σ² = sum(s · s)
                                                       mean = Σ / n; rstd = rsqrt(Σ² / n - mean² + eps)
                                                       y = (x - mean) · (rstd · w) + b

The channels of such a tensor lie side by side, and one nest would walk each of them with a stride: 83 ms for a norm
that takes 0.5. Cut in two, the sums are column sums over rows of channels, and the rest is pointwise, with a number
for each column. One pass over memory gives both moments: squares of numbers of at most 24 bits are exact in double,
so Σ² / n - mean² loses nothing that matters until mean² is 10⁸ times the variance. float64 has no wider type, and keeps
its one nest. The gradient's sums, Σ g and Σ g·(x - mean), are cut off in the same way.

After the cut into forward and backward; what a norm gives is computed from its moments before (`norm_results`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph.insert import insert_call
from tilewright.passes.fusion import STRIDED_BYTES
from tilewright.passes.simplify import drop_unread

aten = torch.ops.aten
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def split_norms(graph: fx.Graph) -> None:
    """Rewrite `graph`, a forward, backward or inference graph of ATen operators, in place."""
    for node in list(graph.nodes):
        kind, operand, training = NORMS.get(node.target, (None, 0, 0))
        if kind is not None and node.args[training] is True and is_by_columns(node.args[operand]):
            kind(node).replace()
    drop_unread(graph)


def is_by_columns(operand: Any) -> bool:
    """Whether channels lie side by side in a tensor of fewer than 64 bits an element that is not small."""
    x = operand.meta["val"]
    if not isinstance(x, Tensor) or x.dtype == torch.float64 or not all(isinstance(n, int) for n in x.shape):
        return False
    if x.dim() < 2 or x.shape[1] == 1 or x.numel() * x.itemsize < STRIDED_BYTES or x.numel() == x.shape[1]:
        return False
    return x.movedim(1, -1).is_contiguous()


def along(before: fx.Node, vector: fx.Node, value: Tensor) -> fx.Node:
    """[C] → [C, 1, …], which meets the second dimension of `value` [N, C, …]."""
    return insert_call(before, aten.view.default, vector, [value.shape[1], *[1] * (value.dim() - 2)])


def normalised(before: fx.Node, x: fx.Node, mean: fx.Node, rstd: fx.Node, weight: Any, bias: Any) -> fx.Node:
    """(x - mean) · (rstd · weight) + bias in the dtype of the moments; all but `x` [N, C, …] are [C], or None."""
    value: Tensor = x.meta["val"]
    scale = rstd if weight is None else insert_call(before, aten.mul.Tensor, rstd, weight)
    y = insert_call(before, aten.sub.Tensor, x, along(before, mean, value))
    y = insert_call(before, aten.mul.Tensor, y, along(before, scale, value))
    return y if bias is None else insert_call(before, aten.add.Tensor, y, along(before, bias, value))


class _Split:
    """The calls that replace one norm are inserted in front of it."""

    def __init__(self, node: fx.Node, x: fx.Node) -> None:
        self.node = node
        self.x = x
        self.value: Tensor = x.meta["val"]
        self.channels = self.value.shape[1]
        self.count = prod(self.value.shape) // self.channels

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return insert_call(self.node, target, *args, **kwargs)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if x.meta["val"].dtype == dtype else self.call(aten._to_copy.default, x, dtype=dtype)

    def sums(self, x: fx.Node) -> fx.Node:
        """One a channel, in the dtype of `x`."""
        return self.call(aten.sum.dim_IntList, x, [d for d in range(self.value.dim()) if d != 1])

    def along(self, vector: fx.Node) -> fx.Node:
        return along(self.node, vector, self.value)

    def give(self, results: Sequence[fx.Node | None]) -> None:
        """These in place of the norm's, in the dtypes with which they were captured."""
        for user in list(self.node.users):
            assert user.target is operator.getitem
            result = results[user.args[1]]  # type: ignore[index]
            if result is not None:
                user.replace_all_uses_with(self.cast(result, user.meta["val"].dtype))
            self.node.graph.erase_node(user)
        self.node.graph.erase_node(self.node)


class _Forward(_Split):
    def __init__(self, node: fx.Node) -> None:
        super().__init__(node, node.args[0])  # type: ignore[arg-type]
        self.weight, self.bias, self.running_mean, self.running_var = node.args[1:5]
        self.momentum, self.eps = node.args[6:]

    def replace(self) -> None:
        wide = self.cast(self.x, torch.float64)
        mean = self.call(aten.div.Tensor, self.sums(wide), self.count)
        squares = self.call(aten.div.Tensor, self.sums(self.call(aten.mul.Tensor, wide, wide)), self.count)
        spread = self.call(aten.sub.Tensor, squares, self.call(aten.mul.Tensor, mean, mean))
        var = self.call(aten.clamp_min.default, spread, 0)
        rstd = self.call(aten.rsqrt.default, self.call(aten.add.Tensor, var, self.eps))
        mean, rstd = self.cast(mean, torch.float32), self.cast(rstd, torch.float32)
        whole = self.call(aten.mul.Tensor, var, self.count / (self.count - 1))
        moved = self._moved(self.running_mean, mean), self._moved(self.running_var, whole)
        y = normalised(self.node, self.x, mean, rstd, self.weight, self.bias)
        self.give([y, mean, rstd, *moved])

    def _moved(self, running: Any, new: fx.Node) -> fx.Node:
        """A running moment after this batch."""
        old = self.call(aten.mul.Tensor, self.cast(running, torch.float32), 1 - self.momentum)  # type: ignore[operator]
        share = self.call(aten.mul.Tensor, self.cast(new, torch.float32), self.momentum)
        return self.call(aten.add.Tensor, old, share)


class _Backward(_Split):
    def __init__(self, node: fx.Node) -> None:
        super().__init__(node, node.args[1])  # type: ignore[arg-type]
        self.weight, self.mean, self.rstd = node.args[2], node.args[5], node.args[6]
        self.wanted: Any = node.args[9]

    def replace(self) -> None:
        gradient = self._gradient()
        mean, rstd = self.cast(self.mean, torch.float32), self.cast(self.rstd, torch.float32)  # type: ignore[arg-type]
        total = self.sums(self.cast(gradient, torch.float32))
        products = self.call(aten.mul.Tensor, gradient, self._centred(mean))
        slope = self.call(aten.mul.Tensor, self.sums(products), rstd)
        dx = self._towards_x(gradient, mean, rstd, slope, total) if self.wanted[0] else None
        self.give([dx, slope, total])

    def _gradient(self) -> fx.Node:
        """The incoming gradient, which lies as x does: a copy of it otherwise, which its maker can write."""
        given: Any = self.node.args[0]
        layout = FORMATS.get(self.value.dim())
        if layout is None or given.meta["val"].movedim(1, -1).is_contiguous():
            return given  # type: ignore[no-any-return]
        return self.call(aten.clone.default, given, memory_format=layout)

    def _centred(self, mean: fx.Node) -> fx.Node:
        """x - mean in fp32. Each kernel computes it: shared, it would be written to memory."""
        return self.call(aten.sub.Tensor, self.x, self.along(mean))

    def _towards_x(self, g: fx.Node, mean: fx.Node, rstd: fx.Node, slope: fx.Node, total: fx.Node) -> fx.Node:
        """(g - Σg / n - (x - mean) · (slope · rstd / n)) · (rstd · w)."""
        scale = rstd if self.weight is None else self.call(aten.mul.Tensor, rstd, self.weight)
        tilt = self.call(aten.div.Tensor, self.call(aten.mul.Tensor, slope, rstd), self.count)
        level = self.call(aten.div.Tensor, total, self.count)
        dx = self.call(aten.sub.Tensor, g, self.along(level))
        dx = self.call(aten.sub.Tensor, dx, self.call(aten.mul.Tensor, self._centred(mean), self.along(tilt)))
        return self.call(aten.mul.Tensor, dx, self.along(scale))


NORMS: dict[Any, tuple[type[_Forward] | type[_Backward], int, int]] = {
    aten._native_batch_norm_legit_functional.default: (_Forward, 0, 5),
    aten.native_batch_norm_backward.default: (_Backward, 1, 7),
}
"""What replaces a norm, and the places of its operand and of `training` among its arguments."""
