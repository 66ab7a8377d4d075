"""Rotary position embedding in Triton: queries and keys of any layout in one launch.

A program takes one position of one sequence and a block of heads of either q or k, so that cos and sin are
read once for all of them. The rotation by the opposite angle is its own gradient, so the backward is the
same kernel with sin negated.

Limit: memory. Share of a copy on an H200, bf16: 32 heads of q and 8 of k, d 128: 0.94; 32 heads of both, d 64: 0.98.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.kernels.activation.formulas import rounded
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe

LEAST, MOST = 1024, 4096
"""Elements of a program's block of heads, if there are enough heads."""
WARP_ELEMENTS = 512
"""Elements of a warp: two vectors of 16 bytes for each thread in 16 bits."""


@triton.jit
def _rotated(a: tl.tensor, b: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _rotate_heads(
    x: tl.tensor, out: tl.tensor, cos: tl.tensor, sin: tl.tensor, first: tl.tensor, heads: tl.tensor,
    pairs: tl.tensor, x_head: tl.tensor, out_head: tl.tensor,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
) -> None:  # fmt: skip
    head = (first + tl.arange(0, HEADS))[:, None]
    if INTERLEAVED:
        lane = tl.arange(0, 2 * PAIRS)[None, :]
        inside = (head < heads) & (lane < 2 * pairs)
        both = tl.load(x + head.to(tl.int64) * x_head + lane, mask=inside).to(tl.float32)
        a, b = tl.split(tl.reshape(both, [HEADS, PAIRS, 2]))
        a, b = _rotated(a, b, cos[None, :], sin[None, :])
        both = tl.reshape(tl.join(a, b), [HEADS, 2 * PAIRS])
        tl.store(out + head.to(tl.int64) * out_head + lane, rounded(both, out.dtype.element_ty), mask=inside)
    else:
        lane = tl.arange(0, PAIRS)[None, :]
        inside = (head < heads) & (lane < pairs)
        x += head.to(tl.int64) * x_head + lane
        out += head.to(tl.int64) * out_head + lane
        a, b = tl.load(x, mask=inside).to(tl.float32), tl.load(x + pairs, mask=inside).to(tl.float32)
        a, b = _rotated(a, b, cos[None, :], sin[None, :])
        tl.store(out, rounded(a, out.dtype.element_ty), mask=inside)
        tl.store(out + pairs, rounded(b, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length"])
def rotate(
    q: tl.tensor, k: tl.tensor, q_out: tl.tensor, k_out: tl.tensor, cos: tl.tensor, sin: tl.tensor,
    length: tl.tensor, q_heads: tl.tensor, k_heads: tl.tensor, pairs: tl.tensor, q_batch: tl.tensor,
    q_head: tl.tensor, q_position: tl.tensor, k_batch: tl.tensor, k_head: tl.tensor, k_position: tl.tensor,
    q_out_batch: tl.tensor, q_out_head: tl.tensor, q_out_position: tl.tensor, k_out_batch: tl.tensor,
    k_out_head: tl.tensor, k_out_position: tl.tensor, angle_position: tl.tensor,
    SIGN: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
) -> None:  # fmt: skip
    """Program (batch·length + position, block): q_out or k_out [batch, its heads, position, :], strides in elements."""
    batch = (tl.program_id(0) // length).to(tl.int64)
    position = (tl.program_id(0) % length).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    c = tl.load(cos + position * angle_position + pair, mask=pair < pairs).to(tl.float32)
    s = tl.load(sin + position * angle_position + pair, mask=pair < pairs).to(tl.float32) * SIGN
    blocks = tl.cdiv(q_heads, HEADS)
    block = tl.program_id(1)
    if block < blocks:
        q += batch * q_batch + position * q_position
        q_out += batch * q_out_batch + position * q_out_position
        _rotate_heads(q, q_out, c, s, block * HEADS, q_heads, pairs, q_head, q_out_head, HEADS, PAIRS, INTERLEAVED)
    else:
        k += batch * k_batch + position * k_position
        k_out += batch * k_out_batch + position * k_out_position
        first = (block - blocks) * HEADS
        _rotate_heads(k, k_out, c, s, first, k_heads, pairs, k_head, k_out_head, HEADS, PAIRS, INTERLEAVED)


def recipe(
    call: RecipeBuilder, q: Operand, k: Operand, cos: Operand, sin: Operand, interleaved: bool, backward: bool
) -> Recipe:
    """q[B, H, S, D] and k[B, K, S, D] rotated, by the negative angles if `backward`."""
    q, k = _readable(call, q), _readable(call, k)
    cos, sin = call.contiguous(cos), call.contiguous(sin)
    results = call.empty_like(q), call.empty_like(k)
    (batch, q_heads, length, width), k_heads = q.shape, k.shape[1]
    if batch * length * width == 0 or q_heads + k_heads == 0:
        return call.finish(*results)
    pairs = triton.next_power_of_2(width // 2)
    heads = _heads(q_heads, k_heads, 2 * pairs)
    blocks = triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)
    steps = [step for x in (q, k, *results) for step in x.strides[:3]]
    call.launch(
        rotate, (batch * length, blocks), q, k, *results, cos, sin, length, q_heads, k_heads, width // 2, *steps,
        cos.stride(0), SIGN=-1.0 if backward else 1.0, HEADS=heads, PAIRS=pairs, INTERLEAVED=interleaved,
        num_warps=min(max(heads * 2 * pairs // WARP_ELEMENTS, 1), 4),
    )  # fmt: skip
    return call.finish(*results)


def _readable(call: RecipeBuilder, x: Operand) -> Operand:
    return x if is_readable(x.strides) else call.copy(x)


def is_readable(strides: tuple[int, ...]) -> bool:
    """Whether the last dimension of a tensor, and that of `empty_like` of it, has stride 1.

    If another dimension has stride 1 too (overlapping windows), `empty_like` may make that one the innermost.
    """
    *steps, last = strides
    return last == 1 and 1 not in steps


def _heads(q_heads: int, k_heads: int, width: int) -> int:
    """Heads of a block: as many as q and k both have, so that no block is mostly empty."""
    shared: int = triton.next_power_of_2(max(min(q_heads, k_heads), 1))
    wanted: int = min(max(shared, LEAST // width), triton.next_power_of_2(max(q_heads, k_heads)))
    return max(min(wanted, MOST // width), 1)
