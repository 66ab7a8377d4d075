"""The suite `matmul`: what tiling through shared memory gives, and what the library adds."""

from __future__ import annotations

import torch

from tilewright.kernels.matmul import reference
from tilewright.kernels.peers import example, generated
from tilewright.kernels.workloads import Draw, workloads
from tilewright.records.measurement import Direction
from tilewright.records.suite import Suite, Variant, Work, Workload

STEPS_BYTES = 2**30
"""The most that the products of the eager steps may take, all kept at once."""


def _operands(draw: Draw, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(m, k), draw(k, n)


def _work(itemsize: int, m: int, n: int, k: int) -> dict[Direction, Work]:
    a, b, c = m * k * itemsize, k * n * itemsize, m * n * itemsize
    return {
        "fwd": Work(a + b + c, flops=2 * m * n * k, limit="matmul"),
        "bwd": Work(2 * (a + b) + c, flops=4 * m * n * k, limit="matmul"),
    }


def _steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a[:, :, None] * b).sum(1)


def _steps_refuse(workload: Workload) -> str | None:
    m, n, k = workload.sizes
    nbytes = m * n * k * getattr(torch, workload.dtype).itemsize
    return None if nbytes <= STEPS_BYTES else f"the {m}x{k}x{n} products would take {nbytes / 2**30:.0f} GiB"


def _only_fp32(workload: Workload) -> str | None:
    return None if workload.dtype == "float32" else f"fp32 only, not {workload.dtype}: it has no matrix instructions"


SUITES = {
    "matmul": Suite(
        name="matmul",
        summary="a · b",
        reference=reference.matmul,
        workload=workloads(_operands, _work),
        variants=(
            example(
                "tilewright-triton",
                "triton",
                "kernels/matmul.py:in_triton",
                "matrix rate: one tile a program, its store not hidden",
            ),
            example(
                "tilewright-cuda",
                "cuda",
                "kernels/matmul.py:in_cuda",
                "reads of shared memory: 16 for 64 multiply-adds; no matrix units",
                directions=("fwd",),
                refuses=_only_fp32,
            ),
            generated(torch.mm, note="the library's product, called from the compiled program"),
            Variant("torch", "torch", torch.mm, "matrix rate, and the power cap"),
            Variant("eager-steps", "torch", _steps, "memory: every product is written", refuses=_steps_refuse),
        ),
        sizes=((4096, 4096, 4096), (8192, 8192, 8192)),
        sweeps={"size": tuple((n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192))},
    )
}
