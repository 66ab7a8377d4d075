"""Attention within windows in Triton: a program holds all scores of a window, and a mask for all windows that share it.

    S = scale · Q Kᵀ + mask       P = exp(S - max S) / Σ       O = P V
    dP = dO Vᵀ     dS = P ∘ (dP - rowsum(P ∘ dP))     dQ = scale · dS K     dK = scale · dSᵀ Q     dV = Pᵀ dO

A row of scores lies in one tile, so nothing is kept for the backward but q, k, v and the mask. Program
(head, mask, part) walks along its part of the windows that read one mask: windows m, m + M, m + 2 M, … of mask m of M.
dmask is Σ dS over these windows; a second kernel adds the parts, always in the same order.

Limit: memory; each operand is read once and each result written once. On an H200, 4,096 windows of 49 places and 3
heads of 32, bf16: forward 60 us where a copy of as many bytes takes 37, backward 145, with the gradient of a mask 183.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import INTERPRETED, rounded
from tilewright.hardware.architectures import limits_of
from tilewright.kernels.attention import dispatch
from tilewright.kernels.attention.portable import launch
from tilewright.kernels.attention.request import DIVISIBILITY, MIN_SCALAR_WIDTH, strides_of
from tilewright.kernels.column_sums import add_parts
from tilewright.kernels.device import NARROW
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe

MOST_PLACES = 64
MOST_WIDTH = 64
"""Wider tiles of the backward do not fit into registers."""
WAVES = 3
PROGRAMS = {"forward": 4, "backward": 2}
"""Programs per multiprocessor, which it runs at once."""
STAGES = 2


@triton.jit
def _load(x, stride, places, width, PLACES: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """A window's rows of one head, zeros around them."""
    row, column = tl.arange(0, PLACES)[:, None], tl.arange(0, WIDTH)[None, :]
    tile = tl.load(x + row * stride + column, mask=(row < places) & (column < width), other=0.0)
    # The interpreter multiplies the bits of bf16 as if they were integers.
    return tile.to(tl.float32) if INTERPRETED else tile


