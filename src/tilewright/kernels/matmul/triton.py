"""c = a · b, tiled through shared memory: the textbook case in Triton.

A program owns a tile of c; for every DEPTH of K it loads a tile of a and one of b, which the compiler
puts into shared memory some steps ahead, and multiplies them on the matrix units. Programs are numbered
so that those at work at one time share rows of a and columns of b in L2. fp32 is multiplied as fp32
(`ieee`), not as the matrix units' tf32.

The limit is the matrix rate. bf16 on an H200: 607 TFLOP/s at 4096³ and 539 at 8192³ (cuBLAS 779 and 781);
fp32: 43 and 45 (51 and 51). What keeps it below: addresses and bounds of the next tile are computed by the
warps that multiply, and nothing hides a tile's last store (`kernels/linear/cuda.cu` does better in ten
times the lines).
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.kernels.activation.formulas import rounded
from tilewright.kernels.device import current

GROUP = tl.constexpr(8)
"""Rows of tiles that are walked together."""


PART = tl.constexpr(64)
"""Depth that is summed apart in fp32: the error of a long sum stays near the library's. With parts of 256 one of
64 sums over 1000 products was 5 ulp off."""


@triton.jit
def _add_step(total, a, b, row, column, start, m, n, k, a_stride, b_stride, DEPTH: tl.constexpr):
    """total + a[row, start : start + DEPTH] · b[start : start + DEPTH, column]"""
    at = start + tl.arange(0, DEPTH)
    inside = at < k
    from_a = tl.load(a + row[:, None] * a_stride + at[None, :], (row < m)[:, None] & inside[None, :], other=0.0)
    from_b = tl.load(
        b + at.to(tl.int64)[:, None] * b_stride + column[None, :], inside[:, None] & (column < n)[None, :], other=0.0
    )
    return tl.dot(from_a, from_b, total, input_precision="ieee")


@triton.jit
def _matmul(a, b, c, m, n, k, a_stride, b_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    tile = tl.program_id(0)
    rows, columns = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    group = tile // (GROUP * columns)
    height = tl.minimum(rows - group * GROUP, GROUP)
    inside = tile - group * GROUP * columns
    row = ((group * GROUP + inside % height) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (inside // height * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if c.dtype.element_ty == tl.float32:
        for first in range(0, k, PART):
            part = tl.zeros([ROWS, COLUMNS], tl.float32)
            for step in tl.static_range(0, PART, DEPTH):
                part = _add_step(part, a, b, row, column, first + step, m, n, k, a_stride, b_stride, DEPTH)
            total += part
    else:
        for start in range(0, k, DEPTH):
            total = _add_step(total, a, b, row, column, start, m, n, k, a_stride, b_stride, DEPTH)
    inside_c = (row < m)[:, None] & (column < n)[None, :]
    tl.store(c + row[:, None] * n + column[None, :], rounded(total, c.dtype.element_ty), inside_c)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] · b [K, N], neighbours in a row adjacent; K > 0."""
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    narrow = a.element_size() == 2
    rows, columns, depth = (128, 256, 64) if narrow else (64, 64, 16)
    with current(a):
        _matmul[(triton.cdiv(m, rows) * triton.cdiv(n, columns),)](
            a, b, c, m, n, k, a.stride(0), b.stride(0),
            ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=8 if narrow else 4, num_stages=3 if narrow else 2,
        )  # fmt: skip
    return c
