"""Which implementation computes a call of attention, and the memory of its results."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tilewright.hardware.architectures import DeviceLimits, limits_of
from tilewright.kernels.attention.request import DIVISIBILITY, MIN_SCALAR_WIDTH, Operands, Request, Strides, TensorLike
from tilewright.kernels.device import current
from tilewright.kernels.dropout_add import generator

FORWARDS = ("decode.cuda", "decode.triton", "hopper.forward", "portable.launch")
BACKWARDS = ("hopper.backward", "portable.launch")
"""Modules with `supports` and `forward` or `backward`; the first that supports a call takes it.

Where a module has `bound`, that gives the launch of all calls of a request whose result has certain strides."""
IMPLEMENTATIONS = {
    "auto": (FORWARDS, BACKWARDS),
    "triton": (FORWARDS[-1:], BACKWARDS[-1:]),
    "decode": (FORWARDS[1:2], BACKWARDS[-1:]),
    "hopper": (FORWARDS[2:3], BACKWARDS[:1]),
}


class Choice(NamedTuple):
    """The implementation that a call gets, and why."""

    module: Any
    refused: tuple[str, ...]
    """The modules that come before it, each with its reason: `hopper.forward: needs …`."""


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


def launch_of(request: Request, strides: Strides, impl: str) -> Callable[[Operands, torch.Tensor, torch.Tensor], None]:
    """The launch of every call of `request` into a result with these strides."""
    module = select(request, impl, False)
    if hasattr(module, "bound"):
        bound: Callable[[Operands, torch.Tensor, torch.Tensor], None] = module.bound(request, strides)
        return bound
    return functools.partial(module.forward, request)


def forward(request: Request, operands: Operands, impl: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """out [B, H, Sq, Dv] in q's order of axes, lse fp32 [B, H, Sq] and, for fp32, lse64, which the backward takes.

    lse64 is lse in fp64, +inf for a query that sees no key.
    """
    q, v = operands.q, operands.v
    out = torch.empty_strided(*strides_like(q, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    lse64 = torch.empty(q.shape[:3], dtype=torch.float64, device=q.device) if q.dtype == torch.float32 else None
    if 0 in (*q.shape, *operands.k.shape[:3], v.shape[3]):
        return out.zero_(), lse.fill_(-torch.inf if operands.k.shape[2] == 0 else 0.0), lse64
    with current(q):
        run = select(request, impl, False).forward
        if lse64 is None:
            run(request, operands, out, lse)
        else:
            run(request, operands, out, lse, lse64)
    return out, lse, lse64


def backward(
    request: Request,
    operands: Operands,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    lse64: torch.Tensor | None,
    dlse: torch.Tensor | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, in the order of axes of q, k and v."""
    q, k, v = operands[:3]
    dq, dk, dv = empty_gradient(q), empty_gradient(k), empty_gradient(v)
    if 0 in (*out.shape, *k.shape):
        return dq.zero_(), dk.zero_(), dv.zero_()
    if must_be_dense(dout):
        dout = dout.contiguous()
    dout = with_aligned_rows(dout)
    with current(q):
        if lse64 is None and dlse is None:
            select(request, impl, True).backward(request, operands, out, lse, dout, dq, dk, dv)
        else:
            from tilewright.kernels.attention.portable import launch as portable

            dlse = dlse if dlse is None else dlse.contiguous()
            portable.backward(request, operands, out, lse, dout, dq, dk, dv, lse64, dlse)
    if request.single_key and dlse is None:
        # The gradients of q and k are zero; what was computed is rounding, or NaN, which stays.
        for gradient in (dq, dk):
            gradient.mul_(0.0)
    return dq, dk, dv


def must_be_dense(dout: TensorLike) -> bool:
    """Whether kernels cannot read a gradient by its strides.

    The gradient of a sum has strides of 0, which TMA does not take; narrow rows must be loaded as vectors.
    """
    batch, head, place, _ = dout.stride()
    return 0 in (batch, head, place) or (dout.shape[3] < MIN_SCALAR_WIDTH and (batch | head | place) % DIVISIBILITY > 0)


def draw_dropout_state(request: Request, q: torch.Tensor) -> torch.Tensor:
    """Seed and offset of a call's dropout mask, int64[2]; the default generator of q's device advances.

    On a GPU every row of scores is a subsequence of its own and takes ⌈keys / 4⌉ calls of Philox, so the offset
    advances by four times that. On the CPU, where the kernels are interpreted, the generator draws a seed.
    """
    if q.device.type == "cpu":
        state = torch.randint(2**63 - 1, (2,))
        state[1] = 0
        return state
    advance = advance_of(request)
    if torch.cuda.is_current_stream_capturing():
        return generator.take_captured(q.device, advance)
    from tilewright.kernels.dropout_add.triton import remember

    state = torch.empty(2, dtype=torch.int64, device=q.device)
    with current(q):
        remember[(1,)](state, *generator.take(q.device, advance), num_warps=1)
    return state


def advance_of(request: Request) -> int:
    """By how much a call's dropout mask advances the generator's offset on a GPU."""
    return 4 * -(-request.keys // 4)


def with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """x [B, H, S, D] where its last axis is contiguous and its rows begin at multiples of 16 bytes; else such a copy.

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

    The strides are the same for a copy by `with_aligned_rows`, for which a compiled graph may have been traced.
    """
    *steps, last = x.stride()
    # empty_like may make another axis of stride 1 the innermost, as in windows of one row.
    if last == 1 and 0 not in steps and 1 not in steps:
        return torch.empty_like(x)
    return torch.empty_strided(*strides_like(x, x.shape[3]), dtype=x.dtype, device=x.device)


def strides_like(x: TensorLike, width: int) -> tuple[Sequence[int], Strides]:
    """Shape and strides of a dense [B, H, S, width] in x's order of axes."""
    shape = (*x.shape[:3], width)
    steps = x.stride()
    order = sorted(range(3), key=lambda axis: (-steps[axis], axis))
    strides, step = [0, 0, 0, 1], width
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return shape, tuple(strides)  # type: ignore[return-value]
