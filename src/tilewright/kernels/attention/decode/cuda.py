"""Launches of `cuda.cu`: a few queries against a long cache, on Hopper."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from tilewright.kernels import nvrtc
from tilewright.kernels.attention.decode.triton import LEAST_KEYS, keys_seen
from tilewright.kernels.attention.portable.plan import LOG2E
from tilewright.kernels.attention.request import Operands, Request, Strides, strides_of
from tilewright.kernels.device import NARROW

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


def supports(request: Request) -> str | None:
    """Why a call is not computed here, or None."""
    if request.device.type != "cuda" or request.dtype not in NARROW:
        return f"{request.dtype} on {request.device.type}: only 16-bit floats on a GPU"
    if torch.cuda.get_device_capability(request.device) != (9, 0):
        return "its shared memory is that of compute capability 9.0"
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


Launch = Callable[[Operands, torch.Tensor, torch.Tensor], None]


def forward(request: Request, operands: Operands, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fill `out` and `lse`, in memory of the stream's own or, while a graph is captured, of the graph's."""
    bound(request, strides_of(out))(operands, out, lse)


@functools.lru_cache(maxsize=1024)
def bound(request: Request, strides: Strides) -> Launch:
    """`forward` of a request whose result has these strides. CompilerError where the kernel cannot be built."""
    head, rows = request.head_size, 8 if request.queries * request.group <= 8 else 16
    device = torch.cuda.current_device() if request.device.index is None else request.device.index
    kernel = nvrtc.kernel(
        SOURCE,
        "decode",
        PROBLEM,
        device=device,
        threads=32 * WARPS,
        shared_bytes=shared_bytes(head, rows),
        definitions=settings(head, rows, request.dtype),
    )
    origin, limit = keys_seen(request)
    origin = origin // KEYS * KEYS
    lanes, tiles = request.batch * request.kv_heads, max(1, -(-(limit - origin) // KEYS))
    programs = programs_for(lanes, tiles, torch.cuda.get_device_properties(device).multi_processor_count)
    numbers = (
        *request.q_strides[:3], *request.k_strides[:3], *request.v_strides[:3], *strides[:3], request.heads,
        request.kv_heads, request.group, request.queries, request.keys, origin, tiles, *divmod(lanes * tiles, programs),
        UNLIMITED if request.left is None else request.left, UNLIMITED if request.right is None else request.right,
        request.scale * LOG2E,
    )  # fmt: skip
    shared = 2 * programs * rows * (head + 1)

    def launch(operands: Operands, out: torch.Tensor, lse: torch.Tensor) -> None:
        q, k, v = operands[:3]
        scratch, arrived = _room(q.device, device, shared, lanes)
        pointers = (x.data_ptr() for x in (q, k, v, out, lse, scratch, arrived))
        kernel((programs,), *pointers, *numbers)

    return launch


def programs_for(lanes: int, tiles: int, multiprocessors: int) -> int:
    """One a multiprocessor: less than a tile for each warp is not worth a program's part in the join."""
    return max(1, min(multiprocessors, lanes * tiles // WARPS))


def settings(head: int, rows: int, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """What the source names at its top."""
    sizes = ("HEAD", head), ("ROWS", rows), ("KEYS", KEYS), ("WARPS", WARPS), ("STAGES", RING_KEYS[head] // KEYS)
    return *sizes, ("HALF", int(dtype == torch.float16))


def shared_bytes(head: int, rows: int) -> int:
    """Rings of keys and values; what the warps found, 8 rows at a time; two numbers a row of each; who came last."""
    return WARPS * (RING_KEYS[head] * 4 * head + 8 * head * 4 + rows * 8) + 16


_rooms: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
"""By device and stream: launches of one stream follow each other, and each leaves zeros behind."""


def _room(where: torch.device, device: int, shared: int, lanes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 for the programs' parts and int32 zeros, one a lane, that no other launch uses meanwhile."""
    if torch.cuda.is_current_stream_capturing():
        # A graph may be replayed on any stream.
        return torch.empty(shared, device=where), torch.zeros(lanes, dtype=torch.int32, device=where)
    key = device, nvrtc.stream(device)
    room = _rooms.get(key)
    if room is None or len(room[0]) < shared or len(room[1]) < lanes:
        room = _rooms[key] = (
            torch.empty(shared, device=where, dtype=torch.float32),
            torch.zeros(max(lanes, 1024), dtype=torch.int32, device=where),
        )
    return room
