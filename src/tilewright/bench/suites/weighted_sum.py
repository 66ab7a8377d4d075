"""The suite `weighted_sum`."""

from __future__ import annotations

import torch

from tilewright.bench.peers import example, generated, inductor
from tilewright.bench.workloads import Draw, workloads
from tilewright.kernels.weighted_sum import weighted_sum
from tilewright.records.measurement import Direction
from tilewright.records.sources import GENERATED
from tilewright.records.suite import Suite, Variant, Work


def _operands(draw: Draw, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(rows, columns), draw(columns)


def _work(itemsize: int, rows: int, columns: int) -> dict[Direction, Work]:
    matrix = rows * columns * itemsize
    return {
        "fwd": Work(matrix + (rows + columns) * itemsize, 2 * rows * columns, "read"),
        "bwd": Work(2 * matrix + (rows + 2 * columns) * itemsize, 3 * rows * columns),
    }


def _in_steps(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w).sum(-1)


SUITES = {
    "weighted_sum": Suite(
        name="weighted_sum",
        summary="Σ_d x[n, d]·w[d]",
        reference=_in_steps,
        workload=workloads(_operands, _work),
        variants=(
            Variant("tilewright", "triton", weighted_sum, "memory; at 1000x512 latency"),
            example(
                "tilewright-16x64",
                "triton",
                "kernels/weighted_sum.py:weighted_sum",
                "the textbook tiles: at 1000x512 63 programs for 132 multiprocessors, eight steps one after another",
                directions=("fwd",),
            ),
            Variant("torch", "torch", torch.matmul, "memory: cuBLAS's matrix-vector product"),
            Variant("eager", "torch", _in_steps, "memory: the product is written and read again"),
            generated(_in_steps, note="memory"),
            inductor(_in_steps, note="memory; backward reads and writes in separate kernels"),
        ),
        sizes=((1000, 512), (16384, 16384)),
        sources=("kernels/weighted_sum", *GENERATED),
        is_generated=True,
        sweeps={"columns": tuple((2**28 // columns, columns) for columns in (2**k for k in range(8, 19)))},
    )
}
