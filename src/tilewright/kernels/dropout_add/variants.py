"""The suite `dropout_add`: dropout(gelu(x)) + residual at p = 0.1."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tilewright.kernels.activation import formula
from tilewright.kernels.dropout_add import drawn_by_pytorch, dropout_add, reference
from tilewright.kernels.naming import SHORT
from tilewright.kernels.peers import generated, inductor
from tilewright.records.suite import Suite, Variant, Work, Workload

P = 0.1


def workload(sizes: tuple[int, ...], dtype: str) -> Workload:
    """`sizes` is rows, columns."""
    kind: torch.dtype = getattr(torch, dtype)

    def make(device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
        x, residual = (torch.randn(sizes, dtype=kind, device=device, generator=generator) for _ in range(2))
        return x.requires_grad_(), residual.requires_grad_(), P, "gelu"

    nbytes = sizes[0] * sizes[1] * kind.itemsize
    # Backward reads x and the result's gradient and writes x's; the residual's is the result's itself.
    work = {"fwd": Work(3 * nbytes), "bwd": Work(3 * nbytes)}
    return Workload(f"{sizes[0]}x{sizes[1]} {SHORT[dtype]}", sizes, dtype, make, work)  # type: ignore[arg-type]


def ours(x: torch.Tensor, residual: torch.Tensor, p: float, kind: str) -> torch.Tensor:
    """The public function, with the activation as a plain argument."""
    return dropout_add(x, residual, p, activation=kind)


def eager(x: torch.Tensor, residual: torch.Tensor, p: float, kind: str) -> torch.Tensor:
    """The three operators of PyTorch."""
    return F.dropout(formula(x, kind), p) + residual


def draws(x: torch.Tensor, residual: torch.Tensor, p: float, kind: str) -> tuple[torch.Tensor]:
    """The mask that `eager` would draw now."""
    return (drawn_by_pytorch(formula(x.detach(), kind), p),)


SUITES = {
    "dropout_add": Suite(
        name="dropout_add",
        summary="dropout(gelu(x)) + residual",
        reference=reference.dropout_add,
        workload=workload,
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
    )
}
