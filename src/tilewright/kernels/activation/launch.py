"""Launches of the Triton activations: rows, elements of a program, grid."""

from __future__ import annotations

from typing import Any

import torch
import triton

from tilewright.kernels.activation import triton as kernels
from tilewright.kernels.activation.rows import Rows, rows_of
from tilewright.kernels.device import current
from tilewright.kernels.launches import launch

BLOCK = 1024
"""Elements a program moves of each tensor: one vector of 16 bytes for each of 128 threads in 16 bits."""
WARPS = 4


def _run(kernel: Any, rows: Rows, results: list[torch.Tensor], kind: str) -> None:
    block = min(BLOCK, triton.next_power_of_2(rows.columns))
    programs = rows.count * triton.cdiv(rows.columns, block)
    with current(rows.tensors[0]):
        launch(
            kernel, (programs,),
            *rows.tensors, *results, rows.columns, *rows.strides,
            KIND=kind, PRECISE=results[0].dtype == torch.float32, BLOCK=block, FLAT=rows.count == 1, num_warps=WARPS,
        )  # fmt: skip


def _computed(kernel: Any, tensors: tuple[torch.Tensor, ...], count: int, kind: str) -> list[torch.Tensor]:
    """`count` new contiguous tensors like the first of `tensors`, filled by `kernel`."""
    first = tensors[0]
    results = [torch.empty(first.shape, dtype=first.dtype, device=first.device) for _ in range(count)]
    if first.numel():
        _run(kernel, rows_of(*tensors), results, kind)
    return results


def forward(x: torch.Tensor, kind: str) -> torch.Tensor:
    """act(x), contiguous."""
    return _computed(kernels.forward, (x,), 1, kind)[0]


def backward(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """dx = dy · act'(x), contiguous."""
    return _computed(kernels.backward, (dy, x), 1, kind)[0]


def gated_forward(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """act(gate) · up, contiguous."""
    return _computed(kernels.gated_forward, (gate, up), 1, kind)[0]


def gated_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup), both contiguous."""
    dgate, dup = _computed(kernels.gated_backward, (dy, gate, up), 2, kind)
    return dgate, dup
