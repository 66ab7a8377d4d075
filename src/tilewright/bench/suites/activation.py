"""The suites `gelu` and `swiglu`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

from tilewright.bench.peers import example, generated, inductor, library
from tilewright.bench.workloads import Draw, workloads
from tilewright.kernels.activation import gelu, swiglu
from tilewright.records.measurement import Direction
from tilewright.records.sources import GENERATED
from tilewright.records.suite import Suite, Variant, Work, Workload

FULL = (16384, 16384)
"""512 MiB of 16-bit numbers: 1 GiB of traffic for one read and one write."""


def _workloads(tensors: int, fwd: int, bwd: int) -> Callable[[tuple[int, ...], str], Workload]:
    """Workloads of `tensors` random operands; `fwd` and `bwd` are the numbers of tensors that a direction must move."""

    def operands(draw: Draw, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
        return tuple(draw(rows, columns) for _ in range(tensors))

    def work(itemsize: int, rows: int, columns: int) -> dict[Direction, Work]:
        nbytes = rows * columns * itemsize
        return {"fwd": Work(fwd * nbytes), "bwd": Work(bwd * nbytes)}

    return workloads(operands, work)


def _no_fp64(workload: Workload) -> str | None:
    return "not in float64" if workload.dtype == "float64" else None


def _gelu_in_steps(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


SUITES = {
    "gelu": Suite(
        name="gelu",
        summary="x·Φ(x)",
        reference=F.gelu,
        workload=_workloads(1, fwd=2, bwd=3),
        variants=(
            Variant("tilewright", "triton", gelu, "memory"),
            example("tilewright-cuda", "cuda", "kernels/gelu.py:gelu", "memory: by hand in CUDA C++", refuses=_no_fp64),
            example(
                "tilewright-triton",
                "triton",
                "kernels/gelu.py:in_triton",
                "memory: by hand in Triton",
                refuses=_no_fp64,
            ),
            Variant("torch", "torch", F.gelu, "instructions in 16 bits: the exact erf"),
            Variant("eager", "torch", _gelu_in_steps, "memory, five kernels: nine reads and writes more"),
            generated(F.gelu, note="memory"),
            inductor(F.gelu, note="instructions in 16 bits: the exact erf"),
        ),
        sizes=(FULL,),
        sources=("kernels/activation.py", *GENERATED),
        is_generated=True,
        sweeps={"sizes": tuple((2**k, 2**k) for k in range(8, 15))},
    ),
    "swiglu": Suite(
        name="swiglu",
        summary="silu(gate)·up",
        reference=_swiglu,
        workload=_workloads(2, fwd=3, bwd=5),
        variants=(
            Variant("tilewright", "triton", swiglu, "memory"),
            Variant("eager", "torch", _swiglu, "memory, two kernels"),
            generated(_swiglu, note="memory"),
            inductor(_swiglu, note="memory"),
            # Its backward writes the gradients over its inputs, which may not be called twice.
            library(
                "liger",
                "liger_kernel.ops.swiglu:LigerSiLUMulFunction",
                lambda found, gate, up: found.apply(gate, up),
                note="memory",
                directions=("fwd",),
            ),
        ),
        sizes=((16384, 11008), FULL),
        sources=("kernels/activation.py", *GENERATED),
        is_generated=True,
    ),
}
