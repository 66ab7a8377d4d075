"""Attention of a few queries against a long cache in CUDA C++ (`cuda.cu`): plans and kernels."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from tilewright.hardware.architectures import DeviceLimits
from tilewright.kernels.attention.decode.triton import LEAST_KEYS, visible_keys
from tilewright.kernels.attention.portable.plan import LOG2E
from tilewright.kernels.attention.request import Request, Strides
from tilewright.kernels.device import NARROW
from tilewright.launch import nvrtc

SOURCE = Path(__file__).parent / "cuda.cu"
PROBLEM = "P" * 7 + "q" * 12 + "i" * 11 + "f"
"""`Problem` of the source, the kernel's only parameter."""
KEYS = 16
"""Of a tile."""
HEADS = (64, 128)
MOST_ROWS = 16
WARPS = 8
RING_KEYS = {64: 96, 128: 48}
"""Of each warp, by head size."""
UNLIMITED = 2**30
"""Of a band that has no limit on a side: more than any distance."""
MOST_TILES = 2**31 - 1


def supports(request: Request, limits: DeviceLimits) -> str | None:
    """Why a call is not computed here, or None."""
    if request.device.type != "cuda" or request.dtype not in NARROW:
        return f"{request.dtype} on {request.device.type}: only 16-bit floats on a GPU"
    asked = max(shared_bytes(head, MOST_ROWS) for head in HEADS)
    if limits.shared_bytes_per_block < asked:
        return f"{asked} bytes of shared memory a block, and {limits.name} has {limits.shared_bytes_per_block}"
    if not nvrtc.available(request.device.index or 0):
        return "the package cuda-bindings is not installed"
    refused = {
        "a soft cap": request.softcap != 0.0,
        "a mask": request.mask != "none",
        "ALiBi": request.alibi,
        "dropout": request.dropout > 0.0,
        "packed sequences": request.sequences > 0,
        f"head sizes {request.head_size} and {request.value_size}": (
            request.head_size not in HEADS or request.value_size != request.head_size
        ),
        "rows that do not begin at multiples of 16 bytes": not request.aligned,
        f"more than {MOST_ROWS} queries of all heads that share keys": request.queries * request.group > MOST_ROWS,
        f"fewer than {LEAST_KEYS} keys": request.keys < LEAST_KEYS,
        f"more than {UNLIMITED} keys": request.keys > UNLIMITED,
        f"more than {MOST_TILES} tiles": request.batch * request.kv_heads * request.keys // KEYS >= MOST_TILES,
    }
    reasons = [reason for reason, holds in refused.items() if holds]
    return ", ".join(reasons) or None


class DecodePlan(NamedTuple):
    """The launch of a request as plain data."""

    definitions: tuple[tuple[str, int], ...]
    shared_bytes: int
    programs: int
    scalars: tuple[float, ...]
    """`Problem` after its pointers: q, k, v, out, lse, scratch, counters."""
    scratch: int
    """Numbers of fp32."""
    counters: int
    """Numbers of int32, zero before and after: programs of each batch entry and key head that are done."""


def plan(request: Request, limits: DeviceLimits, out_strides: Strides) -> DecodePlan:
    """The launch into a result with these strides, decided without a tensor."""
    head, rows = request.head_size, 8 if request.queries * request.group <= 8 else 16
    origin, limit = visible_keys(request)
    origin = origin // KEYS * KEYS
    kv_heads, tiles = request.batch * request.kv_heads, max(1, -(-(limit - origin) // KEYS))
    programs = programs_for(kv_heads, tiles, limits.multiprocessors)
    scalars = (
        *request.q_strides[:3], *request.k_strides[:3], *request.v_strides[:3], *out_strides[:3], request.heads,
        request.kv_heads, request.group, request.queries, request.keys, origin, tiles,
        *divmod(kv_heads * tiles, programs), UNLIMITED if request.left is None else request.left,
        UNLIMITED if request.right is None else request.right, request.scale * LOG2E,
    )  # fmt: skip
    definitions = settings(head, rows, request.dtype)
    scratch = 2 * programs * rows * (head + 1)
    return DecodePlan(definitions, shared_bytes(head, rows), programs, scalars, scratch, kv_heads)


def built(made: DecodePlan, device: int) -> nvrtc.Kernel:
    """The kernel of a plan, loaded on device number `device`. CompilerError where it cannot be built."""
    return nvrtc.kernel(
        SOURCE,
        "decode",
        PROBLEM,
        device=device,
        threads=32 * WARPS,
        shared_bytes=made.shared_bytes,
        definitions=made.definitions,
    )


def programs_for(kv_heads: int, tiles: int, multiprocessors: int) -> int:
    """One a multiprocessor, and a tile at least for each of its warps: combining costs more than fewer save."""
    return max(1, min(multiprocessors, kv_heads * tiles // WARPS))


def settings(head: int, rows: int, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """The constants that the source names at its top."""
    sizes = ("HEAD", head), ("ROWS", rows), ("KEYS", KEYS), ("WARPS", WARPS), ("STAGES", RING_KEYS[head] // KEYS)
    return *sizes, ("HALF", int(dtype == torch.float16))


def shared_bytes(head: int, rows: int) -> int:
    """Rings of keys and values; partial results of the warps, 8 rows at a time; two numbers a row of each; a flag."""
    return WARPS * (RING_KEYS[head] * 4 * head + 8 * head * 4 + rows * 8) + 16
