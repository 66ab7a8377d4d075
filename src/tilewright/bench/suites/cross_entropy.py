"""The suite `cross_entropy`."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from tilewright.bench.peers import generated, inductor, library, no_cuda_cpp
from tilewright.bench.suites.softmax import COLUMNS
from tilewright.bench.workloads import Draw, workloads
from tilewright.kernels.cross_entropy import by_impl, cross_entropy
from tilewright.records.measurement import Direction
from tilewright.records.suite import Suite, Variant, Work

ELEMENTS = 2**29
"""Elements of the default sizes: in bf16, forward reads 1 GiB."""


def _operands(draw: Draw, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(rows, columns), draw.integers(columns, rows)


def _work(itemsize: int, rows: int, columns: int) -> dict[Direction, Work]:
    nbytes = rows * columns * itemsize
    # Forward reads the logits and the targets; backward reads them again and writes the logits' gradient.
    return {"fwd": Work(nbytes + 8 * rows), "bwd": Work(2 * nbytes + 8 * rows)}


def _torch(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, target)


def _in_steps(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (torch.logsumexp(logits, -1) - logits.gather(1, target[:, None])[:, 0]).mean()


SUITES = {
    "cross_entropy": Suite(
        name="cross_entropy",
        summary="mean of log Σⱼ exp(xⱼ) - x[target], over rows",
        reference=_torch,
        workload=workloads(_operands, _work),
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
            Variant("eager", "torch", _in_steps, note="log-sum-exp in steps: 4NM values and more"),
            generated(_torch, note="writes log-softmax and reads it again"),
            inductor(_torch, note="one or two reads, by the row's length"),
            # It writes the gradient over the logits, in forward; a caller who keeps them pays for the copy.
            library(
                "liger",
                "liger_kernel.ops.cross_entropy:LigerCrossEntropyFunction",
                lambda found, logits, target: found.apply(logits.clone(), target, None)[0],
                note="gradient in forward, over a copy of the logits",
            ),
            library(
                "quack",
                "quack.cross_entropy:cross_entropy",
                lambda found, logits, target: found(logits, target, reduction="mean"),
                note="clusters to 16 blocks, CuTe DSL",
            ),
        ),
        sizes=tuple((ELEMENTS // columns, columns) for columns in COLUMNS),
        sources=("kernels/cross_entropy",),
        sweeps={"columns": tuple((ELEMENTS // columns, columns) for columns in (2**power for power in range(6, 21)))},
    )
}
