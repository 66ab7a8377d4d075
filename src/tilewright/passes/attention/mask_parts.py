"""Splits an attention mask into its parts, read from the operators that build it.

    m = (k <= q) & (k > q - 8)                     →   a band: the query's own position and 7 keys before it
    m = (q >= 0) & padding[:, None, None, :]       →   padding, [B, 1, 1, Sk]
    m = where((k <= q) & padding, bias, -inf)      →   a band, padding, bias
    m = (arange(S) <= position)[None, None]        →   the keys of a cache below position + 1 (`Prefix`)

The parts are a constant bool tensor, further bool tensors, and biases. Works on torch-level graphs and on graphs of
ATen operators, like `constants`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from tilewright.graph.calls import shape_of
from tilewright.graph.canonical import argument, canonical_name, example, tensor_of, where_arguments
from tilewright.graph.constants import SAME, Constants, Iota, compared_keys, iota_of, without_repeats
from tilewright.graph.insert import insert_call
from tilewright.passes.attention.library import FILLS
from tilewright.passes.attention.match import NEGLIGIBLE
from tilewright.pytorch.state import in_real_tensors

aten: Any = torch.ops.aten
AND = frozenset({"and_", "bitwise_and", "logical_and"})
OPPOSITES = {"le": "gt", "gt": "le", "lt": "ge", "ge": "lt"}
NOT = frozenset({"bitwise_not", "not_"})
BROADCASTS = SAME | {"expand", "broadcast_to"}
"""Calls whose result broadcasts against the scores as their argument does."""


class Band(NamedTuple):
    """Query i of Sq sees key j of Sk where -left ≤ j - (i + Sk - Sq) ≤ right; None: no limit on that side."""

    left: int | None
    right: int | None

    def within(self, other: Band) -> Band:
        """The intersection of two bands."""
        (left, right), (more_left, more_right) = self, other
        return Band(
            more_left if left is None else left if more_left is None else min(left, more_left),
            more_right if right is None else right if more_right is None else min(right, more_right),
        )


EVERYWHERE = Band(None, None)
ALL = torch.ones((), dtype=torch.bool)


@dataclass(frozen=True)
class MaskParts:
    """The mask `where(constant & symbolic_band & all of conditions, sum of biases, -inf)`."""

    constant: torch.Tensor
    """bool, broadcastable to [B, H, Sq, Sk], on the CPU; an axis along which it repeats has one element."""
    conditions: tuple[Node, ...] = ()
    """bool, True where a query attends to a key; broadcastable to [B, H, Sq, Sk]."""
    biases: tuple[Node, ...] = ()
    """Floating, broadcastable to [B, H, Sq, Sk]."""
    fill_values: frozenset[float] = frozenset()
    """The values that replace masked scores."""
    symbolic_band: Band = EVERYWHERE
    """The band of comparisons that are too large to compute, or have symbolic sizes."""

    @property
    @in_real_tensors()
    def shows_all(self) -> bool:
        """Whether the constant parts mask no key."""
        return self.symbolic_band == EVERYWHERE and bool(self.constant.all())

    @in_real_tensors()
    def band(self, queries: int | torch.SymInt, keys: int | torch.SymInt) -> Band | None:
        """The constant parts as one band for all batch entries and heads; None if they are no band."""
        if self.constant.numel() == 1 and self.constant:
            return self.symbolic_band
        if not isinstance(queries, int) or not isinstance(keys, int):
            return None
        band = band_of(self.constant, queries, keys)
        return None if band is None else band.within(self.symbolic_band)

    @in_real_tensors()
    def leaves_a_key(self, queries: int | torch.SymInt, keys: int | torch.SymInt) -> bool:
        """Whether the constant parts leave every query at least one key."""
        if self.symbolic_band == EVERYWHERE and self.constant.numel() > 1:
            return isinstance(keys, int) and bool(self.constant.expand(*self.constant.shape[:-1], keys).any(-1).all())
        left, right = self.symbolic_band
        more_keys = _longer(queries, keys)
        own_position = (left is None or left >= 0) and (right is None or right >= 0)
        return self.shows_all or (
            own_position and more_keys is not None and more_keys >= 0 and bool(self.constant.all())
        )

    def or_opaque(self, mask: Node, queries: int | torch.SymInt, keys: int | torch.SymInt) -> MaskParts:
        """These parts of `mask`, but as one bias if masked scores are finite and a query may have no key.

        Such a query weighs all keys alike, which masking does not reproduce.
        """
        finite = any(fill != -math.inf for fill in self.fill_values)
        is_opaque = finite and (self.conditions or not self.leaves_a_key(queries, keys))
        return MaskParts(ALL, biases=(mask,)) if is_opaque else self


@in_real_tensors()
def read_mask(
    mask: Node, constants: Constants, queries: int | torch.SymInt, keys: int | torch.SymInt, hides: float = NEGLIGIBLE
) -> MaskParts:
    """The parts of `mask`, a bool tensor or a bias whose values up to `hides` mask a key, so that masking them gives
    what the program computes."""
    return read_hidden_keys(mask, constants, hides).or_opaque(mask, queries, keys)


@in_real_tensors()
def read_hidden_keys(mask: Node, constants: Constants, hides: float = NEGLIGIBLE) -> MaskParts:
    """As `read_mask`, but masked scores may be finite even if a query has no key."""
    value = example(mask)
    if value is None:
        return MaskParts(ALL, biases=(mask,))
    return conjunction(mask, constants) if value.dtype == torch.bool else bias_terms(mask, constants, hides)


def combined(a: MaskParts, b: MaskParts) -> MaskParts:
    """The parts of two masks of one attention together."""
    return MaskParts(
        a.constant & b.constant,
        tuple(dict.fromkeys((*a.conditions, *b.conditions))),
        (*a.biases, *b.biases),
        a.fill_values | b.fill_values,
        a.symbolic_band.within(b.symbolic_band),
    )


def conjunction(node: Node, constants: Constants) -> MaskParts:
    """The parts of a bool tensor, True where a query attends to a key."""
    value, name = constants.value(node), canonical_name(node)
    if value is not None:
        return MaskParts(without_repeats(value))
    if name in AND and len(operands := [x for x in node.args if isinstance(x, Node)]) == 2:
        return combined(*(conjunction(x, constants) for x in operands))
    source = argument(node, 0, "input")
    if (name in BROADCASTS or name == "cast") and _is_bool(source):
        return conjunction(source, constants)
    if name in NOT and isinstance(source, Node) and (opposite := negation(source, constants)) is not None:
        return opposite
    if iota_of(node, constants) == Iota(None, 1):
        return MaskParts(ALL)
    band = _compared(node, str(name), constants)
    return MaskParts(ALL, conditions=(node,)) if band is None else MaskParts(ALL, symbolic_band=band)


def negation(node: Node, constants: Constants) -> MaskParts | None:
    """The parts of a bool tensor that is True where a key is masked; None if the graph has no opposite of it."""
    value = constants.value(node)
    if value is not None:
        return MaskParts(~without_repeats(value))
    source = argument(node, 0, "input")
    if canonical_name(node) in NOT and _is_bool(source):
        return conjunction(source, constants)
    band = _compared(node, OPPOSITES.get(str(canonical_name(node)), ""), constants)
    return None if band is None else MaskParts(ALL, symbolic_band=band)


def _compared(node: Node, name: str, constants: Constants) -> Band | None:
    """The band of a comparison `q op k` of positions that count up by one along the queries and the keys.

    For comparisons that are not computed since they are too large or have symbolic sizes.
    """
    value, found = example(node), compared_keys(node, name, constants)
    if found is None or value is None or value.dim() < 2:
        return None
    first_key, other, name = found
    query, more_keys = iota_of(other, constants), _longer(*value.shape[-2:])
    if query is None or query.axis != -2 or more_keys is None:
        return None
    # j + a op i + b; query i is at position i + Sk - Sq.
    distance = query.first - first_key - more_keys
    if name in ("le", "lt"):
        return Band(None, distance - (name == "lt"))
    left = -(distance + (name == "gt"))
    return Band(left, None) if left >= 0 else None


def _longer(queries: int | torch.SymInt, keys: int | torch.SymInt) -> int | None:
    """How many more keys than queries there are; None if that may differ between calls."""
    if isinstance(queries, int) and isinstance(keys, int):
        return keys - queries
    return 0 if str(queries) == str(keys) else None


def _is_bool(node: object) -> bool:
    value = example(node)
    return value is not None and value.dtype == torch.bool


def bias_terms(node: Node, constants: Constants, hides: float) -> MaskParts:
    """The parts of a floating tensor that is added to the scores."""
    constant = constants.value(node)
    if constant is not None:
        constant = without_repeats(constant)
        masked = constant <= hides
        rest = constant[~masked] if masked.any() else constant
        if not rest.any():
            return MaskParts(~masked, fill_values=frozenset({float(x) for x in constant[masked].unique()}))
        return MaskParts(ALL, biases=(node,))
    name = canonical_name(node)
    if name == "add" and not node.kwargs and all(isinstance(x, Node) for x in node.args):
        return combined(*(bias_terms(x, constants, hides) for x in node.args if isinstance(x, Node)))
    if name in ("where", "masked_fill") and (found := _filled(node, constants, hides)) is not None:
        return found
    source = argument(node, 0, "input")
    if isinstance(source, Node) and not _is_bool(source):
        if name in BROADCASTS:
            return bias_terms(source, constants, hides)
        if name == "cast" and not (found := bias_terms(source, constants, hides)).biases:
            return found
        if name == "slice" and (padded := _before_padding(node, source)) is not None:
            return bias_terms(padded, constants, hides)
    return MaskParts(ALL, biases=(node,))


def _filled(node: Node, constants: Constants, hides: float) -> MaskParts | None:
    """The parts of `where(keep, x, -inf)`, `where(mask, -inf, x)` and `x.masked_fill(mask, -inf)`."""
    condition, x, other = where_arguments(node)
    if not isinstance(condition, Node):
        return None
    first, second = constants.scalar(x), constants.scalar(other)
    if second is not None and second <= hides:
        parts, rest, fill = conjunction(condition, constants), x, second
    elif first is not None and first <= hides and (opposite := negation(condition, constants)) is not None:
        parts, rest, fill = opposite, other, first
    else:
        return None
    parts = replace(parts, fill_values=frozenset({fill}))
    number = constants.scalar(rest)
    if number is not None:
        return parts if number == 0 else None
    return combined(parts, bias_terms(rest, constants, hides)) if isinstance(rest, Node) else None


def _before_padding(node: Node, padded: Node) -> Node | None:
    """x of `pad(x, (0, n))[..., :size]`, with which PyTorch aligns the rows of a mask."""
    value, source = example(node), argument(padded, 0, "input")
    was = example(source)
    if canonical_name(padded) != "constant_pad_nd" or not isinstance(source, Node) or value is None or was is None:
        return None
    return source if tuple(value.shape) == tuple(was.shape) else None


@in_real_tensors()
def band_of(known: torch.Tensor, queries: int, keys: int) -> Band | None:
    """The band that a bool mask, broadcastable to [B, H, Sq, Sk], is; None if it is none or entries or heads differ."""
    known = without_repeats(known)
    if known.shape[:-2].numel() != 1:
        return None
    matrix = known.reshape(known.shape[-2:]).expand(queries, keys)
    i, j = torch.arange(queries).unsqueeze(1), torch.arange(keys)
    rows = matrix.any(1).nonzero()
    if not len(rows):
        return None
    first, last = int(rows[0]), int(rows[-1])
    # In a band the first query's keys reach farthest right, the last query's farthest left.
    right = int(matrix[first].nonzero().max()) - first
    left = last - int(matrix[last].nonzero().min())
    unlimited_right, unlimited_left = right == keys - 1, left == queries - 1
    band = torch.ones((), dtype=torch.bool)
    if not unlimited_right:
        band = band & (j <= i + right)
    if not unlimited_left:
        band = band & (j >= i - left)
    if not torch.equal(matrix, band.expand(queries, keys)):
        return None
    shift = keys - queries
    found = Band(None if unlimited_left else left + shift, None if unlimited_right else right - shift)
    return found if found.left is None or found.left >= 0 else None


class Prefix(NamedTuple):
    """A query sees the keys below `last + more`."""

    last: Node
    """Integers, aligned with the comparison at the right."""
    more: int
    rank: int
    """Axes of the comparison."""
    inserted: tuple[int, ...]
    """Axes of size 1 that were inserted since, one after the other."""
    else_all: bool
    """Whether a query that sees no key sees all of them."""

    def write(self, before: Node, batch: int, queries: int) -> Node:
        """`last` as [batch, 1, queries, 1], written before `before`."""
        node = self.last
        for axis in (*[0] * (self.rank - _rank(node)), *self.inserted):
            node = insert_call(before, aten.unsqueeze.default, node, axis)
        return insert_call(before, aten.expand.default, node, [batch, 1, queries, 1])


def prefix_of(mask: MaskParts, constants: Constants, keys: int | torch.SymInt) -> Prefix | None:
    """The prefix of `keys` that a mask [B, H, Sq, Sk] lets queries see; None if heads differ or it is no prefix."""
    if len(mask.conditions) != 1 or mask.biases or not mask.shows_all or not mask.fill_values <= FILLS.keys():
        return None
    inserted: list[int] = []
    (node,) = mask.conditions
    if tensor_of(node).shape[-1] != keys:
        return None
    while True:
        name, source = canonical_name(node), argument(node, 0, "input")
        if name == "unsqueeze" and isinstance(source, Node) and isinstance(axis := argument(node, 1, "dim"), int):
            inserted.insert(0, axis % (_rank(source) + 1))
        elif not isinstance(source, Node) or not (name in (*SAME, "expand", "broadcast_to") or _from_first(node)):
            break
        elif _rank(source) != _rank(node):
            inserted[:0] = [0] * (_rank(node) - _rank(source))
        node = source
    found = _compared_prefix(node, constants)
    if found is None:
        return None
    last, more = found
    sizes = [1] * (_rank(node) - _rank(last)) + list(shape_of(tensor_of(last)))
    for axis in inserted:
        sizes.insert(axis, 1)
    sizes = [1] * (4 - len(sizes)) + sizes
    fits = len(sizes) == 4 and sizes[1] == sizes[3] == 1
    shows_all = any(FILLS[fill] for fill in mask.fill_values)
    return Prefix(last, more, _rank(node), tuple(inserted), shows_all) if fits else None


def _from_first(node: Node) -> bool:
    """Whether a call cuts off the last keys, if anything."""
    if canonical_name(node) != "slice" or argument(node, 4, "step", 1) != 1 or argument(node, 2, "start"):
        return False
    return shape_of(tensor_of(node.args[0]))[:-1] == shape_of(tensor_of(node))[:-1]


@in_real_tensors()
def _compared_prefix(node: Node, constants: Constants) -> tuple[Node, int] | None:
    """x and m of `key < x + m`, where keys count up along the last axis and x is an integer tensor."""
    found = compared_keys(node, str(canonical_name(node)), constants)
    if found is None:
        return None
    first_key, last, name = found
    value = example(last)
    is_bound = name in ("le", "lt") and value is not None and value.dtype in (torch.int64, torch.int32)
    return (last, (name == "le") - first_key) if is_bound else None


def _rank(node: Node) -> int:
    return tensor_of(node).dim()
