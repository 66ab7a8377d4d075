"""Launches of attention split over the keys, for a few queries against a long cache."""

from __future__ import annotations

import functools

import torch
import triton

from tilewright.kernels.attention import triton_decode
from tilewright.kernels.attention.request import Operands, Request, Strides, strides_of
from tilewright.kernels.attention.triton_plan import (
    Blocks,
    Plan,
    band_of,
    boxes_of,
    constants_of,
    factors_of,
    fitting,
    shared_bytes,
    widths_of,
)
from tilewright.kernels.device import interpreted

MOST_ROWS = 64
"""Queries of all heads that share keys: one tile of them is held in registers."""
LEAST_KEYS = 512
MOST_PARTS = 128
BLOCKS = {64: Blocks(0, 128, 4, 3), 128: Blocks(0, 64, 4, 3), 256: Blocks(0, 64, 4, 2)}
"""By head size, padded."""
INTERPRETED = Blocks(0, 16, 4, 1)
RESIDENT = 2
"""Programs of a multiprocessor at once."""
PART_COST = 2
"""What beginning and ending a part costs, in steps of keys."""


def supports(request: Request) -> str | None:
    """Why a call is not split over its keys, or None."""
    if request.sequences or request.dropout:
        return "packed sequences and dropout are left to the other kernels"
    if max(request.head_size, request.value_size) > max(BLOCKS):
        return f"head sizes above {max(BLOCKS)}"
    if request.queries * request.group > MOST_ROWS:
        return f"more than {MOST_ROWS} queries of all heads that share keys"
    if request.dtype == torch.float32:
        return "fp32 is limited by its products, not by memory"
    if request.keys < (LEAST_KEYS if not interpreted() else 64):
        return f"fewer than {LEAST_KEYS} keys"
    return None


def forward(request: Request, operands: Operands, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill `out` and `lse`."""
    split, joined, parts = _plans(request, strides_of(out), strides_of(operands.mask))
    q, k, v = operands[:3]
    part_sum = lse.new_empty(*lse.shape, parts)
    part_out = lse.new_empty(*lse.shape, parts, request.value_size)
    split.run(q, *split.described((k, v)), part_out, part_sum, operands.mask, operands.slopes)
    joined.run(part_out, part_sum, out, lse)


@functools.lru_cache(maxsize=1024)
def _plans(request: Request, out: Strides, mask: Strides) -> tuple[Plan, Plan, int]:
    widths = widths_of(request)
    blocks = INTERPRETED if interpreted() else BLOCKS[max(64, *widths)]
    blocks = fitting(blocks, 0, sum(widths) * request.dtype.itemsize, shared_bytes(request.device))
    origin, limit = _seen(request)
    origin = origin // blocks.keys * blocks.keys
    steps = max(1, triton.cdiv(limit - origin, blocks.keys))
    lanes = request.batch * request.kv_heads
    parts = _parts(steps, lanes, RESIDENT * _multiprocessors(request.device))
    length = triton.cdiv(steps, parts)
    parts = triton.cdiv(steps, length)
    boxes = boxes_of(request, (16, blocks.keys, blocks.keys), widths)[1:]
    factor, softcap = factors_of(request)
    numbers = (
        request.heads, request.group, parts, length * blocks.keys, origin, limit, request.queries, request.keys,
        request.head_size, request.value_size, *request.q_strides[:3], *request.k_strides[:3],
        *request.v_strides[:3], *mask, factor, softcap, *band_of(request),
    )  # fmt: skip
    told = constants_of(request, blocks, widths, bool(boxes))
    kept = ("LEFT", "RIGHT", "SOFTCAP", "ALIBI", "MASK", "PRECISION", "BLOCK_K", "WIDTH", "VALUE_WIDTH", "WHOLE")
    constants = {name: told[name] for name in kept} | {
        "ROWS": max(16, triton.next_power_of_2(request.queries * request.group)),
        "DESCRIBED": bool(boxes),
    }
    split = Plan(triton_decode.decode, parts * lanes, numbers, constants, blocks, boxes)
    sizes = (request.heads, request.queries, parts, request.value_size, *out[:3])
    whole = {"PARTS": triton.next_power_of_2(parts), "VALUE_WIDTH": widths[1]}
    rows = request.batch * request.heads * request.queries
    return split, Plan(triton_decode.combine, rows, sizes, whole, Blocks(0, 0, 4, 1)), parts


def _seen(request: Request) -> tuple[int, int]:
    """The keys that some query sees: the first, and the one after the last."""
    shift = request.keys - request.queries
    first = 0 if request.left is None else max(0, shift - request.left)
    end = request.keys if request.right is None else min(request.keys, shift + request.queries + request.right)
    return min(first, request.keys), max(end, 0)


def _parts(steps: int, lanes: int, resident: int) -> int:
    """Parts of `steps` blocks of keys, for each of `lanes`: the least time of all rounds of `resident` programs."""
    most = min(steps, MOST_PARTS)
    return min(range(1, most + 1), key=lambda parts: (-(-parts * lanes // resident)) * (-(-steps // parts) + PART_COST))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
