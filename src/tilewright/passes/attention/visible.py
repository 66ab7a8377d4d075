"""The keys that a mask shows to each query, read from the comparisons that build it.

    m = (k <= q) & (k > q - 8)                     →   a band: 7 keys before a query to its own place
    m = (q >= 0) & padding[:, None, None, :]       →   padding, [B, 1, 1, Sk]
    m = where((k <= q) & padding, bias, -inf)      →   a band, padding, bias

A mask is a conjunction of what is known when the graph is compiled and of tensors that are not, plus tensors that are
added. Works on both kinds of graph that `constants` knows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.fx import Node

from tilewright.graph.pytorch_state import in_real_tensors
from tilewright.passes.attention.constants import SAME, Constants, once
from tilewright.passes.attention.match import NEGLIGIBLE
from tilewright.passes.attention.places import Count, count_of
from tilewright.passes.attention.spelling import argument, example, spelled

AND = frozenset({"and_", "bitwise_and", "logical_and"})
OPPOSITES = {"le": "gt", "gt": "le", "lt": "ge", "ge": "lt"}
MIRRORED = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt"}
NOT = frozenset({"bitwise_not", "not_"})
BROADCASTS = SAME | {"expand", "broadcast_to"}
"""Calls whose result broadcasts as their argument does; a cast beside, where it only changes the dtype."""


class Band(NamedTuple):
    """Query i of Sq sees key j of Sk where -left ≤ j - (i + Sk - Sq) ≤ right; None: no limit on that side."""

    left: int | None
    right: int | None

    def within(self, other: Band) -> Band:
        """The band of the keys that both show."""
        (left, right), (more_left, more_right) = self, other
        return Band(
            more_left if left is None else left if more_left is None else min(left, more_left),
            more_right if right is None else right if more_right is None else min(right, more_right),
        )


EVERYWHERE = Band(None, None)
ALL = torch.ones((), dtype=torch.bool)


@dataclass(frozen=True)
class Visible:
    """`where(known & all of kept, sum of added, -inf)`."""

    known: torch.Tensor
    """bool, broadcastable to [B, H, Sq, Sk], on the CPU; axes along which it repeats have one element."""
    kept: tuple[Node, ...] = ()
    """bool, True where a key is seen; broadcastable to [B, H, Sq, Sk]."""
    added: tuple[Node, ...] = ()
    """Floating, broadcastable to [B, H, Sq, Sk]."""
    fills: frozenset[float] = frozenset()
    """The numbers that hidden scores become."""
    places: Band = EVERYWHERE
    """What comparisons show that are too large to be computed, beside `known`."""

    @property
    @in_real_tensors()
    def shows_all(self) -> bool:
        """Whether what is known hides nothing."""
        return self.places == EVERYWHERE and bool(self.known.all())

    @in_real_tensors()
    def band(self, queries: int | torch.SymInt, keys: int | torch.SymInt) -> Band | None:
        """The band that is known to be seen in every entry and head; None where it is none."""
        if self.known.numel() == 1 and self.known:
            return self.places
        if not isinstance(queries, int) or not isinstance(keys, int):
            return None
        band = band_of(self.known, queries, keys)
        return None if band is None else band.within(self.places)

    @in_real_tensors()
    def leaves_a_key(self, queries: int | torch.SymInt, keys: int | torch.SymInt) -> bool:
        """Whether what is known shows every query some key."""
        if self.places == EVERYWHERE and self.known.numel() > 1:
            return isinstance(keys, int) and bool(self.known.expand(*self.known.shape[:-1], keys).any(-1).all())
        left, right = self.places
        more_keys = _longer(queries, keys)
        own_place = (left is None or left >= 0) and (right is None or right >= 0)
        return self.shows_all or (own_place and more_keys is not None and more_keys >= 0 and bool(self.known.all()))


@in_real_tensors()
def visible(
    mask: Node, constants: Constants, queries: int | torch.SymInt, keys: int | torch.SymInt, hides: float = NEGLIGIBLE
) -> Visible:
    """What `mask`, bool or added, of an attention over so many places is made of; a number up to `hides` hides.

    Where hidden scores become finite numbers and some query may see no key, the mask is one tensor that is added: such
    a query weighs all keys alike, which hiding them does not.
    """
    value = example(mask)
    if value is None:
        return Visible(ALL, added=(mask,))
    if value.dtype == torch.bool:
        return shown(mask, constants)
    found = added(mask, constants, hides)
    finite = any(fill != -math.inf for fill in found.fills)
    if finite and (found.kept or not found.leaves_a_key(queries, keys)):
        return Visible(ALL, added=(mask,))
    return found


@in_real_tensors()
def hiding(mask: Node, constants: Constants, hides: float = NEGLIGIBLE) -> Visible:
    """`visible` without regard to queries that see no key: hidden scores may become finite numbers."""
    value = example(mask)
    is_bool = value is not None and value.dtype == torch.bool
    return shown(mask, constants) if is_bool else added(mask, constants, hides)


def both(a: Visible, b: Visible) -> Visible:
    """What two masks of one attention show together."""
    kept = tuple(dict.fromkeys((*a.kept, *b.kept)))
    return Visible(a.known & b.known, kept, (*a.added, *b.added), a.fills | b.fills, a.places.within(b.places))


def shown(node: Node, constants: Constants) -> Visible:
    """A bool tensor as a conjunction."""
    value, name = constants.value(node), spelled(node)
    if value is not None:
        return Visible(once(value))
    if name in AND and len(operands := [x for x in node.args if isinstance(x, Node)]) == 2:
        return both(*(shown(x, constants) for x in operands))
    source = argument(node, 0, "input")
    if (name in BROADCASTS or name == "cast") and _is_bool(source):
        return shown(source, constants)
    if name in NOT and isinstance(source, Node) and (opposite := hidden(source, constants)) is not None:
        return opposite
    if count_of(node, constants) == Count(None, 1):
        return Visible(ALL)
    places = _compared(node, str(name), constants)
    return Visible(ALL, kept=(node,)) if places is None else Visible(ALL, places=places)


def hidden(node: Node, constants: Constants) -> Visible | None:
    """A bool tensor that is True where a key is hidden; None where nothing in the graph is its opposite."""
    value = constants.value(node)
    if value is not None:
        return Visible(~once(value))
    source = argument(node, 0, "input")
    if spelled(node) in NOT and _is_bool(source):
        return shown(source, constants)
    places = _compared(node, OPPOSITES.get(str(spelled(node)), ""), constants)
    return None if places is None else Visible(ALL, places=places)


def _compared(node: Node, name: str, constants: Constants) -> Band | None:
    """The band that `q op k` shows, of places that count up by one along the queries and along the keys.

    For comparisons that are not computed: too large, or of lengths that are symbols.
    """
    value, operands = example(node), [x for x in node.args if isinstance(x, Node)]
    if name not in OPPOSITES or value is None or value.dim() < 2 or len(operands) != 2:
        return None
    first, second = (count_of(x, constants) for x in operands)
    if first is None or second is None or {first.axis, second.axis} != {-2, -1}:
        return None
    if first.axis == -2:
        first, second, name = second, first, MIRRORED[name]
    more_keys = _longer(*value.shape[-2:])
    if more_keys is None:
        return None
    # j + a op i + b, where i + Sk - Sq is the place of query i
    distance = second.first - first.first - more_keys
    if name in ("le", "lt"):
        return Band(None, distance - (name == "lt"))
    left = -(distance + (name == "gt"))
    return Band(left, None) if left >= 0 else None


def _longer(queries: int | torch.SymInt, keys: int | torch.SymInt) -> int | None:
    """How many keys more than queries there are; None where that differs from call to call."""
    if isinstance(queries, int) and isinstance(keys, int):
        return keys - queries
    return 0 if str(queries) == str(keys) else None


def _is_bool(node: object) -> bool:
    value = example(node)
    return value is not None and value.dtype == torch.bool


def added(node: Node, constants: Constants, hides: float) -> Visible:
    """A floating tensor as what is hidden and what is added to the rest."""
    known = constants.value(node)
    if known is not None:
        known = once(known)
        dropped = known <= hides
        rest = known[~dropped] if dropped.any() else known
        if not rest.any():
            return Visible(~dropped, fills=frozenset({float(x) for x in known[dropped].unique()}))
        return Visible(ALL, added=(node,))
    name = spelled(node)
    if name == "add" and not node.kwargs and all(isinstance(x, Node) for x in node.args):
        return both(*(added(x, constants, hides) for x in node.args if isinstance(x, Node)))
    if name in ("where", "masked_fill") and (found := _filled(node, constants, hides)) is not None:
        return found
    source = argument(node, 0, "input")
    if isinstance(source, Node) and not _is_bool(source):
        if name in BROADCASTS:
            return added(source, constants, hides)
        if name == "cast" and not (found := added(source, constants, hides)).added:
            return found
        if name == "slice" and (padded := _before_padding(node, source)) is not None:
            return added(padded, constants, hides)
    return Visible(ALL, added=(node,))


def _filled(node: Node, constants: Constants, hides: float) -> Visible | None:
    """`where(seen, x, -inf)`, `where(hidden, -inf, x)` and `x.masked_fill(hidden, -inf)`."""
    if spelled(node) == "masked_fill":
        other, condition, x = (argument(node, i, n) for i, n in enumerate(("input", "mask", "value")))
    else:
        names = ("input", "condition", "other") if node.op == "call_method" else ("condition", "input", "other")
        call = {name: argument(node, i, name) for i, name in enumerate(names)}
        condition, x, other = call["condition"], call["input"], call["other"]
    if not isinstance(condition, Node):
        return None
    first, second = constants.scalar(x), constants.scalar(other)
    if second is not None and second <= hides:
        seen, rest, fill = shown(condition, constants), x, second
    elif first is not None and first <= hides and (opposite := hidden(condition, constants)) is not None:
        seen, rest, fill = opposite, other, first
    else:
        return None
    seen = replace(seen, fills=frozenset({fill}))
    number = constants.scalar(rest)
    if number is not None:
        return seen if number == 0 else None
    return both(seen, added(rest, constants, hides)) if isinstance(rest, Node) else None


def _before_padding(node: Node, padded: Node) -> Node | None:
    """x of `pad(x, (0, n))[..., :size]`, as PyTorch aligns the rows of a mask."""
    value, source = example(node), argument(padded, 0, "input")
    was = example(source)
    if spelled(padded) != "constant_pad_nd" or not isinstance(source, Node) or value is None or was is None:
        return None
    return source if tuple(value.shape) == tuple(was.shape) else None


@in_real_tensors()
def band_of(known: torch.Tensor, queries: int, keys: int) -> Band | None:
    """The band that `known`, broadcastable to [B, H, Sq, Sk], is in every entry and head; None where it is none."""
    known = once(known)
    if known.shape[:-2].numel() != 1:
        return None
    matrix = known.reshape(known.shape[-2:]).expand(queries, keys)
    i, j = torch.arange(queries).unsqueeze(1), torch.arange(keys)
    rows = matrix.any(1).nonzero()
    if not len(rows):
        return None
    first, last = int(rows[0]), int(rows[-1])
    # In a band the first query reaches farthest after its place, and the last one farthest before it.
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
