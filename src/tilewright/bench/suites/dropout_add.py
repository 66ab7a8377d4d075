"""The suite `dropout_add`: dropout(gelu(x)) + residual at p = 0.1."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tilewright.bench.peers import generated, inductor
from tilewright.bench.workloads import Draw, workloads
from tilewright.kernels.activation import formula
from tilewright.kernels.dropout_add import drawn_by_pytorch, dropout_add
from tilewright.records.measurement import Direction
from tilewright.records.sources import GENERATED
from tilewright.records.suite import Suite, Variant, Work

P = 0.1


def _operands(draw: Draw, rows: int, columns: int) -> tuple[Any, ...]:
    return draw(rows, columns), draw(rows, columns), P, "gelu"


def _work(itemsize: int, rows: int, columns: int) -> dict[Direction, Work]:
    nbytes = rows * columns * itemsize
    # Backward reads x and the result's gradient and writes x's; the residual's is the result's itself.
    return {"fwd": Work(3 * nbytes), "bwd": Work(3 * nbytes)}


def ours(x: torch.Tensor, residual: torch.Tensor, p: float, kind: str) -> torch.Tensor:
    """The public function, with the activation as a plain argument."""
    return dropout_add(x, residual, p, activation=kind)


def eager(x: torch.Tensor, residual: torch.Tensor, p: float, kind: str) -> torch.Tensor:
    """The three operators of PyTorch."""
    return F.dropout(formula(x, kind), p) + residual


def masked(x: torch.Tensor, residual: torch.Tensor, p: float, kind: str, mask: torch.Tensor) -> torch.Tensor:
    """The formula for a given mask, bool, of x's shape."""
    return formula(x, kind) * mask / (1.0 - p) + residual


def draws(x: torch.Tensor, residual: torch.Tensor, p: float, kind: str) -> tuple[torch.Tensor]:
    """The mask that `eager` would draw now."""
    return (drawn_by_pytorch(formula(x.detach(), kind), p),)


SUITES = {
    "dropout_add": Suite(
        name="dropout_add",
        summary="dropout(gelu(x)) + residual",
        reference=masked,
        workload=workloads(_operands, _work),
        variants=(
            Variant("tilewright", "triton", ours, "instructions: ten Philox rounds, and memory close behind"),
            Variant("eager", "torch", eager, "memory, three kernels and a stored mask"),
            generated(eager, note="instructions: the ten Philox rounds of eager's mask"),
            inductor(
                eager,
                note="instructions: one Philox call an element, and another mask",
                unverified="it draws another mask",
            ),
        ),
        sizes=((16384, 16384),),
        draws=draws,
        sources=("kernels/dropout_add", *GENERATED),
        is_generated=True,
    )
}
