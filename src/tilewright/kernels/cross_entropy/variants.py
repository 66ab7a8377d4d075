"""The suite `cross_entropy`."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from tilewright.kernels.cross_entropy import by_impl, cross_entropy, reference
from tilewright.kernels.peers import generated, inductor, library, no_cuda_cpp
from tilewright.kernels.softmax.variants import COLUMNS, SHORT
from tilewright.records.suite import Suite, Variant, Work, Workload

ELEMENTS = 2**29
"""Of the default sizes: in bf16, forward reads 1 GiB."""


def workload(sizes: tuple[int, ...], dtype: str) -> Workload:
    """`sizes` is rows, classes."""
    rows, columns = sizes
    kind: torch.dtype = getattr(torch, dtype)

    def make(device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.randn(rows, columns, dtype=kind, device=device, generator=generator)
        target = torch.randint(columns, (rows,), device=device, generator=generator)
        return logits.requires_grad_(), target

    nbytes = rows * columns * kind.itemsize
    # Forward reads the logits and the targets; backward reads them again and writes the logits' gradient.
    work = {"fwd": Work(nbytes + 8 * rows), "bwd": Work(2 * nbytes + 8 * rows)}
    return Workload(f"{rows}x{columns} {SHORT[dtype]}", sizes, dtype, make, work)  # type: ignore[arg-type]


def _torch(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, target)


def _liger(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    # It writes the gradient over the logits, in forward; a caller who keeps them pays for the copy.
    loss: torch.Tensor = LigerCrossEntropyFunction.apply(logits.clone(), target, None)[0]
    return loss


def _quack(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    from quack.cross_entropy import cross_entropy as quack_cross_entropy

    loss: torch.Tensor = quack_cross_entropy(logits, target, reduction="mean")
    return loss


SUITES = {
    "cross_entropy": Suite(
        name="cross_entropy",
        summary="mean of log Σⱼ exp(xⱼ) - x[target], over rows",
        reference=reference.cross_entropy,
        workload=workload,
        variants=(
            Variant("tilewright", "cuda", cross_entropy, note="logits once, maximum and sum together: bandwidth"),
            Variant(
                "tilewright-triton",
                "triton",
                functools.partial(by_impl, impl="triton"),
                note="logits once; rows of odd lengths by elements",
            ),
            Variant(
                "tilewright-cuda",
                "cuda",
                functools.partial(by_impl, impl="cuda"),
                note="logits once, vectors at any row length",
                refuses=no_cuda_cpp,
            ),
            Variant("torch", "torch", _torch, note="writes log-softmax and reads it again"),
            Variant("eager", "torch", reference.cross_entropy, note="log-sum-exp in steps: 4NM values and more"),
            generated(_torch, note="writes log-softmax and reads it again"),
            inductor(_torch, note="one or two reads, by the row's length"),
            library("liger", "liger_kernel", _liger, note="gradient in forward, over a copy of the logits"),
            library("quack", "quack", _quack, note="clusters to 16 blocks, CuTe DSL"),
        ),
        sizes=tuple((ELEMENTS // columns, columns) for columns in COLUMNS),
        sweeps={"columns": tuple((ELEMENTS // columns, columns) for columns in (2**power for power in range(6, 21)))},
    )
}
