"""Which calls the portable attention kernels take, and their tensors as Triton takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.hardware.architectures import DeviceLimits
from tilewright.kernels.attention.portable.plan import LaunchPlan
from tilewright.kernels.attention.request import Request, TensorLike

MOST_WIDTH = 256


def supports(request: Request, limits: DeviceLimits) -> str | None:
    """Why the portable kernels cannot take a call, or None."""
    if max(request.head_size, request.value_size) > MOST_WIDTH:
        return f"head sizes above {MOST_WIDTH}"
    return None


def with_descriptors(plan: LaunchPlan, tensors: Sequence[TensorLike | None]) -> list[Any]:
    """The tensors as the kernel takes them: descriptors where the plan has them."""
    arguments: list[Any] = list(tensors)
    for i, descriptor in enumerate(plan.descriptors):
        tensor = tensors[i]
        if descriptor is not None and tensor is not None:
            strides, rows, columns = descriptor
            arguments[i] = TensorDescriptor(tensor, list(tensor.shape), list(strides), [1, 1, rows, columns])
    return arguments
