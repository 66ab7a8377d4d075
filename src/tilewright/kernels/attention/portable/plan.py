"""Plans of the portable kernels: launches as plain data, decided from a request and a device's limits alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from tilewright.hardware.architectures import DeviceLimits
from tilewright.kernels.attention.portable.backward import backward_dk_dv, backward_prepare
from tilewright.kernels.attention.portable.backward_dq import backward_dq
from tilewright.kernels.attention.portable.blocks import (
    DK_ALONE,
    DK_DV,
    DK_DV_MORE_REGISTERS,
    DQ,
    DV_ALONE,
    FORWARD,
    Blocks,
    blocks_of,
    padded_widths,
    shapes_of,
    uses_tma,
)
from tilewright.kernels.attention.portable.forward import forward
from tilewright.kernels.attention.request import Request, Strides
from tilewright.kernels.dropout_add import generator

LOG2E = math.log2(math.e)
PREPARED_ROWS = 64


class Descriptor(NamedTuple):
    """A tensor descriptor (TMA) of [batch, head, position, column] without its tensor."""

    strides: tuple[int, ...]
    rows: int
    columns: int


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """One launch without its tensors. Arguments: the tensors, `scalars`, then `constants`."""

    kernel: Any
    grid: int
    scalars: Sequence[float]
    constants: dict[str, Any]
    warps: int
    stages: int
    descriptors: Sequence[Descriptor | None] = ()
    """TMA descriptors of the first tensors; None, and all further ones: the kernel takes a pointer."""


@functools.lru_cache(maxsize=1024)
def forward_plan(request: Request, limits: DeviceLimits, out: Strides, mask: Strides) -> LaunchPlan:
    """Tensors: q, k, v, out, lse, lse64, mask, slopes, starts_q, starts_k, state."""
    widths = padded_widths(request, limits)
    blocks = blocks_of(request, limits, FORWARD, "keys", widths[:1])
    steps = triton.cdiv(request.longest_q or request.queries, blocks.queries)
    descriptors = descriptors_of(request, limits, (blocks.queries, blocks.keys, blocks.keys), widths)
    factor, softcap = factors_of(request)
    scalars = (
        *sizes_of(request, steps), *request.q_strides[:3], *request.k_strides[:3], *request.v_strides[:3], *out[:3],
        *mask, abs(factor), softcap, *band_of(request), generator.threshold(request.dropout),
        generator.scale(request.dropout),
    )  # fmt: skip
    constants = {"NEGATED": factor < 0.0, **constants_of(request, blocks, widths, bool(descriptors))}
    grid = steps * sequences_of(request) * request.heads
    return LaunchPlan(forward, grid, scalars, constants, blocks.warps, blocks.stages, descriptors)


class BackwardPlan(NamedTuple):
    """The launches of a backward, in order."""

    prepare: LaunchPlan | None
    """Tensors: out, dout, lse, dlse, delta, row_lse. None where `dq` computes delta itself."""
    dq: LaunchPlan
    """Tensors: q, k, v, dout, row_lse, delta, dlse, dq, mask, slopes, starts_q, starts_k, state."""
    dk_dv: Sequence[LaunchPlan]
    """Tensors: q, k, v, dout, row_lse, delta, dk, dv, mask, slopes, starts_q, starts_k, state."""
    computes_delta: bool
    """Whether the launch for dq sums delta from P ∘ dP, in a further pass over the keys."""


class BackwardStrides(NamedTuple):
    """Strides of the tensors that a request does not describe."""

    out: Strides
    dout: Strides
    dq: Strides
    dk: Strides
    dv: Strides
    mask: Strides


@functools.lru_cache(maxsize=1024)
def backward_plan(
    request: Request, limits: DeviceLimits, strides: BackwardStrides, exact: bool, with_dlse: bool
) -> BackwardPlan:
    """`exact`: the forward left lse in fp64. `with_dlse` tells plans apart: Triton compiles for an absent tensor."""
    computes_delta = exact or request.is_short
    return BackwardPlan(
        None if exact else _prepare_plan(request, limits, strides),
        _dq_plan(request, limits, strides, computes_delta),
        _dk_dv_plans(request, limits, strides),
        computes_delta,
    )


def _prepare_plan(request: Request, limits: DeviceLimits, strides: BackwardStrides) -> LaunchPlan:
    scalars = (request.heads, request.queries, request.value_size, *strides.out[:3], *strides.dout[:3])
    constants = {"ROWS": PREPARED_ROWS, "VALUE_WIDTH": padded_widths(request, limits)[1]}
    grid = triton.cdiv(request.queries, PREPARED_ROWS) * request.batch * request.heads
    return LaunchPlan(backward_prepare, grid, scalars, constants, warps=4, stages=1)


def _dq_plan(request: Request, limits: DeviceLimits, strides: BackwardStrides, computes_delta: bool) -> LaunchPlan:
    blocks = blocks_of(request, limits, DQ, "keys", padded_widths(request, limits))
    steps = triton.cdiv(request.longest_q or request.queries, blocks.queries)
    gradients = (*strides.dout[:3], *strides.dq[:3])
    more = {"COMPUTES_DELTA": computes_delta}
    return _backward_launch(request, limits, backward_dq, blocks, steps, request.heads, gradients, strides.mask, more)


def _dk_dv_plans(request: Request, limits: DeviceLimits, strides: BackwardStrides) -> list[LaunchPlan]:
    gradients = (*strides.dout[:3], *strides.dk[:3], *strides.dv[:3])
    full_precision = request.dtype == torch.float32 and not request.tf32
    widths = padded_widths(request, limits)
    more_registers = request.mask != "none" or request.softcap or request.alibi or request.dropout
    if full_precision or max(widths) <= max(DK_DV):
        table = DK_DV_MORE_REGISTERS if more_registers or not uses_tma(request, limits) else DK_DV
        tables = [(table, {"DK": True, "DV": True})]
    else:
        tables = [(DV_ALONE, {"DK": False, "DV": True}), (DK_ALONE, {"DK": True, "DV": False})]
    plans = []
    for table, more in tables:
        blocks = blocks_of(request, limits, table, "queries", widths if more["DK"] else widths[:1])
        steps = triton.cdiv(request.longest_k or request.keys, blocks.keys)
        heads, kernel = request.kv_heads, backward_dk_dv
        plans.append(_backward_launch(request, limits, kernel, blocks, steps, heads, gradients, strides.mask, more))
    return plans


def _backward_launch(
    request: Request, limits: DeviceLimits, kernel: Any, blocks: Blocks, steps: int, heads: int,
    gradients: tuple[int, ...], mask: Strides, more: dict[str, bool],
) -> LaunchPlan:  # fmt: skip
    widths = padded_widths(request, limits)
    rows = (blocks.queries, blocks.keys, blocks.keys, blocks.queries)
    descriptors = descriptors_of(request, limits, rows, widths, gradients)
    factor, softcap = factors_of(request)
    scalars = (
        *sizes_of(request, steps), *request.q_strides[:3], *request.k_strides[:3], *request.v_strides[:3], *gradients,
        *mask, factor, request.scale, softcap, *band_of(request), generator.threshold(request.dropout),
        generator.scale(request.dropout),
    )  # fmt: skip
    constants = constants_of(request, blocks, widths, bool(descriptors)) | more
    grid = steps * sequences_of(request) * heads
    return LaunchPlan(kernel, grid, scalars, constants, blocks.warps, blocks.stages, descriptors)


def sequences_of(request: Request) -> int:
    """Batch entries, or packed sequences."""
    return request.sequences or request.batch


def sizes_of(request: Request, steps: int) -> tuple[int, ...]:
    """The kernels' parameters from `heads` to `value_size`."""
    sizes = (request.queries, request.keys, request.head_size, request.value_size)
    return (request.heads, request.group, steps, *sizes)


