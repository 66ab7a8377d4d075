"""Finds the attention around a softmax: up to q and k, down to v.

Rewrites nothing. Returns an `Attention` or raises `Refusal` with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from tilewright.graph.canonical import (
    argument,
    canonical_name,
    example,
    mutates,
    same_shape,
    static,
    tensor_of,
    where_arguments,
)
from tilewright.passes.attention.spelling import (
    LESS_MAXIMUM,
    PRODUCTS,
    Operand,
    Scalar,
    Softmax,
    match_of_rows,
    scaled_by,
    scores_at,
    weighted_at,
)
from tilewright.records.errors import Refusal

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NEGLIGIBLE = -1e9
"""A score filled with this or less has weight 0 beside any other: exp(-1e9 + 104 - s) is 0 in every dtype."""
Shape = tuple[int | torch.SymInt, ...]


@dataclass(frozen=True)
class Added:
    """`scores + times · mask`."""

    mask: Node
    times: float
    lead: Shape
    """The leading axes of the scores to which it is added."""


@dataclass(frozen=True)
class Filled:
    """`scores.masked_fill(mask, value)`, or where `mask` is False if `inverted`."""

    mask: Node
    inverted: bool
    value: float
    lead: Shape
    """As in `Added`."""


@dataclass
class Attention:
    """softmax(fill(scale · factors · q kᵀ + added)) v, as found in the graph.

    With a soft cap c, the scaled products s are replaced by c · tanh(s / c).
    """

    softmax: Softmax
    scores: Node = field(init=False)
    """The first product, [*lead, Nq, Nk]."""
    q: Operand = field(init=False)
    k: Operand = field(init=False)
    k_transposed: bool = field(init=False)
    scale: float = 1.0
    softcap: float = 0.0
    """0: none."""
    factors: list[tuple[str, Node]] = field(default_factory=list)
    """Tensors that multiply ("mul") or divide ("div") whole rows of the scores."""
    masks: list[Added | Filled] = field(default_factory=list)
    """The last that the program applies comes first."""
    lead: Shape = ()
    """The leading axes that masks broadcast against."""
    replaced: list[Node] = field(default_factory=list)
    """Nodes that the fused form replaces; no other node may read them."""
    folded: list[Node] = field(default_factory=list)
    """Nodes between q, k and the product that are folded into the scale or into the layout."""
    result: Node = field(init=False)
    """The second product, which the fused form replaces."""
    v: Operand = field(init=False)
    weights_lead: Shape = field(init=False, default=())
    """The leading axes of the weights in the product with v."""
    order: tuple[int, ...] | None = field(init=False, default=None)
    """Permutes [*weights_lead, Nq, dv] into the axes of `result`; None: unchanged."""


def match_attention(softmax: Softmax, scalar: Scalar) -> Attention:
    """The attention around a softmax. Raises Refusal."""
    attention = Attention(softmax)
    _above(attention, scalar)
    _below(attention)
    _fold_query_and_key(attention, scalar)
    # The factor inside tanh is scale / c.
    attention.scale *= attention.softcap or 1.0
    return attention


def _above(attention: Attention, scalar: Scalar) -> None:
    """Walk from the softmax up to the product of q and k, collecting scales and masks."""
    walk, node = _Walk(attention, scalar), attention.softmax.source
    attention.replaced += attention.softmax.inside
    while canonical_name(node) not in PRODUCTS:
        attention.replaced.append(node)
        node = walk.step(node)
    scores = scores_at(node)
    if scores.added is not None:
        walk.add(scores.added, scores.beta, node)
    attention.scores, attention.q, attention.k = node, scores.q, scores.k
    attention.k_transposed = scores.k_transposed
    attention.scale *= scores.alpha
    attention.lead = tuple(tensor_of(node).shape[:-2]) if walk.lead is None else walk.lead
    attention.replaced.append(node)


class _Walk:
    """A walk from the softmax up to the first product; each step reads one operator."""

    def __init__(self, found: Attention, scalar: Scalar) -> None:
        self.found, self.scalar = found, scalar
        self.lead: Shape | None = None

    def step(self, node: Node) -> Node:
        """Read `node`; returns its operand that leads to the product."""
        name = canonical_name(node)
        if mutates(node):
            raise Refusal(f"{node.name} writes in place between the product and the softmax")
        if name in ("mul", "div"):
            return self._scaled(node, name)
        if name == "add":
            return self._added(node)
        if (shifted := match_of_rows(LESS_MAXIMUM, node)) is not None:
            self.found.replaced += [one for one in shifted["calls"] if one is not node]
            x: Node = shifted["source"]
            return x
        if name in ("masked_fill", "where"):
            return self._filled(node)
        x = argument(node, 0, "input")
        if name == "tanh" and isinstance(x, Node):
            if self.found.softcap or self.found.factors:
                raise Refusal(f"{node.name} caps scores that are capped again, or scaled by a tensor after it")
            self.found.softcap, self.found.scale = self.found.scale, 1.0
            return x
        if isinstance(x, Node) and name in ("cast", "contiguous", "view", "unsqueeze", "squeeze"):
            keep_scores(node, x)
            if torch.promote_types(tensor_of(x).dtype, tensor_of(node).dtype) != tensor_of(node).dtype:
                raise Refusal(f"{node.name} rounds the scores to {tensor_of(node).dtype}")
            return x
        if name == "dropout" and isinstance(x, Node) and not is_active(node):
            return x
        raise Refusal(f"{name or node.name} between the first product and the softmax")

    def _operands(self, node: Node, *, commutes: bool = True) -> tuple[Node, object]:
        """The operand of a call that leads to the product, the first or, if it `commutes`, any; and the other one."""
        a, b = argument(node, 0, "input"), argument(node, 1, "other")
        for x, other in ((a, b), (b, a))[: 1 + commutes]:
            value = example(x)
            alike = value is not None and same_shape(value.shape, tensor_of(node).shape)
            if alike and isinstance(x, Node) and product_above(x) is not None:
                return x, other
        raise Refusal(f"{node.name} {'does not keep the shape of' if commutes else 'divides by'} the scores")

    def _added(self, node: Node) -> Node:
        x, mask = self._operands(node)
        if self.scalar(mask) == 0 and tensor_of(x).dtype == tensor_of(node).dtype:
            return x
        if not isinstance(mask, Node) or node.kwargs.get("alpha", 1) != 1:
            raise Refusal(f"{node.name} adds a number or a multiple of a tensor, and only a mask may be added")
        self.add(mask, 1.0, node)
        return x

    def _scaled(self, node: Node, name: str) -> Node:
        if node.kwargs.get("rounding_mode") is not None:
            raise Refusal(f"{node.name} rounds the scores")
        x, factor = self._operands(node, commutes=name == "mul")
        number, value = self.scalar(factor), example(factor)
        if number is not None:
            self.found.scale *= 1 / number if name == "div" and number else number
            if number <= 0 or not math.isfinite(number):
                raise Refusal(f"the scores are scaled by {number}")
        elif isinstance(factor, Node):
            if value is not None and value.dim() and str(value.shape[-1]) != "1":
                raise Refusal("the scale differs from key to key")
            if value is not None and value.dim() and value.dtype != tensor_of(x).dtype:
                raise Refusal("the scale has another dtype than the scores")
            self.found.factors.append((name, factor))
        else:
            raise Refusal(f"{node.name} scales by {factor}")
        return x

    def add(self, mask: Node, times: float, node: Node) -> None:
        """Note that `node` adds `times · mask` to the scores; `self.found.scale` later multiplies the sum."""
        self.found.masks.append(Added(mask, times * self.found.scale, self._masked_at(node)))

    def _filled(self, node: Node) -> Node:
        mask, value, x = where_arguments(node)
        inverted = isinstance(value, Node) and self.scalar(value) is None
        x, value = (value, x) if inverted else (x, value)
        number = self.scalar(value)
        if not isinstance(x, Node) or not isinstance(mask, Node) or number is None:
            raise Refusal(f"{node.name} fills with something other than a known number")
        if not same_shape(tensor_of(x).shape, tensor_of(node).shape):
            raise Refusal(f"{node.name} does not keep the shape of the scores")
        number *= self.found.scale
        lowest = torch.finfo(tensor_of(node).dtype).min
        if not (number <= NEGLIGIBLE or number <= lowest * self.found.scale):
            raise Refusal(f"scores filled with {number:g} keep some weight")
        self.found.masks.append(Filled(mask, inverted, number, self._masked_at(node)))
        return x

    def _masked_at(self, node: Node) -> Shape:
        if self.found.factors or self.found.softcap:
            raise Refusal("a tensor scales the scores, or tanh caps them, after they were masked")
        lead: Shape = tuple(tensor_of(node).shape[:-2])
        # Keep the shape with more axes: [images, windows, heads] rather than [images · windows, heads].
        if self.lead is None or len(lead) > len(self.lead):
            self.lead = lead
        return lead


def _below(attention: Attention) -> None:
    """Walk from the softmax down to the product with v."""
    node = attention.softmax.result
    while True:
        users = [user for user in node.users if user.users or user.op == "output" or mutates(user)]
        if len(users) != 1:
            others = ["the caller" if user.op == "output" else user.name for user in users]
            readers = " and ".join(others[:3]) or f"nobody but {node.name}"
            raise Refusal(f"the weights are used by {readers}: all N² of them must be written")
        user = users[0]
        name = canonical_name(user)
        if name in PRODUCTS:
            break
        if mutates(user):
            raise Refusal(f"{user.name} writes in place between the softmax and the second product")
        if name == "dropout":
            if is_active(user):
                raise Refusal("dropout on the weights: eager's mask has N² elements, fused attention draws another")
        elif name in ("cast", "contiguous", "view", "unsqueeze", "squeeze"):
            keep_scores(user, node)
        else:
            raise Refusal(f"{name or user.name} between the softmax and the second product")
        attention.replaced.append(user)
        node = user
    weighted = weighted_at(user, node)
    lead = tensor_of(node).shape[:-2]
    if canonical_name(user) != "einsum" and not same_shape(lead, tensor_of(user).shape[:-2]):
        raise Refusal("the second product broadcasts the weights")
    attention.result, attention.v, attention.order = user, weighted.v, weighted.order
    attention.weights_lead = tuple(lead)


def keep_scores(node: Node, x: Node) -> None:
    """Refuse a view or cast of N² values that changes more than their leading axes or their precision."""
    before, after = tensor_of(x), tensor_of(node)
    if len(after.shape) < 2 or not same_shape(before.shape[-2:], after.shape[-2:]):
        raise Refusal(f"{node.name} reshapes the two axes of the scores")
    if not same_shape(before.shape, after.shape) and not static(after.shape):
        raise Refusal(f"{node.name} reshapes scores whose sizes are dynamic")
    if after.dtype not in FLOATS or before.device != after.device:
        raise Refusal(f"{node.name} moves or converts the scores to {after.dtype}")


def is_active(dropout: Node) -> bool:
    """Whether a dropout draws. torch.dropout and F.dropout name the flag differently, with different defaults."""
    p = argument(dropout, 1, "p", 0.5)
    training = argument(dropout, 2, "training", dropout.kwargs.get("train", True))
    return bool(p != 0 and training)


def _fold_query_and_key(attention: Attention, scalar: Scalar) -> None:
    """Fold constant scales and transposes of q and k, and their widening casts if v has the narrower dtype."""
    wanted = tensor_of(attention.result).dtype
    if wanted not in FLOATS or tensor_of(attention.scores).dtype not in FLOATS:
        raise Refusal(f"attention in {wanted}")
    narrow = tensor_of(attention.scores).dtype != wanted

    def fold(operand: Operand) -> Operand:
        if operand.order is not None:
            return operand
        node = operand.node
        while True:
            x, factor = scaled_by(node, scalar) or (argument(node, 0, "input"), 0.0)
            value = example(x)
            if not isinstance(x, Node) or value is None:
                return Operand(node)
            alike = same_shape(value.shape, tensor_of(node).shape)
            if factor > 0 and alike and value.dtype == tensor_of(node).dtype:
                attention.scale *= factor
            elif not (narrow and canonical_name(node) == "cast" and _widens(wanted, value, node)):
                return Operand(node)
            attention.folded.append(node)
            node = x

    attention.q, attention.k = fold(attention.q), fold(attention.k)
    k = attention.k.node
    if attention.k_transposed and _swaps_last_axes(k):
        attention.folded.append(k)
        source = k.args[0]
        assert isinstance(source, Node)
        attention.k, attention.k_transposed = fold(Operand(source)), False
    if narrow and any(tensor_of(x.node).dtype != wanted for x in (attention.q, attention.k)):
        raise Refusal(f"scores in {tensor_of(attention.scores).dtype}, but weights times v in {wanted}")
    if not (attention.scale > 0 and math.isfinite(attention.scale)):
        raise Refusal(f"the scores are scaled by {attention.scale}")


def _widens(wanted: torch.dtype, x: torch.Tensor, node: Node) -> bool:
    """Whether `node` widens `x`, which has the dtype `wanted`."""
    wide = tensor_of(node).dtype
    return x.dtype == wanted and torch.promote_types(wanted, wide) == wide


def _swaps_last_axes(node: Node) -> bool:
    value, source = example(node), example(argument(node, 0, "input"))
    if value is None or source is None or canonical_name(node) not in ("transpose", "permute", "t", "getattr"):
        return False
    lies, swapped = (value.shape, value.stride()), source.transpose(-2, -1) if source.dim() > 1 else source
    return all(map(same_shape, lies, (swapped.shape, swapped.stride())))


def product_above(node: Node) -> Node | None:
    """The first matrix product reached from `node` (itself included) through nodes of its own size."""
    if canonical_name(node) in PRODUCTS:
        return node
    return _product(node, lambda x: x.all_input_nodes, of_one_size=True)


def product_below(node: Node) -> Node | None:
    """The first matrix product that reads `node`, directly or through nodes of its own size."""
    return _product(node, lambda x: list(x.users), of_one_size=False)


def _product(start: Node, neighbours: Callable[[Node], list[Node]], *, of_one_size: bool) -> Node | None:
    value = example(start)
    if value is None:
        return None
    size, pending, seen = str(value.numel()), [start], {start}
    while pending and len(seen) < 64:
        for near in neighbours(pending.pop(0)):
            value = example(near)
            alike = value is not None and str(value.numel()) == size
            if canonical_name(near) in PRODUCTS and (alike or not of_one_size):
                return near
            if near not in seen and alike:
                seen.add(near)
                pending.append(near)
    return None
