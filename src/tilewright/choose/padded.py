"""Products of 16-bit floats whose rows do not begin at 16 bytes are computed on padded operands.

    y = mm(x, t(w))       [M, 50257]      →   y = slice(mm(x, t(pad(w))), 1, 0, 50257)       of [M, 50264]
    dx = mm(dy, w)        dy [M, 50257]   →   dx = mm(pad(dy), pad(w))
    dw = mm(t(dy), x)                     →   dw = slice(mm(t(pad(dy)), x), 0, 0, 50257)

So are products of batches, as of [8192, 27, 64] and its transpose. The contiguous axes are padded with zeros. Cross
entropy's kernel writes the logits' gradient with its padding; any other operand is copied. A caller gets the result
with gaps between its rows, as from Inductor, its strides in eager's order. The result is copied without gaps if a view
or a write needs that, if it is a gradient (autograd would copy it), or if the caller gets two tensors of its memory
(AOTAutograd makes one of the other by eager's strides). Only if the whole, with its copies, is predicted to be clearly
faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from tilewright.choose.chooser import chosen
from tilewright.cost.products import alignment_of
from tilewright.cost.tiles import ALIGNED
from tilewright.cost.work import Work
from tilewright.graph import calls
from tilewright.graph.calls import readers
from tilewright.graph.insert import contiguous, insert_again, insert_call, retrace_views
from tilewright.graph.specialise import has_symbols
from tilewright.graph.undefined import gradients
from tilewright.graph.views import written
from tilewright.hardware.target import Target
from tilewright.kernels.offer import Offer
from tilewright.passes.rule import Value, call, rule
from tilewright.passes.units import behind_views

aten = torch.ops.aten
CLEAR, LEAST_US = 0.8, 5.0
"""Padding pays if it takes less than this share of the unaligned product's time and saves so much: the host takes about
as long to launch a copy."""
OWN_GRADIENT = "tilewright.cross_entropy_backward.default"
OPERATORS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def offers(graph: fx.Graph, target: Target) -> Iterator[Sequence[Offer]]:
    """An offer for each product of a joint or inference graph of ATen operators that is not aligned."""
    if not target.runs_cuda:
        return
    padder = _Padder(gradients(graph))
    # Known before the first is padded, whose padding others read.
    found = [(node, alignment_of(node)) for node in graph.nodes if node.target in OPERATORS]
    for node, alignment in found:
        if alignment < ALIGNED and (product := _product(node, alignment)) is not None:
            yield [padder.offer(product)]


@dataclass(frozen=True)
class _Product:
    """A product [m, k] · [k, n], or a batch of them, and the padding of each of its extents."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    batch: int
    extents: tuple[int, int, int]
    padding: tuple[int, int, int]
    alignment: int

    def operands(self) -> list[tuple[fx.Node, tuple[int, int]]]:
        """The operands that are padded, each with the padding of its two axes."""
        m, k, n = self.padding
        return [(x, by) for x, by in ((self.left, (m, k)), (self.right, (k, n))) if any(by)]


def _product(node: fx.Node, alignment: int) -> _Product | None:
    *added, left, right = node.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or node.kwargs:
        return None
    x, y = calls.output(left), calls.output(right)
    if x is None or y is None or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    if has_symbols(x) or has_symbols(y) or not (x.numel() and y.numel()):
        return None
    *batch, m, k, n = *x.shape, y.shape[-1]
    extents = m, k, n
    # The contiguous axes of the operands and of the result, as indices into (m, k, n).
    beside = {1 if x.stride(-1) == 1 else 0, 2 if y.stride(-1) == 1 else 1, 2}
    odd = {axis for axis in beside if extents[axis] > 1 and extents[axis] % ALIGNED}
    m, k, n = (-extent % ALIGNED if axis in odd else 0 for axis, extent in enumerate(extents))
    if not odd or (m and added):
        return None
    return _Product(node, left, right, prod(batch), extents, (m, k, n), alignment)


