"""Nests that reduce with a stride, or in few programs: merges do not make them (`strides`, `starves`).

On a CPU, `split_strided_rows` splits softmax, variance, argmax and argmin along other axes than the last into column
reductions and pointwise kernels, after the cut into forward and backward:

    y = _softmax(x, 1)      [N, C, H, W]   →   top = amax(x, 1); total = sum(exp(x - top), 1)
                                               y = exp(x - top) / total

One nest would read each row with a stride: 27 ms for 1024 × 1024 along the first axis, the three kernels 1.4, eager
1.8 (one core). Column sums read whole cache lines into a vector of totals.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from tilewright.graph.calls import arguments, class_of, tensor
from tilewright.graph.canonical import static
from tilewright.loops.lower import FEW_ROWS, LONG_ROW, Lowered
from tilewright.loops.nest import Level
from tilewright.passes.bodies import write_body
from tilewright.passes.rule import call, cplusplus, rule

STRIDED_BYTES = 64 * 1024
"""A nest may read a smaller tensor with a stride, since it stays in a cache."""
SECTOR_COLUMNS = 4096
"""With longer rows a program cannot hold the 16 rows whose 16-bit elements share a 32-byte sector."""
TILE_COLUMNS = 256
MANY_ROWS = 2**16
"""A program of a GPU holds so few columns of the rows of a sector, and so many rows make enough programs. An RMS norm
over the second axis of 112 x 64 x 512 x 512 in fp32 takes 3,970 µs on an H200 in one kernel, 5,800 in two."""


def strides(lowered: Lowered) -> bool:
    """Whether a nest that reduces accesses the columns of a large tensor with a stride, its rows being contiguous.

    On a GPU this concerns sums over columns, and stores of long rows: a batch norm of 128 channels fused with the copy
    that makes them the last axis took 56 µs for 16 × 32 × 32 in bf16 (H200), since 32 programs each wrote four elements
    of a sector.
    """
    nest = lowered.nest
    reductions = ("reduce_cols", "reduce_rows") if lowered.language == "c++" else ("reduce_cols",)
    if not nest.rows or not any(step.name in reductions for step in nest.steps):
        return False
    if lowered.language == "triton" and nest.col_count <= TILE_COLUMNS and nest.row_count >= MANY_ROWS:
        return False
    accesses = [step.access for step in nest.steps if step.access and step.level is Level.FULL]
    if lowered.language == "triton" and nest.col_count > SECTOR_COLUMNS:
        accesses += [store.access for store in nest.stores if any(nest.split(store.access.strides)[1])]
    for access in accesses:
        buffer = nest.buffers[access.buffer]
        rows, cols = nest.split(access.strides)
        small = buffer.elements * getattr(torch, buffer.dtype).itemsize < STRIDED_BYTES
        if 1 in rows and 1 not in cols and not small:
            return True
    return False


def starves(lowered: Lowered) -> bool:
    """Whether a GPU would run few programs that each reduce a long row."""
    nest = lowered.nest
    long = lowered.language == "triton" and nest.row_count <= FEW_ROWS and nest.col_count >= LONG_ROW
    return long and any(step.name == "reduce_cols" for step in nest.steps)


aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Not float64: its column sums would differ from eager's by more than the contract's four ulp."""
LEAST_BESIDE = 16
"""The least number of contiguous elements across the rows; fewer do not fill a vector."""


def _is_strided(node: fx.Node, operand: fx.Node) -> bool:
    """Whether the operand is large and contiguous, with enough contiguous elements after the reduced axes."""
    # Two kernels that recompute an operand may round it differently, but the second must find the first's extreme.
    if node.target in PLACES and class_of(operand) in ("pointwise", "reduction", "random"):
        return False
    given: Any = arguments(node).get("dim")
    x = tensor(operand)
    if x.dtype not in DTYPES or not static(x.shape):
        return False
    if not x.dim() or x.numel() * x.itemsize < STRIDED_BYTES or not x.is_contiguous():
        return False
    axes = [given] if isinstance(given, int) else given
    if not axes:
        return False
    return prod(x.shape[max(axis % x.dim() for axis in axes) + 1 :]) >= LEAST_BESIDE


PLACES = (aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
BY_BODY = (
    aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default, aten.logsumexp.default,
    aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
    aten.var.correction, aten.std.correction, aten.var_mean.correction,
)  # fmt: skip


@rule(call((*BY_BODY, *PLACES), "operand", ...), on=cplusplus, worth=_is_strided)
def split_strided_rows(node: fx.Node) -> Any:
    return write_body(node, in_cpp=True)
