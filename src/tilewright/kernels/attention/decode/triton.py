"""Launches of attention split over the keys, for a few queries against a long cache."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton

from tilewright.kernels import nvrtc
from tilewright.kernels.attention.decode.triton_kernel import decode
from tilewright.kernels.attention.portable.plan import (
    Blocks,
    Plan,
    band_of,
    boxes_of,
    constants_of,
    factors_of,
    fetches_in_vectors,
    fitting,
    shared_bytes,
    widths_of,
)
from tilewright.kernels.attention.request import Operands, Request, Strides, strides_of
from tilewright.kernels.device import interpreted

MOST_ROWS = 64
"""Queries of all heads that share keys: one tile of them is held in registers."""
LEAST_KEYS = 512
MOST_PARTS = 128
LEAST_ARRIVALS = 1024
BLOCKS = {64: Blocks(0, 128, 4, 3), 128: Blocks(0, 64, 4, 3), 256: Blocks(0, 64, 4, 2)}
"""By head size, padded."""
INTERPRETED = Blocks(0, 16, 4, 1)
RESIDENT, SATURATING = 3, 2
"""Programs of a multiprocessor at once, and as many as keep its share of the memory busy."""
PART_COST, JOIN_COST = 2.0, 0.125
"""What beginning and ending a part costs, and what joining it to the others does, in steps of keys."""


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
    _run(*_plan(request, strides_of(out), strides_of(operands.mask)), request, operands, out, lse)


def bound(request: Request, strides: Strides) -> Callable[[Operands, torch.Tensor, torch.Tensor], None]:
    """`forward` of a request without a mask, whose results have these strides."""
    return functools.partial(_run, *_plan(request, strides, strides_of(None)), request)


def _run(plan: Plan, shared: int, request: Request, operands: Operands, out: torch.Tensor, lse: torch.Tensor) -> None:
    q, k, v = operands[:3]
    scratch = arrived = None
    if shared:
        scratch = torch.empty(shared, dtype=torch.float32, device=q.device)
        arrived = _arrivals(q.device, request.batch * request.kv_heads)
    plan.run(q, *plan.described((k, v)), out, lse, scratch, arrived, operands.mask, operands.slopes)


@functools.lru_cache(maxsize=1024)
def _plan(request: Request, out: Strides, mask: Strides) -> tuple[Plan, int]:
    """The launch, and how many numbers its programs share."""
    widths = widths_of(request)
    blocks = INTERPRETED if interpreted() else BLOCKS[max(64, *widths)]
    blocks = fitting(blocks, 0, sum(widths) * request.dtype.itemsize, shared_bytes(request.device))
    origin, limit = keys_seen(request)
    origin = origin // blocks.keys * blocks.keys
    steps = max(1, triton.cdiv(limit - origin, blocks.keys))
    lanes = request.batch * request.kv_heads
    parts = _parts(steps, lanes, _multiprocessors(request.device))
    length = triton.cdiv(steps, parts)
    parts = triton.cdiv(steps, length)
    # Pointers cost the host less than the tensor maps of bulk copies, and the device no more.
    boxes = () if fetches_in_vectors(request) else boxes_of(request, (16, blocks.keys, blocks.keys), widths)[1:]
    factor, softcap = factors_of(request)
    numbers = (
        request.heads, request.group, parts, length * blocks.keys, origin, limit, request.queries, request.keys,
        request.head_size, request.value_size, *request.q_strides[:3], *request.k_strides[:3],
        *request.v_strides[:3], *out[:3], *mask, factor, softcap, *band_of(request),
    )  # fmt: skip
    told = constants_of(request, blocks, widths, bool(boxes))
    kept = ("LEFT", "RIGHT", "SOFTCAP", "ALIBI", "MASK", "PRECISION", "BLOCK_K", "WIDTH", "VALUE_WIDTH", "WHOLE")
    rows = request.queries * request.group
    constants = {name: told[name] for name in kept} | {
        "ROWS": max(16, triton.next_power_of_2(rows)),
        "DESCRIBED": bool(boxes),
        "PARTS": triton.next_power_of_2(parts),
    }
    plan = Plan(decode, parts * lanes, numbers, constants, blocks, boxes)
    return plan, 0 if parts == 1 else parts * lanes * rows * (request.value_size + 1)


_arrived: dict[tuple[torch.device, int], torch.Tensor] = {}
"""Zeros for each stream: launches of one stream follow each other, and each leaves zeros behind."""


def _arrivals(device: torch.device, lanes: int) -> torch.Tensor:
    """int32 zeros, one a lane at least, that no other launch uses meanwhile."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        # A graph may be replayed on any stream.
        return torch.zeros(lanes, dtype=torch.int32, device=device)
    key = device, nvrtc.stream(torch.cuda.current_device() if device.index is None else device.index)
    zeros = _arrived.get(key)
    if zeros is None or len(zeros) < lanes:
        zeros = _arrived[key] = torch.zeros(max(LEAST_ARRIVALS, lanes), dtype=torch.int32, device=device)
    return zeros


def keys_seen(request: Request) -> tuple[int, int]:
    """The keys that some query sees: the first, and the one after the last."""
    shift = request.keys - request.queries
    first = 0 if request.left is None else max(0, shift - request.left)
    end = request.keys if request.right is None else min(request.keys, shift + request.queries + request.right)
    return min(first, request.keys), max(end, 0)


def _parts(steps: int, lanes: int, multiprocessors: int) -> int:
    """Parts of `steps` blocks of keys, for each of `lanes`: those with which the fullest multiprocessor ends first.

    It takes RESIDENT programs at a time, which share what it draws from memory; fewer than SATURATING draw less.
    """

    def time(parts: int) -> float:
        rounds, rest = divmod(-(-parts * lanes // multiprocessors), RESIDENT)
        shared = rounds * RESIDENT + (max(rest, SATURATING) if rest else 0)
        return shared * (-(-steps // parts) + PART_COST) + JOIN_COST * parts

    return min(range(1, min(steps, MOST_PARTS) + 1), key=time)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
