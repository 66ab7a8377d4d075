"""Launches of the portable attention kernels: block sizes from a table, one plan for each kind of call."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
import triton

from tilewright.kernels.attention.portable.backward import keys_and_values, prepare
from tilewright.kernels.attention.portable.backward_queries import queries_only
from tilewright.kernels.attention.portable.forward import forward as forward_kernel
from tilewright.kernels.attention.portable.plan import (
    Blocks,
    Plan,
    band_of,
    boxes_of,
    constants_of,
    factors_of,
    fetches_in_bulk,
    fitting,
    lanes_of,
    shared_bytes,
    sizes_of,
    widths_of,
)
from tilewright.kernels.attention.request import Operands, Request, Strides, strides_of
from tilewright.kernels.device import interpreted
from tilewright.kernels.dropout_add import generator

MOST_WIDTH = 256
PREPARED_ROWS = 64

FORWARD = {64: Blocks(64, 128, 4, 2), 128: Blocks(64, 64, 4, 3), 256: Blocks(128, 64, 8, 2)}
"""By head size, padded, in 16 bits; the best of those named in the kernels' files, measured on an H200."""
KEYS_AND_VALUES = {64: Blocks(128, 64, 4, 2), 128: Blocks(64, 64, 4, 2)}
CROWDED = {64: Blocks(32, 64, 4, 2), 128: Blocks(32, 64, 8, 2)}
"""For dk and dv where scores are masked, bent or dropped, or tiles come through pointers: those take registers too."""
KEYS_ALONE = {256: Blocks(32, 128, 8, 2)}
VALUES_ALONE = {256: Blocks(64, 128, 8, 2)}
"""Where dk and dv together do not fit into the registers of a block of keys, each is a launch of its own."""
QUERIES_ONLY = {64: Blocks(64, 64, 4, 2), 128: Blocks(64, 64, 4, 2), 256: Blocks(128, 64, 8, 1)}
FULL_PRECISION = {64: Blocks(16, 16, 8, 1), 128: Blocks(16, 16, 8, 1), 256: Blocks(16, 16, 8, 1)}
"""fp32 outside of the matrix units, for all three kernels: operands in registers, which larger blocks overflow."""
INTERPRETED = Blocks(32, 16, 4, 1)


def supports(request: Request) -> str | None:
    """Why the portable kernels cannot take a call, or None."""
    if max(request.head_size, request.value_size) > MOST_WIDTH:
        return f"head sizes above {MOST_WIDTH}"
    return None


def forward(
    request: Request, operands: Operands, out: torch.Tensor, lse: torch.Tensor, level: torch.Tensor | None = None
) -> None:
    """Fill `out`, `lse` and, for fp32, `level` fp64 [B, H, Sq], which the backward needs."""
    plan = _forward_plan(request, strides_of(out), strides_of(operands.mask))
    q, k, v = plan.described(operands[:3])
    plan.run(q, k, v, out, lse, level, *operands[3:])


