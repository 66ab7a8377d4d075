"""The choice of the implementation that computes a call of attention, and the layout of its results."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilewright.hardware.architectures import DeviceLimits, limits_of
from tilewright.kernels.attention.request import DIVISIBILITY, MIN_SCALAR_WIDTH, Request, Strides, TensorLike
from tilewright.kernels.dropout_add import generator
from tilewright.records.recipe import dense_strides

FORWARDS = ("decode.triton", "hopper.forward", "portable.launch")
BACKWARDS = ("hopper.backward", "portable.launch")
"""Modules with `supports`; the first that supports a call takes it (`recipe.py`)."""
IMPLEMENTATIONS = {
    "auto": (FORWARDS, BACKWARDS),
    "triton": (FORWARDS[-1:], BACKWARDS[-1:]),
    "decode": (FORWARDS[:1], BACKWARDS[-1:]),
    "hopper": (FORWARDS[1:2], BACKWARDS[:1]),
}


class Choice(NamedTuple):
    """The implementation of a call, and why earlier ones do not support the call."""

    module: Any
    refused: tuple[str, ...]
    """The modules tried before, each with its reason: `hopper.forward: needs …`."""


def select(request: Request, impl: str, backward: bool) -> Any:
    """The module that computes `request`, of `IMPLEMENTATIONS[impl]`; NotImplementedError says why there is none."""
    return choose(request, limits_of(request.device), impl, backward).module


@functools.lru_cache(maxsize=4096)
def choose(request: Request, limits: DeviceLimits, impl: str, backward: bool) -> Choice:
    """`select` for a device with these limits, with its reasons."""
    refused: list[str] = []
    names = IMPLEMENTATIONS[impl][backward]
    if backward and request.is_short:
        # Only the portable kernels are exact where one weight is nearly one.
        names = names[-1:]
    for name in names:
        module = importlib.import_module(f"tilewright.kernels.attention.{name}")
        reason = module.supports(request, limits)
        if reason is None:
            return Choice(module, tuple(refused))
        refused.append(f"{name}: {reason}")
    raise NotImplementedError(f"no attention kernel takes this call ({'; '.join(refused)})")


def must_be_dense(dout: TensorLike) -> bool:
    """Whether the kernels need a dense copy of a gradient.

    The gradient of a sum has strides of 0, which TMA does not take; narrow rows must be loaded as vectors.
    """
    batch, head, place, _ = dout.stride()
    return 0 in (batch, head, place) or (dout.shape[3] < MIN_SCALAR_WIDTH and (batch | head | place) % DIVISIBILITY > 0)


def draw_dropout_state(request: Request, q: torch.Tensor) -> torch.Tensor:
    """Seed and offset of a call's dropout mask, int64[2], where no recipe draws them.

    In a CUDA graph that is being captured, the default generator of q's device advances in each replay. On the CPU,
    where the kernels are interpreted, the generator draws a seed.
    """
    if q.device.type == "cuda":
        return generator.take_captured(q.device, advance_of(request))
    state = torch.randint(2**63 - 1, (2,))
    state[1] = 0
    return state


def advance_of(request: Request) -> int:
    """The advance of the generator's offset for a call's dropout mask on a GPU.

    Every row of scores is a subsequence of its own and takes ⌈keys / 4⌉ calls of Philox.
    """
    return 4 * -(-request.keys // 4)


def with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """x [B, H, S, D] with a contiguous last axis and rows that begin at multiples of 16 bytes: x itself or a copy.

    A copy keeps the order of axes.
    """
    if has_aligned_rows(x):
        return x
    shape, strides = padded_like(x)
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)[..., : x.shape[3]].copy_(x)


def has_aligned_rows(x: TensorLike) -> bool:
    """Whether the last axis is contiguous and rows begin at multiples of 16 bytes."""
    return x.stride(3) == 1 and aligned(x)


def padded_like(x: TensorLike) -> tuple[Sequence[int], Strides]:
    """Shape and strides of x with rows padded to multiples of 16 bytes, dense in x's order of axes."""
    step = 16 // x.element_size()
    return strides_like(x, -(-x.shape[3] // step) * step)


def aligned(*tensors: TensorLike) -> bool:
    """Whether addresses and strides are multiples of 16 bytes; strides of axes of one do not count."""
    for tensor in tensors:
        step = 16 // tensor.element_size()
        batch, head, place, _ = tensor.stride()
        if (batch | head | place) % step:
            sizes = zip((batch, head, place), tensor.shape, strict=False)
            if any(stride % step for stride, size in sizes if size > 1):
                return False
        if tensor.data_ptr() % 16:
            return False
    return True


def empty_gradient(x: torch.Tensor) -> torch.Tensor:
    """Memory for the gradient of x [B, H, S, D]: dense, its last axis contiguous, in x's order of axes.

    The strides are the same for a copy with aligned rows, for which a compiled graph may have been traced.
    """
    *steps, last = x.stride()
    # empty_like may make another axis of stride 1 the innermost, as in windows of one row.
    if last == 1 and 0 not in steps and 1 not in steps:
        return torch.empty_like(x)
    return torch.empty_strided(*strides_like(x, x.shape[3]), dtype=x.dtype, device=x.device)


def strides_like(x: TensorLike, width: int) -> tuple[Sequence[int], Strides]:
    """Shape and strides of a dense [B, H, S, width] in x's order of axes."""
    shape, steps = (*x.shape[:3], width), x.stride()
    order = sorted(range(3), key=lambda axis: (-steps[axis], axis))
    return shape, dense_strides(shape, (*order, 3))  # type: ignore[return-value]
