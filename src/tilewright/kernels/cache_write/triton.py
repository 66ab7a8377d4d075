"""Writes a token's keys and values into their caches, with the rotary embedding of keys and queries, in Triton.

A program takes one head of one token: of the queries, the keys, or the values. Limit: the latency of a launch.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import rounded


@triton.jit
def _turned(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, column: tl.tensor, half: tl.constexpr, more: tl.constexpr,
    ROTARY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Both halves of a head, in fp32."""
    inside = column < half
    a = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + half + column, mask=inside, other=0.0).to(tl.float32)
    if ROTARY:
        first = a * tl.load(cos + column, mask=inside, other=0.0).to(tl.float32)
        second = b * tl.load(cos + more + column, mask=inside, other=0.0).to(tl.float32)
        first -= b * tl.load(sin + column, mask=inside, other=0.0).to(tl.float32)
        second += a * tl.load(sin + more + column, mask=inside, other=0.0).to(tl.float32)
        return first, second
    else:
        return a, b


@triton.jit
def _store(to: tl.tensor, a: tl.tensor, b: tl.tensor, column: tl.tensor, half: tl.constexpr, exists: tl.tensor) -> None:
    inside = (column < half) & exists
    tl.store(to + column, rounded(a, to.dtype.element_ty), mask=inside)
    tl.store(to + half + column, rounded(b, to.dtype.element_ty), mask=inside)


@triton.jit
def write_cache(
    keys: tl.tensor, values: tl.tensor, k: tl.tensor, v: tl.tensor, place: tl.tensor, q: tl.tensor, turned_q: tl.tensor,
    cos: tl.tensor, sin: tl.tensor, tokens: tl.tensor, heads: tl.tensor, kv_heads: tl.tensor, length: tl.tensor,
    keys_b: tl.tensor, keys_h: tl.tensor, keys_s: tl.tensor, values_b: tl.tensor, values_h: tl.tensor,
    values_s: tl.tensor, k_b: tl.tensor, k_h: tl.tensor, k_s: tl.tensor, v_b: tl.tensor, v_h: tl.tensor,
    v_s: tl.tensor, q_b: tl.tensor, q_h: tl.tensor, q_s: tl.tensor, turned_b: tl.tensor, turned_h: tl.tensor,
    turned_s: tl.tensor, cos_b: tl.tensor, cos_s: tl.tensor, sin_b: tl.tensor, sin_s: tl.tensor, half: tl.constexpr,
    more: tl.constexpr, ROTARY: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Program (batch · tokens + token, head): the `heads` of q, then `kv_heads` of k and as many of v.

    Token t goes to place[t] of a cache [batch, kv head, length, 2 half]; negative places count from the end; places
    outside stop the device. The angles of a head's second half begin `more` elements after those of the first: `half`,
    or 0 if both halves share them.
    """
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDTH)
    if ROTARY:
        cos += batch * cos_b + token * cos_s
        sin += batch * sin_b + token * sin_s
    at = tl.load(place + token).to(tl.int64)
    at = tl.where(at < 0, at + length, at)
    exists = (at >= 0) & (at < length)
    tl.device_assert(exists, "index out of range of the cache")
    if head < heads:
        if ROTARY:
            a, b = _turned(q + batch * q_b + head * q_h + token * q_s, cos, sin, column, half, more, True)
            _store(turned_q + batch * turned_b + head * turned_h + token * turned_s, a, b, column, half, exists | True)
    elif head < heads + kv_heads:
        head -= heads
        a, b = _turned(k + batch * k_b + head * k_h + token * k_s, cos, sin, column, half, more, ROTARY)
        _store(keys + batch * keys_b + head * keys_h + at * keys_s, a, b, column, half, exists)
    else:
        head -= heads + kv_heads
        a, b = _turned(v + batch * v_b + head * v_h + token * v_s, cos, sin, column, half, more, False)
        _store(values + batch * values_b + head * values_h + at * values_s, a, b, column, half, exists)
