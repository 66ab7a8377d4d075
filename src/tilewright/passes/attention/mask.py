"""What the masks of one attention amount to: nothing, exactly causal, or a mask that must be passed on.

A mask built in the graph from constants (`torch.ones(N, N).tril()`, comparisons of `arange`) is
computed here and looked at. A mask that is an input or a buffer is not: it may change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilewright.passes.attention.constants import Constants, once
from tilewright.passes.attention.match import NEGLIGIBLE, Added, Attention, Filled
from tilewright.passes.attention.spelling import Refusal, static, tensor_of

MOST_ELEMENTS = 2**24
"""Masks of more scores are passed on, constant or not."""
STEADY = 32.0
"""Masks whose row maxima stay within this do not cost the log-sum-exp its last bits."""
STEADY_NARROW = 2048.0
"""As `STEADY` for weights of 16 bits: the log-sum-exp, in fp32, is off by 2⁻¹⁴, an eighth of what rounding such a
weight costs."""


@dataclass(frozen=True)
class Masking:
    """How the fused form masks: `is_causal`, or the tensors it passes on, or neither."""

    causal: bool = False
    leaks: bool = False
    """Causal by addition: NaN + -inf is NaN, so in eager a NaN key reaches rows that do not see it."""
    added: tuple[Added, ...] = ()
    filled: tuple[Filled, ...] = ()
    steady: bool = True
    """Whether what is added is known to leave every row a key, and that one near 0."""
    some_row_dropped: bool = False
    """Whether `filled` may leave a row without any key."""

    @property
    def fill(self) -> float:
        return self.filled[0].value


def settle_masks(attention: Attention, constants: Constants) -> Masking:
    """The masks of an attention as one of the forms that fused attention knows."""
    if not attention.added and not attention.filled:
        return Masking()
    steady, combined = not attention.added, _combined(attention, constants)
    if combined is not None:
        added, dropped = combined
        rows, columns = dropped.shape
        if not added[~dropped].any():
            if not dropped.any():
                return Masking()
            if rows == columns and torch.equal(dropped, torch.ones_like(dropped).triu(1)):
                return Masking(causal=True, leaks=bool(attention.added))
        steady = steady or bool((added.masked_fill(dropped, -math.inf).amax(-1).abs() <= STEADY).all())
    steady = steady or _is_bounded(attention, constants)
    fills = {filled.value for filled in attention.filled}
    if len(fills) > 1 or (fills and attention.added and fills != {-math.inf}):
        raise Refusal("masks that drop keys in different ways: a row without any key left has no fused form")
    return Masking(
        added=tuple(attention.added),
        filled=tuple(attention.filled),
        steady=steady,
        some_row_dropped=_may_drop_a_row(attention.filled, constants),
    )


def _dropped(filled: Filled, constants: Constants) -> torch.Tensor | None:
    value = constants.value(filled.mask)
    return value if value is None or not filled.inverted else ~value


def _may_drop_a_row(fills: list[Filled], constants: Constants) -> bool:
    masks = [_dropped(filled, constants) for filled in fills]
    known = [mask for mask in masks if mask is not None]
    if len(known) != len(masks):
        return bool(masks)
    dropped = known[0] if known else torch.zeros(1, dtype=torch.bool)
    for mask in known[1:]:
        dropped = dropped | mask
    return bool(dropped.all(-1).any())


def _combined(attention: Attention, constants: Constants) -> tuple[torch.Tensor, torch.Tensor] | None:
    """All masks as (added [Nq, Nk], dropped [Nq, Nk]), if all are constant and alike for every head."""
    shape = tensor_of(attention.scores).shape[-2:]
    if not static(shape) or shape.numel() > MOST_ELEMENTS:
        return None
    added, dropped = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for term in attention.added:
        value = constants.value(term.mask)
        if value is None or not _is_one_matrix(value):
            return None
        value = value.reshape(value.shape[-2:]).float() * term.times
        added = added + value
        dropped = dropped | (value <= NEGLIGIBLE)
    for filled in attention.filled:
        mask = _dropped(filled, constants)
        if mask is None or not _is_one_matrix(mask):
            return None
        dropped = dropped | mask.reshape(mask.shape[-2:])
    return added, dropped


def _is_bounded(attention: Attention, constants: Constants) -> bool:
    """Whether constants that are added, alike for every head or not, leave every row a key and keep it near 0."""
    narrow = tensor_of(attention.result).itemsize == 2
    most, hidden = 0.0, torch.zeros((), dtype=torch.bool)
    for term in attention.added:
        value = constants.value(term.mask)
        if value is None or attention.filled:
            return False
        value = once(value).float() * term.times
        shown = value > NEGLIGIBLE
        most += float(value[shown].abs().amax()) if shown.any() else math.inf
        if not shown.all():
            if hidden.dim():
                return False
            hidden = ~shown
    leaves_a_key = not bool(hidden.all(-1).any()) if hidden.dim() else True
    return leaves_a_key and most <= (STEADY_NARROW if narrow else STEADY)


def _is_one_matrix(value: torch.Tensor) -> bool:
    return all(size == 1 for size in value.shape[:-2])
