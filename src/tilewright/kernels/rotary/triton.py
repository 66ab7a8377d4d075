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