def factors_of(request: Request) -> tuple[float, float]:
    """`factor` and `softcap` as the kernels' `scores` takes them."""
    unit = 1.0 if request.dtype == torch.float32 else LOG2E
    if request.softcap:
        return request.scale / request.softcap, request.softcap * unit
    return request.scale * unit, 0.0


def band_of(request: Request) -> tuple[int, int]:
    """`left` and `right`; the kernels read them only if LEFT and RIGHT are true."""
    return request.left or 0, request.right or 0


def constants_of(request: Request, blocks: Blocks, widths: tuple[int, int], tma: bool) -> dict[str, Any]:
    """The constants of the kernels, in the order of their parameters."""
    return {
        "LEFT": request.left is not None,
        "RIGHT": request.right is not None,
        "SOFTCAP": request.softcap != 0.0,
        "ALIBI": request.alibi,
        "MASK": request.mask,
        "DROPOUT": request.dropout > 0.0,
        "PACKED": request.sequences > 0,
        "PRECISION": "tf32" if request.tf32 else "ieee",
        "BLOCK_Q": blocks.queries,
        "BLOCK_K": blocks.keys,
        "WIDTH": widths[0],
        "VALUE_WIDTH": widths[1],
        "NO_PADDING": widths == (request.head_size, request.value_size),
        "TMA": tma,
    }


def descriptors_of(
    request: Request, limits: DeviceLimits, rows: Sequence[int], widths: tuple[int, int], dout: Sequence[int] = ()
) -> Sequence[Descriptor]:
    """Descriptors of q, k, v and, if its strides are given, dout; empty if device or layout rule out TMA."""
    if not uses_tma(request, limits):
        return ()
    sizes = (request.head_size, request.head_size, request.value_size, request.value_size)
    strides = [request.q_strides, request.k_strides, request.v_strides, *([tuple(dout[:3])] if dout else [])]
    found: list[Descriptor] = []
    columns = (widths[0], *widths, widths[1])
    for stride, shape, size, count, width in zip(strides, shapes_of(request), sizes, rows, columns, strict=False):
        # An axis of one may have any stride; TMA wants a multiple of 16 bytes all the same.
        steps = [step if extent > 1 else 16 * size for step, extent in zip(stride, shape, strict=False)]
        found.append(Descriptor((*steps, 1), count, width))
    return found
