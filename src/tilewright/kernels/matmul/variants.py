"""The suite `matmul`: what tiling through shared memory gives, and what the library adds."""

from __future__ import annotations

import torch

from tilewright.kernels.matmul import reference
from tilewright.kernels.naming import SHORT
from tilewright.kernels.peers import example, generated
from tilewright.records.suite import Suite, Variant, Work, Workload

STEPS_BYTES = 2**30
"""The most that the products of the eager steps may take, all kept at once."""


def workload(sizes: tuple[int, ...], dtype: str) -> Workload:
    """`sizes` is M, N, K."""
    m, n, k = sizes
    kind: torch.dtype = getattr(torch, dtype)

    def make(device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.randn(m, k, dtype=kind, device=device, generator=generator)
        b = torch.randn(k, n, dtype=kind, device=device, generator=generator)
        return a.requires_grad_(), b.requires_grad_()

    a, b, c = m * k * kind.itemsize, k * n * kind.itemsize, m * n * kind.itemsize
    work = {
        "fwd": Work(a + b + c, flops=2 * m * n * k, limit="matmul"),
        "bwd": Work(2 * (a + b) + c, flops=4 * m * n * k, limit="matmul"),
    }
    return Workload(f"{m}x{n}x{k} {SHORT[dtype]}", sizes, dtype, make, work)  # type: ignore[arg-type]


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
        workload=workload,
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
