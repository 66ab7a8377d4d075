"""Products of 16-bit floats whose rows do not begin at 16 bytes are computed on padded operands.

    y = mm(x, t(w))       [M, 50257]      →   y = slice(mm(x, t(pad(w))), 1, 0, 50257)       of [M, 50264]
    dx = mm(dy, w)        dy [M, 50257]   →   dx = mm(pad(dy), pad(w))
    dw = mm(t(dy), x)                     →   dw = slice(mm(t(pad(dy)), x), 0, 0, 50257)

The contiguous axes are padded with zeros. Cross entropy's kernel writes the logits' gradient with its padding; any
other operand is copied. A caller gets the result with gaps between its rows, as from Inductor: its strides have eager's
order, but are larger. The result is copied without gaps if a view or a write needs that, if it is a gradient (autograd
would copy it), or if the caller gets two tensors of its memory (AOTAutograd makes one of the other by eager's strides).
A product is rewritten only if the whole, with its copies, is predicted to be clearly faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from tilewright.graph import calls
from tilewright.graph.insert import insert_call, retrace_views
from tilewright.graph.source import source_line
from tilewright.graph.specialise import has_symbols
from tilewright.graph.writes import written
from tilewright.hardware.architectures import known
from tilewright.hardware.floor import floor_us
from tilewright.hardware.profiles import DeviceProfile
from tilewright.hardware.target import Target
from tilewright.passes.simplify import drop_unread
from tilewright.passes.units import behind_views, gradients, readers
from tilewright.records.program import Decision, Verdict

aten = torch.ops.aten
ALIGNED = 8
"""16-bit elements in 16 bytes, which the copies of tiles and their swizzles move at once."""
SLOWER = {1: 4.9, 2: 2.9, 4: 2.8}
"""cuBLAS's least slowdown without alignment, by the largest power of two that divides the extent (H200, bf16).
8192 × 50257 × 768 took 6,682 µs forward, 4,528 and 4,296 backward, and 880 aligned; 4096 × 30522 × 768 took 815, and
281 aligned; 4096 × 128100 × 768 took 3,373 and 1,197."""
CLEAR = 0.8
"""Padding pays if it takes less than this share of the unaligned product's time."""
OPERATORS: dict[object, int] = {aten.mm.default: 0, aten.addmm.default: 1}
"""By operator, the index of the argument that is the left operand."""
OWN_GRADIENT = "tilewright.cross_entropy_backward.default"


def pad_products(graph: fx.Graph, target: Target) -> list[Decision]:
    """Rewrite `graph`, a joint or inference graph of ATen operators, in place; a decision for each unaligned one."""
    architecture = known(target.profile.capability or "")
    if architecture is None or not architecture.wgmma:
        # Unaligned products were measured on Hopper alone.
        return []
    padder = _Padder(target.profile, gradients(graph))
    products = [node for node in graph.nodes if node.target in OPERATORS]
    return [padder.decide(product) for node in products if (product := _unaligned(node)) is not None]


