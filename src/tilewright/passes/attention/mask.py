"""Classifies the masks of one attention: none, causal, a band, or tensors that the fused form passes on.

`mask_parts` reads masks that the graph builds from constants (`torch.ones(N, N).tril()`, comparisons of `arange`).
Masks that are inputs or buffers may change and are passed on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

import torch

from tilewright.graph.canonical import same_shape
from tilewright.passes.attention.constants import Constants, without_repeats
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
from tilewright.passes.attention.match import NEGLIGIBLE, Added, Attention, Filled
from tilewright.passes.attention.spelling import Refusal, tensor_of
from tilewright.pytorch.state import in_real_tensors

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
    return (
        bias_terms(term.mask, constants, NEGLIGIBLE / term.times)
        if term.times > 0
        else MaskParts(ALL, biases=(term.mask,))
    )


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
