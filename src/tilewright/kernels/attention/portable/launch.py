"""Launches of the portable attention kernels, on the current stream of the current device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.hardware.architectures import DeviceLimits, limits_of
from tilewright.kernels.attention.portable.plan import BackwardStrides, Plan, backward_plan, forward_plan
from tilewright.kernels.attention.request import Operands, Request, TensorLike, strides_of
from tilewright.kernels.device import interpreted

MOST_WIDTH = 256
ALIGNMENT = 16
_compiled: weakref.WeakKeyDictionary[Plan, Any] = weakref.WeakKeyDictionary()
"""Triton's kernel of each plan that was launched with aligned tensors."""


def supports(request: Request, limits: DeviceLimits) -> str | None:
    """Why the portable kernels cannot take a call, or None."""
    if max(request.head_size, request.value_size) > MOST_WIDTH:
        return f"head sizes above {MOST_WIDTH}"
    return None


def forward(
    request: Request, operands: Operands, out: torch.Tensor, lse: torch.Tensor, lse64: torch.Tensor | None = None
) -> None:
    """Fill `out`, `lse` and, for fp32, `lse64` [B, H, Sq], which the backward needs."""
    plan = forward_plan(request, limits_of(request.device), strides_of(out), strides_of(operands.mask))
    run(plan, *operands[:3], out, lse, lse64, *operands[3:])


def backward(
    request: Request, operands: Operands, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, lse64: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `dq`, `dk` and `dv` from the gradients of `out` and, if there is one, of `lse`."""
    strides = BackwardStrides(*map(strides_of, (out, dout, dq, dk, dv, operands.mask)))
    plan = backward_plan(request, limits_of(request.device), strides, lse64 is not None, dlse is not None)
    q, k, v, *rest = operands
    delta, row_lse = torch.empty_like(lse), torch.empty_like(lse) if lse64 is None else lse64
    if plan.prepare is not None:
        run(plan.prepare, out, dout, lse, dlse, delta, row_lse)
    run(plan.dq, q, k, v, dout, row_lse, delta, dlse if plan.computes_delta else None, dq, *rest)
    for launch in plan.dk_dv:
        run(launch, q, k, v, dout, row_lse, delta, dk, dv, *rest)


def run(plan: Plan, *tensors: torch.Tensor | None) -> None:
    """Launch a plan with its tensors."""
    aligned = all(t.data_ptr() % ALIGNMENT == 0 for t in tensors if t is not None)
    arguments = *with_descriptors(plan, tensors), *plan.scalars
    # Triton compiled for these scalars and for aligned pointers, so its checks can be left out.
    compiled = _compiled.get(plan) if aligned else None
    if compiled is not None:
        compiled[plan.grid, 1, 1](*arguments, *plan.constants.values())
        return
    compiled = plan.kernel[plan.grid,](*arguments, **plan.constants, num_warps=plan.warps, num_stages=plan.stages)
    if aligned and not interpreted():
        _compiled[plan] = compiled


def with_descriptors(plan: Plan, tensors: Sequence[TensorLike | None]) -> list[Any]:
    """The tensors as the kernel takes them: descriptors where the plan has them."""
    arguments: list[Any] = list(tensors)
    for i, descriptor in enumerate(plan.descriptors):
        tensor = tensors[i]
        if descriptor is not None and tensor is not None:
            strides, rows, columns = descriptor
            arguments[i] = TensorDescriptor(tensor, list(tensor.shape), list(strides), [1, 1, rows, columns])
    return arguments
