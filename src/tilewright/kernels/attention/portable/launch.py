"""Launches plans of the portable attention kernels; names the calls that they do not support."""

from __future__ import annotations

from typing import Any

from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.hardware.architectures import DeviceLimits
from tilewright.kernels.attention import dispatch
from tilewright.kernels.attention.portable.plan import LaunchPlan
from tilewright.kernels.attention.request import Request
from tilewright.launch.builder import Operand, RecipeBuilder

MOST_WIDTH = 256


def supports(request: Request, limits: DeviceLimits) -> str | None:
    """Why the portable kernels cannot take a call, or None."""
    if max(request.head_size, request.value_size) > MOST_WIDTH:
        return f"head sizes above {MOST_WIDTH}"
    return None


def with_aligned_rows(call: RecipeBuilder, x: Operand) -> Operand:
    """x, or a copy of it whose rows begin at multiples of 16 bytes, in x's order of axes."""
    return x if dispatch.has_aligned_rows(x) else call.copy(x, dispatch.padded_like(x)[1])


def launch(call: RecipeBuilder, plan: LaunchPlan, *tensors: Operand | None) -> None:
    """The launch of a plan, tensors as TMA descriptors where the plan has them."""
    arguments: list[Any] = list(tensors)
    for i, descriptor in enumerate(plan.descriptors):
        tensor = tensors[i]
        if descriptor is not None and tensor is not None:
            strides, rows, columns = descriptor
            arguments[i] = TensorDescriptor(tensor, list(tensor.shape), list(strides), [1, 1, rows, columns])
    options: dict[str, Any] = {**plan.constants, "num_warps": plan.warps, "num_stages": plan.stages}
    call.launch(plan.kernel, (plan.grid,), *arguments, *plan.scalars, **options)
