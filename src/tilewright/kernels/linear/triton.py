"""gelu(x · weightᵀ + bias) in plain Triton: a persistent kernel over tiles fetched by tensor descriptors.

Every program walks every n-th tile, grouped so that concurrent programs share rows and columns in L2. The compiler
pipelines the loop over K, but the warps that multiply also compute the GELU and store, while the matrix units wait.
That is its limit; in `cuda.cu` other warps have the epilogue.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.hardware.architectures import limits_of
from tilewright.kernels.activation.formulas import activate, rounded
from tilewright.kernels.device import current

ROWS, COLUMNS, DEPTH = 128, 256, 64
GROUP = tl.constexpr(8)
"""Rows of tiles that are walked column by column."""


@triton.jit
def _linear(
    x, weight, bias, y, rows, columns, steps, programs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    KIND: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """x, weight and y are tensor descriptors; rows and columns count tiles of y, steps those of DEPTH in K."""
    tile = tl.program_id(0)
    while tile < rows * columns:
        group = tile // (GROUP * columns)
        height = tl.minimum(rows - group * GROUP, GROUP)
        inside = tile - group * GROUP * columns
        row, column = (group * GROUP + inside % height) * ROWS, inside // height * COLUMNS
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(steps):
            a = x.load([row, step * DEPTH])
            b = weight.load([column, step * DEPTH])
            total = tl.dot(a, b.T, total)
        if BIAS:
            total += bias.load([column]).to(tl.float32)[None, :]
        y.store([row, column], rounded(activate(total, KIND, False), y.dtype))
        tile += programs


def linear_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, approximate: str = "none"
) -> torch.Tensor:
    """x [M, K], weight [N, K], bias [N]: 16-bit floats, rows of whole multiples of 16 bytes, aligned to 16."""
    y = x.new_empty(len(x), len(weight))
    rows, columns = triton.cdiv(len(x), ROWS), triton.cdiv(len(weight), COLUMNS)
    resident = limits_of(x.device).multiprocessors
    programs = min(rows * columns, resident)
    with current(x):
        _linear[(programs,)](
            TensorDescriptor.from_tensor(x, [ROWS, DEPTH]),
            TensorDescriptor.from_tensor(weight, [COLUMNS, DEPTH]),
            TensorDescriptor.from_tensor(weight[:, 0].contiguous() if bias is None else bias, [COLUMNS]),
            TensorDescriptor.from_tensor(y, [ROWS, COLUMNS]),
            rows, columns, triton.cdiv(x.shape[1], DEPTH), programs,
            ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH,
            KIND="gelu_tanh" if approximate == "tanh" else "gelu", BIAS=bias is not None, num_warps=8, num_stages=3,
        )  # fmt: skip
    return y
