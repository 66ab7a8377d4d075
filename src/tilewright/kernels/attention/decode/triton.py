"""Attention of a few queries against a long cache, split over the keys: plans of `triton_kernel.py`'s launches."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from tilewright.hardware.architectures import DeviceLimits
from tilewright.kernels.attention.decode.triton_kernel import decode
from tilewright.kernels.attention.portable.blocks import Blocks, fitted, loads_vectors, padded_widths
from tilewright.kernels.attention.portable.plan import LaunchPlan, band_of, constants_of, descriptors_of, factors_of
from tilewright.kernels.attention.request import Request, Strides
from tilewright.kernels.device import interpreted

MOST_ROWS = 64
"""Queries of all heads that share keys; they are one tile in registers."""
LEAST_KEYS = 512
MOST_SPLITS = 128
BLOCKS = {64: Blocks(0, 128, 4, 3), 128: Blocks(0, 128, 8, 3), 256: Blocks(0, 64, 8, 3)}
"""By padded head size. One program with these blocks draws its multiprocessor's share of the bandwidth."""
MANY_HEADS = {**BLOCKS, 128: Blocks(0, 64, 4, 3)}
"""If there are more key heads than multiprocessors: several programs on each, where one begins while another ends."""
FEW_KEYS = 3072
"""Below so many visible keys that pays: 64 sequences, heads 64/8 of 128, bf16, took 255 µs at 4096 keys, and in another
run 280 in blocks of `MANY_HEADS`; 32 of 40/8 at 2048 keys took 74 and 72 in one (H200)."""
INTERPRETED = Blocks(0, 16, 4, 1)
LEAST_STAGES = 2
"""Where shared memory is short, tiles shrink before copies stop running ahead of the products."""
SPLIT_COST, COMBINE_COST = 1.0, 0.0625
"""Costs of starting and ending a split, and of combining it with the others; the unit is a step over a key block."""


def supports(request: Request, limits: DeviceLimits) -> str | None:
    """Why a call cannot be split over its keys, or None. The kernel runs on any device that Triton supports."""
    return refuses(request)


def refuses(request: Request) -> str | None:
    """The reasons of `supports`, all of which lie in the call."""
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


class DecodePlan(NamedTuple):
    """The launch of a request, and the size of its scratch."""

    launch: LaunchPlan
    """Tensors: q, k, v, out, lse, scratch, counters, mask, slopes, prefix."""
    scratch: int
    """fp32 elements through which the splits pass results to the last one; 0 if there is one split."""
    counters: int
    """int32 counters, zero before and after a call: the finished splits of each batch entry and key head."""


class Prefix(NamedTuple):
    """Query i of batch entry b sees keys below prefix[b, 0, i, 0] + more."""

    batch_stride: int
    query_stride: int
    more: int
    else_all: bool
    """Whether a query whose prefix is empty sees all keys."""


@functools.lru_cache(maxsize=1024)
def plan(
    request: Request, limits: DeviceLimits, out: Strides, mask: Strides, prefix: Prefix | None = None
) -> DecodePlan:
    """The launch for a result with strides `out`, planned from metadata alone."""
    widths = padded_widths(request, limits)
    count, itemsize = request.queries * request.group, request.dtype.itemsize
    rows = max(16, triton.next_power_of_2(count))
    kv_heads = request.batch * request.kv_heads
    origin, limit = visible_keys(request)
    table = MANY_HEADS if kv_heads > limits.multiprocessors and limit - origin < FEW_KEYS else BLOCKS
    blocks = INTERPRETED if interpreted() else table[max(64, *widths)]
    kept = rows * widths[0] * itemsize
    blocks = fitted(blocks, 0, sum(widths) * itemsize, limits, kept_bytes=kept, least_stages=LEAST_STAGES)
    origin = origin // blocks.keys * blocks.keys
    steps = max(1, triton.cdiv(limit - origin, blocks.keys))
    splits = _splits(steps, kv_heads, limits.multiprocessors)
    length = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, length)
    # Tensor maps cost the host time, and loads through pointers are as fast on the device.
    all_three = (
        () if prefix or loads_vectors(request) else descriptors_of(request, limits, (16, *[blocks.keys] * 2), widths)
    )
    descriptors = (None, *all_three[1:]) if all_three else ()
    factor, softcap = factors_of(request)
    scalars = (
        request.heads, request.group, splits, length * blocks.keys, origin, limit, request.queries, request.keys,
        request.head_size, request.value_size, *request.q_strides[:3], *request.k_strides[:3],
        *request.v_strides[:3], *out[:3], *mask, *((0, 0, 0) if prefix is None else prefix[:3]), factor, softcap,
        *band_of(request),
    )  # fmt: skip
    known = constants_of(request, blocks, widths, bool(descriptors))
    taken = ("LEFT", "RIGHT", "SOFTCAP", "ALIBI", "MASK", "PRECISION", "BLOCK_K", "WIDTH", "VALUE_WIDTH", "NO_PADDING")
    constants = {"PREFIX": prefix is not None, "ELSE_ALL": prefix is not None and prefix.else_all}
    constants |= {name: known[name] for name in taken} | {
        "ROWS": rows,
        "TMA": bool(descriptors),
        "SPLITS": triton.next_power_of_2(splits),
        "ONE_MASK": mask[1] == 0 and (mask[2] == 0 or request.queries == 1),
    }
    launch = LaunchPlan(decode, splits * kv_heads, scalars, constants, blocks.warps, blocks.stages, descriptors)
    return DecodePlan(launch, 0 if splits == 1 else splits * kv_heads * count * (request.value_size + 1), kv_heads)


def visible_keys(request: Request) -> tuple[int, int]:
    """(first, end) of the keys that some query sees."""
    shift = request.keys - request.queries
    first = 0 if request.left is None else max(0, shift - request.left)
    end = request.keys if request.right is None else min(request.keys, shift + request.queries + request.right)
    return min(first, request.keys), max(end, 0)


def _splits(steps: int, kv_heads: int, multiprocessors: int) -> int:
    """The number of splits of each key head's `steps` that minimises the time of the busiest multiprocessor.

    Programs of one multiprocessor share its bandwidth: their times add up, whether they run at once or in turn.
    """

    def time(splits: int) -> float:
        programs = -(-splits * kv_heads // multiprocessors)
        return programs * (-(-steps // splits) + SPLIT_COST) + COMBINE_COST * splits

    return min(range(1, min(steps, MOST_SPLITS) + 1), key=time)
