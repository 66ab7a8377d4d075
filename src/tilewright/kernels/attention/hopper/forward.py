"""FlashAttention forward for Hopper: which calls it takes, and their launch.

Persistent programs; a producer warp, and one to three warpgroups that multiply (`forward_kernel.py`). `tiles.py` has
the builds and which a call takes, `schedule.py` the order of tiles. Head sizes between are padded by the copy engine.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilewright.kernels import nvrtc
from tilewright.kernels.attention.hopper.chain import At, Chain, Launch, Map, Parameter
from tilewright.kernels.attention.hopper.launch import Tensor, built
from tilewright.kernels.attention.hopper.schedule import Span, table
from tilewright.kernels.attention.hopper.tiles import NO_LIMIT, ROWS, WIDEST, band, tiles_for
from tilewright.kernels.attention.request import Operands, Request, Strides
from tilewright.kernels.device import NARROW

TRITON = "3.6."
"""Gluon is experimental: what its functions are called and do is that of one release."""
STRIDE_LIMIT = 1 << 39
"""Elements of 16 bits in the 2⁴⁰ bytes that a stride of the copy engine must be below."""
ORDER_BYTES = 64 << 20
"""Of all tables of tiles together."""
_ORDERS: dict[tuple[Span, int, torch.device], torch.Tensor] = {}
"""Tables, never freed: a captured graph reads its own whenever it is replayed."""


def supports(request: Request) -> str | None:
    """Why these kernels cannot compute `request`; None where they can."""
    if request.device.type != "cuda" or torch.cuda.get_device_capability(request.device) != (9, 0):
        return "the matrix instructions are those of compute capability 9.0"
    return refuses(request) or _missing()


def refuses(request: Request) -> str | None:
    """What of `supports` the call decides and not the machine."""
    r = request
    if r.dtype not in NARROW:
        return f"{r.dtype}: the matrix instructions take 16-bit floats"
    if 0 in (r.batch, r.heads, r.queries, r.keys, r.head_size, r.value_size):
        return "there is nothing to compute"
    if max(r.head_size, r.value_size) > WIDEST:
        return f"head size {max(r.head_size, r.value_size)}: the sums of {WIDEST} fill the registers"
    if not r.aligned or r.value_size % 8:
        return "the copy engine takes rows that begin at multiples of 16 bytes"
    if max(r.queries, r.keys) >= NO_LIMIT or r.batch * r.heads * (r.queries // ROWS + 1) >= 1 << 31:
        return "places are counted in 32 bits"
    for name, sizes, strides in zip("qkv", _shapes(r), (r.q_strides, r.k_strides, r.v_strides), strict=False):
        if any(size > 1 and not 0 < stride < STRIDE_LIMIT for size, stride in zip(sizes[:3], strides, strict=False)):
            return f"{name} has strides {strides}: the copy engine takes those above zero and below 2⁴⁰ bytes"
    if not r.scale > 0:
        return f"scale {r.scale}: the largest score is looked for before it is scaled"
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


def forward(request: Request, operands: Operands, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Attention of `operands` into `out` [B, H, Sq, Dv] and `lse` fp32 [B, H, Sq], the natural log-sum-exp.

    For a request that `supports` takes, on the current device and its current stream. Nothing is allocated but
    in the first call of a request; nothing waits. A query that sees no key gets zeros, and -inf in `lse`.
    """
    strides = out.stride()
    try:
        launch = plan(request, strides)
    except NoTable:
        launch = untabled(request, strides)
    launch(operands, out, lse)


@dataclass(frozen=True)
class Bound:
    """The launch of every call of a request, on its device. The values of a call: where q, k, v, out and lse begin."""

    chain: Chain
    device: int

    def __call__(self, operands: Operands, out: torch.Tensor, lse: torch.Tensor) -> None:
        q, k, v, _, *_ = operands
        values = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()
        self.chain.run(values, nvrtc.stream(self.device))


def bound(request: Request, out_strides: Strides) -> Callable[[Operands, torch.Tensor, torch.Tensor], None]:
    """The launch of every call of `request` into results with these strides."""
    try:
        return plan(request, out_strides)
    except NoTable:
        return functools.partial(forward, request)


