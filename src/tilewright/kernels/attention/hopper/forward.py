"""FlashAttention forward for Hopper (`forward_kernel.py`): which calls it takes, and their plans.

`tiles.py` has the builds and which one a call takes, `schedule.py` the order of tiles. TMA pads head sizes with zeros.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewright.hardware.architectures import DeviceLimits
from tilewright.kernels.attention.hopper.schedule import Span, table
from tilewright.kernels.attention.hopper.tiles import NO_LIMIT, ROWS, WIDEST, Tiles, band, needs_wgmma, tiles_for
from tilewright.kernels.attention.request import Request
from tilewright.kernels.device import NARROW
from tilewright.pytorch.state import in_real_tensors

TRITON = "3.6."
"""Gluon is experimental: its functions change between releases."""
STRIDE_LIMIT = 1 << 39
"""Strides of a tensor map are below 2⁴⁰ bytes, here in elements of 16 bits."""
ORDER_BYTES = 64 << 20
"""The most that all tables of tiles take together."""
_ORDERS: dict[tuple[Order, torch.device], torch.Tensor] = {}
"""Tables on devices, never freed: a captured graph reads its own whenever it is replayed."""


def supports(request: Request, limits: DeviceLimits) -> str | None:
    """Why these kernels cannot compute `request`, or None. Of a GPU that is not here all is taken to be installed."""
    return needs_wgmma(limits) or refuses(request) or (_missing() if request.device.type == "cuda" else None)


def refuses(request: Request) -> str | None:
    """The reasons of `supports` that depend on the call, not on the machine."""
    r = request
    if r.dtype not in NARROW:
        return f"the matrix instructions take 16-bit floats, not {r.dtype}"
    if 0 in (r.batch, r.heads, r.queries, r.keys, r.head_size, r.value_size):
        return "there is nothing to compute"
    if max(r.head_size, r.value_size) > WIDEST:
        return f"head size {max(r.head_size, r.value_size)}: the sums of {WIDEST} fill the registers"
    if not r.aligned or r.value_size % 8:
        return "TMA takes rows that begin at multiples of 16 bytes"
    if max(r.queries, r.keys) >= NO_LIMIT or r.batch * r.heads * (r.queries // ROWS + 1) >= 1 << 31:
        return "positions are counted in 32 bits"
    for name, sizes, strides in zip("qkv", _shapes(r), (r.q_strides, r.k_strides, r.v_strides), strict=False):
        if any(size > 1 and not 0 < stride < STRIDE_LIMIT for size, stride in zip(sizes[:3], strides, strict=False)):
            return f"{name} has strides {strides}: TMA takes those above zero and below 2⁴⁰ bytes"
    if not r.scale > 0:
        return f"scale {r.scale}: the maximum is taken before the scores are scaled"
    wanted = {"a mask": r.mask != "none", "ALiBi": r.alibi, "dropout": r.dropout, "packed sequences": r.sequences}
    return next((f"{what}: not in these kernels" for what, is_wanted in wanted.items() if is_wanted), None)


def _missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    if not triton.__version__.startswith(TRITON):
        return f"written in Gluon as Triton {TRITON}x has it, and this is {triton.__version__}"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "the package cuda-bindings is not installed"
    return None


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """One launch as plain data, without the addresses of the tensors and of the table of tiles."""

    tiles: Tiles
    """The build."""
    programs: int
    rows: tuple[int, int, int, int]
    """Positions that one bulk copy moves of q, k, v and out."""
    scale: float
    """The scale of the scores times log₂ e; with a soft cap c, c · log₂ e."""
    tanh_scale: float
    """With a soft cap c, 2 · log₂ e · scale of the scores / c; else 0."""
    counts: tuple[int, ...]
    """The kernel's parameters from `heads` to `tiles`."""
    order: Order | None
    """The table of tiles that the launch reads; None: tiles are of one length, or the hardware orders them."""


class Order(NamedTuple):
    """A table of tiles, `schedule.table` of these arguments."""

    span: Span
    programs: int
    head_bytes: int
    """Keys and values of one query head."""


@functools.lru_cache(maxsize=1024)
def plan(request: Request, limits: DeviceLimits, with_table: bool = True) -> ForwardPlan:
    """The launch of a request, planned from metadata alone.

    `with_table`: a table may order tiles of different lengths; without, each has a program of its own.
    """
    r, span = request, _span(request)
    at_once = limits.multiprocessors * tiles_for(r, table=False).programs_per_multiprocessor
    programs, order = min(span.tiles, at_once), None
    if with_table and span.table_pays(programs):
        order = Order(span, programs, 2 * r.keys * (r.head_size + r.value_size) // r.group)
    elif r.banded:
        programs = span.tiles
    tiles = tiles_for(r, table=order is not None)
    rows = ROWS, tiles.block, tiles.block, ROWS
    log2e = math.log2(math.e)
    # The kernel's tanh takes twice its argument, in powers of two.
    scale, tanh_scale = (r.softcap * log2e, 2 * log2e * r.scale / r.softcap) if r.softcap else (r.scale * log2e, 0.0)
    counts = r.heads, r.group, r.queries, r.keys, span.right, span.left, span.row_blocks, span.tiles
    return ForwardPlan(tiles, programs, rows, scale, tanh_scale, counts, order)


class NoTable(Exception):
    """A new table of tiles is needed during the capture of a CUDA graph, when it cannot be sent to the device."""


def plan_with_table(request: Request, limits: DeviceLimits) -> tuple[ForwardPlan, torch.Tensor | None]:
    """`plan`, and its table of tiles on the device; a plan without a table if there are too many. Raises NoTable."""
    made = plan(request, limits)
    if made.order is None:
        return made, None
    order = _on_device(made.order, request.device)
    return made if order is not None else plan(request, limits, with_table=False), order


def _on_device(order: Order, device: torch.device) -> torch.Tensor | None:
    """The table of an order on a device; None if the tables already take `ORDER_BYTES`."""
    if (order, device) not in _ORDERS:
        if torch.cuda.is_current_stream_capturing():
            raise NoTable
        if sum(kept.nbytes for kept in _ORDERS.values()) > ORDER_BYTES:
            return None
        with in_real_tensors():
            _ORDERS.setdefault((order, device), torch.tensor(table(*order), dtype=torch.int32, device=device))
    return _ORDERS[order, device]


def _span(request: Request) -> Span:
    r = request
    tiles = tiles_for(r, table=False)
    left, right = band(r)
    return Span(
        heads=r.batch * r.heads, queries=r.queries, keys=r.keys, right=right, left=left,
        row_block=ROWS * tiles.consumers, key_block=tiles.block, banded=r.banded,
    )  # fmt: skip


def _shapes(r: Request) -> tuple[tuple[int, int, int, int], ...]:
    """Shapes of q, k, v and the result."""
    return (
        (r.batch, r.heads, r.queries, r.head_size),
        (r.batch, r.kv_heads, r.keys, r.head_size),
        (r.batch, r.kv_heads, r.keys, r.value_size),
        (r.batch, r.heads, r.queries, r.value_size),
    )
