"""The fastest implementation of a product of some sizes on this device: raced once, the outcome kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from tilewright.graph.pytorch_state import in_real_tensors
from tilewright.kernels.linear import cuda
from tilewright.launch.builder import Operand
from tilewright.measure.timing.contest import contest
from tilewright.records import cache, outcomes
from tilewright.records.errors import warn_once
from tilewright.records.outcomes import Outcome

Impls = Mapping[str, Callable[..., object]]
Operands = Sequence[torch.Tensor | Operand | None]


def fastest(operator: str, operands: Operands, impls: Impls) -> str:
    """The fastest of `impls` for operands like these, x [M, K] and weight [N, K] first; the first of `impls` unless
    another clearly wins.

    M is rounded up to a power of two. What is asked first with new sizes waits for the device, which races the
    implementations on random tensors for half a second; later calls, in this process or another, look the outcome up.
    While a CUDA graph is being captured nothing can be measured: sizes that are not known take the first.
    """
    x, weight = operands[:2]
    assert x is not None and weight is not None
    rows = 1 << (x.shape[0] - 1).bit_length()
    sizes = (str(rows), *map(str, weight.shape), str(x.dtype), torch.cuda.get_device_name(x.device))
    key = cache.key_of(operator, *impls, *sizes, torch.__version__, _source())
    known = outcomes.kept(key)
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


@functools.cache
def _source() -> str:
    """Source of the kernels: an outcome holds for them alone."""
    return "".join(path.read_text() for path in sorted(cuda.SOURCE.parent.glob("*.cu*")))


def _race(operands: Operands, impls: Impls) -> Outcome:
    device = next(x.device for x in operands if x is not None)
    with in_real_tensors(), torch.cuda.device(device), torch.no_grad():
        # The call that is waiting draws from the default generator.
        own = torch.Generator(device).manual_seed(0)
        tensors = [
            None if x is None else torch.empty(x.shape, dtype=x.dtype, device=device).normal_(generator=own)
            for x in operands
        ]
        return contest({name: functools.partial(impl, *tensors) for name, impl in impls.items()}, device)
