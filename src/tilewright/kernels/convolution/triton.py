"""A 2-D convolution of few input channels in Triton, as a product that gathers its left operand.

A program takes BLOCK_M pixels beside one another in a row of the result and BLOCK_N channels of it. It walks the window
of all input channels in steps of BLOCK_K: of each element the row's pixels are a stretch of a row of x, so that loads
are as coalesced as rows are long, and what windows share comes from the caches. Limit: for 3 to 16 channels the loads
of the window, of which one result takes CHANNELS · KH · KW.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import INTERPRETED


@triton.jit
def convolve_rows(
    x: tl.tensor, weight: tl.tensor, y: tl.tensor, height: tl.tensor, width: tl.tensor, out_height: tl.tensor,
    out_width: tl.tensor, channels_out: tl.tensor, segments: tl.tensor, x_n: tl.tensor, x_c: tl.tensor, x_h: tl.tensor,
    x_w: tl.tensor, w_o: tl.tensor, w_c: tl.tensor, w_h: tl.tensor, w_w: tl.tensor, y_n: tl.tensor, y_c: tl.tensor,
    y_h: tl.tensor, y_w: tl.tensor, CHANNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STEP_H: tl.constexpr,
    STEP_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, APART_H: tl.constexpr, APART_W: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """x [N, C, H, W] and weight [O, C, KH, KW] to y [N, O, …]; an element of the window is counted along x's memory."""
    COUNT: tl.constexpr = CHANNELS * KH * KW
    row = tl.program_id(0) // segments
    image, i = (row // out_height).to(tl.int64), row % out_height
    j = tl.program_id(0) % segments * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    top, left = i * STEP_H - PAD_H, j * STEP_W - PAD_W
    begin = x + image * x_n
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.static_range(0, COUNT, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        if CHANNELS_LAST:
            c, a, b = k % CHANNELS, k // (CHANNELS * KW), k // CHANNELS % KW
        else:
            c, a, b = k // (KH * KW), k // KW % KH, k % KW
        at_h, at_w = top + a * APART_H, left[:, None] + (b * APART_W)[None, :]
        inside = ((k < COUNT) & (at_h >= 0) & (at_h < height))[None, :] & (at_w >= 0) & (at_w < width)
        patch = tl.load(begin + (c * x_c + at_h * x_h)[None, :] + at_w * x_w, mask=inside, other=0.0)
        taken = (k < COUNT)[:, None] & (o < channels_out)[None, :]
        taps = tl.load(weight + (c * w_c + a * w_h + b * w_w)[:, None] + (o * w_o)[None, :], mask=taken, other=0.0)
        # The interpreter multiplies the bits of bf16 as if they were integers.
        if INTERPRETED:
            acc += tl.dot(patch.to(tl.float32), taps.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(patch, taps, acc, input_precision=PRECISION)
    result = y + image * y_n + i.to(tl.int64) * y_h + j[:, None] * y_w + o[None, :] * y_c
    tl.store(result, acc.to(y.dtype.element_ty), mask=(j < out_width)[:, None] & (o < channels_out)[None, :])
