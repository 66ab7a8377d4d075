"""Chooses the fastest implementation of a product by a race on this device; the outcome is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from tilewright.launch.builder import Operand
from tilewright.launch.race_key import race_key
from tilewright.measure.timing.contest import contest
from tilewright.pytorch.state import in_real_tensors
from tilewright.records import outcomes
from tilewright.records.errors import warn_once
from tilewright.records.outcomes import Outcome

Impls = Mapping[str, Callable[..., object]]
Operands = Sequence[torch.Tensor | Operand | None]
MADE_FROM = ("kernels/linear",)


def fastest(operator: str, operands: Operands, impls: Impls) -> str:
    """The name of the fastest of `impls` for operands like these, the first of which are x [M, K] and weight [N, K].

    M is rounded up to a power of two. The first call with new sizes races the implementations on random tensors for
    half a second; later calls, in any process, look the outcome up. While a CUDA graph is being captured nothing can be
    measured, and new sizes get the first of `impls`.
    """
    x, weight = operands[:2]
    assert x is not None and weight is not None
    rows = 1 << (x.shape[0] - 1).bit_length()
    key = race_key((operator, *impls, str(rows), *map(str, weight.shape), str(x.dtype)), x.device, MADE_FROM)
    known = outcomes.lookup(key)
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            return next(iter(impls))
        try:
            known = _race(operands, impls)
        except torch.OutOfMemoryError:
            line = f"no memory to measure {tuple(x.shape)} by {tuple(weight.shape)}; it runs in one kernel"
            warn_once(f"{operator}: {line}")
            return next(iter(impls))
        outcomes.keep(key, known)
    return known.fastest


def _race(operands: Operands, impls: Impls) -> Outcome:
    device = next(x.device for x in operands if x is not None)
    with in_real_tensors(), torch.cuda.device(device), torch.no_grad():
        # Do not advance the default generator, from which the waiting call draws.
        own = torch.Generator(device).manual_seed(0)
        tensors = [
            None if x is None else torch.empty(x.shape, dtype=x.dtype, device=device).normal_(generator=own)
            for x in operands
        ]
        return contest({name: functools.partial(impl, *tensors) for name, impl in impls.items()}, device)