@dataclass
class _Padder:
    """Decides on one product after the other; later products reuse the padded operands."""

    gradients: set[fx.Node]
    padded: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    """By tensor and axis."""

    def offer(self, product: _Product) -> Offer:
        node, (m, k, n) = product.node, product.extents
        aligned, plain = (self._work(product, alignment) for alignment in (ALIGNED, product.alignment))
        copied = [base for operand in product.operands() if (base := self._copied(*operand)) is not None]
        if added := self._added(product):
            copied.append(added)
        if (product.padding[2] or (product.padding[0] and product.batch > 1)) and self._needs_no_gaps(node):
            copied.append(node)
        copies = (Work("pointwise", calls.nbytes(x), calls.nbytes(x)) for x in copied)
        return Offer(
            f"a product of copies padded to multiples of {ALIGNED}",
            f"{m} × {k} times {k} × {n}, which is not aligned to 16 bytes", node, lambda: self._apply(product),
            work=(aligned, *copies), instead=(plain,), clear=CLEAR, least_us=LEAST_US, producer=product.left,
        )  # fmt: skip

    def _copied(self, operand: fx.Node, padding: tuple[int, int]) -> fx.Node | None:
        """What is copied to pad an operand; None if that is written or was copied with its padding."""
        if all(padding):
            return operand
        base, axis, _ = _base(operand, padding)
        return None if (base, axis) in self.padded or (axis == 1 and _is_own_gradient(base)) else base

    @staticmethod
    def _work(product: _Product, alignment: int) -> Work:
        node, (m, k, n) = product.node, product.extents
        sizes = product.batch, m, n, k
        read, written = calls.nbytes(product.left) + calls.nbytes(product.right), calls.nbytes(node)
        dtype = calls.dtype_name(calls.tensor(node).dtype)
        return Work("product", read, written, 2 * prod(sizes), dtype=dtype, products=(sizes,), alignment=alignment)

    @staticmethod
    def _added(product: _Product) -> fx.Node | None:
        """What is added to the product, if it must be padded like it."""
        added: Any = product.node.args[0] if len(product.node.args) > 2 else None
        columns = product.extents[2]
        return added if added and product.padding[2] and calls.shape_of(calls.tensor(added))[-1] == columns else None

    def _apply(self, product: _Product) -> fx.Node:
        node, (m, _, n) = product.node, product.extents
        below, inner, right = product.padding
        operands = (self._pad(node, product.left, (below, inner)), self._pad(node, product.right, (inner, right)))
        added = list(node.args[:-2])
        if padded := self._added(product):
            added = [insert_call(node, aten.constant_pad_nd.default, padded, [0, right])]
        new = insert_again(node, node, *added, *operands)
        cut = new
        rank = len(calls.tensor(node).shape)
        for axis, padding, extent in ((rank - 2, below, m), (rank - 1, right, n)):
            if padding:
                cut = insert_call(node, aten.slice.Tensor, cut, axis, 0, extent)
        self._put(node, cut)
        return new

    def _put(self, node: fx.Node, cut: fx.Node) -> None:
        """Replace `node` by `cut`: with its gaps between rows if the readers allow that, else by a contiguous copy."""
        if self._needs_no_gaps(node) and not calls.output(cut).is_contiguous():  # type: ignore[union-attr]
            cut = contiguous(node, cut)
        node.replace_all_uses_with(cut)
        retrace_views(cut)
        node.graph.erase_node(node)

    def _needs_no_gaps(self, node: fx.Node) -> bool:
        """Whether gaps between the rows of a product would require a copy, or give wrong results."""
        if any(node in map(behind_views, written(reader)) for reader in readers(node)):
            return True
        results: Sequence[Any] = node.graph.output_node().args[0]  # type: ignore[assignment]
        handed_out = [x for x in tree_leaves(results) if isinstance(x, fx.Node) and behind_views(x) is node]
        return len(handed_out) > 1 or (bool(handed_out) and node in self.gradients)

    def _pad(self, before: fx.Node, operand: fx.Node, padding: tuple[int, int]) -> fx.Node:
        if not any(padding):
            return operand
        if all(padding):
            below, right = padding
            return insert_call(before, aten.constant_pad_nd.default, operand, [0, right, 0, below])
        base, axis, by = _base(operand, padding)
        found = self.padded.get((base, axis))
        if base.op == "placeholder":
            # A weight is padded anew for each product: it would be kept for backward otherwise.
            found = insert_call(before, aten.constant_pad_nd.default, base, _padding_argument(axis, by))
        elif found is None:
            if axis == 1 and _is_own_gradient(base):
                found, base = _padded_gradient(base, by)
            else:
                found = insert_call(base.next, aten.constant_pad_nd.default, base, _padding_argument(axis, by))
            self.padded[base, axis] = found
        return found if axis == _axis(padding) else insert_call(before, aten.transpose.int, found, -2, -1)


