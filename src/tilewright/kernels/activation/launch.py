"""Launches of the Triton activations: rows, elements of a program, grid."""

from __future__ import annotations

from typing import Any

import torch
import triton

from tilewright.kernels.activation import triton as kernels
from tilewright.kernels.activation.rows import rows_of
from tilewright.kernels.device import runs_triton
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe

BLOCK = 1024
"""Elements a program moves of each tensor: one vector of 16 bytes for each of 128 threads in 16 bits."""
WARPS = 4


def _computed(
    call: RecipeBuilder, kernel: Any, tensors: tuple[Operand, ...], count: int, kind: str
) -> tuple[Operand, ...]:
    """`count` new contiguous tensors like the first of `tensors`, filled by `kernel`."""
    first = tensors[0]
    results = tuple(call.empty(first.shape, first.dtype) for _ in range(count))
    if first.numel():
        rows = rows_of(call, *tensors)
        block = min(BLOCK, triton.next_power_of_2(rows.columns))
        call.launch(
            kernel, (rows.count * triton.cdiv(rows.columns, block),),
            *rows.tensors, *results, rows.columns, *rows.strides,
            KIND=kind, PRECISE=first.dtype == torch.float32, BLOCK=block, FLAT=rows.count == 1, num_warps=WARPS,
        )  # fmt: skip
    return results


def forward(call: RecipeBuilder, x: Operand, kind: str) -> Recipe | None:
    """act(x), contiguous."""
    return call.finish(*_computed(call, kernels.forward, (x,), 1, kind)) if runs_triton(x) else None


def backward(call: RecipeBuilder, dy: Operand, x: Operand, kind: str) -> Recipe | None:
    """dx = dy · act'(x), contiguous."""
    return call.finish(*_computed(call, kernels.backward, (dy, x), 1, kind)) if runs_triton(x) else None


def gated_forward(call: RecipeBuilder, gate: Operand, up: Operand, kind: str) -> Recipe | None:
    """act(gate) · up, contiguous."""
    return call.finish(*_computed(call, kernels.gated_forward, (gate, up), 1, kind)) if runs_triton(gate) else None


def gated_backward(call: RecipeBuilder, dy: Operand, gate: Operand, up: Operand, kind: str) -> Recipe | None:
    """dgate and dup, both contiguous."""
    if not runs_triton(gate):
        return None
    return call.finish(*_computed(call, kernels.gated_backward, (dy, gate, up), 2, kind))
