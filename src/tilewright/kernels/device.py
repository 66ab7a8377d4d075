"""Where a Triton kernel can run: on a CUDA device, or on the CPU under Triton's interpreter."""

from __future__ import annotations

import contextlib

import torch

from tilewright.launch.builder import Operand
from tilewright.launch.triton import is_interpreted

NARROW = (torch.bfloat16, torch.float16)
DTYPES = (*NARROW, torch.float32)
"""What the kernels compute on, in fp32; float64 stays PyTorch's."""


interpreted = is_interpreted


def runs_triton(tensor: torch.Tensor | Operand) -> bool:
    """Whether a Triton kernel takes `tensor`: its dtype, and its device or the interpreter."""
    return tensor.dtype in DTYPES and (tensor.is_cuda or (tensor.device.type == "cpu" and interpreted()))


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """What autocast takes floating-point operands of a product on the device of `tensor` in; None where it is off."""
    kind = tensor.device.type
    on = kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as autocast takes an operand of a product; fp64 stays, as it does there."""
    dtype = autocast_dtype(tensor)
    return tensor if dtype is None or tensor.dtype not in DTYPES else tensor.to(dtype)


def current(tensor: torch.Tensor | Operand) -> contextlib.AbstractContextManager[object]:
    """Makes the device of `tensor` the current one, which Triton launches on; free where it already is."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