def backward(
    request: Request, operands: Operands, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, level: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `dq`, `dk` and `dv` from the gradients of `out` and, if there is one, of `lse`."""
    mask, given, delta = strides_of(operands.mask), strides_of(dout), torch.empty_like(lse)
    q, k, v, *rest = operands
    own_delta = level is not None or request.is_short
    queries_only = _queries_plan(request, given, strides_of(dq), mask, own_delta, own_delta and dlse is not None)
    if level is None:
        level = torch.empty_like(lse)
        _prepare_plan(request, strides_of(out), given, dlse is not None).run(out, dout, lse, dlse, delta, level)
        dlse = dlse if own_delta else None
    queries_only.run(*queries_only.described((q, k, v, dout)), level, delta, dlse, dq, *rest)
    for plan in _keys_and_values_plans(request, given, strides_of(dk), strides_of(dv), mask):
        plan.run(*plan.described((q, k, v, dout)), level, delta, dk, dv, *rest)


@functools.lru_cache(maxsize=1024)
def _forward_plan(request: Request, out: Strides, mask: Strides) -> Plan:
    widths = widths_of(request)
    blocks = _blocks(request, FORWARD, "keys", widths[:1])
    steps = triton.cdiv(request.longest_q or request.queries, blocks.queries)
    boxes = boxes_of(request, (blocks.queries, blocks.keys, blocks.keys), widths)
    factor, softcap = factors_of(request)
    numbers = (
        *sizes_of(request, steps), *request.q_strides[:3], *request.k_strides[:3], *request.v_strides[:3], *out[:3],
        *mask, abs(factor), softcap, *band_of(request), generator.threshold(request.dropout),
        generator.scale(request.dropout),
    )  # fmt: skip
    constants = {"NEGATED": factor < 0.0, **constants_of(request, blocks, widths, bool(boxes))}
    return Plan(forward_kernel, steps * lanes_of(request) * request.heads, numbers, constants, blocks, boxes)


@functools.lru_cache(maxsize=1024)
def _prepare_plan(request: Request, out: Strides, dout: Strides, with_dlse: bool) -> Plan:
    """`with_dlse` tells plans apart: each is built for the tensors that are there."""
    numbers = (request.heads, request.queries, request.value_size, *out[:3], *dout[:3])
    constants = {"ROWS": PREPARED_ROWS, "VALUE_WIDTH": widths_of(request)[1]}
    grid = triton.cdiv(request.queries, PREPARED_ROWS) * request.batch * request.heads
    return Plan(prepare, grid, numbers, constants, Blocks(0, 0, 4, 1))


@functools.lru_cache(maxsize=1024)
def _keys_and_values_plans(request: Request, dout: Strides, dk: Strides, dv: Strides, mask: Strides) -> list[Plan]:
    gradients = (*dout[:3], *dk[:3], *dv[:3])
    exact = request.dtype == torch.float32 and not request.tf32
    crowded = request.mask != "none" or request.softcap or request.alibi or request.dropout
    if exact or max(widths_of(request)) <= max(KEYS_AND_VALUES):
        table = CROWDED if crowded or not fetches_in_bulk(request) else KEYS_AND_VALUES
        tables = [(table, {"DK": True, "DV": True})]
    else:
        tables = [(VALUES_ALONE, {"DK": False, "DV": True}), (KEYS_ALONE, {"DK": True, "DV": False})]
    plans = []
    for table, wanted in tables:
        widths = widths_of(request)
        blocks = _blocks(request, table, "queries", widths if wanted["DK"] else widths[:1])
        steps = triton.cdiv(request.longest_k or request.keys, blocks.keys)
        heads, kernel = request.kv_heads, keys_and_values
        plans.append(_backward_plan(request, kernel, blocks, steps, heads, gradients, mask, wanted))
    return plans


@functools.lru_cache(maxsize=1024)
def _queries_plan(
    request: Request, dout: Strides, dq: Strides, mask: Strides, own_delta: bool, with_dlse: bool
) -> Plan:  # fmt: skip
    """As of `_prepare_plan`, `with_dlse` tells plans apart."""
    blocks = _blocks(request, QUERIES_ONLY, "keys", widths_of(request))
    steps = triton.cdiv(request.longest_q or request.queries, blocks.queries)
    gradients = (*dout[:3], *dq[:3])
    wanted = {"OWN_DELTA": own_delta}
    return _backward_plan(request, queries_only, blocks, steps, request.heads, gradients, mask, wanted)


def _backward_plan(
    request: Request,
    kernel: Any,
    blocks: Blocks,
    steps: int,
    heads: int,
    gradients: tuple[int, ...],
    mask: Strides,
    wanted: dict[str, bool],
) -> Plan:
    widths = widths_of(request)
    boxes = boxes_of(request, (blocks.queries, blocks.keys, blocks.keys, blocks.queries), widths, gradients)
    factor, softcap = factors_of(request)
    numbers = (
        *sizes_of(request, steps), *request.q_strides[:3], *request.k_strides[:3], *request.v_strides[:3], *gradients,
        *mask, factor, request.scale, softcap, *band_of(request), generator.threshold(request.dropout),
        generator.scale(request.dropout),
    )  # fmt: skip
    constants = constants_of(request, blocks, widths, bool(boxes)) | wanted
    return Plan(kernel, steps * lanes_of(request) * heads, numbers, constants, blocks, boxes)


def _blocks(
    request: Request, table: dict[int, Blocks], stepping: Literal["keys", "queries"], held: tuple[int, ...]
) -> Blocks:
    """From `table`, cut down to the device's shared memory.

    A program steps through keys or queries, and holds rows of `held` columns of those that it owns.
    """
    if interpreted():
        return INTERPRETED
    if request.dtype == torch.float32 and not request.tf32:
        table = FULL_PRECISION
    widths = widths_of(request)
    blocks = table[max(64, *widths)]
    kept, step = (sum(columns) * request.dtype.itemsize for columns in (held, widths))
    most = shared_bytes(request.device)
    if stepping == "keys":
        return fitting(blocks, kept, step, most)
    turned = fitting(blocks._replace(queries=blocks.keys, keys=blocks.queries), kept, step, most)
    return turned._replace(queries=turned.keys, keys=turned.queries)