def _pads_own_gradient(operand: fx.Node, by: int) -> dict[str, fx.Node] | None:
    base, axis, _ = _base(operand, (0, by))
    return {"base": base} if axis == 1 and _is_own_gradient(base) else None


@rule(call(aten.constant_pad_nd.default, "operand", [0, Value("by", (int,))]), where=_pads_own_gradient)
def write_padded(base: fx.Node, by: int) -> fx.Node:
    """Where a pad still copies cross entropy's gradient: an undefined term between them is gone."""
    return _padded_gradient(base, by)[0]


def _padded_gradient(base: fx.Node, by: int) -> tuple[fx.Node, fx.Node]:
    """Cross entropy's gradient written with `by` columns of zeros, and the slice of it that its readers get."""
    new = insert_again(base, base, *base.args[:-2], by)
    value = calls.tensor(base)
    cut = insert_call(base, aten.slice.Tensor, new, 1, 0, calls.shape_of(value)[1])
    base.replace_all_uses_with(cut)
    retrace_views(cut)
    return new, cut


def _base(operand: fx.Node, padding: tuple[int, int]) -> tuple[fx.Node, int, int]:
    """The tensor behind an operand's transposition and reshapes, which of its last two axes to pad, and by how much."""
    axis, by = _axis(padding), max(padding)
    node = operand
    while calls.is_view(node):
        below = node.all_input_nodes[0]
        if _layout(node) == tuple((*x[:-2], *reversed(x[-2:])) for x in _layout(below)):
            axis = 1 - axis
        elif _layout(node) != _layout(below):
            through = _undone(node)
            if through is None:
                break
            below = through
        node = below
    return node, axis, by


def _layout(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides."""
    return calls.shape_of(calls.tensor(node)), calls.strides_of(calls.tensor(node))


def _undone(view: fx.Node) -> fx.Node | None:
    """The tensor whose reshape this view undoes, as in [512, N] → [8, 64, N] → [512, N]; else None."""
    below = view.all_input_nodes[0]
    plain = all(str(node.target) in ("aten.view.default", "aten._unsafe_view.default") for node in (view, below))
    return below.all_input_nodes[0] if plain and _layout(view)[0] == _layout(below.all_input_nodes[0])[0] else None


def _is_own_gradient(node: fx.Node) -> bool:
    """Whether tilewright's cross entropy can write this with padding."""
    return str(node.target) == OWN_GRADIENT and bool(node.args[-2] == 0)


def _axis(padding: tuple[int, int]) -> int:
    return 0 if padding[0] else 1


def _padding_argument(axis: int, by: int) -> list[int]:
    """`constant_pad_nd`'s argument for `by` zeros at the end of an axis of a matrix."""
    return [0, by] if axis else [0, 0, 0, by]


pad_products = chosen("pad_products", offers)
