"""Where a Triton kernel can run: on a CUDA device, or on the CPU under Triton's interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from tilewright.launch.builder import Operand
from tilewright.launch.triton import is_interpreted

NARROW = (torch.bfloat16, torch.float16)
DTYPES = (*NARROW, torch.float32)
"""Dtypes that the kernels take; they compute in fp32. float64 stays PyTorch's."""


interpreted = is_interpreted

_traced_for_gpu: ContextVar[bool] = ContextVar("_traced_for_gpu", default=False)


@contextlib.contextmanager
def traced_for_gpu(stands_for_gpu: bool) -> Iterator[None]:
    """In this block, set whether tensors on a CPU stand for tensors on a GPU while a program is captured.

    Two operators whose calls and results depend on the device read this, since the user's code calls them without a
    `Target`; code that plans the captured graph has one as an argument.
    """
    token = _traced_for_gpu.set(stands_for_gpu)
    try:
        yield
    finally:
        _traced_for_gpu.reset(token)


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """A floating x in the dtype of its sums."""
    return x if x.dtype == torch.float64 else x.float()


def runs_on_gpu(device: torch.device) -> bool:
    """Whether `device` is a GPU, or its tensors are traced as if it were."""
    return device.type == "cuda" or _traced_for_gpu.get()


def runs_triton(tensor: torch.Tensor | Operand) -> bool:
    """Whether a Triton kernel can run on `tensor`, by its dtype and device (a CPU under the interpreter)."""
    return tensor.dtype in DTYPES and (tensor.is_cuda or (tensor.device.type == "cpu" and interpreted()))


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts operands of a product on the device of `tensor`; None where it is off."""
    kind = tensor.device.type
    on = kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` cast as autocast casts an operand of a product: fp64 stays."""
    dtype = autocast_dtype(tensor)
    return tensor if dtype is None or tensor.dtype not in DTYPES else tensor.to(dtype)


def current(tensor: torch.Tensor | Operand) -> contextlib.AbstractContextManager[object]:
    """Makes the device of `tensor` the current one, which Triton launches on; free where it already is."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
