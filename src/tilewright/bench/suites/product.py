"""The suite `product`: a product of fp32 on 16-bit matrix units, beside cuBLAS's."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.bench.peers import generated, inductor
from tilewright.bench.workloads import Draw, workloads
from tilewright.kernels.product import by_library, cuda, product
from tilewright.records.measurement import Direction
from tilewright.records.suite import Suite, Variant, Work, Workload

SIZES = (
    (4096, 4096, 4096),
    (1024, 8192, 8192),
    (4096, 3072, 768),
    (4096, 768, 3072),
    (1024, 1024, 1024),
    (512, 512, 512),
)
"""M, N, K of y [M, N] = x [M, K] · weight [N, K]ᵀ + bias [N]."""


def _operands(draw: Draw, m: int, n: int, k: int) -> tuple[Any, ...]:
    return draw(m, k), draw(n, k, std=k**-0.5).mT, draw(n)


def _work(itemsize: int, m: int, n: int, k: int) -> dict[Direction, Work]:
    matrices, flops = m * k + n * k + n, 2 * m * n * k
    return {
        "fwd": Work((matrices + m * n) * itemsize, flops=flops, limit="matmul"),
        "bwd": Work((2 * matrices + m * n) * itemsize, flops=2 * flops, limit="matmul"),
    }


def _refuses(workload: Workload) -> str | None:
    m, n, k = workload.sizes
    if not torch.cuda.is_available():
        return "no GPU"
    with torch.device("cuda"):
        return cuda.refuses(torch.empty(1).expand(m, k), torch.empty(1).expand(k, n))


SUITES = {
    "product": Suite(
        name="product",
        summary="x · weightᵀ + bias in fp32",
        reference=by_library,
        workload=workloads(_operands, _work),
        variants=(
            Variant("tilewright-cuda", "cuda", product, "reads of shared memory", refuses=_refuses),
            Variant("eager", "library", by_library, "the multiply-adds of fp32"),
            generated(by_library, note="the library's product, or tilewright's where it is faster"),
            inductor(by_library, note="the library's product"),
        ),
        sizes=SIZES,
        dtypes=("float32",),
        sources=("kernels/product",),
    )
}