class NoTable(Exception):
    """A table of tiles is wanted while a CUDA graph is captured: it cannot be sent to the device then."""


@functools.lru_cache(maxsize=1024)
def plan(request: Request, out_strides: Strides) -> Bound:
    """The launch of a request into a result with these strides; raises `NoTable`."""
    span = _span(request)
    programs = min(span.tiles, _at_once(request))
    order = _order(request, span, programs) if span.tabled(programs) else None
    if order is None:
        return untabled(request, out_strides)
    return _launch(request, out_strides, span, programs, order)


@functools.lru_cache(maxsize=1024)
def untabled(request: Request, out_strides: Strides) -> Bound:
    """`plan` for tiles that take equally long, or that the hardware deals out, one a program."""
    span = _span(request)
    programs = span.tiles
    if not request.banded:
        programs = min(programs, _at_once(request))
    return _launch(request, out_strides, span, programs, None)


def _at_once(request: Request) -> int:
    multiprocessors: int = torch.cuda.get_device_properties(request.device).multi_processor_count
    return multiprocessors * tiles_for(request, table=False).neighbours


def _order(request: Request, span: Span, programs: int) -> torch.Tensor | None:
    """The table of a call on its device; None where there are too many already."""
    head_bytes = 2 * request.keys * (request.head_size + request.value_size) // request.group
    key = span, head_bytes, request.device
    if key not in _ORDERS:
        if torch.cuda.is_current_stream_capturing():
            raise NoTable
        if sum(order.nbytes for order in _ORDERS.values()) > ORDER_BYTES:
            return None
        made = torch.tensor(table(span, programs, head_bytes), dtype=torch.int32, device=request.device)
        _ORDERS.setdefault(key, made)
    return _ORDERS[key]


def _launch(request: Request, out_strides: Strides, span: Span, programs: int, order: torch.Tensor | None) -> Bound:
    r = request
    device = torch.cuda.current_device() if r.device.index is None else r.device.index
    tiles = tiles_for(r, table=order is not None)
    rows = ROWS, tiles.block, tiles.block, ROWS
    strides = r.q_strides, r.k_strides, r.v_strides, out_strides
    tensors = [Tensor(*sized, r.dtype) for sized in zip(_shapes(r), strides, rows, strict=True)]
    log2e = math.log2(math.e)
    # A soft cap is cap · tanh(s / cap): the kernel's tanh takes twice its argument, in powers of two.
    scale, inner = (r.softcap * log2e, 2 * log2e * r.scale / r.softcap) if r.softcap else (r.scale * log2e, 0.0)
    counts = r.heads, r.group, r.queries, r.keys, span.right, span.left, span.row_blocks, span.tiles
    parameters: list[Parameter] = []
    for i, tensor in enumerate(tensors):
        parameters += Map(tensor, i), *tensor.shape, *tensor.strides
    lse = At(len(tensors))
    # Last, the addresses of two scratch areas that these kernels do not use.
    parameters += lse, lse if order is None else order.data_ptr(), scale, inner, *counts, 0, 0
    signature = "iiiiqqqq" * len(tensors) + "PPff" + "i" * len(counts) + "PP"
    return Bound(Chain([Launch(built(tiles, device), (programs, 1, 1), signature, parameters)]), device)


def _span(request: Request) -> Span:
    r = request
    tiles = tiles_for(r, table=False)
    left, right = band(r)
    return Span(
        heads=r.batch * r.heads, queries=r.queries, keys=r.keys, right=right, left=left,
        row_block=ROWS * tiles.consumers, key_block=tiles.block, banded=r.banded,
    )  # fmt: skip


def _shapes(r: Request) -> tuple[tuple[int, int, int, int], ...]:
    """Of q, k, v and the result."""
    return (
        (r.batch, r.heads, r.queries, r.head_size),
        (r.batch, r.kv_heads, r.keys, r.head_size),
        (r.batch, r.kv_heads, r.keys, r.value_size),
        (r.batch, r.heads, r.queries, r.value_size),
    )
