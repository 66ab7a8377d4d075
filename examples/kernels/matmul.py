"""c = a · b, tiled through shared memory, twice: in Triton (here) and in CUDA C++ (`matmul.cu`).

    tilewright bench matmul
    tilewright kernel matmul 4096x4096x4096 --impl tilewright-triton --on h200

Triton: a program owns a tile of c. For every DEPTH of K it loads a tile of a and one of b, which the compiler
prefetches into shared memory, and multiplies them on the matrix units. Programs are numbered so that those at work
at one time share rows of a and columns of b in L2. fp32 is multiplied as fp32 (`ieee`), not as tf32.

Limit: the matrix rate. bf16 on an H200: 607 TFLOP/s at 4096³ (cuBLAS 779); fp32: 43 (51). The warps that multiply
also compute addresses and bounds of the next tile, and nothing hides a tile's last store.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.bench.peers import generated, no_cuda_cpp
from tilewright.bench.workloads import Draw, workloads
from tilewright.emit.triton_arithmetic import rounded
from tilewright.kernels.device import current
from tilewright.launch import nvrtc
from tilewright.records.measurement import Direction
from tilewright.records.suite import Suite, Variant, Work, Workload

SOURCE = Path(__file__).with_suffix(".cu")
CUDA_TILE, CUDA_THREADS = 128, 256
"""As in `matmul.cu`."""
STEPS_BYTES = 2**30
"""The most that the products of the eager steps may take, all kept at once."""
GROUP = tl.constexpr(8)
"""Rows of tiles that are walked together."""
PART = tl.constexpr(64)
"""Depth that is summed apart in fp32: the error of a long sum stays near the library's. With parts of 256 one of
64 sums over 1000 products was 5 ulp off."""


@triton.jit
def _add_step(total, a, b, row, column, start, m, n, k, a_stride, b_stride, DEPTH: tl.constexpr):
    """total + a[row, start : start + DEPTH] · b[start : start + DEPTH, column]"""
    at = start + tl.arange(0, DEPTH)
    inside = at < k
    from_a = tl.load(a + row[:, None] * a_stride + at[None, :], (row < m)[:, None] & inside[None, :], other=0.0)
    from_b = tl.load(
        b + at.to(tl.int64)[:, None] * b_stride + column[None, :], inside[:, None] & (column < n)[None, :], other=0.0
    )
    return tl.dot(from_a, from_b, total, input_precision="ieee")


@triton.jit
def _matmul(a, b, c, m, n, k, a_stride, b_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    tile = tl.program_id(0)
    rows, columns = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    group = tile // (GROUP * columns)
    height = tl.minimum(rows - group * GROUP, GROUP)
    inside = tile - group * GROUP * columns
    row = ((group * GROUP + inside % height) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (inside // height * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if c.dtype.element_ty == tl.float32:
        for first in range(0, k, PART):
            part = tl.zeros([ROWS, COLUMNS], tl.float32)
            for step in tl.static_range(0, PART, DEPTH):
                part = _add_step(part, a, b, row, column, first + step, m, n, k, a_stride, b_stride, DEPTH)
            total += part
    else:
        for start in range(0, k, DEPTH):
            total = _add_step(total, a, b, row, column, start, m, n, k, a_stride, b_stride, DEPTH)
    inside_c = (row < m)[:, None] & (column < n)[None, :]
    tl.store(c + row[:, None] * n + column[None, :], rounded(total, c.dtype.element_ty), inside_c)


def tile_of(dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows, columns and depth of a program's tile."""
    return (64, 64, 16) if dtype == torch.float32 else (128, 256, 64)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = (matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in (a, b))
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    rows, columns, depth = tile_of(a.dtype)
    fp32 = a.dtype == torch.float32
    if c.numel():
        with current(a):
            _matmul[(triton.cdiv(m, rows) * triton.cdiv(n, columns),)](
                a, b, c, m, n, k, a.stride(0), b.stride(0),
                ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=4 if fp32 else 8, num_stages=2 if fp32 else 3,
            )  # fmt: skip
    return c


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return _product(a, b)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        a, b = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return _product(gradient, b.t()) if needs[0] else None, _product(a.t(), gradient) if needs[1] else None


def in_triton(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] · b [K, N], fp32, bf16 or fp16, on a GPU or in Triton's interpreter; sums in fp32."""
    product: torch.Tensor = _Matmul.apply(a, b)
    return product


def in_cuda(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] · b [K, N] in fp32 on a GPU; made contiguous if they are not. No gradient."""
    a, b = a.detach().contiguous(), b.detach().contiguous()
    c = a.new_empty(len(a), b.shape[1])
    blocks = -(-c.shape[0] // CUDA_TILE) * -(-c.shape[1] // CUDA_TILE)
    with current(a):
        built = nvrtc.kernel(SOURCE, "matmul", "PPPqqq", device=a.device.index, threads=CUDA_THREADS)
        built((blocks,), a.data_ptr(), b.data_ptr(), c.data_ptr(), *c.shape, a.shape[1])
    return c


# ---------------------------------------------------------------- the suite


def formula(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """c[i, j] = Σ a[i, k] b[k, j], in the dtype that comes in."""
    return torch.einsum("ik,kj->ij", a, b)


def operands(draw: Draw, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(m, k), draw(k, n)


def work(itemsize: int, m: int, n: int, k: int) -> dict[Direction, Work]:
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
        reference=formula,
        workload=workloads(operands, work),
        variants=(
            Variant("tilewright-triton", "triton", in_triton, "matrix rate: one tile a program, its store not hidden"),
            Variant(
                "tilewright-cuda",
                "cuda",
                in_cuda,
                "reads of shared memory: 16 for 64 multiply-adds; no matrix units",
                directions=("fwd",),
                refuses=lambda workload: no_cuda_cpp(workload) or _only_fp32(workload),
            ),
            generated(torch.mm, note="the library's product, called from the compiled program"),
            Variant("torch", "torch", torch.mm, "matrix rate, and the power cap"),
            Variant("eager-steps", "torch", _steps, "memory: every product is written", refuses=_steps_refuse),
        ),
        sizes=((4096, 4096, 4096), (8192, 8192, 8192)),
        sweeps={"size": tuple((n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192))},
    )
}
