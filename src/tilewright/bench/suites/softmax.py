"""The suites `softmax` and `log_softmax`."""

from __future__ import annotations

import torch

from tilewright.bench.peers import example, generated, inductor, library
from tilewright.bench.workloads import Draw, workloads
from tilewright.kernels.softmax import log_softmax, softmax
from tilewright.records.measurement import Direction
from tilewright.records.sources import GENERATED
from tilewright.records.suite import Suite, Variant, Work, Workload

ELEMENTS = 2**28
"""Elements of the default sizes: in bf16, forward moves 1 GiB."""
COLUMNS = (256, 1024, 4096, 5000, 8192, 16384, 32768, 50257, 65536, 131072, 262144)
LONGEST_LOOP = 512 * 1024
"""Elements up to which a loop over columns in Python is measured."""
LONGEST_IN_TRITON = 16384
"""Columns of a row that the Triton example takes."""


def _operands(draw: Draw, rows: int, columns: int) -> tuple[torch.Tensor]:
    return (draw(rows, columns),)


def _work(itemsize: int, rows: int, columns: int) -> dict[Direction, Work]:
    nbytes = rows * columns * itemsize
    # Backward reads the result and its gradient, and writes the input's.
    return {"fwd": Work(2 * nbytes), "bwd": Work(3 * nbytes)}


def _torch(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _torch_log(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, -1)


def _log_in_steps(x: torch.Tensor) -> torch.Tensor:
    below = x - x.amax(-1, keepdim=True)
    return below - below.exp().sum(-1, keepdim=True).log()


def _small(workload: Workload) -> str | None:
    rows, columns = workload.sizes
    return None if rows * columns <= LONGEST_LOOP else f"{7 * columns + 5} kernel launches a call"


def _long(workload: Workload) -> str | None:
    return None if workload.sizes[1] <= LONGEST_IN_TRITON else f"a program holds up to {LONGEST_IN_TRITON} columns"


_SIZES = tuple((ELEMENTS // columns, columns) for columns in COLUMNS)
_SWEEPS = {
    "columns": tuple((ELEMENTS // columns, columns) for columns in (2**power for power in range(6, 21))),
    "reference": ((100, 5000),),
}
SUITES = {
    "softmax": Suite(
        name="softmax",
        summary="yᵢ = exp(xᵢ - max x) / Σⱼ exp(xⱼ - max x), along rows",
        reference=_torch,
        workload=workloads(_operands, _work),
        variants=(
            Variant("tilewright", "cuda", softmax, note="one trip through HBM: bandwidth"),
            Variant("torch", "torch", _torch, note="reads long rows twice"),
            example("eager", "torch", "kernels/softmax.py:steps", "five kernels: 8NM + 4N values through memory"),
            example(
                "tilewright-triton",
                "triton",
                "claims/triton_kernels.py:softmax",
                "a program a row",
                directions=("fwd",),
                refuses=_long,
            ),
            example(
                "online-loop",
                "torch",
                "kernels/softmax.py:online_loop",
                "7M + 5 launches",
                directions=("fwd",),
                refuses=_small,
            ),
            generated(_torch, note="the row is read again where a program does not hold it"),
            inductor(_torch, note="one or two reads, by the row's length"),
            library(
                "liger",
                "liger_kernel.ops.softmax:LigerSoftmaxFunction",
                lambda found, x: found.apply(x),
                note="a program a row; to 65536 columns",
            ),
            library(
                "quack", "quack.softmax:softmax", lambda found, x: found(x), note="clusters to 16 blocks, CuTe DSL"
            ),
        ),
        sizes=_SIZES,
        sweeps=_SWEEPS,
        sources=("kernels/softmax", *GENERATED),
    ),
    "log_softmax": Suite(
        name="log_softmax",
        summary="yᵢ = xᵢ - max x - log Σⱼ exp(xⱼ - max x), along rows",
        reference=_torch_log,
        workload=workloads(_operands, _work),
        variants=(
            Variant("tilewright", "cuda", log_softmax, note="one trip through HBM: bandwidth"),
            Variant("torch", "torch", _torch_log, note="reads long rows twice"),
            Variant("eager", "torch", _log_in_steps, note="six kernels: 8NM + 6N values through memory"),
            generated(_torch_log, note="the row is read again where a program does not hold it"),
            inductor(_torch_log, note="one or two reads, by the row's length"),
        ),
        sizes=_SIZES,
        sweeps=_SWEEPS,
        sources=("kernels/softmax", *GENERATED),
    ),
}
