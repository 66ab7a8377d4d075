"""The masks of a written-out attention: none, causal, a band, or tensors, which are written for the fused form.

`mask_parts` reads masks that the graph builds from constants (`torch.ones(N, N).tril()`, comparisons of `arange`).
Masks that are inputs or buffers may change and are passed on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from math import prod

import torch
from torch.fx import Node

from tilewright.graph.canonical import same_shape, static, tensor_of
from tilewright.graph.constants import Constants, without_repeats
from tilewright.graph.insert import Writer
from tilewright.hardware.target import Language
from tilewright.passes.attention.mask_parts import (
    ALL,
    EVERYWHERE,
    Band,
    MaskParts,
    bias_terms,
    combined,
    conjunction,
    negation,
)
from tilewright.passes.attention.match import NEGLIGIBLE, Added, Attention, Filled, Shape
from tilewright.pytorch.state import in_real_tensors
from tilewright.records.errors import Refusal

ABSORBING = -1e17
"""Adding a mask value below this to an ordinary score loses the score, even in float64."""
BOUND = 32.0
"""Row maxima of a mask up to this cost the log-sum-exp no precision."""
BOUND_NARROW = 2048.0
"""As `BOUND` for 16-bit weights: the fp32 log-sum-exp is then off by 2⁻¹⁴, an eighth of such a weight's rounding."""


@dataclass(frozen=True)
class Masking:
    """How the fused form masks: `is_causal`, a band, tensors, or not at all."""

    causal: bool = False
    band: Band = EVERYWHERE
    """The whole mask, if it is a band; `causal` is set, too, if PyTorch's kernels can compute it."""
    nan_keys_leak: bool = False
    """Causal by addition: NaN + -inf is NaN, so in eager a NaN key reaches rows that mask it."""
    masks: tuple[Added | Filled, ...] = ()
    """The masks that are tensors, the last that the program applies first; none where a band is the whole mask."""
    in_order: bool = False
    """Whether the masks must be applied in program order, because a row may lose all keys in several ways."""
    is_bounded: bool = True
    """Whether the added masks are known to leave every row a key with a small mask value (`BOUND`)."""
    some_row_dropped: bool = False
    """Whether the fills may leave a row without any key."""

    @property
    def added(self) -> list[Added]:
        return [term for term in self.masks if isinstance(term, Added)]

    @property
    def filled(self) -> list[Filled]:
        return [term for term in self.masks if isinstance(term, Filled)]


@in_real_tensors()
def classify_masks(attention: Attention, constants: Constants) -> Masking:
    """The masks of an attention in a form that fused attention supports. Raises Refusal."""
    queries, keys = tensor_of(attention.scores).shape[-2:]
    masking = Masking(masks=tuple(attention.masks))
    filled = _all(_unfilled(fill, constants) for fill in masking.filled)
    found = _all([filled, *(_added(term, constants) for term in masking.added)])
    band = None if found.conditions or found.biases else found.band(queries, keys)
    if band == EVERYWHERE:
        return Masking()
    if band == Band(None, 0) and same_shape((queries,), (keys,)):
        return Masking(causal=True, band=band, nan_keys_leak=bool(masking.added))
    sinks = attention.softmax.sink is not None
    if band is not None and (sinks or (attention.softcap and found.leaves_a_key(queries, keys))):
        return Masking(band=band)
    if sinks:
        # A query without any key gives all its weight to the sink: its result is zeros, also in fused attention.
        return masking
    fills = {fill.value for fill in masking.filled}
    bounded = not masking.added or _is_bounded(attention, masking, filled, constants)
    leaves_keys = not filled.conditions and filled.leaves_a_key(queries, keys)
    several = fills and (masking.added or len(fills) > 1)
    in_order = bool(several and not (leaves_keys and bounded) and fills != {-math.inf})
    if in_order and max(fills) > ABSORBING:
        raise Refusal("masks that drop keys in different ways: a row without any key left has no fused form")
    return replace(masking, in_order=in_order, is_bounded=bounded and not in_order, some_row_dropped=not leaves_keys)


def _all(parts: Iterable[MaskParts]) -> MaskParts:
    return reduce(combined, parts, MaskParts(ALL))


def _added(term: Added, constants: Constants) -> MaskParts:
    hides = NEGLIGIBLE / term.times if term.times > 0 else None
    return MaskParts(ALL, biases=(term.mask,)) if hides is None else bias_terms(term.mask, constants, hides)


def _unfilled(fill: Filled, constants: Constants) -> MaskParts:
    """The keys that a fill leaves visible."""
    if fill.inverted:
        return conjunction(fill.mask, constants)
    return negation(fill.mask, constants) or MaskParts(ALL, conditions=(fill.mask,))


def _is_bounded(attention: Attention, masking: Masking, filled: MaskParts, constants: Constants) -> bool:
    """Whether the added masks are constants that leave every row a key with a small mask value."""
    narrow = tensor_of(attention.result).itemsize == 2
    if filled.conditions or filled.symbolic_band != EVERYWHERE:
        return False
    most, hidden = 0.0, ~filled.constant if not filled.constant.all() else torch.zeros((), dtype=torch.bool)
    for term in masking.added:
        value = constants.value(term.mask)
        if value is None:
            return False
        value = without_repeats(value).float() * term.times
        shown = value > NEGLIGIBLE
        most += float(value[shown].abs().amax()) if shown.any() else math.inf
        if not shown.all():
            if hidden.dim():
                return False
            hidden = ~shown
    leaves_a_key = not bool(hidden.all(-1).any()) if hidden.dim() else True
    return leaves_a_key and most <= (BOUND_NARROW if narrow else BOUND)