@triton.jit
def _store(x, tile, stride, places, width, PLACES: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.arange(0, PLACES)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (row < places) & (column < width)
    tl.store(x + row * stride + column, rounded(tile, x.dtype.element_ty), mask=inside)


@triton.jit
def _added(  # type: ignore[no-untyped-def]
    mask, group, head, queries, keys, stride_m, stride_h, stride_q, stride_k, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The terms added to the scores of all windows of a mask: its values, and -inf for the padding of the keys."""
    i, j = tl.arange(0, QUERIES)[:, None], tl.arange(0, KEYS)[None, :]
    added = tl.where(j < keys, tl.zeros([QUERIES, KEYS], tl.float32), float("-inf"))
    if MASKED:
        at = mask + group.to(tl.int64) * stride_m + head.to(tl.int64) * stride_h
        values = tl.load(at + i * stride_q + j * stride_k, mask=(i < queries) & (j < keys), other=0.0)
        added += values.to(tl.float32)
    return added


@triton.jit
def _weights(q_tile, k_tile, added, scale):  # type: ignore[no-untyped-def]
    """P in fp32. A row of -inf is NaN, as PyTorch's softmax of it."""
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale + added
    p = tl.exp(s - tl.max(s, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def forward(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, mask: tl.tensor | None, out: tl.tensor, heads: tl.tensor,
    windows: tl.tensor, masks: tl.tensor, each: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    head_size: tl.constexpr, value_size: tl.constexpr, q_stride_b: tl.tensor, q_stride_h: tl.tensor,
    q_stride_s: tl.tensor, k_stride_b: tl.tensor, k_stride_h: tl.tensor, k_stride_s: tl.tensor, v_stride_b: tl.tensor,
    v_stride_h: tl.tensor, v_stride_s: tl.tensor, out_stride_b: tl.tensor, out_stride_h: tl.tensor,
    out_stride_s: tl.tensor, mask_stride_m: tl.tensor, mask_stride_h: tl.tensor, mask_stride_q: tl.tensor,
    mask_stride_k: tl.tensor, scale: tl.float32, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Program (part · masks + mask) · heads + head: `each` of the windows that read that mask."""
    head = tl.program_id(0) % heads
    group = tl.program_id(0) // heads % masks
    first = tl.program_id(0) // heads // masks * each
    added = _added(
        mask, group, head, queries, keys, mask_stride_m, mask_stride_h, mask_stride_q, mask_stride_k, QUERIES, KEYS,
        mask is not None,
    )  # fmt: skip
    head = head.to(tl.int64)
    for turn in range(first, tl.minimum(first + each, windows // masks)):
        window = (group + turn * masks).to(tl.int64)
        q_tile = _load(q + window * q_stride_b + head * q_stride_h, q_stride_s, queries, head_size, QUERIES, WIDTH)
        k_tile = _load(k + window * k_stride_b + head * k_stride_h, k_stride_s, keys, head_size, KEYS, WIDTH)
        v_tile = _load(v + window * v_stride_b + head * v_stride_h, v_stride_s, keys, value_size, KEYS, VALUE_WIDTH)
        p = _weights(q_tile, k_tile, added, scale)
        o = tl.dot(rounded(p, v_tile.dtype), v_tile, input_precision="ieee")
        to = out + window * out_stride_b + head * out_stride_h
        _store(to, o, out_stride_s, queries, value_size, QUERIES, VALUE_WIDTH)


@triton.jit
def backward(
    dout: tl.tensor, q: tl.tensor, k: tl.tensor, v: tl.tensor, mask: tl.tensor | None, dq: tl.tensor, dk: tl.tensor,
    dv: tl.tensor, parts: tl.tensor | None, heads: tl.tensor, windows: tl.tensor, masks: tl.tensor, each: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, head_size: tl.constexpr, value_size: tl.constexpr, dout_stride_b: tl.tensor,
    dout_stride_h: tl.tensor, dout_stride_s: tl.tensor, q_stride_b: tl.tensor, q_stride_h: tl.tensor,
    q_stride_s: tl.tensor, k_stride_b: tl.tensor, k_stride_h: tl.tensor, k_stride_s: tl.tensor, v_stride_b: tl.tensor,
    v_stride_h: tl.tensor, v_stride_s: tl.tensor, dq_stride_b: tl.tensor, dq_stride_h: tl.tensor,
    dq_stride_s: tl.tensor, dk_stride_b: tl.tensor, dk_stride_h: tl.tensor, dk_stride_s: tl.tensor,
    dv_stride_b: tl.tensor, dv_stride_h: tl.tensor, dv_stride_s: tl.tensor, mask_stride_m: tl.tensor,
    mask_stride_h: tl.tensor, mask_stride_q: tl.tensor, mask_stride_k: tl.tensor, scale: tl.float32,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Programs as in `forward`; parts [part, mask, head, query, key] is Σ dS of each program, fp32."""
    head = tl.program_id(0) % heads
    group = tl.program_id(0) // heads % masks
    first = tl.program_id(0) // heads // masks * each
    added = _added(
        mask, group, head, queries, keys, mask_stride_m, mask_stride_h, mask_stride_q, mask_stride_k, QUERIES, KEYS,
        mask is not None,
    )  # fmt: skip
    head = head.to(tl.int64)
    total = tl.zeros([QUERIES, KEYS], tl.float32)
    for turn in range(first, tl.minimum(first + each, windows // masks)):
        window = (group + turn * masks).to(tl.int64)
        q_tile = _load(q + window * q_stride_b + head * q_stride_h, q_stride_s, queries, head_size, QUERIES, WIDTH)
        k_tile = _load(k + window * k_stride_b + head * k_stride_h, k_stride_s, keys, head_size, KEYS, WIDTH)
        v_tile = _load(v + window * v_stride_b + head * v_stride_h, v_stride_s, keys, value_size, KEYS, VALUE_WIDTH)
        dout_tile = _load(
            dout + window * dout_stride_b + head * dout_stride_h, dout_stride_s, queries, value_size, QUERIES,
            VALUE_WIDTH,
        )  # fmt: skip
        p = _weights(q_tile, k_tile, added, scale)
        dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
        ds = p * (dp - tl.sum(p * dp, 1)[:, None])
        total += ds
        narrow = rounded(ds * scale, q_tile.dtype)
        dv_tile = tl.dot(tl.trans(rounded(p, v_tile.dtype)), dout_tile, input_precision="ieee")
        dk_tile = tl.dot(tl.trans(narrow), q_tile, input_precision="ieee")
        dq_tile = tl.dot(narrow, k_tile, input_precision="ieee")
        _store(dq + window * dq_stride_b + head * dq_stride_h, dq_tile, dq_stride_s, queries, head_size, QUERIES, WIDTH)
        _store(dk + window * dk_stride_b + head * dk_stride_h, dk_tile, dk_stride_s, keys, head_size, KEYS, WIDTH)
        to = dv + window * dv_stride_b + head * dv_stride_h
        _store(to, dv_tile, dv_stride_s, keys, value_size, KEYS, VALUE_WIDTH)
    if parts is not None:
        i, j = tl.arange(0, QUERIES)[:, None], tl.arange(0, KEYS)[None, :]
        at = (tl.program_id(0).to(tl.int64) * queries + i) * keys + j
        tl.store(parts + at, total, mask=(i < queries) & (j < keys))


def refuses(dtype: torch.dtype, queries: int, keys: int, head_size: int, value_size: int) -> str | None:
    """Why the kernels do not support a call of these sizes, or None."""
    if dtype not in NARROW:
        return f"{dtype}: these kernels multiply bfloat16 and float16"
    if max(queries, keys) > MOST_PLACES:
        return f"more than {MOST_PLACES} places in a window"
    if max(head_size, value_size) > MOST_WIDTH:
        return f"head sizes above {MOST_WIDTH}"
    return None


def forward_recipe(
    call: RecipeBuilder, q: Operand, k: Operand, v: Operand, mask: Operand | None, scale: float
) -> Recipe:
    """out [B, H, Sq, Dv], its axes in memory in q's order."""
    q, k, v = (launch.with_aligned_rows(call, x) for x in (q, k, v))
    out = _empty(call, q, v.shape[3])
    programs, each = _cut(q, mask, "forward")
    call.launch(
        forward, (programs,), q, k, v, mask, out, *_sizes(q, k, v, mask, each), *_steps(q, k, v, out),
        *strides_of(mask), scale, **_tile(q, k, v), num_warps=4, num_stages=STAGES,
    )  # fmt: skip
    return call.finish(out)


def backward_recipe(
    call: RecipeBuilder, dout: Operand, q: Operand, k: Operand, v: Operand, mask: Operand | None, scale: float,
    want_dmask: bool,
) -> Recipe:  # fmt: skip
    """dq, dk and dv as q, k and v lie, and dmask [M, H, Sq, Sk], empty unless it is wanted; the same bits each time."""
    made = [_empty(call, x, x.shape[3]) for x in (q, k, v)]
    dout, q, k, v = (launch.with_aligned_rows(call, x) for x in (dout, q, k, v))
    programs, each = _cut(q, mask, "backward")
    parts, dmask = None, call.empty((0,), q.dtype)
    if mask is not None and want_dmask:
        dmask = call.empty(mask.shape, mask.dtype)
        parts = call.empty((programs // (mask.shape[0] * q.shape[1]), *dmask.shape), torch.float32)
    tile = _tile(q, k, v)
    warps = 4 if max(tile["WIDTH"], tile["VALUE_WIDTH"]) <= 32 else 8
    call.launch(
        backward, (programs,), dout, q, k, v, mask, *made, parts, *_sizes(q, k, v, mask, each),
        *_steps(dout, q, k, v, *made), *strides_of(mask), scale, **tile, num_warps=warps, num_stages=STAGES,
    )  # fmt: skip
    if parts is not None:
        add_parts(call, parts, dmask)
    return call.finish(*made, dmask)


def _empty(call: RecipeBuilder, x: Operand, width: int) -> Operand:
    shape, strides = dispatch.strides_like(x, width)
    return call.empty(shape, x.dtype, strides)


def _cut(q: Operand, mask: Operand | None, direction: str) -> tuple[int, int]:
    """Programs, and how many windows each takes: all that read one mask, or parts of them that fill the device."""
    masks = 1 if mask is None else mask.shape[0]
    shared, rows = q.shape[0] // masks, masks * q.shape[1]
    wanted = WAVES * PROGRAMS[direction] * limits_of(q.device).multiprocessors
    each = triton.cdiv(shared, min(shared, triton.cdiv(wanted, rows)))
    return triton.cdiv(shared, each) * rows, each


def _sizes(q: Operand, k: Operand, v: Operand, mask: Operand | None, each: int) -> tuple[int, ...]:
    """The kernels' parameters from `heads` to `value_size`."""
    masks = 1 if mask is None else mask.shape[0]
    return q.shape[1], q.shape[0], masks, each, q.shape[2], k.shape[2], q.shape[3], v.shape[3]


def _steps(*tensors: Operand) -> list[int]:
    return [step for x in tensors for step in x.strides[:3]]


def _tile(q: Operand, k: Operand, v: Operand) -> dict[str, int]:
    """Padded to what `tl.dot` takes; see `padded_widths` for rows that are loaded one element at a time."""
    by_elements = any(step % DIVISIBILITY for x in (q, k, v) for step in (*x.strides[:3], x.shape[3]))
    least = MIN_SCALAR_WIDTH if by_elements and limits_of(q.device).tensor_copies else 16
    names = ("QUERIES", "KEYS", "WIDTH", "VALUE_WIDTH")
    sizes = ((q.shape[2], 16), (k.shape[2], 16), (q.shape[3], least), (v.shape[3], least))
    return {name: max(most, triton.next_power_of_2(size)) for name, (size, most) in zip(names, sizes, strict=True)}
