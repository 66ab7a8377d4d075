"""The suite `weighted_sum`."""

from __future__ import annotations

import torch

from tilewright.kernels.naming import SHORT
from tilewright.kernels.peers import example, generated, inductor
from tilewright.kernels.weighted_sum import reference, weighted_sum
from tilewright.records.suite import Suite, Variant, Work, Workload


def workload(sizes: tuple[int, ...], dtype: str) -> Workload:
    """`sizes` is rows, columns."""
    rows, columns = sizes
    kind: torch.dtype = getattr(torch, dtype)

    def make(device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(rows, columns, dtype=kind, device=device, generator=generator)
        w = torch.randn(columns, dtype=kind, device=device, generator=generator)
        return x.requires_grad_(), w.requires_grad_()

    matrix = rows * columns * kind.itemsize
    forward = Work(matrix + (rows + columns) * kind.itemsize, 2 * rows * columns, "read")
    backward = Work(2 * matrix + (rows + 2 * columns) * kind.itemsize, 3 * rows * columns)
    work = {"fwd": forward, "bwd": backward}
    return Workload(f"{rows}x{columns} {SHORT[dtype]}", sizes, dtype, make, work)  # type: ignore[arg-type]


SUITES = {
    "weighted_sum": Suite(
        name="weighted_sum",
        summary="Σ_d x[n, d]·w[d]",
        reference=reference.weighted_sum,
        workload=workload,
        variants=(
            Variant("tilewright", "triton", weighted_sum, "memory; at 1000x512 the latency of two dependent reads"),
            example(
                "tilewright-16x64",
                "triton",
                "kernels/weighted_sum.py:weighted_sum",
                "the textbook tiles: at 1000x512 63 programs for 132 multiprocessors, eight steps one after another",
                directions=("fwd",),
            ),
            Variant("torch", "torch", torch.matmul, "memory: cuBLAS's matrix-vector product"),
            Variant("eager", "torch", reference.weighted_sum, "memory: the product is written and read again"),
            generated(reference.weighted_sum, note="memory"),
            inductor(reference.weighted_sum, note="memory; backward reads and writes in separate kernels"),
        ),
        sizes=((1000, 512), (16384, 16384)),
        sweeps={"columns": tuple((2**28 // columns, columns) for columns in (2**k for k in range(8, 19)))},
    )
}
