"""Tiles of the portable kernels: their sizes, padded head sizes, and whether TMA loads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import triton

from tilewright.hardware.architectures import DeviceLimits
from tilewright.kernels.attention.request import DIVISIBILITY, MIN_SCALAR_WIDTH, Request
from tilewright.kernels.device import interpreted

SPARE_BYTES = 4096
"""Shared memory of a program for barriers and layout conversions that the compiler adds."""


class Blocks(NamedTuple):
    """Queries and keys of a tile, warps of a program, and stages of its pipelined loop."""

    queries: int
    keys: int
    warps: int
    stages: int


FORWARD = {64: Blocks(64, 128, 4, 2), 128: Blocks(64, 64, 4, 3), 256: Blocks(128, 64, 8, 2)}
"""By padded head size, in 16 bits: the fastest on an H200 of those in docs/experiments.md."""
DK_DV = {64: Blocks(128, 64, 4, 2), 128: Blocks(64, 64, 4, 2)}
DK_DV_MORE_REGISTERS = {64: Blocks(32, 64, 4, 2), 128: Blocks(32, 64, 8, 2)}
"""For masks, ALiBi, a soft cap, dropout, and tiles loaded through pointers: they need registers too."""
DK_ALONE = {256: Blocks(32, 128, 8, 2)}
DV_ALONE = {256: Blocks(64, 128, 8, 2)}
"""If dk and dv together do not fit into a program's registers, each has its own launch."""
DQ = {64: Blocks(64, 64, 4, 2), 128: Blocks(64, 64, 4, 2), 256: Blocks(128, 64, 8, 1)}
FULL_PRECISION = {64: Blocks(16, 16, 8, 1), 128: Blocks(16, 16, 8, 1), 256: Blocks(16, 16, 8, 1)}
"""fp32 without TF32, for every kernel: operands are in registers, which larger tiles overflow."""
INTERPRETED = Blocks(32, 16, 4, 1)


def blocks_of(
    request: Request,
    limits: DeviceLimits,
    table: dict[int, Blocks],
    loops_over: Literal["keys", "queries"],
    resident: tuple[int, ...],
) -> Blocks:
    """The blocks in `table`, reduced to fit the device's shared memory.

    A program loops over keys or queries, and keeps rows of `resident` columns of its own tile in shared memory.
    """
    if interpreted():
        return INTERPRETED
    if request.dtype == torch.float32 and not request.tf32:
        table = FULL_PRECISION
    widths = padded_widths(request, limits)
    blocks = table[max(64, *widths)]
    own_bytes, step_bytes = (sum(columns) * request.dtype.itemsize for columns in (resident, widths))
    if loops_over == "keys":
        return fitted(blocks, own_bytes, step_bytes, limits)
    swapped = fitted(blocks._replace(queries=blocks.keys, keys=blocks.queries), own_bytes, step_bytes, limits)
    return swapped._replace(queries=swapped.keys, keys=swapped.queries)


def fitted(
    blocks: Blocks, own_bytes: int, step_bytes: int, limits: DeviceLimits, *, kept_bytes: int = 0, least_stages: int = 1
) -> Blocks:
    """`blocks`, with fewer stages and then smaller tiles until they fit the device's shared memory.

    A program has `own_bytes` for each of `blocks.queries` rows that it owns, `step_bytes` for each of `blocks.keys`
    rows of a stage, and `kept_bytes` beside them.
    """
    most = limits.shared_bytes_per_block - SPARE_BYTES - kept_bytes
    while blocks.queries * own_bytes + blocks.stages * blocks.keys * step_bytes > most:
        if blocks.stages > least_stages:
            blocks = blocks._replace(stages=blocks.stages - 1)
        elif max(blocks.queries, blocks.keys) == 16:
            break
        elif blocks.queries > blocks.keys:
            blocks = blocks._replace(queries=blocks.queries // 2)
        else:
            blocks = blocks._replace(keys=blocks.keys // 2)
    return blocks


def padded_widths(request: Request, limits: DeviceLimits) -> tuple[int, int]:
    """Head sizes padded to what `tl.dot` takes: powers of two, 16 at least.

    16 bits loaded one element at a time are padded to MIN_SCALAR_WIDTH where the device has TMA. Of 23 such kinds,
    ptxas 12.8, which Triton 3.6 brings, miscompiled 13 for an H200 and made 2 leave their memory: all with 16 or 32
    columns of values and wider heads. ptxas 13 got all of 54 right, and 12.8 all of 22 that load vectors.
    """
    scalar = request.dtype != torch.float32 and limits.tensor_copies
    least = MIN_SCALAR_WIDTH if scalar and not (uses_tma(request, limits) or loads_vectors(request)) else 16
    head_size, value_size = (triton.next_power_of_2(x) for x in (request.head_size, request.value_size))
    return max(least, head_size), max(least, value_size)


def uses_tma(request: Request, limits: DeviceLimits) -> bool:
    """Whether TMA loads the tiles of q, k and v: they are aligned, without axes of stride 0, and not packed.

    Beyond the end of a packed sequence lie the values of the next one, not the zeros that TMA fills in.
    """
    strides = (request.q_strides, request.k_strides, request.v_strides)
    if not request.aligned or request.sequences or not limits.tensor_copies:
        return False
    return not any(_broadcasts(step, shape) for step, shape in zip(strides, shapes_of(request), strict=False))


def loads_vectors(request: Request) -> bool:
    """Whether loads through pointers take 16 bytes at a time."""
    strides = (*request.q_strides[:3], *request.k_strides[:3], *request.v_strides[:3])
    return request.aligned and not any(x % DIVISIBILITY for x in (*strides, request.head_size, request.value_size))


def shapes_of(request: Request) -> tuple[tuple[int, int, int], ...]:
    """Batch, heads and positions of q, k, v and dout."""
    query_shape = (request.batch, request.heads, request.queries)
    key_shape = (request.batch, request.kv_heads, request.keys)
    return query_shape, key_shape, key_shape, query_shape


def _broadcasts(strides: Sequence[int], shape: Sequence[int]) -> bool:
    return any(step == 0 and count > 1 for step, count in zip(strides, shape, strict=False))
