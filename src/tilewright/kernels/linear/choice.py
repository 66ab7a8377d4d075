"""Chooses the fastest implementation of a product by a race on this device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from tilewright.launch.builder import Operand
from tilewright.launch.race import Alternatives, Race, random_operand
from tilewright.records.recipe import dense_strides

Impls = Mapping[str, Callable[..., object]]
Operands = Sequence[torch.Tensor | Operand | None]
MADE_FROM = ("kernels/linear",)


def fastest(operator: str, operands: Operands, impls: Impls) -> str:
    """The name of the fastest of `impls` for operands like these, the first of which are x [M, K] and weight [N, K].

    M is rounded up to a power of two. The first call with new sizes races the implementations on random tensors for
    half a second. Where nothing can be measured, new sizes get the first of `impls`.
    """
    x, weight = operands[:2]
    assert x is not None and weight is not None
    rows = 1 << (x.shape[0] - 1).bit_length()
    work = (operator, *impls, str(rows), *map(str, weight.shape), str(x.dtype))
    outcome = Race(work, x.device, MADE_FROM, functools.partial(_alternatives, operands, impls)).outcome()
    return next(iter(impls)) if outcome is None else outcome.fastest


def _alternatives(operands: Operands, impls: Impls) -> Alternatives:
    own = torch.Generator(next(x.device for x in operands if x is not None)).manual_seed(0)
    tensors = [None if x is None else random_operand(x.shape, dense_strides(x.shape), x.dtype, own) for x in operands]
    return {name: functools.partial(impl, *tensors) for name, impl in impls.items()}
