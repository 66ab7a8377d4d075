"""Writes the mask tensors of a fused attention into a torch-level graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import prod

import torch
from torch.fx import Node

from tilewright.graph.canonical import same_shape, static
from tilewright.hardware.target import Language
from tilewright.passes.attention.mask import ABSORBING, Masking
from tilewright.passes.attention.match import Added, Filled, Shape
from tilewright.passes.attention.spelling import Refusal, tensor_of
from tilewright.passes.attention.writer import Writer


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