def at_lead(write: Writer, mask: Node, own: Shape, lead: Shape) -> Node:
    """A mask for scores [*own, Nq, Nk] as a mask for the same scores viewed as [*lead, Nq, Nk].

    `lead` splits axes of `own`: a mask [B H, 1, Nk] becomes [B, H, 1, Nk].
    """
    if same_shape(own, lead):
        return mask
    if not static((*own, *lead)) or prod(own) != prod(lead):
        raise Refusal("masks are applied to scores of different shapes")
    for _ in range(len(own) + 2 - tensor_of(mask).dim()):
        mask = write.method("unsqueeze", mask, 0)
    sizes, rest = list[int](), list(map(int, lead))
    for size, held in zip(own, tensor_of(mask).shape, strict=False):
        parts: list[int] = []
        while prod(parts) < size:
            parts.append(rest.pop(0))
        if prod(parts) != size:
            raise Refusal("masks are applied to scores of different shapes")
        sizes += parts if held == size else [1] * len(parts)
    sizes += rest  # ones
    return write.method("reshape", mask, *sizes, *tensor_of(mask).shape[-2:])


def _of_scores(write: Writer, term: Added | Filled, lead: Shape) -> Node:
    """The mask of a term for scores [*lead, Nq, Nk], of 2 or 4 axes."""
    mask = at_lead(write, term.mask, term.lead, lead)
    axes = tensor_of(mask).dim()
    if axes == 1:
        return write.method("unsqueeze", mask, 0)
    return write.method("unsqueeze", mask, 1 if len(lead) == 1 else 0) if axes == 3 else mask


def dropped_keys(write: Writer, masking: Masking, lead: Shape) -> Node | None:
    """True where a fill masks a key, [Nq, Nk] or [B, H, Nq, Nk]; None without fills."""

    def masks() -> Iterator[Node]:
        for filled in masking.filled:
            mask = _of_scores(write, filled, lead)
            yield write.call(torch.logical_not, mask) if filled.inverted else mask

    return write.joined(torch.logical_or, masks()) if masking.filled else None


def added_mask(write: Writer, masking: Masking, dropped: Node | None, lead: Shape, language: Language) -> Node:
    """The mask to add, [Nq, Nk] or [B, H, Nq, Nk].

    It is fp32 or wider. A plain sum for a GPU keeps its dtype: it is rounded once to the kernels' dtype, and
    `mask_parts` can read it later.
    """
    dtypes = {tensor_of(term.mask).dtype for term in masking.added}
    is_sum = masking.is_bounded and len(dtypes) == 1 and all(term.times == 1 for term in masking.added)
    as_given = is_sum and language != "c++"

    def masks() -> Iterator[Node]:
        for term in masking.added:
            mask = _of_scores(write, term, lead)
            wide = torch.promote_types(tensor_of(mask).dtype, torch.float32)
            yield multiplied(write, mask if as_given else write.cast(mask, wide), term.times)

    added = write.joined(torch.add, masks())
    return added if dropped is None else write.method("masked_fill", added, dropped, -math.inf)


def mask_in_order(write: Writer, masking: Masking, lead: Shape) -> Node:
    """The result of all masks on scores of 0, in fp32 or wider, [Nq, Nk] or [B, H, Nq, Nk], to add to the scores.

    Adding a fill value equals filling, since a score beside it is rounded away.
    """
    total: Node | float = 0.0
    for term in reversed(masking.masks):
        mask = _of_scores(write, term, lead)
        if isinstance(term, Added):
            mask = write.method("to", mask, torch.promote_types(tensor_of(mask).dtype, torch.float32))
            mask = multiplied(write, mask, term.times)
            total = mask if isinstance(total, float) else write.call(torch.add, total, mask)
        else:
            shown, hidden = (total, term.value) if not term.inverted else (term.value, total)
            total = write.call(torch.where, mask, hidden, shown)
    assert isinstance(total, Node)
    return total


def multiplied(write: Writer, mask: Node, times: float) -> Node:
    """`times · mask`."""
    return mask if times == 1 else write.call(torch.mul, mask, times)


def shifted(write: Writer, q: Node, mask: Node) -> tuple[Node, Node, Node]:
    """q, the mask minus its row maxima [..., Nq, 1] (softmax does not change), and those maxima.

    Backward recomputes weights as exp(s + mask - lse). In a row masked by -1e9 throughout, lse would round to -1e9 and
    every weight to 1. If adding the maximum would round the scores away even in float64, the weights depend on the mask
    alone: q becomes 0.
    """
    top = write.method("amax", write.method("detach", mask), -1, keepdim=True)
    absorbed = write.call(torch.logical_and, write.call(torch.le, top, ABSORBING), write.call(torch.isfinite, top))
    return write.call(torch.where, absorbed, 0.0, q), write.call(torch.sub, mask, top), top
