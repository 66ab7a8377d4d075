"""What the masks of one attention amount to: nothing, exactly causal, or a mask that must be passed on.

A mask built in the graph from constants (`torch.ones(N, N).tril()`, comparisons of `arange`) is read by `visible`. A
mask that is an input or a buffer is not: it may change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

import torch

from tilewright.graph.pytorch_state import in_real_tensors
from tilewright.passes.attention.constants import Constants, once
from tilewright.passes.attention.match import NEGLIGIBLE, Added, Attention, Filled
from tilewright.passes.attention.spelling import Refusal, same_shape, tensor_of
from tilewright.passes.attention.visible import ALL, EVERYWHERE, Band, Visible, added, both, hidden, shown

ABSORBING = -1e17
"""A mask value below which a score of ordinary size is lost in the sum, even in float64."""
STEADY = 32.0
"""Masks whose row maxima stay within this do not cost the log-sum-exp its last bits."""
STEADY_NARROW = 2048.0
"""As `STEADY` for weights of 16 bits: the log-sum-exp, in fp32, is off by 2⁻¹⁴, an eighth of what rounding such a
weight costs."""


@dataclass(frozen=True)
class Masking:
    """How the fused form masks: `is_causal`, or the tensors it passes on, or neither."""

    causal: bool = False
    band: Band = EVERYWHERE
    """What hides keys, if nothing else does, for tilewright's own kernels; `causal` where PyTorch's take it, too."""
    leaks: bool = False
    """Causal by addition: NaN + -inf is NaN, so in eager a NaN key reaches rows that do not see it."""
    added: tuple[Added, ...] = ()
    filled: tuple[Filled, ...] = ()
    steady: bool = True
    """Whether what is added is known to leave every row a key, and that one near 0."""
    in_order: tuple[Added | Filled, ...] = ()
    """What `added` and `filled` have, from the first on, where a row may be left without a key in several ways."""
    some_row_dropped: bool = False
    """Whether `filled` may leave a row without any key."""

    @property
    def fill(self) -> float:
        return self.filled[0].value


@in_real_tensors()
def settle_masks(attention: Attention, constants: Constants) -> Masking:
    """The masks of an attention as one of the forms that fused attention knows."""
    queries, keys = tensor_of(attention.scores).shape[-2:]
    filled = _all(_unfilled(fill, constants) for fill in attention.filled)
    found = _all([filled, *(_added(term, constants) for term in attention.added)])
    band = None if found.kept or found.added else found.band(queries, keys)
    if band == EVERYWHERE:
        return Masking()
    if band == Band(None, 0) and same_shape((queries,), (keys,)):
        return Masking(causal=True, band=band, leaks=bool(attention.added))
    sinks = attention.softmax.sink is not None
    if band is not None and (sinks or (attention.softcap and found.leaves_a_key(queries, keys))):
        return Masking(band=band)
    if sinks:
        # A query that sees no key gives all its weight to the sink, and zeros, as it does fused.
        return Masking(added=tuple(attention.added), filled=tuple(attention.filled))
    several = attention.filled and (attention.added or len({fill.value for fill in attention.filled}) > 1)
    steady = not attention.added or _is_bounded(attention, filled, constants)
    leaves_keys = not filled.kept and filled.leaves_a_key(queries, keys)
    masking = Masking(
        added=tuple(attention.added), filled=tuple(attention.filled), steady=steady, some_row_dropped=not leaves_keys
    )
    if several and not (leaves_keys and steady) and {fill.value for fill in attention.filled} != {-math.inf}:
        if any(fill.value > ABSORBING for fill in attention.filled):
            raise Refusal("masks that drop keys in different ways: a row without any key left has no fused form")
        terms: list[Added | Filled] = [*attention.added, *attention.filled]
        terms.sort(key=lambda term: -term.later)
        return replace(masking, in_order=tuple(terms), steady=False)
    return masking


def _all(parts: Iterable[Visible]) -> Visible:
    return reduce(both, parts, Visible(ALL))


def _added(term: Added, constants: Constants) -> Visible:
    return added(term.mask, constants, NEGLIGIBLE / term.times) if term.times > 0 else Visible(ALL, added=(term.mask,))


def _unfilled(fill: Filled, constants: Constants) -> Visible:
    """The keys that are not filled over."""
    if fill.inverted:
        return shown(fill.mask, constants)
    return hidden(fill.mask, constants) or Visible(ALL, kept=(fill.mask,))


def _is_bounded(attention: Attention, filled: Visible, constants: Constants) -> bool:
    """Whether constants that are added, alike for every head or not, leave every row a key and keep it near 0."""
    narrow = tensor_of(attention.result).itemsize == 2
    if filled.kept or filled.places != EVERYWHERE:
        return False
    most, hidden = 0.0, ~filled.known if not filled.known.all() else torch.zeros((), dtype=torch.bool)
    for term in attention.added:
        value = constants.value(term.mask)
        if value is None:
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