@dataclass(frozen=True)
class _Product:
    """A product [m, k] · [k, n], and the padding of each of its extents."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    extents: tuple[int, int, int]
    padding: tuple[int, int, int]

    @property
    def slower(self) -> float:
        """How many times as long the product takes without padding."""
        odd = [extent & -extent for extent, padding in zip(self.extents, self.padding, strict=True) if padding]
        return SLOWER[min(odd)]

    def operands(self) -> list[tuple[fx.Node, tuple[int, int]]]:
        """The operands that are padded, each with the padding of its two axes."""
        m, k, n = self.padding
        return [(x, by) for x, by in ((self.left, (m, k)), (self.right, (k, n))) if any(by)]


def _unaligned(node: fx.Node) -> _Product | None:
    first = OPERATORS[node.target]
    left, right = node.args[first], node.args[first + 1]
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or node.kwargs:
        return None
    x, y = calls.output(left), calls.output(right)
    if x is None or y is None or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    if has_symbols(x) or has_symbols(y) or not (x.numel() and y.numel()):
        return None
    extents = (x.shape[0], x.shape[1], y.shape[1])
    # The contiguous axes of the operands and of the result, as indices into (m, k, n).
    beside = {1 if x.stride(1) == 1 else 0, 2 if y.stride(1) == 1 else 1, 2}
    odd = {axis for axis in beside if extents[axis] % ALIGNED}
    if not odd or any((extents[axis] & -extents[axis]) not in SLOWER for axis in odd):
        return None
    m, k, n = (-extent % ALIGNED if axis in odd else 0 for axis, extent in enumerate(extents))
    if (m and k) or (k and n) or (m and first):
        return None
    return _Product(node, left, right, extents, (m, k, n))


@dataclass
class _Padder:
    """Decides on one product after the other; later products reuse the padded operands."""

    profile: DeviceProfile
    gradients: set[fx.Node]
    padded: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    """By tensor and axis."""

    def decide(self, product: _Product) -> Decision:
        node, (m, k, n) = product.node, product.extents
        dtype = calls.dtype_name(calls.output(product.left).dtype)  # type: ignore[union-attr]
        # The launch's own time does not depend on the alignment.
        work, _ = floor_us(0, 2 * m * k * n, 0, dtype, 0, replace(self.profile, launch_us=0.0), "compute")
        aligned, plain = (max(us, self.profile.launch_us) for us in (work, work * product.slower))
        copies = sum(self._copy_us(*operand) for operand in product.operands())
        result = product.padding[2] > 0 and self._needs_no_gaps(node)
        copies += self._moved_us(2 * m * n * 2, m * n * 2) if result else 0.0
        shape = f"{m} × {k} times {k} × {n}"
        reason = f"{shape} is not aligned to 16 bytes: {plain:.0f} µs predicted as it is, {aligned:.0f} µs on operands "
        reason += f"padded to multiples of {ALIGNED} and {copies:.0f} µs for their copies"
        verdict: Verdict = "taken" if aligned + copies < CLEAR * plain else "refused"
        source, producer = source_line(node), behind_views(product.left).name
        consumer = self._apply(product).name if verdict == "taken" else node.name
        return Decision(
            "forward", producer, consumer, verdict, reason,
            predicted_us=aligned + copies, source=source, passed_by="pad_products",
        )  # fmt: skip

    def _copy_us(self, operand: fx.Node, padding: tuple[int, int]) -> float:
        """Predicted time to pad an operand: zeros are written, and the operand is copied over them."""
        base, axis, _ = _base(operand, padding)
        if (base, axis) in self.padded or (axis == 1 and _is_own_gradient(base)):
            return 0.0
        nbytes = calls.output(base).numel() * 2  # type: ignore[union-attr]
        return self._moved_us(3 * nbytes, 2 * nbytes)

    def _moved_us(self, nbytes: int, bytes_written: int) -> float:
        return floor_us(nbytes, 0, 0, "", nbytes, self.profile, "pointwise", bytes_written=bytes_written)[0]

    def _apply(self, product: _Product) -> fx.Node:
        node, (_, _, n) = product.node, product.extents
        below, inner, right = product.padding
        operands = (self._pad(node, product.left, (below, inner)), self._pad(node, product.right, (inner, right)))
        target: Any = node.target
        added = list(node.args[: OPERATORS[target]])
        if added and right:
            added = [insert_call(node, aten.constant_pad_nd.default, added[0], [0, right])]
        new = insert_call(node, target, *added, *operands)
        cut = new
        for axis, padding, extent in ((0, below, product.extents[0]), (1, right, n)):
            if padding:
                cut = insert_call(node, aten.slice.Tensor, cut, axis, 0, extent)
        self._put(node, cut)
        return new

    def _put(self, node: fx.Node, cut: fx.Node) -> None:
        """Replace `node` by `cut`: with its gaps between rows if the readers allow that, else by a contiguous copy."""
        if self._needs_no_gaps(node) and not calls.output(cut).is_contiguous():  # type: ignore[union-attr]
            cut = insert_call(node, aten.clone.default, cut, memory_format=torch.contiguous_format)
        _replace(node, cut)
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
        return found if axis == _axis(padding) else insert_call(before, aten.t.default, found)


def write_padded(graph: fx.Graph) -> None:
    """Let cross entropy write its gradient with padding where a pad still copies it: the term between them is gone."""
    for node in graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default):
        operand, widths, *value = node.args
        if not isinstance(operand, fx.Node) or widths[:1] != [0] or len(widths) != 2 or any(value):
            continue
        base, axis, by = _base(operand, (0, widths[1]))
        if axis == 1 and _is_own_gradient(base):
            node.replace_all_uses_with(_padded_gradient(base, by)[0])
    drop_unread(graph)


def _padded_gradient(base: fx.Node, by: int) -> tuple[fx.Node, fx.Node]:
    """Cross entropy's gradient written with `by` columns of zeros, and the slice of it that its readers get."""
    target: Any = base.target
    new = insert_call(base, target, *base.args[:-2], by, base.args[-1])
    value = calls.tensor(base)
    cut = insert_call(base, aten.slice.Tensor, new, 1, 0, calls.shape_of(value)[1])
    _replace(base, cut)
    return new, cut


def _axis(padding: tuple[int, int]) -> int:
    return 0 if padding[0] else 1


def _base(operand: fx.Node, padding: tuple[int, int]) -> tuple[fx.Node, int, int]:
    """The tensor behind an operand's transposition and reshapes, its axis to pad, and the padding."""
    axis, by = _axis(padding), max(padding)
    node = operand
    while calls.is_view(node):
        below = node.all_input_nodes[0]
        if str(node.target) == "aten.t.default":
            axis = 1 - axis
        elif not _same_rows(node, below):
            through = _undone(node)
            if through is None:
                break
            below = through
        node = below
    return node, axis, by


def _same_rows(view: fx.Node, below: fx.Node) -> bool:
    first, second = calls.output(view), calls.output(below)
    return first is not None and second is not None and calls.shape_of(first) == calls.shape_of(second)


def _undone(view: fx.Node) -> fx.Node | None:
    """The tensor whose reshape this view undoes, as in [512, N] → [8, 64, N] → [512, N]; else None."""
    below = view.all_input_nodes[0]
    plain = all(str(node.target) in ("aten.view.default", "aten._unsafe_view.default") for node in (view, below))
    return below.all_input_nodes[0] if plain and _same_rows(view, below.all_input_nodes[0]) else None


def _is_own_gradient(node: fx.Node) -> bool:
    """Whether tilewright's cross entropy can write this with padding."""
    return str(node.target) == OWN_GRADIENT and bool(node.args[-2] == 0)


def _replace(node: fx.Node, cut: fx.Node) -> None:
    """Let `cut`, or a copy of it without gaps if a view needs one, take the place of `node`."""
    node.replace_all_uses_with(cut)
    if not retrace_views(cut):
        dense = insert_call(node, aten.clone.default, cut, memory_format=torch.contiguous_format)
        cut.replace_all_uses_with(dense, delete_user_cb=lambda user: user is not dense)


def _padding_argument(axis: int, by: int) -> list[int]:
    """`constant_pad_nd`'s argument for `by` zeros at the end of an axis of a matrix."""
    return [0, by] if axis else [0, 0, 0, by]
